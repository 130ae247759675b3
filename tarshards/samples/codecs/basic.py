"""Codecs for text, numbers, JSON, msgpack, CBOR and pickle."""

from __future__ import annotations

import operator
import re
from io import BytesIO
from typing import Any

from tarshards.samples.codecs.registry import decoder, encoder, require

INTEGER = re.compile(rb"\s*([+-]?[0-9]+)\s*")


@decoder("txt", "text", "transcript")
def decode_text(data: bytes) -> str:
    """Decode UTF-8."""
    return data.decode()


@encoder("txt", "text", "transcript")
def encode_text(value: str) -> bytes:
    """Encode a str as UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"text is a str, not {type(value).__name__}")
    return value.encode()


@decoder("cls", "cls2", "class", "count", "index", "inx", "id")
def decode_integer(data: bytes) -> int:
    r"""Decode an ASCII decimal; surrounding white space is ignored.

    >>> decode_integer(b" -12\n")
    -12
    """
    if (match := INTEGER.fullmatch(data)) is None:
        raise ValueError(f"{data[:20]!r} is not a decimal integer")
    return int(match[1])


@encoder("cls", "cls2", "class", "count", "index", "inx", "id")
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

    >>> encode_json({"b": "ü", "a": None}).decode()
    '{"b": "ü", "a": null}'
    """
    import json

    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


@decoder("mp", "msg", "msgpack")
def decode_msgpack(data: bytes) -> Any:
    """Decode one msgpack object; map keys may be of any hashable type."""
    import msgpack

    return msgpack.unpackb(data, strict_map_key=False)


@encoder("mp", "msg", "msgpack")
def encode_msgpack(value: Any) -> bytes:
    """Encode one msgpack object; tuples become lists."""
    import msgpack

    return msgpack.packb(value)


@decoder("cbor")
def decode_cbor(data: bytes) -> Any:
    """Decode one CBOR object (RFC 8949)."""
    stream = BytesIO(data)
    value = require("cbor2", extra="cbor").load(stream)
    if stream.read(1):
        raise ValueError("more bytes after the CBOR object")
    return value


@encoder("cbor")
def encode_cbor(value: Any) -> bytes:
    """Encode one CBOR object in canonical form: keys and sets are sorted, since the order of a set is random."""
    return require("cbor2", extra="cbor").dumps(value, canonical=True)


@decoder("pkl", "pickle", "pyd", unsafe=True)
def decode_pickle(data: bytes) -> Any:
    """Unpickle; this runs whatever code the data name."""
    import pickle

    return pickle.loads(data)


@encoder("pkl", "pickle", "pyd")
def encode_pickle(value: Any) -> bytes:
    """Pickle with protocol 4, which every supported Python reads."""
    import pickle

    return pickle.dumps(value, protocol=4)
