"""Indexes of damaged shards: the samples that they read are those that reading past damage delivers."""

from __future__ import annotations

import io
import tarfile
from zlib import crc32

import numpy as np
import pytest
import range_server

from tarshards import Ledger, Stream, TarWriter
from tarshards.errors import SampleError, ShardIndexError, TarError
from tarshards.index.build import build_index
from tarshards.index.open import OpenShard
from tarshards.storage.location import Location


def shard(folder, *, samples=40):
    url = str(folder / "a.tar")
    with TarWriter(url) as writer:
        for number in range(samples):
            key = f"{number:03d}" + "long" * 40 * (number % 7 == 3)  # with an extended header
            writer.write(
                {"__key__": key, "txt": f"text {number} " * (number * 7 % 90), "cls": number, "raw": b"\0" * 700}
            )
    return url


def samples_of(url, index):
    """Return the samples that can be read, and the keys of the others."""
    opened = OpenShard(Location(url), index)
    found, refused = [], []
    for number in range(len(index)):
        try:
            found.append(opened.read(number))
        except SampleError as error:
            refused.append(error.key)
    return found, refused


def delivered(url, **how):
    return list(Stream.from_shards(url, on_damage="resync", on_error=Ledger(max_errors=1000), **how))


@pytest.mark.parametrize("seed", range(12))
def test_whole_samples_are_read_and_others_are_refused(tmp_path, seed):
    url = shard(tmp_path)
    rng = np.random.default_rng(seed)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    for _ in range(rng.integers(1, 5)):
        begin, size = int(rng.integers(len(data))), int(rng.choice([1, 300, 5000, 20_000]))
        data[begin : begin + size] = rng.integers(0, 256, len(data[begin : begin + size]), np.uint8).tobytes()
    (tmp_path / "a.tar").write_bytes(data[: len(data) - int(rng.choice([0, 100, 3000]))])
    index = build_index(url, on_damage="resync")
    found, refused = samples_of(url, index)
    assert found == delivered(url)
    assert len(refused) == len(index.faults) == len(index) - len(found)
    assert len(found) > 10
    ends = [gap.end for gap in index.gaps]
    assert ends == sorted(ends)
    with range_server.serving(tmp_path) as site:
        assert [each | {"__url__": url} for each in samples_of(f"{site.url}/a.tar", index)[0]] == found


def test_links_beside_damage_have_their_content(tmp_path):
    url = str(tmp_path / "a.tar")
    with tarfile.open(url, "w") as file:
        for number in range(9):
            for field in ("txt", "cls"):
                entry = tarfile.TarInfo(f"{number}.{field}")
                if field == "cls" and number % 3 == 2:
                    entry.type, entry.linkname = tarfile.LNKTYPE, f"{number - 1}.cls"
                    file.addfile(entry)
                    continue
                entry.size = 1
                file.addfile(entry, io.BytesIO(str(number).encode()))
    data = bytearray((tmp_path / "a.tar").read_bytes())
    with tarfile.open(url) as file:
        offset = file.getmember("3.txt").offset
    data[offset : offset + 200] = b"\xd0" * 200
    (tmp_path / "a.tar").write_bytes(data)
    found, refused = samples_of(url, build_index(url, on_damage="resync"))
    assert {each["__key__"]: each["cls"] for each in found} == {
        str(n): str(n - (n % 3 == 2)).encode() for n in range(9) if n != 3
    }
    assert refused == ["3"]
    assert found == delivered(url)


@pytest.mark.parametrize("concatenated", [False, True])
def test_an_end_between_archives_is_a_gap_unless_they_are_joined(tmp_path, concatenated):
    for name in "ab":
        with TarWriter(str(tmp_path / f"{name}.tar")) as writer:
            for number in range(3):
                writer.write({"__key__": f"{name}{number}", "txt": "text"})
    url = str(tmp_path / "joined.tar")
    (tmp_path / "joined.tar").write_bytes((tmp_path / "a.tar").read_bytes() + (tmp_path / "b.tar").read_bytes())
    index = build_index(url, on_damage="resync", concatenated=concatenated)
    assert len(index.gaps) == (not concatenated)
    assert [each["__key__"] for each in samples_of(url, index)[0]] == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_sound_shard_has_its_usual_index_and_a_damaged_one_is_not_saved(tmp_path):
    url = shard(tmp_path)
    assert build_index(url, on_damage="resync", crc=True) == build_index(url, crc=True)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    with tarfile.open(url) as file:
        offset = file.getmember("005.cls").offset
    data[offset : offset + 100] = b"\xd0" * 100
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(TarError):
        build_index(url)
    index = build_index(url, on_damage="resync", crc=True)
    assert [
        crc32(OpenShard(Location(url), index).take(member)) for member in range(index.members)
    ] == index.crc32.tolist()
    with pytest.raises(ShardIndexError, match="not saved; repair it with `tarcheck --repair`"):
        index.save(url)
    with pytest.raises(ValueError, match="on_damage"):
        build_index(url, on_damage="skip")


def test_a_file_without_members_has_no_samples(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no tar" * 1000)
    index = build_index(tmp_path / "a.tar", on_damage="resync")
    assert (len(index), index.gaps[0].start, index.gaps[-1].end) == (0, 0, 6000)
