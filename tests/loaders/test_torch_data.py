"""Exactly once over ranks and workers, with real DataLoaders; epochs; the ledger over processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch.distributed
from soak import SOAK, rounds, some
from torch.utils.data import DataLoader

from tarshards import ArrayLoader, Ledger, ShardDataset, ShardLoader, Stream, World, readers, torch_iterable
from tarshards.errors import TarshardsError, WorldError
from tarshards.loaders.torch.shard_dataset import SharedEpochCounter

pytestmark = [
    pytest.mark.usefixtures("quick_spawn"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def loader(dataset: ShardDataset, workers: int = 0, method: str = "fork", **options) -> DataLoader:
    if workers:
        options["multiprocessing_context"] = method
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def exhaust(passes: DataLoader) -> None:
    """Iterate over a loader that fails. Torch leaves its workers to the garbage collector then, which takes seconds."""
    iterator = iter(passes)
    try:
        list(iterator)
    finally:
        getattr(iterator, "_shutdown_workers", int)()


def classes(samples) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


@pytest.mark.soak
@pytest.mark.parametrize("shards", range(4, 18, 1 if SOAK > 1 else 5))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_every_world_is_a_partition(make_shards, shards, world_size, num_workers):
    """In one process, so that all combinations can be had: the same code that runs in real workers below."""
    urls = make_shards(shards)
    for epoch in range(2):
        seen: list[int] = []
        for rank in range(world_size):
            for worker in range(num_workers):
                world = World(rank, world_size, worker, num_workers)
                dataset = ShardDataset(urls, shuffle=True, world=world)
                dataset.set_epoch(epoch)
                seen += classes(dataset)
        assert sorted(seen) == list(range(3 * shards))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("workers", "world_size", "shards"), some([*product([0, 1, 2, 4], [1, 2, 3, 4], [4, 9, 17])], 5)
)
def test_exactly_once_with_real_workers(make_shards, monkeypatch, shards, world_size, workers):
    urls = make_shards(shards)
    seen: list[int] = []
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        dataset = ShardDataset(urls, shuffle=True)
        part = classes(loader(dataset, workers))
        assert dataset.ledger.samples == len(part)
        seen += part
    assert sorted(seen) == list(range(3 * shards))


def is_odd(number: int) -> bool:
    return number % 2 == 1


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_any_stream_is_shared_out_to_ranks_and_workers(monkeypatch, world_size, workers):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    seen: list[int] = []
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        dataset = torch_iterable(Stream(range(50)).filter(is_odd).map(str).shuffle(10))
        part = list(map(int, loader(dataset, workers)))
        assert {number % world_size for number in part} <= {rank}
        seen += part
    assert sorted(seen) == list(range(1, 50, 2))


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_from_shards_is_shared_out_to_ranks_and_workers(make_shards, monkeypatch, index, workers):
    urls = make_shards(9, index=index)
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen: list[int] = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        stream = Stream.from_shards(urls, shuffle=True, tail="exact" if index else None).decode()
        dataset = torch_iterable(stream)
        part = classes(loader(dataset, workers))
        assert dataset.ledger is stream.ledger
        assert stream.ledger.samples == len(part)
        seen += part
    assert sorted(seen) == list(range(27))


def test_an_iterable_that_differs_from_rank_to_rank_is_taken_whole(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert sorted(loader(torch_iterable(Stream(range(9)), world=World()), 2)) == list(range(9))
    assert Stream(range(9)).collect() == list(range(9)), "a stream by itself is whole on every rank"


def test_epochs_of_any_stream_go_on_in_its_torch_iterable():
    stream = Stream(range(50)).shuffle(50)
    expected = [stream.collect() for _ in range(3)]
    stream.set_epoch(1)
    dataset = torch_iterable(stream)
    assert [list(loader(dataset)) for _ in range(2)] == expected[1:]
    pairs = [[list(loader(dataset, 1)) for _ in range(2)] for dataset in [torch_iterable(stream)]]
    assert pairs == [expected[1:]]


def test_what_torch_iterable_returns(make_shards):
    dataset = ShardDataset(make_shards(2, index=True))
    assert torch_iterable(dataset) is dataset
    assert torch_iterable(dataset, world=World(1, 2)).world == World(1, 2)
    from_stream = torch_iterable(Stream.from_shards(make_shards(2, index=True)))
    assert sum(len(batch["cls"]) for batch in ShardLoader(from_stream, 4)) == 6
    plain = torch_iterable(Stream(range(9))).with_length(9)
    assert isinstance(plain, torch.utils.data.IterableDataset)
    assert len(DataLoader(plain, batch_size=2)) == 5
    with pytest.raises(TypeError, match="a ShardLoader takes a ShardDataset"):
        ShardLoader(plain, 2)
    with pytest.raises(TypeError, match=r"torch_iterable takes a ShardDataset or a Stream, .*, not \[1\]"):
        torch_iterable([1])


def test_a_state_of_any_stream_resumes_in_the_same_worker():
    dataset = torch_iterable(Stream(range(20)).shuffle(5), world=World(1, 2))
    iterator = iter(dataset)
    begun = [next(iterator) for _ in range(4)]
    state = dataset.state_dict()
    rest = list(iterator)
    again = torch_iterable(Stream(range(20)).shuffle(5), world=World(1, 2))
    again.load_state_dict(state)
    assert list(again) == rest
    assert sorted(begun + rest) == list(range(1, 20, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_fewer_shards_than_ranks(make_shards, monkeypatch, workers):
    urls = make_shards(3)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(WorldError, match="3 shards for 4 ranks"):
            exhaust(loader(ShardDataset(urls), workers))


def test_workers_without_a_shard_are_idle(make_shards):
    assert sorted(classes(loader(ShardDataset(make_shards(2)), 4))) == list(range(6))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_advance_by_themselves_in_workers(make_shards, method, persistent):
    dataset = ShardDataset(make_shards(8), shuffle=True, seed=1)
    passes = loader(dataset, 2, method, persistent_workers=persistent)
    orders = [classes(passes) for _ in range(3)]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    dataset.set_epoch(1)
    assert [classes(passes), classes(passes)] == orders[1:], "set_epoch reaches the workers"
    assert classes(passes) not in orders
    assert dataset.ledger.samples == 6 * 24


def test_epochs_are_those_of_one_process(make_shards):
    """Worker 0 of 1 delivers the same in epoch n as the main process."""
    urls = make_shards(6)
    alone, served = ShardDataset(urls, shuffle=True), ShardDataset(urls, shuffle=True)
    assert [classes(alone) for _ in range(3)] == [classes(loader(served, 1)) for _ in range(3)]


def test_breaking_off_at_random_keeps_the_workers_in_step(make_shards):
    dataset = ShardDataset(make_shards(6, 20), shuffle=True)
    passes = loader(dataset, 2, prefetch_factor=1)
    for stop in (1, 3, 0, 50, 2):
        iterator = iter(passes)
        for _ in range(stop):
            next(iterator)
        del iterator
        assert sorted(classes(passes)) == list(range(120))
    assert dataset.ledger.unaudited


@pytest.mark.soak
def test_a_loader_seeded_the_same_every_epoch(make_shards):
    """The seed by which workers of one pass know each other then repeats."""
    dataset = ShardDataset(make_shards(8), shuffle=True)
    epochs = 12 if SOAK > 1 else 4
    orders = []
    for _ in range(epochs):
        generator = torch.Generator()
        generator.manual_seed(7)
        orders.append(classes(loader(dataset, 2, generator=generator)))
        assert sorted(orders[-1]) == list(range(24))
    assert len({tuple(order) for order in orders}) == epochs


@pytest.mark.parametrize("workers", [0, 2])
def test_repeat_in_workers(make_shards, workers):
    dataset = ShardDataset(make_shards(4), shuffle=True).shuffle(4).repeat(20)
    for _ in range(2):
        assert Counter(classes(loader(dataset, workers))) == dict.fromkeys(range(12), 20)


@pytest.mark.soak
def test_worker_tables_agree_from_any_interleaving():
    """Eight threads stand for workers that begin a pass at the same moment."""
    for seed in range(rounds(200)):
        counter = SharedEpochCounter()
        copies = [pickle.loads(pickle.dumps(counter)) for _ in range(8)]
        for copy in copies:
            copy._words = counter._words
        begun: list[list[int]] = [[] for _ in copies]
        barrier = threading.Barrier(8)

        def work(worker, seed=seed, copies=copies, begun=begun, barrier=barrier):
            barrier.wait()
            for _ in range(3):
                begun[worker].append(copies[worker].begin(World(0, 1, worker, 8, seed=seed)))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert begun == [[0, 1, 2]] * 8


class Torn(np.ndarray):
    """A table into which another worker writes two passes while it is copied."""

    meanwhile: Callable[[], None] | None = None

    def copy(self, *args):
        rows = [np.array(self[0])]
        meanwhile, Torn.meanwhile = Torn.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return np.array([*rows, *map(np.array, self[1:])])


def test_a_table_that_is_written_while_it_is_copied(monkeypatch):
    monkeypatch.setattr(SharedEpochCounter, "EPOCHS", 3)  # the third epoch is in the first row
    counters = [SharedEpochCounter(2) for _ in range(2)]
    counters[1]._words = counters[0]._words
    slow, fast = (partial(c.begin, World(0, 1, worker, 2, seed=1)) for worker, c in enumerate(counters))
    assert [slow(), fast()] == [2, 2]
    table = SharedEpochCounter._table
    monkeypatch.setattr(SharedEpochCounter, "_table", property(lambda self: table.fget(self).view(Torn)))
    monkeypatch.setattr(Torn, "meanwhile", lambda: begun.extend((fast(), fast())))
    begun: list[int] = []
    assert [slow(), slow()] == begun == [3, 4]


def test_more_workers_than_the_table_holds():
    with pytest.raises(WorldError, match="256"):
        SharedEpochCounter().begin(World(0, 1, 256, 300, seed=1))


def test_indexing_says_what_to_do(make_shards):
    with pytest.raises(TypeError, match="skip"):
        ShardDataset(make_shards(1))[0]


def test_pickled_datasets_deliver_the_same(make_shards):
    dataset = ShardDataset(make_shards(6), shuffle=True, seed=5).decode().shuffle(4)
    copy = pickle.loads(pickle.dumps(dataset))
    assert [classes(copy) for _ in range(2)] == [classes(dataset) for _ in range(2)]


def test_ops_give_a_dataset(make_shards):
    dataset = ShardDataset(make_shards(2)).decode().to_tuple("cls", "txt").batched(3)
    assert isinstance(dataset, torch.utils.data.IterableDataset)
    batches = list(loader(dataset, 1))
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]


def _reverse(sample):
    if int(sample["cls"]) % 5 == 0:
        raise ValueError("odd sample")
    return sample


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_ledger_covers_workers_and_ops(make_shards, tmp_path, method):
    urls = make_shards(4)
    (tmp_path / "set-0002.tar").write_bytes(b"damaged" * 200)
    ledger = Ledger(max_errors=100)
    dataset = ShardDataset(urls, on_error=ledger).map(_reverse)
    delivered = classes(loader(dataset, 2, method))
    assert sorted(delivered) == [1, 2, 3, 4, 9, 11]
    assert dataset.ledger is ledger
    assert (ledger.shards, ledger.samples, ledger.failed, ledger.members) == (3, 6, 3, 18)
    assert sorted(entry.key or "" for entry in ledger.quarantined) == ["", "000000", "000005", "000010"]
    assert not ledger.unaudited


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_ledger_of_an_op_alone(make_shards, method):
    ledger = Ledger(max_errors=100)
    dataset = ShardDataset(make_shards(4)).map(_reverse, on_error=ledger)
    assert len(classes(loader(dataset, 2, method))) == 9
    assert len(ledger.quarantined) == 3


def test_an_error_in_a_worker_reaches_the_parent_as_itself(make_shards, tmp_path):
    urls = make_shards(2)
    (tmp_path / "set-0001.tar").write_bytes(b"damaged" * 200)
    with pytest.raises(TarshardsError, match=r"set-0001\.tar: offset 0: not a tar archive"):
        exhaust(loader(ShardDataset(urls), 2))


def test_world_and_workers_both_named(make_shards):
    dataset = ShardDataset(make_shards(4), world=World(0, 1, 0, 2))
    with pytest.raises(WorldError, match="workers of its own"):
        exhaust(loader(dataset, 2))


def test_world_names_the_rank_and_workers_are_detected(make_shards):
    urls = make_shards(6)
    seen = [classes(loader(ShardDataset(urls, world=World(rank, 2)), 2)) for rank in range(2)]
    assert sorted(seen[0] + seen[1]) == list(range(18))
    assert len(seen[0]) == 9


def _rank(rank: int, rendezvous: str, urls: str, method: str, queue) -> None:
    warnings.simplefilter("ignore")
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    queue.put((rank, classes(loader(ShardDataset(urls, shuffle=True), 2, method))))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_of_a_process_group(make_shards, tmp_path, method):
    """Spawned workers have no process group to ask, and the environment says nothing."""
    urls = make_shards(7)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "rendezvous"), urls, method, queue))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    parts = dict(queue.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    assert sorted(parts[0] + parts[1]) == list(range(21))
    assert min(len(parts[0]), len(parts[1])) == 9


def flat(delivered) -> list[int]:
    """The classes of samples or batches."""
    return [int(value) for one in delivered for value in np.atleast_1d(one["cls"])]


def _late(rank: int, rendezvous: str, urls: str, method: str, queue) -> None:
    """Deliver from datasets and loaders that were made before the process group."""
    warnings.simplefilter("ignore")
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    data = ShardDataset(urls, shuffle=True)
    made: dict[str, Any] = {
        "itself": loader(data, 2, method),
        "with an op": loader(data.decode(), 2, method),
        "copied": loader(deepcopy(data), 2, method),
        "pickled": loader(pickle.loads(pickle.dumps(data)), 2, method),
        "ShardLoader": ShardLoader(data.decode(), 1, num_workers=2, multiprocessing_context=method),
    }
    if method == "fork":
        made["one process"] = loader(data.decode())
        made["ArrayLoader"] = ArrayLoader(Stream.from_shards(urls), 1, fields={"cls": readers.integer()})
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        queue.put((rank, {name: flat(samples) for name, samples in made.items()}))
    except Exception as error:
        queue.put((rank, {"error": [repr(error)]}))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_are_found_when_iteration_begins(make_shards, tmp_path, method):
    """All is made before init_process_group(), and the environment says nothing."""
    urls = make_shards(4, 10, index=True)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    rendezvous = str(tmp_path / "rendezvous")
    processes = [context.Process(target=_late, args=(rank, rendezvous, urls, method, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    parts = dict(queue.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    delivered = {name: (len(part), sorted(part + parts[1][name])) for name, part in parts[0].items()}
    assert delivered == dict.fromkeys(parts[0], (20, list(range(40))))
