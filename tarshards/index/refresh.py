"""Indexes of many shards, by several processes: created where missing or stale, verified, exported."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from tarshards.errors import OpenError, ShardIndexError, TarshardsError, UrlError
from tarshards.index.build import build_index
from tarshards.index.sidecar import Index, index_location
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard

MANY = 1 << 26  # bytes of shards from which on several processes are faster than one


class IndexOutcome(NamedTuple):
    """The result for one shard: its counts, and the file that was (or would be) written, or else the error."""

    shard: Shard
    written: str | None = None
    error: TarshardsError | None = None


def refresh_indexes(
    shards: Sequence[Shard | str], *, jobs: int = 1, crc: bool = False, dry_run: bool = False
) -> Iterator[IndexOutcome]:
    """Create the index of every shard whose index is missing, stale or damaged; yield the outcomes in order.

    With *crc* indexes without checksums are replaced too. With *dry_run* nothing is written.
    """
    return _work(partial(_refresh, crc=crc, dry_run=dry_run), shards, jobs)


def verify_indexes(shards: Sequence[Shard | str], *, jobs: int = 1, crc: bool = False) -> Iterator[IndexOutcome]:
    """Compare the size and fingerprint of every shard with its index, with *crc* all data; yield the outcomes."""
    return _work(partial(_verify, crc=crc), shards, jobs)


def export_indexes(
    shards: Sequence[Shard | str], format: str, *, folder: str | None = None, jobs: int = 1, dry_run: bool = False
) -> Iterator[IndexOutcome]:
    """Write every index in *format*, "dali" or "tar.idx", beside its shard or into *folder*; yield the outcomes."""
    return _work(partial(_export, format=format, folder=folder, dry_run=dry_run), shards, jobs)


def find_index(shard: Shard | str) -> Index:
    """Return the index of a shard: from its sidecar, or built now if that is missing, stale or damaged."""
    shard = Shard.of(shard)
    try:
        return Index.load(shard.url)
    except ShardIndexError:
        return build_index(shard.url, concatenated=shard.concatenated)


def _refresh(shard: Shard, *, crc: bool, dry_run: bool) -> IndexOutcome:
    url, concatenated = shard.url, shard.concatenated
    try:
        index = Index.load(url)
        fresh = "crc32" in index.arrays or not crc
        concatenated = concatenated or index.archives > 1
    except ShardIndexError:
        fresh = False
    if not fresh:
        index = build_index(url, crc=crc, concatenated=concatenated)
        if not dry_run:
            index.save(url)
    return IndexOutcome(index.shard(url), None if fresh else index_location(url).url)


def _verify(shard: Shard, *, crc: bool) -> IndexOutcome:
    url = shard.url
    index = Index.load(url)
    if crc:
        if "crc32" not in index.arrays:
            raise ShardIndexError(
                "the index has no checksums; add them with `tarindex --crc`", url=index_location(url).name
            )
        if index != (found := build_index(url, crc=True, concatenated=index.archives > 1)):
            raise ShardIndexError(f"stale: {index.difference(found)}", url=index_location(url).name)
    return IndexOutcome(index.shard(url))


def _export(shard: Shard, *, format: str, folder: str | None, dry_run: bool) -> IndexOutcome:
    from tarshards.index.exports import write_dali, write_offsets

    index = find_index(shard)
    write = {"dali": write_dali, "tar.idx": write_offsets}[format]
    return IndexOutcome(index.shard(shard.url), write(index, shard.url, folder, dry_run=dry_run))


def _work(function: Callable[[Shard], IndexOutcome], named: Sequence[Shard | str], jobs: int) -> Iterator[IndexOutcome]:
    """Yield the outcomes of *function* for all shards, in order; *jobs* processes share them if they are many."""
    shards = list(map(Shard.of, named))
    attempt = partial(_attempt, function)
    if min(jobs, len(shards)) < 2 or not _are_many(shards):
        yield from map(attempt, shards)
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    from tarshards.parallel import bounded_map

    with ProcessPoolExecutor(min(jobs, len(shards)), get_context("fork"), _begin) as executor:
        try:
            yield from bounded_map(attempt, shards, executor=executor, window=4 * jobs)
        except BrokenProcessPool as error:
            raise OpenError("a process that indexed shards was killed, perhaps because memory ran out") from error


def _are_many(shards: Sequence[Shard]) -> bool:
    size = 0
    for shard in shards:
        with suppress(OpenError, UrlError):
            location = Location.of(shard.url)
            size += (location.size() or 0) if location.is_local else MANY
        if size >= MANY:
            return True
    return False


def _attempt(function: Callable[[Shard], IndexOutcome], shard: Shard) -> IndexOutcome:
    try:
        return function(shard)
    except TarshardsError as error:
        return IndexOutcome(Shard(shard.url), error=error)


def _begin() -> None:
    """Prepare a worker process: it finishes its shard on an interrupt, and ends with the tool."""
    from multiprocessing import parent_process
    from os import _exit
    from threading import Thread

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if parent := parent_process():

        def end() -> None:
            parent.join()
            _exit(1)

        Thread(target=end, daemon=True).start()
