"""Batches from workers to their loader through shared memory: only their places go through the pipe."""

from __future__ import annotations

import logging
import math
import os
import pickle
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
from tarshards.index.memory import address_of
from tarshards.loaders.arrays.assembly import ALONE, Memory
from tarshards.loaders.arrays.readers.base import Reader
from tarshards.loaders.monitor import Work

APART = 1 << 40  # bytes between two arenas in their file, which takes memory only where it was used
STEP = 1 << 16  # bytes; the size of an arena is a multiple of them
ALIGNED = 64  # bytes; each part of a batch begins at a multiple of them
LARGE = 1 << 14  # bytes from which on bytes objects do not stay in the pickle
MAPPED = 1 << 25  # bytes from which on malloc maps new pages, which takes as long as the copy; they are reused
KEPT = 3  # batches whose memory is kept for those after them: the loop's, the next, and one that it holds longer
TOGETHER, LITTLE, SOON = 16, 1 << 20, 0.004  # at most so many batches, bytes and seconds of work make one message

log = logging.getLogger("tarshards")


class Made(NamedTuple):
    """A batch, what became of its samples, which are in flight until the loader takes it, and how long it took."""

    batch: Any
    outcome: Outcome
    work: Work


class Message(NamedTuple):
    """What a worker sends at once: what it has *made*, and the batches of that apart from it."""

    worker: int
    made: list[Any]
    batches: Handed | Pickled | None
    is_last: bool


class Handed(NamedTuple):
    """Batches in an arena of *size* bytes: its parts, from *places* on where they lie, and up to *end* its pickle."""

    arena: int
    size: int
    ticket: int
    parts: int
    places: int
    end: int


class Pickled(NamedTuple):
    """Batches that go through the pipe, and why."""

    batches: Any
    reason: str


class PlanTables(NamedTuple):
    """The tables of a plan at one of two places in the file: their types and lengths."""

    place: int
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


