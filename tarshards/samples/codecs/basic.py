"""Codecs for text, numbers, JSON, msgpack, CBOR and pickle."""

from __future__ import annotations

import codecs
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from io import BytesIO
from typing import Any

from tarshards.errors import shortened
from tarshards.samples.codecs.registry import decoder, encoder, require

TEXTS = ("txt", "text", "transcript")
INTEGERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
INTEGER = re.compile(rb"\s*([+-]?[0-9]+)\s*")
MARKS = {  # byte order marks and their encodings; UTF-32 before UTF-16, since its marks begin in the same way
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_MARKED = tuple(MARKS)
# Types whose values JSON, msgpack and CBOR preserve, and types of dict keys:
SCALARS: frozenset[type] = frozenset([str, int, float, bool, type(None)])
WITH_BYTES: frozenset[type] = SCALARS | {bytes}  # msgpack and CBOR, also for dict keys
NAMES: frozenset[type] = frozenset([str])  # JSON
MOST_DEPTH = 400  # depth of nested containers: the most that cbor2 reads; msgpack reads 1,024, json about 990


def encoding_of(data: bytes) -> str:
    r"""Return the encoding of a text: by its byte order mark, or UTF-8.

    >>> encoding_of("a".encode("utf-16")), encoding_of(b"\xef\xbb\xbfa"), encoding_of(b"a")
    ('utf-16', 'utf-8-sig', 'utf-8')
    """
    if not data.startswith(_MARKED):
        return "utf-8"
    return next(encoding for mark, encoding in MARKS.items() if data.startswith(mark))


@decoder(*TEXTS)
def decode_text(data: bytes) -> str:
    """Decode UTF-8, or the encoding of a byte order mark, which is removed, as in JSON."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data.decode(encoding_of(data))
    return text.removeprefix("\ufeff")


@encoder(*TEXTS)
def encode_text(value: str) -> bytes:
    """Encode a str as UTF-8; refuse a leading byte order mark, which decoding would remove."""
    if not isinstance(value, str):
        raise TypeError(f"text is a str, not {type(value).__name__}")
    if value[:1] == "\ufeff":
        raise ValueError("text that begins with a byte order mark comes back without it; give text[1:], or bytes")
    return value.encode()


def check_types(value: Any, keeps: Callable[[Any], bool] | None = None) -> None:
    """Raise TypeError for a value that would change: one with types that JSON lacks, in dicts, lists and tuples.

    With *keeps*, the codec also has bytes, dict keys of any scalar type, and the values that *keeps* accepts. Tuples
    come back as lists. Raises ValueError for containers nested more than 400 deep. A written value has no cycles.

    >>> check_types({"a": [1, None]})
    >>> check_types({"a": {7: 1}})
    Traceback (most recent call last):
    TypeError: the name 7 in a dict, of type int, would not come back as it is
    """
    scalars, names = (SCALARS, NAMES) if keeps is None else (WITH_BYTES, WITH_BYTES)
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        if scalars.issuperset(map(type, level)):
            return
        inner: list[Any] = []
        for each in level:
            kind = type(each)
            if kind in scalars:
                continue
            if kind is dict:
                for name in () if names.issuperset(map(type, each)) else each:
                    if type(name) not in names and not (keeps is not None and keeps({name: None})):
                        what = f"the name {shortened(name)} in a dict, of type {type(name).__name__}"
                        raise TypeError(f"{what}, would not come back as it is")
                inner += each.values()
            elif kind is list or kind is tuple:
                inner += each
            elif keeps is None or not keeps(each):
                raise TypeError(f"{shortened(each)}, of type {kind.__name__}, would not come back as it is")
        level = inner
    raise ValueError(f"more than {MOST_DEPTH} dicts and lists within each other, which no reader may be able to read")


@decoder(*INTEGERS)
def decode_integer(data: bytes) -> int:
    r"""Decode an ASCII decimal; surrounding white space and a byte order mark are ignored, as in text.

    >>> decode_integer(b" -12\n")
    -12
    """
    if (match := INTEGER.fullmatch(data)) is None:
        if data.startswith(_MARKED):
            return decode_integer(decode_text(data).lstrip("\ufeff").encode())
        raise ValueError(f"{data[:20]!r} is not a decimal integer")
    return int(match[1])


@encoder(*INTEGERS)
def encode_integer(value: Any) -> bytes:
    """Encode an int or a numpy integer as ASCII decimal."""
    if type(value) is int:
        return str(value).encode()
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise TypeError("expected an integer, not a bool")
    return str(operator.index(value)).encode()


@decoder("json", "jsn")
def decode_json(data: bytes) -> Any:
    """Decode JSON in UTF-8, and the extensions that Python's json accepts (NaN, UTF-16)."""
    import json

    return json.loads(data)


@encoder("json", "jsn")
def encode_json(value: Any) -> bytes:
    """Encode JSON in UTF-8, keys in the order of the dict; NaN and infinity, which JSON lacks, are refused.

    A str with an object or an array, as from ``json.dumps``, is written unchanged; any other str is refused, and so is
    a value that would change, such as a dict key that is not a str. Tuples become lists.

    >>> encode_json({"b": "ü", "a": None}).decode()
    '{"b": "ü", "a": null}'
    """
    if isinstance(value, str):
        data = value.encode()
        with suppress(ValueError):
            if isinstance(decode_json(data), dict | list):
                return data
        raise TypeError("a str in a field that is not text, and no JSON object or array; give the value, or bytes")
    text = _json_encoder()(value)
    check_types(value)
    return text.encode()


@cache
def _json_encoder() -> Callable[[Any], str]:
    import json

    return json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@decoder("mp", "msg", "msgpack")
def decode_msgpack(data: bytes) -> Any:
    """Decode one msgpack object; map keys may be of any hashable type."""
    import msgpack

    return msgpack.unpackb(data, strict_map_key=False)


@encoder("mp", "msg", "msgpack")
def encode_msgpack(value: Any) -> bytes:
    """Encode one msgpack object; tuples become lists, and other values that would change are refused."""
    import msgpack

    data: bytes = msgpack.packb(value)
    check_types(value, lambda each: _comes_back(msgpack.packb, decode_msgpack, each))
    return data


@decoder("cbor")
def decode_cbor(data: bytes) -> Any:
    """Decode one CBOR object (RFC 8949)."""
    stream = BytesIO(data)
    value = require("cbor2", extra="cbor").load(stream)
    if stream.read(1):
        raise ValueError("bytes after the end of the CBOR object")
    return value


@encoder("cbor")
def encode_cbor(value: Any) -> bytes:
    """Encode one CBOR object in canonical form: keys and sets are sorted, since the order of a set is random.

    Tuples become lists, and other values that would change are refused.
    """
    encode = partial(require("cbor2", extra="cbor").dumps, canonical=True)
    data: bytes = encode(value)
    check_types(value, lambda each: _comes_back(encode, decode_cbor, each))
    return data


def _comes_back(encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], value: Any) -> bool:
    """Return whether a value of a rare type, such as a date or a set, comes back with its type."""
    try:
        other = decode(encode(value))
    except Exception:
        return False
    if isinstance(value, dict | set | frozenset) and {*map(type, value)} != {*map(type, other)}:
        return False
    return type(value) is type(other) and bool(value == other)


@decoder("pkl", "pickle", "pyd", unsafe=True)
def decode_pickle(data: bytes) -> Any:
    """Unpickle; this runs any code in the data."""
    import pickle

    return pickle.loads(data)


@encoder("pkl", "pickle", "pyd")
def encode_pickle(value: Any) -> bytes:
    """Pickle with protocol 4, which every supported Python reads."""
    import pickle

    return pickle.dumps(value, protocol=4)
