"""Write any dataset to shards: samples are encoded in parallel, written in order, and an interrupted run resumes."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

from tarshards.epoch.splitmix import splitmix64
from tarshards.errors import (
    EncodeError,
    OpenError,
    OpError,
    SampleError,
    StateError,
    check_function,
    shortened,
    visible,
    whole_number,
)
from tarshards.parallel.calls import EACH, bounded_map, check_sent
from tarshards.samples.grouping import encode_sample
from tarshards.samples.keys import Sample
from tarshards.samples.tree import FileTree
from tarshards.storage.claims import Claims
from tarshards.storage.code_digest import digest_code, name_unknown
from tarshards.storage.derived import forget
from tarshards.storage.location import Location, look_up
from tarshards.storage.markers import Marker, Provenance, digest_of, log, say_kept
from tarshards.storage.streams import is_missing
from tarshards.stream.stream import Stream
from tarshards.write.shards import SHARD_BYTES, ShardWriter, TarWriter, open_claimed, shard_name

CHUNK = 32  # items per call
MARKS = 512  # the most items that a resumed call compares to recognize its dataset


def write_dataset(
    dataset: Any,
    pattern: str | os.PathLike[str],
    *,
    to_sample: Callable[[Any], Sample | None] | None = None,
    executor: Executor | None = None,
    max_samples: int | None = None,
    max_bytes: int | None = SHARD_BYTES,
    sync: bool = True,
    sha256: bool = False,
) -> list[str]:
    """Write *dataset* to shards named by *pattern*, of at most *max_samples* and *max_bytes*, and return their names.

    *dataset* is a sequence (a torch Dataset, a Hugging Face dataset), any other iterable, or the path of a folder with
    one file per field. *to_sample* converts an item to a sample, or returns None to leave it out; by default the items
    are samples. A sample without ``__key__`` gets the number of its item as key, with nine digits. The processes of
    *executor* (by default a ``ProcessPool`` of all cores) read the items of a sequence and call *to_sample*; the items
    of an iterable are read in the calling process. The shards, their indexes and their manifest do not depend on the
    executor. With *sync*, each file is flushed to the disk before it gets its name, so that a call can be resumed even
    after a power loss. *sha256* is as in ``ShardWriter``.

    To resume an interrupted call, repeat it: it keeps the finished shards, and logs how many, if *pattern*, the limits
    and *to_sample* are the same, the shards are unchanged, and the dataset is the same. *to_sample* and the class or
    generator of the dataset are compared by their code, constants, defaults and closure, not by the code of other
    functions that they call; a dataset also by its length, and by converting and comparing up to 512 random items of
    those written; a folder by the name, size and time of every file. If anything differs, a warning is logged, the
    shards of the interrupted call are removed, and writing starts over. A call after a completed one also starts over.

    Raises OpError for an item that cannot be read or converted, SampleError for one that is not a sample, and
    EncodeError for a value that does not encode; the messages have the number of the item. Raises OpenError while
    another writer uses the same local *pattern*, SampleError for a dataset without samples, and StateError for an
    iterator whose first item is that of the interrupted call but whose later items differ, since it cannot start over.
    """
    location, given = Location.of(pattern, sync=sync), {"max_samples": max_samples, "max_bytes": max_bytes}
    limits: dict[str, Any] = {
        name: None if limit is None else whole_number(name, limit, 1) for name, limit in given.items()
    }
    pattern = location.url
    if to_sample is not None:
        check_function(to_sample, "to_sample=")
        check_sent(to_sample, executor, "to_sample=")
    source = _Source(dataset)
    codes = [digest_code(to_sample), digest_code(getattr(dataset, "gi_code", type(dataset)))]
    name_unknown(log.warning, "write_dataset", codes[0])
    function: Callable[[Any], Any]
    encode = _Encoder(source.sequence, to_sample)
    with ExitStack() as stack:
        claims = stack.enter_context(Claims())
        claims.take(shard_name(pattern, 0))  # the journal may belong to a running call
        cut: Any = limits["max_bytes"] if max_samples is None else limits
        earlier = digest_of(pattern, cut, source.identity, _name_of(to_sample))
        digest = digest_of(pattern, cut, source.identity, [code.digest for code in codes])
        journal = _Journal(location, digest, earlier)
        if executor is None:
            from tarshards.parallel.process_pool import ProcessPool, call_shared

            pool = stack.enter_context(ProcessPool(shared=encode))
            executor, function, workers = pool, call_shared, pool.workers
        else:
            function, workers = encode, getattr(executor, "_max_workers", None) or 8
        calls = partial(bounded_map, function, executor=executor, window=EACH * workers)

        def encoded(chunks: Iterator[Any]) -> Iterator[tuple[int, Sample]]:
            return chain.from_iterable(calls(chunks))

        if journal.shards and (reason := journal.changed_shard() or journal.changed_item(source, encoded)):
            source.restart(reason, journal.name)
            journal.restart(reason)
        is_unsure = journal.shards and journal.found != digest
        kept = len(journal.shards)
        say_kept(journal.shards, kept, of_all=False, unsure=kept if is_unsure else 0)
        writer = stack.enter_context(
            ShardWriter(
                pattern,
                **limits,
                start=len(journal.shards),
                open_writer=partial(open_claimed, claims, sync=sync, sha256=sha256),
                on_finish=journal.finish,
                sync=sync,
                sha256=sha256,
            )
        )
        for number, sample in encoded(source.chunks(journal.items)):
            writer.write(sample)
            journal.add(number, sample)
        writer.close()
        journal.remove()
    if not journal.shards:
        raise SampleError("the dataset has no samples, so no shard is written", url=Location.of(pattern).name)
    return journal.shards


def _name_of(function: Any) -> str:
    """Return the identifier of a function in the journals of releases up to 0.2."""
    try:
        return pickle.dumps(function, 4).hex()  # the default of Python before 3.14
    except Exception:
        return str(getattr(function, "__qualname__", type(function).__qualname__))


class _Source:
    """The items of a dataset, in chunks.

    A chunk is the number of its first item and the list of items, or, for a sequence, their count.
    """

    def __init__(self, dataset: Any):
        is_sequence = (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Stream)
        )
        is_iterable = any(hasattr(dataset, name) for name in ("__iter__", "__getitem__", "__fspath__"))
        if isinstance(dataset, Mapping) or not is_iterable:
            cure = "such as a list, a torch Dataset or the path of a folder"
            raise TypeError(f"a dataset is a sequence or an iterable of samples, {cure}, not {shortened(dataset)}")
        self.sequence: Any = None
        self._length = 0
        self._open: Callable[[], Iterator[Any]] = lambda: iter(dataset)
        self.identity: list[Any] = [type(dataset).__qualname__, getattr(dataset, "__qualname__", None)]
        if isinstance(dataset, str | os.PathLike):
            folder = os.fspath(dataset)
            self._open = FileTree(folder).read
            self.identity = ["folder", FileTree(folder).digest()]
        elif is_sequence and not hasattr(dataset, "keys"):
            self.sequence, self._length = dataset, len(dataset)
            self.identity.append(self._length)
        self._opened = self._items = iter(()) if self.sequence is not None else self._open()
        self._read = 0  # the number of items read
        self._kept: list[Any] | None = []  # the items read while the first is compared, None afterwards

    def chunks(self, first: int) -> Iterator[tuple[int, Any]]:
        """Yield the chunks of all items from *first* on."""
        if self.sequence is not None:
            for number in range(first, self._length, CHUNK):
                yield number, min(CHUNK, self._length - number)
            return
        self._kept = None
        self._take(first - self._read)
        while chunk := list(islice(self._items, CHUNK)):
            yield first, chunk
            first += len(chunk)

    def single(self, numbers: Iterable[int], *, keep: bool = False) -> Iterator[tuple[int, Any]]:
        """Yield a chunk for each item of these ascending *numbers*; with *keep*, keep all items that were read."""
        if not keep:
            self._kept = None
        for number in numbers:
            yield number, 1 if self.sequence is not None else self._take(number + 1 - self._read)

    def _take(self, count: int) -> list[Any]:
        """Read *count* items; return a list of the last one, or an empty list if there are fewer items."""
        last: deque[Any] = deque(maxlen=1)
        for item in islice(self._items, count):
            self._read, count = self._read + 1, count - 1
            last.append(item)
            if self._kept is not None:
                self._kept.append(item)
        return [] if count else list(last)

    def restart(self, reason: str, name: str) -> None:
        """Go back to the first item; raise StateError, which names the file *name*, if an iterator cannot."""
        if self.sequence is not None:
            return
        items = self._open()
        if items is self._opened:  # an iterator
            if self._kept is None:
                cure = "an iterator cannot start over; remove this file, and call with a new one"
                raise StateError(f"{name}: {reason}, and {cure}")
            items = chain(self._kept, items)
        self._items, self._read = items, 0


class _Journal:
    """The record of a call's shards, in a file beside the first shard, with digests of some items (marks).

    *found* is the digest of the call that was interrupted; *earlier* is that of the same call in an earlier release.
    """

    def __init__(self, pattern: Location, digest: str, earlier: str):
        self.pattern, self.digest, self._rank = pattern, digest, 0
        self._location = pattern.at(shard_name(pattern, 0)).sibling(".writing")
        self.name = self._location.name
        begun = Marker(self._location).read() or {}
        written = Location.of(begun.get("pattern", pattern.url))
        self._written_as: str = pattern.with_base(written.base).url  # with the credentials, which are not recorded
        self.shards = [shard_name(self._written_as, number) for number in range(begun.get("shards", 0))]
        self.items: int = begun.get("items", 0)
        self._sizes: list[int | None] = begun.get("sizes", [])
        self._marks = {int(number): mark for number, mark in begun.get("marks", {}).items()}
        self._earlier: int = begun.get("discarded", 0)  # shards of an earlier call that remain to be removed
        self.found: str | None = begun.get("digest")
        if self.shards and not Provenance(digest, earlier=earlier).is_of(begun):
            self.restart("its dataset or its options differ")
        elif self._earlier:
            self._remove_earlier()

    def add(self, number: int, sample: Sample) -> None:
        """Record that *sample*, made from the item *number*, was written."""
        self.items = number + 1
        if not self._marks or _has_rank(number, self._rank):
            self._marks[number] = _mark(sample)
        if len(self._marks) > MARKS:
            self._rank += 1
            first = min(self._marks)
            self._marks = {n: mark for n, mark in self._marks.items() if n == first or _has_rank(n, self._rank)}

    def finish(self, name: str, _: TarWriter) -> None:
        """Record that the shard *name* is finished, and save the journal."""
        self.shards.append(name)
        self._sizes.append(_size(Location.of(name)))
        self._save(shards=len(self.shards), items=self.items, sizes=self._sizes, marks=self._marks)

    def _save(self, **record: Any) -> None:
        Marker(self._location).write({"digest": self.digest, "pattern": self.pattern.recorded, **record})

    def changed_shard(self) -> str | None:
        """Return a message if a shard has changed since it was written, else None."""
        for name, size, found in zip(self.shards, self._sizes, look_up(_size, self.shards)):
            if size != found and (size is not None or found == -1):  # earlier journals lack sizes on web servers
                return f"{Location.of(name).name} has changed since it was written"
        return None

    def changed_item(
        self, source: _Source, encoded: Callable[[Iterator[Any]], Iterator[tuple[int, Sample]]]
    ) -> str | None:
        """Return a message if an item of *source* differs from its mark, else None."""
        first, *others = sorted(self._marks)
        for numbers, keep in (([first], True), (others, False)):
            found = {number: _mark(sample) for number, sample in encoded(source.single(numbers, keep=keep))}
            for number in numbers:
                if found.get(number) != self._marks[number]:
                    return f"item {number} has changed"
        return None

    def restart(self, reason: str) -> None:
        """Remove the shards of the interrupted call and start over; log a warning with the *reason*."""
        count = len(self.shards)
        log.warning(
            "%s: an interrupted call wrote %d shard%s, but %s: removed, to start over",
            *(visible(self.name), count, "s" * (count != 1), visible(reason)),
        )
        self._earlier = count
        self.shards, self.items, self._sizes, self._marks = [], 0, [], {}
        self._save(discarded=count)  # first, so that a call that is killed while it removes shards can be resumed
        self._remove_earlier()

    def _remove_earlier(self) -> None:
        for number in range(self._earlier):
            shard = self.pattern.at(shard_name(self._written_as, number))
            with suppress(OpenError):  # shards that cannot be removed are overwritten
                forget(shard)
                shard.remove()

    def remove(self) -> None:
        """Remove the journal, after everything is written."""
        try:
            self._location.remove()
        except OpenError:  # the server does not allow removing
            self._save()


def _has_rank(number: int, rank: int) -> bool:
    """Return whether an item is in a random 1/2**rank of all items; random, since changes may be regular."""
    return splitmix64(number) >> (64 - rank) == 0


def _mark(sample: Sample) -> str:
    """Return a digest of an encoded sample."""
    digest = blake2b(digest_size=8)
    for name, value in sorted(sample.items()):
        data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        digest.update(f"{name}\0{len(data)}\0".encode("utf-8", "surrogateescape"))
        digest.update(data)
    return digest.hexdigest()


def _size(url: str | Location) -> int | None:
    """Return the size of a shard in bytes, -1 if it is missing, None if the server does not report it."""
    try:
        return Location.of(url).size()
    except OpenError as error:
        if is_missing(error):
            return -1
        raise


class _Encoder:
    """Converts the items of a chunk to encoded samples; runs in other processes."""

    def __init__(self, dataset: Any, to_sample: Callable[[Any], Sample | None] | None):
        self.dataset, self.to_sample = dataset, to_sample

    def __call__(self, chunk: tuple[int, Any]) -> list[tuple[int, Sample]]:
        first, items = chunk
        if self.dataset is not None:
            items = (self.dataset[number] for number in range(first, first + items))
        return list(self._encoded(first, iter(items)))

    def _encoded(self, number: int, items: Iterator[Any]) -> Iterable[tuple[int, Sample]]:
        while True:
            try:
                item = next(items)
                sample = item if self.to_sample is None else self.to_sample(item)
            except StopIteration:
                return
            except Exception as error:
                raise OpError(f"item {number}: {type(error).__name__}: {error}") from error
            if sample is not None:
                yield number, _fields(number, sample)
            number += 1


def _fields(number: int, sample: Any) -> Sample:
    if not isinstance(sample, dict):
        raise SampleError(f"item {number} is not a dict but {type(sample).__name__}: convert items with to_sample=")
    keyed = {"__key__": f"{number:09d}", **sample}
    try:
        fields, values = encode_sample(keyed)
    except EncodeError as error:
        raise EncodeError(f"item {number}: {error.reason}", key=error.key, field=error.field) from error
    return {"__key__": keyed["__key__"], **dict(zip(fields, values))}
