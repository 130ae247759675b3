"""Split samples into shards by size, by the value of a field or by ratios; run a command for each finished shard."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.errors import EncodeError, OpenError, OpError, SampleError
from tarshards.samples.codecs.basic import decode_text
from tarshards.samples.fields import find_field
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import Reject, reject_or_raise
from tarshards.storage.claims import Claims
from tarshards.storage.expressions import LONGEST_NAME
from tarshards.storage.location import Location
from tarshards.storage.streams import taken
from tarshards.write.shards import ShardWriter, TarWriter

if TYPE_CHECKING:
    from tarshards.parallel.children import ChildGroup

MAX_SERIES = 500  # series of shards that are written at once; each keeps a file open
BRACES = re.compile(r"(?<!\$)\{\}")

Route = Callable[[Sample], str]


class SplitShard(NamedTuple):
    """A shard that was written, or that a dry run would write; *bytes* is its size before compression."""

    name: str
    samples: int
    bytes: int


def split_samples(
    samples: Iterable[Sample],
    pattern: str | Location,
    *,
    max_samples: int | None = None,
    max_bytes: int | None = None,
    first: int = 0,
    max_shards: int | None = None,
    routes: Mapping[str, Route] | None = None,
    index: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_finish: Callable[[str], Any] | None = None,
    reject: Reject | None = None,
    leave_out: Callable[[str], Any] | None = None,
) -> list[SplitShard]:
    """Write *samples* to the shards of *pattern*, as ``ShardWriter`` does, and return the shards.

    Each of *routes* is named after a variable in the pattern, and computes its value for a sample. Every combination of
    values is a series of shards, numbered from *first*; with *index*, each series gets indexes and a manifest. The
    error of a sample that has no route, or cannot be written, is raised, or passed to *reject*. Reading stops at the
    sample that would start one shard more than *max_shards*; *leave_out* is then called with "max_shards". *on_finish*
    is called with the name of each finished shard. With *dry_run*, nothing is written. Raises OpenError for a shard
    that exists, unless *overwrite*, and for a shard that two series, or another writer, would also write.
    """
    target = Location.of(pattern)
    shards: list[SplitShard] = []
    begun: set[str] = set()
    claims = Claims()
    series: dict[tuple[str, ...], ShardWriter] = {}
    routes = routes or {}

    def open_writer(name: str) -> TarWriter:
        if max_shards is not None and len(begun) >= max_shards:
            raise _EnoughError
        if name in begun:
            raise OpenError("two series would write this shard", url=Location.of(name).name)
        if not dry_run:
            claims.take(name)
        if not overwrite and (location := Location.of(name)).is_taken():
            raise taken(location.name)
        begun.add(name)
        return TarWriter(os.devnull if dry_run else name, allow_pipe=target.allow_pipe, sync=target.sync)

    def finish(name: str, writer: TarWriter) -> None:
        shards.append(SplitShard(name, writer.samples, writer.size))
        if on_finish is not None and not dry_run:
            on_finish(name)

    def open_series(values: tuple[str, ...]) -> ShardWriter:
        if len(series) >= MAX_SERIES:
            raise OpenError(f"more than {MAX_SERIES} series of shards at once", url=target.name)
        return ShardWriter(
            target.url,
            max_samples=max_samples,
            max_bytes=max_bytes,
            start=first,
            index=index and not dry_run,
            sync=target.sync,
            values=dict(zip(routes, values)),
            open_writer=open_writer,
            on_finish=finish,
        )

    try:
        for sample in samples:
            try:
                values = tuple([route(sample) for route in routes.values()])
                if values not in series:
                    series[values] = open_series(values)
                series[values].write(sample)
            except (SampleError, EncodeError) as error:
                reject_or_raise(reject, sample, error)
            except _EnoughError:
                if leave_out is not None:
                    leave_out("max_shards")
                break
        for writer in series.values():
            writer.close()
    finally:
        for writer in series.values():
            writer.abort()
        claims.release()
    return shards


class _EnoughError(Exception):
    """The next sample would start one shard too many."""


def route_by_field(field: str) -> Route:
    """Return a route by the text of *field*.

    The route raises SampleError if a sample lacks the field, or its text is not safe in a file name.

    >>> route_by_field("cls")({"__key__": "a", "cls": b"7"})
    '7'
    """

    def route(sample: Sample) -> str:
        name = find_field(sample, [field])
        if name is None:
            raise SampleError("no such field to split by", field=field).at(sample)
        value = sample[name]
        try:
            text = (decode_text(value) if isinstance(value, bytes) else str(value)).strip()
        except ValueError as error:
            raise SampleError(f"cannot split by a field that is not text: {error}", field=field).at(sample) from error
        if not is_safe(text):
            raise SampleError(f"{text[:50]!r} is not safe in a file name", field=field).at(sample)
        return text

    return route


def is_safe(text: str) -> bool:
    """Return whether *text* is safe as part of a file name: no folder, URL or hidden file, and not too long.

    >>> is_safe("cat 7%"), is_safe("../cat"), is_safe("pipe:cat"), is_safe(""), is_safe("x" * 256)
    (True, False, False, False, False)
    """
    is_plain = text.isprintable() and not re.search(r"[/\\:*?\[\]{}]", text)
    return 0 < len(text.encode(errors="replace")) <= LONGEST_NAME and text[0] not in ".-@" and is_plain


def route_by_ratios(ratios: Mapping[str, float], *, seed: int = 0) -> Route:
    """Return a route that assigns samples to names in the given *ratios*, by a hash of *seed* and the key.

    Raises ValueError unless the ratios are positive and add up to 1.

    >>> route_by_ratios({"train": 0.9, "val": 0.1})({"__key__": "a"})
    'train'
    """
    names = list(ratios)
    if not names or not (min(ratios.values()) > 0 and abs(sum(ratios.values()) - 1) < 1e-9):
        raise ValueError("ratios must be positive and their sum must be 1")
    bounds = list(accumulate(ratios.values()))[:-1]

    from hashlib import blake2b

    def route(sample: Sample) -> str:
        digest = blake2b(f"{seed}/{sample['__key__']}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
        return names[bisect_right(bounds, int.from_bytes(digest, "big") / 2**64)]

    return route


class ShardCommand:
    """Run a bash *command* for each shard that it is called with, at most *jobs* at a time.

    The name of the shard is in ``$TAR_SHARD`` and replaces each ``{}``, so that it remains one word, within quotes too;
    a call raises OpError if it cannot. If the command succeeds and *delete* is set, the shard is removed. If it fails,
    the next call or ``close`` raises OpError.
    """

    def __init__(self, command: str, *, jobs: int = 1, delete: bool = False):
        self.command = command
        self.jobs = jobs
        self.delete = delete
        self._running: list[tuple[str, ChildGroup]] = []

    def __call__(self, shard: str) -> None:
        while len(self._running) >= self.jobs:
            self._wait()
        from tarshards.storage.bash_line import fill_line
        from tarshards.storage.pipe import start

        try:
            command = fill_line(self.command, BRACES, lambda match: shard)
        except ValueError as error:
            reason = f"the command for this shard was not run: {error}"
            raise OpError(reason, url=Location.of(shard).name) from error
        environment = {**os.environ, "TAR_SHARD": shard}
        group = start(command, f"pipe:{command}", environment=environment, stdin=os.devnull, stdout=2)
        self._running.append((shard, group))

    def _wait(self) -> None:
        shard, group = self._running[0]
        status = group.reap()
        del self._running[0]
        if status:
            reason = f"the command for this shard {group.how_it_ended}; the shard is kept"
            raise OpError(reason, url=Location.of(shard).name)
        if self.delete:
            try:
                os.unlink(Location.of(shard).path or shard)
            except OSError as error:
                name = Location.of(shard).name
                raise OpenError(f"cannot delete: {error.strerror}", url=name, errno=error.errno) from error

    def close(self) -> None:
        """Wait for all commands; raise OpError for the first that failed."""
        while self._running:
            self._wait()

    def __enter__(self) -> ShardCommand:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            for _shard, group in self._running:
                group.end()
