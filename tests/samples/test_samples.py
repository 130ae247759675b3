"""Members <-> samples, and shards that fail."""

from __future__ import annotations

import gc
import gzip
import io
import os
import tarfile
import threading
from contextlib import closing
from itertools import islice

import pytest
import webdataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from leftovers import Leftovers

from tarshards import Ledger, Member, group_members, read_samples
from tarshards.errors import OpenError, SampleError, TarError
from tarshards.samples.grouping import encode_sample
from tarshards.samples.keys import is_reserved, join_name


def members(*names: str) -> list[Member]:
    return [Member(name, name.encode(), 512 * i) for i, name in enumerate(names)]


def group(*names: str, ledger: Ledger | None = None) -> list[dict]:
    return list(group_members(members(*names), url="x.tar", ledger=ledger))


def test_grouping():
    assert group("a.jpg", "a.CLS", "d/a.jpg") == [
        {"__key__": "a", "__url__": "x.tar", "jpg": b"a.jpg", "cls": b"a.CLS"},
        {"__key__": "d/a", "__url__": "x.tar", "jpg": b"d/a.jpg"},
    ]


def test_no_members_no_samples():
    assert group() == []


def test_members_without_key_are_counted():
    ledger = Ledger()
    assert len(group("a.jpg", "README", ".hidden", "__meta__/x.json", "a.cls", ledger=ledger)) == 1
    assert ledger.skipped == {"no extension": 2, "reserved name": 1}
    assert (ledger.samples, ledger.members) == (1, 2)


@pytest.mark.parametrize("names", ["b.x a.x b.y", "a.x b.x a.y", "a.x b.x a.x", "c.x b.x a.x b.x", "a.x c.x b.x a.x"])
def test_a_key_that_comes_back(names):
    names = names.split()
    with pytest.raises(SampleError, match="not adjacent") as caught:
        group(*names)
    assert caught.value.key == names[-1].split(".")[0]
    assert caught.value.offset == 512 * (len(names) - 1)
    assert caught.value.url == "x.tar"


@pytest.mark.parametrize("names", [("a.jpg", "a.jpg"), ("a.jpg", "a.JPG"), ("a.__key__",), ("a.x", "a.__url__")])
def test_a_field_that_comes_twice(names):
    with pytest.raises(SampleError, match="duplicate field"):
        group(*names)


@given(st.lists(st.integers(0, 12), max_size=30))
def test_keys_come_back_in_any_order(keys):
    """In any order, a key in two runs is an error; otherwise every key is one sample."""
    runs = [key for i, key in enumerate(keys) if i == 0 or keys[i - 1] != key]
    names = [f"{key}.{i}" for i, key in enumerate(keys)]
    if len(set(runs)) == len(runs):
        assert [sample["__key__"] for sample in group(*names)] == [str(key) for key in runs]
    else:
        with pytest.raises(SampleError, match="not adjacent"):
            group(*names)


def test_a_half_read_sample_is_not_delivered():
    def broken():
        yield from members("a.x", "a.y", "b.x")
        raise TarError("bad", url="x.tar", offset=5)

    ledger = Ledger()
    samples = group_members(broken(), url="x.tar", ledger=ledger)
    assert next(samples)["__key__"] == "a"
    with pytest.raises(TarError):
        next(samples)
    assert (ledger.samples, ledger.members) == (1, 2)


def test_another_key_rule():
    pairs = group_members(members("1-jpg", "1-cls"), split=lambda name: tuple(name.split("-")))
    assert [sample["__key__"] for sample in pairs] == ["1"]


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # theirs
def test_same_samples_as_webdataset(make_shards):
    def fields(samples):
        return [
            {name: value for name, value in sample.items() if name in ("__key__", "cls", "txt")} for sample in samples
        ]

    urls = make_shards(3, 5)
    theirs = fields(webdataset.WebDataset(urls, shardshuffle=False))
    gc.collect()
    assert fields(read_samples(urls)) == theirs


