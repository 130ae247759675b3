"""One rank of a training job, for tests: ``python training.py SETTINGS.json RANK``."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch

from tarshards import Ledger, ShardDataset
from tarshards.errors import AuditError
from tarshards.loaders.torch.shard_loader import ShardLoader


def main(settings: dict, rank: int) -> None:
    """Read an epoch in batches; write what came after each batch, and the state, as a training job would."""
    folder, ranks = Path(settings["folder"]), settings["ranks"]
    if settings.get("absent") == rank:
        return
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    mine = settings | settings.get(f"rank {rank}", {})
    ledger = Ledger(max_errors=100)
    dataset = ShardDataset(mine["urls"], shuffle=True, seed=mine.get("seed", 0), tail=mine.get("tail"), on_error=ledger)
    loader = ShardLoader(dataset, settings["size"], num_workers=settings["workers"], multiprocessing_context=None)
    loader.set_epoch(mine.get("epoch", 0))
    if "state" in settings:
        loader.load_state_dict(settings["state"])
    train = model(ranks) if settings.get("train") else lambda batch: None
    outcome: dict = {"steps": 0, "length": len(loader), "batches": []}
    for batch in loader:
        train(batch)
        outcome["steps"] += 1
        outcome["batches"].append([int(value) for value in batch["cls"]] if batch else [])
        if settings.get("save"):
            save(folder / f"{rank}.saved", {"state": loader.state_dict(), "batches": outcome["batches"]})
            time.sleep(settings["save"])
    if "check" in settings:
        try:
            ledger.check(torch.distributed.group.WORLD, timeout=settings["check"])
            outcome["check"] = "passed"
        except AuditError as error:
            outcome["check"] = str(error)
    save(folder / f"{rank}.done", outcome)
    sys.stdout.flush()
    # Freeing a process group may wait for ever: with the GIL, for its thread, which needs the GIL to free a tensor.
    os._exit(0)


def save(path: Path, outcome: dict) -> None:
    path.with_suffix(".new").write_text(json.dumps(outcome))
    path.with_suffix(".new").rename(path)


def model(ranks: int):
    """A step of a model that is the same on all ranks: each step waits for all of them."""
    network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)

    def step(batch) -> None:
        values = [[float(value)] for value in batch["cls"]] if batch else []
        optimizer.zero_grad()
        network(torch.tensor(values).reshape(-1, 1)).sum().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
