"""The checks of one shard after another, and those of the dataset that they are together."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from itertools import repeat
from typing import Any

from tarshards.checking.headers import Headers, read_headers
from tarshards.checking.report import SHOWN, FieldSizes, Finding, Report
from tarshards.duplicates import KeyPlaces
from tarshards.errors import DecodeError, SampleError, ShardIndexError, TarshardsError
from tarshards.ledger import Ledger
from tarshards.openers import public, room_of
from tarshards.parallel import bounded_map
from tarshards.repair import (
    FoundSample,
    Gap,
    Piece,
    PlainFile,
    Zeros,
    explain,
    group_found,
    open_plain,
    survey_file,
    walk,
)
from tarshards.samples import read_samples
from tarshards.writer import DUPLICATE_KEY, TarWriter

HELD = 1 << 16  # members of a shard that are held rather than looked for twice
FORMS = 1000  # sets of fields that are told apart
BATCH = 1 << 21  # bytes of samples that are decoded at once
WHITE = re.compile(r"\s")
NOT_ADJACENT = "members of this key are not adjacent, or the sample comes twice"


def repair_shards(urls: Iterable[str], target: str, *, allow_pipe: bool = False) -> int:
    """Write the whole samples of shards, damaged or not, to the tar *target*, and return how many there were.

    Of several samples of one key it is the first.
    """
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
    with KeyPlaces() as keys, ThreadPoolExecutor(jobs) if decode else nullcontext() as executor:
        check = _Check(keys, executor)
        for url in urls:
            check.shard(url, allow_pipe)
        return check.finish()


class _Check:
    """The check of one dataset, shard after shard."""

    def __init__(self, keys: KeyPlaces, executor: Executor | None):
        self.report, self.keys, self.executor = Report(), keys, executor
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
                headers = read_headers(file) if self.executor is None else None
                if headers is not None:
                    self._count_all(headers, name)
                else:
                    samples = self._whole_samples(file)
                    if self.executor is not None:
                        samples = self._decoded(samples, file, self.executor)
                    for sample in samples:
                        self._count(sample, name)
                if file.error is not None:
                    raise file.error
                if not file.is_copy or room_of(url) in ("http", "remote"):
                    self._check_index(url, name)
        except TarshardsError as error:
            self._error("read", error)

    def _error(self, kind: str, error: TarshardsError) -> None:
        self.report.add(Finding("error", kind, error.reason, error.url, error.offset, error.key, error.field))

    def _whole_samples(self, file: PlainFile) -> Iterator[FoundSample]:
        """Yield the samples of a shard that are whole; the others, and gaps, are findings."""
        pieces = _Held(walk(file))
        if any(isinstance(piece, Gap) for piece in pieces):
            found = survey_file(file)
            self.report.skipped += found.skipped
            items: list[Any] = sorted([*found.samples, *found.gaps, *found.zeros], key=_start)
            lost = sum(sample.problem is not None for sample in found.samples)
            self.report.damaged[file.name] = {"samples": len(found.samples) - lost, "lost": lost, **found.account}
        else:
            items = group_found(pieces.held or walk(file), skip=self._skip)  # type: ignore[assignment]
        for item in items:
            if isinstance(item, Zeros):
                if item.end < file.size:
                    reason = "an archive ends here and another one begins, or members were overwritten with zeros"
                    self.report.add(Finding("warning", "zeros", reason, file.name, item.start))
            elif isinstance(item, Gap):
                self._error("damage", explain(file.name, item))
            elif item.problem is not None:
                self.report.lost += 1
                self._error("sample", explain(file.name, item))
            else:
                yield item

    def _skip(self, reason: str) -> None:
        self.report.skipped[reason] += 1

    def _count(self, sample: FoundSample, name: str) -> None:
        report = self.report
        report.samples += 1
        report.members += len(sample.members)
        for field_, start, end in sample.members:
            if sizes := self._sizes_of(field_):
                sizes.add(end - start)
        self.keys.add(sample.key, (len(self.names) - 1, sample.offset))
        place = name, sample.offset, sample.key
        fields = sample.fields
        if len(self.forms) < FORMS:
            self.forms.setdefault(fields, place)
        if odd := _misread_by_dali(sample, fields):
            _tally(self.odd_names, odd, place)

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

    def _decoded(self, samples: Iterable[FoundSample], file: PlainFile, executor: Executor) -> Iterator[FoundSample]:
        """Yield the samples when their fields have been decoded; those that do not decode are findings."""

        def decode(batch: list[FoundSample]) -> list[tuple[FoundSample, list[DecodeError]]]:
            return [(sample, list(_undecodable(sample, file))) for sample in batch]

        for done in bounded_map(decode, _batches(samples), executor=executor, window=8):
            for sample, errors in done:
                for error in errors:
                    self._error("decode", error)
                yield sample

    def _check_index(self, url: str, name: str) -> None:
        from tarshards.index import MISSING, Index

        self.indexed[name] = True
        try:
            Index.load(url)
        except ShardIndexError as error:
            if error.reason == MISSING:
                self.indexed[name] = False
            else:
                self._error("index", error)

    def finish(self) -> Report:
        report = self.report
        for keys in heapq.nsmallest(SHOWN, self._counted(self.keys.duplicates()), key=lambda pair: pair[1][1]):
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


def _start(item: FoundSample | Gap | Zeros) -> int:
    return item.offset if isinstance(item, FoundSample) else item.start


def _tally(counts: dict[Any, tuple[int, str, int, str]], what: Any, place: tuple[str, int, str]) -> None:
    """Count *what*, and keep where it came first."""
    count, *first = counts.get(what, (0, *place))
    counts[what] = (count + 1, *first)  # type: ignore[assignment]


def _misread_by_dali(sample: FoundSample, fields: frozenset[str]) -> str | None:
    """Say what DALI's reader of tars, or its ``wds2idx``, makes another sample of; None where all is well."""
    longest, white = _longest_and_white(fields)
    if sample.extended:
        return "names with a pax or GNU long name header"
    if white or WHITE.search(sample.key):
        return "names with white space"
    if "" in fields:
        return "names that end in a dot"
    return "names of more than 100 characters" if len(sample.key) + longest >= 100 else None


