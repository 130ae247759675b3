"""A damaged shard -> its whole samples, and an error for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from tarshards.errors import OpenError, SampleError, TarError, TarshardsError
from tarshards.samples.keys import KeyRule, split_name
from tarshards.samples.ledger import Ledger
from tarshards.samples.resync.grouping import FoundSample
from tarshards.samples.resync.survey import survey_file
from tarshards.samples.resync.walking import Gap
from tarshards.storage.plain import PlainFile, open_plain
from tarshards.tar.read import ArchiveEnd


def read_resyncing(
    url: str,
    *,
    ledger: Ledger,
    allow_pipe: bool = False,
    split: KeyRule = split_name,
    end: ArchiveEnd = "required",
    concatenated: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the whole samples of one shard, in order; *ledger* gets an error for every gap and every other sample."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_plain(url, allow_pipe=allow_pipe))
        except TarshardsError as error:
            ledger(error)
            ledger.report()
            return
        delivered = fields = 0
        try:
            found = survey_file(file, split=split, end=end)
            for reason in found.skipped.elements():
                ledger.skip(reason)
            items: list[Gap | FoundSample] = [*found.gaps, *found.samples]
            for item in sorted(items, key=_place):
                if isinstance(item, Gap) or item.problem is not None:
                    ledger(explain(found.url, item))
                    continue
                sample = read_found(file, item)
                delivered += 1
                fields += len(sample) - 2
                yield sample
            if file.error is not None:
                ledger(file.error)
            ledger.count(shards=1)
        except GeneratorExit:
            ledger.count(broken_off=1)
            raise
        finally:
            ledger.count(samples=delivered, members=fields)
            ledger.report()


def explain(url: str, item: Gap | FoundSample) -> TarError | SampleError:
    """Return the error that describes a gap, or a sample that is not whole."""
    if isinstance(item, Gap):
        lost = f"; {item.end - item.start} bytes skipped" if item.end > item.start else ""
        return TarError(f"{item.reason}{lost}", url=url, offset=item.start)
    return SampleError(str(item.problem), url=url, offset=item.offset, key=item.key)


def _place(item: Gap | FoundSample) -> int:
    return item.start if isinstance(item, Gap) else item.offset


def read_found(file: PlainFile, found: FoundSample) -> dict[str, Any]:
    """Read a sample that was found in *file*; raise OpenError where the file has become shorter."""
    sample: dict[str, Any] = {"__key__": found.key, "__url__": file.name}
    for field, start, end in found.members:
        sample[field] = data = file.read(start, end - start)
        if len(data) < end - start:
            raise OpenError("was truncated while it was read", url=file.name, offset=start, key=found.key, field=field)
    return sample
