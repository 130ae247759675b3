"""Members as files: any reader of files accepts them, and only requested bytes are read."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import re
import subprocess
import sys
import tarfile
import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline import Inline
from PIL import Image
from range_server import serving

from tarshards import IndexedShards, MemberFile, Remote, ShardWriter, Stream, build_index, read_samples
from tarshards.errors import EncodeError, OpenError, SampleError, ShardIndexError, TarError
from tarshards.samples import member_file
from tarshards.storage import tuning
from tarshards.write.map import map_shards
from tarshards.write.shards import TarWriter, write_samples

DATA = random.Random(1).randbytes(700_000)


@pytest.fixture
def site(tmp_path):
    with serving(tmp_path) as site:
        yield site


def write_shard(folder: Path, *values: bytes, index: bool = True) -> str:
    with ShardWriter(f"{folder}/set-%d.tar", index=index) as writer:
        for number, value in enumerate(values):
            writer.write({"__key__": f"k{number}", "bin": value, "txt": b"%d" % number})
    return f"{folder}/set-0.tar"


@pytest.fixture
def shard(tmp_path) -> str:
    return write_shard(tmp_path, DATA, b"small", b"")


def lazy_samples(url: str, how: str) -> list[dict]:
    if how == "read_samples":
        return list(read_samples(url, lazy="bin"))
    return list(Stream.from_shards(url, lazy="bin", index=how == "planned"))


@pytest.fixture
def one_request_each(monkeypatch):
    """No part of a request is asked for again on a machine so loaded that it is late."""
    monkeypatch.setattr(tuning, "LATE_SECONDS", 600.0)


@pytest.fixture(params=["indexed", "planned", "stream", "read_samples"])
def how(request):
    return request.param


@pytest.fixture(params=["local", "remote"])
def place(request):
    return request.param


@pytest.fixture(params=["local", "remote", "store"])
def samples(request, shard, site, memory, how):
    for name in ("set-0.tar", "set-0.tar.index"):
        memory.pipe(f"/{name}", Path(shard).with_name(name).read_bytes())
    url = {"local": shard, "remote": f"{site.url}/set-0.tar", "store": "memory://set-0.tar"}[request.param]
    return IndexedShards(url, lazy="bin") if how == "indexed" else lazy_samples(url, how)


# What it reads.


def test_a_lazy_field_is_a_file_of_the_same_bytes_whatever_its_size(samples):
    files = [sample["bin"] for sample in samples]
    assert [type(file) for file in files] == [MemberFile] * 3
    assert [file.read() for file in files] == [DATA, b"small", b""]
    assert [bytes(file) for file in files] == [DATA, b"small", b""]
    assert [file.size for file in files] == [len(file) for file in files] == [700_000, 5, 0]
    assert [file.name for file in files] == ["k0.bin", "k1.bin", "k2.bin"]
    assert [sample["txt"] for sample in samples] == [b"0", b"1", b"2"]


STEPS = st.one_of(
    st.tuples(st.just("read"), st.integers(-1, 300_000)),
    st.tuples(st.just("read1"), st.integers(0, 300_000)),
    st.tuples(st.just("readinto"), st.integers(0, 300_000)),
    st.tuples(st.just("start"), st.integers(0, 800_000)),
    st.tuples(st.just("move"), st.integers(0, 400_000)),
    st.tuples(st.just("end"), st.integers(-700_000, 10)),
    st.tuples(st.just("copy"), st.just(0)),
)


def take(file, step: str, number: int):
    if step in ("read", "read1"):
        return getattr(file, step)(number), file.tell()
    if step == "readinto":
        buffer = bytearray(number)
        return file.readinto(buffer), buffer, file.tell()
    if step == "copy":
        return file.tell()
    return file.seek(number, {"start": 0, "move": 1, "end": 2}[step])


@pytest.mark.parametrize("place", ["local", "remote"])
def test_it_reads_and_seeks_as_a_file_in_memory_does(tmp_path_factory, place):
    folder = tmp_path_factory.mktemp("law")
    url = write_shard(folder, b"before", DATA)

    @settings(deadline=None)
    @given(st.lists(STEPS, max_size=12))
    def law(steps):
        file, model = IndexedShards(url, lazy="bin")[1]["bin"], io.BytesIO(DATA)
        for step, number in steps:
            if step == "copy":
                file = pickle.loads(pickle.dumps(file))
            assert take(file, step, number) == take(model, step, number)
        assert sum(len(piece.data) for piece in file._held) <= member_file.HELD

    if place == "local":
        law()
        return
    with serving(folder) as site:
        url = f"{site.url}/set-0.tar"
        law()


@pytest.mark.parametrize("how", ["indexed", "stream"])
def test_offsets_and_sizes_are_any_integers_as_those_of_a_file_are(shard, how):
    file = IndexedShards(shard, lazy="bin")[0]["bin"] if how == "indexed" else lazy_samples(shard, how)[0]["bin"]
    assert file.seek(np.int64(100)) == 100
    assert file.read(np.int64(1000)) == DATA[100:1100]
    assert file.read(np.uint16(7)) == DATA[1100:1107]
    for call in file.seek, file.read:
        with pytest.raises(TypeError):
            call(1.5)


def test_other_readers_of_files_take_it(tmp_path):
    array, picture, packed, sound = np.arange(50_000).reshape(2, -1), io.BytesIO(), io.BytesIO(), io.BytesIO()
    Image.new("RGB", (300, 200), "red").save(picture, "PNG")
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", b"seven" * 50_000)
    with wave.open(sound, "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        out.writeframes(bytes(100_000))
    npy = io.BytesIO()
    np.save(npy, array)
    with TarWriter(tmp_path / "a.tar") as writer:
        fields = {"npy": npy, "png": picture, "zip": packed, "wav": sound, "txt": io.BytesIO(b"one\ntwo\n")}
        writer.write({"__key__": "a", **{name: stream.getvalue() for name, stream in fields.items()}})
    build_index(tmp_path / "a.tar").save(str(tmp_path / "a.tar"))
    (sample,) = IndexedShards(str(tmp_path / "a.tar"), lazy="npy png zip wav txt")
    assert (np.load(sample["npy"]) == array).all()
    assert Image.open(sample["png"]).size == (300, 200)
    assert zipfile.ZipFile(sample["zip"]).read("a.txt") == b"seven" * 50_000
    with wave.open(sample["wav"]) as found:
        found.setpos(40_000)
        assert found.readframes(10**6) == bytes(20_000)
    assert list(io.TextIOWrapper(sample["txt"])) == ["one\n", "two\n"]


def test_a_sound_is_read_in_part(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    sound = np.sin(np.arange(40_000) / 20).astype(np.float32)
    flac = io.BytesIO()
    soundfile.write(flac, sound, 8000, format="FLAC")
    (sample,) = IndexedShards(write_shard(tmp_path, flac.getvalue()), lazy="bin")
    with soundfile.SoundFile(sample["bin"]) as found:
        found.seek(30_000)
        assert np.abs(found.read(1000, dtype="float32") - sound[30_000:31_000]).max() < 1e-4


def test_files_without_bytes_are_true_and_places_before_the_beginning_are_refused(shard):
    file = IndexedShards(shard, lazy="bin")[2]["bin"]
    assert file
    for place in (-1, 0), (-1, 1), (-1, 2):
        with pytest.raises(ValueError, match="negative seek position -1"):
            file.seek(*place)
    with pytest.raises(ValueError, match="whence is 0, 1 or 2, not 7"):
        file.seek(0, 7)
    file.close()
    for call in file.read, file.tell, lambda: file.seek(0), lambda: bytes(file), lambda: file.prefetch(0, 1):
        with pytest.raises(ValueError, match="closed file"):
            call()


# Which fields are lazy.


def test_other_fields_are_bytes_and_fields_may_leave_some_out(shard):
    assert set(IndexedShards(shard, lazy="bin;mp4", fields="bin")[0]) == {"__key__", "__url__", "bin"}
    for index in (True, False):
        (sample, *_) = Stream.from_shards(shard, index=index, fields="BIN txt", lazy=["bin"])
        assert type(sample["bin"]) is MemberFile
        assert sample["txt"] == b"0"


@pytest.mark.parametrize("index", [True, False])
def test_ops_get_files(shard, index):
    heads = (
        Stream.from_shards(shard, index=index, lazy="bin")
        .decode()
        .map_fields({"bin": lambda file: file.read(3)})
        .to_tuple("bin", "txt")
    )
    assert list(heads) == [(DATA[:3], "0"), (b"sma", "1"), (b"", "2")]


def test_conditions_see_their_size(shard, site):
    dataset = Stream.from_shards(f"{site.url}/set-0.tar", lazy="bin")
    assert [sample["txt"] for sample in dataset.select("len(bin) < 10")] == [b"1", b"2"]
    assert site.bytes < 100_000


def test_a_lazy_field_that_no_sample_has_is_an_error(shard, how):
    with pytest.raises(SampleError, match=r"set-0\.tar: no sample has a field bon; .*did you mean 'bin'\?"):
        IndexedShards(shard, lazy="bon")[0] if how == "indexed" else lazy_samples_of(shard, how, "bon")


def lazy_samples_of(url: str, how: str, lazy: str) -> list[dict]:
    if how == "read_samples":
        return list(read_samples(url, lazy=lazy))
    return list(Stream.from_shards(url, lazy=lazy, index=how == "planned"))


def test_arguments_that_contradict_each_other_are_refused(shard):
    with pytest.raises(ValueError, match="lazy= names bin, which fields= leaves out"):
        Stream.from_shards(shard, fields="txt", lazy="bin")
    with pytest.raises(ValueError, match="lazy= names no field"):
        IndexedShards(shard, lazy=" ")
    with pytest.raises(ValueError, match='on_damage="resync" reads whole fields: pass it without lazy='):
        read_samples(shard, lazy="bin", on_damage="resync", on_error="skip")


def test_pipes_and_compressed_shards_are_refused(tmp_path, site):
    sample = {"__key__": "a", "bin": DATA}
    write_samples([sample], tmp_path / "a.tar")
    write_samples([sample], tmp_path / "a.tar.gz")
    os.mkfifo(tmp_path / "fifo")
    writer = subprocess.Popen(["cp", tmp_path / "a.tar", tmp_path / "fifo"], stderr=subprocess.DEVNULL)
    packed = [tmp_path / "a.tar.gz", f"{site.url}/a.tar.gz"]
    piped = [f"pipe:cat {tmp_path}/a.tar", tmp_path / "fifo"]
    for what, urls in {"a compressed shard": packed, "a pipe": piped}.items():
        for url in urls:
            with pytest.raises(OpenError, match=f"lazy= reads members at any offset, which {what} does not allow"):
                list(read_samples(url, lazy="bin", allow_pipe=True))
    writer.wait(60)


# What is asked of a server.


def test_a_sample_costs_no_request_and_its_file_few(shard, site):
    samples = IndexedShards(f"{site.url}/set-0.tar", lazy="bin", fields="bin")
    assert samples[0]["__key__"]  # for which the index is loaded
    site.clear()
    file = samples[0]["bin"]
    assert site.requests == []
    assert file.read(100) == DATA[:100]
    file.seek(-30, os.SEEK_END)
    assert file.read() == DATA[-30:]
    file.seek(-60_000, os.SEEK_END)
    assert file.read(100) == DATA[-60_000:-59_900]
    assert len(site.requests) == 2
    assert site.bytes < 2 * 65536 + 4096


def test_requests_grow_where_reading_goes_on_and_memory_does_not(tmp_path, site, one_request_each):
    data = random.Random(2).randbytes(24 << 20)
    write_shard(tmp_path, data)
    file = IndexedShards(f"{site.url}/set-0.tar", lazy="bin")[0]["bin"]
    site.clear()
    position = 0
    while piece := file.read(32768):
        assert piece == data[position : position + len(piece)]
        position += len(piece)
        assert sum(len(piece.data) for piece in file._held) <= member_file.HELD
    assert position == len(data)
    assert len(site.requests) <= 9
    assert site.bytes < len(data) + 4096


def test_what_is_prefetched_is_one_request_and_what_is_held_none(shard, site):
    file = IndexedShards(f"{site.url}/set-0.tar", lazy="bin", fields="bin")[0]["bin"]
    site.clear()
    file.prefetch(100_000, 500_000)
    file.prefetch(200_000, 300_000)
    file.prefetch(10**9, 5)
    file.seek(100_000)
    assert b"".join(file.read(50_000) for _ in range(10)) == DATA[100_000:600_000]
    assert len(site.requests) <= 2  # the headers lie elsewhere
    file.prefetch(550_000, 10**6)
    file.seek(600_000)
    assert file.read() == DATA[600_000:]
    assert len(site.requests) <= 3
    assert site.bytes < 600_000 + 4096
    file.prefetch(400_000, 250_000)
    file.seek(400_000)
    assert file.read(250_000) == DATA[400_000:650_000]
    assert len(site.requests) <= 3
    with pytest.raises(ValueError, match="offset -1"):
        file.prefetch(-1, 5)


def test_what_is_prefetched_stays_until_the_next(tmp_path, site):
    data = np.arange(8 << 20, dtype="<u4").tobytes()
    write_shard(tmp_path, data)
    file = IndexedShards(f"{site.url}/set-0.tar", lazy="bin")[0]["bin"]
    site.clear()
    for begin in (1 << 20, 15 << 20):
        file.prefetch(begin, 12 << 20)
        fetched = site.bytes
        for place in range(0, 12 << 20, 1 << 20):
            for step in begin + place, (28 << 20) + place // 4:  # as where sound and pictures lie apart
                file.seek(step)
                assert file.read(1000) == data[step : step + 1000]
        assert site.bytes - fetched < 1 << 20
        assert sum(len(piece.data) for piece in file._held) < (12 << 20) + member_file.HELD


def test_streams_without_an_index_pass_over_lazy_members(tmp_path, site):
    write_shard(tmp_path, *[DATA] * 4, index=False)
    found = list(Stream.from_shards(f"{site.url}/set-0.tar", lazy="bin", index=False))
    assert site.bytes < 1_200_000
    assert [sample["bin"].read() for sample in found] == [DATA] * 4


def test_a_frame_of_a_long_video_costs_few_requests(tmp_path, site, one_request_each):
    av = pytest.importorskip("av")
    groups, url = write_video(tmp_path), f"{site.url}/set-0.tar"
    frame_at = shown_on_the_page("frame")["frame_at"]
    for seconds in (24.5, 25.0, 35.9):
        file = IndexedShards(url, lazy="bin", fields="bin")[0]["bin"]
        site.clear()
        found = frame_at(file, seconds)
        assert len(site.requests) <= 3
        assert site.bytes <= 1.3 * groups[max(time for time in groups if time <= seconds)]
        file = IndexedShards(url, lazy="bin", fields="bin")[0]["bin"]
        site.clear()
        with av.open(file) as container:
            stream = container.streams.video[0]
            container.seek(int(seconds / stream.time_base), stream=stream)
            frame = next(frame for frame in container.decode(stream) if frame.time >= seconds)
        assert len(site.requests) <= 6
        assert 0 <= found.time - seconds < 0.04
        assert found.time == frame.time
        assert (found.to_ndarray() == frame.to_ndarray()).all()


def shown_on_the_page(program: str) -> dict[str, Any]:
    """Return the names that a program of the page on media defines."""
    page = Path(__file__).parents[2] / "docs/media.md"
    names: dict[str, Any] = {}
    exec(re.search(rf"```python\n# {program}\.py\n(.*?)```", page.read_text(), re.DOTALL)[1], names)
    return names


def write_video(folder: Path) -> dict[float, int]:
    """Write a shard with a video of 25 MB, whose index is at its end; return the bytes of its groups by their time."""
    import av

    noise = np.random.default_rng(0).integers(0, 256, (400, 480, 3), np.uint8)
    corners = np.random.default_rng(1).integers(0, 160, (900, 2)).tolist()
    path, groups = folder / "video.mp4", {}
    with av.open(str(path), "w") as container:
        options = {"preset": "ultrafast", "qp": "37", "bf": "0", "sc_threshold": "0"}
        stream = container.add_stream("libx264", rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 320, 240, "yuv420p", 50
        for y, x in corners:
            picture = np.ascontiguousarray(noise[y : y + 240, x : x + 320])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        for packet in container.demux(video=0):
            if packet.is_keyframe and packet.pts is not None:
                begin = float(packet.pts * packet.time_base)
            groups[begin] = groups.get(begin, 0) + packet.size
    assert 24_000_000 < path.stat().st_size < 26_000_000
    write_shard(folder, path.read_bytes())
    return groups


# Faults.


def test_an_object_that_changes_is_an_error(shard, site):
    files = [sample["bin"] for sample in lazy_samples(f"{site.url}/set-0.tar", "stream")]
    files.append(IndexedShards(f"{site.url}/set-0.tar", lazy="bin")[0]["bin"])
    files = [file for file in files if file.size > 100]
    copies = [pickle.loads(pickle.dumps(file)) for file in files]
    for file in files:
        file.read(10)
    site.etag = '"v2"'
    for file in files + copies:
        file.seek(500_000)
        with pytest.raises(OpenError, match=r"set-0\.tar: offset \d+: changed"):
            file.read(10)


def test_a_local_shard_that_is_overwritten_is_an_error(shard):
    file = IndexedShards(shard, lazy="bin")[0]["bin"]
    other = pickle.loads(pickle.dumps(file))
    with open(shard, "r+b") as stream:
        stream.seek(2000)
        stream.write(b"x" * 2000)
    os.utime(shard, ns=(0, 0))
    with pytest.raises(OpenError, match=r"set-0\.tar: changed while it was read"):
        file.read(10)
    with pytest.raises(OpenError, match=r"set-0\.tar: has changed since it was first opened"):
        other.read(10)


def read_at(file: MemberFile, place: int) -> bytes:
    file.seek(place)
    return file.read(10)


def test_a_stale_index_is_an_error_before_the_first_byte(tmp_path, site, place):
    url = write_shard(tmp_path, DATA, DATA, DATA)
    data = bytearray(Path(url).read_bytes())
    name = data.index(b"k1.bin")
    data[name : name + 512] = tarfile.TarInfo("k7.bin").tobuf(tarfile.USTAR_FORMAT)
    Path(url).write_bytes(data)
    samples = IndexedShards(url if place == "local" else f"{site.url}/set-0.tar", lazy="bin")
    for begin in (0, 650_000):
        with pytest.raises(ShardIndexError, match=r"k1\.bin: stale index: .*'k7\.bin'"):
            read_at(samples[1]["bin"], begin)
    with pytest.raises(ShardIndexError, match=r"k1\.bin: stale index"):
        pickle.dumps(samples[1]["bin"])
    assert samples[2]["bin"].read() == DATA


def test_a_truncated_shard_is_an_error_with_its_offset(tmp_path, site, place):
    path = tmp_path / "a.tar"
    write_samples([{"__key__": "a", "bin": DATA}, {"__key__": "b", "bin": DATA}], path)
    os.truncate(path, 1_200_000)
    url = path if place == "local" else f"{site.url}/a.tar"
    with pytest.raises(TarError, match=r"a\.tar: offset 700928: truncated in this member"):
        list(read_samples(url, lazy="bin"))


def test_a_remote_shard_that_becomes_shorter_is_an_error_with_its_offset(shard, site):
    file = IndexedShards(f"{site.url}/set-0.tar", lazy="bin")[0]["bin"]
    file.read(10)
    os.truncate(shard, 300_000)
    file.seek(250_000)
    with pytest.raises((OpenError, TarError), match=r"set-0\.tar: .*(changed|ends at)"):
        file.read()


def test_a_file_of_a_replaced_shard_still_reads_its_own(shard, tmp_path):
    file = IndexedShards(shard, lazy="bin")[0]["bin"]
    write_shard(tmp_path, b"other")
    assert file.read() == DATA


# Copies, processes and writing.


def test_a_copy_stands_where_the_file_stood(samples):
    for sample, data in zip(samples, (DATA, b"small", b"")):
        file = sample["bin"]
        file.seek(3)
        for other in (pickle.loads(pickle.dumps(file)), copy.copy(file)):
            assert (other.name, other.size, other.url) == (file.name, file.size, file.url)
            assert other.read() == data[3:]
        assert file.tell() == 3


@pytest.mark.parametrize("place", ["local", "remote"])
def test_writers_copy_it(shard, site, tmp_path, place):
    samples = IndexedShards(shard if place == "local" else f"{site.url}/set-0.tar", lazy="bin")
    expected = Path(shard).read_bytes()
    samples[0]["bin"].seek(5)
    with TarWriter(tmp_path / "copy.tar", sha256=True) as writer:
        for sample in samples:
            writer.write(sample)
    assert (tmp_path / "copy.tar").read_bytes() == expected
    with ShardWriter(f"{tmp_path}/other-%d.tar") as shards:
        for sample in samples:
            shards.write(sample)
    assert (tmp_path / "other-0.tar").read_bytes() == expected
    assert list(IndexedShards(f"{tmp_path}/other-0.tar")) == list(read_samples(f"{tmp_path}/other-0.tar"))
    closed = samples[0]
    closed["bin"].close()
    with pytest.raises(EncodeError, match=r"k0\.bin: a MemberFile that is closed cannot be written"):
        write_samples([closed], tmp_path / "closed.tar")


def test_a_mapped_function_may_return_it(shard, tmp_path):
    samples = {sample["__key__"]: sample for sample in IndexedShards(shard, lazy="bin")}
    outputs = f"{tmp_path}/out-0.tar"
    with Inline() as executor:
        map_shards(
            lambda sample: {**sample, "bin": samples[sample["__key__"]]["bin"]},
            shard,
            [outputs],
            executor=executor,
            per_sample=True,
            progress=False,
        )
    assert Path(outputs).read_bytes() == Path(shard).read_bytes()


def test_a_cache_keeps_what_was_fetched(shard, site, tmp_path):
    for _ in range(2):
        site.clear()
        remote = Remote(cache_dir=tmp_path / "cache")
        file = IndexedShards(f"{site.url}/set-0.tar", lazy="bin", remote=remote)[0]["bin"]
        assert file.read() == DATA
    assert site.bytes < 10_000


def test_a_member_of_4_gb_takes_little_memory(tmp_path):
    path, size = tmp_path / "large.tar", 4 << 30
    info = tarfile.TarInfo("a.mp4")
    info.size = size
    with open(path, "wb") as stream:
        stream.write(info.tobuf(tarfile.USTAR_FORMAT))
        stream.truncate(512 + size + 1024)
        stream.seek(512 + size - 5)
        stream.write(b"hello")
    program = """
import sys
from tarshards import IndexedShards, build_index, read_samples

def memory():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

path, size = sys.argv[1], 4 << 30
build_index(path).save(path)
files = [IndexedShards(path, lazy="mp4")[0]["mp4"], next(read_samples(path, lazy="mp4"))["mp4"]]
before = memory()
for file in files:
    for place in range(0, size, size // 64):
        file.seek(place)
        assert file.read(32768) == bytes(32768)
    file.seek(0)
    for _ in range(4096):
        assert file.read(32768) == bytes(32768)
    file.seek(-(1 << 20), 2)
    assert file.read()[-6:] == b"\\0hello"
print((memory() - before) / 1e6)
"""
    result = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 50