def test_first_error_is_raised(make_shards, tmp_path):
    urls = make_shards(3)
    (tmp_path / "set-0001.tar").write_bytes(b"this is no tar" * 100)
    seen = []
    with pytest.raises(TarError, match=r"set-0001\.tar: offset 0: not a tar archive"):
        seen.extend(read_samples(urls))  # what came before the error is kept by extend
    assert len(seen) == 3


def test_errors_go_to_the_ledger_and_reading_goes_on(make_shards, tmp_path):
    urls = make_shards(4)
    (tmp_path / "set-0001.tar").unlink()
    whole = (tmp_path / "set-0002.tar").read_bytes()
    (tmp_path / "set-0002.tar").write_bytes(whole[:3000])
    ledger = Ledger(max_errors=2)
    samples = list(read_samples(urls, on_error=ledger))
    assert [sample["cls"] for sample in samples] == [b"0", b"1", b"2", b"6", b"9", b"10", b"11"]
    assert ledger.shards == 2
    missing, truncated = ledger.quarantined
    assert missing.shard.endswith("set-0001.tar")
    assert "No such file" in missing.reason
    assert truncated.offset is not None
    assert "truncated" in truncated.reason


def test_missing_shard_is_named(make_shards, tmp_path):
    urls = make_shards(3)
    (tmp_path / "set-0001.tar").unlink()
    with pytest.raises(OpenError, match=r"set-0001\.tar: No such file"):
        list(read_samples(urls))


def test_breaking_off_closes_the_shard_and_is_unaudited(make_shards):
    before = Leftovers()
    ledger = Ledger()
    samples = read_samples(make_shards(2, 50), on_error=ledger)
    next(samples)
    assert before.files()
    samples.close()
    assert not before.files()
    assert ledger.unaudited
    assert (ledger.samples, ledger.shards) == (1, 0)


def test_what_was_not_delivered_is_not_counted(tmp_path):
    """Neither samples nor fields, when the consumer stops at any of them, or a faulty one is an error."""
    name, sizes = str(tmp_path / "a.tar"), [1, 2, 3, 1, 0, 2, 40, 1]
    with tarfile.open(name, "w") as tar:
        for number, size in enumerate(sizes):
            for field in range(size) if size else ["x", "x"]:  # a field that comes twice
                tar.addfile(tarfile.TarInfo(f"{number}.{field}"))
    for stop in range(len(sizes)):
        ledger = Ledger()
        with closing(read_samples(name, on_error=ledger)) as samples:
            taken = list(islice(samples, min(stop, 4)))
            if stop > 4:
                with pytest.raises(SampleError, match=r"4\.x: duplicate field"):
                    list(samples)
        assert (ledger.samples, ledger.members) == (len(taken), sum(sizes[: len(taken)]))
    ledger = Ledger(max_errors=1)
    with closing(read_samples(name, on_error=ledger)) as samples:
        for sample in islice(samples, 6):
            sample.clear()  # consumers may change what they get
    assert (ledger.samples, ledger.members) == (6, sum(sizes[:7]))


