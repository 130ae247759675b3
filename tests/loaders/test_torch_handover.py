"""Batches go from workers to their loader through shared memory: equal, the loop's own, and nothing left behind."""

from __future__ import annotations

import collections
import gc
import multiprocessing
import os
import pickle
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from forked import in_child, run_in_threads
from hypothesis import given
from hypothesis import strategies as st
from shared_memory import files, is_lent, lend

from tarshards import IndexedShards, ShardDataset, ShardLoader, collate
from tarshards.epoch.plan import Order
from tarshards.errors import OpError
from tarshards.loaders.torch.handover import LARGE, Arenas, Handed, Pickled
from tarshards.samples.payloads import address_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


class Pair(NamedTuple):
    left: Any
    right: Any


class Anything:
    """An object of a class of the user's."""

    def __init__(self, value: Any):
        self.value = value


def same(one: Any, other: Any) -> bool:
    """Say whether two batches have the same types, dtypes, shapes, memory formats and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        if one.dtype == object:
            return one.shape == other.shape and same(one.tolist(), other.tolist())
        kinds = one.dtype == other.dtype and one.shape == other.shape
        return kinds and one.flags.writeable and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.layout, one.shape) != (other.dtype, other.layout, other.shape):
            return False
        if one.layout is not torch.strided:
            return same(one.to_dense(), other.to_dense())
        return one.tolist() == other.tolist() and one.requires_grad == other.requires_grad
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return same(one.value, other.value) if isinstance(one, Anything) else one == other


numbers = arrays.arrays(
    st.sampled_from(["?", "u1", "<i2", ">i4", "<f2", "<f4", ">f8", "c8", "S3", "U2", "M8[s]"]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    elements=None,
    fill=st.nothing(),
)
dtypes = [torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.complex64]
tensors = st.builds(
    lambda shape, dtype: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from(dtypes),
)
turned = st.one_of(numbers.map(np.transpose), numbers.map(lambda array: array[..., ::-1] if array.ndim else array))
large = st.integers(LARGE, LARGE + 3).map(lambda size: os.urandom(1) * size)
leaves = st.one_of(
    numbers,
    turned,
    tensors,
    tensors.map(lambda tensor: tensor.mT if tensor.dim() > 1 else tensor),
    tensors.map(lambda tensor: tensor[..., ::2] if tensor.dim() else tensor),
    st.binary(max_size=9),
    large,
    st.binary(max_size=9).map(bytearray),
    st.text(max_size=9),
    st.lists(st.one_of(large, st.binary(max_size=9)), max_size=4),
    st.lists(large, min_size=1, max_size=3).map(tuple),
    st.integers() | st.none() | st.booleans() | st.floats(allow_nan=False),
    st.sets(st.integers(), max_size=2),
    numbers.map(lambda array: np.array([array, None, "x"], dtype=object)),
    st.builds(Anything, numbers),
)
batches = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers(), parts, max_size=4),
        st.builds(Pair, parts, parts),
        st.dictionaries(st.text(max_size=3), parts, max_size=2).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


def put(arenas: Arenas, batch: Any) -> Handed:
    """Let worker 0 send *batch*."""
    handed = arenas.put(0, [batch])
    assert isinstance(handed, Handed)
    return handed


def sent(arenas: Arenas, batch: Any) -> Any:
    """Let worker 0 send *batch*, and return what the loop gets."""
    (taken,) = arenas.take(put(arenas, batch))
    return taken


@pytest.fixture
def lending(monkeypatch) -> None:
    lend(monkeypatch)


@pytest.mark.parametrize("is_lending", [False, True])
@given(st.lists(batches, min_size=1, max_size=5))
def test_any_batch_arrives_as_it_is(is_lending, originals):
    arenas, taken = Arenas(1, 0), []
    with pytest.MonkeyPatch.context() as patch:
        if is_lending:
            lend(patch)
        for batch in originals:
            taken += arenas.take(pickle.loads(pickle.dumps(put(arenas, batch))))
    assert all(map(same, taken, originals)), "whatever the arena was used for since"


def test_one_array_in_two_places_stays_one():
    array = np.arange(5)
    taken = sent(Arenas(1, 0), {"x": array, "y": [array]})
    assert taken["x"] is taken["y"][0]


def test_the_memory_format_of_a_tensor_stays():
    tensor = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert sent(Arenas(1, 0), tensor).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("as_view", [False, True])
def test_an_arena_is_not_used_again_while_its_arrays_are_referred_to(as_view):
    """Such as by a transform, in the worker, that keeps one from a batch to the next."""
    arenas = Arenas(1, 1)

    def send(value: int) -> np.ndarray:
        array = arenas.empty(0, (100,), np.dtype(np.int64))
        array[:] = value
        assert sent(arenas, {"x": array})["x"].tolist() == [value] * 100
        return array

    kept = send(1)
    if as_view:
        kept = kept[10:20].view(np.uint8)
    for value in range(2, 9):
        assert not np.shares_memory(kept, send(value))
    assert set(kept.view(np.int64).tolist()) == {1}
    begin = address_of(kept) - (80 if as_view else 0)
    del kept
    assert begin in {address_of(send(value)) for value in range(2)}, "it is used again after that"


# Large arrays are lent: the loop has views of the arena for as long as it refers to them.


def numbered(number: int) -> dict[str, Any]:
    """A batch of arrays and tensors of several dtypes and depths, that all are *number*."""
    floats, rows = torch.full((9, 2), float(number)), np.full((3, 4), number, ">i2")
    return {"x": floats, "deep": [{"y": (rows, np.full(5, number % 256, np.uint8))}], "__key__": [str(number)] * 9}


def parts_of(batch: dict[str, Any]) -> list[Any]:
    return [batch["x"], *batch["deep"][0]["y"]]


def raise_(batch: dict[str, Any]) -> None:
    for part in parts_of(batch):
        part += 1


@pytest.mark.parametrize("keep", [lambda x: x, lambda x: x[2:, 1:], lambda x: [x.numpy().T[1]]])
def test_an_arena_is_lent_until_nothing_refers_to_a_part_of_it(lending, keep):
    arenas = Arenas(1, 0)
    batch = sent(arenas, numbered(1))
    assert all(map(is_lent, parts_of(batch)))
    kept, address = keep(batch["x"]), batch["x"].data_ptr()
    del batch
    for number in range(2, 6):
        assert sent(arenas, numbered(number))["x"].data_ptr() != address
    del kept
    assert address in {sent(arenas, numbered(number))["x"].data_ptr() for number in range(3)}


def test_batches_that_nobody_keeps_take_turns_in_three_arenas(lending):
    arenas, addresses = Arenas(1, 2), set()
    for number in range(50):
        batch = sent(arenas, numbered(number))
        addresses.add(batch["x"].data_ptr())
    assert len(addresses) == len(files()) == 3, "the loop's, the next, and one that is written meanwhile"


def test_a_thousand_batches_that_are_kept_stay_whole_and_writable(lending):
    """As many as there are arenas for are lent, and the others copied; workers have arenas for what they make ahead."""
    arenas, kept, before = Arenas(1, 2), list[Any](), len(os.listdir("/proc/self/fd"))
    while len(kept) < 1000:
        handed = [put(arenas, numbered(len(kept) + i)) for i in range(3)]
        kept += [arenas.take(each)[0] for each in handed]
        raise_(kept[-1])
    for number, batch in enumerate(kept):
        expected = numbered(number)
        if number % 3 == 2:
            raise_(expected)
        assert same(batch, expected)
    assert [is_lent(batch["x"]) for batch in kept[:5]] == [True] * 3 + [False] * 2
    assert len(files()) == arenas.each == 6
    assert len(os.listdir("/proc/self/fd")) == before + arenas.each, "those of the worker"


def test_a_batch_that_is_kept_keeps_no_other(lending):
    arenas = Arenas(1, 2)
    kept = sent(arenas, numbered(1))
    for number in range(9):
        sent(arenas, np.zeros((number + 1) << 16, np.uint8))
    assert len(files()) == 3
    del arenas
    assert len(files()) == 1, "once the loader is gone, its own"
    assert is_lent(kept["x"])
    assert same(kept, numbered(1))
    del kept
    assert not files()


def test_a_batch_of_small_arrays_and_small_arrays_beside_large_ones_are_copied():
    """So labels that are collected keep no images, and one of several batches in a message not the others."""
    arenas = Arenas(1, 0)
    small = sent(arenas, {"x": np.zeros(LARGE), "y": np.zeros(9)})
    large = sent(arenas, {"x": np.zeros(1 << 18), "y": np.zeros(9)})
    assert [is_lent(part) for part in (*small.values(), *large.values())] == [False, False, True, False]
    handed = arenas.put(0, [np.zeros(1 << 18), np.zeros(1 << 18)])
    assert not any(map(is_lent, arenas.take(handed)))


def test_a_batch_is_dropped_in_another_thread(lending):
    arenas = Arenas(1, 0)
    kept = [sent(arenas, numbered(0))]
    address = kept[0]["x"].data_ptr()
    sent(arenas, numbered(1))
    run_in_threads(kept.clear)
    assert address in {sent(arenas, numbered(number))["x"].data_ptr() for number in range(2)}


def test_what_is_lent_stays_over_the_passes(lending):
    arenas = Arenas(1, 0)
    lent = [sent(arenas, np.full(9, number)) for number in range(3)]
    put(arenas, np.full(9, 5))  # made ahead, and passed over
    for _ in range(3):
        arenas.begin(0)
        put(arenas, np.full(9, 6))
        assert isinstance(arenas.put(0, [np.full(9, 7)]), Pickled)
    assert [array[0] for array in lent] == [0, 1, 2]


@pytest.mark.forks
def test_a_forked_process_has_its_batch_whatever_comes_after(lending):
    """Its memory is not used again, even when this process has done with it, and is released when the child ends."""
    arenas = Arenas(1, 0)
    batches, ready, over = [sent(arenas, numbered(0))], os.pipe(), os.pipe()

    def check() -> bool:
        os.write(ready[1], b"1")
        os.read(over[0], 1)
        return same(batches[0], numbered(0))

    def go_on() -> None:
        os.read(ready[0], 1)
        batches.clear()
        for number in range(1, 9):
            sent(arenas, numbered(number))
        os.write(over[1], b"1")

    (file,) = files()
    assert run_in_threads(lambda: in_child(check), go_on)[0] == 0
    sent(arenas, numbered(9))
    assert file not in files()
    assert len(files()) == 2


@pytest.mark.forks
def test_what_is_dropped_before_a_fork_or_comes_after_it_is_used_again(lending):
    arenas, addresses = Arenas(1, 0), set()
    for number in range(9):
        batch = sent(arenas, numbered(number))
        addresses.add(batch["x"].data_ptr())
        del batch
        arenas.take(put(arenas, b""))
        assert in_child(lambda: True) == 0
    assert len(addresses) == 1


def test_files_that_cannot_be_received_are_an_error(lending):
    arenas = Arenas(1, 2)
    handed, limits = put(arenas, numbered(0)), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(least := os.open(os.devnull, os.O_RDONLY))  # the number of the next file
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            arenas.take(handed)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def size_of(arenas: Arenas) -> int:
    """The memory of all files that *arenas* have open."""
    links = [entry.path for entry in os.scandir("/proc/self/fd") if "memfd:tarshards" in os.readlink(entry.path)]
    return sum(os.stat(link).st_blocks * 512 for link in links)


def test_memory_is_bounded():
    arenas = Arenas(2, 2)
    for number in range(200):
        arenas.take(arenas.put(1, [np.zeros(10**5 + 100 * number, np.uint8)]))
    assert size_of(arenas) <= 200_000, "one arena, for no other was needed"
    made = [arenas.put(1, [np.zeros(10**5, np.uint8)]) for _ in range(8)]
    assert [type(each) for each in made] == [Handed] * 5 + [Pickled] * 3
    assert size_of(arenas) <= 5 * 200_000


def test_a_batch_larger_than_its_arena(lending):
    arenas = Arenas(1, 0)
    for size in 10, 10**6, 10, 3 * 10**6, 10**6:
        assert sent(arenas, np.full(size, 7, np.uint8)).sum() == 7 * size


def test_what_is_passed_over_is_free_again():
    arenas = Arenas(4, 1)
    for _ in range(5):
        assert [type(arenas.put(0, [b"1"])) for _ in range(4)] == [Handed] * 3 + [Pickled]
        arenas.begin(0)


def warning_of(arenas: Arenas, batch: Any, caplog: pytest.LogCaptureFixture) -> str:
    """Return the warning, which comes once, of batches that are pickled, and arrive as they are."""
    caplog.clear()
    for _ in range(2):
        made = arenas.put(0, [batch])
        assert isinstance(made, Pickled)
        assert arenas.take(made)[0] is batch
    (record,) = caplog.records
    return record.getMessage()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(2, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2, device="meta"),
    ],
)
def test_a_tensor_that_torch_has_to_send(tensor, caplog):
    assert "torch" in warning_of(Arenas(1, 0), {"x": [tensor]}, caplog)


def test_without_memory_batches_are_pickled_and_the_reason_said(monkeypatch, caplog):
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    arenas = Arenas(1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert "No space left on device" in warning_of(arenas, np.zeros(9), caplog)
    assert isinstance(arenas.put(0, [np.zeros(9)]), Handed), "as soon as there is some"
    monkeypatch.setattr(os, "memfd_create", full)
    assert "no shared memory" in warning_of(Arenas(1, 0), np.zeros(9), caplog)
    monkeypatch.delattr(os, "memfd_create")
    assert "no shared memory" in warning_of(Arenas(1, 0), np.zeros(9), caplog)


def test_what_no_process_can_send_is_an_error():
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        Arenas(1, 0).put(0, [lambda: 0])
    with pytest.raises(TypeError, match="lock"):
        Arenas(1, 0).put(0, [threading.Lock()])


# The plan of an epoch goes the other way: it is made once, and workers look positions up in the loader's tables.


def test_tables_are_those_that_were_written():
    arenas = Arenas(2, 0)
    tables = [np.arange(5, dtype=np.uint32), np.arange(7)]
    shared = arenas.share(tables)
    found = pickle.loads(pickle.dumps(shared))
    assert same(list(map(np.copy, arenas.shared(found))), tables)
    assert not any(table.flags.writeable for table in arenas.shared(found))


def test_tables_of_the_pass_before_stay_until_the_next_has_begun():
    arenas, size = Arenas(2, 0), 1 << 20
    first, second = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    before, now = arenas.share([first]), arenas.share([second])
    assert [arenas.shared(shared)[0].sum() for shared in (before, now)] == [0, size]
    for _ in range(4):
        arenas.release()
        assert size <= 512 * os.fstat(arenas._file).st_blocks < size + (1 << 16)
        assert arenas.shared(arenas.share([second]))[0].sum() == size


def test_without_memory_each_worker_makes_the_plan(monkeypatch, caplog):
    def full(file: int, offset: int, size: int) -> None:
        raise OSError("no space")

    arenas = Arenas(2, 0)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert arenas.share([np.arange(5)]) is None
    assert "each worker makes the plan by itself" in caplog.text


def no_tables(worker: int) -> None:
    def refuse(order: Order) -> Any:
        raise AssertionError("a worker makes the plan")

    Order.make_tables = refuse  # type: ignore[method-assign]


def check_without_tables(make: Callable[[], ShardDataset]) -> None:
    loader = ShardLoader(make(), 8, num_workers=2, persistent_workers=True, worker_init_fn=no_tables)
    alone = ShardLoader(make(), 8)
    for _ in range(2):
        assert same(list(loader), list(alone))
    next(iter(loader))  # and leave it
    state = loader.state_dict()
    for each in (loader, alone):
        each.load_state_dict(state)
    assert same(list(loader), list(alone))


def test_workers_make_no_plan_of_their_own(urls, start_method):
    check_without_tables(lambda: ShardDataset(urls, shuffle=True, pool=20, block=3))


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": True, "pool": 20}, {}])
def test_workers_make_no_plan_of_any_kind(urls, options):
    keys = IndexedShards(urls).keys[5:50]
    check_without_tables(lambda: ShardDataset(urls, **options))
    check_without_tables(lambda: ShardDataset(urls, **options).select(keys=keys))


def load(urls: str, workers: int = 2, **options: Any) -> ShardLoader:
    return ShardLoader(ShardDataset(urls, shuffle=True, seed=3).map(photo), 8, num_workers=workers, **options)


def photo(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["cls"])
    pixels = np.full((30, 40), number, np.float32)
    return sample | {"photo": pixels, "bin": bytes([number]) * 5000, "tokens": [np.arange(number % 5)], "cls": number}


def no_memory(worker: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, -1))


@pytest.fixture
def urls(make_shards) -> str:
    """Shards with 60 samples, which are 8 batches."""
    return make_shards(5, 12, index=True)


@pytest.fixture(autouse=True)
def said(caplog):
    """The warnings of batches that are pickled."""
    return lambda: [record.getMessage() for record in caplog.records if "pickled" in record.getMessage()]


@pytest.mark.parametrize("collate_fn", [None, collate, list])
def test_batches_of_workers_are_those_without(urls, start_method, collate_fn, said):
    options = {"collate_fn": collate_fn} if collate_fn else {}
    alone, loader = load(urls, 0, **options), load(urls, persistent_workers=True, **options)
    for _ in range(2):
        assert same(list(loader), list(alone))
    assert not said()


def check(batch: dict[str, Any]) -> None:
    assert [int(row[0, 0]) for row in batch["photo"]] == batch["cls"].tolist()


@pytest.mark.forks
@pytest.mark.parametrize("index", [True, False])
def test_a_loop_is_lent_all_batches(make_shards, lending, index, said):
    """Also one that holds the batch before, if there is a plan: without, each batch waits for the next."""
    urls = make_shards(6, 8, index=index)
    for workers in 1, 2, 3:
        loader, last = load(urls, workers, persistent_workers=True), None
        for number, batch in enumerate(chain(loader, loader)):
            assert is_lent(batch["photo"]), number
            for each in filter(None, (batch, last)):
                check(each)
                each["photo"] -= 1
                each["cls"] -= 1
            last = batch if index else None
            time.sleep(0.002)  # so that workers have made all that they may
    assert not said()


def wide(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"photo": np.full((300, 300), int(sample["cls"]), np.float32), "cls": int(sample["cls"])}


def test_kept_batches_stay_when_their_loaders_are_gone(urls, start_method):
    kept = []
    for persistent in False, True:
        dataset = ShardDataset(urls, shuffle=True, seed=int(persistent)).map(wide)
        loader = ShardLoader(dataset, 8, num_workers=2, persistent_workers=persistent)
        for count in 2, 3:
            kept += islice(loader, count)
    lent = [batch for batch in kept if is_lent(batch["photo"])]
    assert len(lent) == 9, "all but one, since a worker may lend two and persists"
    del loader
    gc.collect()
    assert len(files()) == len(lent), "one kept batch keeps no other"
    for batch in kept:
        batch["photo"] += 1
        batch["cls"] += 1
        check(batch)
    del lent, kept, batch
    assert not files()


@pytest.mark.forks
def test_a_process_that_is_forked_in_a_loop_may_use_its_batch(urls, lending):
    """It has the memory of this batch alone, and the loop goes on."""
    loader, children = load(urls, persistent_workers=True), []
    for number, batch in enumerate(chain(loader, loader)):
        check(batch)
        if number % 5 == 2:
            before, (read, write) = batch["photo"].clone(), os.pipe()
            if not (child := os.fork()):
                os.read(read, 1)  # until the loop is over
                os._exit(not (torch.equal(batch["photo"], before) and len(files()) == 1))
            children.append((child, write))
        assert is_lent(batch["photo"])
        batch["photo"][:] = -1 if number % 5 != 2 else batch["photo"]
    assert number == 15
    for _, write in children:
        os.write(write, b"1")
    assert [os.waitpid(child, 0)[1] for child, _ in children] == [0] * 3


@pytest.mark.forks
@pytest.mark.parametrize("is_lending", [False, True])
def test_workers_never_lack_an_arena_after_loops_that_were_left(urls, said, monkeypatch, is_lending):
    if is_lending:
        lend(monkeypatch)
    loader = load(urls, persistent_workers=True, prefetch_factor=3)
    for stop in (1, 2, 3, 1, 8):
        for _, _ in zip(range(stop), loader):
            time.sleep(0.01)
    assert not said()


@pytest.fixture
def messages(monkeypatch) -> list[int]:
    """The numbers of batches in the messages that loaders take."""
    counts: list[int] = []
    take = Arenas.take

    def counting(self: Arenas, made: Any) -> Any:
        batches = take(self, made)
        counts.append(len(batches))
        return batches

    monkeypatch.setattr(Arenas, "take", counting)
    return counts


def slowly(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.005)
    return sample


def grown(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"bin": bytes(1 << 20)}


def fail_late(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == b"151":
        raise ValueError("too late")
    return sample


@pytest.mark.parametrize("index", [True, False])
def test_small_batches_come_several_in_a_message_and_in_order(make_shards, messages, index, said):
    dataset = ShardDataset(make_shards(5, 80, index=index), shuffle=True)
    alone = ShardLoader(dataset, 2, num_workers=0)
    loader = ShardLoader(dataset, 2, num_workers=2, persistent_workers=True)
    for stop in (None, 7, 60, 30, None):
        dataset.set_epoch(3)
        expected = list(alone) if index else None
        dataset.set_epoch(3)
        batches = [batch["__key__"] for batch in islice(loader, stop)]
        if expected is not None:
            assert batches == [batch["__key__"] for batch in expected[:stop]]
        elif stop is None:
            assert sorted(chain(*batches)) == [f"{i:06d}" for i in range(400)]
    assert max(messages) > 1
    assert not said()


@pytest.mark.parametrize("op", [slowly, grown])
def test_slow_and_large_batches_come_alone(make_shards, messages, op):
    dataset = ShardDataset(make_shards(1, 40, index=True)).map(op)
    assert len(list(ShardLoader(dataset, 1, num_workers=2))) == 40
    assert set(messages) == {1}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_comes_before_an_error_comes(make_shards, messages, workers):
    dataset, came = ShardDataset(make_shards(1, 200, index=True)).map(fail_late), []
    with pytest.raises(OpError, match="too late"):
        came.extend(ShardLoader(dataset, 1, num_workers=workers))
    gc.collect()
    assert max(messages) > 1
    assert len(came) == 151


def test_a_replayed_state_passes_over_batches(make_shards, said):
    urls = make_shards(5, 24)
    loader, again = load(urls), load(urls)
    states = [(batch, loader.state_dict()) for batch in loader]
    again.load_state_dict(states[8][1])
    assert same(list(again), [batch for batch, _ in states[9:]])
    assert not said()


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_take_no_more_files_nor_memory(urls, persistent):
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # the batches of earlier tests
    loader, most = load(urls, persistent_workers=persistent), None
    for _ in range(4):
        list(loader)
        assert len(files()) <= (2 * (2 + 1) if persistent else 0), "of each worker those made ahead, and one more"
        end = time.monotonic() + 10  # the threads of torch's queues close their pipes after the loop has ended
        while most is not None and opened() > most and time.monotonic() < end:
            time.sleep(0.01)
        assert most is None or opened() <= most
        most = opened() if most is None else most


def test_where_memory_is_short_batches_are_pickled(urls, said):
    assert same(list(load(urls, worker_init_fn=no_memory)), list(load(urls, 0)))
    assert len(said()) == 1
    assert "File too large" in said()[0]


def named(*pids: int | str) -> list[str]:
    """The files in /dev/shm, which have a name to be left behind, that processes have in memory."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    assert any("memfd:tarshards" in line for line in lines)
    return [line for line in lines if re.search("/dev/shm/(?!pytest-of-)", line) and not line.endswith("(deleted)")]


