"""A merge is a join by key in the order of the first input, for any input and any memory."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import Leftovers

from tarshards import Ledger, ShardWriter, read_samples, write_samples
from tarshards.errors import OpenError, SampleError, ShardIndexError, TarError, UrlError
from tarshards.verbs.join import join_samples, join_shards

INPUTS = st.lists(st.lists(st.integers(0, 12), unique=True), min_size=2, max_size=3)
MEMORIES = st.sampled_from([1, 2000, 1 << 30])


def column(keys, field: str, url: str = "") -> list[dict]:
    """A sample for each key, with one field."""
    return [{"__key__": f"k{key}", "__url__": url or f"{field}.tar", field: f"{field}{key}".encode()} for key in keys]


def plain(samples) -> list[dict]:
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


def outer_join(inputs) -> list[dict]:
    """The result of SQLite: all keys, in the order of the first input that has them."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("create table samples (key, input, place)")
        rows = [(key, number, place) for number, keys in enumerate(inputs) for place, key in enumerate(keys)]
        database.executemany("insert into samples values (?, ?, ?)", rows)
        query = """
            select key, group_concat(input) from samples group by key
            order by min(input * 1000000 + place)
        """
        return [
            {"__key__": f"k{key}", **{f"f{number}": f"f{number}{key}".encode() for number in sorted(there.split(","))}}
            for key, there in database.execute(query)
        ]


@given(INPUTS, MEMORIES)
def test_ignoring_what_is_missing_is_an_outer_join(inputs, memory):
    columns = [column(keys, f"f{number}") for number, keys in enumerate(inputs)]
    assert plain(join_samples(columns, missing="ignore", memory=memory)) == outer_join(inputs)


@given(INPUTS, MEMORIES)
def test_skipping_what_is_missing_is_an_inner_join_that_counts(inputs, memory):
    columns = [column(keys, f"f{number}") for number, keys in enumerate(inputs)]
    joined = outer_join(inputs)
    whole = [sample for sample in joined if len(sample) == 1 + len(inputs)]
    skipped = []
    assert plain(join_samples(columns, missing="skip", memory=memory, leave_out=skipped.append)) == whole
    assert len(skipped) == sum(len(sample) - 1 for sample in joined if sample not in whole)


@given(INPUTS, MEMORIES)
def test_failing_on_what_is_missing(inputs, memory):
    columns = [column(keys, f"f{number}") for number, keys in enumerate(inputs)]
    if len({frozenset(keys) for keys in inputs}) == 1:
        assert plain(join_samples(columns, memory=memory)) == outer_join(inputs)
    else:
        with pytest.raises(SampleError, match=r"no sample of this key in input \d"):
            list(join_samples(columns, memory=memory))


@settings(max_examples=40)
@given(INPUTS, st.integers(1, 5))
def test_by_index_it_is_the_same(tmp_path_factory, inputs, size):
    folder = tmp_path_factory.mktemp("inputs")
    for number, keys in enumerate(inputs):
        with ShardWriter(str(folder / f"{number}-%03d.tar"), max_samples=size) as writer:
            for sample in column(keys, f"f{number}"):
                writer.write(sample)
    if not all(inputs):
        return
    specs = [str(folder / f"{number}.shards.json") for number in range(len(inputs))]
    by_index = list(join_shards(specs, missing="ignore"))
    assert plain(by_index) == outer_join(inputs)
    for path in folder.glob("*.index"):
        path.unlink()
    assert list(join_shards([str(folder / f"{n}-*.tar") for n in range(len(inputs))], missing="ignore")) == by_index


def test_one_sample_is_held_while_the_orders_agree():
    read = []

    def watched(samples):
        for sample in samples:
            read.append(sample["__key__"])
            yield sample

    merged = join_samples([watched(column(range(100), "a")), watched(column(range(100), "b"))])
    for number in range(3):
        assert next(merged)["__key__"] == f"k{number}"
        assert len(read) == 2 * (number + 1)


