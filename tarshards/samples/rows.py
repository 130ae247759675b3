"""Rows of text, JSON lines and CSV (RFC 4180), for all tools that make samples from rows.

A wrong row is replaced by an error, and reading continues; damage of the file comes as the last error. Each has the
number, from 1, of the line where it begins.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from typing import Any, BinaryIO

from tarshards.errors import DecodeError, OpenError, SampleError, TarshardsError
from tarshards.storage.compression import MAX_HELD

csv.field_size_limit(MAX_HELD)  # for the process: the default limit of 128 KiB is too small for texts


def csv_rows(file: BinaryIO, delimiter: str) -> Iterator[tuple[int, list[str] | TarshardsError]]:
    r"""Yield the cells of each row of CSV; a blank line has none.

    >>> from io import BytesIO
    >>> list(csv_rows(BytesIO(b'a,b\r\n"x,\ny",z\n'), ","))
    [(1, ['a', 'b']), (2, ['x,\ny', 'z'])]
    """
    lines = TextIOWrapper(file, "utf-8", "surrogateescape", newline="\n")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield line, SampleError(str(error))
            continue
        except (OpenError, DecodeError) as error:
            yield line, error
            return
        if row is None:
            return
        text = "".join(row)
        yield line, row if text.isascii() or _is_unicode(text) else DecodeError("not UTF-8")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_rows(text: Iterable[bytes], *, allow_nan: bool = False) -> Iterator[tuple[int, Any]]:
    r"""Yield the value of each line of JSON that is not blank; the errors are those of ``parse_json``.

    >>> list(json_rows([b'{"a": 1}\n', b'\n', b'[2]\n']))
    [(1, {'a': 1}), (3, [2])]
    """
    number = 0
    try:
        for number, data in enumerate(text, 1):
            found: Any
            try:
                line = data.decode().strip()
                if not line:
                    continue
                found = parse_json(line, allow_nan=allow_nan)
            except UnicodeDecodeError:
                found = DecodeError("not UTF-8")
            except (ValueError, RecursionError) as error:
                found = SampleError(f"not JSON: {error}")
            yield number, found
    except (OpenError, DecodeError) as error:
        yield number + 1, error


def raised(error: TarshardsError, origin: str) -> TarshardsError:
    """Return the error of a row with its *origin*, unless it is an error of the file."""
    return error if error.url is not None else type(error)(error.reason, url=origin)


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Parse JSON; raise ValueError for malformed JSON, also NaN unless allowed, and an object with a duplicate name."""
    constant = None if allow_nan else _constant
    return json.loads(text, object_pairs_hook=_object, parse_constant=constant, parse_float=_float)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} occurs twice in an object")
    return items


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not allowed in JSON")


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is out of the range of numbers")
    return number
