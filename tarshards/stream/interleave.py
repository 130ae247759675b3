"""Merge several streams in a given order; a stream that has ended begins again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from tarshards.epoch.proportions import Until
from tarshards.errors import SampleError

END = object()  # of a stream


class MixedStream:
    """One stream of a mixture, read pass after pass: *begin* takes the number of a pass, from 0, and opens it.

    A pass without samples raises *empty*.
    """

    def __init__(self, begin: Callable[[int], Generator[Any, None, None]], empty: SampleError):
        self._begin, self._empty = begin, empty
        self._passes = 0
        self._samples: Generator[Any, None, None] = (_ for _ in ())
        self._next: Any = END

    def has_ended(self) -> bool:
        """Return whether a pass has ended and the next has not begun."""
        if self._next is END and self._passes:
            self._next = next(self._samples, END)
        return self._next is END and self._passes > 0

    def was_read(self) -> bool:
        """Return whether every sample has been taken at least once."""
        return self._passes > 1 or self.has_ended()

    def take(self) -> Any:
        """Return the next sample, the first of a new pass if one has ended."""
        if self.has_ended() or not self._passes:
            self._samples = self._begin(self._passes)
            self._passes += 1
            if self.has_ended():
                raise self._empty
        sample, self._next = self._next, END
        return sample

    def holds_sample(self) -> bool:
        """Return whether a sample was read but not taken."""
        return self._next is not END

    def close(self) -> None:
        """Close the open pass, even if a traceback still refers to it."""
        self._samples.close()


def interleave(
    streams: Sequence[MixedStream], choices: Iterable[int], ends: Mapping[int, float], until: Until
) -> Generator[Any, None, int | None]:
    """Yield the samples of *streams*, each from the stream whose number comes next in *choices*.

    *until* is as in ``mix``. *ends* has, for each stream that is ever chosen, the number of samples of the mixture
    after which it is no longer chosen. With *until* "first", the generator returns the number of the stream that would
    begin again.
    """
    unread = set(ends)
    try:
        for taken, number in enumerate(choices, 1):
            stream = streams[number]
            if taken - 1 == until:
                return None
            if until == "first" and stream.has_ended():
                return number
            yield stream.take()
            if until == "last":
                if stream.was_read():
                    unread.discard(number)
                unread.difference_update([i for i in unread if taken >= ends[i]])
                if not unread:
                    return None
        return None
    finally:
        for stream in streams:
            stream.close()
