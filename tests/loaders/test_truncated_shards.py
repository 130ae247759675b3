"""Shards truncated after the offsets of their samples were found: an error that names them, never SIGBUS."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image
from programs import load_kernel
from soak import SOAK
from videos import written

from tarshards import OpenError, ShardWriter, Stream, readers
from tarshards.loaders.arrays.array_loader import ArrayLoader
from tarshards.loaders.arrays.readers.reader import Reader
from tarshards.samples.batch import SampleBatch

SAMPLES, PER_SHARD = 48, 24

# Every reader, for each kind of payload that it reads differently: a field, and Python code that makes the reader.
WAYS = {
    "audio": [("wav", "audio(8000)"), ("wav", "audio(8000, 0.02)"), ("wav", "audio(8000, pad=False)")],
    "array": [("x.npy", "array()"), ("raw", "array('u1')"), ("raw", "array('u1', (30, 40))")],
    "bytes_": [("jpg", "bytes_()")],
    "decoded": [("json", "decoded()"), ("x.npy", "decoded()"), ("msg", "decoded()"), ("jpg", "decoded('rgb8')")],
    "floating": [("loss", "floating()")],
    "image": [
        *[("jpg", "image(20, crop='random_resized')"), ("jpg", "image()"), ("png", "image(20, dtype='float32')")],
        *[("pixels.npy", "image()"), ("pixels.npy", "image(9, crop='center')"), ("raw", "image(9, shape=(20, 20, 3))")],
    ],
    "integer": [("cls", "integer()")],
    "json": [("json", "json()")],
    "mask": [("seg.png", "mask(image(8, crop='random_resized'))"), ("seg.png", "mask(image(8), dtype='int64')")],
    "affine": [("jpg", "affine(image(8, crop='random_resized'))"), ("pixels.npy", "affine(image(8))")],
    "ragged": [("text.txt", "ragged()"), ("raw", "ragged('<u2')"), ("x.npy", "ragged()")],
    "text": [("text.txt", "text()")],
    "using": [("raw", "using(len)"), ("raw", "using(lambda data: data[-1])")],
    "video": [("mp4", "video(2, 8)"), ("mp4", "video(2, start='random')")],
}
HAS_PYAV = find_spec("av") is not None

# The ways of a reader are tried in separate children of one process, so that a crash is detected.
PROGRAM = """
import json as json_, os, shutil, subprocess, sys
from tarshards import ArrayLoader, Stream, readers
from tarshards.errors import OpenError
from tarshards.index import mapped_fields
from tarshards.samples.batch import SampleBatch

source, into, ways, every = sys.argv[1], sys.argv[2], *map(json_.loads, sys.argv[3:])

def truncate(path):
    os.truncate(path, 4096)

def truncate_elsewhere(path):
    subprocess.run(["truncate", "-s", "4096", path], check=True)

def after(kind, name, calls, path, cut):
    made, method = [0], getattr(kind, name)
    def call(*arguments):
        result = method(*arguments)
        made[0] += 1
        if made[0] == calls:
            cut(path)
        return result
    setattr(kind, name, call)
    return lambda: setattr(kind, name, method)

def run(field, code, kind, name, calls, cut, threads, raises):
    folder, errors, delivered, raised = f"{into}/{os.getpid()}", [], [], None
    shutil.copytree(source, folder)
    options = {} if raises else {"on_error": errors.append}
    stream = Stream.from_shards(f"{folder}/set-{{0,1}}.tar", shuffle=not raises, **options)
    opened = [stream.source.shards.shards.use(number) for number in range(2)]
    loader = ArrayLoader(stream, 12, fields={"x:" + field: eval(code, vars(readers))}, threads=threads)
    restore = after(kind, name, calls, f"{folder}/set-{0 if raises else 1}.tar", cut)
    try:
        for batch in loader:
            delivered += batch["__key__"]
    except OpenError as error:
        raised = str(error)
    restore()
    shutil.rmtree(folder)
    return delivered, raised, [(type(error).__name__, error.reason, error.url, error.key) for error in errors]

for number, way in enumerate(ways):
    if os.fork() == 0:
        outcomes = {}
        for place, (moment, kind, name, calls, cut) in enumerate([
            ("opened", SampleBatch, "check", 1, truncate),
            ("found", mapped_fields.MappedFields, "find", 3, truncate),
            ("checked", SampleBatch, "check", 2, truncate),
            ("checked, elsewhere", SampleBatch, "check", 2, truncate_elsewhere),
        ]):
            for threads in 0, 2:
                for raises in False, True:
                    if (number + place + bool(threads) + raises) % every:
                        continue
                    arguments = kind, name, calls, cut, threads, raises
                    outcomes[f"{moment}, {threads} threads, raises: {raises}"] = run(*way, *arguments)
        with open(f"{into}/{number}.json", "w") as file:
            json_.dump(outcomes, file)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    rng = np.random.default_rng(0)
    mp4 = written(count=4) if HAS_PYAV else b""
    with ShardWriter(str(folder / "set-%d.tar"), max_samples=PER_SHARD, index=True) as writer:
        for number in range(SAMPLES):
            pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            images = {}
            for kind, name in ("jpg", "JPEG"), ("png", "PNG"):
                stream = io.BytesIO()
                Image.fromarray(pixels).resize((60, 50)).save(stream, name)
                images[kind] = stream.getvalue()
            stream = io.BytesIO()
            Image.fromarray(pixels[:, :, 0]).save(stream, "PNG")
            images["seg.png"] = stream.getvalue()
            fields = {"x.npy": rng.normal(size=(3, 4)), "pixels.npy": pixels, "raw": rng.bytes(1200), "cls": number}
            fields |= {"json": {"boxes": [number]}, "msg": [number], "loss": b"0.25", "text.txt": "t" * 500, **images}
            fields["mp4"] = mp4
            fields["wav"] = rng.uniform(-1, 1, (300, 1)).astype("f4"), 8000
            writer.write({"__key__": f"{number:03d}", **fields})
    return folder


