"""write_dataset: any dataset to the same shards, by any executor, also in pieces."""

from __future__ import annotations

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
import range_server
from soak import SOAK
from with_torch import needs_torch

from tarshards import EncodeError, OpError, SampleError, ShardWriter, StateError, read_samples
from tarshards.errors import OpenError
from tarshards.parallel.process_pool import ProcessPool
from tarshards.samples import tree
from tarshards.storage.code_digest import CodeDigest
from tarshards.storage.markers import Marker, digest_of
from tarshards.write.dataset import write_dataset


class Squares:
    """A sequence that is not a list."""

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


def test_the_shards_do_not_depend_on_how_processes_begin(start_method):
    write_dataset(Squares(500), "out-%04d.tar", to_sample=to_sample, max_bytes=100_000)
    assert contents("out-*.tar*") == expected(500, 100_000)


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


@pytest.mark.parametrize(
    "limits", [{"max_samples": 40}, {"max_samples": 70, "max_bytes": 100_000}, {"max_bytes": None}]
)
def test_the_limits_are_those_of_a_writer(limits):
    most = {"max_samples": None, "max_bytes": 10**9, **limits}
    with ShardWriter("expected-%04d.tar", **most) as writer:
        for number in range(300):
            writer.write({"__key__": f"{number:09d}", **to_sample(Squares(300)[number])})
    with pytest.raises(OpError, match="broken"):
        write_dataset(Squares(300, 211), "out-%04d.tar", to_sample=to_sample, **limits)
    before = {path.name: path.stat().st_mtime_ns for path in Path().glob("out-*.tar")}
    assert bool(before) == ("max_samples" in limits)
    write_dataset(Squares(300), "out-%04d.tar", to_sample=to_sample, **limits)
    assert contents("out-*.tar*") == contents("expected-*.tar*")
    assert {name: Path(name).stat().st_mtime_ns for name in before} == before, "not written again"
    with pytest.raises(ValueError, match="max_samples must be at least 1"):
        write_dataset([], "out-%04d.tar", max_samples=0)


def test_another_limit_starts_over(caplog):
    with pytest.raises(OpError, match="broken"):
        write_dataset(Squares(300, 211), "out-%04d.tar", to_sample=to_sample, max_samples=50)
    write_dataset(Squares(300), "out-%04d.tar", to_sample=to_sample, max_samples=60)
    assert "its dataset or its options differ: removed, to start over" in caplog.text
    assert len(list(Path().glob("out-*.tar"))) == 5


def test_another_call_begins_anew():
    with pytest.raises(OpError, match="item 311: ValueError: broken"):
        write_dataset(Squares(500, 311), "out-%04d.tar", to_sample=to_sample, max_bytes=100_000)
    write_dataset(Squares(499), "out-%04d.tar", to_sample=to_sample, max_bytes=100_000)
    assert [int(sample["cls"]) for sample in read_samples(sorted(map(str, Path().glob("out-*.tar"))))] == list(
        range(499)
    )


def a_sample(number: int, cls: int = 1):
    return {"cls": cls, "txt": f"text {number}\n" * (number % 50)}


def rows(change=None, *, count: int = 600, stop: int | None = None):
    """Samples whose item *stop* cannot be read, with others at the numbers in *change*."""
    for number in range(count):
        if number == stop:
            raise ValueError("broken")
        yield a_sample(number, 2 if change is not None and number in change else 1)


class Rows:
    """A sequence of ``rows``, or with *iterable* a repeatable iterable."""

    def __init__(self, *arguments, stop: int | None = None, **options):
        self.rows, self.stop = list(rows(*arguments, **options)), stop

    def __getitem__(self, number: int):
        if number == self.stop:
            raise ValueError("broken")
        return self.rows[number]


class Sequence(Rows):
    def __len__(self) -> int:
        return len(self.rows)


class Iterable:
    def __init__(self, *arguments, **options):
        self.arguments, self.options = arguments, options

    def __iter__(self):
        return rows(*self.arguments, **self.options)


def write(dataset, folder: str = "", **options) -> list[str]:
    with ThreadPoolExecutor(2) as executor:
        return write_dataset(dataset, f"{folder}out-%04d.tar", executor=executor, **{"max_bytes": 50_000, **options})


