"""Which shards have indexes, and the beginnings of these: for many shards, without loading an index."""

from __future__ import annotations

import os
import resource
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

from tarshards import kernels
from tarshards.errors import OpenError, ShardIndexError, TarshardsError
from tarshards.index.sidecar import DAMAGED, MISSING, OTHER, Index, index_location, what_is_wrong
from tarshards.kernels._sidecars_py import BEGINNING, SidecarHead, parse_head
from tarshards.samples.fields import FieldNames
from tarshards.samples.keys import Split
from tarshards.storage.derived import INDEX
from tarshards.storage.location import Location, are_local, are_remote, paths_of
from tarshards.storage.manifest import Shard, Shards
from tarshards.storage.streams import is_missing, is_refused, read_at_most

if TYPE_CHECKING:
    from tarshards.storage.wire import Steps

FEW = 64  # local shards after which it is measured whether threads would be faster
MANY = 1 << 10  # local shards that threads read until the next measurement
PROBED = 1 << 12  # shards, spread evenly over the list, whose sidecars are looked for first
COUNTS = ("samples", "size")  # the counts of a shard
SPLITS: tuple[Split, ...] = get_args(Split)


def has_index(shards: Shards) -> list[bool]:
    """Return for each shard whether it has a sidecar; large folders are listed, remote ones requested in parallel."""
    if not _are_local(shards):
        from tarshards.storage.wire import results

        locations = shards.locations()
        return list(results(map(_has_index, locations), 2 * locations[0].remote.connections))
    paths = paths_of(shards.urls)
    there = [False] * len(paths)
    for (shard_folder, folder), numbers in _by_folder(paths, shards.column("index_dir")).items():
        bases = [paths[number][len(shard_folder) :] + INDEX for number in numbers]
        listed = _listed(folder, bases) if len(bases) > FEW else None
        for number, is_there in zip(numbers, listed or (os.path.exists(folder + base) for base in bases)):
            there[number] = bool(is_there)
    return there


def _are_local(shards: Shards) -> bool:
    """Return whether all shards and their sidecars are files of this machine."""
    folders = {*shards.column("index_dir")}
    return shards.is_local and all(folder is None or Location(folder).is_local for folder in folders)


def _by_folder(paths: list[str], index_dirs: list[str | None]) -> dict[tuple[str, str], Sequence[int]]:
    """Return the numbers of *paths* by their folders and those of their sidecars, which end in a slash."""
    folder = paths[0][: paths[0].rfind("/") + 1] if paths else ""
    text = "\0" + "\0".join(paths)
    is_one = text.count("/") == folder.count("/") * len(paths) and text.count("\0" + folder) == len(paths)
    folders: dict[tuple[str, str | None], Any] = {}
    if is_one and len(set(index_dirs)) == 1:
        folders[folder, index_dirs[0]] = range(len(paths))  # fast, even for many thousands
    else:
        for number, (path, index_dir) in enumerate(zip(paths, index_dirs)):
            folders.setdefault((path[: path.rfind("/") + 1], index_dir), []).append(number)
    return {(folder, _index_folder(folder, index_dir)): numbers for (folder, index_dir), numbers in folders.items()}


def _listed(folder: str, bases: list[str]) -> bytes | None:
    """Return for each of the names *bases* in *folder* whether it is listed; None if a listing does not tell."""
    try:
        found = kernels.sidecars.are_listed(os.fsencode(folder or "."), os.fsencode("\0".join(bases)))
    except (OSError, UnicodeEncodeError):
        return None
    first = found.find(0)
    if len(found) != len(bases) or (first >= 0 and os.path.exists(folder + bases[first])):
        return None  # a name has a NUL, or has another form in the listing, as in upper case
    return found