class Arenas:
    """Shared memory for what *workers* send, each with up to *ahead* messages under way; an arena holds one message.

    All arenas are one file without a name, which is gone when no process has it open, however they end. It begins with
    a word for each arena: the ticket of the last message there that the loader has done with, or less than zero, the
    ticket of one that is lent. Only the loader writes these words. A worker gives its messages tickets that count up,
    and so knows which of its arenas are free; they grow to the largest message. One more word is the schedule: how
    many batches a message has, since a message takes longer than a small batch.

    Before the arenas are the tables of a plan, in which all workers look up positions, at one of two places, which only
    the loader writes: by turns, since a worker may still be in the pass before when the next one begins.

    A batch is a view of an arena for as long as *lent* other ones are taken after it; without, batches are copies, with
    *pinned* in memory that a GPU reads from. Large ones are copied into memory that nothing refers to any more.
    """

    def __init__(self, workers: int, ahead: int, *, lent: int = 0, pinned: bool = False):
        lent = 0 if pinned else lent
        self.workers, self.ahead, self.each, self.pinned = workers, ahead, ahead + 1 + lent, pinned
        self.lent = lent and lent + workers - 1  # messages, for one of every worker is in hand
        self.reason = ""  # why there is no memory
        self._taken: deque[Handed] = deque()
        self._large = Memory(1, 0, KEPT, ring=False)
        self._is_told = False
        self._together = 1
        self._tables: PlanTables | None = None
        self._before: PlanTables | None = None  # the tables of the pass before
        try:
            self._open(os.memfd_create("tarshards"))
            os.ftruncate(self._file, 8 * (workers * self.each + 1))
        except (AttributeError, OSError) as error:  # not all systems have it, and some sandboxes forbid it
            self.reason = f"there is no shared memory: {error}"
        self.restart()

    def _open(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file)
        self._memory: dict[int, mmap] = {}
        self._tickets, self._count = [0] * self.each, 0  # of one worker
        # The arena of its next message and the bytes of it that are taken; and the arrays that lie in each.
        self._next: int | None = None
        self._filled = 0
        self._begins: list[int] = []  # of the arrays in it
        self._arrays: list[list[np.ndarray]] = [[] for _ in range(self.each)]

    def __getstate__(self) -> dict[str, Any]:
        state = {"workers": self.workers, "each": self.each, "reason": self.reason}
        return state if self.reason else state | {"file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.workers, self.each, self.reason = state["workers"], state["each"], state["reason"]
        if not self.reason:
            self._open(state["file"].detach())

    def restart(self) -> None:
        """Begin a pass in the loader."""
        self._arrived = [0] * self.workers  # messages
        self._schedule(0, self._together)

    def _schedule(self, first: int, together: int) -> None:
        """Let all messages from the one with number *first* on, which no worker has begun, have *together* batches."""
        self._first, before, self._together = first, self._together, together
        self._batches, self._seconds, self._size = 0, 0.0, 1  # since then
        if not self.reason:
            word = first << 16 | before << 8 | together
            os.pwrite(self._file, _words_of(1).pack(word), 8 * self.workers * self.each)

    def share(self, tables: Sequence[np.ndarray]) -> PlanTables | None:
        """Write *tables* for the workers of a pass; return how ``shared`` finds them, None where there is no memory."""
        self._before, self._tables = self._tables, None
        place = 1 if self._before is not None and self._before.place == 0 else 0
        told = PlanTables(place, [(table.dtype.str, len(table)) for table in tables])
        if self.reason or not told.size:
            return None
        try:
            os.posix_fallocate(self._file, (place + 1) * APART, told.size)
            memory = self._map(told, ACCESS_WRITE)
        except OSError as error:
            log.warning("each worker makes the plan by itself, which takes memory: %s", error)
            return None
        for table, part in zip(tables, told.within(memory)):
            part[:] = table
        self._tables = told
        return told

    def shared(self, told: PlanTables) -> list[np.ndarray]:
        """Return the tables that the loader wrote."""
        return told.within(self._map(told, ACCESS_READ))

    def release(self) -> None:
        """Free the tables of the pass before the one that has begun in all workers."""
        if self._before is not None:
            from mmap import MADV_REMOVE  # which systems without memfd_create may lack

            self._map(self._before, ACCESS_WRITE).madvise(MADV_REMOVE)
            self._before = None

    def _map(self, told: PlanTables, access: int) -> mmap:
        return mmap(self._file, told.size, access=access, offset=(told.place + 1) * APART)

    def send(self, made: Iterator[Any]) -> Iterator[Message]:
        """Yield, in a worker, all that is *made* in messages."""
        worker = get_worker_info().id
        self.begin(worker)
        for number in count():
            together, group = self._together_in(number), []
            try:
                for item in islice(made, together):
                    group.append(item)
            except Exception:
                if group:  # what came before an error is sent before it
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
        batches = [each.batch for each in made if isinstance(each, Made)]
        rest = [each._replace(batch=None) if isinstance(each, Made) else each for each in made]
        return Message(worker, rest, self.put(worker, batches) if batches else None, is_last)

    def receive(self, messages: Iterator[Message]) -> Generator[Any, None, None]:
        """Yield what the workers made, from each in turn, with batches that are the loop's own or lent to it."""
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
                batches = iter(() if message.batches is None else self.take(message.batches))
                waiting[message.worker].extend(
                    made._replace(batch=next(batches)) if isinstance(made, Made) else made for made in message.made
                )
            if waiting[worker]:
                yield waiting[worker].popleft()
            elif not going and not any(waiting):
                yield from messages  # there are no more; asked for one, torch ends the workers
                return

    def _adapt(self, message: Message, going: set[int]) -> None:
        """Schedule as many batches a message as they are small, by those that came since this was done before."""
        self._arrived[message.worker] += 1
        seconds = [each.work.seconds for each in message.made if isinstance(each, Made)]
        self._batches, self._seconds = self._batches + len(seconds), self._seconds + sum(seconds)
        if isinstance(message.batches, Handed):
            self._size = max(self._size, message.batches.end // len(seconds))
        if going and self._batches and min(self._arrived[worker] for worker in going) > self._first:
            fit = min(LITTLE // self._size, int(SOON * self._batches / max(self._seconds, 1e-9)), TOGETHER)
            self._schedule(max(self._arrived) + self.ahead * self.workers + 1, max(1, fit))

    def begin(self, worker: int) -> None:
        """Begin a pass in a worker: what the loader has not taken of the last one, it has passed over."""
        if not self.reason:
            self._next, words = None, self._words(worker)
            self._tickets = [ticket if word == -ticket else word for word, ticket in zip(words, self._tickets)]

    def put(self, worker: int, batches: Any) -> Handed | Pickled:
        """Write *batches* to a free arena of a worker; raise the error of what cannot be pickled."""
        if self.reason:
            return Pickled(batches, self.reason)
        try:
            buffers: list[pickle.PickleBuffer] = []
            file = BytesIO()
            _Pickler(file, 5, buffer_callback=buffers.append).dump(_with_joined(batches))
            return self._write(worker, file.getbuffer(), [buffer.raw() for buffer in buffers])
        except (BufferError, OSError) as error:
            return Pickled(batches, f"{type(error).__name__}: {error}")
        except Exception as error:
            ForkingPickler.dumps(batches)  # it may know more types; if not, the queue would send nothing and hang
            return Pickled(batches, f"{type(error).__name__}: {error}")
        finally:
            self._next = None

    def empty(self, worker: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array in the arena of a worker's next message, where ``put`` finds it; if none is free, elsewhere.

        The arena is taken again when nothing refers to the array any more.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            if self.reason or not size:
                return np.empty(shape, dtype)
            place, begin = self._free(worker), self._filled
            memory = self._grown(worker * self.each + place, begin + size)
        except OSError:
            return np.empty(shape, dtype)
        self._filled += -(-size // ALIGNED) * ALIGNED
        array = np.frombuffer(memory, np.uint8, size, begin)
        self._arrays[place].append(array)
        self._begins.append(begin)
        return array.view(dtype).reshape(shape)

    def _free(self, worker: int) -> int:
        """Return the arena of the next message: one that the loader has done with, and to whose arrays nothing refers.

        Raises BlockingIOError if there is none.
        """
        if self._next is None:
            words = self._words(worker)
            for place, arrays in enumerate(self._arrays):
                is_done = words[place] == self._tickets[place]
                if is_done and all(sys.getrefcount(arrays[i]) == ALONE for i in range(len(arrays))):
                    arrays.clear()
                    self._next, self._filled, self._begins = place, 0, []
                    break
            else:
                raise BlockingIOError(f"all {self.each} arenas of a worker are in use")
        return self._next

    def _begin_of(self, place: int, buffer: memoryview) -> int | None:
        """Return where *buffer* lies in the arena of the next message; None if it lies elsewhere."""
        for begin, array in zip(self._begins, self._arrays[place]):
            offset = address_of(buffer) - array.__array_interface__["data"][0]
            if 0 <= offset <= len(array) - buffer.nbytes:
                return begin + offset
        return None

    def _write(self, worker: int, pickled: memoryview, buffers: list[memoryview]) -> Handed:
        place = self._free(worker)
        joined = [buffer.obj if isinstance(buffer.obj, _Joined) else None for buffer in buffers]
        sizes = [parts.layout.size if parts else buffer.nbytes for buffer, parts in zip(buffers, joined)]
        there = [None if parts else self._begin_of(place, buffer) for buffer, parts in zip(buffers, joined)]
        steps = (-(-size // ALIGNED) * ALIGNED if own is None else 0 for size, own in zip(sizes, there))
        *begins, places = accumulate(steps, initial=self._filled)
        end = places + 16 * len(buffers) + len(pickled)
        arena = worker * self.each + place
        memory = self._grown(arena, end)
        for i, (size, buffer, parts, own) in enumerate(zip(sizes, buffers, joined, there)):
            if parts:
                parts.layout.pack_into(memory, begins[i], *parts.values)
            elif own is None:
                memory[begins[i] : begins[i] + size] = buffer
            else:
                begins[i] = own
        told = (~size if parts else size for size, parts in zip(sizes, joined))
        _words_of(2 * len(buffers)).pack_into(memory, places, *begins, *told)
        memory[end - len(pickled) : end] = pickled
        self._count += 1
        self._tickets[place] = self._count
        return Handed(arena, len(memory), self._count, len(buffers), places, end)

    def _grown(self, arena: int, size: int) -> mmap:
        """Return the memory of an arena, at least *size* bytes; raise OSError if there is not enough."""
        memory = self._memory.get(arena)
        if memory is None or len(memory) < size:
            size = -(-(size + size // 8) // STEP) * STEP
            os.posix_fallocate(self._file, _offset(arena), size)  # else a write may raise SIGBUS
            memory = self._memory[arena] = mmap(self._file, size, offset=_offset(arena))
        return memory

    def take(self, made: Any) -> Any:
        """Return the batches that a worker put, as the loop's own or lent to it."""
        if isinstance(made, Pickled):
            if not self._is_told:
                log.warning("batches from workers are pickled, which takes longer: %s", made.reason)
            self._is_told = True
            return made.batches
        memory = self._memory.get(made.arena)
        if memory is None or len(memory) < made.size:
            memory = self._memory[made.arena] = mmap(self._file, made.size, offset=_offset(made.arena))
        view = memoryview(memory)
        places = _words_of(2 * made.parts).unpack_from(view, made.places)
        buffers = (self._part(view, *place) for place in zip(places, places[made.parts :]))
        batches = pickle.loads(view[made.places + 16 * made.parts : made.end], buffers=buffers)
        self._taken.append(made)
        if self.lent:
            os.pwrite(self._file, _words_of(1).pack(-made.ticket), 8 * made.arena)
        while len(self._taken) > self.lent:
            done = self._taken.popleft()
            os.pwrite(self._file, _words_of(1).pack(done.ticket), 8 * done.arena)
        return pin_memory(batches) if self.pinned else batches

    def _part(self, view: memoryview, begin: int, size: int) -> Any:
        """Return a part of a batch as memory of its own, but as a view if it is lent or bytes are made of it."""
        if size < 0:
            return view[begin : begin + ~size]
        part = view[begin : begin + size]
        if self.pinned:
            own = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            own[:] = part
            return own
        if self.lent:
            return part
        if size < MAPPED:
            return np.array(part)
        own = self._large.empty(0, 0, size, np.dtype(np.uint8))
        own[:] = part
        return own

    def _words(self, worker: int) -> tuple[int, ...]:
        size = 8 * self.each
        return _words_of(self.each).unpack(os.pread(self._file, size, size * worker))


def _offset(arena: int) -> int:
    """Return where an arena of a worker lies; before it are those of tables."""
    return (arena + 3) * APART


def _words_of(count: int) -> Struct:
    return Struct(f"{count}q")


class ArenaMemory:
    """Lets readers write a batch where it is handed over from, in the place of their ``Memory``."""

    def __init__(self, arenas: Arenas):
        self._empty = partial(arenas.empty, get_worker_info().id)
        self._taken: dict[int, tuple[int, np.ndarray]] = {}  # by column: of which batch, and its array

    def take(self, column: int, reader: Reader, count: int, number: int) -> Any:
        """Return what *reader* reads *count* samples of a column of the *number*-th batch into."""
        form = reader.make(0)
        if not isinstance(form, np.ndarray):
            return reader.make(count)
        if column in self._taken:
            before, array = self._taken.pop(column)
            if before == number and len(array) >= count:  # it is read again, with other samples
                self._taken[column] = before, array
                return array[:count]
        array = self._empty((count, *form.shape[1:]), form.dtype)
        self._taken[column] = number, array
        return array[:]

    def empty(self, column: int, number: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Return an array of *count* elements for what is joined of a column."""
        return self._empty((count,), dtype)


class _Joined(bytes):
    """Stands in a pickle for bytes objects that lie one after the other in an arena, as *layout* says; it is empty."""

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


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and not value.flags.forc:  # with gaps numpy would pickle it whole
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
