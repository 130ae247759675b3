"""Rows of text come with line numbers; a wrong row is replaced by an error, and reading continues."""

from __future__ import annotations

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from tarshards.errors import DecodeError, OpenError, SampleError
from tarshards.samples.rows import csv_rows, json_rows


class Torn(io.RawIOBase):
    """A text that ends in an error."""

    def __init__(self, data: bytes):
        self.data = data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        if not self.data:
            raise OpenError("torn", url="a")
        size = min(len(buffer), len(self.data))
        buffer[:size], self.data = self.data[:size], self.data[size:]
        return size


@given(st.lists(st.lists(st.text(st.characters(codec="utf-8")), min_size=2, max_size=3)), st.sampled_from(",;\t"))
def test_rows_are_what_pythons_csv_has_written(rows, delimiter):
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows(rows)
    assert [cells for _, cells in csv_rows(io.BytesIO(text.getvalue().encode()), delimiter)] == rows


def test_a_wrong_row_of_csv_is_an_error_in_its_place():
    text = b'a,b\n"two\nlines",c\n"d"e,f\n\xff,g\n\nh,i\n"open,\n'
    found = list(csv_rows(io.BytesIO(text), ","))
    assert [line for line, _ in found] == [1, 2, 4, 5, 6, 7, 8]
    assert [row for _, row in found if isinstance(row, list)] == [["a", "b"], ["two\nlines", "c"], [], ["h", "i"]]
    errors = [row for _, row in found if not isinstance(row, list)]
    assert [*map(type, errors)] == [SampleError, DecodeError, SampleError]


def test_a_wrong_line_of_json_is_an_error_in_its_place():
    deep = b"[" * 100_000
    found = list(json_rows([b'{"a": NaN}\n', b" \n", b'{"a": 1, "a": 2}\n', b'"\xff"\n', deep, b"null"]))
    assert [line for line, _ in found] == [1, 3, 4, 5, 6]
    assert [type(row) for _, row in found] == [SampleError, SampleError, DecodeError, SampleError, type(None)]


def test_damage_of_the_file_is_the_last_row():
    for rows in (csv_rows(io.BufferedReader(Torn(b"1\n")), ","), json_rows(io.BufferedReader(Torn(b"[1]\n")))):
        (_, first), (line, error) = rows
        assert (len(first), line, error.url) == (1, 2, "a")