def test_with_an_index_the_others_are_not_read_through(tmp_path):
    write_samples(column(range(50), "a"), str(tmp_path / "a.tar"))
    with ShardWriter(str(tmp_path / "b-%d.tar")) as writer:
        for sample in column(reversed(range(50)), "b"):
            writer.write(sample)
    data = bytearray((tmp_path / "b-0.tar").read_bytes())
    data[20 * 1024 + 148] ^= 1  # the checksum of a header between
    (tmp_path / "b-0.tar").write_bytes(data)
    specs = [str(tmp_path / "a.tar"), str(tmp_path / "b-0.tar")]
    assert len(list(join_shards(specs))) == 50
    os.unlink(tmp_path / "b-0.tar.index")
    with pytest.raises(TarError, match=r"b-0\.tar: offset 20480: bad header checksum"):
        list(join_shards(specs))


def test_an_index_that_takes_too_much_memory_is_not_used(tmp_path, monkeypatch):
    for name, keys in (("a", range(5)), ("b", range(4, -1, -1))):
        with ShardWriter(str(tmp_path / f"{name}-%d.tar")) as writer:
            for sample in column(keys, name):
                writer.write(sample)
    looked_up = []
    monkeypatch.setattr("tarshards.verbs.join.IndexedInput.__init__", lambda *_: looked_up.append(True))
    specs = [str(tmp_path / "a-0.tar"), str(tmp_path / "b-0.tar")]
    assert len(list(join_shards(specs, memory=1000))) == 5
    assert not looked_up
    with pytest.raises(AttributeError):
        list(join_shards(specs))
    assert looked_up


def test_a_stale_index_is_an_error(tmp_path):
    for name, keys in (("a", range(5)), ("b", range(4, -1, -1))):
        with ShardWriter(str(tmp_path / f"{name}-%d.tar")) as writer:
            for sample in column(keys, name):
                writer.write(sample)
    with open(tmp_path / "b-0.tar", "ab") as file:
        file.write(bytes(512))
    with pytest.raises(ShardIndexError, match=r"b-0\.tar\.index"):
        list(join_shards([str(tmp_path / "a-0.tar"), str(tmp_path / "b-0.tar")]))


# Fields of one name


def test_fields_of_one_name_are_a_conflict():
    inputs = [column([1, 2], "a", "x.tar"), [{**sample, "b": b"b"} for sample in column([1, 2], "a", "y.tar")]]
    with pytest.raises(SampleError, match=r"^x\.tar: k1\.a: y\.tar has this field too$"):
        list(join_samples(inputs))


@given(st.permutations(range(4)), MEMORIES)
def test_a_conflict_is_decided_by_the_order_of_the_inputs(order, memory):
    inputs = [
        [{"__key__": f"k{key}", "txt": b"%d" % number} for key in keys] for number, keys in enumerate([range(4), order])
    ]
    for conflict, expected in (("first", b"0"), ("last", b"1")):
        merged = list(join_samples(inputs, conflict=conflict, memory=memory))
        assert merged == [{"__key__": f"k{key}", "txt": expected} for key in range(4)]


def test_the_place_is_that_of_the_first():
    (sample,) = join_samples([column([1], "a", "x.tar"), column([1], "b", "y.tar")], conflict="last")
    assert sample == {"__key__": "k1", "__url__": "x.tar", "a": b"a1", "b": b"b1"}


# Keys that come twice


@pytest.mark.parametrize(
    ("left", "right"),
    [([1, 2, 1], [1, 2, 1]), ([1, 2, 3], [1, 3, 2, 1]), ([1, 2, 3], [3, 3, 2, 1]), ([1, 3, 2, 1], [1, 2, 3])],
)
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("missing", ["fail", "skip", "ignore"])
def test_a_key_that_comes_twice_is_an_error(tmp_path, left, right, index, missing):
    for name, keys in (("a", left), ("b", right)):
        with ShardWriter(str(tmp_path / f"{name}-%d.tar"), max_samples=1, index=index) as writer:
            for sample in column(keys, name):
                writer.write(sample)
    with pytest.raises(SampleError, match=r"k[13]: duplicate key"):
        list(join_shards([str(tmp_path / "a-*.tar"), str(tmp_path / "b-*.tar")], missing=missing))


# Errors


