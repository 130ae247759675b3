"""Batches and errors as messages of ZeroMQ: a header in msgpack, and one frame for each array or long bytes.

A header is a map with the key "kind". A consumer sends "hello", which a feeder answers with "welcome" (identity,
instance, capacity); "make" (pass, epoch, state, rank, ranks, g), answered by "batch" or "failed"; "leave" (pass), which
ends the requests of a pass; and "status", answered by "status". Arrays are sent without a copy, in the feeder's byte
order and memory layout. Each side checks what it receives before it makes anything of it: see ``decode``.
"""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np

from tarshards import errors
from tarshards.errors import EncodeError, OpError, RemoteTraceback, TarshardsError, shortened
from tarshards.samples.codecs.registry import require
from tarshards.samples.ledger import Tally
from tarshards.samples.payloads import BatchKeys

LONG = 1 << 14  # bytes of a value that gets its own frame; a frame costs about 2 us on each side
TUPLE, ARRAY, TENSOR, BYTES = 1, 2, 3, 4  # extension types
TOGETHER = 64  # messages that are handled before it is the turn of others
DEEPEST = 32  # levels of dicts, lists and tuples; to unpack a nested tuple takes 40 KB of the C stack
ARRAYS = "biufcSUmM"  # the kinds of numpy's types that are sent
LARGEST = 1 << 28  # bytes of a header: of all that has no frame; as objects they can take 70 times as much

# What the entries of a message are, for ``_fits``.
_NATURAL = range(1 << 63)
_TEXT = (str, None)
_ERROR = {"class": str, "reason": str, "cost": str, "notes": [str, ...], "errno": (int, None)}
_ERROR |= {"url": _TEXT, "key": _TEXT, "field": _TEXT, "offset": (int, None)}
COUNTED = [each.name for each in fields(Tally) if each.type == "int"]
_TALLY = dict.fromkeys(COUNTED, int) | {"filtered": {...: int}}

#: The messages of a consumer: the entries of each kind.
REQUESTS: Mapping[str, Any] = {
    "hello": {},
    "make": {"pass": str, "epoch": _NATURAL, "state": (dict, None), "rank": _NATURAL, "ranks": _NATURAL, "g": _NATURAL},
    "leave": {"pass": str},
    "status": {},
}

#: The messages of a feeder.
ANSWERS: Mapping[str, Any] = {
    "welcome": {"identity": {...: str}, "instance": str, "capacity": range(1, 1 << 16), "threads": _NATURAL},
    "batch": {
        "pass": str,
        "g": _NATURAL,
        "counts": [_NATURAL, _NATURAL, int, (_TALLY, None)],
        "errors": [[bool, _ERROR], ...],
        "work": [float, [int, int, int, int, float]],
        "batch": object,
    },
    "failed": {"pass": str, "g": _NATURAL, "again": bool, "error": _ERROR, "traceback": str},
    "status": dict.fromkeys(("batches", "bytes", "threads", "queued"), _NATURAL) | {"seconds": float, "making": float},
}


def encode(header: dict[str, Any]) -> list[Any]:
    """Return the frames of a message; raise EncodeError for a value that cannot be sent."""
    frames: list[Any] = []
    try:
        packed = msgpack.packb(_encoded(header, frames, 0), unicode_errors="surrogatepass")
    except OverflowError as error:
        raise EncodeError(f"batches for feeding have integers of at most 64 bits: {error}") from error
    if len(packed) > LARGEST:
        raise EncodeError(f"batches for feeding have at most {LARGEST >> 20} MiB besides arrays and long bytes")
    return [packed, *frames]


