"""A hole of zeros in a shard, at every page: no reader delivers fewer samples without an error.

Zeros up to the end of a shard are the one exception: they look like the padding that `tar -b` writes. Then all members
before them are delivered, and an index, a manifest or `tarcheck` shows the loss.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
from soak import SOAK
from with_torch import ShardDataset

from tarshards import IndexedShards, Ledger, Stream, TarWriter, read_samples
from tarshards.cli import tarcat, tarindex, tarproc
from tarshards.errors import SampleError, TarshardsError
from tarshards.index.build import build_index
from tarshards.index.manifests import write_manifest
from tarshards.index.sidecar import Index
from tarshards.samples.grouping import group_members
from tarshards.storage.expressions import find_shards
from tarshards.storage.manifest import Shard as ListedShard
from tarshards.tar import read
from tarshards.tar.read import BLOCK, END, MAX_END, pack_header, padding
from tarshards.verbs.cat import interleave, read_parallel
from tarshards.verbs.check import check_shards

PAGE = 4096
HOLES = [BLOCK, PAGE, 3 * PAGE]
#: Samples of a shard, and the bytes of their member .bin; .cls is small.
SHARDS = [(40, 1 << 10), (25, 2 << 10), (3, 110_000)]


def fill(size: int, kind: str) -> bytes:
    return bytes(size) if kind == "zeros" else (bytes(range(1, 256)) * (size // 255 + 1))[:size]


class Shard:
    """A sound shard: its bytes, samples as pairs of key and fields, and the offsets of its members."""

    def __init__(self, count: int, size: int, kind: str):
        members = [
            (f"{i:04d}.{field}", data)
            for i in range(count)
            for field, data in (("bin", fill(size, kind)), ("cls", b"7"))
        ]
        packed = [pack_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in members]
        self.data = b"".join(packed) + END
        self.samples = [(f"{i:04d}", ("bin", "cls")) for i in range(count)]
        self.members = [name for name, _ in members]
        self.offsets = [0]
        for each in packed:
            self.offsets.append(self.offsets[-1] + len(each))

    def holed(self, start: int, size: int) -> bytes:
        """Return the shard with up to *size* bytes from *start* overwritten with zeros."""
        return self.data[:start] + bytes(min(size, len(self.data) - start)) + self.data[start + size :]

    def left(self, data: bytes) -> int | None:
        """How many members are before the zeros that reach to the end of *data*; None if all are there, or no zeros.

        A member is lost to such zeros if they begin before it does.
        """
        zeros_from = len(data.rstrip(b"\0"))
        count = sum(offset < zeros_from for offset in self.offsets[:-1])
        return count if count < len(self.members) else None


def summary(samples) -> list[tuple[str, tuple[str, ...]]]:
    return [(s["__key__"], tuple(name for name in s if name[:2] != "__")) for s in samples]


def by_members(url: str):
    return group_members(read.read_members(BytesIO(Path(url).read_bytes()), url=url))


def by_tarcat(url: str):
    out = f"{url}.out"
    with suppress(FileNotFoundError):
        os.unlink(out)
    try:
        tarcat.main.main(["-q", url, "-o", out], standalone_mode=False)
    except BaseException:
        assert not os.path.exists(out)
        raise
    return read_samples(out)


def by_index(url: str):
    """Let tarindex index the shard; it writes no index of a damaged one."""
    with suppress(SystemExit):
        tarindex.main.main(["-q", "--no-manifest", url], standalone_mode=False)
    if not os.path.exists(f"{url}.index"):
        raise TarshardsError("not indexed")
    samples = list(IndexedShards(url))
    os.unlink(f"{url}.index")
    return samples


def by_check(url: str):
    """Samples as tarcheck counts them, or its errors."""
    seen = []
    report = check_shards([url], on_survey=lambda file, survey: seen.extend(survey.samples))
    if report.total("error"):
        raise TarshardsError("errors")
    assert report.samples == len(seen)
    return [{"__key__": found.key, **{name: b"" for name, _, _ in found.members}} for found in seen]


READERS = {
    "members": by_members,
    "read_samples": read_samples,
    "Stream": lambda url: Stream.from_shards(url, index=False),
    "ShardDataset": lambda url: ShardDataset(url, index=False),
    "interleave": lambda url: interleave(url, 2),
    "read_parallel": lambda url: read_parallel(url, readers=1),
    "build_index": lambda url: [{"__key__": key} for key in build_index(url).keys],
    "tarcat": by_tarcat,
    "tarindex": by_index,
    "tarcheck": by_check,
}


def assert_nothing_is_lost(shard: Shard, data: bytes, url: Path, name: str) -> str:
    """Read *data* in one way; return the outcome."""
    url.write_bytes(data)
    try:
        found = summary(READERS[name](str(url)))
    except TarshardsError:
        return "error"
    wanted = [(key, ()) for key, _ in shard.samples] if name == "build_index" else shard.samples
    if found == wanted:
        return "all"
    left = shard.left(data)
    assert left is not None, "fewer samples without an error"
    assert 0 < len(data) - shard.offsets[left] <= MAX_END
    before: dict[str, list[str]] = {}
    for member in shard.members[:left]:
        key, field = member.split(".")
        before.setdefault(key, []).append(field)
    assert found == [(key, () if name == "build_index" else tuple(fields)) for key, fields in before.items()]
    return "end"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["text", "zeros"])
@pytest.mark.parametrize(("count", "size"), SHARDS)
def test_a_hole_at_every_block_is_told_or_costs_no_sample(tmp_path, count, size, kind):
    shard, url = Shard(count, size, kind), tmp_path / "a.tar"
    seen = set()
    for number, hole in enumerate(HOLES):
        for start in range(0, len(shard.data), BLOCK):
            if SOAK == 1 and start // BLOCK % len(HOLES) != number:
                continue  # a hole of one of the sizes begins at each block
            data = shard.holed(start, hole)
            headers = sum(start <= offset < start + hole for offset in shard.offsets[:-1])
            came = assert_nothing_is_lost(shard, data, url, "members")
            assert (came == "all") == (headers == 0 or data == shard.data), (start, hole)
            seen.add(came)
    assert {"all", "error", "end"} >= seen >= {"all", "error"}


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["text", "zeros"])
@pytest.mark.parametrize(("count", "size"), SHARDS)
@pytest.mark.parametrize("name", list(READERS)[1:])
def test_no_reader_passes_over_a_hole_at_any_page(tmp_path, name, count, size, kind):
    shard, url = Shard(count, size, kind), tmp_path / "a.tar"
    for number, hole in enumerate(HOLES):
        for start in range(0, len(shard.data), PAGE):
            if SOAK == 1 and start // PAGE % len(HOLES) != number:
                continue
            data = shard.holed(start, hole)
            came = assert_nothing_is_lost(shard, data, url, name)
            if data == shard.data or not any(start <= offset < start + hole for offset in shard.offsets[:-1]):
                assert came == "all"


@pytest.mark.parametrize("where", ["first", "middle", "before the last"])
def test_tarproc_stops_at_a_hole(tmp_path, where):
    shard, url = Shard(8, 2000, "text"), tmp_path / "a.tar"
    place = shard.offsets[{"first": 0, "middle": 7, "before the last": 14}[where]]
    url.write_bytes(shard.holed(place, shard.offsets[1]))
    with pytest.raises((TarshardsError, SystemExit)):
        tarproc.main.main(["-q", "-c", "true", str(url), "-o", str(tmp_path / "out.tar")], standalone_mode=False)
    assert not (tmp_path / "out.tar").exists()


@pytest.mark.soak
@pytest.mark.parametrize(("count", "size"), SHARDS)
def test_resyncing_reads_on_behind_a_hole_and_tells_of_it(tmp_path, count, size):
    shard, url = Shard(count, size, "text"), tmp_path / "a.tar"
    for number, hole in enumerate(HOLES):
        for start in range(0, len(shard.data) - len(END) - hole, PAGE):
            if SOAK == 1 and start // PAGE % len(HOLES) != number:
                continue
            url.write_bytes(shard.holed(start, hole))
            ledger = Ledger(max_errors=float("inf"))
            found = summary(read_samples(str(url), on_error=ledger, on_damage="resync"))
            assert set(found) <= set(shard.samples)
            hit = [offset for offset in shard.offsets[:-1] if start <= offset < start + hole]
            if hit:
                assert ledger.quarantined
                assert len(found) >= count - 4 - hole // (2 * BLOCK + size)


def test_what_an_index_and_a_manifest_tell_of_zeros_at_the_end(tmp_path):
    """The limit: only readers that know the number of samples detect a zeroed end that looks like padding."""
    shard, url = Shard(10, 1000, "text"), tmp_path / "a.tar"
    url.write_bytes(shard.data)
    index, manifest = build_index(str(url)), str(tmp_path / "a.shards.json")
    write_manifest(manifest, [index.shard(str(url))])
    index.save(str(url))
    url.write_bytes(shard.holed(shard.offsets[14], len(shard.data)))
    assert summary(read_samples(str(url))) == shard.samples[:7]
    with pytest.raises(TarshardsError, match="7 samples, but 10 in the manifest; check the shard"):
        list(read_samples(manifest))
    for options in {}, {"index": False}:
        with pytest.raises(TarshardsError, match=r"7 samples, but 10 in the manifest|stale"):
            list(Stream.from_shards(manifest, **options))
    ledger = Ledger(max_errors=9)
    assert len(list(read_samples(manifest, on_error=ledger, on_damage="resync"))) == 7
    assert len(ledger.quarantined) == 1
    with pytest.raises(TarshardsError, match="stale"):
        Index.load(str(url))
    assert check_shards([str(url)]).total("error") >= 1  # the index is stale, and the zeros are not as long as tar's


def test_only_the_word_lets_a_hole_pass(tmp_path):
    shard, url = Shard(10, 1000, "text"), tmp_path / "a.tar"
    url.write_bytes(shard.holed(shard.offsets[2], shard.offsets[6] - shard.offsets[2]))
    ledger = Ledger()
    found = summary(read_samples(str(url), on_error=ledger, concatenated=True))
    assert found == shard.samples[:1] + shard.samples[3:]
    assert (ledger.joined, "joined           1 archives" in str(ledger)) == (1, True)
    manifest = str(tmp_path / "a.shards.json")
    write_manifest(manifest, [ListedShard(str(url), concatenated=True)])
    readers = {
        "read_samples": read_samples,
        "Stream": partial(Stream.from_shards, index=False),
        "ShardDataset": partial(ShardDataset, index=False),
        "interleave": lambda url, **marks: interleave(find_shards(url, **marks), width=2),
        "read_parallel": lambda url, **marks: read_parallel(find_shards(url, **marks)),
    }
    for name, reader in readers.items():
        assert summary(reader(str(url), concatenated=True)) == found, name
        assert summary(reader(manifest)) == found, name
        with pytest.raises(TarshardsError, match=r"--ignore-zeros` \(concatenated=True\)"):
            list(reader(str(url)))


def test_a_writer_s_shard_of_no_samples_is_no_shard_of_zeros(tmp_path, caplog):
    with TarWriter(str(tmp_path / "a.tar")):
        pass
    assert (tmp_path / "a.tar").stat().st_size == len(END)
    for name, reader in READERS.items():
        if name in ("Stream", "ShardDataset", "tarcat"):  # which read whole datasets
            with pytest.raises(SampleError, match="no samples in"):
                list(reader(str(tmp_path / "a.tar")))
        elif name != "tarcheck":
            assert summary(reader(str(tmp_path / "a.tar"))) == []
    assert not caplog.records
    (tmp_path / "a.tar").write_bytes(bytes(1 << 20))
    for name, reader in READERS.items():
        with pytest.raises(TarshardsError):
            assert list(reader(str(tmp_path / "a.tar"))) == name
    (tmp_path / "a.tar").write_bytes(bytes(10240))  # GNU tar's archive without members, or a shard that was overwritten
    words = "a.tar: only zeros, 10240 bytes: an archive without members, or a shard that was overwritten"
    for name, reader in READERS.items():
        caplog.clear()
        with suppress(SampleError):
            if name != "tarcheck":  # which says that there are no samples
                assert list(reader(str(tmp_path / "a.tar"))) == []
                assert words in caplog.text or name in ("tarcat", "tarindex"), name