def kill_and_go_on(worker: int, batches: Iterator[Any]) -> None:
    os.kill(worker, signal.SIGKILL)  # torch's handler of SIGCHLD may raise at any line from here on
    collections.deque(batches, maxlen=0)


@pytest.mark.forks
def test_a_killed_worker_leaves_nothing_but_what_the_loop_holds(urls, lending):
    batches = iter(load(urls))
    batch = next(batches)
    workers = [worker.pid for worker in multiprocessing.active_children()]
    assert len(workers) == 2
    assert not named(os.getpid(), *workers)
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        kill_and_go_on(workers[-1], batches)
    del batches
    gc.collect()
    assert not multiprocessing.active_children()
    check(batch)
    assert len(files()) == 1
    del batch
    assert not files()


KILLED = """
import os, sys, time
import torch.utils.data._utils.worker as worker
from tarshards import ShardDataset, ShardLoader

if __name__ == "__main__":
    worker.MP_STATUS_CHECK_INTERVAL = 0.2
    loader = ShardLoader(ShardDataset(sys.argv[1]), 4, num_workers=2, multiprocessing_context="fork")
    for number, batch in enumerate(loader):
        if number == 2:  # of both workers one has come
            print(os.getpid(), flush=True)
            time.sleep(60)
"""


def test_a_killed_loader_leaves_nothing(urls, tmp_path, python_with_torch):
    (tmp_path / "killed.py").write_text(KILLED)
    with subprocess.Popen([python_with_torch, str(tmp_path / "killed.py"), urls], stdout=subprocess.PIPE) as loader:
        assert loader.stdout is not None
        pid = int(loader.stdout.readline())
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(workers) == 2
        assert not named(pid, *workers)
        os.kill(pid, signal.SIGKILL)
        loader.stdout.read()  # to the end, for the workers have it too: all have ended


def photo_tensors(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"photo": torch.utils.data.default_collate([sample["photo"] for sample in samples])}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("collate_fn", [None, photo_tensors])
def test_tensors_of_workers_are_pinned(urls, collate_fn):
    options = {"collate_fn": collate_fn} if collate_fn else {}
    for batch in load(urls, pin_memory=True, **options):
        assert batch["photo"].is_pinned()