def identity(path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns


def interrupt(dataset, **options) -> int:
    """Interrupt a call, and return how many samples it has written."""
    with pytest.raises((OpError, ValueError), match="broken"):
        write(dataset, **options)
    assert os.path.exists("out-0000.tar.writing")
    return len(list(read_samples(sorted(map(str, Path().glob("out-*.tar"))))))


def written(pattern: str = "out-*.tar") -> list[dict]:
    names = ("cls", "txt")
    samples = list(read_samples(sorted(map(str, Path().glob(pattern)))))
    assert [sample["__key__"] for sample in samples] == [f"{number:09d}" for number in range(len(samples))]
    return [{name: sample[name].decode() for name in names} for sample in samples]


def texts(dataset) -> list[dict]:
    return [{"cls": str(sample["cls"]), "txt": sample["txt"]} for sample in dataset]


@pytest.mark.parametrize("make", [Sequence, Iterable, rows])
@pytest.mark.parametrize("change", [range(600), [0], [1], [100], range(0, 600, 2), range(1, 600, 2)])
def test_nothing_of_another_dataset_is_kept(caplog, make, change):
    done = interrupt(make(stop=500))
    assert done > 100
    if make is rows and 0 not in change:  # an iterator that has gone past its first item
        before = contents("out-*")
        with pytest.raises(StateError, match=rf"out-0000\.tar\.writing: item {min(change)} has changed.*start over"):
            write(make(change))
        assert contents("out-*") == before
        os.unlink("out-0000.tar.writing")
    write(make(change))
    assert written() == texts(rows(change))
    if make is not rows or 0 in change:
        (warning,) = [record.getMessage() for record in caplog.records]
        assert warning.startswith("out-0000.tar.writing: an interrupted call wrote")
        assert f"but item {min(change)} has changed: removed, to start over" in warning
    assert not os.path.exists("out-0000.tar.writing")


@pytest.mark.parametrize("make", [Sequence, Iterable, rows])
def test_the_same_dataset_goes_on(caplog, make):
    done = interrupt(make(stop=500))
    before = {path.name: identity(path) for path in Path().glob("out-*.tar*") if path.suffix != ".writing"}
    write(make())
    assert written() == texts(rows())
    assert {name: identity(name) for name in before} == before
    assert done > 100
    kept = sum(name.endswith(".tar") for name in before)
    assert [record.getMessage() for record in caplog.records] == [
        f"out-0000.tar, ...: {kept} outputs kept from an earlier run"
    ]
    resumed = contents("out-*")
    write(make())
    assert contents("out-*") == resumed


def a_copy(sample):
    return dict(sample)


@pytest.mark.parametrize("edited", ["to_sample", "generator"])
def test_nothing_made_by_other_code_is_kept(caplog, edited):
    """Other code makes other samples of a few items, which need not be among those that are compared."""
    first, second = (lambda sample: sample), (lambda sample: {**sample, "cls": 3} if sample["txt"] == "" else sample)
    if edited == "to_sample":
        interrupt(Sequence(stop=500), to_sample=first)
        write(Sequence(), to_sample=second)
    else:
        interrupt(first(sample) for sample in rows(stop=500))
        write(second(sample) for sample in rows())
    assert written() == texts(map(second, rows()))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.endswith("but its dataset or its options differ: removed, to start over")


def test_a_journal_of_an_earlier_version_is_continued(caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tarshards.write.dataset.digest_code", lambda value: CodeDigest("of an earlier version"))
        interrupt(Sequence(stop=500), to_sample=a_copy)
    record = Marker("out-0000.tar.writing").read()
    identity = ["Sequence", None, 600]
    digest = digest_of("out-%04d.tar", 50_000, identity, pickle.dumps(a_copy).hex())
    Marker("out-0000.tar.writing").write({**record, "digest": digest})
    write(Sequence(), to_sample=a_copy)
    assert written() == texts(rows())
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.endswith("by an earlier release, which did not record code and inputs")


@pytest.mark.parametrize("count", [150, 550, 650])
def test_another_dataset_of_fewer_or_more_items(count):
    interrupt(Iterable(stop=500))
    write(Iterable(range(1000), count=count))
    assert written() == texts(rows(range(1000), count=count))


def test_other_options_and_functions_begin_anew(caplog):
    interrupt(Sequence(stop=500))
    write(Sequence(), max_bytes=45_000)
    assert written() == texts(rows())
    for path in Path().glob("out*"):
        path.unlink()
    interrupt(Sequence(stop=500))
    write(Sequence(), to_sample=lambda sample: {**sample, "cls": 7})
    assert {sample["cls"] for sample in written()} == {"7"}
    assert len([record for record in caplog.records if "options differ" in record.getMessage()]) == 2


def test_a_shard_that_was_changed_meanwhile_begins_anew(caplog):
    interrupt(Sequence(stop=500))
    os.truncate("out-0001.tar", 512)
    write(Sequence())
    assert written() == texts(rows())
    interrupt(Sequence(stop=500))
    os.unlink("out-0000.tar")
    write(Sequence())
    assert written() == texts(rows())
    reasons = [record.getMessage() for record in caplog.records]
    assert ["out-0001.tar has changed" in reasons[0], "out-0000.tar has changed" in reasons[1]] == [True, True]


def test_a_folder_that_was_changed_begins_anew(caplog, monkeypatch):
    os.mkdir("data")
    for number in range(600):
        Path(f"data/{number:03d}.txt").write_text("x" * 600)
    os.symlink("nothing", "data/390.cls")
    with pytest.raises(OpenError, match=r"390\.cls: No such file"):
        write("data")
    assert os.listdir() == ["data"]  # the folder is looked through first
    os.unlink("data/390.cls")
    with monkeypatch.context() as patch:
        patch.setattr(tree, "read_file", failing_at("590.txt"))
        with pytest.raises(OpenError, match=r"590\.txt: broken"):
            write("data")
    assert len(list(Path().glob("out-*.tar"))) > 2
    os.utime("data/599.txt")  # which was not read yet
    write("data")
    assert [sample["txt"] for sample in read_samples(sorted(map(str, Path().glob("out-*.tar"))))] == [b"x" * 600] * 600
    assert ["options differ" in record.getMessage() for record in caplog.records] == [True]


def failing_at(name: str):
    def read(path: str) -> bytes:
        if path.endswith(name):
            raise OpenError("broken", url=path)
        return Path(path).read_bytes()

    return read


@pytest.mark.parametrize("knows_sizes", [True, False])  # journals of earlier releases do not
def test_a_shard_that_a_web_server_lost_meanwhile_is_written_again(folder, caplog, knows_sizes):
    with range_server.serving(folder) as site:
        interrupt(Sequence(stop=500), folder=f"{site.url}/")
        journal = folder / "out-0000.tar.writing"
        if not knows_sizes:
            state = json.loads(journal.read_text())
            assert len(state["sizes"]) > 1
            journal.write_text(json.dumps(state | {"sizes": [None] * len(state["sizes"])}))
        os.unlink("out-0001.tar")
        write(Sequence(), folder=f"{site.url}/")
    assert written() == texts(rows())
    assert "out-0001.tar has changed" in caplog.records[0].getMessage()


def test_marks_are_few_and_find_a_change_of_a_few_items(caplog):
    def many(change=(), stop=None):
        for number in range(5000):
            if number == stop:
                raise ValueError("broken")
            yield {"cls": 2 if number in change else 1}

    with pytest.raises(ValueError, match="broken"):
        write(many(stop=4900), max_bytes=500_000)
    state = json.loads(Path("out-0000.tar.writing").read_text())
    assert 200 < len(state["marks"]) <= 512
    assert state["items"] > 4000
    with pytest.raises(StateError, match="has changed"):
        write(many(range(1, 5000, 50)), max_bytes=500_000)
    write(many(), max_bytes=500_000)
    samples = list(read_samples(sorted(map(str, Path().glob("out-*.tar")))))
    assert [sample["cls"] for sample in samples] == [b"1"] * 5000


@pytest.mark.soak
@pytest.mark.parametrize("place", ["before", "after"])
def test_killed_at_any_step_another_dataset_or_the_first_one_is_whole_in_the_end(place, kill_at):
    """A is interrupted, then B is killed at each step; then B, or A, is written whole."""
    large = {"max_bytes": 300_000}
    every = 1 if SOAK > 1 else 7
    for last in (range(600), None):
        for step in count(step=every):
            for path in Path().glob("out*"):
                path.unlink()
            interrupt(Sequence(stop=500), **large)
            status = kill_at(lambda: write(Sequence(range(600)), **large), step, place)
            write(Sequence(last), **large)
            assert written() == texts(rows(last))
            if status == 0:
                break
        assert step > 10


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


@needs_torch
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


@pytest.mark.parametrize("dataset", [[], iter(()), "folder"])
def test_a_dataset_without_samples_is_an_error(tmp_path, monkeypatch, dataset):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/README").write_text("no extension")
    with pytest.raises(SampleError, match="the dataset has no samples"):
        write_dataset(dataset, "out-%06d.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