def decode(frames: Sequence[Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of a message of one of *kinds*, which are ``REQUESTS`` or ``ANSWERS``.

    Its arrays use the memory of *frames*. Raises ValueError for anything else: a size, a nesting, an entry, a type of
    numbers or a shape that ``encode`` does not make.
    """
    try:
        if frames[0].buffer.nbytes > LARGEST:
            raise ValueError("it is too large")
        header: Any = _decoded(frames[0].buffer, frames, 0)
        kind = header.get("kind") if type(header) is dict else None
        if type(kind) is not str or kind not in kinds:
            raise ValueError(f"it is none of {', '.join(kinds)}")
        for name, form in kinds[kind].items():
            if name not in header or not _fits(header[name], form):
                raise ValueError(f"{kind} with {name} {shortened(header.get(name))}")
    except (msgpack.exceptions.UnpackException, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a message of tarfeed: {error}") from error
    return header


def _fits(value: Any, form: Any) -> bool:
    """Whether *value* has a *form*: a type; a range of integers; a tuple of alternatives; a list of forms, or of one
    that any number of values have; or a dict of the forms of entries, or of the form of all of them.

    >>> _fits([1, "a"], [range(2), (str, None)]), _fits(["a", 1], [str, ...]), _fits({"a": True}, {...: int})
    (True, False, False)
    """
    if isinstance(form, range):
        return type(value) is int and value in form
    if isinstance(form, tuple):
        return any(_fits(value, each) for each in form)
    if isinstance(form, list):
        forms = [form[0]] * len(value) if type(value) is list and form[1:] == [...] else form
        return type(value) is list and len(value) == len(forms) and all(map(_fits, value, forms))
    if isinstance(form, dict):
        if type(value) is not dict:
            return False
        if ... in form:
            return all(type(name) is str and _fits(each, form[...]) for name, each in value.items())
        return all(name in value and _fits(value[name], each) for name, each in form.items())
    return form is object or type(value) is form or value is form


def _encoded(value: Any, frames: list[Any], depth: int) -> Any:
    kind = type(value)
    if kind in (str, int, float, bool, type(None)):
        return value
    if depth > DEEPEST:
        raise EncodeError(f"batches for feeding have at most {DEEPEST} levels of dicts, lists and tuples")
    if kind is dict:
        return {key: _encoded(each, frames, depth + 1) for key, each in value.items()}
    if kind in (list, BatchKeys):
        return [_encoded(each, frames, depth + 1) for each in value]
    if kind is tuple:
        return _extension(TUPLE, [_encoded(each, frames, depth + 1) for each in value])
    if kind in (bytes, bytearray, memoryview):
        if len(value) < LONG:
            return bytes(value)
        frames.append(value)
        return _extension(BYTES, len(frames))
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in ARRAYS:
        array = np.require(value, requirements="C")
        frames.append(array.reshape(-1).view(np.uint8))
        return _extension(ARRAY, [len(frames), array.dtype.str, list(array.shape)])
    if kind.__module__.startswith("torch") and kind.__name__ in ("Tensor", "Parameter"):
        tensor = value.detach().cpu().contiguous()
        frames.append(tensor.reshape(-1).view(require("torch", extra="torch").uint8).numpy())
        return _extension(TENSOR, [len(frames), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    raise EncodeError(
        "batches for feeding are made of arrays, tensors, numbers, str, bytes, dicts, lists and tuples, not "
        + shortened(value)
    )


def _extension(code: int, content: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(content, unicode_errors="surrogatepass"))


def _decoded(packed: Any, frames: Sequence[Any], depth: int) -> Any:
    def extension(code: int, content: bytes) -> Any:
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        value = _decoded(content, frames, depth + 1)
        if code == TUPLE and type(value) is list:
            return tuple(value)
        number = range(1, len(frames))
        if code == BYTES and _fits(value, number):
            return frames[value].bytes
        if code in (ARRAY, TENSOR) and _fits(value, [number, str, [_NATURAL, ...]]):
            own, name, shape = value
            return (_array if code == ARRAY else _tensor)(_content(frames[own]), name, shape)
        raise ValueError(f"it has {shortened(value)} as extension {code}")

    return msgpack.unpackb(packed, ext_hook=extension, strict_map_key=False, unicode_errors="surrogatepass")


def _content(frame: Any) -> np.ndarray:
    """Return the bytes of a frame, writable and aligned; a short frame may begin at any address in a buffer."""
    array = np.frombuffer(frame.buffer, np.uint8)
    return array.copy() if array.ctypes.data % 8 or not array.flags.writeable else array


def _array(content: np.ndarray, name: str, shape: list[int]) -> np.ndarray:
    if not re.fullmatch(rf"[<>|][{ARRAYS}]\d{{0,9}}(\[\d{{0,9}}\w{{1,3}}\])?", name, re.ASCII):
        raise ValueError(f"it has an array of type {shortened(name)}")
    dtype = np.dtype(name)
    _check_size(content, dtype.itemsize, shape, name)
    return content.view(dtype).reshape(shape)


def _tensor(content: np.ndarray, name: str, shape: list[int]) -> Any:
    try:
        torch = require("torch", extra="torch")
    except ImportError as error:
        raise ValueError(str(error)) from error
    dtype = getattr(torch, name, None) if re.fullmatch(r"bool|(u?int|b?float|complex)\d\w*", name, re.ASCII) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has a tensor of type {shortened(name)}")
    _check_size(content, dtype.itemsize, shape, name)
    try:
        if not content.size:  # which torch does not view as another type
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(content).view(dtype).reshape(shape)
    except (RuntimeError, OverflowError) as error:  # a type that is no view of bytes, or a shape that has no strides
        raise ValueError(str(error)) from error


def _check_size(content: np.ndarray, itemsize: int, shape: list[int], name: str) -> None:
    if not itemsize or len(shape) > 64 or math.prod(shape) * itemsize != content.size:
        raise ValueError(f"it has {content.size} bytes of type {name} for shape {shortened(shape)}")


def encoded_error(error: BaseException) -> dict[str, Any]:
    """Return an error as a dict that a message can contain."""
    kind = next(base for base in type(error).__mro__ if base.__module__ in ("tarshards.errors", "builtins"))
    given: Any = error
    if isinstance(error, OSError) and not isinstance(error, TarshardsError) and error.strerror is not None:
        reason, url = error.strerror, error.filename
    else:
        try:
            reason = given.reason if isinstance(error, TarshardsError) else str(error)
        except Exception as fault:
            reason = f"its text cannot be made: {type(fault).__name__}"
        url = getattr(error, "url", None)
    if kind is not type(error) or not isinstance(error, Exception):
        reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
    texts = {"url": url, "key": getattr(error, "key", None), "field": getattr(error, "field", None)}
    numbers = {name: getattr(error, name, None) for name in ("offset", "errno")}
    notes = getattr(error, "__notes__", ())
    return {
        "class": kind.__name__,
        "reason": reason,
        "cost": getattr(error, "cost", ""),
        "notes": [each for each in notes if type(each) is str],
        **{name: value if type(value) is str else None for name, value in texts.items()},
        **{name: value if type(value) is int else None for name, value in numbers.items()},
    }


def decoded_error(data: Mapping[str, Any], feeder: str, traceback: str = "") -> Any:
    """Return an error that a feeder sent, with *feeder* in its text.

    Its class is the nearest one of tarshards or of Python that can be made of a text; no other code runs.
    """
    origin = {name: data[name] for name in ("url", "key", "field", "offset")}
    kind = getattr(errors, data["class"], None) or getattr(builtins, data["class"], None)
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        kind = OpError
    text = f"{data['reason']} (feeder {feeder})".lstrip()
    error: BaseException
    if issubclass(kind, TarshardsError):
        error = kind(text, **origin)
        error.cost = data["cost"]
        if isinstance(error, errors.OpenError):
            error.errno = data["errno"]
    elif issubclass(kind, OSError) and data["errno"] is not None:
        error = kind(data["errno"], text, *([] if data["url"] is None else [data["url"]]))
    else:
        error = _made_of_text(kind, text)
    for note in data["notes"]:
        error.add_note(note)
    if traceback:
        error.__cause__ = RemoteTraceback(traceback)
    return error


def _made_of_text(kind: type[BaseException], text: str) -> BaseException:
    for base in kind.__mro__:
        try:
            error: BaseException = base(text)
        except TypeError:  # as UnicodeDecodeError, whose base does
            continue
        return error
    raise AssertionError("Exception takes a text")
