"""Many shards -> one stream of samples: one after the other, interleaved, or read by several threads at once."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from threading import Condition, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tarshards.errors import TarshardsError
from tarshards.samples.grouping import read_shard
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger
from tarshards.storage.expressions import find_shards
from tarshards.storage.manifest import Shard, Shards

if TYPE_CHECKING:
    from tarshards.storage.pipe import PipeInput

T = TypeVar("T")


def round_robin(sources: Iterable[Iterable[T]], width: int) -> Iterator[T]:
    """Yield one item from each of *width* sources in turn; when a source ends, the next one replaces it.

    Raises ValueError if *width* is less than 1.

    >>> "".join(round_robin(["abc", "d", "ef"], 2))
    'adbecf'
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, not {width}")
    return _round_robin(iter(sources), width)


def _round_robin(sources: Iterator[Iterable[T]], width: int) -> Iterator[T]:
    active = deque(iter(source) for source in islice(sources, width))
    try:
        while active:
            for item in (source := active.popleft()):
                yield item
                active.append(source)
                break
            else:
                active.extendleft(iter(following) for following in islice(sources, 1))
    finally:
        active.clear()  # close the generators and their files


def interleave(urls: Any, width: int, *, on_error: ErrorPolicy = None) -> Iterator[Sample]:
    """Yield the samples of all shards, one from each of *width* shards in turn; errors are as in ``read_samples``."""
    return round_robin(map(partial(read_shard, ledger=Ledger.of(on_error)), find_shards(urls)), width)


def read_parallel(
    urls: Any,
    *,
    readers: int = 4,
    memory: int = 256 << 20,
    ordered: bool = False,
    on_error: ErrorPolicy = None,
) -> Generator[Sample, None, None]:
    """Yield each sample of all shards exactly once; up to *readers* threads read one shard each.

    Samples are yielded as they are read, or with *ordered* in shard order. At most *memory* bytes of fields are queued,
    plus one sample held by each reader; a larger sample is queued alone. Errors are as in ``read_samples``, and follow
    the samples that precede them in their shard. Closing the generator stops the readers and kills the commands of
    ``pipe:`` URLs. Raises ValueError if *readers* or *memory* is less than 1.
    """
    if readers < 1:
        raise ValueError(f"readers must be at least 1, not {readers}")
    if memory < 1:
        raise ValueError(f"memory must be positive, not {memory}")
    return _read_parallel(find_shards(urls), readers, memory, ordered, Ledger.of(on_error))


def _read_parallel(
    shards: Shards, readers: int, memory: int, ordered: bool, ledger: Ledger
) -> Generator[Sample, None, None]:
    queue = _SampleQueue(shards, memory, ordered)
    threads = [_ShardThread(queue) for _ in range(min(readers, len(shards)))]
    try:
        for thread in threads:
            thread.start()
        for _ in shards:
            while not isinstance(item := queue.take(), _End):
                yield item
            if isinstance(item.error, TarshardsError):
                ledger(item.error)
            elif item.error is not None:
                raise item.error
    finally:
        queue.stop()
        _end(threads)
        for thread in threads:
            ledger.merge(thread.ledger)


class _End(NamedTuple):
    """Marks the end of a shard in a queue; *error* is the one that ended it, if any."""

    error: BaseException | None


class _SampleQueue:
    """Samples that were read and not yet yielded: one queue per shard if *ordered*, else one queue for all shards.

    Together the queues hold at most *memory* bytes, but the current queue, if empty, accepts one sample of any size.
    """

    def __init__(self, shards: Shards, memory: int, ordered: bool):
        self.memory, self.ordered = memory, ordered
        self.lock = Lock()  # guards all that follows
        self.filled, self.drained = Condition(self.lock), Condition(self.lock)
        self.shards = iter(enumerate(shards))
        self.queues: dict[int, deque[tuple[Sample | _End, int]]] = defaultdict(deque)
        self.current = 0  # the queue from which the next sample is taken
        self.held = 0  # bytes in all queues
        self.stopped = False

    def next_shard(self) -> tuple[int, Shard] | None:
        """Return the next unread shard with its number; None if there is none, or after ``stop``."""
        with self.lock:
            return None if self.stopped else next(self.shards, None)

    def put(self, shard: int, item: Sample | _End, size: int) -> bool:
        """Wait until *size* bytes are free, then add *item*; return False, and add nothing, after ``stop``."""
        queue = shard if self.ordered else 0
        with self.lock:
            while not self.stopped and size and self.held + size > self.memory:
                if queue == self.current and not self.queues[queue]:
                    break
                self.drained.wait()
            if not self.stopped:
                self.queues[queue].append((item, size))
                self.held += size
                self.filled.notify()
            return not self.stopped

    def take(self) -> Any:
        """Wait for the next sample or ``_End``, and return it."""
        from tarshards.parallel.signals import TICK

        with self.lock:
            while not self.queues[self.current]:
                self.filled.wait(TICK)
            item, size = self.queues[self.current].popleft()
            self.held -= size
            if self.ordered and isinstance(item, _End):
                del self.queues[self.current]
                self.current += 1
            self.drained.notify_all()
            return item

    def stop(self) -> None:
        """Tell the readers to end."""
        with self.lock:
            self.stopped = True
            self.drained.notify_all()


class _ReaderLedger(Ledger):
    """The ledger of one reader; it keeps an error for the consuming thread, which handles it."""

    error: BaseException | None = None

    def __call__(self, error: Exception) -> None:
        self.error = error


class _ShardThread(Thread):
    """A thread that reads shard after shard."""

    def __init__(self, queue: _SampleQueue):
        super().__init__(daemon=True)
        self.queue = queue
        self.ledger = _ReaderLedger()
        self.pipes: list[PipeInput] = []  # the pipes of the current shard

    def run(self) -> None:
        from tarshards.storage.pipe import OPENED

        OPENED.set(self.pipes)
        while (following := self.queue.next_shard()) is not None:
            number, shard = following
            self.pipes.clear()
            self.ledger.error = None
            try:
                for sample in read_shard(shard, ledger=self.ledger):
                    if not self.queue.put(number, sample, sum(map(len, sample.values()))):
                        return
            except BaseException as error:
                self.ledger.error = error
            self.queue.put(number, _End(self.ledger.error), 0)


def _end(readers: list[_ShardThread]) -> None:
    """Wait for the readers to end, and kill the commands that they wait for.

    After GRACE seconds, readers that still wait for a network are left to end by themselves.
    """
    from tarshards.parallel.signals import GRACE, TICK

    deadline = monotonic() + GRACE
    while (alive := [reader for reader in readers if reader.is_alive()]) and monotonic() < deadline:
        alive[0].join(TICK)
        for reader in alive:
            for pipe in reader.pipes:
                pipe.kill()
