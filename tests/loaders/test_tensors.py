"""Batches as torch tensors: the same numbers, and on the CPU the same memory."""

from __future__ import annotations

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
def test_a_loader_copies_to_the_gpu_that_is_named(urls):
    loader = ArrayLoader(Stream.from_shards(urls), 100, fields=fields(), device="cuda:0")
    assert [batch["png"].device for batch in loader] == [torch.device("cuda", 0)] * 3
