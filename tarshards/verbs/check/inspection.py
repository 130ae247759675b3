"""Inspect the samples of any shard one by one: yield the whole ones, report the faults of the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from tarshards.errors import DecodeError
from tarshards.parallel.calls import bounded_map
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.image import IMAGES, check_image
from tarshards.samples.codecs.registry import DECODERS, UNSAFE_DECODERS
from tarshards.samples.keys import KeyRule, split_name
from tarshards.samples.resync.judging import judge
from tarshards.samples.resync.reading import Survey, explain, group_file, read_member
from tarshards.samples.resync.walking import FoundSample, Gap, Piece, Zeros, group_found, walk
from tarshards.storage.opening import PlainFile
from tarshards.storage.streams import PIECE
from tarshards.verbs.check.report import Report

HELD = 1 << 16  # the most members of a shard whose headers are held in memory rather than read twice
WHITE = re.compile(r"\s")


def whole_samples(
    file: PlainFile,
    report: Report,
    survey: Survey | None = None,
    *,
    split: KeyRule = split_name,
) -> Iterator[FoundSample]:
    """Yield the whole samples of a shard; the others, and gaps, become findings.

    *survey* is the survey of the shard, judged if it has gaps. Without it the headers are read here, and the samples of
    a shard without gaps are not held in memory. Members after the end of an archive are a finding unless *file* is
    ``concatenated``.
    """
    if survey is None:
        pieces = _Held(walk(file))
        gaps = [piece for piece in pieces if isinstance(piece, Gap)]
        if gaps:
            survey = group_file(file, split=split, pieces=pieces.held)
            judge(survey.samples, survey.gaps, file)
    if survey is not None:
        report.skipped += survey.skipped
        items: Iterable[Any] = survey.items
        if survey.gaps:
            incomplete = sum(sample.problem is not None for sample in survey.samples)
            whole = len(survey.samples) - incomplete
            report.damaged[file.name] = {"samples": whole, "lost": incomplete, **survey.byte_counts}
    else:
        items = group_found(pieces.held or walk(file), file, split=split, skip=report.skip)
    for item in items:
        if isinstance(item, Zeros):
            if item.end < file.size and file.shard.concatenated:
                report.joined += 1
            elif item.end < file.size:
                report.add_error("zeros", explain(file.name, item))
        elif isinstance(item, Gap):
            report.add_error("damage", explain(file.name, item))
        elif item.problem is not None:
            report.lost += 1
            report.add_error("sample", explain(file.name, item))
        else:
            yield item


class _Held:
    """Iterates over *pieces* and keeps them in ``held`` for a second pass; None if they have more than HELD members."""

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


def decoded(samples: Iterable[FoundSample], file: PlainFile, report: Report, threads: int) -> Iterator[FoundSample]:
    """Decode the fields of *samples* in *threads* threads, and yield the samples; failures become findings."""

    def decode(batch: list[FoundSample]) -> list[tuple[FoundSample, list[DecodeError]]]:
        return [(sample, list(_undecodable(sample, file))) for sample in batch]

    with ThreadPoolExecutor(threads) as executor:
        for done in bounded_map(decode, _batches(samples), executor=executor, window=max(8, 2 * threads)):
            for sample, errors in done:
                for error in errors:
                    report.add_error("decode", error)
                yield sample


def _batches(samples: Iterable[FoundSample]) -> Iterator[list[FoundSample]]:
    batch: list[FoundSample] = []
    size = 0
    for sample in samples:
        batch.append(sample)
        size += sample.size
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _undecodable(sample: FoundSample, file: PlainFile) -> Iterator[DecodeError]:
    for number, (name, start, _) in enumerate(sample.members):
        if _is_unsafe(name):
            continue
        data = read_member(file, sample, number)
        try:
            if _is_image(name):
                check_image(data)
            else:
                decode_field(name, data, "rgb8", "audio")
        except DecodeError as error:
            yield DecodeError(error.reason, url=file.name, offset=start, key=sample.key, field=name)


def _is_unsafe(name: str) -> bool:
    *_, inner, last = ["", *name.split(".")]
    return (inner if last == "gz" else last) in UNSAFE_DECODERS


def _is_image(name: str) -> bool:
    """Return whether ``decode_field`` decodes the field *name* as an image."""
    return IMAGES.has(name) and name.rpartition(".")[2] not in DECODERS


def misread_by_dali(sample: FoundSample) -> str | None:
    """Return what makes DALI's tar reader, or ``wds2idx``, misread the sample; None if they read it correctly."""
    fields = sample.fields
    longest, white = _longest_and_white(fields)
    if sample.elsewhere:
        return "links or sparse members"
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