def kinds_of(base=Reader):
    return {base}.union(*(kinds_of(kind) for kind in base.__subclasses__() if kind.__module__.startswith("tarshards.")))


def test_no_reader_is_forgotten(folder):
    pytest.importorskip("av")  # without it no reader of videos opens
    functions = {name for name in readers.__all__ if name not in ("ArrayReader", "Reader", "draws_of", "reader_of")}
    assert set(WAYS) == functions, "a new reader needs its lines in WAYS"
    opened = set()
    for field, code in (way for ways in WAYS.values() for way in ways):
        reader = eval(code, vars(readers))
        loader = ArrayLoader(Stream.from_shards(f"{folder}/set-0.tar"), 4, fields={field: reader})
        loader.maker.open()
        opened |= {type(reader), type(loader.maker.assembler.readers[0])}
    assert opened == kinds_of() - {Reader, readers.ArrayReader}


NAMES = [name for name in WAYS if HAS_PYAV or name != "video"]


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_the_samples_that_are_gone_fail_and_the_process_lives(folder, tmp_path, python_with_torch, name):
    load_kernel("tarshards.kernels._mapped")  # without it no shard is mapped
    ways, every = json.dumps(WAYS[name]), "1" if SOAK > 1 else "4"
    command = [python_with_torch, "-c", PROGRAM, str(folder), str(tmp_path), ways, every]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout == "0\n" * len(WAYS[name]), f"the processes ended with {done.stdout}"
    outcomes = [
        (f"{code} of {field}, {case}", outcome)
        for number, (field, code) in enumerate(WAYS[name])
        for case, outcome in json.loads((tmp_path / f"{number}.json").read_text()).items()
    ]
    for case, (delivered, raised, lost) in outcomes:
        if case.endswith("raises: True"):
            assert raised is not None, case
            assert "\n" not in raised, case
            assert "set-0.tar: " in raised, case
            continue
        assert raised is None, case
        assert {f"{number:03d}" for number in range(PER_SHARD)} <= set(delivered), "the other shard is delivered whole"
        failed = [key for _, _, _, key in lost if key is not None]
        assert len({*delivered, *failed}) == len(delivered) + len(failed) <= SAMPLES, case
        assert lost, case
        assert len(delivered) < SAMPLES or "2 threads" in case, case  # which may have been quicker
        for kind, reason, url, _ in lost:
            assert (kind, url.rpartition("/")[2]) == ("OpenError", "set-1.tar"), (case, kind, url, reason)
            assert "shrunk" in reason or "changed while" in reason, case


@pytest.mark.parametrize(
    ("field", "reader"),
    [("raw", "array('u1')"), ("raw", "ragged('u1')"), ("raw", "bytes_()"), ("raw", "using(bytes)"), ("jpg", "image()")],
)
def test_a_row_in_the_page_in_which_its_shard_ends_now_fails(folder, tmp_path, monkeypatch, field, reader):
    load_kernel("tarshards.kernels._mapped")
    path = tmp_path / "set-0.tar"
    for name in path.name, f"{path.name}.index":
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with tarfile.open(path) as archive:
        whole = {member.name: archive.extractfile(member).read() for member in archive}
        cut = archive.getmember(f"018.{field}")
    errors, check = [], SampleBatch.check

    def check_and_truncate(fields):
        found = check(fields)
        if "018" in list(fields.keys):
            os.truncate(path, cut.offset_data + cut.size - 5)
        return found

    monkeypatch.setattr(SampleBatch, "check", check_and_truncate)
    stream = Stream.from_shards(str(path), shuffle=False, on_error=errors.append)
    loader = ArrayLoader(stream, 12, fields={field: eval(reader, vars(readers))}, threads=0)
    batches = list(loader)
    keys = [key for batch in batches for key in batch["__key__"]]
    assert keys == [f"{number:03d}" for number in range(18)]
    if "ragged" in reader:
        rows = [row for batch in batches for row in np.split(batch[field][0], batch[field][1][1:-1])]
    else:
        rows = [row for batch in batches for row in batch[field]]
    if field == "raw":
        assert [bytes(row) for row in rows] == [whole[f"{key}.raw"] for key in keys]
    lost = {error.key: error for error in errors if error.key is not None}  # others are of the shard, at the end
    assert [*lost] == [f"{number:03d}" for number in range(18, 24)]
    assert all(isinstance(error, OpenError) and "shrunk" in error.reason for error in lost.values())
