"""One process of a chain that resumes an epoch: ``resuming.py SETTINGS`` prints what it delivered, and its ledger.

Run by ``test_resume_chains``, which documents the settings.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tarshards import ArrayLoader, Ledger, Stream, World, readers

FIELDS = {"cls": readers.integer(), "label.cls": readers.integer()}


class Not:
    """Whether the class of a sample leaves no remainder."""

    def __init__(self, divisor: int):
        self.divisor = divisor
        self.__name__ = f"not_by_{divisor}"

    def __call__(self, sample: dict[str, Any]) -> bool:
        return int(sample["cls"]) % self.divisor != 0


class FailOn:
    """Fail on the samples whose class leaves no remainder."""

    def __init__(self, divisor: int):
        self.divisor = divisor

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["cls"]) % self.divisor == 0:
            raise ValueError(f"a multiple of {self.divisor}")
        return sample


def apply(stream: Any, ops: list[list[Any]]) -> Any:
    for name, *args in ops:
        if name == "filter":
            stream = stream.filter(Not(*args))
        elif name == "map":
            stream = stream.map(FailOn(*args))
        else:
            stream = getattr(stream, name)(*args)
    return stream


def open_loader(mine: dict[str, Any], rank: int) -> tuple[Any, Ledger, Any]:
    """Return the loader of a rank, its ledger, and what has the state."""
    ledger = Ledger(max_errors=100_000)
    options = {name: mine[name] for name in ("index", "shuffle", "seed", "tail")}
    options |= {"on_error": ledger, "world": World(rank, mine["ranks"])}
    if mine["loader"] in ("stream", "arrays"):
        stream = apply(Stream.from_shards(mine["urls"], **options), mine["ops"])
        if mine["loader"] == "stream":
            return stream, ledger, stream
        loader = ArrayLoader(stream, mine["batch"], fields=FIELDS, threads=mine["workers"])
        return loader, ledger, loader
    from torch.utils.data import DataLoader

    from tarshards import ShardDataset, ShardLoader

    dataset = apply(ShardDataset(mine["urls"], **options), mine["ops"])
    if mine["loader"] == "dataset":
        return DataLoader(dataset, mine["batch"], collate_fn=list), ledger, dataset
    loader = ShardLoader(dataset, mine["batch"], num_workers=mine["workers"], collate_fn=list)
    return loader, ledger, loader


def keys_of(item: Any) -> list[str]:
    """The keys of a sample, of a list of samples or of a batch of arrays."""
    if isinstance(item, list):
        return [sample["__key__"] for sample in item]
    return [item["__key__"]] if isinstance(item["__key__"], str) else list(item["__key__"])


def run(mine: dict[str, Any], rank: int) -> dict[str, Any]:
    """Deliver to one rank until *stop* items have come (None: all); return what came, the state and the ledger."""
    loader, ledger, stateful = open_loader(mine, rank)
    if mine["state"] is not None:
        stateful.load_state_dict(mine["state"])
    keys: list[str] = []
    state = None
    iterator = iter(loader)
    for steps, item in enumerate(iterator, 1):
        keys += keys_of(item)
        if steps == mine["stop"]:
            if mine["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            state = stateful.state_dict()
            break
    iterator = item = None  # the loop is left
    gc.collect()
    ledger.check()
    tally = ledger._total()
    counts = {
        "planned": tally.planned,
        "taken": tally.read.total() + tally.repeated if tally.planned else tally.samples,
        "delivered": ledger.samples,
        "filtered": sum(ledger.filtered.values()),
        "failed": ledger.failed,
        "quarantined": tally.quarantined_samples,
        "dropped": tally.dropped + tally.discarded,
        "in_flight": tally.in_flight,
        "unaudited": ledger.unaudited,
    }
    return {"keys": keys, "state": state, "counts": counts, "text": str(ledger)}


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([run(settings, rank) for rank in range(settings["ranks"])]))
