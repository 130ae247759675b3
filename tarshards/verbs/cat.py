"""Many shards -> one stream of samples: in turn, interleaved, by several readers at once; and new keys for it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from tarshards.samples.ledger import Ledger
from tarshards.samples.read import Sample, read_shard
from tarshards.storage.expressions import expand_urls

T = TypeVar("T")
OnError = Callable[[Exception], Any]

PATIENCE = 1.0  # seconds that a reader has to notice that nobody waits for it


def round_robin(sources: Iterable[Iterable[T]], width: int) -> Iterator[T]:
    """Yield one item of each of *width* sources in turn; where one ends the next source takes its place.

    >>> "".join(round_robin(["abc", "d", "ef"], 2))
    'adbecf'
    """
    if width < 1:
        raise ValueError(f"at least 1 source takes part, not {width}")
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
        active.clear()  # which closes what generators have open


def interleave(urls: Any, width: int, *, on_error: OnError | None = None, allow_pipe: bool = False) -> Iterator[Sample]:
    """Yield the samples of all shards, one of each of *width* shards in turn; errors as in ``read_samples``."""
    ledger = Ledger.of(on_error)
    shards = (read_shard(url, ledger=ledger, allow_pipe=allow_pipe) for url in expand_urls(urls))
    return round_robin(shards, width)


def read_parallel(
    urls: Any,
    *,
    readers: int = 4,
    memory: int = 256 << 20,
    ordered: bool = False,
    on_error: OnError | None = None,
    allow_pipe: bool = False,
) -> Generator[Sample, None, None]:
    """Yield the samples of all shards, up to *readers* of which are read at once, by threads; each exactly once.

    They come as they are read, or *ordered* as the shards are. At most *memory* bytes of fields wait, besides the one
    sample in the hands of each reader; a larger sample waits alone. Errors are as in ``read_samples``, raised when all
    that the shard had before has been yielded. Breaking off stops the readers.
    """
    if readers < 1:
        raise ValueError(f"at least 1 reader reads, not {readers}")
    if memory < 1:
        raise ValueError(f"memory must be positive, not {memory}")
    return _Readers(expand_urls(urls), memory, ordered, allow_pipe).run(readers, Ledger.of(on_error))


class _ShardLedger(Ledger):
    """The account of one shard, kept in one thread; what is done about an error is decided elsewhere."""

    error: Exception | None = None
    crash: BaseException | None = None

    def __call__(self, error: Exception) -> None:
        self.error = error


class _Stopped(BaseException):
    """Nobody waits for the samples any more."""


class _Readers:
    """Threads that read shards, and the samples that wait to be taken: a queue a shard, or one for all."""

    def __init__(self, urls: list[str], memory: int, ordered: bool, allow_pipe: bool):
        from threading import Condition, Lock

        self.urls, self.memory, self.ordered, self.allow_pipe = urls, memory, ordered, allow_pipe
        lock = Lock()
        self.filled, self.drained = Condition(lock), Condition(lock)  # both guard all that follows
        self.shards = iter(enumerate(urls))
        self.queues: dict[int, deque[Any]] = defaultdict(deque)
        self.current = 0  # the queue to take from
        self.held = 0  # bytes
        self.stopped = False
        self.ledgers: list[_ShardLedger] = []

    def run(self, readers: int, ledger: Ledger) -> Generator[Sample, None, None]:
        """Yield what the threads read."""
        from threading import Thread

        threads = [Thread(target=self.read, daemon=True) for _ in range(min(readers, len(self.urls)))]
        try:
            for thread in threads:
                thread.start()
            yield from self.take(ledger)
        finally:
            with self.drained:
                self.stopped = True
                self.drained.notify_all()
            _join([thread for thread in threads if thread.ident])
            for account in self.ledgers:
                ledger.merge(account)

    def take(self, ledger: Ledger) -> Iterator[Sample]:
        """Yield what waits, until every shard has ended; let *ledger* decide about errors."""
        from tarshards.parallel import TICK

        for _ in self.urls:
            ended = None
            while ended is None:
                with self.filled:
                    while not self.queues[self.current]:
                        self.filled.wait(TICK)
                    item, size = self.queues[self.current].popleft()
                    self.held -= size
                    ended = item if isinstance(item, _ShardLedger) else None
                    if ended is not None and self.ordered:
                        del self.queues[self.current]
                        self.current += 1
                    self.drained.notify_all()
                if ended is None:
                    yield item
            if ended.crash is not None:
                raise ended.crash
            if ended.error is not None:
                ledger(ended.error)

    def read(self) -> None:
        """Read shard after shard; the work of each thread."""
        while True:
            account = _ShardLedger()
            with self.drained:
                number, url = next(self.shards, (-1, ""))
                if number < 0 or self.stopped:
                    return
                self.ledgers.append(account)
            queue = number if self.ordered else 0
            try:
                for sample in read_shard(url, ledger=account, allow_pipe=self.allow_pipe):
                    self.put(queue, sample, sum(map(len, sample.values())))
                self.put(queue, account, 0)
            except _Stopped:
                return
            except BaseException as error:
                account.crash = error
                with suppress(_Stopped):
                    self.put(queue, account, 0)
                return

    def put(self, queue: int, item: Any, size: int) -> None:
        """Wait for room for *item*; what is to be taken next always has room for one."""
        with self.drained:
            while self.held + size > self.memory and size and (queue != self.current or self.queues[queue]):
                if self.stopped:
                    raise _Stopped
                self.drained.wait()
            if self.stopped:
                raise _Stopped
            self.queues[queue].append((item, size))
            self.held += size
            self.filled.notify()


def _join(threads: list[Any]) -> None:
    """Wait for threads to end; a command that one still waits for is killed, and no thread waited for for ever."""
    import os
    import signal
    from pathlib import Path
    from time import monotonic

    for _ in range(2):
        deadline = monotonic() + PATIENCE
        for thread in threads:
            thread.join(max(0, deadline - monotonic()))
        threads = [thread for thread in threads if thread.is_alive()]
        for thread in threads:
            with suppress(OSError):
                for child in Path(f"/proc/self/task/{thread.native_id}/children").read_text().split():
                    os.killpg(int(child), signal.SIGKILL)
