"""Shards are complete or absent, and the same for the same samples."""

from __future__ import annotations

import gzip
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import need
from with_torch import ShardDataset

from tarshards import (
    IndexedShards,
    ShardWriter,
    Stream,
    TarWriter,
    expand_urls,
    map_shards,
    open_shard,
    read_samples,
    reshard,
    write_dataset,
    write_samples,
)
from tarshards.errors import EncodeError, OpenError, SampleError, visible
from tarshards.index.build import build_index
from tarshards.index.sidecar import Index
from tarshards.storage.expressions import Shard, find_shards
from tarshards.write.shards import shard_name
from tarshards.write.split import split_samples

SAMPLES = [{"__key__": f"k{i}", "cls": i, "txt": "x" * i} for i in range(10)]


def keys(path) -> list[str]:
    return [sample["__key__"] for sample in read_samples(path)]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst", "tgz"])
def test_what_is_written_is_read(tmp_path, suffix):
    target = str(tmp_path / f"a.{suffix}")
    assert write_samples(SAMPLES, target) == 10
    assert [(sample["__key__"], sample["txt"]) for sample in read_samples(target)] == [
        (sample["__key__"], sample["txt"].encode()) for sample in SAMPLES
    ]


class Sink:
    """A file that accepts a part of each write, as raw streams may."""

    def __init__(self):
        self.data, self.closed = b"", False

    def write(self, data) -> int:
        part = bytes(data[:1000])
        self.data += part
        return len(part)


@pytest.mark.parametrize("open_file", [io.BytesIO, Sink, lambda: io.FileIO("f.tar", "wb")])
def test_a_file_object_is_a_target_and_stays_open(tmp_path, monkeypatch, open_file):
    monkeypatch.chdir(tmp_path)
    write_samples(SAMPLES, "a.tar")
    file = open_file()
    with TarWriter(file) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    assert not file.closed
    names = {"a.tar"}
    if open_file is io.BytesIO:
        data = file.getvalue()
    elif open_file is Sink:
        data = file.data
    else:
        data, names = Path("f.tar").read_bytes(), {"a.tar", "f.tar"}
        file.close()
    assert data == Path("a.tar").read_bytes()
    assert {path.name for path in Path().iterdir()} == names


def test_a_file_object_gets_no_end_after_an_error():
    file = io.BytesIO()
    writer = TarWriter(file)
    writer.write(SAMPLES[0])
    writer.abort()
    assert len(file.getvalue()) == 3 * 512  # two headers, the data of one
    full = io.FileIO("/dev/full", "w")
    with full, pytest.raises(OpenError, match="/dev/full: No space left"):
        write_samples(SAMPLES, full)


def test_a_shard_writer_may_open_files_of_its_caller(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files: dict[str, io.BytesIO] = {}
    with ShardWriter(
        "a-%d.tar", max_samples=5, open_writer=lambda name: TarWriter(files.setdefault(name, io.BytesIO()))
    ) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    assert list(files) == ["a-0.tar", "a-1.tar"]
    assert os.listdir() == ["a.shards.json"]


@pytest.mark.parametrize("target", [3, None, b"a.tar", object(), {"a": 1}, io.StringIO()])
@pytest.mark.parametrize("writer", [TarWriter, lambda target: write_samples(SAMPLES, target)])
def test_another_target_is_refused(tmp_path, monkeypatch, writer, target):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError) as caught:
        writer(target)
    assert repr(target).partition(" at 0x")[0] in str(caught.value)
    assert " at 0x" not in str(caught.value)
    assert os.listdir() == []


def test_what_a_file_without_a_name_is_called():
    with TarWriter(io.BytesIO()) as writer:
        writer.write({"__key__": "a", "txt": "x"})
        with pytest.raises(SampleError, match=r"^a BytesIO: a: this key is already in the shard$"):
            writer.write({"__key__": "a", "txt": "x"})
    with pytest.raises(ValueError, match=r"^a BytesIO: closed, so nothing more can be written$"):
        writer.write({"__key__": "b", "txt": "x"})
    with pytest.raises(SampleError, match=r"needs a __key__ that is a str, not <_io.BytesIO object>$"):
        write_samples([{"__key__": io.BytesIO(), "txt": "x"}], io.BytesIO())
    with pytest.raises(TypeError, match=r"open for bytes, not text: <_io.StringIO object>$"):
        TarWriter(io.StringIO())
    with pytest.raises(TypeError, match=r"not BytesIO, an open file: group_members\(read_members\(file\)\) reads one$"):
        list(read_samples(io.BytesIO()))


