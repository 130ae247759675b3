"""Columns that lie in parallel shards, joined by key."""

from __future__ import annotations

import pickle
import random

import pytest
from range_server import serving
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import Ledger, ShardWriter, Stream, TarWriter
from tarshards.errors import SampleError, ShardIndexError, UrlError
from tarshards.index.build import build_index

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture
def write(tmp_path):
    """Return a function that writes shards whose samples have these *keys* and, of each key, a field."""

    def make(name: str, field: str, shards: list[list[int]]) -> str:
        for number, keys in enumerate(shards):
            url = str(tmp_path / f"{name}-{number}.tar")
            with TarWriter(url) as writer:
                for key in keys:
                    writer.write(
                        {"__key__": f"{key:03d}", field: b"%s %d" % (name.encode(), key), "own": name.encode()}
                    )
            build_index(url).save(url)
        return str(tmp_path / f"{name}-{{0..{len(shards) - 1}}}.tar")

    return make


def rows(samples) -> list[tuple[str, bytes, bytes]]:
    return [(sample["__key__"], sample["jpg"], sample["txt"]) for sample in samples]


def wanted(numbers) -> list[tuple[str, bytes, bytes]]:
    return [(f"{i:03d}", b"left %d" % i, b"right %d" % i) for i in numbers]


def test_by_key_in_any_order_with_more_on_the_right(write, caplog):
    left = write("left", "jpg", [[0, 1, 2], [], [7, 8]])
    right = write("right", "txt", [[2, 5, 0, 1], [3], [7, 8, 9]])
    joined = Stream.from_shards(left).join(right, fields="txt")
    message = "joined for some of its samples only; at least 3 have no partner and are left out"
    assert [record.message.rpartition("/")[2] for record in caplog.records] == [f"right-0.tar: {message}"]
    samples = joined.collect()
    assert rows(samples) == wanted([0, 1, 2, 7, 8])
    assert {sample["own"] for sample in samples} == {b"left"}
    assert all(sample["__url__"].rpartition("/")[2].startswith("left") for sample in samples)
    assert len(joined) == 5
    assert joined.ledger.members == 15
    assert joined.ledger.unpaired == 3
    assert "unpaired         3 samples of joined shards" in str(joined.ledger)
    joined.ledger.check()


def test_shuffled_in_workers_and_pickled(write):
    numbers = [list(range(10 * i, 10 * i + 10)) for i in range(4)]
    mixed = [random.Random(0).sample(part, len(part)) for part in numbers]
    left, right = write("left", "jpg", numbers), write("right", "txt", mixed)
    joined = ShardDataset(left, shuffle=True).join(right, fields=["txt"])
    for dataset in (joined, pickle.loads(pickle.dumps(joined))):
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        assert sorted(rows(loader)) == wanted(range(40))
    batches = list(ShardLoader(joined, 16, num_workers=2))
    assert sorted(key for batch in batches for key in batch["__key__"]) == [f"{i:03d}" for i in range(40)]


def test_two_joins(write):
    left, right, more = (write(name, field, [[1, 2]]) for name, field in (("a", "x"), ("b", "y"), ("c", "z")))
    joined = Stream.from_shards(left).join(right, fields="y").join(more, fields="z").decode()
    assert [{name: sample[name] for name in "y"} for sample in joined] == [{"y": b"b 1"}, {"y": b"b 2"}]
    assert all(sample["z"] == b"c %d" % i for i, sample in enumerate(joined, 1))


def test_a_field_that_both_have(write):
    joined = Stream.from_shards(write("left", "jpg", [[0]])).join(write("right", "txt", [[0]]))
    message = r"left-0\.tar: 000\.own: .*right-0\.tar has this field too; select the fields to join with fields="
    with pytest.raises(SampleError, match=message):
        joined.collect()
    narrow = Stream.from_shards(write("left", "jpg", [[0]]), fields="jpg").join(write("right", "txt", [[0]]))
    assert narrow.collect()[0]["own"] == b"right"


def test_a_sample_without_partner(write):
    left, right = write("left", "jpg", [[0, 1, 2]]), write("right", "txt", [[0, 2]])
    with pytest.raises(SampleError, match=r"left-0\.tar: 001: no sample of this key in .*right-0\.tar"):
        Stream.from_shards(left).join(right, fields="txt").collect()
    ledger = Ledger(max_errors=5)
    joined = Stream.from_shards(left, on_error=ledger).join(right, fields="txt")
    assert rows(joined) == wanted([0, 2])
    assert [entry.key for entry in ledger.quarantined] == ["001"]
    ledger.check()


def test_what_cannot_be_joined(write, make_shards):
    left = Stream.from_shards(write("left", "jpg", [[0], [1]]))
    with pytest.raises(UrlError, match="cannot join 2 shards with 1"):
        left.join(write("right", "txt", [[0]]))
    with pytest.raises(TypeError, match="before the ops"):
        left.decode().join(write("right", "txt", [[0], [1]]))
    plain = make_shards(2, name="plain")
    with pytest.raises(TypeError, match="tarindex"):
        Stream.from_shards(plain).join(write("right", "txt", [[0], [1]]))
    with pytest.raises(ShardIndexError, match="no index found"):
        left.join(plain)


def test_a_local_and_a_remote_half(write, tmp_path):
    left = write("left", "jpg", [[0, 1], [2, 3]])
    remote = tmp_path / "remote"
    remote.mkdir()
    with ShardWriter(str(remote / "right-%d.tar"), max_samples=2) as writer:
        for i in range(4):
            writer.write({"__key__": f"{i:03d}", "txt": f"right {i}", "big": bytes(100_000)})
    with serving(remote) as site:
        joined = Stream.from_shards(left).join(f"{site.url}/right.shards.json", fields="txt")
        assert rows(joined) == wanted(range(4))
        assert site.bytes < 20_000
