"""An index is a hint, the tar is the truth: a shard rewritten under its index gives what it holds, or errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import need
from range_server import serving
from rewritten import NAMES, Entry, contents, keep_index, npy, samples, stale, write
from soak import rounds
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, IndexedShards, Ledger, Stream, read_samples, readers, write_samples
from tarshards.errors import ShardIndexError, TarshardsError
from tarshards.index.build import build_index
from tarshards.index.joined import JoinedShards
from tarshards.index.refresh import refresh_indexes, verify_index
from tarshards.index.sidecar import Index
from tarshards.storage.ranges import LocalRanges
from tarshards.verbs.grep import KeyFilter
from tarshards.verbs.join import join_shards

Found = list[tuple[str, str, bytes]]  # key, field, data


def fields_of(sample: dict[str, Any]) -> Found:
    return [(sample["__key__"], name, data) for name, data in sample.items() if not name.startswith("__")]


def one_by_one(indexed: IndexedShards) -> tuple[Found, list[Exception]]:
    """What single reads give, and the errors."""
    found: Found = []
    errors: list[Exception] = []
    for i in range(len(indexed)):
        try:
            found += fields_of(indexed[i])
        except TarshardsError as error:
            errors.append(error)
    return found, errors


def by_access(url: str, *, fields: str | None = None) -> tuple[Found, list[Exception]]:
    return one_by_one(IndexedShards(url, fields=fields))


def by_stream(url: str) -> tuple[Found, list[Exception]]:
    errors: list[Exception] = []
    stream = Stream.from_shards(url, index=True, shuffle=True, on_error=errors.append)
    found = [field for sample in stream for field in fields_of(sample)]
    return found, errors


def by_loader(url: str) -> tuple[Found, list[Exception]]:
    errors: list[Exception] = []
    dataset = ShardDataset(url, index=True, on_error=errors.append)
    batches = ShardLoader(dataset, 3, collate_fn=list)
    return [field for batch in batches for sample in batch for field in fields_of(sample)], errors


def by_arrays(url: str, **fields: Any) -> tuple[Found, list[Exception]]:
    errors: list[Exception] = []
    stream = Stream.from_shards(url, index=True, shuffle=True, on_error=errors.append)
    found: Found = []
    with suppress(TarshardsError):
        for batch in ArrayLoader(stream, 4, fields={name.replace("_", "."): reader for name, reader in fields.items()}):
            for i, key in enumerate(batch["__key__"]):
                for name, values in batch.items():
                    if name != "__key__":
                        data = npy(values[i][0]) if isinstance(values[i], np.ndarray) else values[i]
                        found.append((key, name, b"%d" % data if isinstance(data, (int, np.integer)) else data))
    return found, errors


def by_column(url: str) -> tuple[Found, list[Exception]]:
    indexed = IndexedShards(url)
    found: Found = []
    errors: list[Exception] = []
    try:
        column = indexed.column("x.npy")
        for i in range(len(indexed)):
            found.append((indexed.keys[i], "x.npy", npy(column[i][0])))
        values = np.asarray(column)
        assert [npy(row[0]) for row in values] == [data for _, _, data in found]
    except TarshardsError as error:
        errors.append(error)
    return found, errors


def joined(url: str) -> tuple[Found, list[Exception]]:
    left, right = IndexedShards(url, fields="cls"), IndexedShards(url, fields="txt x.npy")
    found: Found = []
    errors: list[Exception] = []
    for result in JoinedShards(left, right).read_all(np.zeros(len(left), np.int64), np.arange(len(left))):
        if isinstance(result, dict):
            found += fields_of(result)
        else:
            errors.append(result)
    return found, errors


def cls_alone(url: str) -> tuple[Found, list[Exception]]:
    return by_access(url, fields="cls")


def numbers(url: str) -> tuple[Found, list[Exception]]:
    return by_arrays(url, cls=readers.integer())


def arrays(url: str) -> tuple[Found, list[Exception]]:
    return by_arrays(url, x_npy=readers.array())


def all_fields(url: str) -> tuple[Found, list[Exception]]:
    return by_arrays(url, txt=readers.bytes_(), cls=readers.integer(), x_npy=readers.array())


READERS = [by_access, cls_alone, by_stream, by_loader, by_column, joined, numbers, arrays, all_fields]


def shards(folder: Path, first: int, count: int) -> Iterator[tuple[int, Path, dict[tuple[str, str], bytes]]]:
    """Shards whose indexes are not theirs any more."""
    for seed in range(first, first + count):
        if (made := stale(folder, seed)) is not None:
            yield seed, *made


def compare(found: Found, errors: list[Exception], held: dict[tuple[str, str], bytes], words: str) -> None:
    for key, field, data in found:
        assert held.get((key, field)) == data, f"{words}: {key}.{field}"
    for error in errors:
        assert isinstance(error, TarshardsError), words


def unchanged(path: Path) -> set[str]:
    """The keys of the samples whose members all lie where the index says."""
    index = Index.load(str(path))
    with suppress(TarshardsError):
        new = build_index(str(path))
        members = {members_of(new, i) for i in range(len(new.sample))}
        changed = {member[0] for i in range(len(index.sample)) if (member := members_of(index, i)) not in members}
        return set(index.keys) - changed - {new.keys[sample] for sample in new.faults}
    return set()


def members_of(index: Index, i: int) -> tuple[str, str, int, int, str]:
    described = int(index.offset[i]), int(index.size[i]), str(index.elsewhere.get(i))
    return index.keys[index.sample[i]], index.fields[index.field[i]], *described


@pytest.mark.soak
def test_a_rewritten_shard_gives_what_it_holds(tmp_path):
    seen = 0
    for seed, path, held in shards(tmp_path, 0, rounds(20)):
        for read in READERS:
            found, errors = read(str(path))
            compare(found, errors, held, f"seed {seed}, {read.__name__}")
            seen += bool(errors)
            if read in (by_access, by_stream, by_loader):
                assert {key for key, _, _ in found} >= unchanged(path), f"seed {seed}: only what has changed is refused"
    assert seen > 5 * rounds(20)


@pytest.mark.soak
def test_a_rewritten_shard_gives_what_it_holds_over_http(tmp_path):
    with serving(tmp_path) as site:
        for seed, path, held in shards(tmp_path, 10_000, rounds(15)):
            for read in by_access, cls_alone, by_column, by_stream:
                found, errors = read(f"{site.url}/{path.name}")
                compare(found, errors, held, f"seed {seed}, {read.__name__}")


@pytest.fixture
def grown(tmp_path) -> str:
    """A shard of 1,000 samples; each tenth class was corrected from 9 to 10 after the shard was indexed."""
    path = tmp_path / "grown.tar"

    def entries(last: int) -> Iterator[Entry]:
        for i in range(1000):
            yield Entry(f"{i:04d}.cls", b"%d" % (last if i % 10 == 9 else i % 10))
            yield Entry(f"{i:04d}.x.npy", npy(i))

    write(path, entries(9))
    index = build_index(str(path))
    index.save(str(path))
    size = path.stat().st_size
    write(path, entries(10))
    index.check(LocalRanges(str(path), str(path)))
    assert path.stat().st_size == size, "so that neither size nor fingerprint tell"
    return str(path)


RIGHT = [(f"{i:04d}", i % 10) for i in range(1000) if i % 10 != 9]
CHANGED = [f"{i:04d}" for i in range(9, 1000, 10)]


def test_indexed_shards_refuse_a_label_that_grew(grown):
    found, errors = by_access(grown)
    assert [(key, int(data)) for key, field, data in found if field == "cls"] == RIGHT
    assert [(type(error), error.key, error.field) for error in errors] == [
        (ShardIndexError, key, "cls") for key in CHANGED
    ]
    assert str(errors[0]) == (
        f"{grown}: offset {errors[0].offset}: 0009.cls: stale index: it says 1 bytes, and here is "
        "'0009.cls' of 2 bytes; rebuild it with `tarindex`"
    )
    assert Path(grown).read_bytes()[errors[0].offset :].startswith(b"0009.cls\0")
    assert [key for key, *_ in cls_alone(grown)[0]] == [key for key, _ in RIGHT]
    assert len(by_access(grown, fields="x.npy")[0]) == 1000, "their own headers are as they were"
    build_index(grown).save(grown)
    assert [int(data) for _, _, data in cls_alone(grown)[0]] == [i % 10 if i % 10 != 9 else 10 for i in range(1000)]


def test_a_shard_loader_refuses_a_label_that_grew(grown):
    with pytest.raises(ShardIndexError, match=r"cls: stale index.*`tarindex`"):
        list(ShardLoader(ShardDataset(grown, index=True), 10, num_workers=1))
    ledger = Ledger(max_errors=100)
    loader = ShardLoader(ShardDataset(grown, index=True, shuffle=True, on_error=ledger), 10, num_workers=2)
    found = [(key, int(data)) for batch in loader for key, data in zip(batch["__key__"], batch["cls"])]
    assert sorted(found) == RIGHT
    assert sorted(str(entry.key) for entry in ledger.quarantined) == CHANGED
    ledger.check()


@pytest.mark.parametrize(
    "wanted",
    [
        {"cls": readers.integer()},
        {"x.npy": readers.array(), "cls": readers.integer()},
        {"cls": readers.integer(), "x.npy": readers.using(len)},
    ],
    ids=["numbers", "quick", "threads"],
)
def test_an_array_loader_refuses_a_label_that_grew(grown, wanted):
    errors: list[Exception] = []
    stream = Stream.from_shards(grown, index=True, shuffle=True, on_error=errors.append)
    loader = ArrayLoader(stream, 64, fields=wanted)
    for _ in range(2):
        errors.clear()
        found = [pair for batch in loader for pair in zip(batch["__key__"], batch["cls"].tolist())]
        assert sorted(found) == RIGHT
        assert sorted(error.key for error in errors) == CHANGED
        assert all(isinstance(error, ShardIndexError) for error in errors)
    with pytest.raises(ShardIndexError, match=r"cls: stale index.*`tarindex`"):
        list(ArrayLoader(Stream.from_shards(grown, index=True), 64, fields=wanted))


def test_the_rest_of_an_array_that_lies_elsewhere_is_no_column(tmp_path):
    path = tmp_path / "a.tar"
    write(path, [Entry(f"{i}.x.npy", npy(i)) for i in range(9)])
    index = build_index(str(path))
    write(path, [Entry(f"{i}.x.npy", npy(i)) for i in (0, 1, 3, 2, 4, 5, 6, 7, 8)])
    assert keep_index(path, index)
    column = IndexedShards(str(path)).column("x.npy")
    with pytest.raises(ShardIndexError, match=r"a\.tar: offset \d+: 2\.x\.npy: stale index"):
        column[2]


@pytest.mark.parametrize("format", ["ustar", "pax", "gnu"])
@pytest.mark.parametrize("name", [*NAMES, "\udcff{:03d}"], ids=ascii)
def test_a_copy_and_other_times_keep_an_index_valid(tmp_path, name, format):
    """Whatever the names: in upper case, not ASCII, not UTF-8, in folders, in pax and GNU headers, with a prefix."""
    path, copy = tmp_path / "a.tar", tmp_path / "b.tar"
    entries = samples(4, name, upper=True)
    entries.insert(4, Entry("README", b"r" * 1000))
    entries.insert(1, Entry("folder", type=b"5"))
    entries += [Entry(f"{name.format(4)}.ÄÖ.Jpg", b"j"), Entry("z.txt", pax={"comment": "c" * 5000})]
    if format != "pax":
        entries[-1].pax.clear()
    write(path, entries, format, times=0.5)
    build_index(str(path)).save(str(path))
    shutil.copyfile(path, copy)
    shutil.copyfile(f"{path}.index", f"{copy}.index")
    os.utime(copy, ns=(0, 0))
    expected = sorted((*parts, data) for parts, data in contents(path).items())
    assert ("z", "txt", b"") in expected
    for read in by_access, by_stream, by_loader:
        found, errors = read(str(copy))
        assert (sorted(found), errors) == (expected, [])
    write(copy, entries, format, times=1.5)
    kept = keep_index(copy, build_index(str(path)))
    assert (kept, one_by_one(IndexedShards(str(copy)))) == (True, (by_access(str(path))[0], []))
    with serving(tmp_path) as site:
        assert by_access(f"{site.url}/b.tar")[1] == []
        assert cls_alone(f"{site.url}/b.tar")[1] == []


def test_remote_headers_cost_no_request(tmp_path):
    path = tmp_path / "a.tar"
    write(path, [Entry(f"{i}.{field}", b"7" * size) for i in range(9) for field, size in [("bin", 70_000), ("cls", 1)]])
    build_index(str(path)).save(str(path))
    with serving(tmp_path) as site:
        indexed = IndexedShards(f"{site.url}/a.tar", fields="cls")
        indexed[0]
        site.clear()
        assert [sample["cls"] for sample in indexed[1:]] == [b"7"] * 8
        assert len(site.requests) == 8
        assert site.bytes <= 8 * 2600 + 1024  # after the last member the end of the archive is compared


def tar(*arguments: object) -> None:
    need("GNU tar")
    subprocess.run(["tar", *map(str, arguments)], check=True)


APPENDED = {
    "append": ["-rf", "a.tar", "3.txt"],
    "update": ["-uf", "a.tar", "2.txt", "3.txt"],
    "concatenate": ["-Af", "a.tar", "b.tar"],
    "delete the last": ["--delete", "-f", "a.tar", "2.txt"],
    "delete the first": ["--delete", "-f", "a.tar", "1.txt"],
}


@pytest.fixture(params=APPENDED)
def appended(request, tmp_path, monkeypatch) -> str:
    """A shard that GNU tar changed; mostly its size stays, since it fills records of 10,240 bytes."""
    monkeypatch.chdir(tmp_path)
    for i in range(1, 4):
        Path(f"{i}.txt").write_text(f"text {i}")
        os.utime(f"{i}.txt", (0, 0))
    tar("-cf", "a.tar", "1.txt", "2.txt")
    tar("-cf", "b.tar", "3.txt")
    build_index("a.tar").save("a.tar")
    size = os.path.getsize("a.tar")
    tar(*APPENDED[request.param])
    assert (os.path.getsize("a.tar") == size) == (request.param != "concatenate")
    return "a.tar"


@pytest.mark.parametrize("said", [True, False], ids=["end", "no end"])
def test_what_is_appended_is_noticed_when_a_shard_is_opened(appended, said):
    if not said:  # an index of an earlier version
        index = Index.load(appended, check=False)
        index.end = None
        index.save(appended)
    for read in by_access, by_stream, by_loader, numbers:
        try:
            found, errors = read(appended)
        except ShardIndexError as error:  # a shard of another size is noticed at once
            found, errors = [], [error]
        assert errors
        assert not found
        assert all(re.search(r"a\.tar\.index: stale: .*; rebuild it with `tarindex`", str(error)) for error in errors)
    with pytest.raises(ShardIndexError):
        verify_index(appended)
    assert [outcome.shard.samples for outcome in refresh_indexes([appended])] == [len(list(read_samples(appended)))]
    assert len(IndexedShards(appended)) == len(list(read_samples(appended)))


def test_what_is_appended_is_noticed_by_who_takes_the_last_member_over_http(appended, tmp_path):
    with serving(tmp_path) as site:
        url = f"{site.url}/{appended}"
        for read in by_access, by_stream:
            found, errors = read(url)
            assert "stale" in str(errors[-1])
            assert "tarindex" in str(errors[-1])
            assert not {"2", "3"} & {key for key, _, _ in found}
        with IndexedShards(url, lazy="txt")[1]["txt"] as file, pytest.raises(ShardIndexError, match="tarindex"):
            file.read()


def test_members_of_no_sample_may_follow_the_last_sample(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("1.txt").write_text("text")
    os.makedirs("d/e")
    Path("README").write_bytes(b"r" * 70_000)
    tar("-cf", "a.tar", "1.txt", "d", "README")
    build_index("a.tar").save("a.tar")
    assert len(IndexedShards("a.tar")) == 1
    with serving(tmp_path) as site:
        assert IndexedShards(f"{site.url}/a.tar")[0]["txt"] == b"text"
        os.utime("d", (0, 0))
        tar("-rf", "a.tar", "d")
        with pytest.raises(ShardIndexError, match="members were appended"):
            IndexedShards(f"{site.url}/a.tar")[0]
    with pytest.raises(ShardIndexError, match="members were appended"):
        IndexedShards("a.tar")[0]


def test_a_shard_replaced_in_place_while_it_is_read_is_noticed(tmp_path):
    """A mapping shows what is written to its file; a header is compared each time that a sample is read."""
    path = tmp_path / "a.tar"
    write(path, [Entry(f"{i}.cls", b"%d" % i) for i in range(9)])
    build_index(str(path)).save(str(path))
    indexed = IndexedShards(str(path))
    assert [int(sample["cls"]) for sample in indexed] == list(range(9))
    write(tmp_path / "b.tar", [Entry(f"{i}.cls", b"%d" % i) for i in (0, 2, 1, 3, 4, 5, 6, 7, 8)])
    with open(path, "r+b") as file:
        file.write((tmp_path / "b.tar").read_bytes())
    found, errors = one_by_one(indexed)
    assert [(key, int(data)) for key, _, data in found] == [(str(i), i) for i in (0, 3, 4, 5, 6, 7, 8)]
    assert [error.key for error in errors] == ["1", "2"]


def test_a_damaged_header_costs_its_own_sample(tmp_path):
    path = tmp_path / "a.tar"
    write(path, [Entry(f"{i}.cls", b"%d" % i) for i in range(9)])
    index = build_index(str(path))
    index.save(str(path))
    data = bytearray(path.read_bytes())
    header = int(index.offset[4]) - 512
    data[header : header + 512] = os.urandom(512)
    path.write_bytes(data)
    found, errors = by_access(str(path))
    assert [int(data) for _, _, data in found] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert [str(error) for error in errors] == [
        f"{path}: offset {header}: 4.cls: stale index: it says 1 bytes, and here is no sound header; "
        "rebuild it with `tarindex`"
    ]


def test_a_stale_sample_of_a_joined_dataset_is_left_out(grown, tmp_path):
    other = str(tmp_path / "other.tar")
    write_samples([{"__key__": f"{i:04d}", "txt": "t"} for i in range(1000)], other)
    build_index(other).save(other)
    errors: list[Exception] = []
    stream = Stream.from_shards(other, index=True, on_error=errors.append).join(grown, fields="cls")
    assert [(sample["__key__"], int(sample["cls"])) for sample in stream] == RIGHT
    assert [error.key for error in errors] == CHANGED


def test_a_join_refuses_what_it_looks_up_in_a_stale_index(grown, tmp_path):
    other = str(tmp_path / "other.tar")
    write_samples([{"__key__": f"{i:04d}", "txt": "t"} for i in reversed(range(1000))], other)
    refused: list[TarshardsError] = []
    samples = join_shards([other, grown], reject=lambda sample, error: refused.append(error))
    assert sorted((sample["__key__"], int(sample["cls"])) for sample in samples) == RIGHT
    assert sorted(str(error.key) for error in refused) == CHANGED
    with pytest.raises(ShardIndexError, match=r"cls: stale index"):
        list(join_shards([other, grown]))


def test_a_search_by_keys_refuses_what_it_looks_up_in_a_stale_index(grown):
    errors: list[Exception] = []
    samples = list(KeyFilter(["0005", "0009"]).candidates(grown, on_error=errors.append))
    assert [sample["__key__"] for sample in samples] == ["0005"]
    assert [(type(error), error.key) for error in errors] == [(ShardIndexError, "0009")]
