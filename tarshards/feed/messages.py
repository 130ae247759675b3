"""Batches and errors as messages of ZeroMQ: a header in msgpack, and one frame for each array or long bytes.

A header is a map with the key "kind". A consumer sends "hello", which a feeder answers with "welcome" (identity,
instance, capacity); "make" (pass, epoch, state, rank, ranks, g), answered by "batch" or "failed"; "leave" (pass), which
ends the requests of a pass; and "status", answered by "status". Arrays are sent without a copy, in the feeder's byte
order and memory layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from tarshards import errors
from tarshards.errors import EncodeError, OpError, RemoteTraceback, TarshardsError, shortened
from tarshards.index.mapped_fields import BatchKeys
from tarshards.samples.codecs.registry import require

LONG = 1 << 14  # bytes of a value that gets its own frame; a frame costs about 2 us on each side
TUPLE, ARRAY, TENSOR, BYTES = 1, 2, 3, 4  # extension types


def encode(header: dict[str, Any]) -> list[Any]:
    """Return the frames of a message; raise EncodeError for a value that cannot be sent."""
    frames: list[Any] = []
    try:
        packed = msgpack.packb(_encoded(header, frames), unicode_errors="surrogatepass")
    except OverflowError as error:
        raise EncodeError(f"batches for feeding have integers of at most 64 bits: {error}") from error
    return [packed, *frames]


def decode(frames: Sequence[Any]) -> dict[str, Any]:
    """Return the header of a message; its arrays use the memory of *frames*. Raises ValueError for anything else."""
    try:
        header = _decoded(frames[0].buffer, frames)
    except (msgpack.exceptions.UnpackException, TypeError, IndexError) as error:
        raise ValueError(f"not a message of tarfeed: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError("not a message of tarfeed: it has no kind")
    return header


def _encoded(value: Any, frames: list[Any]) -> Any:
    kind = type(value)
    if kind in (str, int, float, bool, type(None)):
        return value
    if kind is dict:
        return {key: _encoded(each, frames) for key, each in value.items()}
    if kind in (list, BatchKeys):
        return [_encoded(each, frames) for each in value]
    if kind is tuple:
        return _extension(TUPLE, [_encoded(each, frames) for each in value])
    if kind in (bytes, bytearray, memoryview):
        if len(value) < LONG:
            return bytes(value)
        frames.append(value)
        return _extension(BYTES, len(frames))
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSUmM":
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


def _decoded(packed: Any, frames: Sequence[Any]) -> Any:
    def extension(code: int, content: bytes) -> Any:
        value = _decoded(content, frames)
        if code == TUPLE:
            return tuple(value)
        if code == BYTES:
            return frames[value].bytes
        number, dtype, shape = value
        if code == TENSOR:
            torch = require("torch", extra="torch")
            return torch.from_numpy(_array(frames[number], np.dtype("u1"))).view(getattr(torch, dtype)).reshape(shape)
        return _array(frames[number], np.dtype(dtype)).reshape(shape)

    return msgpack.unpackb(packed, ext_hook=extension, strict_map_key=False, unicode_errors="surrogatepass")


def _array(frame: Any, dtype: np.dtype) -> np.ndarray:
    """Return the content of a frame, writable and aligned; a short frame may begin at any address in a buffer."""
    array = np.frombuffer(frame.buffer, np.uint8)
    if array.ctypes.data % 8 or not array.flags.writeable:
        array = array.copy()
    return array.view(dtype)


def encoded_error(error: BaseException) -> dict[str, Any]:
    """Return an error as a dict that a message can contain."""
    kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ in ("tarshards.errors", "builtins"))
    origin = {name: getattr(error, name, None) for name in ("url", "key", "field", "offset")}
    reason = error.reason if isinstance(error, TarshardsError) else f"{type(error).__name__}: {error}"
    return {"class": kind, "reason": reason, "cost": getattr(error, "cost", ""), **origin}


def decoded_error(data: dict[str, Any], feeder: str, traceback: str = "") -> TarshardsError:
    """Return an error that a feeder sent, with *feeder* in its text; an error that is not ours becomes an OpError."""
    kind = getattr(errors, data["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, TarshardsError)):
        kind = OpError
    origin = {name: data[name] for name in ("url", "key", "field", "offset")}
    error = kind(f"{data['reason']} (feeder {feeder})", **origin)
    error.cost = data["cost"]
    if traceback:
        error.__cause__ = RemoteTraceback(traceback)
    return error
