"""Plans and lines of text -> samples; every error names its line."""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.errors import SampleError, TarshardsError
from tarshards.parallel.calls import settled
from tarshards.samples.conditions import Template
from tarshards.samples.keys import DUPLICATE_FIELD, Sample, is_reserved, split_name
from tarshards.samples.ledger import ErrorPolicy, error_handler
from tarshards.samples.lines import checked, located, numbered_lines, open_text, unescape
from tarshards.samples.rows import csv_rows, raised
from tarshards.samples.tree import read_file
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.remote import Remote
from tarshards.tar.read import MEMBER_LIMIT

if TYPE_CHECKING:
    from tarshards.storage.wire import Steps, Task

Row = tuple[str, list[bytes] | TarshardsError]  # origin, and cells or why there are none
FIRST_AHEAD = 4  # samples that are fetched at once before the size of any is known


class FieldSources(NamedTuple):
    """Reads the paths and URLs from which a plan or lines take the data of fields.

    Paths are relative to *folder*; with *allow_pipe*, ``pipe:command`` is also accepted.
    """

    folder: str = ""
    allow_pipe: bool = False

    def read(self, name: str) -> bytes:
        """Return the content of the path or URL *name*."""
        if not name:
            raise ValueError("an empty path")
        location = Location.of(name, allow_pipe=self.allow_pipe)
        path = os.path.join(self.folder, str(location.path) if location.scheme == "file" else name)
        if location.scheme in ("", "-", "file") or os.path.lexists(path):
            return read_file(path)
        return location.read(MEMBER_LIMIT)

    def read_ahead(self, name: str) -> Steps[bytes]:
        """Return what ``read`` does; a thread waits only for what is not read over our own connections."""
        from tarshards.storage.transfer import find_address, read_whole
        from tarshards.storage.wire import looking

        if self.is_remote(name):
            location = Location.of(name)
            if (address := (yield from find_address(location))) is not None:
                return bytes(location.check_length((yield from read_whole(address, MEMBER_LIMIT + 1)), MEMBER_LIMIT))
        return (yield from looking(self.read, name))

    def is_remote(self, name: str) -> bool:
        """Return whether reading *name* waits for a server."""
        try:
            return (
                "://" in name and Location.of(name).is_remote and not os.path.lexists(os.path.join(self.folder, name))
            )
        except TarshardsError:  # raised again when it is read
            return False


HERE = FieldSources()


class Unread(NamedTuple):
    """A sample whose fields are yet to be read: the origin of each, and its bytes, or the path or URL to read."""

    key: str
    origin: str
    data: dict[str, tuple[str, bytes | str]]

    def is_remote(self, sources: FieldSources) -> bool:
        return any(isinstance(data, str) and sources.is_remote(data) for _, data in self.data.values())

    def read(self, sources: FieldSources) -> Sample | TarshardsError:
        """Return the sample, or why it cannot be read."""
        sample: Sample = {"__key__": self.key, "__url__": self.origin}
        try:
            for field, (origin, data) in self.data.items():
                with located(origin):
                    sample[field] = sources.read(data) if isinstance(data, str) else data
        except TarshardsError as error:
            return error
        return sample

    def read_ahead(self, sources: FieldSources) -> Steps[Sample | TarshardsError]:
        """Return what ``read`` does."""
        sample: Sample = {"__key__": self.key, "__url__": self.origin}
        try:
            for field, (origin, data) in self.data.items():
                with located(origin):
                    sample[field] = (yield from sources.read_ahead(data)) if isinstance(data, str) else data
        except TarshardsError as error:
            return error
        return sample


def _read_all(unread: Iterable[Unread | TarshardsError], sources: FieldSources) -> Iterator[Sample | TarshardsError]:
    """Yield the samples, or why one cannot be read, in the same order; those of servers are fetched ahead."""

    def is_remote(each: Unread | TarshardsError) -> bool:
        return isinstance(each, Unread) and each.is_remote(sources)

    for are_remote, group in groupby(unread, is_remote):
        if are_remote:
            yield from _fetch_ahead(group, sources)  # type: ignore[arg-type]
        else:
            yield from (each.read(sources) if isinstance(each, Unread) else each for each in group)


