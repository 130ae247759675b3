"""Indexes of many shards, by several processes: created where missing or stale, verified, exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from errno import EACCES, EPERM, EROFS
from functools import partial
from typing import Any, NamedTuple

from tarshards.errors import OpenError, OpError, SampleError, ShardIndexError, TarshardsError, UrlError
from tarshards.index.build import Walked, build_index
from tarshards.index.manifests import TO_DISK, Writing
from tarshards.index.sidecar import Index, index_location
from tarshards.samples.keys import USUAL, Split, dots_in_key, have_dots_in_key
from tarshards.storage.derived import INDEX, is_marked, mark_of, set_mark
from tarshards.storage.location import Location
from tarshards.storage.manifest import ArchiveEnd, Shard
from tarshards.storage.streams import is_answer

MANY = 1 << 26  # bytes of shards from which on several processes are faster than one


class IndexOutcome(NamedTuple):
    """The result for one shard: its counts, and the file that was (or would be) written, or else the error.

    *faults* are the errors of samples that the index marks, *warning* is what to say of a sample that dots in the keys
    have made of many; a shard is *unchanged* if its index had the same headers.
    """

    shard: Shard
    written: str | None = None
    error: TarshardsError | None = None
    faults: Sequence[SampleError] = ()
    warning: str | None = None
    unchanged: bool = False


def refresh_indexes(
    shards: Sequence[Shard | str], *, jobs: int = 1, crc: bool = False, how: Writing = TO_DISK
) -> Iterator[IndexOutcome]:
    """Create the index of every shard whose index is missing, damaged or differs from its headers; yield the outcomes.

    So is an index of an earlier version, which has no digest. With *crc* all data is read, and indexes with no
    checksums or other ones are replaced too; without it, the checksums of an index are kept while the headers are the
    same. An index that is right is marked; without *crc*, the headers of a local shard with a marked index are not
    read until the shard changes.
    """
    return _work(partial(_refresh, crc=crc, how=how), shards, jobs)


def verify_indexes(shards: Sequence[Shard | str], *, jobs: int = 1, crc: bool = False) -> Iterator[IndexOutcome]:
    """Compare all headers of every shard with its index, with *crc* all data too; yield the outcomes.

    The error of an index that differs names the first difference.
    """
    return _work(partial(verify_index, crc=crc), shards, jobs)


def export_indexes(
    shards: Sequence[Shard | str],
    format: str,
    *,
    folder: str | None = None,
    jobs: int = 1,
    how: Writing = TO_DISK,
) -> Iterator[IndexOutcome]:
    """Write every index in *format*, "dali" or "tar.idx", beside its shard or into *folder*; yield the outcomes."""
    return _work(partial(_export, format=format, folder=folder, how=how), shards, jobs)


def find_index(shard: Shard | str) -> Index:
    """Return the index of a shard as it is now, for export; its sidecar says whether it is concatenated, and its rule.

    Raises SampleError for a shard with samples at fault, which the formats of others cannot mark.
    """
    shard = Shard.of(shard)
    index = _build(shard, _load(shard.location()))
    for member in index.elsewhere:
        raise index.not_plain(member, shard.location().name)
    for fault in _faults(index, shard.location()):
        reason = f"{fault.reason}; write the other samples to a new shard with `tarcheck --repair`"
        raise SampleError(reason, url=fault.url, offset=fault.offset, key=fault.key, field=fault.field)
    return index


def _faults(index: Index, shard: Location) -> list[SampleError]:
    return [index.fault(sample, shard.name) for sample in index.faults]


def _load(shard: Location) -> Index | None:
    """Return the index in the sidecar of a shard; None if it is missing, damaged, or stale by its fingerprint."""
    try:
        return Index.load(shard)
    except ShardIndexError:
        return None


def _build(shard: Shard, earlier: Index | None, *, crc: bool = False) -> Index:
    split: Any = shard.split or _split_of(shard.location(), earlier)
    return _rebuild(shard, earlier, crc=crc, split=split)


def _rebuild(shard: Shard, earlier: Index | None, **options: Any) -> Index:
    """Return the index of *shard* as it is now; *earlier* says, too, whether it is concatenated, or has no end."""
    several = earlier is not None and earlier.archives > 1
    end: ArchiveEnd = "optional" if earlier is not None and earlier.end == earlier.shard_size else shard.end
    return build_index(shard.location(), concatenated=shard.concatenated or several, end=end, **options)


def _split_of(shard: Location, earlier: Index | None) -> str:
    """Return the rule of a shard's index, also of one that is stale: a new index has the same."""
    try:
        return (earlier or Index.load(shard, check=False)).split
    except ShardIndexError:
        return "first"


def _refresh(shard: Shard, *, crc: bool, how: Writing) -> IndexOutcome:
    """Write the index of a shard, unless it has one that is right."""
    own = shard.location()
    mark, earlier = mark_of(own), _load(own)
    if earlier is not None and mark is not None and not crc and _is_current(earlier, shard, mark):
        index, unchanged, fresh = earlier, True, True
    else:
        index, unchanged, fresh = _compared(shard, earlier, crc)
    if how.dry_run and not fresh:
        index.pack()
    elif not fresh:
        _save(index, Location.of(own, sync=how.sync))
    location = index_location(own)
    if not how.dry_run and index is not earlier:
        set_mark(location, mark)
    is_beside = location == own.sibling(INDEX)
    found = index.shard(shard, indexed=is_beside and (fresh or not how.dry_run))
    if unchanged and shard.digest in (None, found.digest):
        found = found._replace(sha256=shard.sha256)
    written = None if fresh else location.name
    return IndexOutcome(found, written, faults=_faults(index, own), warning=_dots(index, own), unchanged=unchanged)