def test_what_fails_can_be_left_out():
    rejected = []
    inputs = [column([1, 2, 3, 4], "a"), column([4, 3, 1], "b")]
    inputs[1][1]["a"] = b"another"
    merged = join_samples(inputs, reject=lambda sample, error: rejected.append((sample["__key__"], str(error))))
    assert [sample["__key__"] for sample in merged] == ["k1", "k4"]
    assert sorted(rejected) == [
        ("k2", "a.tar: k2: no sample of this key in input 2"),
        ("k3", "a.tar: k3.a: b.tar has this field too"),
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_damage_is_never_a_shorter_result(tmp_path, order):
    write_samples(column(range(8), "a"), str(tmp_path / "a.tar"))
    write_samples(column(range(8)[::order], "b"), str(tmp_path / "b.tar"))
    specs = [str(tmp_path / "a.tar"), str(tmp_path / "bad.tar")]
    data = (tmp_path / "b.tar").read_bytes()
    for size in range(0, 8 * 1024 + 511, 300):
        (tmp_path / "bad.tar").write_bytes(data[:size])
        for missing in ("fail", "skip", "ignore"):
            with pytest.raises(TarError, match=r"bad\.tar"):
                list(join_shards(specs, missing=missing))
            with pytest.raises(TarError, match=r"bad\.tar"):
                list(join_shards(specs[::-1], missing=missing))
    ledger = Ledger(max_errors=1)
    (tmp_path / "bad.tar").write_bytes(data[:3000])
    assert len(list(join_shards(specs, missing="skip", on_error=ledger))) == 2
    assert len(ledger.quarantined) == 1


def test_wrong_arguments():
    with pytest.raises(ValueError, match="missing is fail, skip, ignore"):
        join_samples([[], []], missing="maybe")
    with pytest.raises(ValueError, match="conflict fail, first, last"):
        join_samples([[], []], conflict="any")
    with pytest.raises(UrlError, match="stdin can be only one of the inputs"):
        join_shards(["-", "-"])
    with pytest.raises(OpenError, match=r"none\.tar"):
        list(join_shards(["none.tar", "none.tar"]))


def test_nothing_stays_open(tmp_path):
    before = Leftovers()
    for name, keys in (("a", range(50)), ("b", range(49, -1, -1))):
        write_samples(column(keys, name), str(tmp_path / f"{name}.tar"))
    for specs in (["a.tar", "a.tar"], ["a.tar", "b.tar"]):
        urls = [str(tmp_path / name) for name in specs]
        merged = join_shards(urls, conflict="first", memory=2000, tmpdir=str(tmp_path))
        next(merged)
        assert before.files()
        merged.close()
        assert not before.files()
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "b.tar"]


@pytest.mark.parametrize("index", [False, True])
def test_the_memory_is_kept(tmp_path, index):
    count = 9000
    places = list(range(count))
    for name, keys in (("a", places), ("b", random.Random(0).sample(places, count))):
        with ShardWriter(str(tmp_path / f"{name}-%d.tar"), index=index) as writer:
            for key in keys:
                writer.write({"__key__": f"{key:08d}", name: b"%01300d" % key})
    program = """
import re, sys
import numpy, tarshards.index
from tarshards.verbs.join import join_shards
from tarshards.write.shards import TarWriter

def memory(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

# Mapped files count in VmHWM, and are memory that the kernel can take back at any time.
name = sys.argv[1]
base = peak = memory(name)
with TarWriter("out.tar") as writer:
    for number, sample in enumerate(join_shards(["a-0.tar", "b-0.tar"], memory=int(sys.argv[2]), tmpdir=".")):
        writer.write(sample)
        if number % 300 == 0:
            peak = max(peak, memory(name))
print(peak - base)
"""
    command = [sys.executable, "-c", program, *(["RssAnon", "20000000"] if index else ["VmHWM", "5000000"])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    # The samples are 26 MB and more as Python keeps them; the keys, which reading and writing check, are 1 MB a time.
    assert int(done.stdout) / 1024 < 20
    for number, sample in enumerate(read_samples(tmp_path / "out.tar")):
        assert int(sample["__key__"]) == int(sample["a"]) == int(sample["b"]) == number
    assert number == count - 1