def test_directories_and_links_are_counted(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/l.jpg", tarfile.SYMTYPE), ("d/h.jpg", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "elsewhere"
            tar.addfile(info)
        info = tarfile.TarInfo("d/a.txt")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
        info = tarfile.TarInfo("d/b.txt")
        info.type, info.linkname = tarfile.LNKTYPE, "d/a.txt"
        tar.addfile(info)
        info = tarfile.TarInfo("d/c.txt")
        info.type, info.linkname = tarfile.SYMTYPE, "."
        tar.addfile(info)
    ledger = Ledger(max_errors=2)
    samples = list(read_samples(tmp_path / "a.tar", on_error=ledger))
    assert [(sample["__key__"], sample["txt"]) for sample in samples] == [("d/a", b"hello"), ("d/b", b"hello")]
    assert ledger.skipped == {"directory": 1, "symbolic link": 1}
    assert [(entry.key, entry.field, entry.reason) for entry in ledger.quarantined] == [
        ("d/l", "jpg", "incomplete: symbolic link to 'elsewhere', which is not in the archive"),
        ("d/h", "jpg", "incomplete: hard link to 'elsewhere', which is not in the archive"),
    ]
    with pytest.raises(SampleError, match=r"offset 512: d/l\.jpg: incomplete: symbolic link to 'elsewhere'"):
        list(read_samples(tmp_path / "a.tar"))


def test_fields_are_sorted_and_encoded():
    sample = {"__key__": "k", "__url__": "x", "txt": "hi", "cls": 3, "__source__": "y", "bin": b"\0"}
    assert encode_sample(sample) == (("bin", "cls", "txt"), [b"\0", b"3", b"hi"])


PARTS = st.lists(st.sampled_from(["a", "A", "_", "__", ".", "/", "\0", "é"]), max_size=6).map("".join)


@settings(max_examples=250, deadline=None)
@given(
    key=PARTS.filter(bool), fields=st.sets(PARTS.filter(lambda field: not is_reserved(field)), min_size=1, max_size=3)
)
@example(key="__/a", fields={"a"})
@example(key="__", fields={"a__"})
@example(key="a", fields={"a__"})
def test_the_members_of_a_sample_have_the_names_that_read_back(key, fields):
    def outcome(names):
        try:
            return names()
        except SampleError as error:
            return str(error)

    expected = outcome(lambda: [join_name(key, field) for field in sorted(fields)])
    sample = {"__key__": key, **dict.fromkeys(fields, b"")}
    assert outcome(lambda: [f"{key}.{field}" for field in encode_sample(sample)[0]]) == expected


@pytest.mark.parametrize(
    "sample",
    [
        {"x": b""},
        {"__key__": 3, "x": b""},
        {"__key__": "", "x": b""},
        {"__key__": "a"},
        {"__key__": "a", "__url__": "u"},
        {"__key__": "a.b", "x": b""},
    ],
)
def test_samples_that_cannot_be_written(sample):
    with pytest.raises(SampleError):
        encode_sample(sample)


def test_damage_is_sized_and_the_tool_that_repairs_is_named(make_shards, tmp_path):
    make_shards(1, 20)
    data = (tmp_path / "set-0000.tar").read_bytes()
    (tmp_path / "plain.tar").write_bytes(data[:5120] + b"?" * 512 + data[5632:])
    (tmp_path / "packed.tar.gz").write_bytes(gzip.compress(data[:5120] + b"?" * 512))
    os.mkfifo(tmp_path / "fifo.tar")
    writer = threading.Thread(target=(tmp_path / "fifo.tar").write_bytes, args=(data[:5632] + b"?" * 512,))
    writer.start()
    ledger = Ledger(max_errors=9)
    urls = [str(tmp_path / name) for name in ("plain.tar", "packed.tar.gz", "fifo.tar")]
    samples = list(read_samples([*urls, f"pipe:head -c 5632 {urls[0]}"], on_error=ledger, allow_pipe=True))
    writer.join()
    assert ledger.samples == len(samples) == 8
    costs = [entry.reason.partition("; ")[2] for entry in ledger.quarantined]
    saves = "`tarcheck --repair OUT` saves the whole samples"
    option = '`--end optional` (end="optional") accepts it'
    assert costs == [f"{len(data) - 5120} of {len(data)} bytes not read; {saves}", saves, f"{option}; {saves}", ""]
    with pytest.raises(TarError) as caught:
        list(read_samples(urls[0]))
    assert "tarcheck" not in str(caught.value), "nothing is lost where the error is raised"


def test_a_manifest_says_how_many_samples_a_damaged_shard_lost(make_shards, tmp_path):
    make_shards(2, 20, index=True)
    data = (tmp_path / "set-0001.tar").read_bytes()
    (tmp_path / "set-0001.tar").write_bytes(data[:5120])
    ledger = Ledger(max_errors=9)
    samples = list(read_samples(tmp_path / "set.shards.json", on_error=ledger))
    assert len(samples) == 22
    [entry] = ledger.quarantined
    assert entry.reason.endswith("; 18 of 20 samples lost; `tarcheck --repair OUT` saves the whole samples")
