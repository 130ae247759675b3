"""Batches from workers to their loader through shared memory: only their offsets go through the pipe."""

from __future__ import annotations

import errno
import logging
import math
import os
import pickle
import socket
import sys
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import accumulate, count, cycle, islice
from mmap import ACCESS_READ, ACCESS_WRITE, mmap
from multiprocessing.reduction import DupFd, ForkingPickler
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from tarshards.epoch.loop import Outcome
from tarshards.loaders.arrays.assembly import ALONE
from tarshards.loaders.arrays.readers.reader import Reader
from tarshards.parallel.forks import fork_count, renew_in_children
from tarshards.samples.payloads import address_of
from tarshards.storage.traffic import Traffic

APART = 1 << 40  # bytes between the words of the arenas and the halves of a plan's tables, in their sparse file
STEP = 1 << 16  # bytes; the size of an arena is a multiple of them
ALIGNED = 64  # bytes; each part of a batch begins at a multiple of them
LARGE = 1 << 14  # size from which on bytes objects are stored outside the pickle, and arrays are not copied
KEPT = 3  # batches whose memory is kept for later ones: the loop's, the next, and one that it holds longer
TOGETHER, LITTLE, SOON = 16, 1 << 20, 0.004  # most batches, bytes and seconds of work in one message
GONE = 1 << 62  # a bit beside the ticket in a word: a forked process has the arena, and the worker makes another

log: logging.Logger = logging.getLogger("tarshards")


class Made(NamedTuple):
    """A batch, the outcome of its samples, which are in flight until the loader takes it, and the work of making it.

    The batch is alone in the list *held*, so that only who takes it out refers to it.
    """

    held: list[Any]
    outcome: Outcome
    seconds: float
    traffic: Traffic


class Message(NamedTuple):
    """A worker's message: the items *made*, with their batches separate."""

    worker: int
    made: list[Any]
    batches: Handed | Pickled | None
    is_last: bool


class Handed(NamedTuple):
    """Batches in an arena: its parts, at *table* their offsets and sizes, up to *end* the pickle.

    The loader got the arena's file with the message *since*. The batch may be lent if it *is_own*: alone, larger than
    LITTLE, and nothing in the worker refers to its arrays.
    """

    arena: int
    since: int
    ticket: int
    parts: int
    table: int
    end: int
    is_own: bool


class Pickled(NamedTuple):
    """Batches that go through the pipe, and why."""

    batches: Any
    reason: str


class PlanTables(NamedTuple):
    """The tables of a plan in one *half* of their area of the file: their types and lengths."""

    half: int
    kinds: list[tuple[str, int]]

    def _begins(self) -> list[int]:
        sizes = (np.dtype(kind).itemsize * count for kind, count in self.kinds)
        return [*accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)]

    @property
    def size(self) -> int:
        return self._begins()[-1]

    def within(self, memory: mmap) -> list[np.ndarray]:
        """Return the tables as views of *memory*."""
        return [np.frombuffer(memory, *kind, begin) for kind, begin in zip(self.kinds, self._begins())]


