"""write_dataset: any dataset to the same shards, by any executor, also in pieces."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tarshards import EncodeError, OpError, SampleError, ShardWriter, read_samples
from tarshards.parallel import ProcessPool
from tarshards.write.dataset import write_dataset


class Squares:
    """A sequence that is no list."""

    def __init__(self, count: int, broken: int | None = None):
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int):
        if number == self.broken:
            raise ValueError("broken")
        return number, f"text {number}\n" * (number % 50)


def to_sample(item):
    return {"cls": item[0], "txt": item[1]}


def odd_ones(item):
    return to_sample(item) if item[0] % 2 else None


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(pattern: str) -> dict[str, bytes]:
    return {path.name.partition("-")[2]: path.read_bytes() for path in Path().glob(pattern)}


def expected(count: int, max_bytes: int) -> dict[str, bytes]:
    with ShardWriter("expected-%04d.tar", max_bytes=max_bytes) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number:09d}", **to_sample(Squares(count)[number])})
    return contents("expected-*.tar*")


@pytest.mark.parametrize("make_executor", [None, lambda: ProcessPool(3), lambda: ThreadPoolExecutor(3)])
@pytest.mark.parametrize("make", [lambda: Squares(500), lambda: (Squares(500)[i] for i in range(500))])
def test_the_shards_are_those_of_a_serial_writer(make, make_executor):
    executor = make_executor() if make_executor else None
    names = write_dataset(make(), "out-%04d.tar", to_sample=to_sample, executor=executor, max_bytes=100_000)
    if executor:
        executor.shutdown()
    assert contents("out-*.tar*") == expected(500, 100_000)
    assert names == [f"out-{i:04d}.tar" for i in range(len(names))]
    assert len(names) > 5
    manifest = json.loads(Path("out.shards.json").read_text())
    assert sum(entry["nsamples"] for entry in manifest["shardlist"]) == 500
    assert not list(Path().glob("*.writing"))


@pytest.mark.parametrize("sequence", [True, False])
def test_a_broken_call_is_gone_on_with(sequence):
    def dataset(broken):
        squares = Squares(500, broken)
        return squares if sequence else (squares[i] for i in range(500))

    with pytest.raises((OpError, ValueError), match="broken"):
        write_dataset(dataset(311), "out-%04d.tar", to_sample=to_sample, max_bytes=100_000)
    before = {path.name: path.stat().st_mtime_ns for path in Path().glob("out-*.tar")}
    assert before
    assert not Path("out.shards.json").exists()
    write_dataset(dataset(None), "out-%04d.tar", to_sample=to_sample, max_bytes=100_000)
    assert contents("out-*.tar*") == expected(500, 100_000)
    assert {name: Path(name).stat().st_mtime_ns for name in before} == before
    listed = json.loads(Path("out.shards.json").read_text())["shardlist"]
    assert len(listed) == len(list(Path().glob("out-*.tar")))


def test_another_call_begins_anew():
    with pytest.raises(OpError, match="item 311: ValueError: broken"):
        write_dataset(Squares(500, 311), "out-%04d.tar", to_sample=to_sample, max_bytes=100_000)
    write_dataset(Squares(499), "out-%04d.tar", to_sample=to_sample, max_bytes=100_000)
    assert [int(sample["cls"]) for sample in read_samples(sorted(map(str, Path().glob("out-*.tar"))))] == list(
        range(499)
    )


def test_items_can_be_left_out():
    write_dataset(Squares(100), "out-%d.tar", to_sample=odd_ones)
    assert [sample["__key__"] for sample in read_samples("out-0.tar")] == [f"{i:09d}" for i in range(1, 100, 2)]


def test_samples_need_no_function_and_keep_their_keys():
    samples = [{"__key__": f"k{i}", "txt": str(i)} for i in range(10)]
    write_dataset(samples, "out-%d.tar")
    assert [(sample["__key__"], sample["txt"]) for sample in read_samples("out-0.tar")] == [
        (f"k{i}", b"%d" % i) for i in range(10)
    ]


def test_a_folder():
    os.makedirs("data/b")
    for name in ("a.txt", "a.cls", "b/c.txt"):
        Path("data", name).write_text(name)
    write_dataset("data", "out-%d.tar")
    found = [{k: v for k, v in sample.items() if k != "__url__"} for sample in read_samples("out-0.tar")]
    assert found == [{"__key__": "a", "cls": b"a.cls", "txt": b"a.txt"}, {"__key__": "b/c", "txt": b"b/c.txt"}]


def test_a_torch_dataset():
    import torch
    from torch.utils.data import TensorDataset

    dataset = TensorDataset(torch.arange(40).reshape(20, 2), torch.arange(20))
    write_dataset(
        dataset,
        "out-%d.tar",
        to_sample=lambda item: {"npy": item[0].numpy(), "cls": int(item[1])},
        executor=ThreadPoolExecutor(1),
    )
    assert [int(sample["cls"]) for sample in read_samples("out-0.tar")] == list(range(20))


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ([(1, 2)], SampleError, "item 0 is not a dict but tuple: convert items with to_sample="),
        ([{"txt": "a"}, {"cls": object()}], EncodeError, "item 1: "),
        ([{"__key__": "a.b", "txt": "a"}], SampleError, "would read back as"),
    ],
)
def test_what_is_no_sample(dataset, error, message):
    with pytest.raises(error, match=message):
        write_dataset(dataset, "out-%d.tar")
    assert not list(Path().glob("out*"))