@lru_cache
def _longest_and_white(fields: frozenset[str]) -> tuple[int, bool]:
    return max(map(len, fields)), any(map(WHITE.search, fields))


class _Held:
    """Pieces that are iterated over once, and *held* for another time if they are not too many; None if they are."""

    def __init__(self, pieces: Iterable[Piece]):
        self._pieces = pieces
        self.held: list[Piece] | None = []

    def __iter__(self) -> Iterator[Piece]:
        members = 0
        for piece in self._pieces:
            members += len(piece)
            if members > HELD:
                self.held = None
            elif self.held is not None:
                self.held.append(piece)
            yield piece


def _batches(samples: Iterable[FoundSample]) -> Iterator[list[FoundSample]]:
    batch: list[FoundSample] = []
    size = 0
    for sample in samples:
        batch.append(sample)
        size += sample.size
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _undecodable(sample: FoundSample, file: PlainFile) -> Iterator[DecodeError]:
    from tarshards.codecs import decode_field

    for name, start, end in sample.members:
        if _is_unsafe(name):
            continue
        try:
            decode_field(name, file.read(start, end - start), images="rgb8")
        except DecodeError as error:
            yield DecodeError(error.reason, url=file.name, offset=start, key=sample.key, field=name)


def _is_unsafe(name: str) -> bool:
    from tarshards.codecs.registry import UNSAFE_DECODERS

    *_, inner, last = ["", *name.split(".")]
    return (inner if last == "gz" else last) in UNSAFE_DECODERS
