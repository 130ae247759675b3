"""One rank of a job, for tests of torch.distributed.checkpoint: ``python checkpoint_rank.py SETTINGS.json RANK``.

It saves each loader after each of the "stops", a number of batches; with "resume" it loads them and reads the rest.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from our_loaders import array_loader, shard_loader
from torch import distributed

from tarshards import ShardDataset, ShardLoader, mix, stepwise


def mixture(urls: str, size: int) -> ShardLoader:
    """A loader whose state has the counts of its datasets, too."""
    datasets = {name: ShardDataset(urls, shuffle=True, seed=seed) for seed, name in enumerate("ab")}
    both = mix(datasets, weights={"a": 1, "b": stepwise({0: 0, 100: 1}, every=20)}, until=240)
    return ShardLoader(both.decode(), size)


def in_steps(urls: str, size: int) -> ShardLoader:
    """A loader whose state has the number of its pass, too."""
    return ShardLoader(ShardDataset(urls, shuffle=True).decode(), size, steps=25)


MAKERS: list[Callable[[str, int], Any]] = [shard_loader, array_loader, mixture, in_steps]
LOADERS = {make.__name__: make for make in MAKERS}


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def main(settings: dict[str, Any], rank: int) -> None:
    """Write the batches of each loader, and whether its state was the same on all ranks."""
    folder, ranks = Path(settings["folder"]), settings["ranks"]
    meeting = f"file://{folder}/rendezvous-{ranks}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    outcome = {}
    for name, make in LOADERS.items():
        for stop in settings["stops"]:
            loader, saved = make(settings["urls"], settings["size"]), folder / f"{name}-{stop}"
            if settings["resume"]:
                dcp.load({"loader": loader}, checkpoint_id=saved)
            batches = iter(loader)
            taken = list(batches if settings["resume"] else islice(batches, stop))
            states = gathered(loader.state_dict())
            if not settings["resume"]:
                dcp.save({"loader": loader, "weight": torch.ones(3)}, checkpoint_id=saved)
            numbers = [[int(value) for value in batch["cls"]] for batch in taken]
            outcome[f"{name}-{stop}"] = {"batches": numbers, "equal": states == [states[0]] * ranks}
    (folder / f"{ranks}-{rank}.json").write_text(json.dumps(outcome))
    sys.stdout.flush()
    # Freeing a process group may wait for ever: with the GIL, for its thread, which needs the GIL to free a tensor.
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
