"""Exactly once over ranks and workers, with real DataLoaders; epochs; the ledger over processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed
from forked import run_in_threads
from soak import SOAK, rounds, some
from torch.utils.data import DataLoader

from tarshards import ArrayLoader, Ledger, ShardDataset, ShardLoader, Stream, World, readers, torch_iterable
from tarshards.errors import StateError, TarshardsError, WorldError
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
    ("workers", "world_size", "shards"), some([*product([0, 1, 2, 4], [1, 2, 3, 4], [4, 9, 17])], 7)
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
    for stop in (3, 0, 50):
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
def test_workers_agree_from_any_interleaving():
    """Ten threads stand for the workers of three iterators that begin passes at the same moment."""
    iterators = [0] * 5 + [1] * 3 + [2] * 2
    for _ in range(rounds(200)):
        counter = SharedEpochCounter()
        copies = [copy(counter) for _ in iterators]
        for each in copies:
            each._words = counter._words
        begun: list[list[int]] = [[] for _ in copies]
        barrier = threading.Barrier(len(copies))

        def work(worker, copies=copies, begun=begun, barrier=barrier):
            barrier.wait()
            for _ in range(3):
                begun[worker].append(copies[worker].begin(World(0, 1, worker, 10, iterator=iterators[worker])))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(copies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        by_iterator = [begun[0], begun[5], begun[8]]
        assert begun == [by_iterator[iterator] for iterator in iterators]
        assert sorted([*by_iterator[0], *by_iterator[1], *by_iterator[2]]) == list(range(9))


def counters(epoch: int = 0) -> list[SharedEpochCounter]:
    """Counters in the same memory, as three workers have them."""
    made = [SharedEpochCounter(epoch) for _ in range(3)]
    for each in made:
        each._words = made[0]._words
    return made


@pytest.mark.parametrize("of_same_pass", [True, False])
def test_a_pass_that_another_worker_begins_meanwhile(monkeypatch, of_same_pass):
    """Between reading the words and adding one."""
    slow, fast, _ = counters(2)
    add = SharedEpochCounter._add

    def add_late(self, *args):
        monkeypatch.setattr(SharedEpochCounter, "_add", add)
        begun.append(fast.begin(World(0, 1, 1, 2, iterator=1 if of_same_pass else 2)))
        return add(self, *args)

    begun: list[int] = []
    monkeypatch.setattr(SharedEpochCounter, "_add", add_late)
    assert slow.begin(World(0, 1, 0, 2, iterator=1)) == (2 if of_same_pass else 3)
    assert begun == [2]


class Torn(np.ndarray):
    """Words to which others are added while they are copied: one before and one after what is copied by then."""

    meanwhile: Callable[[], Any] | None = None

    def copy(self, *args):
        first = np.array(self[:3])
        meanwhile, Torn.meanwhile = Torn.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return np.concatenate((first, np.array(self[3:])))


@pytest.mark.parametrize(("iterator", "epoch"), [(0, 2), (1, 3), (2, 4)])
def test_words_that_are_written_while_they_are_copied(monkeypatch, iterator, epoch):
    slow, *fast = counters(2)
    monkeypatch.setattr(slow, "_words", SimpleNamespace(numpy=lambda: fast[0]._words.numpy().view(Torn)))
    monkeypatch.setattr(Torn, "meanwhile", lambda: [each.begin(World(iterator=i)) for i, each in enumerate(fast)])
    assert slow.begin(World(iterator=iterator)) == epoch


def test_a_ring_of_passes_turns_over(monkeypatch):
    monkeypatch.setattr(SharedEpochCounter, "PASSES", 4)
    one, other, _ = counters()
    for epoch in range(20):
        assert [each.begin(World(0, 1, 0, 2, iterator=1)) for each in (one, other)] == [epoch] * 2
        assert one.next == other.next == epoch + 1
    one.set(3)
    assert [one.begin(World()), one.begin(World()), other.next] == [3, 4, 5]


def test_setting_the_epoch_leaves_a_pass_under_way_as_it_is():
    one, other, _ = counters()
    assert one.begin(World(0, 1, 0, 2, iterator=1)) == 0
    one.set(5)
    assert other.begin(World(0, 1, 1, 2, iterator=1)) == 0, "a worker that begins late"
    assert other.begin(World(0, 1, 1, 2, iterator=1)) == 5


def test_there_may_be_many_workers_and_epochs():
    counter = SharedEpochCounter()
    assert counter.begin(World(0, 1, 256, 300, iterator=1)) == 0
    most = (1 << 30) - 1
    with pytest.raises(StateError, match=f"epoch {most}: workers share numbers below {most}"):
        counter.begin(World(), most)
    with pytest.raises(StateError, match=f"epoch {most}"):
        ShardDataset.set_epoch(SimpleNamespace(epochs=counter), most + 1)
    assert counter.begin(World(), most - 1) == most - 1


class Alternating(multiprocessing.context.ForkContext):
    """Starts processes of two threads in turn."""

    def __init__(self):
        self.turns = threading.Barrier(2)

    def Process(self, *args, **options):
        self.turns.wait()
        process = multiprocessing.get_context("fork").Process(*args, **options)
        self.turns.wait()
        return process


class Iterators(torch.utils.data.IterableDataset):
    """Yields which iterator a worker believes that it is of, and the number of its process."""

    def __iter__(self):
        yield World.detect().iterator, multiprocessing.current_process()._identity[-1]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_know_their_iterator(persistent):
    """Although their seeds are equal, and those of both were started in turn."""
    context = Alternating()

    def run() -> list[tuple[int, int]]:
        options: dict[str, Any] = {"multiprocessing_context": context, "persistent_workers": persistent}
        return list(loader_of_two(Iterators(), generator=torch.Generator().manual_seed(0), **options))

    one, other = run_in_threads(run, run)
    assert len({iterator for iterator, _ in one}) == len({iterator for iterator, _ in other}) == 1
    assert one[0][0] != other[0][0]
    numbers = sorted([*one, *other], key=lambda each: each[1])
    assert numbers[0][0] != numbers[1][0], "their processes alternate"


def loader_of_two(dataset, **options):
    return DataLoader(dataset, batch_size=None, num_workers=2, **options)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_begins_late_joins_its_pass(make_shards, tmp_path, method):
    """Another pass has begun and ended, and the epoch was set."""
    dataset = ShardDataset(make_shards(8), shuffle=True)
    wait = partial(_wait_for, tmp_path / "go")
    outer = iter(loader(dataset, 2, method, worker_init_fn=wait, generator=torch.Generator().manual_seed(0)))
    begun = [next(outer)]
    assert sorted(classes(loader(dataset, 1, generator=torch.Generator().manual_seed(0)))) == list(range(24))
    dataset.set_epoch(5)
    (tmp_path / "go").touch()
    assert sorted(classes([*begun, *outer])) == list(range(24))


@pytest.mark.parametrize(("first", "second"), [("fork", "spawn"), ("spawn", "fork")])
def test_workers_that_start_in_two_ways_at_once(make_shards, first, second):
    dataset = ShardDataset(make_shards(8), shuffle=True)
    passes = loader(dataset, 2, first, persistent_workers=True)
    outer = iter(passes)
    begun = [next(outer)]
    assert sorted(classes(loader(dataset, 3, second))) == list(range(24))
    assert sorted(classes([*begun, *outer])) == list(range(24))
    assert sorted(classes(passes)) == list(range(24))


def _wait_for(path, worker: int) -> None:
    while worker == 1 and not path.exists():
        time.sleep(0.01)


WHOLE = [(103, 0, False), (103, 1, False), (17, 2, False), (103, 3, True)]
WHOLE += [(96, 3, False), (96, 3, True)] * (SOAK > 1)
LESS = [(103, 2, False), (7, 2, False), (104, 2, True), *[(103, 3, False), (104, 2, False)] * (SOAK > 1)]


@pytest.mark.soak
@pytest.mark.parametrize(("count", "workers", "drop_last"), WHOLE + LESS)
def test_a_length_that_a_dataloader_does_not_keep(make_uneven, caplog, count, workers, drop_last):
    """A trainer takes as many batches as the length says; a ShardLoader has them, and all samples are in them."""
    dataset = ShardDataset(make_uneven([count])).map(_class)
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    options |= {"batch_size": 8, "num_workers": workers, "drop_last": drop_last}
    expected = count // 8 * 8 if drop_last else count
    with caplog.at_level("WARNING", "tarshards"):
        taken = {make: _taken(make(dataset, **options)) for make in (DataLoader, ShardLoader)}
    assert taken[ShardLoader] == expected
    is_less = (count, workers, drop_last) in LESS
    assert (taken[DataLoader] < expected) == is_less
    said = [record.getMessage() for record in caplog.records]
    assert [f"use ShardLoader(dataset, 8, num_workers={workers})" in words for words in said] == [True] * is_less


def _taken(loader) -> int:
    """The samples that a trainer takes that asks for the length first."""
    lengths = {len(loader) for _ in range(3)}
    return sum(len(batch) for batch in islice(loader, *lengths))


def _class(sample) -> int:
    return int(sample["cls"])


def test_a_length_of_which_nothing_is_to_be_said(make_uneven, caplog):
    dataset = ShardDataset(make_uneven([103]))
    assert [len(dataset), len(DataLoader(dataset, None, num_workers=2)), len(ShardLoader(dataset, 8))] == [103, 103, 13]
    next(iter(DataLoader(dataset, 8, num_workers=2, collate_fn=list)))
    assert not caplog.records


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
