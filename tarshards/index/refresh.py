"""The indexes of many shards: made where they are missing or stale, or verified, by several processes."""

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

MANY = 1 << 26  # bytes of shards from which several processes save more time than they cost


class Outcome(NamedTuple):
    """What became of a shard: its counts, what was written for it or would be, or the error it ended with."""

    shard: Shard
    written: str | None = None
    error: TarshardsError | None = None


def refresh_indexes(
    urls: Sequence[str], *, jobs: int = 1, crc: bool = False, dry_run: bool = False
) -> Iterator[Outcome]:
    """Make the index of every shard that has none or one that is stale or damaged; yield what became of each, in order.

    With *crc* those without checksums are made anew. With *dry_run* nothing is written.
    """
    return _work(partial(_refresh, crc=crc, dry_run=dry_run), urls, jobs)


def verify_indexes(urls: Sequence[str], *, jobs: int = 1, crc: bool = False) -> Iterator[Outcome]:
    """Compare the size and the fingerprint of every shard, with *crc* all of it, with its index; yield the outcomes."""
    return _work(partial(_verify, crc=crc), urls, jobs)


def export_indexes(
    urls: Sequence[str], format: str, *, folder: str | None = None, jobs: int = 1, dry_run: bool = False
) -> Iterator[Outcome]:
    """Write every index in *format*, "dali" or "tar.idx", beside its shard or into *folder*; yield the outcomes."""
    return _work(partial(_export, format=format, folder=folder, dry_run=dry_run), urls, jobs)


def find_index(url: str) -> Index:
    """Return the index of the shard *url*: its sidecar's, or one that is built now if that is missing or stale."""
    try:
        return Index.load(url)
    except ShardIndexError:
        return build_index(url)


def _refresh(url: str, *, crc: bool, dry_run: bool) -> Outcome:
    try:
        index = Index.load(url)
        fresh = "crc32" in index.arrays or not crc
    except ShardIndexError:
        fresh = False
    if not fresh:
        index = build_index(url, crc=crc)
        if not dry_run:
            index.save(url)
    return Outcome(Shard(url, len(index), index.shard_size), None if fresh else index_location(url).url)


def _verify(url: str, *, crc: bool) -> Outcome:
    index = Index.load(url)
    if crc:
        if "crc32" not in index.arrays:
            raise ShardIndexError("without checksums; tarindex --crc makes them", url=index_location(url).name)
        if index != (found := build_index(url, crc=True)):
            raise ShardIndexError(f"stale: {index.difference(found)}", url=index_location(url).name)
    return Outcome(Shard(url, len(index), index.shard_size))


def _export(url: str, *, format: str, folder: str | None, dry_run: bool) -> Outcome:
    from tarshards.index.exports import write_dali, write_offsets

    index = find_index(url)
    write = {"dali": write_dali, "tar.idx": write_offsets}[format]
    return Outcome(Shard(url, len(index), index.shard_size), write(index, url, folder, dry_run=dry_run))


def _work(function: Callable[[str], Outcome], urls: Sequence[str], jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes of *function* for all *urls*, in order, by *jobs* processes where there is enough to do."""
    attempt = partial(_attempt, function)
    if min(jobs, len(urls)) < 2 or not _are_many(urls):
        yield from map(attempt, urls)
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    from tarshards.parallel import bounded_map

    with ProcessPoolExecutor(min(jobs, len(urls)), get_context("fork"), _begin) as executor:
        try:
            yield from bounded_map(attempt, urls, executor=executor, window=4 * jobs)
        except BrokenProcessPool as error:
            raise OpenError("a process that indexed shards was killed, perhaps for want of memory") from error


def _are_many(urls: Sequence[str]) -> bool:
    size = 0
    for url in urls:
        with suppress(OpenError, UrlError):
            location = Location.of(url)
            size += (location.size() or 0) if location.is_local else MANY
        if size >= MANY:
            return True
    return False


def _attempt(function: Callable[[str], Outcome], url: str) -> Outcome:
    try:
        return function(url)
    except TarshardsError as error:
        return Outcome(Shard(url), error=error)


def _begin() -> None:
    """Prepare a worker: it finishes its shard when the tool is interrupted, and ends when the tool is no more."""
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
