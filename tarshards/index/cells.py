"""Cells of CSV: texts, and the types that represent columns of them without loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date, datetime
from functools import partial
from io import BufferedReader, BytesIO
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from tarshards.errors import SampleError
from tarshards.samples.codecs.registry import require
from tarshards.samples.lines import Utf8

if TYPE_CHECKING:
    import pyarrow as pa

TYPES = ("text", "int", "float", "bool", "date", "timestamp")
_CLOCK = "%Y-%m-%d %H:%M:%S"


def arrow_type(name: str) -> Any:
    """Return the type of Arrow for one of TYPES; raise ValueError for another name."""
    if name not in TYPES:
        raise ValueError(f"the type of a column is one of {', '.join(TYPES)}, not {name!r}")
    pa = require("pyarrow", extra="arrow")
    return {
        "text": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("s"),
    }[name]


class ExactTypes:
    """Finds the types of columns of text: text, unless another type, written in one way, reproduces every cell.

    An empty cell is a null, of any type. So 7 and -2 are integers, and 0.50 and 1.25 are numbers of two decimals; but
    007 stays text, and so do 1.5 beside 1.10 and integers of more than 64 bits. The types of some columns may be
    *given*.

    >>> types = ExactTypes(["a", "b", "c"])
    >>> types.see({"a": ["7", "", "-2"], "b": ["0.50", "1.25"], "c": ["8", "007"]})
    >>> types.found, types.unsettled
    ({'a': 'int', 'b': 'float', 'c': 'text'}, ['a', 'b'])
    """

    def __init__(self, names: Iterable[str], given: Mapping[str, str] = MappingProxyType({})):
        self._names = list(names)
        self._given = given
        self._ways: dict[str, list[tuple[str, Callable[[str], str]]] | None]
        self._ways = {name: None for name in self._names if name not in given}

    @property
    def unsettled(self) -> list[str]:
        """The columns whose type may change with further cells."""
        return [name for name, ways in self._ways.items() if ways != []]

    @property
    def found(self) -> dict[str, str]:
        """The type of each column, one of TYPES."""
        return {name: self._given.get(name) or self._found(name) for name in self._names}

    def _found(self, name: str) -> str:
        ways = self._ways[name]
        return ways[0][0] if ways else "text"

    def settled(self, given: Mapping[str, str]) -> ExactTypes:
        """Return the types found so far, but for the *given* ones."""
        return ExactTypes(self._names, {**self.found, **given})

    def schema(self) -> pa.Schema:
        """Return the schema of Arrow of columns with these types."""
        return require("pyarrow", extra="arrow").schema([(name, arrow_type(kind)) for name, kind in self.found.items()])

    def see(self, columns: Mapping[str, Iterable[str]]) -> None:
        """Examine more cells of columns."""
        for name, column in columns.items():
            ways, cells = self._ways[name], {*column} - {""}
            if ways is None and cells:
                ways = _ways_of(next(iter(cells)))
            if ways is not None:
                self._ways[name] = [(kind, rewrite) for kind, rewrite in ways if _gives_back(rewrite, cells)]


def read_csv(file: BinaryIO, *, name: str, texts: Collection[str] = ()) -> pa.Table:
    """Return the table in a *file* of CSV, called *name* in errors, with the exact type of each column but *texts*."""
    csv = require("pyarrow.csv", extra="arrow")
    data = BufferedReader(Utf8(file, name)).read()
    names = csv.open_csv(BytesIO(data)).schema.names
    if len(set(names)) < len(names):
        raise SampleError(f"two columns have the same name: {', '.join(names)}", url=name)
    options = csv.ConvertOptions(column_types=dict.fromkeys(names, arrow_type("text")), strings_can_be_null=False)
    table = csv.read_csv(BytesIO(data), convert_options=options)
    types = ExactTypes(names, dict.fromkeys(texts, "text"))
    types.see({name: table.column(name).to_pylist() for name in types.unsettled})
    columns = [typed(column, each.type) for each, column in zip(types.schema(), table.columns)]
    return require("pyarrow", extra="arrow").table(columns, names=names)


def read_parquet(file: Any) -> pa.Table:
    """Return the table in a *file* of Parquet, or a buffer, read by this thread.

    Arrow's own threads abort a process that ends while they start, and ``read_table`` imports its datasets first.
    """
    return require("pyarrow.parquet", extra="arrow").ParquetFile(file).read(use_threads=False)


def typed(cells: Any, data_type: Any, nulls: Sequence[str] = ("",)) -> Any:
    """Return a column of text as one of *data_type*, *nulls* as null; raise ArrowException for another cell."""
    pa, compute = require("pyarrow", extra="arrow"), require("pyarrow.compute", extra="arrow")
    if data_type == pa.string():
        return cells
    return compute.if_else(compute.is_in(cells, pa.array(nulls)), None, cells).cast(data_type)


def _ways_of(cell: str) -> list[tuple[str, Callable[[str], str]]]:
    """Return the ways to write values that may have written *cell*: their types, and how they write a cell again."""
    decimals = len(cell.partition("e")[0].partition(".")[2])
    forms = [f".{decimals}f", f".{decimals}e"] if "." in cell else []
    return [
        ("int", _integer),
        ("float", lambda cell: repr(float(cell))),
        ("float", lambda cell: repr(float(cell)).removesuffix(".0")),
        *(("float", partial(_formatted, form)) for form in forms),
        ("bool", {"true": "true", "false": "false"}.__getitem__),
        ("bool", {"True": "True", "False": "False"}.__getitem__),
        ("date", lambda cell: date.fromisoformat(cell).isoformat()),
        ("timestamp", lambda cell: datetime.strptime(cell, _CLOCK).strftime(_CLOCK)),
    ]


def _gives_back(rewrite: Callable[[str], str], cells: Iterable[str]) -> bool:
    try:
        return all(rewrite(cell) == cell for cell in cells)
    except (ValueError, KeyError):
        return False


def _integer(cell: str) -> str:
    if (number := int(cell)).bit_length() > 63:
        raise ValueError
    return str(number)


def _formatted(form: str, cell: str) -> str:
    return format(float(cell), form)
