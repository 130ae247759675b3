"""Errors arrive from DataLoader workers unchanged: with origin, errno, notes and cause."""

from __future__ import annotations

import errno
import os
import pickle
import threading

import pytest
from torch.utils.data import DataLoader

from tarshards import IndexedShards, Ledger, ShardDataset, ShardLoader, TarWriter
from tarshards.errors import (
    DecodeError,
    OpenError,
    OpError,
    RemoteTraceback,
    SampleError,
    StateError,
    TarError,
    TarshardsError,
)

pytestmark = [
    pytest.mark.usefixtures("quick_spawn"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

METHODS = ["fork", "spawn"]


def fail(sample):
    error = StateError("not mine", url="s.json", offset=7, key="k", field="f")
    error.cost = "all of it"
    error.add_note("as it should be")
    raise error


def odd(samples):
    raise SampleError("no batch", key=samples[0]["__key__"])


def with_lock(samples):
    error = SampleError("no batch", key=samples[0]["__key__"])
    error.lock = threading.Lock()
    raise error


class OfUser(SampleError):
    """A constructor that takes no text alone, as torch calls it with."""

    def __init__(self, number: int, *, unit: str):
        super().__init__(f"{number} {unit}", key=str(number))
        self.number = number


def of_user(samples):
    raise OfUser(7, unit="apples")


class Mapped:
    """A dataset of one sample that cannot be opened."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        raise OpenError("full", url="a.tar", errno=errno.ENOSPC)


def raised_by(loader) -> TarshardsError:
    with pytest.raises(TarshardsError) as caught:
        list(loader)
    return caught.value


@pytest.fixture
def shard(make_shards, tmp_path) -> str:
    """A shard of three samples with an index."""
    make_shards(1, index=True)
    return str(tmp_path / "set-0000.tar")


@pytest.mark.parametrize("index", [True, False])
def test_a_plain_dataloader(shard, index):
    dataset = ShardDataset(shard, index=index, on_error=Ledger()).map(fail)
    error = raised_by(DataLoader(dataset, batch_size=None, num_workers=1))
    assert (type(error), error.url, error.key) == (OpError, shard, "000000")
    assert error.reason == "StateError: s.json: offset 7: k.f: not mine"
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in DataLoader worker process 0" in str(error.__cause__)
    assert "as it should be" in str(error.__cause__)
    assert pickle.loads(pickle.dumps(error)).key == "000000"


@pytest.mark.parametrize("method", METHODS)
def test_every_attribute(method):
    loader = DataLoader(Mapped(), num_workers=1, multiprocessing_context=method)
    error = raised_by(loader)
    assert (type(error), str(error), error.url, error.errno) == (OpenError, "a.tar: full", "a.tar", errno.ENOSPC)
    loader = DataLoader([{"__key__": "k"}], collate_fn=fail, num_workers=1, multiprocessing_context=method)
    error = raised_by(loader)
    assert type(error) is StateError
    assert (error.reason, error.url, error.offset, error.key, error.field) == ("not mine", "s.json", 7, "k", "f")
    assert (error.cost, error.__notes__) == ("all of it", ["as it should be"])


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_shard(shard, method):
    dataset = ShardDataset(shard, index=False)
    os.unlink(shard)
    for loader in (
        DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method),
        ShardLoader(dataset, 2, num_workers=1, multiprocessing_context=method),
    ):
        with pytest.raises(OSError, match="No such file") as caught:
            list(loader)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, shard)
        assert str(caught.value).count(shard) == 1
        assert "FileNotFoundError" in str(caught.value.__cause__)


def test_a_shard_loader_whose_collate_fails(shard):
    error = raised_by(ShardLoader(ShardDataset(shard), 2, num_workers=1, collate_fn=odd))
    assert (type(error), error.key, str(error)) == (SampleError, "000000", "000000: no batch")


def test_samples_by_number(shard):
    with open(shard, "r+b") as file:
        file.seek(1024)
        file.write(b"?")  # the name of the second member has changed
    for options in ({"collate_fn": list}, {"batch_size": None}):
        error = raised_by(DataLoader(IndexedShards(shard), num_workers=1, **options))
        assert error.url == shard
        assert error.offset is not None
        assert isinstance(error.__cause__, RemoteTraceback)


def test_a_damaged_shard(shard):
    os.truncate(shard, 1600)
    error = raised_by(DataLoader(ShardDataset(shard, index=False), batch_size=None, num_workers=1))
    assert (type(error), error.url) == (TarError, shard)
    assert error.offset is not None
    assert "tarcheck --repair" in error.cost


def test_a_field_that_does_not_decode(tmp_path):
    shard = str(tmp_path / "a.tar")
    with TarWriter(shard) as writer:
        writer.write({"__key__": "k", "json": b"{"})
    error = raised_by(DataLoader(ShardDataset(shard).decode(), batch_size=None, num_workers=1))
    assert (type(error), error.url, error.key, error.field) == (DecodeError, shard, "k", "json")


def test_what_cannot_be_pickled_does_not_hang_the_loader():
    error = raised_by(DataLoader([{"__key__": "k"}], collate_fn=with_lock, num_workers=1))
    assert (type(error), error.key, str(error)) == (SampleError, "k", "k: no batch")


def test_an_error_of_a_user_in_the_tree():
    error = raised_by(DataLoader([1], collate_fn=of_user, num_workers=1))
    assert (type(error), error.number, str(error)) == (OfUser, 7, "7: 7 apples")


def report(samples):
    try:
        raise OpenError("full", url="a.tar", errno=errno.ENOSPC)
    except OSError as error:
        again = pickle.loads(pickle.dumps(error))
        located = type(error)("more", url="b.tar")
        kinds = [isinstance(each, OpenError) for each in (error, again, located)]
        return [*kinds, repr(error), repr(again), again.errno, repr(located), type(error).__name__]


def test_in_the_worker_itself_they_are_what_they_are():
    (found,) = DataLoader([1], collate_fn=report, num_workers=1)
    text = "OpenError('a.tar: full')"
    assert found == [True, True, True, text, text, errno.ENOSPC, "OpenError('b.tar: more')", "OpenError"]


def test_elsewhere_errors_have_their_plain_class():
    assert type(SampleError("x")) is SampleError
