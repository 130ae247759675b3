"""Damaged shards -> one tar of their whole samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from tarshards.errors import SampleError
from tarshards.storage.manifest import Shard
from tarshards.storage.plain import PlainFile
from tarshards.verbs.check import Report, check_shards

if TYPE_CHECKING:
    from tarshards.samples.resync.survey import Survey


class Repair(NamedTuple):
    """The report on the shards that were repaired, and how many *samples* were written."""

    report: Report
    samples: int


def repair_shards(
    shards: Iterable[Shard | str],
    target: str,
    *,
    decode: bool = False,
    jobs: int = 1,
    concatenated: bool = False,
    allow_pipe: bool = False,
    sync: bool = True,
) -> Repair:
    """Check shards as ``check_shards`` does, and write their whole samples to the tar *target*.

    Of several samples with one key the first is written. Each shard is opened and scanned once; a sample takes about
    550 bytes of memory while its shard is checked. *target* appears under its name once it is complete.
    """
    from tarshards.samples.resync.reading import read_found
    from tarshards.write.shards import DUPLICATE_KEY, TarWriter

    def write(file: PlainFile, survey: Survey) -> None:
        for found in survey.samples:
            if found.problem is None:
                try:
                    writer.write(read_found(file, found))
                except SampleError as error:
                    if error.reason != DUPLICATE_KEY:
                        raise

    with TarWriter(target, sync=sync) as writer:
        report = check_shards(
            shards, decode=decode, jobs=jobs, concatenated=concatenated, allow_pipe=allow_pipe, on_survey=write
        )
    return Repair(report, writer.samples)
