"""Several streams of samples -> one, in proportions that hold at every moment."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

from tarshards.epoch.proportions import Mixture, Until, check_until
from tarshards.errors import OpenError, SampleError, TarshardsError, UrlError
from tarshards.samples.keys import KeyRule, Sample, Split, key_rule, split_name
from tarshards.samples.ledger import ErrorPolicy, Ledger
from tarshards.samples.lines import located
from tarshards.samples.read import read_shard
from tarshards.storage.expressions import Shard, expand_shards
from tarshards.storage.location import Location
from tarshards.stream.ops import rename_fields, shuffle

WEIGHTED = re.compile(r"(.+):([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)", re.DOTALL | re.IGNORECASE)
MISWEIGHTED = re.compile(r".*(?:\.t(?:ar|[gbx]z2?|zst)(?:\.\w+)?|\.json|[]*}]|^-):([^:/]*)", re.DOTALL)
ENTRIES = {"shards", "weight", "shuffle", "rename"}
OPTIONAL = "weight, shuffle and rename"


@dataclass
class Source:
    """One of the streams of a mixture: the samples of *shards*.

    *weight* is its share relative to the others. *shuffle* is the size of a shuffle buffer in samples, which gives each
    pass over the shards another order; *rename* is ``{new: old}``, as for ``rename_fields``.
    """

    shards: Any
    weight: float | str = 1
    shuffle: int | None = None
    rename: Mapping[str, str] = field(default_factory=dict)


def parse_sources(texts: Sequence[str]) -> list[Source]:
    """Parse ``SHARDS:WEIGHT``, or ``SHARDS`` for equal weights; raise ValueError for anything else as a weight.

    >>> parse_sources(["a.tar:0.7", "b-{0..9}.tar:.3"])[1]
    Source(shards='b-{0..9}.tar', weight='.3', shuffle=None, rename={})
    """
    matches = [WEIGHTED.fullmatch(text) for text in texts]
    for text, match in zip(texts, matches):
        if match is None and (wrong := MISWEIGHTED.fullmatch(text)):
            raise ValueError(f"{text}: the weight {wrong[1]!r} is not a number: write SHARDS:WEIGHT, such as a.tar:0.7")
        if match is None and any(matches):
            raise ValueError(f"{text} has no weight, but others have: write SHARDS:WEIGHT")
    return [Source(match[1], match[2]) if match else Source(text) for text, match in zip(texts, matches)]


def read_sources(url: str) -> list[Source]:
    """Read sources from the YAML at *url*: a list of shards, weight, shuffle and rename, bare or under ``sources``.

    Requires PyYAML (``tarshards[yaml]``). Raises SampleError for anything else than such a list.
    """
    from tarshards.samples.codecs.registry import require

    yaml = require("yaml", extra="yaml")
    location = Location.of(url)
    text = location.read()
    with located(location.name):
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error
        if isinstance(found, dict) and found.keys() == {"sources"}:
            found = found["sources"]
        if not isinstance(found, list) or not found:
            raise ValueError("a mixture must be a list of sources")
        return [_source(number, entry) for number, entry in enumerate(found, 1)]


def _source(number: int, entry: Any) -> Source:
    if not isinstance(entry, dict) or "shards" not in entry or not entry.keys() <= ENTRIES:
        raise ValueError(f"source {number} must have shards, and may have {OPTIONAL}, not {str(entry)[:80]}")
    source = Source(**entry)
    listed = source.shards if isinstance(source.shards, list) else [source.shards]
    if not listed or not all(isinstance(spec, str) for spec in listed):
        raise ValueError(f"source {number}: shards must be an expression or a list of them")
    if isinstance(source.weight, bool) or not isinstance(source.weight, int | float):
        raise ValueError(f"source {number}: weight must be a number, not {source.weight!r}")
    if source.shuffle is not None and (type(source.shuffle) is not int or source.shuffle < 1):
        raise ValueError(f"source {number}: shuffle must be a number of samples, not {source.shuffle!r}")
    pairs = source.rename.items() if isinstance(source.rename, dict) else [(None, None)]
    if not all(isinstance(name, str) for pair in pairs for name in pair):
        raise ValueError(f"source {number}: rename must map new names to old ones, not be {source.rename!r}")
    return source


def mix_streams(
    sources: Sequence[Source],
    *,
    seed: int = 0,
    until: Until = "first",
    on_error: ErrorPolicy = None,
    concatenated: bool = False,
    split: KeyRule | Split = split_name,
    allow_pipe: bool = False,
    on_end: Callable[[Source], Any] | None = None,
) -> Iterator[Sample]:
    """Yield the samples of *sources* by weight: the first n contain each source's share to within one, for every n.

    *seed* orders sources with equal claims, and shuffles. The stream ends before the first source would start again
    (*until* "first"), when all have been read once ("last"), or after *until* samples; sources that are exhausted
    earlier start again. One sample of each source is held, besides shuffle buffers. With "first", *on_end* is called
    with the source that ends.

    Raises OpenError if stdin would have to start again, SampleError for a source without samples, and ValueError for
    invalid weights; other errors, *concatenated* and *split* are as in ``read_samples``.
    """
    check_until(until)
    mixture = Mixture([source.weight for source in sources], seed)
    ledger = Ledger.of(on_error)
    find = partial(expand_shards, concatenated=concatenated, allow_pipe=allow_pipe)
    read = partial(read_shard, ledger=ledger, split=key_rule(split))
    streams = [
        _SourceStream(source, find(source.shards), seed + number, ledger, read) for number, source in enumerate(sources)
    ]
    if sum(stream.urls.count("-") for stream in streams) > 1:
        raise UrlError("stdin can be only one of the sources", url="-")
    return _mix(streams, mixture, until, on_end)


def _mix(
    streams: list[_SourceStream], mixture: Mixture, until: Until, on_end: Callable[[Source], Any] | None
) -> Iterator[Sample]:
    unread = {number for number, stream in enumerate(streams) if Fraction(str(stream.source.weight))}
    try:
        for taken, number in enumerate(mixture):
            stream = streams[number]
            if taken == until:
                return
            if until == "first" and stream.has_ended():
                if on_end is not None:
                    on_end(stream.source)
                return
            yield stream.take()
            if until == "last" and stream.has_ended():
                unread.discard(number)
                if not unread:
                    return
    finally:
        for stream in streams:
            stream.close()


class _SourceStream:
    """The samples of one source, pass after pass; it knows whether a pass has ended."""

    def __init__(
        self,
        source: Source,
        shards: list[Shard],
        seed: int,
        ledger: Ledger,
        read: Callable[[Shard], Iterator[Sample]],
    ):
        self.source, self.parts, self.seed, self.ledger, self.read_shard = source, shards, seed, ledger, read
        self.urls = [shard.url for shard in self.parts]
        self.passes = 0
        self.samples: Iterator[Sample] = iter(())
        self.opened: Generator[Sample, None, None] | None = None
        self.next: Sample | None = None

    def has_ended(self) -> bool:
        """Say whether a pass has ended; before the first pass, none has."""
        if self.next is None and self.passes:
            self.next = next(self.samples, None)
        return self.next is None and self.passes > 0

    def take(self) -> Sample:
        """Return the next sample, the first of a new pass if one has ended."""
        if self.passes == 0 or self.has_ended():
            if self.passes and "-" in self.urls:
                raise OpenError("stdin has ended and cannot be read again", url="-")
            self.samples = self.read()
            self.passes += 1
            if self.has_ended():
                raise SampleError("no samples to mix", url=Location.of(self.urls[0]).name)
        sample, self.next = self.next, None
        assert sample is not None
        return sample

    def read(self) -> Iterator[Sample]:
        """Read all shards once."""
        self.opened = self.shards()
        samples: Iterable[Sample] = self.opened
        if self.source.shuffle is not None:
            size = self.source.shuffle
            samples = shuffle(samples, size, initial=size, seed=self.seed, epoch=self.passes)
        return iter(self.renamed(samples) if self.source.rename else samples)

    def shards(self) -> Generator[Sample, None, None]:
        """Yield the samples of the shards."""
        for shard in self.parts:
            yield from self.read_shard(shard)

    def renamed(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Rename the fields; samples for which that fails go to the ledger."""
        for sample in samples:
            try:
                yield from rename_fields([sample], self.source.rename)
            except TarshardsError as error:
                self.ledger.fail(error)
                self.ledger.count(failed=1)

    def close(self) -> None:
        """Close open shards at once, even if a traceback still refers to them."""
        if self.opened is not None:
            self.opened.close()