def _compared(shard: Shard, earlier: Index | None, crc: bool) -> tuple[Index, bool, bool]:
    """Return the index of the shard as it is now; whether *earlier* has the same headers; whether it can stay."""
    index = _build(shard, earlier, crc=crc)
    if earlier is None or _difference(earlier, index) is not None:
        return index, False, False
    has_checksums = "crc32" in earlier.arrays
    if has_checksums:
        index.arrays["crc32"] = earlier.arrays["crc32"]
    index.digest = earlier.digest
    return index, True, index.digest is not None and (has_checksums or not crc)


def _is_current(index: Index, shard: Shard, mark: int) -> bool:
    """Return whether an index, which was loaded, has the *mark* of its shard, and what this version writes."""
    if index.digest is None or shard.split not in (None, index.split):
        return False
    return is_marked(index_location(shard.location()), mark)


def _save(index: Index, shard: Location) -> None:
    try:
        index.save(shard)
    except OpenError as error:
        if error.errno not in (EROFS, EACCES, EPERM) and not (shard.is_remote and is_answer(error)):
            raise
        reason = f"{error.reason}; `--index-dir FOLDER` puts indexes elsewhere"
        raise OpenError(reason, url=error.url, errno=error.errno) from error


def _dots(index: Index, shard: Location) -> str | None:
    """Return the warning for the first sample that dots in keys have merged from many, or None."""
    if index.split != "first" or len(index.fields) <= USUAL:
        return None
    for sample in (index.first[1:] - index.first[:-1] > USUAL).nonzero()[0].tolist():
        fields = index.fields_of(sample)
        if have_dots_in_key(fields):
            return str(SampleError(dots_in_key(len(fields), fields[0]), url=shard.name, key=index.keys[sample]))
    return None


def verify_index(shard: Shard | str, *, crc: bool = False, walked: tuple[Split, Walked] | None = None) -> IndexOutcome:
    """Compare the headers of a shard with its index, with *crc* its data too; raise ShardIndexError if they differ.

    *walked* is what ``walk`` has just found in the shard, read as one archive, with the rule that it had.
    """
    location = Shard.of(shard).location()
    location.check_there()
    index = Index.load(location, check=False)
    if crc and "crc32" not in index.arrays:
        reason = "the index has no checksums; add them with `tarindex --crc`"
        raise ShardIndexError(reason, url=index_location(location).name)
    split: Any = index.split
    again = walked[1] if walked is not None and walked[0] == split and index.archives == 1 else None
    try:
        found = _rebuild(Shard.of(location), index, crc=crc, split=split, walked=again)
    except TarshardsError:
        Index.load(location)  # raises where the shard has another size too
        raise
    if difference := _difference(index, found):
        raise ShardIndexError(f"stale: {difference}; rebuild it with `tarindex`", url=index_location(location).name)
    return IndexOutcome(index.shard(shard))


def _difference(index: Index, found: Index) -> str | None:
    """Describe the first difference of an index from *found*, that of the shard as it is now; None if there is none."""
    if difference := index.difference(found):
        return difference
    if index.split != found.split:
        return f"names were split at the {index.split} dot"
    if index.shard_size != found.shard_size:
        return f"the shard has {found.shard_size} bytes, but had {index.shard_size} when it was indexed"
    if (index.fingerprint, index.archive_end) != (found.fingerprint, found.archive_end):
        return "the shard's headers have changed since it was indexed"
    return None


def _export(shard: Shard, *, format: str, folder: str | None, how: Writing) -> IndexOutcome:
    """Write the index of a shard in the format of another program."""
    from tarshards.index.exports import write_dali, write_offsets

    index = find_index(shard)
    write = {"dali": write_dali, "tar.idx": write_offsets}[format]
    return IndexOutcome(index.shard(shard), write(index, shard.location(), folder, how))


def _work(function: Callable[[Shard], IndexOutcome], named: Sequence[Shard | str], jobs: int) -> Iterator[IndexOutcome]:
    """Yield the outcomes of *function* for all shards, in order; *jobs* processes share them if they are many."""
    shards = list(map(Shard.of, named))
    attempt = partial(_attempt, function)
    if min(jobs, len(shards)) < 2 or not _are_many(shards):
        yield from map(attempt, shards)
        return
    from tarshards.parallel.calls import settled_map
    from tarshards.parallel.process_pool import ProcessPool

    with ProcessPool(min(jobs, len(shards)), finishes=True) as pool:
        for shard, outcome, error in settled_map(attempt, shards, executor=pool, window=4 * jobs):
            if isinstance(error, OpError):
                reason = f"{error.reason}, perhaps because memory ran out"
                outcome = IndexOutcome(Shard(shard.url), error=OpenError(reason, url=shard.location().name))
            elif error is not None:
                raise error
            yield outcome


def _are_many(shards: Sequence[Shard]) -> bool:
    size = 0
    for shard in shards:
        with suppress(OpenError, UrlError):
            location = shard.location()
            size += (location.size() or 0) if location.is_local else MANY
        if size >= MANY:
            return True
    return False


def _attempt(function: Callable[[Shard], IndexOutcome], shard: Shard) -> IndexOutcome:
    try:
        return function(shard)
    except TarshardsError as error:
        return IndexOutcome(Shard(shard.url), error=error)
