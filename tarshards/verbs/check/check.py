"""The checks of one shard after another, and those of the dataset that they are together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

from tarshards.errors import SampleError, ShardIndexError, TarshardsError
from tarshards.storage.opening import room_of
from tarshards.storage.plain import PlainFile, open_plain
from tarshards.storage.streams import public
from tarshards.verbs.check.headers import Headers, read_headers
from tarshards.verbs.check.keys import KeyPlaces
from tarshards.verbs.check.report import SHOWN, FieldSizes, Finding, Report

if TYPE_CHECKING:
    from tarshards.samples.resync.grouping import FoundSample

FORMS = 1000  # sets of fields that are told apart
NOT_ADJACENT = "members of this key are not adjacent, or the sample comes twice"


def repair_shards(urls: Iterable[str], target: str, *, allow_pipe: bool = False) -> int:
    """Write the whole samples of shards, damaged or not, to the tar *target*, and return how many there were.

    Of several samples of one key it is the first.
    """
    from tarshards.samples.ledger import Ledger
    from tarshards.samples.read import read_samples
    from tarshards.write.shards import DUPLICATE_KEY, TarWriter

    ledger = Ledger(max_errors=float("inf"))
    with TarWriter(target) as writer:
        for sample in read_samples(list(urls), on_error=ledger, on_damage="resync", allow_pipe=allow_pipe):
            try:
                writer.write(sample)
            except SampleError as error:
                if error.reason != DUPLICATE_KEY:
                    raise
    return writer.samples


def check_shards(urls: Iterable[str], *, decode: bool = False, jobs: int = 1, allow_pipe: bool = False) -> Report:
    """Check shards, and the dataset that they are together.

    Reads headers only; with *decode* all fields, which *jobs* threads decode, but none that can run code. What is no
    plain local file is copied to a temporary one. Keys are compared within bounded memory; a sample of a shard that is
    damaged, or of at most 1 GiB, takes about 550 bytes.
    """
    with KeyPlaces() as keys:
        check = _Check(keys, jobs if decode else 0)
        for url in urls:
            check.shard(url, allow_pipe)
        return check.finish()


class _Check:
    """The check of one dataset, shard after shard; *threads* of them decode."""

    def __init__(self, keys: KeyPlaces, threads: int):
        self.report, self.keys, self.threads = Report(), keys, threads
        self.names: list[str] = []
        self.forms: dict[frozenset[str], tuple[str, int, str]] = {}  # fields -> the place of the first sample
        self.odd_names: dict[str, tuple[int, str, int, str]] = {}  # what is odd -> samples, and likewise
        self.indexed: dict[str, bool] = {}

    def shard(self, url: str, allow_pipe: bool) -> None:
        name = public(url)
        self.names.append(name)
        self.report.shards += 1
        try:
            with open_plain(url, allow_pipe=allow_pipe) as file:
                self.report.bytes += file.size
                headers = None if self.threads else read_headers(file)
                if headers is not None:
                    self._count_all(headers, name)
                else:
                    self._survey(file, name)
                if file.error is not None:
                    raise file.error
                if not file.is_copy or room_of(url) in ("http", "fsspec_"):
                    self._check_index(url, name)
        except TarshardsError as error:
            self.report.add_error("read", error)

    def _survey(self, file: PlainFile, name: str) -> None:
        """Count the samples of any shard one by one."""
        from tarshards.verbs.check.surveying import decoded, misread_by_dali, whole_samples

        samples = whole_samples(file, self.report)
        for sample in decoded(samples, file, self.report, self.threads) if self.threads else samples:
            self._count(sample, name)
            if odd := misread_by_dali(sample):
                count, *first = self.odd_names.get(odd, (0, name, sample.offset, sample.key))
                self.odd_names[odd] = (count + 1, *first)  # type: ignore[assignment]

    def _count(self, sample: FoundSample, name: str) -> None:
        report = self.report
        report.samples += 1
        report.members += len(sample.members)
        for field_, start, end in sample.members:
            if sizes := self._sizes_of(field_):
                sizes.add(end - start)
        self.keys.add(sample.key, (len(self.names) - 1, sample.offset))
        if len(self.forms) < FORMS:
            self.forms.setdefault(sample.fields, (name, sample.offset, sample.key))

    def _count_all(self, headers: Headers, name: str) -> None:
        """Count the samples of a shard of which the headers tell all."""
        report = self.report
        report.samples += len(headers.keys)
        report.members += sum(map(len, headers.sizes))
        for field_, lengths in zip(headers.fields, headers.sizes):
            if sizes := self._sizes_of(field_):
                sizes.extend(lengths)
        self.keys.extend(zip(headers.keys, zip(repeat(len(self.names) - 1), headers.offsets)))
        for fields, number in headers.first_of_each_form():
            if len(self.forms) < FORMS:
                self.forms.setdefault(fields, (name, headers.offsets[number], headers.keys[number]))

    def _sizes_of(self, field_: str) -> FieldSizes | None:
        """Return where the sizes of a field are counted; None where there are too many fields to tell apart."""
        if field_ not in self.report.fields and len(self.report.fields) < FORMS:
            self.report.fields[field_] = FieldSizes()
        return self.report.fields.get(field_)

    def _check_index(self, url: str, name: str) -> None:
        from tarshards.index.sidecar import MISSING, Index

        self.indexed[name] = True
        try:
            Index.load(url)
        except ShardIndexError as error:
            if error.reason == MISSING:
                self.indexed[name] = False
            else:
                self.report.add_error("index", error)

    def finish(self) -> Report:
        from heapq import nsmallest

        report = self.report
        for keys in nsmallest(SHOWN, self._counted(self.keys.duplicates()), key=lambda pair: pair[1][1]):
            self._tell_duplicate(*keys)
        for name in sorted(report.fields):
            missing = report.samples - report.fields[name].samples
            if missing:
                first = next((place for fields, place in self.forms.items() if name not in fields), ())
                reason = f"no {name}, as {missing} of {report.samples} samples"
                report.add(Finding("warning", "missing field", reason, *first))
        for odd, (count, *place) in self.odd_names.items():
            report.add(Finding("warning", "DALI", f"DALI's own reader misreads {odd}; {count} samples", *place))  # type: ignore[arg-type]
        for reason, count in sorted(report.skipped.items()):
            if reason != "directory":
                report.add(Finding("warning", "skipped", f"{count} members are in no sample: {reason}"))
        without = [name for name, indexed in self.indexed.items() if not indexed]
        if without and len(without) < len(self.indexed):
            reason = f"no index, as {len(without)} of {len(self.indexed)} shards; tarindex makes them"
            report.add(Finding("warning", "index", reason, without[0]))
        return report

    def _counted(self, duplicates: Iterable[tuple[str, list[tuple[int, int]]]]) -> Iterator[Any]:
        for pair in duplicates:
            self.report.counts["error", "duplicate key"] += 1
            yield pair

    def _tell_duplicate(self, key: str, places: list[tuple[int, int]]) -> None:
        """Say of a key that was counted where it stands."""
        (first, begin), (shard, offset) = places[:2]
        more = f", and in {len(places) - 2} more places" if len(places) > 2 else ""
        reason = NOT_ADJACENT if first == shard else "this key is in another shard too"
        reason = f"{reason}: it is at offset {begin} of {self.names[first]}{more}"
        self.report.findings.append(Finding("error", "duplicate key", reason, self.names[shard], offset, key))
