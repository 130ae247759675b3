"""Wait for many sockets, and receive from them into their places: the twin of _wire.c, used without a compiler."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

STREAM = 1 << 14  # added to the events of a socket whose body is not received here: the kernel waits for more of it


def receive(waits: Sequence[Any], milliseconds: int) -> list[tuple[int, int]]:
    """Wait for sockets, and return (index, value) for those of *waits* that something has come for.

    Each wait begins with the descriptor of a non-blocking socket, the events to wait for, as for ``poll``, and a
    *place*: a writable buffer, or None. Without a place, the value is the events that have come. With one, what the
    socket has is received into it; the value is the number of bytes, 0 at the end of the stream, or the negative of an
    errno. A negative descriptor is never ready.

    Returns as soon as any wait without a place is ready, or any place is full, or its stream has ended or failed; or
    after this number of *milliseconds*, with what has come until then.
    """
    poll, numbers = select.poll(), {}
    done = [0] * len(waits)
    for number, wait in enumerate(waits):
        if wait[0] >= 0:
            numbers[wait[0]] = number
            poll.register(wait[0], wait[1] & ~STREAM)
    end = monotonic() + milliseconds / 1000
    found: dict[int, int] = {}
    while not found:
        ready = poll.poll(max(0, 1000 * (end - monotonic())))
        if not ready:
            break
        for descriptor, events in ready:
            number = numbers[descriptor]
            place = waits[number][2]
            if place is None:
                found[number] = events
                continue
            if done[number] and events & select.POLLERR:  # the next call returns the error, which is told once
                found[number] = done[number]
                continue
            try:
                with suppress(BlockingIOError):
                    count = os.readv(descriptor, [memoryview(place)[done[number] :]])
                    done[number] += count
                    if not count or done[number] == len(place):
                        found[number] = done[number]
            except OSError as error:
                found[number] = done[number] or -(error.errno or 0)
    found |= {number: count for number, count in enumerate(done) if count}
    return sorted(found.items())
