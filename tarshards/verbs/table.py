r"""Samples -> lines of a table that preserve every byte, except a newline that ends a text, a number or a line.

Cells are separated by tabs and rows by newlines. In a cell, a backslash is written as ``\\``, tab, newline and carriage
return as ``\t``, ``\n`` and ``\r``, and any other control character or byte that is not UTF-8 as ``\xNN``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tarshards.errors import SampleError, TarshardsError
from tarshards.samples.codecs import encode_field
from tarshards.samples.codecs.basic import INTEGERS, TEXTS
from tarshards.samples.fields import Term, find_field, parse_terms, pick_field
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.ledger import Reject, reject_or_raise
from tarshards.samples.lines import escape
from tarshards.verbs.show import has_no_codec

LINES = frozenset(TEXTS + INTEGERS)  # fields that are written without a newline at their end, as are other lines


def tabulate(
    samples: Iterable[Sample],
    fields: str = "*",
    *,
    key: bool = True,
    header: bool = True,
    missing: str | None = None,
    reject: Reject | None = None,
) -> Iterator[str]:
    r"""Yield a line of column names, then one line per sample: the key and *fields*, as in ``select_fields``.

    ``*`` stands for the other fields of the first sample; a later sample with another field is an error. The cell of a
    missing field is *missing*, unescaped (``\N`` is safe, since escaping never produces it). Raises ValueError for
    *fields* that name a column twice, and for *missing* with a tab or newline. Raises SampleError for a missing field
    if *missing* is None, and for a field without a column, or calls *reject* with the sample and the error.

    >>> list(tabulate([{"__key__": "a", "cls": b"7", "txt": b"a\tb"}]))
    ['__key__\tcls\ttxt', 'a\t7\ta\\tb']
    """
    if missing is not None and re.search(r"[\t\n\r]", missing):
        raise ValueError(f"the text for missing fields cannot contain {missing!r}: it is part of a line")
    terms = parse_terms(fields)
    names = [term.name or ";".join(term.alternatives) for term in terms]
    if len(set(names)) < len(names):
        raise ValueError(f"{fields!r} names a column twice")
    everything = any(term.alternatives == ["*"] for term in terms)

    def lines() -> Iterator[str]:
        columns = terms
        if header and not everything:
            yield _heading(columns, key)
        for index, sample in enumerate(samples):
            if everything and index == 0:
                columns = _expand(terms, sample)
                if header:
                    yield _heading(columns, key)
            try:
                cells = [_cell(sample, column, missing) for column in columns]
                if everything:
                    _check_all(sample, columns)
            except TarshardsError as error:
                reject_or_raise(reject, sample, error)
                continue
            if key:
                cells.insert(0, escape(sample["__key__"]))
            yield "\t".join(cells)

    return lines()


def _expand(terms: list[Term], sample: Sample) -> list[Term]:
    """Replace ``*`` by the fields of *sample* that no other term names."""
    named = {find_field(sample, [field]) for term in terms for field in term.alternatives}
    others = [Term(None, [field]) for field in sample if not is_reserved(field) and field not in named]
    for field in {term.name for term in terms} & {other.alternatives[0] for other in others}:
        raise SampleError(f"two columns would get the name {field}", field=field).at(sample)
    return [column for term in terms for column in (others if term.alternatives == ["*"] else [term])]


def _heading(columns: list[Term], key: bool) -> str:
    names = [column.name or ";".join(column.alternatives) for column in columns]
    cells = [escape(name) for name in names]
    return "\t".join(["__key__", *cells] if key else cells)


def _cell(sample: Sample, column: Term, missing: str | None) -> str:
    if missing is not None and find_field(sample, column.alternatives) is None:
        return missing
    field = pick_field(sample, column.alternatives)
    value = sample[field]
    if is_reserved(field):
        return escape(value)
    data = bytes(encode_field(field, value))
    if data.endswith(b"\n") and (field.rpartition(".")[2] in LINES or (has_no_codec(field) and _is_line(data))):
        data = data[:-1].removesuffix(b"\r")
    return escape(data)


def _is_line(data: bytes) -> bool:
    """Return whether *data*, which end in a newline, are one printable line of text."""
    try:
        return data[:-1].removesuffix(b"\r").decode().isprintable()
    except UnicodeDecodeError:
        return False


def _check_all(sample: Sample, columns: list[Term]) -> None:
    taken = {find_field(sample, column.alternatives) for column in columns}
    for field in sample:
        if field not in taken and not is_reserved(field):
            reason = "this field has no column, since the first sample lacks it; name the columns"
            raise SampleError(reason, field=field).at(sample)
