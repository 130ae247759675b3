"""Batches as torch tensors: the same numbers, and on the CPU the same memory."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, nullcontext
from itertools import islice
from threading import Lock, current_thread

import numpy as np
import pytest
import torch

from tarshards import ArrayLoader, ShardDataset, ShardLoader, ShardWriter, Stream, readers
from tarshards.loaders.tensors import move

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def batches():
    for number in range(3):
        rows = np.arange(6, dtype=np.float32).reshape(2, 3) + number
        yield {"x": rows, "big": rows.astype(">i4"), "turned": rows.T, "names": ["a", "b"], "__key__": ["1", "2"]}


def test_on_the_processor_memory_is_shared():
    (array,) = (batch["x"] for batch in [next(batches())])
    (moved,) = move((batch for batch in [{"x": array}]), "cpu")
    array[0, 0] = 7
    assert moved["x"][0, 0] == 7


def test_arrays_become_tensors_and_the_rest_stays():
    for number, batch in enumerate(move(batches(), "cpu")):
        expected = torch.arange(6, dtype=torch.float32).reshape(2, 3) + number
        assert torch.equal(batch["x"], expected)
        assert torch.equal(batch["big"], expected.int())
        assert torch.equal(batch["turned"], expected.T)
        assert (batch["names"], batch["__key__"]) == (["a", "b"], ["1", "2"])


def test_a_ragged_column_is_two_tensors():
    values, offsets = np.arange(5, dtype="u1"), np.array([0, 2, 5])
    (moved,) = move((batch for batch in [{"tokens": (values, offsets)}]), "cpu")
    assert [part.tolist() for part in moved["tokens"]] == [[0, 1, 2, 3, 4], [0, 2, 5]]


def test_strings_and_dates_stay_arrays():
    words = np.array(["a", "b"])
    (moved,) = move((batch for batch in [{"words": words}]), "cpu")
    assert moved["words"] is words


def test_broken_off_the_batches_are_closed():
    source = batches()
    moved = move(source, "cpu")
    next(moved)
    moved.close()
    assert list(source) == []


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_batches_arrive_whole():
    for number, batch in enumerate(move(batches(), "cuda")):
        assert batch["x"].is_cuda
        assert torch.equal(batch["x"].cpu(), torch.arange(6, dtype=torch.float32).reshape(2, 3) + number)


COUNT, SHAPE = 300, (40, 50, 3)


def pixels_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SHAPE, dtype=np.uint8)


@pytest.fixture
def urls(tmp_path) -> str:
    with ShardWriter(f"{tmp_path}/set-%d.tar", max_samples=100) as writer:
        for number in range(COUNT):
            text = b"x" * (number % 7)
            writer.write({"__key__": f"{number}", "png": pixels_of(number), "cls": number, "txt": text})
    return f"{tmp_path}/set-{{0..2}}.tar"


def fields() -> dict:
    return {"png": readers.decoded(images="rgb8"), "cls": readers.integer(), "txt": readers.ragged("u1")}


def array_loader(urls: str, **options):
    return ArrayLoader(Stream.from_shards(urls, shuffle=True), 8, fields=fields(), device="cuda", **options)


def shard_loader(urls: str, **options):
    dataset = ShardDataset(urls, shuffle=True)
    for batch in ShardLoader(dataset, 8, fields=fields(), num_workers=2, pin_memory=True, **options):
        for column in batch["png"], batch["cls"], *batch["txt"]:
            assert column.is_pinned()
        yield {
            "png": batch["png"].to("cuda", non_blocking=True),
            "cls": batch["cls"].to("cuda", non_blocking=True),
            "txt": tuple(part.to("cuda", non_blocking=True) for part in batch["txt"]),
        }


class StandIn:
    """Stands in for a GPU: copies are made when they are waited for, *late* of them also when events are asked."""

    def __init__(self, late: int):
        self.late, self.device = late, "cuda:0"
        self.waiting: deque = deque()  # copies that were begun
        self.begun = self.done = 0
        self.lock = Lock()
        self.pinned: dict[int, torch.Tensor] = {}  # by address
        self.made, self.pinned_again, self.threads, self.recorded = 0, 0, set(), 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.waiting.popleft()()
            self.done += 1

    def wait_event(self, event: StandInEvent) -> None:
        self.run(event.number - self.late)

    def empty(self, size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        made = torch.zeros(size, dtype=dtype)
        if pin_memory:
            self.made += 1
            self.pinned[made.data_ptr()] = made
        return made

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(at <= tensor.data_ptr() <= at + len(memory) for at, memory in self.pinned.items())

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned_again += 1
        return tensor.clone()

    def to(self, tensor: torch.Tensor, device: object, *, non_blocking: bool) -> torch.Tensor:
        assert (device, non_blocking) == (self.device, True)
        copy = torch.full_like(tensor, 1)
        with self.lock:
            self.waiting.append(lambda: copy.copy_(tensor))
            self.begun += 1
        self.threads.add(current_thread().name.partition("_")[0])
        return copy

    def record_stream(self, tensor: torch.Tensor, stream: object) -> None:
        assert stream is self
        self.recorded += 1


class StandInEvent:
    def record(self, gpu: StandIn) -> None:
        self.gpu, self.number = gpu, gpu.begun

    def query(self) -> bool:
        return self.gpu.done >= self.number

    def synchronize(self) -> None:
        self.gpu.run(self.number)


@pytest.fixture
def gpu(monkeypatch, request) -> StandIn:
    stand_in = StandIn(getattr(request, "param", 0))

    @contextmanager
    def stream(given: object):
        assert given is stand_in
        yield

    cuda = {
        "is_available": lambda: True,
        "Stream": lambda device: stand_in,
        "Event": StandInEvent,
        "stream": stream,
        "current_stream": lambda device: stand_in,
        "device": nullcontext,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", stand_in.empty)
    for name in ("is_pinned", "pin_memory", "to", "record_stream"):
        method = getattr(stand_in, name)
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, *args, _method=method, **o: _method(tensor, *args, **o))
    return stand_in


def plain(urls: str) -> list[dict]:
    return [as_lists(batch) for batch in ArrayLoader(Stream.from_shards(urls, shuffle=True), 8, fields=rows())]


def rows() -> dict:
    return {"png": readers.image(16, flip=0.5), "cls": readers.integer(), "txt": readers.ragged("u1")}


def as_lists(batch: dict) -> dict:
    return {
        name: [np.asarray(part).tolist() for part in value] if name == "txt" else np.asarray(value).tolist()
        for name, value in batch.items()
    }


@pytest.mark.parametrize("gpu", [0, 9], indirect=True)  # copies of three batches are late
@pytest.mark.parametrize(("threads", "reuse"), [(0, False), (2, False), (3, True)])
def test_copies_to_a_device_arrive_whole_however_late_they_are(urls, gpu, threads, reuse):
    options = {"fields": rows(), "device": "cuda", "threads": threads, "reuse": reuse}
    batches = list(ArrayLoader(Stream.from_shards(urls, shuffle=True), 8, **options))
    gpu.run(gpu.begun)
    assert [as_lists(batch) for batch in batches] == plain(urls)
    assert gpu.threads == ({"tarshards-make"} if threads else {"MainThread"})
    assert gpu.recorded == gpu.begun == 4 * len(batches)


def test_buffers_for_a_device_are_pinned_once_and_reused(urls, gpu):
    loader = ArrayLoader(Stream.from_shards(urls, shuffle=True), 20, fields=rows(), device="cuda", threads=2)
    made, again = [], []
    for _ in range(4):
        for _ in loader:
            pass
        made.append(gpu.made)
        again.append(gpu.pinned_again)
    assert made[-1] <= 4 * (2 + 2 + 2)  # columns, and joined rows; batches made ahead, under way and taken
    assert np.diff(again).tolist() == [len(loader)] * 3, "the offsets of ragged columns"


@pytest.mark.parametrize("gpu", [100], indirect=True)
def test_a_pass_that_is_left_ends_when_what_it_delivered_is_copied(urls, gpu):
    expected = [batch["png"] for batch in plain(urls)[:3]]
    loader = ArrayLoader(Stream.from_shards(urls, shuffle=True), 8, fields=rows(), device="cuda", threads=2)
    first = iter(loader)
    left = list(islice(first, 3))
    assert not gpu.done
    first.close()
    list(loader)
    assert [batch["png"].tolist() for batch in left] == expected


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("loader", [array_loader, shard_loader])
def test_batches_of_loaders_arrive_whole_on_a_gpu_that_is_behind(urls, loader, reuse):
    """The loop drops each batch before the GPU has copied or read it, and loaders reuse their memory."""
    copies, numbers, texts = [], [], []
    for batch in loader(urls, reuse=reuse):
        torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
        copies.append(batch["png"].clone())
        numbers.append(batch["cls"].clone())
        texts.append(batch["txt"][1].diff())
        del batch
    order = torch.cat(numbers).tolist()
    assert sorted(order) == list(range(COUNT))
    assert torch.cat(texts).tolist() == [number % 7 for number in order]
    for pixels, number in zip(torch.cat(copies).cpu().numpy(), order, strict=True):
        assert (pixels == pixels_of(number)).all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("threads", [0, 3])
def test_rows_in_pinned_memory_arrive_whole_on_a_gpu_that_is_behind(urls, threads):
    """Copies begin where batches are made, of buffers that are reused when the GPU has read them."""
    options = {"fields": rows(), "device": "cuda", "threads": threads}
    loader, taken = ArrayLoader(Stream.from_shards(urls, shuffle=True), 8, **options), []
    for batch in loader:
        torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
        taken.append({**batch, "png": batch["png"].clone(), "cls": batch["cls"].clone()})
        del batch
    on_host = [{name: _on_host(value) for name, value in batch.items()} for batch in taken]
    assert [as_lists(batch) for batch in on_host] == plain(urls)


def _on_host(value):
    if isinstance(value, tuple):
        return tuple(map(_on_host, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.gpu
@needs_gpu
def test_a_loader_copies_to_the_gpu_that_is_named(urls):
    loader = ArrayLoader(Stream.from_shards(urls), 100, fields=fields(), device="cuda:0")
    assert [batch["png"].device for batch in loader] == [torch.device("cuda", 0)] * 3
