"""``read_rows``: the rows of other formats as a stream, without making shards. It reads the inputs of imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tarshards.epoch.world import World
from tarshards.errors import shortened
from tarshards.formats.inputs import plan_input
from tarshards.formats.pieces import Piece, Plan, rows_of
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger
from tarshards.stream.sources import IterableSource, Progress
from tarshards.stream.stream import Stream


def read_rows(
    source: Any,
    *,
    format: str | None = None,
    split: str | None = None,
    key: str | None = None,
    types: Mapping[str, str] | None = None,
    on_error: ErrorPolicy = None,
    world: World | None = None,
) -> RowStream:
    """Stream the rows of *source*, in any format that ``import_dataset`` reads, with the same arguments.

    A row is a dict of values by column, with ``__key__`` and ``__url__``. Images, audio and other bytes stay encoded.
    Each rank, and each worker of a loader, reads its own files (parts of files for parquet, Zarr and Hugging Face
    datasets), so at least one is required for every rank. The ledger counts rows and errors.

    CSV is read once before the first row, to find the types of the columns that *types* does not name.
    ``map(row_to_sample)`` converts rows to samples, as an import does.
    """
    stream = RowStream(())
    plan = plan_input(source, format, split, key, types, None)
    stream.source = RowSource(plan, Ledger.of(on_error))
    stream._world = World.of(world)
    return stream


class RowStream(Stream[Sample]):
    """A stream of rows, which can also be read file by file."""

    source: RowSource

    def keys(self) -> list[str]:
        """Return the names of the files, or parts of them, that are divided among workers."""
        return [*self.source.names]

    def get(self, key: str) -> Iterator[Sample]:
        """Yield the rows of one of ``keys()``, before the ops; raise KeyError for another name."""
        pieces = [piece for piece in self.source.plan.pieces if piece.name == key]
        if not pieces:
            raise KeyError(f"no file {shortened(key)}; keys() returns the names")
        return self.source.read(pieces)


class RowSource(IterableSource):
    """The source of a stream of rows: the pieces of an input, which are divided among ranks and workers."""

    ledger: Ledger

    def __init__(self, plan: Plan, ledger: Ledger):
        super().__init__(plan.pieces)
        self.names: list[str] = [piece.name for piece in plan.pieces]
        self.plan = plan
        self.ledger = ledger

    def iterate(self, progress: Progress) -> Iterator[Sample]:
        """Yield the rows of one worker; raise WorldError, on every rank, if some rank would have none."""
        pieces, world = self.plan.pieces, progress.world
        world.check_ranks(len(pieces), "files", "import them into shards with `tarimport`")
        return self.read(world.share(pieces))

    def read(self, pieces: Sequence[Piece]) -> Iterator[Sample]:
        """Yield the rows of *pieces*, one piece after another."""
        for piece in pieces:
            count = 0
            try:
                for row in rows_of(piece, self.plan.key, self.ledger):
                    count += 1
                    yield row
            finally:
                self.ledger.count(samples=count, streamed=count)
            self.ledger.count(shards=1)
