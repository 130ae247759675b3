"""Write any dataset to shards: samples are encoded in parallel, written in order, and an interrupted run resumes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Any

from tarshards.errors import EncodeError, OpError, SampleError
from tarshards.parallel import bounded_map
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.read import sample_members
from tarshards.samples.tree import read_tree
from tarshards.storage.location import Location
from tarshards.storage.markers import digest_of, read_marker, write_marker
from tarshards.write.shards import ShardWriter, TarWriter, shard_name

CHUNK = 32  # items per call
AHEAD = 4  # calls per process that are running, or finished and waiting for an earlier one
MAX_BYTES = 10**9


def write_dataset(
    dataset: Any,
    pattern: str | os.PathLike[str],
    *,
    to_sample: Callable[[Any], Sample | None] | None = None,
    executor: Executor | None = None,
    max_bytes: int = MAX_BYTES,
) -> list[str]:
    """Write *dataset* to shards named by *pattern*, of at most *max_bytes* each, and return their names.

    *dataset* is a sequence (a torch Dataset, a Hugging Face dataset), any other iterable, or the path of a folder with
    one file per field. *to_sample* converts an item to a sample, or returns None to leave it out; by default the items
    are samples. A sample without ``__key__`` gets its number as key, with nine digits. The processes of *executor* (by
    default a ``ProcessPool`` of all cores) read the items of a sequence and call *to_sample*; the items of an iterable
    are read here. The shards, their indexes and their manifest do not depend on the executor.

    An interrupted call keeps what it has written, and the same call resumes there. It starts again if all was written,
    or if *pattern*, *max_bytes*, *to_sample* or the length of the dataset changed.

    Raises OpError for an item that cannot be read or converted, SampleError for one that is not a sample, and
    EncodeError for a value that does not encode; each names the number of the item.
    """
    if isinstance(dataset, str | os.PathLike):
        dataset = read_tree(os.fspath(dataset))
    pattern = Location.of(pattern).url
    length = len(dataset) if _is_sequence(dataset) else None
    state = f"{shard_name(pattern, 0)}.writing"
    digest = digest_of(pattern, max_bytes, length, _name_of(to_sample))
    begun = read_marker(state) or {}
    if begun.get("digest") != digest:
        begun = {"shards": 0, "items": 0}
    shards, done = begun["shards"], begun["items"]
    names = [shard_name(pattern, number) for number in range(shards)]
    written = done

    def finish(name: str, writer: TarWriter) -> None:
        names.append(name)
        write_marker(state, {"digest": digest, "shards": len(names), "items": written})

    function: Callable[[Any], Any]
    encode = _Encoder(dataset if length is not None else None, to_sample)
    with ExitStack() as stack:
        if executor is None:
            from tarshards.parallel import ProcessPool, call_shared

            pool = stack.enter_context(ProcessPool(shared=encode))
            executor, function, workers = pool, call_shared, pool.workers
        else:
            function, workers = encode, getattr(executor, "_max_workers", None) or 8
        writer = stack.enter_context(ShardWriter(pattern, max_bytes=max_bytes, start=shards, on_finish=finish))
        chunks = _chunks(dataset, length, done)
        for encoded in bounded_map(function, chunks, executor=executor, window=AHEAD * workers):
            for number, sample in encoded:
                writer.write(sample)
                written = number + 1
    path = Location.of(state).path
    if path is not None:
        with suppress(FileNotFoundError):
            os.unlink(path)
    else:
        write_marker(state, {})
    return names


def _is_sequence(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not hasattr(dataset, "keys")


def _name_of(function: Any) -> str:
    try:
        return pickle.dumps(function).hex()
    except Exception:
        return str(getattr(function, "__qualname__", type(function).__qualname__))


def _chunks(dataset: Any, length: int | None, done: int) -> Iterator[tuple[int, Any]]:
    """Yield pairs: the number of the first item, and the items (for a sequence, their count)."""
    if length is not None:
        for first in range(done, length, CHUNK):
            yield first, min(CHUNK, length - first)
        return
    items = islice(dataset, done, None)
    while chunk := list(islice(items, CHUNK)):
        yield done, chunk
        done += len(chunk)


class _Encoder:
    """Converts items to encoded samples, in other processes."""

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
        members = sample_members(keyed)
    except EncodeError as error:
        raise EncodeError(f"item {number}: {error.reason}", key=error.key, field=error.field) from error
    names = sorted(name for name in keyed if not is_reserved(name))
    return {"__key__": keyed["__key__"], **{name: data for name, (_, data) in zip(names, members)}}
