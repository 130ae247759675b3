"""Chains of processes that resume one epoch, with filters and faults: each ledger's sum and the total close."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from soak import SOAK

from tarshards.index.build import build_index
from tarshards.index.manifests import update_manifests
from tarshards.storage.manifest import Shard
from tarshards.write.shards import TarWriter

pytestmark = pytest.mark.soak

PROCESS = Path(__file__).with_name("resuming.py")
CLASSES = ("delivered", "filtered", "failed", "quarantined", "dropped")


class Dataset:
    """Shards of random sizes. Every *bad*-th sample has a label that does not decode; some shards are damaged."""

    def __init__(self, folder: Path, rng: random.Random, index: bool):
        self.folder, self.index = folder, index
        self.bad = rng.choice([3, 5, 11, 1000])
        self.sizes = [rng.randrange(1, 30) for _ in range(rng.randrange(4, 10))]
        self.urls = [str(folder / f"set-{shard}.tar") for shard in range(len(self.sizes))]
        self.shard_of: dict[str, int] = {}
        number = 0
        for shard, size in enumerate(self.sizes):
            with TarWriter(self.urls[shard]) as writer:
                for _ in range(size):
                    label = b"cat" if self.is_bad(number) else number
                    writer.write({"__key__": f"{number:05d}", "cls": number, "label.cls": label})
                    self.shard_of[f"{number:05d}"] = shard
                    number += 1
            if index:
                build_index(self.urls[shard]).save(self.urls[shard])
        if index:  # with a manifest, a damaged shard is noticed where it is read, not by who opens the dataset
            shards = [Shard(url, size, Path(url).stat().st_size) for url, size in zip(self.urls, self.sizes)]
            self.urls = list(update_manifests(shards, str(folder / "set.shards.json")))
        self.damaged = {shard for shard in range(len(self.sizes)) if rng.random() < 0.15}

    def is_bad(self, number: int) -> bool:
        return number % self.bad == self.bad - 1

    def damage(self, rng: random.Random) -> None:
        """Remove, truncate or overwrite the damaged shards, or one header in them."""
        for shard in self.damaged:
            path = self.folder / f"set-{shard}.tar"
            data = bytearray(path.read_bytes())
            kind = rng.choice(["remove", "truncate", "overwrite", "header"]) if self.index else "truncate"
            if kind == "remove":
                path.unlink()
                continue
            if kind == "truncate":
                del data[rng.randrange(1, len(data) - 1024) :]
            elif kind == "overwrite":
                data[:] = b"damaged " * (len(data) // 8)
            else:
                at = rng.randrange(0, 2 * self.sizes[shard]) * 1024
                data[at : at + 5] = b"wrong"
            path.write_bytes(data)


def fate(dataset: Dataset, ops: list[list[Any]], number: int) -> str:
    """The outcome of an intact sample."""
    for name, *args in ops:
        if name == "filter" and number % args[0] == 0:
            return "filtered"
        if (name == "map" and number % args[0] == 0) or (name == "decode" and dataset.is_bad(number)):
            return "failed"
    return "delivered"


def draw_ops(rng: random.Random, loader: str) -> list[list[Any]]:
    if loader == "arrays":
        return []
    ops = [["filter", rng.choice([2, 3, 7])], ["map", rng.choice([4, 5, 9])], ["decode"], ["filter", 13]]
    chosen = rng.sample(ops, rng.randrange(1, 5))
    if loader != "shards" and rng.random() < 0.25:
        chosen.append(["shuffle", rng.choice([2, 10, 1000])])
    return chosen


def run(python: str, folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Run a process; None if it was to be killed and was."""
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    done = subprocess.run([python, str(PROCESS), str(path)], capture_output=True, text=True, timeout=300)
    if settings["kill"] and done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def closes(counts: dict[str, int]) -> bool:
    """Whether the outcomes add up to the samples taken from the source."""
    return counts["taken"] == sum(counts[name] for name in CLASSES) + counts["in_flight"]


@pytest.mark.parametrize("seed", range(4 * SOAK))
def test_a_chain_of_processes(tmp_path, python_with_torch, seed):
    rng = random.Random(f"chains/{seed}")
    loader = ("stream", "shards", "arrays", "dataset")[seed % 4]
    if loader in ("shards", "dataset"):
        pytest.importorskip("torch", reason="needs torch")
    index = rng.random() < 0.8 or loader == "arrays"
    dataset = Dataset(tmp_path, rng, index)
    ops = draw_ops(rng, loader)
    is_replayed = not index or ["shuffle"] in [op[:1] for op in ops]
    settings = {"urls": dataset.urls, "loader": loader, "index": index, "ops": ops, "state": None}
    settings |= {"shuffle": rng.random() < 0.7, "seed": seed, "batch": rng.randrange(1, 9), "ranks": 1}
    settings |= {"tail": "exact" if index else None}
    settings |= {"workers": rng.randrange(4) if loader in ("shards", "arrays") and index else 0}
    dataset.damage(rng)
    delivered: list[str] = []
    sums: Counter[str] = Counter()
    left = len(dataset.shard_of)
    for processes_left in reversed(range(5)):
        if not is_replayed and loader in ("shards", "arrays"):
            settings |= {"workers": rng.randrange(4), "ranks": rng.choice([1, 1, 2, 3])}
        step = (1 if loader == "stream" else settings["batch"]) * settings["ranks"]
        settings["stop"] = rng.choice([None, *range(1, left // step)]) if processes_left else None
        settings["kill"] = settings["stop"] is not None and rng.random() < 0.2
        results = run(python_with_torch, tmp_path, settings)
        if results is None:
            continue  # what it delivered is delivered again
        if is_replayed:
            sums.clear()
        for result in results:
            assert closes(result["counts"]), result["text"]
            delivered += result["keys"]
            sums.update({name: result["counts"][name] for name in CLASSES})
            if not is_replayed:
                assert result["counts"]["delivered"] == len(result["keys"]), result["text"]
        settings["state"] = state = results[0]["state"]
        assert [result["state"] for result in results] == [state] * len(results), "all ranks are at one position"
        if state is None or state["epoch"] > 0:
            break
        left = len(dataset.shard_of) - state.get("position", 0)
    else:
        raise AssertionError("the epoch has not come to its end")

    sound = {key for key, shard in dataset.shard_of.items() if shard not in dataset.damaged}
    fates = {key: fate(dataset, ops, int(key)) for key in dataset.shard_of}
    if loader == "arrays":
        fates = {key: "failed" if dataset.is_bad(int(key)) else "delivered" for key in fates}
    assert max(Counter(delivered).values(), default=1) == 1
    assert sound & set(delivered) == {key for key in sound if fates[key] == "delivered"}
    assert sums["delivered"] == len(delivered)
    for name in ("filtered", "failed"):
        assert sums[name] >= sum(fates[key] == name for key in sound)
    if index:
        assert sum(sums.values()) == len(dataset.shard_of)
    if not dataset.damaged:
        assert +sums == Counter(fates.values())
