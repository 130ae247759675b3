"""Samples <-> JSON lines that preserve text and bytes.

Each line is an object with ``__key__`` and the fields. Number and JSON fields (cls, json and similar) are written as
JSON values, text fields (txt, text, transcript) as strings, and all others, and text that is not UTF-8, as
``{"base64": "..."}``. When reading, any field may be a string, which is encoded as UTF-8, or ``{"base64": "..."}``,
which is decoded; but the value of a JSON field is always taken as JSON.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from typing import Any

from tarshards.errors import DecodeError, SampleError, TarshardsError
from tarshards.samples.codecs import decode_field, encode_field
from tarshards.samples.codecs.basic import INTEGERS, TEXTS
from tarshards.samples.fields import apply_terms, parse_terms
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.ledger import ErrorPolicy, Reject, error_handler, reject_or_raise
from tarshards.samples.lines import checked, located, open_text
from tarshards.samples.rows import json_rows, parse_json, raised
from tarshards.storage.location import Location

JSON = {"json", "jsn"}


def json_lines(
    samples: Iterable[Sample],
    fields: str = "*",
    *,
    binary: bool = True,
    reject: Reject | None = None,
) -> Iterator[str]:
    """Yield a line for each sample: the key and *fields*, as in ``select_fields``.

    Unless *binary*, fields that need base64 are left out. Raises DecodeError for a field that does not decode or that
    JSON cannot represent (NaN, a duplicate name in an object), or calls *reject* with the sample and the error. Raises
    ValueError for malformed *fields*.

    >>> list(json_lines([{"__key__": "a", "cls": b"7", "txt": b"hello", "jpg": b"\\xff"}]))
    ['{"__key__": "a", "cls": 7, "txt": "hello", "jpg": {"base64": "/w=="}}']
    """
    terms = parse_terms(fields)
    for sample in samples:
        try:
            names = apply_terms({name: sample[name] if is_reserved(name) else name for name in sample}, terms)
            items = [f'"__key__": {_dumps(sample["__key__"])}']
            for name, field in names.items():
                if is_reserved(name):
                    continue
                data = encode_field(field, sample[field])
                value = _value(sample, field, data)
                if value is None and binary:
                    value = _dumps({"base64": b64encode(data).decode()})
                if value is not None:
                    items.append(f"{_dumps(name)}: {value}")
        except TarshardsError as error:
            reject_or_raise(reject, sample, error)
        else:
            yield "{" + ", ".join(items) + "}"


def _value(sample: Sample, field: str, data: bytes) -> str | None:
    """Return *data* as JSON, or None for bytes that need base64."""
    kind = field.rpartition(".")[2]
    try:
        if kind in JSON:
            return _dumps(parse_json(data))
        if kind in INTEGERS:
            return _dumps(decode_field(field, data))
    except (DecodeError, ValueError, RecursionError) as error:
        raise DecodeError(getattr(error, "reason", str(error)), field=field).at(sample) from error
    try:
        return _dumps(data.decode()) if kind in TEXTS else None
    except UnicodeDecodeError:
        return None


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_json_lines(url: str | Location, *, on_error: ErrorPolicy = "raise") -> Iterator[Sample]:
    """Yield a sample for each line of *url*, a file as written by ``json_lines``, compressed or not; skip blank lines.

    Raises SampleError, which names the line, for a malformed sample or a duplicate key; *on_error* may skip it.
    """
    return checked(_read(url), error_handler(on_error))


def _read(url: str | Location) -> Iterator[Sample | TarshardsError]:
    name = Location.of(url).name
    with open_text(url) as text:
        for line, values in json_rows(text):
            origin = f"{name}: line {line}"
            try:
                yield _sample(values, origin)
            except TarshardsError as error:
                yield error


def _sample(values: Any, origin: str) -> Sample:
    """Return the sample of the *values* of a line, which may be an error."""
    if isinstance(values, TarshardsError):
        raise raised(values, origin)
    with located(origin):
        if not isinstance(values, dict) or not isinstance(values.get("__key__"), str):
            raise ValueError("each line must be an object whose __key__ is a string")
        key = values.pop("__key__")
        data = {field: _data(key, field, value) for field, value in values.items()}
    return {"__key__": key, "__url__": origin, **data}


def _data(key: str, field: str, value: Any) -> bytes:
    """Return the bytes of *field* for its JSON *value*; raise SampleError if it cannot have this value."""
    kind = field.rpartition(".")[2]
    if is_reserved(field):
        raise SampleError("not a valid field name", key=key, field=field)
    try:
        if kind in JSON:
            return _dumps(value).encode(errors="backslashreplace")
        if isinstance(value, str):
            return value.encode()
        if kind in INTEGERS and type(value) is int:
            return str(value).encode()
        if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
            return b64decode(value["base64"], validate=True)
    except (TarshardsError, ValueError) as error:
        raise SampleError(getattr(error, "reason", str(error)), key=key, field=field) from error
    wanted = 'a number, a string or {"base64": ...}' if kind in INTEGERS else 'a string or {"base64": ...}'
    raise SampleError(f"this field must be {wanted}, not {json.dumps(value)[:30]}", key=key, field=field)
