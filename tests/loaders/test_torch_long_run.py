"""A long run: a remote mixture with a cache, packed, with workers, stopped and resumed on other ranks."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from leftovers import open_files
from range_server import serving
from soak import SOAK, some
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, Remote, ShardWriter, World, mix, pack, readers

pytestmark = [
    pytest.mark.soak,
    pytest.mark.forks,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SAMPLES = {"a": 400, "b": 300}
LENGTHS = np.random.default_rng(5).integers(1, 200, sum(SAMPLES.values()))  # of a, then of b


@pytest.fixture
def folder(tmp_path) -> Path:
    """Indexed shards of two datasets; the values of sample i of both together are all i."""
    (tmp_path / "set").mkdir()
    first = 0
    for name, count in SAMPLES.items():
        with ShardWriter(str(tmp_path / f"set/{name}-{{shard}}.tar"), max_samples=100) as writer:
            for i in range(first, first + count):
                writer.write({"__key__": f"{i:03d}", "npy": np.full(LENGTHS[i], i, "<i4")})
        first += count
    return tmp_path / "set"


def mixture(url: str, remote: Remote, ledger: Ledger, world: World):
    datasets = {
        name: ShardDataset(f"{url}/{name}-{{0..{count // 100 - 1}}}.tar", shuffle=True, remote=remote, world=world)
        for name, count in SAMPLES.items()
    }
    return mix(datasets, weights={"a": 4, "b": {0: 2, 300: 4}}, until=650, tail="exact", on_error=ledger)


def torch_loader(mixed):
    return ShardLoader(mixed.decode(), 2, num_workers=2, packing=pack(LENGTHS, 400, window=200))


def array_loader(mixed):
    return ArrayLoader(
        mixed, 2, fields={"npy": readers.ragged("<i4")}, threads=2, packing=pack(LENGTHS, 400, window=200)
    )


def samples_of(batch) -> list[int]:
    ids, ends = np.asarray(batch["npy"]), np.asarray(batch["cu_seqlens"])
    return [int(part[0]) for part in np.split(ids, ends[1:-1])]


def held() -> dict[str, int]:
    """What this process holds: KiB of private memory, descriptors, and threads."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", id)(0)  # what is free in the heap depends on which thread was first
    rows = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    private = sum(int(rows[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    return {"private": private, "files": len(open_files()), "threads": threading.active_count()}


@pytest.mark.parametrize("make", some([array_loader, torch_loader], 2))
def test_twenty_epochs(folder, tmp_path, make):
    rng, found, state = random.Random(0), [], None
    remote = Remote(cache_dir=tmp_path / "cache", cache_bytes=1 << 24)
    with serving(folder) as site:
        for epoch in range(20 if SOAK > 1 else 4):
            came, ledger, is_over = [], Ledger(), False
            while not is_over:
                ranks, steps = rng.randint(1, 4), rng.choice([1, 3, 10, 1000])
                loaders = [make(mixture(site.url, remote, ledger, World(rank, ranks))) for rank in range(ranks)]
                for loader in loaders:
                    if state is None:
                        loader.set_epoch(epoch)
                    else:
                        loader.load_state_dict(state)
                passes = [iter(loader) for loader in loaders]
                for batches in passes:
                    for batch in islice(batches, steps):
                        came += samples_of(batch)
                states = [loader.state_dict() for loader in loaders]
                is_over = any(each["epoch"] != epoch for each in states)
                for batches in passes:
                    for batch in batches if is_over else ():
                        came += samples_of(batch)
                    batches.close()
                assert is_over or all(each == states[0] for each in states)
                state = None if is_over else states[0]
            shards, numbers = mixture(site.url, remote, Ledger(), World()).source.plan(epoch, 1)[np.arange(650)]
            assert Counter(came) == Counter((shards * 100 + numbers).tolist())
            ledger.check()
            found.append(held())
    early, late = found[len(found) // 2], found[-1]
    assert late["files"] <= max(each["files"] for each in found[: len(found) // 2 + 1])
    assert late["threads"] <= remote.connections + 10, "those that fetch, and a few of torch's"
    assert late["private"] <= early["private"] * 1.01 + (1024 if SOAK > 1 else 4096)  # the first epochs allocate more
    del loaders, loader, passes, batches, batch
    gc.collect()
    assert "memfd:tarshards" not in Path("/proc/self/maps").read_text(), "shared memory"
