"""Indexing many shards: only what is needed, every failure reported, the same by any number of processes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tarshards import read_samples, write_samples
from tarshards.errors import OpenError, ShardIndexError, TarError
from tarshards.index import refresh
from tarshards.index.build import build_index
from tarshards.index.exports import pack_dali
from tarshards.index.manifests import Writing
from tarshards.index.refresh import export_indexes, refresh_indexes, verify_indexes
from tarshards.index.sidecar import Index
from tarshards.storage import derived
from tarshards.storage.manifest import Shard


@pytest.fixture
def shards(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setattr(refresh, "MANY", 1)  # few as they are, by processes if asked
    urls = [str(tmp_path / f"a-{i}.tar") for i in range(8)]
    for i, url in enumerate(urls):
        write_samples([{"__key__": f"{i}-{j}", "bin": bytes(j * 100)} for j in range(i + 1)], url)
    return urls


def cut(url: str) -> None:
    os.truncate(url, build_index(url).end - 500)


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_only_what_is_missing_stale_or_damaged_is_made(shards, jobs):
    outcomes = list(refresh_indexes(shards, jobs=jobs))
    assert [(outcome.shard.url, outcome.shard.samples) for outcome in outcomes] == list(zip(shards, range(1, 9)))
    assert [outcome.shard.size for outcome in outcomes] == [os.path.getsize(url) for url in shards]
    assert [outcome.written for outcome in outcomes] == [f"{url}.index" for url in shards]
    os.unlink(f"{shards[1]}.index")
    Path(f"{shards[3]}.index").write_bytes(b"junk")
    write_samples([{"__key__": "new", "bin": b""}], shards[5])
    outcomes = list(refresh_indexes(shards, jobs=jobs))
    assert [i for i, outcome in enumerate(outcomes) if outcome.written] == [1, 3, 5]
    assert [Index.load(url) for url in shards] == [build_index(url) for url in shards]


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_failure_is_told_and_the_others_are_indexed(shards, jobs):
    cut(shards[2])
    os.unlink(shards[4])
    outcomes = list(refresh_indexes(shards, jobs=jobs))
    errors = {i: outcome.error for i, outcome in enumerate(outcomes) if outcome.error}
    assert {i: type(error) for i, error in errors.items()} == {2: TarError, 4: OpenError}
    assert "a-2.tar: offset" in str(errors[2])
    assert [os.path.exists(f"{url}.index") for url in shards] == [i not in errors for i in range(8)]


def test_checksums_are_added(shards):
    list(refresh_indexes(shards[:2]))
    assert [outcome.written is not None for outcome in refresh_indexes(shards[:2], crc=True)] == [True, True]
    assert [outcome.written for outcome in refresh_indexes(shards[:2], crc=True)] == [None, None]
    assert [outcome.written for outcome in refresh_indexes(shards[:2])] == [None, None]
    assert Index.load(shards[0]).crc32 is not None


def rewrite(url: str, change) -> None:
    """Write the samples of a shard again, under its index, as another program does."""
    index = Index.load(url)
    write_samples(change(list(read_samples(url))), url)
    index.save(url)


def grown(samples):
    """One member in the middle is longer, in the same block."""
    return [*samples[:2], {**samples[2], "bin": samples[2]["bin"] + b"1"}, *samples[3:]]


def reordered(samples):
    """Two members of the same size have been exchanged."""
    return [*samples[:3], samples[4], samples[3], *samples[5:]]


def renamed(samples):
    return [*samples[:3], {**samples[3], "__key__": "7-x"}, *samples[4:]]


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize(
    ("change", "what"),
    [(grown, "7-2.bin has changed"), (reordered, "7-3 has changed"), (renamed, "7-3 has changed")],
)
def test_a_change_in_the_middle_is_found_and_indexed(shards, change, what, crc):
    if change is reordered:
        write_samples(({"__key__": f"7-{j}", "bin": bytes(7)} for j in range(8)), shards[7])
    list(refresh_indexes(shards[7:], crc=crc))
    rewrite(shards[7], change)
    assert Index.load(shards[7]) != build_index(shards[7], crc=crc)  # it has the same size, first and last header
    for check in {False, crc}:
        (outcome,) = verify_indexes(shards[7:], crc=check)
        reason = f"stale: {what} since the shard was indexed; rebuild it with `tarindex`"
        assert str(outcome.error) == f"{shards[7]}.index: {reason}"
    (outcome,) = export_indexes(shards[7:], "dali")
    assert Path(outcome.written).read_text() == pack_dali(build_index(shards[7]), shards[7])
    assert [outcome.written for outcome in refresh_indexes(shards[7:])] == [f"{shards[7]}.index"]
    assert Index.load(shards[7]) == build_index(shards[7])  # old checksums are not kept
    assert [outcome.error for outcome in verify_indexes(shards[7:])] == [None]


def test_what_is_the_same_is_not_written_again(shards, tmp_path):
    list(refresh_indexes(shards, crc=True))
    before = [os.stat(f"{url}.index").st_ino for url in shards]
    for url in shards:
        shutil.copy(url, tmp_path / "copy")
        os.replace(tmp_path / "copy", url)
        os.utime(url)
    for crc in (False, True):
        assert [outcome.written for outcome in refresh_indexes(shards, crc=crc)] == [None] * 8
        assert [outcome.error for outcome in verify_indexes(shards, crc=crc)] == [None] * 8
    assert [os.stat(f"{url}.index").st_ino for url in shards] == before
    assert all(Index.load(url).crc32 is not None for url in shards)


@pytest.fixture
def read_anew(shards, monkeypatch):
    """Return a function that indexes the *shards* again, and returns those whose headers it reads.

    A shard counts as settled a tick after it was written.
    """
    monkeypatch.setattr(derived, "SETTLED", 20_000_000)
    read = []

    def build(shard, **options):
        read.append(shards.index(shard.url))
        return build_index(shard, **options)

    monkeypatch.setattr(refresh, "build_index", build)

    def read_anew(**options) -> list[int]:
        time.sleep(0.05)
        read.clear()
        assert [outcome.error for outcome in refresh_indexes(shards, **options)] == [None] * 8
        return read

    read_anew()
    return read_anew


def test_headers_are_read_once(shards, read_anew):
    before = [outcome.shard for outcome in refresh_indexes(shards, crc=True)]
    assert read_anew() == []
    outcomes = list(refresh_indexes(shards))
    assert [(outcome.shard, outcome.written, outcome.unchanged) for outcome in outcomes] == [
        (shard, None, True) for shard in before
    ]
    assert all(Index.load(url).crc32 is not None for url in shards)
    assert read_anew(crc=True) == list(range(8))


def overwritten(url: str) -> None:
    """Write into a member, and restore the time of the content."""
    status = os.stat(url)
    with open(url, "r+b") as file:
        file.seek(1024 + 10)
        file.write(b"x")
    os.utime(url, ns=(status.st_atime_ns, status.st_mtime_ns))


def copied(url: str) -> None:
    """Replace a shard and its index by copies with the same times."""
    for name in (url, f"{url}.index"):
        shutil.copy2(name, f"{url}.copy")
        os.replace(f"{url}.copy", name)


def reordered_by_another(url: str) -> None:
    write_samples(({"__key__": f"7-{j}", "bin": bytes(7)} for j in range(8)), url)
    build_index(url).save(url)
    rewrite(url, reordered)


def exchanged(url: str) -> None:
    """Put an index in the place that was written at another time."""
    shutil.copy(f"{url}.index", f"{url}.copy")
    os.replace(f"{url}.copy", f"{url}.index")


def coincident(url: str) -> None:
    """Give an index the time of the shard: both may be written in one tick."""
    time_of_change = os.stat(url).st_ctime_ns
    os.utime(f"{url}.index", ns=(time_of_change, time_of_change))


@pytest.mark.parametrize("change", [os.utime, overwritten, copied, reordered_by_another, exchanged, coincident])
def test_headers_are_read_again_after_any_change(shards, read_anew, change):
    change(shards[7])
    assert read_anew() == [7]
    assert Index.load(shards[7]) == build_index(shards[7])
    assert read_anew() == []


def test_headers_are_read_again_where_the_time_of_change_tells_nothing(shards, read_anew, monkeypatch):
    os.utime(shards[6], (2**32, 2**32))  # later than the last change: the file system may not keep that
    assert read_anew() == read_anew() == [6]
    monkeypatch.setattr(derived, "SETTLED", 2 * 10**9)  # the last change is not long ago
    assert read_anew() == list(range(8))


def test_options_read_headers_again(shards, read_anew):
    last = [Shard(url, split="last") for url in shards]
    assert [outcome.written for outcome in refresh_indexes(last)] == [f"{url}.index" for url in shards]
    assert read_anew() == []
    assert {Index.load(url).split for url in shards} == {"last"}
    os.utime(shards[2])
    assert read_anew(how=Writing(dry_run=True)) == read_anew(how=Writing(dry_run=True)) == [2]


def test_checksums_that_differ_are_written_again(shards):
    list(refresh_indexes(shards, crc=True))
    with open(shards[3], "r+b") as file:
        file.seek(1024 + 10)  # in the data of the second member
        file.write(b"x")
    assert [outcome.written for outcome in refresh_indexes(shards)] == [None] * 8
    outcomes = enumerate(refresh_indexes(shards, crc=True))
    assert [i for i, outcome in outcomes if outcome.written] == [3]
    assert Index.load(shards[3]) == build_index(shards[3], crc=True)


def test_dry(shards):
    assert all(outcome.written for outcome in refresh_indexes(shards, how=Writing(dry_run=True)))
    assert not any(os.path.exists(f"{url}.index") for url in shards)


def verify(shards, **options) -> dict[int, str]:
    outcomes = enumerate(verify_indexes(shards, **options))
    return {i: outcome.error.reason.partition(":")[0] for i, outcome in outcomes if outcome.error}


@pytest.mark.parametrize("jobs", [1, 2])
def test_verifying(shards, jobs):
    list(refresh_indexes(shards, crc=True))
    assert verify(shards, jobs=jobs) == verify(shards, jobs=jobs, crc=True) == {}
    os.unlink(f"{shards[0]}.index")
    cut(shards[6])
    with open(f"{shards[7]}.index", "r+b") as file:
        file.seek(100)
        file.write(b"x")
    expected = {0: "no index found; create one with `tarindex`", 6: "stale", 7: "damaged"}
    assert verify(shards, jobs=jobs) == expected


def test_changed_data_is_found_by_its_checksum(shards):
    list(refresh_indexes(shards, crc=True))
    with open(shards[3], "r+b") as file:
        file.seek(1024 + 10)  # in the data of the second member
        file.write(b"x")
    assert verify(shards) == {}
    (error,) = [outcome.error for outcome in verify_indexes(shards, crc=True) if outcome.error]
    assert (
        str(error)
        == f"{shards[3]}.index: stale: 3-1.bin has changed since the shard was indexed; rebuild it with `tarindex`"
    )
    list(refresh_indexes(shards[4:]))
    os.unlink(f"{shards[4]}.index")
    list(refresh_indexes(shards[4:5]))
    assert "has no checksums" in verify(shards[4:5], crc=True)[0]


def test_an_export_needs_no_index(shards, tmp_path):
    (tmp_path / "out").mkdir()
    outcomes = list(export_indexes(shards, "dali", folder=str(tmp_path / "out"), jobs=2))
    assert [outcome.written for outcome in outcomes] == [f"{tmp_path}/out/a-{i}.idx" for i in range(8)]
    assert not any(name.endswith(".index") for name in os.listdir(tmp_path))


def test_an_export_of_a_damaged_shard_is_its_error(shards):
    cut(shards[1])
    errors = [outcome.error for outcome in export_indexes(shards, "tar.idx") if outcome.error]
    assert [type(error) for error in errors] == [TarError]


def test_a_compressed_shard_is_refused(tmp_path):
    write_samples([{"__key__": "a", "txt": "b"}], str(tmp_path / "a.tar.gz"))
    (outcome,) = refresh_indexes([str(tmp_path / "a.tar.gz")])
    assert isinstance(outcome.error, ShardIndexError)
