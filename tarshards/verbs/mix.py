"""Several streams of samples -> one, in proportions that hold at every position."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tarshards.epoch.proportions import Mixture, Quotas, Until, check_until
from tarshards.errors import OpenError, SampleError, TarshardsError, UrlError
from tarshards.samples.grouping import read_shard
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger
from tarshards.samples.lines import located
from tarshards.storage.expressions import Shard, find_shards
from tarshards.storage.location import Location
from tarshards.stream.interleave import MixedStream, interleave
from tarshards.stream.ops import rename_fields, shuffle

WEIGHTED = re.compile(r"(.+):([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)", re.DOTALL | re.IGNORECASE)
MISWEIGHTED = re.compile(r".*(?:\.t(?:ar|[gbx]z2?|zst)(?:\.\w+)?|\.json|[]*}]|^-):([^:/]*)", re.DOTALL)
ENTRIES = {"shards", "weight", "shuffle", "rename"}
OPTIONAL = "weight, shuffle and rename"


@dataclass
class Source:
    """One of the streams of a mixture: the samples of *shards*.

    *weight* is its share relative to the others. *shuffle* is the size of a shuffle buffer in samples, which gives each
    pass over the shards a different order; *rename* is ``{new: old}``, as for ``rename_fields``.
    """

    shards: Any
    weight: float | str = 1
    shuffle: int | None = None
    rename: Mapping[str, str] = field(default_factory=dict)


def parse_sources(texts: Sequence[str]) -> list[Source]:
    """Parse ``SHARDS:WEIGHT``, or ``SHARDS`` for equal weights; raise ValueError for an invalid weight.

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
    """Read sources from the YAML file *url*, a list of mappings, at the top level or under ``sources``.

    The mappings have the attributes of ``Source``. Requires PyYAML (``tarshards[yaml]``). Raises SampleError for a file
    with other content.
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
    on_end: Callable[[int], Any] | None = None,
) -> Iterator[Sample]:
    """Yield the samples of *sources* by weight: for every n, the first n contain each source's share to within one.

    *seed* breaks ties between sources, and seeds the shuffle buffers. The stream ends before the first source would
    start again (*until* "first"), when all have been read once ("last"), or after *until* samples; sources that end
    earlier start again. One sample of each source is held in memory, besides shuffle buffers. With "first", *on_end* is
    called with the number of the source that has ended.

    Raises OpenError if stdin would have to start again, UrlError if it is several sources, SampleError for a source
    without samples, and ValueError for invalid weights; other errors are as in ``read_samples``.
    """
    quotas = Quotas([source.weight for source in sources])
    choices = Mixture(quotas, seed)
    ledger, until = Ledger.of(on_error), check_until(until)
    streams, urls = [], []
    for number, source in enumerate(sources):
        shards = find_shards(source.shards)
        urls += shards.urls
        begin = partial(_read_pass, source, shards, seed + number, ledger)
        streams.append(MixedStream(begin, SampleError("no samples to mix", url=Location.of(shards[0].url).name)))
    if urls.count("-") > 1:
        raise UrlError("stdin can be only one of the sources", url="-")

    def mixed() -> Generator[Sample, None, None]:
        ended = yield from interleave(streams, choices, quotas.ends, until)
        if ended is not None and on_end is not None:
            on_end(ended)

    return mixed()


def _read_pass(
    source: Source,
    shards: Sequence[Shard],
    seed: int,
    ledger: Ledger,
    passes: int,
) -> Generator[Sample, None, None]:
    """Yield the samples of one pass of *source* over *shards*; *passes* is the number of earlier passes."""
    if passes and any(shard.url == "-" for shard in shards):
        raise OpenError("stdin has ended and cannot be read again", url="-")
    with closing(sample for shard in shards for sample in read_shard(shard, ledger=ledger)) as opened:
        samples: Iterable[Sample] = opened
        if source.shuffle is not None:
            samples = shuffle(samples, source.shuffle, initial=source.shuffle, seed=seed, epoch=passes)
        yield from _rename(samples, source.rename, ledger) if source.rename else samples


def _rename(samples: Iterable[Sample], names: Mapping[str, str], ledger: Ledger) -> Iterator[Sample]:
    """Yield *samples* with their fields renamed; if that fails, leave the sample out, and pass *ledger* the error."""
    for sample in samples:
        try:
            yield from rename_fields([sample], names)
        except TarshardsError as error:
            ledger.fail(error)
            ledger.count(failed=1)