class Arena:
    """The shared memory of one message, in a worker: an unnamed file, which lasts while a process has it mapped."""

    def __init__(self, ticket: int = 0):
        self.ticket = ticket  # of its last message
        self.since: int = 0  # the ticket of the message with which the loader got the file
        self.memory = memoryview(b"")
        self.arrays: list[np.ndarray] = []  # what readers write into
        self.begins: list[int] = []  # the offsets of these
        self._file: int | None = None

    @property
    def is_alone(self) -> bool:
        """Whether nothing refers to its arrays."""
        return all(sys.getrefcount(self.arrays[i]) == ALONE for i in range(len(self.arrays)))

    def grown(self, size: int) -> memoryview:
        """Return the memory, at least *size* bytes; raise OSError if there is not enough."""
        if len(self.memory) < size:
            size = -(-(size + size // 8) // STEP) * STEP
            if self._file is None:
                self._file = os.memfd_create("tarshards")
                weakref.finalize(self, os.close, self._file)
            os.posix_fallocate(self._file, 0, size)  # else a write may raise SIGBUS
            self.memory, self.since = _mapped(self._file, size), 0
        return self.memory

    def send(self, files: socket.socket, number: int, ticket: int) -> None:
        """Give the loader the file as that of arena *number*, unless it has it; raise OSError if that is impossible."""
        if not self.since:
            assert self._file is not None
            socket.send_fds(files, [_words_of(3).pack(number, ticket, len(self.memory))], [self._file])
            self.since = ticket

    def begin_of(self, buffer: memoryview) -> int | None:
        """Return the offset of *buffer* in the memory; None if it is elsewhere."""
        for begin, array in zip(self.begins, self.arrays):
            offset = address_of(buffer) - array.__array_interface__["data"][0]
            if 0 <= offset <= len(array) - buffer.nbytes:
                return begin + offset
        return None


class Lent(NamedTuple):
    """The message of a batch whose arrays refer to *memory*, and how often the process had forked before."""

    memory: list[np.ndarray]
    message: Handed
    forks: int


class Arenas:
    """Shared memory for the messages of *workers*, each with up to *ahead* in flight; an arena holds one message.

    A worker makes an arena when all others are in use, up to *each*, and sends its file to the loader; it grows to the
    largest message. One more unnamed file, of the loader, begins with a word for each arena: the ticket of its last
    message that the loader has finished with, or, negated, the ticket of a lent message. Only the loader writes these
    words. A worker numbers its messages with increasing tickets, so it knows which of its arenas are free. One more
    word is the schedule: the number of batches per message, since sending a message takes longer than making a small
    batch.

    In this file are also the tables of a plan, in which all workers look up positions. They are in one of two halves,
    which only the loader writes, in turns, since a worker may still be in the previous pass when the next one begins.

    The large arrays of a large batch are lent: views of the arena, which is free when nothing in the loader's process
    refers to one. A process that was forked meanwhile has them too, for nobody knows how long: it keeps the arena, and
    the worker makes another. All else is copied, as are the batches of a worker which has *lent* as many as it may, and
    all *pinned* ones, into memory that a GPU reads from.
    """

    def __init__(self, workers: int, ahead: int, *, pinned: bool = False):
        self.workers: Any = workers
        self.ahead = ahead
        self.pinned = pinned
        self.lent: int = -(-KEPT // workers)  # messages of one worker, since the batches come from all in turn
        self.each: Any = ahead + 1 + self.lent
        self.reason: Any = ""  # why there is no memory
        self.columns: dict[int, tuple[int, np.ndarray]] = {}  # by column: the number of its batch, and its array
        self._has_warned = False
        self._together = 1
        self._tables: PlanTables | None = None
        self._before: PlanTables | None = None  # the tables of the previous pass
        self._lent: list[Lent] = []
        self._memory: dict[int, tuple[int, memoryview]] = {}  # by arena: since which message, and what is mapped
        try:
            self._open(os.memfd_create("tarshards"))
            self._connect(*socket.socketpair())
            os.ftruncate(self._file, 8 * (workers * self.each + 1))
            _mapped(self._file, 8)
        except (AttributeError, OSError) as error:  # missing on some systems and forbidden in some sandboxes
            self.reason = f"there is no shared memory: {error}"
        else:
            renew_in_children(self)
        self.restart()

    def renew(self) -> None:
        """Release what only the loader uses, in a forked process; lent memory stays as long as a batch refers to it."""
        self._lent.clear()
        self._memory.clear()
        for each in self._received:
            each.close()

    def _open(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file)
        self._own, self._count = [Arena() for _ in range(self.each)], 0  # of one worker
        # The number of the arena of the next message, and of its used bytes.
        self._next: int | None = None
        self._filled = 0

    def _connect(self, sent: socket.socket, *received: socket.socket) -> None:
        self._sent, self._received = sent, received  # by workers, and by the loader
        for each in sent, *received:
            each.setblocking(False)  # a file comes before the first message in it
            weakref.finalize(self, each.close)

    def __getstate__(self) -> dict[str, Any]:
        state = {"workers": self.workers, "each": self.each, "reason": self.reason}
        return state if self.reason else state | {"files": (DupFd(self._file), DupFd(self._sent.fileno()))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.workers = state["workers"]
        self.each = state["each"]
        self.reason, self.columns = state["reason"], {}
        if not self.reason:
            file, sent = (file.detach() for file in state["files"])
            self._open(file)
            self._connect(socket.socket(fileno=sent))

    def restart(self) -> None:
        """Begin a pass in the loader."""
        self._arrived = [0] * self.workers  # messages
        self._schedule(0, self._together)

    def _schedule(self, first: int, together: int) -> None:
        """Put *together* batches into each message from number *first* on, which no worker has begun."""
        self._first, before, self._together = first, self._together, together
        self._batches, self._seconds, self._size = 0, 0.0, 1  # since then
        if not self.reason:
            word = first << 16 | before << 8 | together
            os.pwrite(self._file, _words_of(1).pack(word), 8 * self.workers * self.each)

    def share(self, tables: Sequence[np.ndarray]) -> PlanTables | None:
        """Write *tables* for the workers of a pass; return a description for ``shared``, None without memory."""
        self._before, self._tables = self._tables, None
        half = 1 if self._before is not None and self._before.half == 0 else 0
        written = PlanTables(half, [(table.dtype.str, len(table)) for table in tables])
        if self.reason or not written.size:
            return None
        try:
            os.posix_fallocate(self._file, (half + 1) * APART, written.size)
            memory = self._map(written, ACCESS_WRITE)
        except OSError as error:
            log.warning("each worker makes the plan by itself, which takes memory: %s", error)
            return None
        for table, part in zip(tables, written.within(memory)):
            part[:] = table
        self._tables = written
        return written

    def shared(self, written: PlanTables) -> list[np.ndarray]:
        """Return the tables that the loader wrote."""
        return written.within(self._map(written, ACCESS_READ))

    def release(self) -> None:
        """Free the tables of the previous pass, once the current one has begun in all workers."""
        if self._before is not None:
            from mmap import MADV_REMOVE  # which systems without memfd_create may lack

            self._map(self._before, ACCESS_WRITE).madvise(MADV_REMOVE)
            self._before = None

    def _map(self, written: PlanTables, access: int) -> mmap:
        return mmap(self._file, written.size, access=access, offset=(written.half + 1) * APART)

    def send(self, made: Iterator[Any]) -> Iterator[Message]:
        """Yield, in a worker, everything *made*, in messages."""
        worker = get_worker_info().id
        self.begin(worker)
        for number in count():
            together, group = self._together_in(number), []
            try:
                for item in islice(made, together):
                    group.append(item)
            except Exception:
                if group:  # send batches made before an error first
                    yield self._message(worker, group, False)
                raise
            yield self._message(worker, group, len(group) < together)
            if len(group) < together:
                return

    def _together_in(self, number: int) -> int:
        if self.reason:
            return 1
        (word,) = _words_of(1).unpack(os.pread(self._file, 8, 8 * self.workers * self.each))
        return word & 255 if number >= word >> 16 else word >> 8 & 255

    def _message(self, worker: int, made: list[Any], is_last: bool) -> Message:
        batches = [each.held.pop() for each in made if isinstance(each, Made)]
        return Message(worker, made, self.put(worker, batches) if batches else None, is_last)

    def receive(self, messages: Iterator[Message]) -> Generator[Any, None, None]:
        """Yield the items that the workers made, from each in turn."""
        waiting: list[deque[Any]] = [deque() for _ in range(self.workers)]
        going = set(range(self.workers))
        for worker in cycle(range(self.workers)):
            while worker in going and not waiting[worker]:
                message = next(messages, None)
                if message is None:
                    return
                if message.is_last:
                    going.remove(message.worker)
                self._adapt(message, going)
                batches = [] if message.batches is None else self.take(message.batches)[::-1]
                waiting[message.worker].extend(
                    made._replace(held=[batches.pop()]) if isinstance(made, Made) else made for made in message.made
                )
            if waiting[worker]:
                yield waiting[worker].popleft()
            elif not going and not any(waiting):
                yield from messages  # there are no more; asking for one makes torch end the workers
                return

    def _adapt(self, message: Message, going: set[int]) -> None:
        """Schedule more batches per message the smaller they are, by the batches since the last call."""
        self._arrived[message.worker] += 1
        seconds = [each.seconds for each in message.made if isinstance(each, Made)]
        self._batches, self._seconds = self._batches + len(seconds), self._seconds + sum(seconds)
        if isinstance(message.batches, Handed):
            self._size = max(self._size, message.batches.end // len(seconds))
        if going and self._batches and min(self._arrived[worker] for worker in going) > self._first:
            fit = min(LITTLE // self._size, int(SOON * self._batches / max(self._seconds, 1e-9)), TOGETHER)
            self._schedule(max(self._arrived) + self.ahead * self.workers + 1, max(1, fit))

    def begin(self, worker: int) -> None:
        """Begin a pass in a worker: messages of the last pass that the loader has not taken were skipped."""
        if not self.reason:
            self._next, words = None, self._words(worker)
            for arena, word in zip(self._own, words):
                if word != -arena.ticket:
                    arena.ticket = word

    def put(self, worker: int, batches: list[Any]) -> Handed | Pickled:
        """Move *batches* out of their list to a free arena; raise the error of a batch that cannot be pickled."""
        if self.reason:
            return Pickled(batches, self.reason)
        try:
            handed = self._write(worker, *_pickled(batches))
        except (BufferError, OSError) as error:
            return Pickled(batches, f"{type(error).__name__}: {error}")
        except Exception as error:
            ForkingPickler.dumps(batches)  # it may know more types; if not, the queue would send nothing and hang
            return Pickled(batches, f"{type(error).__name__}: {error}")
        finally:
            self._next = None
            self.columns.clear()
        is_large = len(batches) == 1 and handed.end > LITTLE
        batches.clear()
        return handed._replace(is_own=is_large and self._own[handed.arena % self.each].is_alone)

    def empty(self, worker: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array in the arena of a worker's next message, where ``put`` finds it; if none is free, elsewhere.

        The arena is taken again when nothing refers to the array any more.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            if self.reason or not size:
                return np.empty(shape, dtype)
            arena, begin = self._own[self._free(worker)], self._filled
            memory = arena.grown(begin + size)
        except OSError:
            return np.empty(shape, dtype)
        self._filled += -(-size // ALIGNED) * ALIGNED
        array = np.frombuffer(memory, np.uint8, size, begin)
        arena.arrays.append(array)
        arena.begins.append(begin)
        return array.view(dtype).reshape(shape)

    def _free(self, worker: int) -> int:
        """Return the arena of the next message: one that the loader has done with, and to whose arrays nothing refers.

        Raises BlockingIOError if there is none.
        """
        if self._next is None:
            words = self._words(worker)
            for number, arena in enumerate(self._own):
                if words[number] == arena.ticket and arena.is_alone:
                    arena.arrays.clear()
                    arena.begins.clear()
                    self._next, self._filled = number, 0
                    break
            else:
                raise BlockingIOError(f"all {self.each} arenas of a worker are in use")
        return self._next

    def _write(self, worker: int, pickled: memoryview, buffers: list[memoryview]) -> Handed:
        number = self._free(worker)
        arena = self._own[number]
        joined = [buffer.obj if isinstance(buffer.obj, _Joined) else None for buffer in buffers]
        sizes = [parts.layout.size if parts else buffer.nbytes for buffer, parts in zip(buffers, joined)]
        there = [None if parts else arena.begin_of(buffer) for buffer, parts in zip(buffers, joined)]
        steps = (-(-size // ALIGNED) * ALIGNED if own is None else 0 for size, own in zip(sizes, there))
        *begins, table = accumulate(steps, initial=self._filled)
        end = table + 16 * len(buffers) + len(pickled)
        memory = arena.grown(end)
        for i, (size, buffer, parts, own) in enumerate(zip(sizes, buffers, joined, there)):
            if parts:
                parts.layout.pack_into(memory, begins[i], *parts.values)
            elif own is None:
                memory[begins[i] : begins[i] + size] = buffer
            else:
                begins[i] = own
        marked = (~size if parts else size for size, parts in zip(sizes, joined))
        _words_of(2 * len(buffers)).pack_into(memory, table, *begins, *marked)
        memory[end - len(pickled) : end] = pickled
        ticket = self._count + 1
        arena.send(self._sent, worker * self.each + number, ticket)
        self._count = arena.ticket = ticket
        return Handed(worker * self.each + number, arena.since, ticket, len(buffers), table, end, False)

    def take(self, made: Any) -> Any:
        """Return the batches of a worker's message, lent or copied."""
        if isinstance(made, Pickled):
            if not self._has_warned:
                log.warning("batches from workers are pickled, which takes longer: %s", made.reason)
            self._has_warned = True
            return made.batches
        forks = fork_count()
        self._reclaim()
        lent = sum(each.message.arena // self.each == made.arena // self.each for each in self._lent)
        may_lend = made.is_own and not self.pinned and lent < self.lent
        memory = self._received_memory(made)
        whole = [np.frombuffer(memory, np.uint8)]
        table = _words_of(2 * made.parts).unpack_from(memory, made.table)
        buffers = (self._part(whole[0], *entry, may_lend) for entry in zip(table, table[made.parts :]))
        batches = pickle.loads(memory[made.table + 16 * made.parts : made.end], buffers=buffers)
        is_lent = sys.getrefcount(whole[0]) != ALONE
        if is_lent:
            self._lent.append(Lent(whole, made, forks))
        self._mark(made, -made.ticket if is_lent else made.ticket)
        return pin_memory(batches) if self.pinned else batches

    def _reclaim(self) -> None:
        """Give the arenas of batches that nothing refers to any more back to the workers."""
        lent = []
        for each in self._lent:
            if sys.getrefcount(each.memory[0]) != ALONE:
                lent.append(each)
            elif each.forks == fork_count():
                self._mark(each.message, each.message.ticket)
            else:
                self._memory.pop(each.message.arena, None)
                self._mark(each.message, each.message.ticket ^ GONE)
        self._lent = lent

    def _mark(self, made: Handed, word: int) -> None:
        os.pwrite(self._file, _words_of(1).pack(word), 8 * made.arena)

    def _received_memory(self, made: Handed) -> memoryview:
        """Return the memory of a message's arena; raise OSError if no more files can be opened."""
        while made.arena not in self._memory or self._memory[made.arena][0] != made.since:
            text, files, *_ = socket.recv_fds(self._received[0], 24, 1, socket.MSG_CMSG_CLOEXEC)
            if not files:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            arena, since, size = _words_of(3).unpack(text)
            try:
                self._memory[arena] = since, _mapped(files[0], size)
            finally:
                os.close(files[0])
        return self._memory[made.arena][1]

    def _part(self, whole: np.ndarray, begin: int, size: int, may_lend: bool) -> Any:
        """Return a copy of a part of a batch, or a view if it may be lent or becomes bytes."""
        if size < 0:
            return whole[begin : begin + ~size]
        part = whole[begin : begin + size]
        if may_lend and size >= LARGE:
            return part
        own = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy() if self.pinned else np.empty(size, np.uint8)
        own[:] = part
        return own

    def _words(self, worker: int) -> tuple[int, ...]:
        """Return the words of a worker's arenas; replace those which it has lost to a forked process."""
        size = 8 * self.each
        words = _words_of(self.each).unpack(os.pread(self._file, size, size * worker))
        for number, (arena, word) in enumerate(zip(self._own, words)):
            if word == arena.ticket ^ GONE:
                self._own[number] = Arena(word)
        return words


def _mapped(file: int, size: int) -> memoryview:
    """Map *size* bytes of an unnamed file, which then needs no descriptor; raise OSError if that is impossible."""
    try:
        memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return memoryview(memory.numpy())


def _words_of(count: int) -> Struct:
    return Struct(f"{count}q")


class ArenaMemory:
    """Lets readers write a batch into the memory that is handed over, instead of their ``Memory``."""

    def __init__(self, arenas: Arenas):
        self._columns = arenas.columns
        self._empty = partial(arenas.empty, get_worker_info().id)

    def take(self, column: int, reader: Reader, count: int, number: int) -> Any:
        """Return what *reader* reads *count* samples of a column of the *number*-th batch into."""
        form = reader.make(0)
        if not isinstance(form, np.ndarray):
            return reader.make(count)
        if column in self._columns:
            before, array = self._columns.pop(column)
            if before == number and len(array) >= count:  # it is read again, with other samples
                self._columns[column] = before, array
                return array[:count]
        array = self._empty((count, *form.shape[1:]), form.dtype)
        self._columns[column] = number, array
        return array[:]

    def empty(self, column: int, number: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Return an array of *count* elements for the joined values of a column."""
        return self._empty((count,), dtype)


class _Joined(bytes):
    """Stands in a pickle for bytes objects that are concatenated in an arena, according to *layout*; it is empty."""

    layout: Struct
    values: list[bytes]
    kind: type

    def __bool__(self) -> bool:
        return True

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _split, (self.kind, self.layout.format, pickle.PickleBuffer(self))


def _join(values: Any, kind: type) -> _Joined:
    joined = _Joined()
    joined.layout = Struct("%ds" * len(values) % tuple(map(len, values)))
    joined.values, joined.kind = values, kind
    return joined


def _split(kind: Any, layout: str, view: memoryview) -> Any:
    values = Struct(layout).unpack_from(view)
    return values[0] if kind is bytes else kind(values)


def _with_joined(value: Any) -> Any:
    """Return *value* with large bytes objects joined, in lists, tuples and dicts."""
    kind = type(value)
    if kind is dict:
        return {name: _with_joined(part) for name, part in value.items()}
    if kind is bytes:
        return value if len(value) < LARGE else _join([value], bytes)
    if kind is list or kind is tuple:
        kinds = set(map(type, value))
        if kinds == {bytes}:
            return value if sum(map(len, value)) < LARGE else _join(value, kind)
        if not kinds.isdisjoint({dict, list, tuple, bytes}):
            return kind(map(_with_joined, value))
    return value


def _pickled(batches: list[Any]) -> tuple[memoryview, list[memoryview]]:
    """Return *batches* as a pickle, and the buffers outside it."""
    buffers: list[pickle.PickleBuffer] = []
    file = BytesIO()
    _Pickler(file, 5, buffer_callback=buffers.append).dump(_with_joined(batches))
    return file.getbuffer(), [buffer.raw() for buffer in buffers]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and not value.flags.forc:  # numpy would copy an array with gaps into the pickle
            return value.copy().__reduce_ex__(5)
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            raise BufferError(f"torch sends a {type(value).__name__} with {value.layout} on {value.device} itself")
        if value.requires_grad:
            raise BufferError("torch sends a tensor that requires a gradient itself")
        value = value.resolve_conj().resolve_neg()
        dense = value.permute(sorted(range(value.dim()), key=value.stride, reverse=True))
        if not dense.is_contiguous():  # with gaps or overlaps in memory
            dense = value = value.contiguous()
        data = dense.as_strided([dense.numel()], [1]).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(data), value.dtype, value.shape, value.stride())


def _tensor(data: Any, dtype: torch.dtype, shape: Any, stride: Any) -> torch.Tensor:
    data = np.asarray(data)
    if not data.size:
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.from_numpy(data).view(dtype).as_strided(shape, stride)
