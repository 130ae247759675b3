"""Damaged shards -> one tar of their whole samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tarshards.errors import OpenError, SampleError
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.opening import PlainFile
from tarshards.verbs.check import Report, check_shards

if TYPE_CHECKING:
    from tarshards.samples.resync.reading import Survey


class Repair(NamedTuple):
    """The report on the repaired shards, and the number of *samples* written."""

    report: Report
    samples: int


def repair_shards(
    shards: Iterable[Shard | str],
    target: str | Location,
    *,
    decode: bool = False,
    jobs: int = 1,
    allow_empty: bool = False,
) -> Repair:
    """Check shards as ``check_shards`` does, and write their whole samples to the tar *target*.

    If several samples have the same key, the first is written. Each shard is opened and scanned once; a sample takes
    about 550 bytes of memory while its shard is checked. *target* gets its name when it is complete. If no sample is
    whole, it is not written, unless *allow_empty*. Raises OpenError, and writes nothing, if a shard is missing.
    """
    from tarshards.samples.resync.reading import read_found
    from tarshards.write.shards import DUPLICATE_KEY, TarWriter

    def write(file: PlainFile, survey: Survey) -> None:
        for found in survey.samples:
            if found.problem is None:
                try:
                    writer.write(read_found(file, found))
                except SampleError as error:
                    if not error.reason.startswith(DUPLICATE_KEY):
                        raise

    with TarWriter(target) as writer:
        report = check_shards(
            _existing(shards, target), decode=decode, jobs=jobs, allow_empty=allow_empty, on_survey=write
        )
        if not (writer.samples or allow_empty):
            writer.abort()
    return Repair(report, writer.samples)


def _existing(shards: Iterable[Shard | str], target: str | Location) -> Iterator[Shard]:
    """Yield *shards*; raise OpenError for a missing one, since its name may be misspelt."""
    for shard in map(Shard.of, shards):
        location = shard.location()
        if not (location.is_stream or location.exists()):
            raise OpenError(f"no such file, so {target} is not written", url=location.name)
        yield shard