def _has_index(location: Location) -> Steps[bool]:
    """Return whether a shard has a sidecar; a thread waits only for stores that are not read over our connections."""
    from tarshards.storage.transfer import find_address, find_version
    from tarshards.storage.wire import looking

    try:
        if location.is_stream:
            return False
        sidecar = index_location(location)
        address = (yield from find_address(sidecar)) if sidecar.is_remote else None
        if address is None:
            return (yield from looking(sidecar.exists))
        yield from find_version(address)
        return True
    except OpenError as error:
        # A store refuses names that it does not show, or that are not signed.
        if is_missing(error) or (location.is_remote and is_refused(error)):
            return False
        raise


def _index_folder(folder: str, index_dir: str | None) -> str:
    """Return the folder, with its slash, of the sidecars of local shards in *folder*."""
    if index_dir is None:
        return folder
    return os.path.join(os.path.dirname(str(Location(f"{folder}x", index_dir=index_dir).described.path)), "")


def with_counts(shards: Shards, uncounted: Sequence[int], *fields: FieldNames | None) -> tuple[Shards, Sequence[int]]:
    """Return *shards* with the counts of the *uncounted* ones from their indexes, and the shards without an index.

    *uncounted*, and the shards without an index, are numbers of shards. Only the beginnings of indexes are read, and
    the sizes of local shards: they are compared with the shards when these are opened, except for shards without
    samples, which are not opened. If none of PROBED shards, evenly spaced, has an index, the others are not looked for,
    as if they had none. Raises ShardIndexError for an index that is damaged, made by another rule for names than its
    shard is read by, or of a shard of another size, and OpenError for a local shard that is missing; SampleError if the
    first of these shards lacks one of *fields*.
    """
    if not uncounted:
        return shards, []
    those = shards if len(uncounted) == len(shards) else shards.take(uncounted)
    heads = [array("q", bytes(8 * len(those))) for _ in range(3)]
    step = -(-len(those) // PROBED)
    for begin in range(step):
        found = _read_heads(those[begin::step])
        for which, values in enumerate(heads):
            values[begin::step] = found[which::3]
        if begin == 0 and max(found) < 0:
            return shards, uncounted
    counts, sizes, are_last = heads
    if min(counts) < 0:
        return shards, [number for number, count in zip(uncounted, counts) if count < 0]
    if any(fields):
        first = those[0].location()
        known = Index.load(first, check=False).fields
        for names in filter(None, fields):
            names.check(known, first.name)
    splits = those.column("split")
    if 0 in counts or any(splits):
        for number, (split, count, is_last) in enumerate(zip(splits, counts, are_last)):
            if count == 0 or split == SPLITS[not is_last]:
                Index.load(those[number].location()).check_split(split)
    columns = {}
    for name, said in zip(COUNTS, (counts, sizes)):
        columns[name] = said.tolist()
        if len(said) < len(shards):
            columns[name] = shards.column(name).copy()
            for number, value in zip(uncounted, said):
                columns[name][number] = value
    return shards.replace(**columns), []


def find_indexed(shards: Shards, *fields: FieldNames | None) -> Shards | None:
    """Return *shards* with the counts in their indexes if all have one; None if none has.

    Sidecars are looked for, of remote shards that a manifest counts for at most PROBED; none of remote shards that are
    all *indexed*. The other arguments and errors are those of ``with_counts``. Raises ShardIndexError, too, if only
    some shards have a sidecar, or those with an *index_dir* have none, and OpenError if a shard without one is missing
    itself.
    """
    folders = shards.column("index_dir")
    is_beside = {*folders} == {None}
    if is_beside and all(shards.column("indexed")) and are_remote(shards.urls):
        return shards  # as their manifest says
    uncounted = shards.uncounted
    counted, without = with_counts(shards, uncounted, *fields)
    known = sorted({*range(len(shards))}.difference(uncounted)) if uncounted else range(len(shards))
    probed = known if shards.is_local else known[:: -(-len(known) // PROBED) or 1]
    found = has_index(shards.take(probed)) if probed else []
    missing = [*without, *(number for number, is_there in zip(probed, found) if not is_there)]
    if not missing:
        return counted
    looked_for = len(uncounted) + len(probed)
    if len(missing) == looked_for and is_beside:
        return None
    if len(missing) < looked_for:
        first = min(missing)
        reason = "no index found, but other shards have one; create it with `tarindex`, or pass index=False"
    else:
        first = min(missing, key=lambda number: (folders[number] is None, number))
        reason = f"no index found in {folders[first]}; create it with `tarindex --index-dir`"
    location = shards[first].location()
    location.check_there()
    raise ShardIndexError(reason, url=location.name)


def _read_heads(shards: Shards) -> array[int]:
    """Return the result of ``read_heads`` for *shards*; raise ShardIndexError if an index is wrong."""
    if not _are_local(shards):
        from tarshards.storage.wire import results

        locations = shards.locations()
        heads = results(map(_find_head_ahead, locations), 2 * locations[0].remote.connections)
        return array("q", chain.from_iterable(heads))
    found = array("q")
    for some in for_some_shards(lambda some: _read_some(shards[some.start : some.stop]), shards):
        found += some
    return found


def _read_some(shards: Shards) -> array[int]:
    paths = paths_of(shards.urls)
    folders = _by_folder(paths, shards.column("index_dir"))
    found = array("q", [-2, -1, -1] * len(paths))
    for own, numbers in folders.items():
        given = *own, "\0".join([paths[number] for number in numbers])
        with suppress(ValueError):  # for impossible names
            heads = array("q", kernels.sidecars.read_heads(*map(os.fsencode, given)))
            if len(heads) == 3 * len(numbers) == len(found):
                found = heads
            elif len(heads) == 3 * len(numbers):
                for i, number in enumerate(numbers):
                    found[3 * number : 3 * number + 3] = heads[3 * i : 3 * i + 3]
    if min(found) < -1:  # sidecars that the kernel cannot read: raise the error, or read them by their locations
        for i in range(len(paths)):
            if found[3 * i] < -1:
                found[3 * i : 3 * i + 3] = array("q", _find_head(shards[i].location()))
    return found


def _find_head_ahead(location: Location) -> Steps[tuple[int, int, int]]:
    """Return what ``_find_head`` does; no thread waits for the sidecar."""
    from tarshards.storage.wire import loading, start

    fetched = None
    if not location.is_stream and (sidecar := index_location(location)).is_remote:
        yield (fetched := start(_fetch_beginning(sidecar)))
    return (yield from loading(_find_head, location, fetched and fetched.result))


def _fetch_beginning(sidecar: Location) -> Steps[bytes]:
    from tarshards.storage.requests import NO_RANGES
    from tarshards.storage.transfer import HEAD, RemoteFile, find_address
    from tarshards.storage.wire import loading

    address = yield from find_address(sidecar)
    if address is not None:
        try:
            file = RemoteFile(address)
            data = yield from file.fetch(0, HEAD)
            file.refuse_encoded()
            return bytes(data[:BEGINNING])
        except OpenError as error:
            if error.reason != NO_RANGES:
                raise
    return (yield from loading(_read_beginning, sidecar))


def _find_head(location: Location, fetched: Callable[[], bytes] | None = None) -> tuple[int, int, int]:
    """Return the result of ``read_heads`` for one shard; raise ShardIndexError or OpenError for a faulty one."""
    try:
        if location.is_stream:
            return -1, -1, -1
        head = read_head(location, fetched)
        if location.is_local and head.size != location.size():
            Index.load(location)
    except ShardIndexError as error:
        if error.reason != MISSING:
            raise
        return -1, -1, -1
    except OpenError as error:
        if not (location.is_remote and is_refused(error)):
            raise
        return -1, -1, -1
    return head.samples, head.size, int(head.split == "last")


def has_ranges(location: Location) -> bool:
    """Return whether parts of a shard can be read, as through an index; False for a server that sends whole files only.

    Other errors are left to the reader of the shard.
    """
    if not location.is_remote:
        return True
    from tarshards.storage.requests import NO_RANGES

    try:
        location.ranges().close()
    except OpenError as error:
        return error.reason != NO_RANGES
    return True


def read_head(shard_url: str | Location, fetched: Callable[[], bytes] | None = None) -> SidecarHead:
    """Return what the beginning of a shard's sidecar says; raise ShardIndexError if it is missing or damaged.

    *fetched* returns the beginning, or raises the error of fetching it.
    """
    location = index_location(shard_url)
    try:
        data = _read_beginning(location) if fetched is None else fetched()
    except OpenError as error:
        if is_missing(error):
            raise ShardIndexError(MISSING, url=location.name) from error
        raise
    try:
        return parse_head(data)
    except (ValueError, TypeError, KeyError) as error:
        wrong = what_is_wrong(data)
        reason = f"damaged: {type(error).__name__}: {error}" if wrong == DAMAGED else wrong
        raise ShardIndexError(reason, url=location.name) from error


def _read_beginning(location: Location) -> bytes:
    if location.is_remote:
        from tarshards.storage.requests import NO_RANGES

        try:
            with location.ranges() as ranges:
                return ranges.read_up_to(0, BEGINNING)
        except OpenError as error:
            if error.reason != NO_RANGES:
                raise
    with location.open() as stream:
        return read_at_most(stream, BEGINNING, BEGINNING)


def check_described(shard: Shard, location: Location) -> None:
    """Raise ShardIndexError if the index of *shard*, at *location*, differs from the shard's entry in the manifest.

    A shard without index passes.
    """
    if shard.digest is None:
        return
    try:
        digest = read_head(location).digest
    except ShardIndexError as error:
        if error.reason == MISSING:
            return
        raise
    except OpenError as error:
        if location.is_remote and is_refused(error):
            return
        raise
    if digest is not None and digest.hex() != shard.digest:
        raise ShardIndexError(OTHER, url=index_location(location).name)


def count_samples(shard: Location) -> int | None:
    """Return the number of samples in the index of a local shard, or None if there is no index of this shard.

    Only the head of the sidecar is read, and only the shard's size is compared: good enough for a progress bar.
    """
    if not shard.is_local or shard.is_stream:
        return None
    try:
        head = read_head(shard)
        return head.samples if head.size == shard.size() else None
    except TarshardsError:
        return None


def for_each_shard(function: Callable[[Location], Any], shards: Sequence[Location]) -> Iterator[Any]:
    """Yield *function* of each shard, in order; threads call it for several at once if the calls have to wait."""
    return chain.from_iterable(for_some_shards(lambda some: [function(shards[number]) for number in some], shards))


def for_some_shards(function: Callable[[range], Any], shards: Shards | Sequence[Location]) -> Iterator[Any]:
    """Yield *function* of ranges of the numbers of *shards*, in order; threads call it if the calls have to wait.

    What is in memory or on a quick disk takes less time without threads, which wait for each other.
    """
    is_local = shards.is_local if isinstance(shards, Shards) else are_local([location.url for location in shards])
    begin, is_quick = 0, is_local
    while begin < len(shards):
        if is_quick:
            before = _waits()
            found = function(range(begin, min(begin + FEW, len(shards))))
            is_quick = _waits() - before < FEW
            yield found
            begin += FEW
            continue
        from tarshards.parallel.calls import bounded_map
        from tarshards.storage.wire import LOOKERS, looking_threads

        end = min(begin + MANY, len(shards)) if is_local else len(shards)
        each = [range(number, number + 1) for number in range(begin, end)]
        yield from bounded_map(function, each, executor=looking_threads(), window=2 * LOOKERS)
        begin, is_quick = end, is_local


def _waits() -> int:
    """Return how often this thread has waited so far, for a disk or another thread."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
