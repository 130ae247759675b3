"""The requests of the page: each method takes the parameters of a URL and returns JSON, bytes or a member."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from tarshards.errors import SampleError, TarshardsError
from tarshards.samples.lines import escape
from tarshards.samples.member_file import MemberFile
from tarshards.view.damage_map import damage_map
from tarshards.view.histograms import histogram, suggestions
from tarshards.view.pictures import MAX_PIXELS, MOST_THUMBNAIL, thumbnail, whole_picture
from tarshards.view.queries import Queries, Query
from tarshards.view.viewed_shards import ViewedShards, parse_number

Answer: TypeAlias = "dict[str, Any] | tuple[str, bytes] | MemberFile"
Parameters: TypeAlias = Mapping[str, str]
MOST_ROWS = 500  # most rows of a response


class ViewApi:
    """The samples of *urls* for a page; it lists *left_out*, entries of a ledger; *state* is the state of a loader.

    The other options are those of ``find_shards``.
    """

    def __init__(
        self,
        urls: Any,
        *,
        left_out: Iterable[Mapping[str, Any]] = (),
        state: Mapping[str, Any] | None = None,
        **how: Any,
    ):
        self.state = state
        self.viewed: ViewedShards = ViewedShards(urls, **how)
        self.name: str = self.viewed.name
        self.queries: Queries = Queries(self.viewed)
        self.left_out: list[dict[str, Any]] = [dict(entry) for entry in left_out]
        methods = (
            self.about,
            self.rows,
            self.sample,
            self.find,
            self.picture,
            self.field,
            self.keys,
            self.names,
            self.histogram,
            self.shards,
            self.damage,
            self.ledger,
        )
        self.methods: dict[str, Callable[[dict[str, str]], Answer]] = {each.__name__: each for each in methods}

    def about(self, parameters: Parameters) -> Answer:
        """Return the number of samples, as far as it is known without reading shards."""
        viewed = self.viewed
        return {
            "name": self.name,
            "total": viewed.total,
            "done": viewed.is_complete,
            "indexed": viewed.sequence is not None,
            "shards": len(viewed.shards),
            "left_out": len(self.left_out),
            "state": self.state,
        }

    def rows(self, parameters: Parameters) -> Answer:
        """Return some of the samples that match a query, and the number of known ones."""
        begin, count = (number_in(parameters, name) for name in ("begin", "count"))
        found = self.queries.rows(Query.of(parameters), begin, min(count, MOST_ROWS))
        return {**found, "problems": [str(error) for error in self.viewed.problems]}

    def sample(self, parameters: Parameters) -> Answer:
        """Return one sample: its fields with their offsets, its shard, and its number in the shard."""
        number, viewed = number_in(parameters, "number"), self.viewed
        shard, sample = viewed.address(number)
        (row,) = viewed.rows([number])
        index = viewed.index(shard)
        for member, field in zip(range(*index.span(sample)), row["fields"]):
            field["offset"] = index.data_range(member)[0]
        return {**row, "sample": sample, "shard_number": shard, "total": viewed.total}

    def find(self, parameters: Parameters) -> Answer:
        """Return the numbers of the samples with a key."""
        key = text_in(parameters, "key")
        if self.viewed.sequence is not None:
            numbers = sorted(self.viewed.sequence.places(key))
        else:
            viewed = self.viewed
            numbers = [
                viewed.begin(shard) + index.numbers[key]
                for shard in range(viewed.known_shards)
                if viewed.count(shard) and key in (index := viewed.index(shard)).numbers
            ]
        return {"numbers": numbers[:1000]}

    def picture(self, parameters: Parameters) -> Answer:
        """Return an image in a format that browsers show; with *pixels*, a thumbnail whose longer side has as many."""
        field, file = text_in(parameters, "field"), self._file(parameters)
        if file.size > 4 * MAX_PIXELS:
            raise SampleError(f"an image of {file.size:,} bytes is not shown", field=field)
        if "pixels" not in parameters:
            return whole_picture(field, bytes(file))
        return thumbnail(field, bytes(file), max(1, min(number_in(parameters, "pixels"), MOST_THUMBNAIL)))

    def field(self, parameters: Parameters) -> Answer:
        """Return a field unchanged."""
        return self._file(parameters)

    def _file(self, parameters: Parameters) -> MemberFile:
        return self.viewed.file(number_in(parameters, "number"), text_in(parameters, "field"))

    def keys(self, parameters: Parameters) -> Answer:
        """Return the keys of all samples that match a query, one per line, as `targrep --keys` reads them."""
        viewed, lines = self.viewed, []
        for number in self.queries.all(Query.of(parameters)).tolist():
            shard, sample = viewed.address(number)
            key = viewed.index(shard).key(sample)
            lines.append(escape(key))
        return "text/plain; charset=utf-8", "".join(f"{line}\n" for line in lines).encode()

    def histogram(self, parameters: Parameters) -> Answer:
        """Return the bars of one histogram, over all samples or those of a query."""
        query = Query.of(parameters)
        return histogram(self.viewed, text_in(parameters, "of"), self.queries.all(query) if query else None)

    def names(self, parameters: Parameters) -> Answer:
        """Return the fields of the first shard that has samples, the columns, and the histograms of these."""
        self.viewed.extend(1)
        first = next((shard for shard in range(self.viewed.known_shards) if self.viewed.count(shard)), None)
        fields = [] if first is None else self.viewed.index(first).fields
        columns: list[str] = []
        with suppress(TarshardsError, ImportError):  # what uses a column says what is wrong with it
            columns = self._columns()
        return {"fields": fields, "columns": columns, "histograms": suggestions(fields, columns)}

    def _columns(self) -> list[str]:
        from tarshards.index.columns import ShardColumns

        viewed = self.viewed
        if viewed.sequence is None:
            return []
        found = ShardColumns.load(viewed.shards[0].location())
        return [] if found is None else list(found.sources)

    def shards(self, parameters: Parameters) -> Answer:
        """Return some shards, with their numbers of samples and bytes where known."""
        viewed, begin = self.viewed, number_in(parameters, "begin")
        end = min(begin + min(number_in(parameters, "count"), MOST_ROWS), len(viewed.shards))
        sizes = viewed.shards.column("size") if viewed.sequence is None else viewed.sequence.sizes
        rows = []
        for number in range(begin, end):
            row: dict[str, Any] = {"number": number, "name": viewed.shards[number].location().name}
            if number < viewed.known_shards:
                row |= {"samples": viewed.count(number), "begin": viewed.begin(number)}
            if sizes[number] is not None:
                row["size"] = int(sizes[number])
            rows.append(row)
        return {"total": len(viewed.shards), "rows": rows}

    def damage(self, parameters: Parameters) -> Answer:
        """Return the damage map of a shard."""
        shards = self.viewed.shards
        return damage_map(shards[number_in(parameters, "shard", len(shards))])

    def ledger(self, parameters: Parameters) -> Answer:
        """Return the samples that a run left out."""
        return {"entries": self.left_out[:10_000], "total": len(self.left_out)}


def text_in(parameters: Parameters, name: str) -> str:
    """Return a parameter; raise ValueError if it is missing."""
    if name not in parameters:
        raise ValueError(f"{name}= is missing")
    return parameters[name]


def number_in(parameters: Parameters, name: str, end: int | None = None) -> int:
    """Return a parameter as ``parse_number`` does."""
    return parse_number(name, text_in(parameters, name), end)
