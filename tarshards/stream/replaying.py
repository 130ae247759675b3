"""Resuming by replaying: where nothing numbers the results, an epoch begins again, and those delivered are passed over.

A state then counts the results that were delivered, and has a CRC-32 of their keys, in order: a replay that leads to
other keys would repeat or miss samples. States of earlier releases have the key of the last result alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

from tarshards.errors import StateError, shortened
from tarshards.stream.op import BoundOp

TOGETHER = 256  # keys that a CRC takes together: by 64 each takes 5 ns longer, by 1,024 3 ns less, and is held longer


class Delivered(NamedTuple):
    """The results that have been delivered: *before* of them, whose keys have *crc*, and then those with *keys*."""

    before: int = 0
    crc: int = 0
    keys: Any = ()

    def together(self) -> Delivered:
        """Return the same results, all of them in *before* and *crc*; those that follow are appended to *keys*."""
        return Delivered(self.before + len(self.keys), crc_of(self.keys, self.crc), [])

    def state(self) -> dict[str, int]:
        """Return what a state says of them."""
        delivered, crc, _ = self.together()
        return {"delivered": delivered, "keys": crc}


def key_of(result: Any) -> str:
    """Return the key of a sample, or those of a batch with NULs between them; "" if it has none."""
    if type(result) is list:
        return "\0".join(map(key_of, result))
    key = result.get("__key__") if type(result) is dict else None
    if isinstance(key, str):
        return key
    return "\0".join(each for each in key if isinstance(each, str)) if isinstance(key, Sequence) else ""


def crc_of(keys: Sequence[str], crc: int = 0) -> int:
    """Return the CRC-32 of *keys*, each followed by a NUL, after those that have *crc*."""
    return crc32("\0".join([*keys, ""]).encode("utf-8", "surrogatepass"), crc)


def crc_of_results(results: Sequence[Any]) -> int:
    """Return the CRC-32 of the keys of *results*."""
    try:
        return crc_of([each["__key__"] if type(each) is dict else key_of(each) for each in results])
    except (KeyError, TypeError):  # a key is missing, or no text; otherwise that takes a quarter of the time
        return crc_of([key_of(each) for each in results])


def replay(results: Iterator[Any], state: Mapping[str, Any], every_op: Sequence[BoundOp]) -> Delivered:
    """Take from *results* those that were delivered before *state*, after *every_op*; raise StateError for others."""
    taken, last = Delivered().together(), None
    for last in islice(results, state["delivered"]):
        taken.keys.append(key_of(last))
        if len(taken.keys) == TOGETHER:
            taken = taken.together()
    taken = taken.together()
    if not any(op.is_unordered for op in every_op):
        check_replayed(state, taken.crc if taken.before == state["delivered"] else None, last)
    elif next(results, None) is not None:  # at the end of an epoch, its order does not matter
        check_ordered(every_op)
    return taken


def check_replayed(state: Mapping[str, Any], crc: int | None, last: Any) -> None:
    """Raise StateError unless the results before *state* are those that replaying it has led to.

    Their keys have *crc*, None if the epoch has ended before, and *last* is the last of them, a sample or a batch.
    Otherwise resuming would skip or repeat samples.
    """
    if "keys" in state:
        if crc == state["keys"]:
            return
        led = "after other samples than replaying it leads to"
    else:
        saved, found = state.get("last"), last_key(last)
        if saved is None or (crc is not None and found in (saved, None)):
            return
        end = "the end of the epoch" if crc is None else shortened(found)
        led = f"after the sample {shortened(saved)}, and replaying it leads to {end}"
    raise StateError(
        f"the state was saved {led}: a shard has changed, or is damaged, since then, or could not be read then, or an "
        "op is random; begin the epoch again, or index the shards with `tarindex`: their states need no replaying"
    )


def last_key(item: Any) -> str | None:
    """Return the key of a sample, or of the last one in a batch; None if it has none."""
    if type(item) is list and item:
        item = item[-1]
    key = item.get("__key__") if type(item) is dict else None
    if not isinstance(key, str) and isinstance(key, Sequence) and len(key):
        key = key[-1]
    return key if isinstance(key, str) else None


def check_ordered(ops: Iterable[BoundOp]) -> None:
    """Raise StateError if an op yields results as they finish, since replaying it would skip other results."""
    for op in ops:
        if op.is_unordered:
            raise StateError(
                f"the state is resumed by replaying the stream, and {op.label} with ordered=False yields samples in "
                "another order each time; use ordered=True"
            )