@pytest.mark.parametrize(("key", "field"), [("a\ud800", "txt"), ("b", "t\udc00"), ("c" * 200 + "\ud800", "txt")])
def test_a_lone_surrogate_in_a_name(tmp_path, key, field):
    """Bytes that are not UTF-8 are surrogates too, and are written; no name has others."""
    told = r"a name with a lone surrogate, '\\ud[8c]00', which UTF-8 cannot encode$"
    with TarWriter(tmp_path / "a.tar") as writer:
        with pytest.raises(SampleError, match=rf"^{re.escape(visible(key))}: {told}"):
            writer.write({"__key__": key, field: b""})
        writer.write({"__key__": "caf\udce9", "txt": b""})
    build_index(tmp_path / "a.tar").save(str(tmp_path / "a.tar"))
    samples = IndexedShards(tmp_path / "a.tar")
    assert samples["caf\udce9"]["txt"] == b""
    with pytest.raises(KeyError):
        samples["a\ud800"]
    with pytest.raises(SampleError, match=r"^no sample has 2 of 2 keys: a\\ud800, b\\xe9$"):
        Stream.from_shards(tmp_path / "a.tar").select(keys=["a\ud800", "b\udce9"])


@pytest.mark.parametrize("target", [io.BytesIO(), 3])
def test_a_pattern_is_a_name(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    write_samples(SAMPLES, "a.tar")
    with ThreadPoolExecutor(1) as executor:
        for write in (
            lambda: ShardWriter(target),
            lambda: write_dataset(SAMPLES, target, executor=executor),
            lambda: reshard("a.tar", target, executor=executor),
            lambda: map_shards(iter, "a.tar", target, executor=executor),
            lambda: split_samples(SAMPLES, target),
        ):
            with pytest.raises(TypeError, match=f"not {type(target).__name__}"):
                write()
    assert os.listdir() == ["a.tar"]


def test_paths_are_names_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_samples(SAMPLES, Path("a.tar"))
    with ThreadPoolExecutor(1) as executor, ShardWriter(Path("s-%d.tar"), max_samples=5) as writer:
        for sample in SAMPLES:
            writer.write(sample)
        assert write_dataset(SAMPLES, Path("d-%d.tar"), executor=executor) == ["d-0.tar"]
        assert [shard.url for shard in reshard(Path("a.tar"), Path("r-%d.tar"), executor=executor)] == ["r-0.tar"]
        reports = map_shards(iter, [Path("a.tar")], Path("m-%d.tar"), executor=executor, progress=False)
        assert [report.output for report in reports] == ["m-0.tar"]
        assert [shard.name for shard in split_samples(SAMPLES, Path("t-%d.tar"))] == ["t-0.tar"]
    names = [Path("s-0.tar"), Path("s-1.tar")]
    assert keys(names) == keys(Path("a.tar")) == [sample["__key__"] for sample in SAMPLES]
    assert len(IndexedShards(names)) == len(list(Stream.from_shards(names))) == len(list(ShardDataset(names))) == 10


@pytest.mark.parametrize("source", [io.BytesIO(b"a.tar"), io.StringIO("a.tar\n"), b"a.tar", 3])
def test_an_open_file_is_no_shard_expression(source):
    for read in (Stream.from_shards, IndexedShards, ShardDataset, expand_urls):
        with pytest.raises(TypeError, match=f"not {type(source).__name__}"):
            read(source)
    with pytest.raises(TypeError, match=f"not {type(source).__name__}"):
        open_shard(source)


names = st.text(st.characters(exclude_characters="./\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(
    st.dictionaries(
        names.filter(lambda key: not (key.startswith("__") and key.endswith("__"))),
        st.dictionaries(names.map(str.lower).filter(lambda f: "__" not in f), st.binary(max_size=1500), min_size=1),
        max_size=5,
    )
)
@settings(max_examples=100)
def test_read_write_is_the_identity(tmp_path_factory, samples):
    target = str(tmp_path_factory.mktemp("law") / "a.tar")
    written = [
        {"__key__": key, **{f"x.{field}": value for field, value in fields.items()}} for key, fields in samples.items()
    ]
    write_samples(written, target)
    read = [{field: value for field, value in sample.items() if field != "__url__"} for sample in read_samples(target)]
    assert read == written


@pytest.mark.parametrize("program", [["tar", "-xf"], ["bsdtar", "-xf"]])
def test_others_read_what_we_write(tmp_path, program):
    need("GNU tar" if program[0] == "tar" else program[0])
    samples = [
        {"__key__": "d/short", "bin": b"1"},
        {"__key__": "d/" + "long" * 30, "bin": b"2" * 600},
        {"__key__": "d/" + "ünïcödé-数" * 5, "txt": "ü"},
        {"__key__": "d/" + "数" * 60, "bin": b""},
    ]
    write_samples(samples, str(tmp_path / "a.tar"))
    done = subprocess.run(
        [*program, "a.tar"], cwd=tmp_path, capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    for sample in samples:
        (field,) = sample.keys() - {"__key__"}
        value = sample[field]
        data = value.encode() if isinstance(value, str) else value
        assert (tmp_path / f"{sample['__key__']}.{field}").read_bytes() == data
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert len(tar.getmembers()) == 4


def test_same_samples_same_bytes(tmp_path):
    for name in ("a.tar.gz", "b.tar.gz"):
        samples = [dict(reversed(sample.items())) for sample in SAMPLES] if name[0] == "b" else SAMPLES
        write_samples(samples, str(tmp_path / name))
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


@pytest.mark.parametrize(
    ("sample", "error", "place"),
    [
        ({"__key__": "k0", "x": b""}, SampleError, "k0"),
        ({"__key__": "a.b", "x": b""}, SampleError, r"a\.b\.x"),
        ({"__key__": "n", "X": b""}, SampleError, r"n\.X"),
        ({"__key__": "n", "cls": 1.5}, EncodeError, r"n\.cls"),
        ({"__key__": "n", "nonsense": object()}, EncodeError, r"n\.nonsense"),
        ({"x": b""}, SampleError, "__key__"),
        ({"__key__": "n"}, SampleError, "n"),
    ],
)
def test_refused_samples_are_named_and_leave_the_rest_whole(tmp_path, sample, error, place):
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write(SAMPLES[0])
        with pytest.raises(error, match=place):
            writer.write(sample)
        writer.write(SAMPLES[1])
    assert keys(tmp_path / "a.tar") == ["k0", "k1"]


def test_an_exception_leaves_nothing(tmp_path):
    def interrupted():
        with TarWriter(str(tmp_path / "a.tar")) as writer:
            writer.write(SAMPLES[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_the_old_shard(tmp_path):
    write_samples(SAMPLES[:1], str(tmp_path / "a.tar"))
    with pytest.raises(EncodeError):
        write_samples([SAMPLES[1], {"__key__": "n", "x": object()}], str(tmp_path / "a.tar"))
    assert keys(tmp_path / "a.tar") == ["k0"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_nothing_has_its_name_before_the_end(tmp_path):
    writer = TarWriter(str(tmp_path / "a.tar"))
    writer.write(SAMPLES[0])
    assert not (tmp_path / "a.tar").exists()
    writer.close()
    writer.close()
    assert keys(tmp_path / "a.tar") == ["k0"]


def test_a_full_disk_leaves_nothing_half_written():
    with pytest.raises(OpenError, match="/dev/full"), TarWriter("/dev/full") as writer:
        writer.write({"__key__": "a", "bin": bytes(1 << 20)})


def test_killed_in_the_middle(tmp_path):
    program = f"""
from tarshards import ShardWriter
import os, signal
writer = ShardWriter({str(tmp_path)!r} + "/a-%06d.tar", max_samples=2)
for i in range(5):
    writer.write({{"__key__": str(i), "cls": i}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["a-000000.tar", "a-000001.tar"]
    assert keys(str(tmp_path / "a-{000000..000001}.tar")) == list("0123")


@pytest.mark.parametrize("pattern", ["a-{shard:03d}.tar", "a-%03d.tar"])
def test_max_samples(tmp_path, pattern):
    with ShardWriter(str(tmp_path / pattern), max_samples=4) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    assert [Path(shard).name for shard in writer.shards] == ["a-000.tar", "a-001.tar", "a-002.tar"]
    assert [len(keys(shard)) for shard in writer.shards] == [4, 4, 2]
    assert writer.samples == 10


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 12_000), max_size=12), name=st.sampled_from(["a.tar", "a.tar.gz", "a.tar.zst"]))
def test_an_archive_ends_with_a_whole_record(tmp_path_factory, sizes, name):
    """As do those of GNU tar and tarfile; only an archive without members is two blocks."""
    path, expected = tmp_path_factory.mktemp("a") / name, io.BytesIO()
    with TarWriter(path) as writer, tarfile.open(fileobj=expected, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for i, size in enumerate(sizes):
            writer.write({"__key__": f"{i:02d}", "bin": bytes(size)})
            info = tarfile.TarInfo(f"{i:02d}.bin")
            info.size = size
            archive.addfile(info, io.BytesIO(bytes(size)))
    with open_shard(path) as stream:
        data = b"".join(iter(lambda: stream.read(1 << 20), b""))
    assert writer.size == len(data) == (len(expected.getvalue()) if sizes else 1024)
    assert not any(data[writer.end :])
    assert writer.end == sum(512 + size + -size % 512 for size in sizes)


@pytest.mark.parametrize("max_bytes", [1, 2048, 10_239, 10_240, 19_456, 20_480, 30_000, 1 << 20])
def test_max_bytes_is_the_size_of_the_file(tmp_path, max_bytes):
    rng = random.Random(max_bytes)
    samples = [{"__key__": str(i), "bin": rng.randbytes(rng.randrange(3000))} for i in range(50)]
    with ShardWriter(str(tmp_path / "a-%03d.tar"), max_bytes=max_bytes) as writer:
        for sample in samples:
            writer.write(sample)
    sizes = [os.path.getsize(shard) for shard in writer.shards]
    counts = [len(keys(shard)) for shard in writer.shards]
    ends = [Index.load(shard).end for shard in writer.shards]
    assert sum(counts) == 50
    assert all(size <= max_bytes or count == 1 for size, count in zip(sizes, counts))
    # No shard could have taken the next one's first sample.
    firsts = [next(read_samples(shard)) for shard in writer.shards]
    for end, following in zip(ends, firsts[1:]):
        assert -(-(end + 512 + -(-len(following["bin"]) // 512) * 512 + 1024) // 10_240) * 10_240 > max_bytes


def test_no_samples_no_shard(tmp_path):
    with ShardWriter(str(tmp_path / "a-%03d.tar"), max_samples=4) as writer:
        pass
    assert writer.shards == []
    assert list(tmp_path.iterdir()) == []


def test_finished_shards_stay_when_a_later_one_fails(tmp_path):
    def write_some():
        with ShardWriter(str(tmp_path / "a-%03d.tar"), max_samples=4) as writer:
            for sample in [*SAMPLES[:6], {"__key__": "bad", "x": object()}]:
                writer.write(sample)

    with pytest.raises(EncodeError):
        write_some()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-000.tar", "a-000.tar.index"]


def test_start(tmp_path):
    with ShardWriter(str(tmp_path / "a-%03d.tar"), start=7) as writer:
        writer.write(SAMPLES[0])
    assert [Path(shard).name for shard in writer.shards] == ["a-007.tar"]


def shards_of(samples, **limits) -> list[int]:
    """The samples of each shard of a ShardWriter whose files come to nothing."""
    counts = []
    with ShardWriter(
        "a-%d.tar",
        index=False,
        open_writer=lambda name: TarWriter(os.devnull),
        on_finish=lambda name, writer: counts.append(writer.samples),
        **limits,
    ) as writer:
        for sample in samples:
            writer.write(sample)
    return counts


def test_a_shard_has_at_most_a_hundred_thousand_samples_unless_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbered = [{"__key__": f"{i}", "x": b""} for i in range(100_001)]
    assert shards_of(numbered) == [100_000, 1]
    monkeypatch.setitem(ShardWriter.__init__.__wrapped__.__kwdefaults__, "max_samples", 1000)
    assert shards_of(numbered[:1001]) == shards_of(numbered[:1001], max_bytes=10**9) == [1000, 1]
    assert shards_of(numbered[:1001], max_samples=None) == [1001]
    assert shards_of(numbered[:1001], max_samples=1001) == [1001]


def test_a_shard_has_at_most_3_gb_unless_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    field = bytes(100_000_000)
    large = [{"__key__": f"{i}", "x": field} for i in range(31)]
    assert shards_of(large) == [29, 2]
    assert shards_of(large, max_samples=31) == [29, 2]
    assert shards_of(large, max_bytes=None) == [31]


def test_the_limits_of_a_dataset_are_its_own(tmp_path, monkeypatch):
    monkeypatch.setitem(ShardWriter.__init__.__wrapped__.__kwdefaults__, "max_samples", 2)
    with ThreadPoolExecutor(1) as executor:
        assert len(write_dataset(SAMPLES, tmp_path / "a-%d.tar", executor=executor)) == 1
    assert len(split_samples(SAMPLES, str(tmp_path / "b-%d.tar"))) == 1


@pytest.mark.parametrize("arguments", [{"max_samples": 0}, {"max_bytes": 0}])
def test_bad_limits(arguments):
    with pytest.raises(ValueError, match="max_"):
        ShardWriter("a-%03d.tar", **arguments)


def test_a_pattern_needs_a_number():
    with pytest.raises(ValueError, match="shard number"):
        ShardWriter("a.tar")


def test_shard_names():
    assert shard_name("a-{shard}.tar", 3) == "a-3.tar"
    assert shard_name("{shard:02d}/%%-{other}", 3) == "03/%%-{other}"


def test_values_in_names_are_taken_as_they_are():
    assert shard_name("{x.y}-{shard:02d}-%d-{z}", 3, {"x.y": "%d{shard}"}) == "%d{shard}-03-3-{z}"


def test_finished_shards_are_told_and_opened_as_asked(tmp_path):
    told = []

    def open_elsewhere(name):
        return TarWriter(f"{tmp_path}/other-{name}")

    def finished(name, writer):
        assert (tmp_path / f"other-{name}").exists()
        told.append((name, writer.samples))

    options = {"values": {"cls": "7"}, "open_writer": open_elsewhere, "on_finish": finished, "index": False}
    with ShardWriter("{cls}-%d.tar", max_samples=4, **options) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    assert told == [("7-0.tar", 4), ("7-1.tar", 4), ("7-2.tar", 2)]
    assert writer.shards == [name for name, _ in told]


def test_compressed_is_deterministic_and_plain_inside(tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    write_samples(SAMPLES, str(tmp_path / "a.tar.gz"))
    assert gzip.decompress((tmp_path / "a.tar.gz").read_bytes()) == (tmp_path / "a.tar").read_bytes()


def test_values_are_encoded_by_their_field(tmp_path):
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    write_samples([{"__key__": "a", "png": image, "json": {"a": [1]}, "npy": image}], str(tmp_path / "a.tar"))
    from tarshards import Stream

    (sample,) = Stream.from_shards(tmp_path / "a.tar").decode("rgb8")
    assert (sample["png"] == image).all()
    assert (sample["npy"] == image).all()
    assert sample["json"] == {"a": [1]}


def write_shards(pattern, samples, **options) -> list[str]:
    with ShardWriter(str(pattern), max_samples=4, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return writer.shards


@given(
    st.lists(
        st.tuples(st.sampled_from(["d/", "", "n" * 120, "é"]), st.lists(st.integers(0, 2000), min_size=1, max_size=3)),
        min_size=1,
        max_size=9,
    )
)
@settings(max_examples=50)
def test_indexes_are_those_that_reading_the_shards_gives(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("law")
    samples = [
        {"__key__": f"{start}{i}", **{f"f{j}.bin": bytes(size) for j, size in enumerate(sizes)}}
        for i, (start, sizes) in enumerate(content)
    ]
    for shard in write_shards(folder / "a-%03d.tar", samples):
        assert Path(f"{shard}.index").read_bytes() == build_index(shard).pack()
    shutil.rmtree(folder)


def test_the_manifest_names_the_shards_with_their_samples_and_bytes(tmp_path):
    shards = write_shards(tmp_path / "train-{shard:06d}.tar", SAMPLES)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*(f"train-00000{i}.tar{suffix}" for i in range(3) for suffix in ("", ".index")), "train.shards.json"]
    )
    expected = [Index.load(shard).shard(shard) for shard in shards]
    assert [each[1:3] for each in expected] == [(n, os.path.getsize(shard)) for n, shard in zip((4, 4, 2), shards)]
    assert find_shards(tmp_path / "train.shards.json") == expected
    assert keys(tmp_path / "train.shards.json") == [sample["__key__"] for sample in SAMPLES]


def test_without_index(tmp_path):
    write_shards(tmp_path / "a-%03d.tar", SAMPLES, index=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-000.tar", "a-001.tar", "a-002.tar"]


def test_compressed_shards_stand_in_the_manifest_alone(tmp_path):
    shards = write_shards(tmp_path / "a-%03d.tar.gz", SAMPLES)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(Path(s).name for s in shards), "a.shards.json"]
    assert find_shards(tmp_path / "a.shards.json") == [Shard(s, n, None) for s, n in zip(shards, (4, 4, 2))]


def test_pipes_get_neither(tmp_path):
    write_shards(f"pipe:cat > {tmp_path}/a-%03d.tar", SAMPLES, allow_pipe=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-000.tar", "a-001.tar", "a-002.tar"]


def test_remote_shards_get_both():
    import fsspec

    shards = write_shards("memory://writer/a-%03d.tar", SAMPLES)
    assert [len(index) for index in map(Index.load, shards)] == [4, 4, 2]
    assert [shard[:2] for shard in find_shards("memory://writer/a.shards.json")] == list(zip(shards, (4, 4, 2)))
    fsspec.filesystem("memory").rm("/writer", recursive=True)


def test_a_later_run_adds_to_the_manifest(tmp_path):
    first = write_shards(tmp_path / "a-%03d.tar", SAMPLES)
    later = [{**sample, "__key__": f"later{i}"} for i, sample in enumerate(SAMPLES)]
    second = write_shards(tmp_path / "a-%03d.tar", later, start=3)
    assert [Path(shard).name for shard in second] == ["a-003.tar", "a-004.tar", "a-005.tar"]
    assert [shard.url for shard in find_shards(tmp_path / "a.shards.json")] == first + second
    Path(first[1]).unlink()
    write_shards(tmp_path / "a-%03d.tar", later[:1], start=1)
    assert [shard[1] for shard in find_shards(tmp_path / "a.shards.json")] == [4, 1, 2, 4, 4, 2]


@pytest.mark.parametrize("folder", ["{tmp_path}", "memory://later"])
def test_a_later_run_replaces_no_shard(tmp_path, memory, folder):
    pattern = f"{folder.format(tmp_path=tmp_path)}/a-%03d.tar"
    first = write_shards(pattern, SAMPLES)
    with pytest.raises(OpenError, match=r"a-002\.tar: the shard exists, and a writer with start= replaces none"):
        write_shards(pattern, SAMPLES[:5], start=2)
    assert [len(list(read_samples(shard))) for shard in first] == [4, 4, 2]
    assert find_shards(f"{folder.format(tmp_path=tmp_path)}/a.shards.json")[2].samples == 2


def test_a_new_run_begins_the_manifest_anew(tmp_path):
    write_shards(tmp_path / "a-%03d.tar", SAMPLES)
    (shard,) = write_shards(tmp_path / "a-%03d.tar", SAMPLES[:3])
    assert find_shards(tmp_path / "a.shards.json") == [Index.load(shard).shard(shard)]


def killed(tmp_path, samples: int, start: int = 0) -> None:
    program = f"""
from tarshards import ShardWriter
import os, signal
writer = ShardWriter({str(tmp_path)!r} + "/a-%03d.tar", max_samples=2, start={start})
for i in range({samples}):
    writer.write({{"__key__": f"{start}-{{i}}", "cls": i}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9


def test_a_run_that_is_killed_leaves_indexes_and_no_manifest(tmp_path):
    """Neither its own, which would lack shards, nor an earlier one, whose shards are others now."""
    killed(tmp_path, samples=5)
    left = ["a-000.tar", "a-000.tar.index", "a-001.tar", "a-001.tar.index"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == left
    write_shards(tmp_path / "a-%03d.tar", SAMPLES)
    assert (tmp_path / "a.shards.json").exists()
    killed(tmp_path, samples=5)
    assert not (tmp_path / "a.shards.json").exists()


def test_a_run_after_one_that_was_killed_takes_in_what_that_left(tmp_path):
    write_shards(tmp_path / "a-%03d.tar", SAMPLES[:4])
    killed(tmp_path, samples=5, start=1)
    write_shards(tmp_path / "a-%03d.tar", SAMPLES[:1], start=3)
    shards = find_shards(tmp_path / "a.shards.json")
    assert [(Path(shard.url).name, shard.samples) for shard in shards] == [
        ("a-000.tar", 4),
        ("a-001.tar", 2),
        ("a-002.tar", 2),
        ("a-003.tar", 1),
    ]


@pytest.mark.parametrize(
    ("pattern", "manifest"),
    [
        ("train-{shard:06d}.tar", "train.shards.json"),
        ("train_%06d.tar.zst", "train.shards.json"),
        ("%06d.tar", "shards.json"),
        ("a/b.v2-%d.tar", "a/b.v2.shards.json"),
        ("train-{shard}-jpg.tar", "train-jpg.shards.json"),
        ("{shard:02d}/part-{shard:04d}.tgz", "part.shards.json"),
        ("d/part{shard:02d}/x.tar", "d/part-x.shards.json"),
        ("{split}-%d.tar", "val.shards.json"),
        ("file:a-%d.tar", "file:a.shards.json"),
        ("http://h/a-%d.tar?key=%20", "http://h/a.shards.json?key=%20"),
    ],
)
def test_where_the_manifest_is(pattern, manifest):
    assert ShardWriter(pattern, values={"split": "val"})._manifest() == manifest


def sums(pattern: str) -> list[str | None]:
    return [shard.sha256 for shard in find_shards(pattern)]


def sha256sum(*paths: str) -> list[str]:
    """The checksum of coreutils."""
    done = subprocess.run(["sha256sum", *paths], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines()]


def test_a_writer_hashes_what_it_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ShardWriter("a-{shard:d}.tar", max_samples=4, sha256=True) as writer:
        for sample in [*SAMPLES, {"__key__": "large", "bin": b"x" * 200_000}]:
            writer.write(sample)
    assert sums("a.shards.json") == sha256sum(*writer.shards)
    with ShardWriter("b-{shard:d}.tar.gz", sha256=True) as writer:
        writer.write(SAMPLES[0])
    assert sums("b.shards.json") == [None]
    with ShardWriter("c-{shard:d}.tar") as writer:
        writer.write(SAMPLES[0])
    assert sums("c.shards.json") == [None]
    with ShardWriter("c-{shard:d}.tar", start=1, sha256=True) as writer:
        writer.write(SAMPLES[1])
    assert sums("c.shards.json") == sha256sum("c-0.tar", "c-1.tar")


def test_a_dataset_is_hashed_in_an_interrupted_run_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def samples(count):
        yield from SAMPLES[:count]
        if count < len(SAMPLES):
            raise KeyboardInterrupt

    class Dataset:
        def __init__(self):
            self.count = 7

        def __iter__(self):
            return samples(self.count)

    dataset = Dataset()
    options = {"max_bytes": 5120, "sha256": True}
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(KeyboardInterrupt):
            write_dataset(dataset, "d-{shard:d}.tar", executor=executor, **options)
        dataset.count = 10
        shards = write_dataset(dataset, "d-{shard:d}.tar", executor=executor, **options)
    assert len(shards) > 3
    assert sums("d.shards.json") == sha256sum(*shards)


def test_tarindex_keeps_the_checksums_of_unchanged_shards(tmp_path, monkeypatch, path_with_tools):
    monkeypatch.chdir(tmp_path)
    with ShardWriter("a-{shard:d}.tar", max_samples=4, sha256=True) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    before = sums("a.shards.json")
    for spec in ("a-{0..2}.tar", "a.shards.json"):
        subprocess.run(["tarindex", spec], check=True, env={**os.environ, "PATH": path_with_tools})
        assert sums("a.shards.json") == before
    write_samples(SAMPLES[:1], "other.tar")
    os.replace("other.tar", "a-1.tar")
    subprocess.run(["tarindex", "a-{0..2}.tar"], check=True, env={**os.environ, "PATH": path_with_tools})
    assert sums("a.shards.json") == [before[0], None, before[2]]
