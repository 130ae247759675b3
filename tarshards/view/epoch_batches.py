"""The batches of an epoch as one rank of a training run receives them, without reading the others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tarshards.errors import StateError, whole_number
from tarshards.loaders.batches import BatchMaker
from tarshards.samples.codecs import decode_field
from tarshards.stream.stream import Stream
from tarshards.view.viewed_shards import ViewedShards, parse_number

DEFAULTS = {"seed": 0, "epoch": 0, "rank": 0, "ranks": 1, "batch_size": 32, "shuffle": True, "state": None}
NO_STATE = "not the state of a loader, which has digest, position and lanes"


class EpochBatches:
    """Finds the samples that ``ShardLoader`` puts into batch g of a rank, before any op of its stream.

    A JSON object with keys of DEFAULTS describes the epoch. Its *state* is a ``state_dict()`` or contains one; batches
    are then counted from that state.
    """

    def __init__(self, viewed: ViewedShards):
        self.viewed = viewed
        self._last: tuple[Any, BatchMaker] | None = None

    def find(self, epoch: str, step: str) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the numbers of the samples in batch *step*, and the number of batches of the rank.

        Raises ValueError for malformed parameters, StateError for the state of another dataset, and IndexError if
        there is no such batch.
        """
        wanted = {**DEFAULTS, **(json.loads(epoch) if epoch else {})}
        if unknown := wanted.keys() - DEFAULTS.keys():
            raise ValueError(f"an epoch has no {min(unknown)}; it has {', '.join(DEFAULTS)}")
        g = parse_number("step", step)
        rank, ranks = (whole_number(name, wanted[name], least) for name, least in (("rank", 0), ("ranks", 1)))
        if rank >= ranks:
            raise ValueError(f"there is no rank {rank} of {ranks}, which are numbered from 0")
        maker = self._maker(wanted["seed"], wanted["shuffle"], wanted["batch_size"])
        state, number = None, wanted["epoch"]
        if wanted["state"] is not None:
            state = state_in(wanted["state"])
            if state is None:
                raise StateError(NO_STATE)
            number = state.get("epoch", number)
        part = maker.part(number, state, rank, ranks, g)
        batches = len(maker.shares(part.plan, rank))
        begins = np.array([self.viewed.begin(shard) for shard in part.shards.tolist()], np.int64)
        return begins + part.numbers, {"batches": batches, "step": g, "epoch": number}

    def _maker(self, seed: int, shuffle: bool, size: int) -> BatchMaker:
        key = seed, shuffle, size
        if self._last is None or self._last[0] != key:
            viewed = self.viewed
            viewed.indexed()
            stream = Stream.from_shards(viewed.shards, shuffle=shuffle, seed=seed, index=True)
            self._last = key, BatchMaker(stream, size)
        return self._last[1]


def read_state(data: bytes) -> dict[str, Any]:
    """Return the state of a loader in a file, JSON or a torch checkpoint; never runs code from the file.

    Raises StateError if there is none, and DecodeError for a damaged file and for objects that are neither tensors nor
    plain containers.
    """
    field = {b"{": "json", b"[": "json", b"P": "pth"}.get(data.lstrip()[:1])  # torch writes zip archives: PK...
    state = None if field is None else state_in(decode_field(field, data))
    if state is None:
        raise StateError(NO_STATE)
    return state


def state_in(value: Any) -> dict[str, Any] | None:
    """Return the state of a loader in a JSON value, such as a checkpoint that holds one.

    >>> state_in({"step": 7, "loader": {"digest": "ab", "position": 3, "lanes": 192}})
    {'digest': 'ab', 'position': 3, 'lanes': 192}
    """
    if isinstance(value, dict):
        if value.keys() >= {"digest", "position", "lanes"}:
            return value
        return next(filter(None, map(state_in, value.values())), None)
    return next(filter(None, map(state_in, value)), None) if isinstance(value, list | tuple) else None