def _fetch_ahead(unread: Iterable[Unread], sources: FieldSources) -> Iterator[Sample | TarshardsError]:
    """Fetch samples over several connections at once; as many of the largest as may be held fit into the memory."""
    from tarshards.storage.wire import drop, start

    remote = Remote()
    budget, taken, largest = remote.budget(), 0, 0
    pending: deque[Task[Sample | TarshardsError]] = deque()

    def take() -> Sample | TarshardsError:
        nonlocal taken, largest
        sample = settled(pending.popleft()).result()
        taken += 1
        if isinstance(sample, dict):
            largest = max(largest, sum(map(len, sample.values())))
        return sample

    try:
        for each in unread:
            pending.append(start(each.read_ahead(sources)))
            while len(pending) >= max(1, min(FIRST_AHEAD + taken, 2 * remote.connections, budget // max(1, largest))):
                yield take()
        while pending:
            yield take()
    finally:
        for work in pending:
            drop(work)


def read_plan(
    plan: str | Location,
    *,
    key: str | None = None,
    delimiter: str | None = None,
    sources: FieldSources = HERE,
    on_error: ErrorPolicy = "raise",
) -> Iterator[Sample]:
    """Yield a sample for each row of *plan*, a table whose first row names the fields; it is read once, row by row.

    A cell is the data of its field. In a column named ``@jpg``, each cell is a path or URL, read by *sources*, whose
    content is the data of the field jpg. The key is made by the template *key* from ``record`` (the number of the row,
    from 0) and the columns; without *key* it is the column ``__key__``. *delimiter* is by default a comma if the name
    of the plan ends in .csv, else a tab. Cells separated by tabs use the escapes of ``tarshards.verbs.table``; with any
    other delimiter, cells are quoted as in CSV.

    URLs of servers are fetched ahead, over several connections. Raises a TarshardsError that names the line for an
    invalid row or key, or for a file that cannot be read; *on_error* gets it instead, and may leave the row out.
    """
    location = Location.of(plan)
    if delimiter is None:
        delimiter = "," if re.search(r"\.csv(\.\w+)?$", location.url, re.IGNORECASE) else "\t"
    rows = _split_tabs(location) if delimiter == "\t" else _split_quoted(location, delimiter)
    return checked(_read_all(_parse_rows(rows, location.name, key), sources), error_handler(on_error))


def _parse_rows(rows: Iterator[Row], name: str, key: str | None) -> Iterator[Unread | TarshardsError]:
    origin, header = next(rows, ("", []))
    if isinstance(header, TarshardsError):
        raise header
    if not header:
        raise SampleError("the plan is empty; its first line must name the columns", url=name)
    columns = [_text(cell) for cell in header]
    fields = [column.removeprefix("@") for column in columns]
    _check_columns(fields, origin)
    with located(origin):
        if key is None and "__key__" not in columns:
            raise ValueError("no column __key__, and no key template")
        template = Template("{__key__}" if key is None else key, {"record": 0, **dict.fromkeys(fields, "")})
    for record, (origin, cells) in enumerate(rows):
        try:
            if isinstance(cells, TarshardsError):
                raise cells
            with located(origin):
                if len(cells) != len(columns):
                    raise ValueError(f"{len(cells)} cells for {len(columns)} columns")
                texts = {field: _text(cell) for field, cell in zip(fields, cells)}
                own = template.fill({**texts, "record": record})
            given = (
                texts[field] if column.startswith("@") else cell for column, field, cell in zip(columns, fields, cells)
            )
            data = {field: (origin, value) for field, value in zip(fields, given) if field != "__key__"}
            yield Unread(own, origin, data)
        except TarshardsError as error:
            yield error


def _check_columns(fields: list[str], origin: str) -> None:
    with located(origin):
        for field, count in Counter(fields).items():
            if count > 1:
                raise ValueError(f"two columns are named {field}")
            if field == "record":
                raise ValueError("a column cannot be named record, which counts the rows")
            if field != "__key__" and not is_field(field):
                raise ValueError(f"{field!r} cannot name a field")


def is_field(name: str) -> bool:
    """Return whether a field of this *name*, written to a shard, is read back under the same name.

    >>> is_field("seg.png"), is_field("PNG"), is_field("__url__")
    (True, False, False)
    """
    return bool(name) and not is_reserved(name) and split_name(f"key.{name}") == ("key", name)


def _split_tabs(plan: Location) -> Iterator[Row]:
    for origin, line in numbered_lines(plan):
        try:
            with located(origin):
                yield origin, [unescape(cell) for cell in line.removesuffix("\r").split("\t")]
        except TarshardsError as error:
            yield origin, error


def _split_quoted(plan: Location, delimiter: str) -> Iterator[Row]:
    name = plan.name
    with open_text(plan) as text:
        for line, cells in csv_rows(text, delimiter):
            origin = f"{name}: line {line}"
            if isinstance(cells, TarshardsError):
                yield origin, raised(cells, origin)
            else:
                yield origin, [cell.encode() for cell in cells]


def read_member_lines(
    lines: str | Location, *, sources: FieldSources = HERE, on_error: ErrorPolicy = "raise"
) -> Iterator[Sample]:
    r"""Yield the samples that *lines*, a path or URL, lists as lines ``NAME SOURCE``, one for each member.

    Adjacent names that share a key form a sample. NAME ends at the first tab, or at the first space if the line has no
    tab. SOURCE is a path or URL, read by *sources*, ``file:path``, or ``text:`` followed by the data itself, in which
    ``\t``, ``\n`` and ``\\`` are escapes.

    URLs of servers are fetched ahead, over several connections. Raises a TarshardsError that names the line for a
    malformed line, or for a file that cannot be read; *on_error* gets it instead, and may leave the sample out.
    """
    return checked(_read_all(_parse_member_lines(Location.of(lines)), sources), error_handler(on_error))


def _parse_member_lines(lines: Location) -> Iterator[Unread | TarshardsError]:
    unread: Unread | None = None
    wrong: TarshardsError | None = None  # with a line of this sample
    for origin, line in numbered_lines(lines):
        if not line.strip():
            continue
        name, _, source = line.partition("\t" if "\t" in line else " ")
        key, field = split_name(name) or (None, "")
        if unread is not None and key not in (None, unread.key):
            yield wrong or unread
            unread = wrong = None
        if key is not None:
            unread = unread or Unread(key, origin, {})
        try:
            with located(origin):
                if not source.strip():
                    raise ValueError(f"a line must be NAME SOURCE, not {line!r}")
                if unread is None or key is None or not is_field(field):
                    raise ValueError(f"{name!r} has no key and field")
                if field in unread.data:
                    raise SampleError(DUPLICATE_FIELD, key=key, field=field)
                text = source.lstrip().startswith("text:")
                unread.data[field] = origin, unescape(source.partition(":")[2]) if text else source.strip()
        except TarshardsError as error:
            if key is None:  # a line of no sample
                yield error
            else:
                wrong = wrong or error
    if unread is not None:
        yield wrong or unread


def read_text(urls: Any, *, field: str = "txt", key: str = "{record:09d}") -> Iterator[Sample]:
    """Yield a sample for each line of the text files *urls*, a shard expression: *field* is the line without newline.

    *key* is a template with ``record``, the number of the line over all files, from 0. Raises ValueError for an invalid
    *field* or *key*, and DecodeError for a line that is not UTF-8.
    """
    if not is_field(field):
        raise ValueError(f"{field!r} cannot name a field")
    template = Template(key, {"record": 0})
    lines = (line for shard in find_shards(urls) for line in numbered_lines(shard.location()))
    return checked(
        {"__key__": template.fill({"record": record}), "__url__": origin, field: text.encode()}
        for record, (origin, text) in enumerate(lines)
    )


def _text(cell: bytes) -> str:
    return cell.decode(errors="surrogateescape")
