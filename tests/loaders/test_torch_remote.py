"""DataLoaders over a web server that fails now and then: every sample once, and resumed on other workers and ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest
from torch.utils.data import DataLoader

from tarshards import ArrayLoader, IndexedShards, ShardDataset, ShardLoader, ShardWriter, Stream, World, readers
from tarshards.index.sidecar import Index
from tarshards.storage import tuning
from tarshards.storage.remote import Remote
from tarshards.testing.faulty_server import serving
from tarshards.testing.unreliable_site import UnreliableSite

SHARDS, SAMPLES = 4, 30
REMOTE = Remote(connections=4, timeout=5)
BATCH = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("set"), random.Random(0)
    with ShardWriter(str(folder / "set-%02d.tar"), max_samples=SAMPLES, index=True) as writer:
        for number in range(SHARDS * SAMPLES):
            data = rng.randbytes(rng.randrange(20, 5000))
            writer.write({"__key__": f"{number:06d}", "bin": data, "cls": sum(data)})
    return folder


@pytest.fixture
def site(folder, monkeypatch) -> Iterator[UnreliableSite]:
    """A site some of whose answers break off, come slowly, or redirect."""
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0)  # in this process and those forked from it
    files = {f"/{path.name}": (path.read_bytes(),) * 3 for path in folder.iterdir()}
    site = UnreliableSite(files=files, seed=1, rate=0.05, kinds=("reset", "close", "drop", "short", "slow", "redirect"))
    with serving(site):
        yield site


def right(samples: list[dict]) -> bool:
    """Whether these are all samples, each once and with its own bytes."""
    keys = sorted(sample["__key__"] for sample in samples)
    sums = all(sum(sample["bin"]) == int(sample["cls"]) for sample in samples)
    return sums and keys == [f"{number:06d}" for number in range(SHARDS * SAMPLES)]


@pytest.mark.parametrize(
    ("start_method", "index"), [("fork", True), ("fork", False), ("spawn", True)], indirect=["start_method"]
)
def test_workers_of_a_process_that_has_read_itself(site, start_method, index):
    dataset = ShardDataset(f"{site.url}/set.shards.json", index=index, shuffle=True, remote=REMOTE)
    assert right(list(dataset))  # which leaves idle connections
    assert right(list(DataLoader(dataset, batch_size=None, num_workers=2)))
    assert right(list(dataset))


LOADERS = {
    "ArrayLoader": lambda stream: ArrayLoader(stream, BATCH, fields={"bin": readers.bytes_()}),
    "ShardLoader": lambda stream: ShardLoader(stream, BATCH),
    "workers": lambda stream: ShardLoader(stream, BATCH, num_workers=2),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_monitor_counts_the_traffic(folder, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.001)
    files = {f"/{path.name}": (path.read_bytes(),) * 3 for path in folder.iterdir()}
    remote = Remote(connections=4, cache_dir=str(tmp_path / "cache"), retries=40)
    with serving(UnreliableSite(files=files, seed=1, rate=0.5, kinds=("reset",))) as site:
        urls = f"{site.url}/set.shards.json"
        loader = LOADERS[kind](ShardDataset(urls, index=True, shuffle=True, remote=remote))
        traffics = []
        for _ in range(2):
            assert sum(len(batch["__key__"]) for batch in loader) == SHARDS * SAMPLES
            traffics.append(loader.monitor.traffic)
            assert loader.monitor.samples == SHARDS * SAMPLES
    first, second = traffics
    assert 0 < first.retries < first.requests
    assert first.waited > 0
    assert first.bytes > sum(Index.load(str(path)).end for path in folder.glob("*.tar"))
    assert second.bytes < first.bytes / 4
    assert second.cache_hits > 0


@pytest.mark.parametrize("start_method", ["fork", "spawn"], indirect=True)
def test_samples_at_random_in_workers(site, start_method):
    samples = IndexedShards(f"{site.url}/set.shards.json", remote=REMOTE)
    assert samples[7]["__key__"] == "000007"
    batches = DataLoader(samples, BATCH, shuffle=True, num_workers=2, collate_fn=list)
    assert right([sample for batch in batches for sample in batch])


TOPOLOGIES = [((1, 2), (3, 0)), ((2, 1), (1, 2)), ((3, 0), (2, 2))]


@pytest.mark.parametrize(("before", "after"), TOPOLOGIES)
@pytest.mark.parametrize("kind", ["ShardLoader", "ArrayLoader"])
def test_a_resumed_epoch_goes_on_with_the_next_sample(site, folder, kind, before, after):
    def loader(rank: int, ranks: int, workers: int):
        options = {"index": True, "shuffle": True, "seed": 5, "block": 3, "tail": "exact", "remote": REMOTE}
        dataset = ShardDataset(f"{site.url}/set.shards.json", world=World(rank, ranks), **options)
        if kind == "ShardLoader":
            return ShardLoader(dataset, BATCH, num_workers=workers)
        return ArrayLoader(dataset, BATCH, fields={"cls": readers.integer()}, threads=workers)

    def keys(batches) -> list[str]:
        return [key for batch in batches for key in batch["__key__"]]

    local = Stream.from_shards(str(folder / "set.shards.json"), index=True, shuffle=True, seed=5, block=3)
    order = [sample["__key__"] for sample in local]
    assert order != sorted(order)
    ranks, workers = before
    taken, state = 4, None
    for rank in range(ranks):
        one = loader(rank, ranks, workers)
        batches = iter(one)
        assert keys(islice(batches, taken)) == order[rank : taken * BATCH * ranks : ranks]
        state = one.state_dict()
        batches.close()
    ranks, workers = after
    for rank in range(ranks):
        one = loader(rank, ranks, workers)
        one.load_state_dict(state)
        assert keys(one) == order[taken * BATCH * before[0] + rank :: ranks]
