"""The samples of any shard, one by one: those that are whole, and what is wrong with all else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from tarshards.errors import DecodeError
from tarshards.parallel import bounded_map
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.image import EXTENSIONS
from tarshards.samples.codecs.registry import DECODERS, UNSAFE_DECODERS
from tarshards.samples.resync.grouping import FoundSample, group_found
from tarshards.samples.resync.reading import explain
from tarshards.samples.resync.survey import survey_file
from tarshards.samples.resync.walking import Gap, Piece, Zeros, walk
from tarshards.storage.plain import PlainFile
from tarshards.verbs.check.report import Finding, Report

HELD = 1 << 16  # members of a shard that are held rather than looked for twice
BATCH = 1 << 21  # bytes of samples that are decoded at once
WHITE = re.compile(r"\s")


def whole_samples(file: PlainFile, report: Report) -> Iterator[FoundSample]:
    """Yield the samples of a shard that are whole; the others, and gaps, are findings."""

    def skip(reason: str) -> None:
        report.skipped[reason] += 1

    pieces = _Held(walk(file))
    if any(isinstance(piece, Gap) for piece in pieces):
        found = survey_file(file)
        report.skipped += found.skipped
        items: list[Any] = sorted([*found.samples, *found.gaps, *found.zeros], key=_start)
        lost = sum(sample.problem is not None for sample in found.samples)
        report.damaged[file.name] = {"samples": len(found.samples) - lost, "lost": lost, **found.account}
    else:
        items = group_found(pieces.held or walk(file), skip=skip)  # type: ignore[assignment]
    for item in items:
        if isinstance(item, Zeros):
            if item.end < file.size:
                reason = "an archive ends here and another one begins, or members were overwritten with zeros"
                report.add(Finding("warning", "zeros", reason, file.name, item.start))
        elif isinstance(item, Gap):
            report.add_error("damage", explain(file.name, item))
        elif item.problem is not None:
            report.lost += 1
            report.add_error("sample", explain(file.name, item))
        else:
            yield item


def _start(item: FoundSample | Gap | Zeros) -> int:
    return item.offset if isinstance(item, FoundSample) else item.start


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


def decoded(samples: Iterable[FoundSample], file: PlainFile, report: Report, threads: int) -> Iterator[FoundSample]:
    """Yield the samples when *threads* have decoded their fields; those that do not decode are findings."""

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
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _undecodable(sample: FoundSample, file: PlainFile) -> Iterator[DecodeError]:
    for name, start, end in sample.members:
        if _is_unsafe(name):
            continue
        data = file.read(start, end - start)
        if _is_image(name) and _is_sound_jpeg(data):
            continue
        try:
            decode_field(name, data, images="rgb8")
        except DecodeError as error:
            yield DecodeError(error.reason, url=file.name, offset=start, key=sample.key, field=name)


def _is_unsafe(name: str) -> bool:
    *_, inner, last = ["", *name.split(".")]
    return (inner if last == "gz" else last) in UNSAFE_DECODERS


def _is_image(name: str) -> bool:
    """Say whether *name* is that of a field that ``decode_field`` takes for an image."""
    extension = name.rpartition(".")[2]
    return extension in EXTENSIONS and extension not in DECODERS


def _is_sound_jpeg(data: bytes) -> bool:
    """Say whether *data* is a JPEG that decodes at an eighth of its size, for which every bit of it is read too.

    Damage shows in those bits; there are only fewer pixels to compute. Where this is False, ``decode_field`` decides.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return False
    try:
        import simplejpeg
        from PIL import Image

        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        limit = Image.MAX_IMAGE_PIXELS
        if colorspace not in ("Gray", "YCbCr", "RGB") or (limit is not None and width * height > limit):
            return False
        simplejpeg.decode_jpeg(data, min_height=1, min_width=1)
    except (ImportError, ValueError):
        return False
    return True


def misread_by_dali(sample: FoundSample) -> str | None:
    """Say what DALI's reader of tars, or its ``wds2idx``, makes another sample of; None where all is well."""
    fields = sample.fields
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
