"""Batches of arrays from one process: threads read, decode and augment into memory that is used again."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from hashlib import blake2b
from itertools import chain, count, islice
from typing import Any

import numpy as np

from tarshards.epoch.loop import Reading
from tarshards.epoch.permutations import key_of
from tarshards.index.places import MappedPlaces, find_in_bytes
from tarshards.loaders.arrays.batches import Found, Made, Maker, Transform
from tarshards.loaders.arrays.readers.base import Reader
from tarshards.loaders.base import Pass, Passes, ResumableLoader, Shares
from tarshards.loaders.monitor import Monitor
from tarshards.parallel import bounded_map
from tarshards.stream.sources import PlannedSource, Progress, growing
from tarshards.stream.stream import Stream

TOGETHER = 1 << 11  # samples whose places are looked up at once
TOGETHER_QUICK = 1 << 14  # where making their batches takes hardly longer than that
TRIED = 1 << 10  # samples that are tried at once until one shows what the fields are like

Work = Callable[[], Found]  # what finds the samples of a batch


class ArrayLoader(ResumableLoader):
    """Batches ``{field: array, ..., "__key__": [...]}`` of a stream of shards, in its order, made by threads.

    *fields* says what becomes of which field: a ``tarshards.readers`` reader, or any function of bytes; a name may be
    ``image:jpg;png``, the first of the two that a sample has, as image. *transforms*, functions ``(batch, rng)``, run
    on the batch: see ``tarshards.augment``. What is random is drawn from (seed, epoch, sample), so that batches are
    the same for any number of *threads*: by default one a core, or the caller's own (0) where batches are but copied.

    *dataset* is a ``ShardDataset`` or ``Stream.from_shards(...)`` without ops; order, tail, seed and ledger are its
    own. Batches are numpy's, or torch's on *device*; they are yours to keep, and memory that you have let go of is
    used again. With *reuse* it is used again in turn, and a batch stays as it is until the next but one is asked for.
    *prefetch* batches are made ahead by threads, besides those under way. ``state_dict()`` tells where the loop
    stands, as of ``ShardLoader``; ``monitor`` where the time goes.

    A sample that does not decode raises DecodeError, or goes to the ledger and is missing in its batch.
    """

    def __init__(
        self,
        dataset: Stream,
        batch_size: int,
        *,
        fields: Mapping[str, Reader | Callable[[bytes], Any]],
        threads: int | None = None,
        prefetch: int = 2,
        device: str | None = None,
        reuse: bool = False,
        transforms: Iterable[Transform] = (),
    ):
        if dataset._ops or dataset._source.ops:
            raise TypeError("an ArrayLoader takes shards without ops; fields= and transforms= do their work")
        if dataset._source.ledger is None:
            raise TypeError("an ArrayLoader takes shards: a ShardDataset, or Stream.from_shards(...)")
        if not fields:
            raise ValueError("fields= names no field")
        if prefetch < 0 or (threads is not None and threads < 0):
            raise ValueError("threads and prefetch are not negative")
        self.passes = Passes(dataset, batch_size)
        self.threads, self.prefetch, self.device = threads, prefetch, device
        self.monitor = Monitor()
        most = len(os.sched_getaffinity(0)) if threads is None else threads
        self._threads = max(1, most)
        self._maker = Maker(fields, transforms, batch_size, self._threads + prefetch + 2, reuse)
        self._numbers = count()
        self._places: MappedPlaces | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        this = self.passes.begin()
        self.monitor = Monitor()
        batches = self._planned(this) if this.plan is not None else self._streamed(this)
        if self.device is None:
            return batches
        from tarshards.loaders.tensors import move

        return move(batches, self.device)

    def _planned(self, this: Pass) -> Generator[dict[str, Any], None, None]:
        source: PlannedSource = self.passes.stream._source
        plan, world = this.plan, this.world
        assert plan is not None
        shares = self.passes.shares(plan, world)
        reading = Reading(source, plan, world, shares, whole=this.state is None)
        is_new = self._places is None or self._places.broken
        if is_new:
            self._places = MappedPlaces.of(source.shards, self._maker.terms)
        ends = np.cumsum(source.shards.counts)
        starts = ends - source.shards.counts
        taken = plan.state(0)["position"]  # a sample may come several times in a mixture's epoch, never alike

        def find(shards: np.ndarray, samples: np.ndarray, positions: np.ndarray) -> Found:
            if self._places is not None:
                places = self._places.find(shards, samples)
            else:
                places = find_in_bytes(list(source.shards.read_all(shards, samples)), self._maker.terms)
            numbers = starts[shards] + samples if source.once else taken + positions
            return Found(places, numbers, shards, source.shards.names, positions)

        def find_share(share: range) -> Found:
            positions = np.arange(share.start, share.stop, share.step)
            return find(*plan[positions], positions)

        begin, end, total = 0, 1, int(ends[-1]) if len(plan) else 0
        while begin < total and not self._maker.is_open:  # by the dataset's first, whatever the order
            numbers = np.arange(begin, min(end, total))
            shards = np.searchsorted(ends, numbers, "right")
            self._maker.open(find(shards, numbers - starts[shards], numbers))
            begin, end = end, end + min(end, TRIED)
        touched = self._places if is_new and self._maker.is_quick else None
        try:
            with (
                nullcontext() if touched is None else touched.touching(),
                closing(self._in_order(self._works(find_share, shares), source.seed, this)) as batches,
            ):
                for made in batches:
                    lost, positions = len(made.failures), made.found.positions
                    reading.taken += len(positions)
                    members = (len(positions) - lost) * len(self._maker.terms)
                    reading.count(positions, made.found.shards, lost, members)
                    this.delivered += 1
                    yield made.batch
            reading.finish()
            for error in self._places.changes() if self._places else ():
                self.ledger(error)
        finally:
            self.ledger.add(reading.tally())
        self.passes.end(this)
        self.ledger.audit([reading.tally()])

    def _works(self, find: Callable[[range], Found], shares: Shares) -> Iterator[Work]:
        """Yield what finds each batch; in mapped shards several are found together, which takes less time."""
        if self._places is None:
            yield from (partial(find, share) for share in shares)
            return
        most = max(1, (TOGETHER_QUICK if self._maker.is_quick else TOGETHER) // self.passes.size)
        for part in growing(shares, 1, most):
            begun = time.perf_counter()
            found = find(range(part[0].start, part[-1].stop, part[0].step))
            self.monitor.reading += time.perf_counter() - begun
            ends = np.cumsum([len(share) for share in part]).tolist()
            yield from (partial(found.part, end - len(share), end) for share, end in zip(part, ends))

    def _streamed(self, this: Pass) -> Generator[dict[str, Any], None, None]:
        source = self.passes.stream._source
        samples = iter(source.iterate(Progress(this.epoch, this.world)))
        nothing = np.empty(0, np.int64)

        def find(raw: Future[list[dict[str, Any]]]) -> Found:
            results = raw.result()
            numbers = np.array([_number_of(sample["__key__"]) for sample in results], np.uint64)
            urls = [sample["__url__"] for sample in results]
            return Found(find_in_bytes(results, self._maker.terms), numbers, np.arange(len(urls)), urls, nothing)

        def works(reader: ThreadPoolExecutor) -> Iterator[Work]:
            raws = (reader.submit(lambda: list(islice(samples, self.passes.size))) for _ in count())
            for raw in raws:
                if not self._maker.is_open and raw.exception() is None:  # by the first, whichever thread is quicker
                    self._maker.open(find(raw))
                yield partial(find, raw)

        with ThreadPoolExecutor(1, "tarshards-read") as reader:
            try:
                with closing(self._in_order(works(reader), source.seed, this)) as batches:
                    for number, made in enumerate(batches):
                        if not len(made.found.numbers):
                            break
                        if number >= this.passed:
                            this.delivered += 1
                            yield made.batch
            finally:
                reader.shutdown(cancel_futures=True)
                samples.close()
                self.ledger.report()
        self.passes.end(this)

    def _in_order(self, works: Iterator[Work], seed: int, this: Pass) -> Generator[Made, None, None]:
        """Make the batches of *works* by threads, some ahead; yield them in order, what failed gone to the ledger."""
        monitor, key = self.monitor, key_of(seed, this.epoch)
        asked = time.perf_counter()
        first = list(islice(works, 1))  # after which it is known whether batches are quick
        threads = 0 if self.threads is None and self._maker.is_quick else self.threads
        threads = self._threads if threads is None else threads
        monitor.threads = max(1, threads)
        works = chain(first, works)
        makes = (partial(self._maker.make, work, key, next(self._numbers)) for work in works)
        with closing(_results(makes, threads, self.prefetch)) as results:
            for made in results:
                for place in sorted(made.failures):
                    self.ledger(made.failures[place])
                taken = time.perf_counter()
                monitor.waited += taken - asked
                monitor.samples += len(made.found.numbers) - len(made.failures)
                monitor.bytes += made.bytes
                monitor.reading += made.reading
                monitor.decoding += made.decoding
                yield made
                del made
                asked = time.perf_counter()
                monitor.consumed += asked - taken


def _results(makes: Iterator[Callable[[], Made]], threads: int, ahead: int) -> Generator[Made, None, None]:
    """Yield what each of *makes* makes, in their order: by *threads*, some ahead, or without any when asked for."""
    if not threads:
        yield from (make() for make in makes)
        return
    with ThreadPoolExecutor(threads, "tarshards-make") as pool:
        yield from bounded_map(operator.call, makes, executor=pool, window=threads + ahead)


def _number_of(key: str) -> int:
    """A number that tells a sample from others where nothing counts them."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
