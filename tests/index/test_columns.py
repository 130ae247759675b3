"""Columns beside the index: they say of each sample what its fields say, and select what samples would select."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from range_server import serving
from rewritten import without_digest
from with_torch import ShardDataset

from tarshards import IndexedShards, Ledger, ShardWriter, Stream, World, write_samples
from tarshards.errors import DecodeError, OpError, SampleError, ShardIndexError
from tarshards.index import columns
from tarshards.index.columns import attach_columns, build_columns, parse_columns
from tarshards.index.inventory import read_head
from tarshards.index.lengths import lengths_of
from tarshards.index.refresh import refresh_indexes
from tarshards.storage import derived
from tarshards.storage.location import Location

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    pa = None

pytestmark = [pytest.mark.interop, pytest.mark.skipif(pa is None, reason="pyarrow is not installed")]


def image(width: int, height: int, form: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height)).save(data, form)
    return data.getvalue()


def sample(i: int) -> dict:
    found = {"__key__": f"{i:03d}", "txt": "ä" * (i % 7), "json": {"score": i / 10, "deep": {"n": i}}}
    if i % 3:
        found["jpg" if i % 2 else "png"] = image(10 + i, 5, "JPEG" if i % 2 else "PNG")
    if i % 5 == 0:
        del found["json"]["score"]
    return found


@pytest.fixture
def shards(tmp_path):
    with ShardWriter(str(tmp_path / "a-%d.tar"), max_samples=10, index=True) as writer:
        for i in range(30):
            writer.write(sample(i))
    return str(tmp_path / "a-{0..2}.tar")


EXPRESSION = "width height:jpg;png, length:txt, json.score, n=json.deep.n, bytes=size:png;jpg"


def table(tmp_path, number=0):
    return pq.read_table(tmp_path / f"a-{number}.tar.columns.parquet")


def test_columns_say_what_samples_say(shards, tmp_path):
    written = build_columns(shards, EXPRESSION)
    assert written == [f"{tmp_path}/a-{i}.tar.columns.parquet" for i in range(3)]
    rows = [row for i in range(3) for row in table(tmp_path, i).to_pylist()]
    for i, row in enumerate(rows):
        made = sample(i)
        data = made.get("jpg") or made.get("png")
        assert row == {
            "__key__": f"{i:03d}",
            "width": 10 + i if i % 3 else None,
            "height": 5 if i % 3 else None,
            "length": i % 7,
            "score": None if i % 5 == 0 else i / 10,
            "n": i,
            "bytes": len(data) if data else None,
        }


def test_functions_and_processes(shards, tmp_path):
    with ProcessPoolExecutor(2) as pool:
        build_columns(shards, {"double": twice, "n": "json.deep.n"}, executor=pool)
    assert table(tmp_path, 1)["double"].to_pylist() == [2 * i for i in range(10, 20)]
    with pytest.raises(OpError, match=r"python:test_columns\.fails fails: ZeroDivisionError"):
        build_columns(shards, {"bad": fails})
    assert "bad" not in table(tmp_path).column_names


def twice(sample):
    return 2 * json.loads(sample["json"])["deep"]["n"]


def fails(sample):
    return 1 / 0


def test_what_is_there_stays_and_is_made_once(shards, tmp_path):
    assert len(build_columns(shards, "length:txt")) == 3
    assert build_columns(shards, "length:txt") == []
    (tmp_path / "a-1.tar.columns.parquet").unlink()
    assert build_columns(shards, "length:txt") == [f"{tmp_path}/a-1.tar.columns.parquet"]
    assert len(build_columns(shards, "json.score")) == 3
    assert table(tmp_path).column_names == ["__key__", "length", "score"]
    assert len(build_columns(shards, "score=json.deep.n")) == 3, "the name now stands for another value"
    assert table(tmp_path)["score"].to_pylist() == list(range(10))
    assert len(build_columns(shards, "length:txt", overwrite=True)) == 3


def test_columns_are_of_their_shard(shards, tmp_path):
    build_columns(shards, "length:txt")
    dataset = Stream.from_shards(shards)
    assert len(dataset.select("length > 3")) == sum(i % 7 > 3 for i in range(30))
    name = str(tmp_path / "a-1.tar")
    write_samples(map(sample, range(20)), name)
    assert not (tmp_path / "a-1.tar.columns.parquet").exists(), "whoever replaces a shard removes its columns"
    list(refresh_indexes([name]))
    with pytest.raises(ShardIndexError, match=r"a-1\.tar\.columns\.parquet: no column length; add it with"):
        Stream.from_shards(shards).select("length > 3")
    build_columns(shards, "length:txt")
    write_samples((sample(i) | {"__key__": f"9{i}"} for i in range(20, 30)), str(tmp_path / "other.tar"))
    (tmp_path / "other.tar").replace(tmp_path / "a-2.tar")  # as another program would
    list(refresh_indexes([str(tmp_path / "a-2.tar")]))
    with pytest.raises(ShardIndexError, match=r"a-2\.tar\.columns\.parquet: stale: .*`tarindex --columns`"):
        Stream.from_shards(shards).select("length > 3")
    build_columns(shards, "length:txt")
    assert len(Stream.from_shards(shards).select("length > 3")) > 0


def labelled(path: Path, first: int, last: int = 10) -> None:
    """Write a shard whose keys and sizes do not depend on *first*, without removing what is derived from an old one."""
    fields = [(f"{i}", {"cls": b"%d" % ((first + i) % last), "txt": b"text"}) for i in range(10)]
    with tarfile.open(path, "w") as archive:
        for name, value in ((f"{key}.{field}", value) for key, of in fields for field, value in of.items()):
            info = tarfile.TarInfo(name)
            info.size = len(value)
            archive.addfile(info, io.BytesIO(value))


def moved(path: Path) -> None:
    """Replace a shard by another file, as ``mv`` does."""
    labelled(other := path.with_suffix(".other"), 5)
    other.replace(path)


def written_in_place(path: Path) -> None:
    """Replace the contents of a file, and set its time back."""
    before = path.stat()
    labelled(path, 5)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def served(path: Path) -> None:
    """A file of a server, which sends another ETag for the new contents."""
    labelled(path, 5)


@pytest.fixture
def settled(monkeypatch):
    """Let files count as unchanged that were written a moment ago."""
    monkeypatch.setattr(derived, "SETTLED", 0)


@pytest.fixture
def labels(tmp_path, settled):
    labelled(tmp_path / "l-0.tar", 0)
    list(refresh_indexes([str(tmp_path / "l-0.tar")]))
    (tmp_path / "rank.csv").write_text("__key__,rank\n" + "".join(f"{i},{i * i}\n" for i in range(10)))
    return tmp_path / "l-0.tar"


@pytest.mark.parametrize("change", [moved, written_in_place, served])
@pytest.mark.parametrize("reindexed", [False, True])
def test_columns_of_other_contents_are_stale_whatever_the_keys_and_sizes(labels, change, reindexed):
    with serving(labels.parent) if change is served else nullcontext() as site:
        url = str(labels) if site is None else f"{site.url}/l-0.tar"
        build_columns(url, {"cls": "cls", "label": "cls", "bytes": "size:txt", "length": "length:txt", "twice": double})
        attach_columns(url, labels.parent / "rank.csv")
        assert keys(Stream.from_shards(url).select("cls > 4")) == list("56789")
        change(labels)
        if site is not None:
            site.etag = '"v2"'
        if reindexed:
            list(refresh_indexes([url]))
        for condition in ("cls > 4", "label > 4 and rank > 3"):
            reason = (
                r"l-0\.tar\.columns\.parquet: stale: the contents of cls have changed; rebuild .*`tarindex --columns`$"
            )
            with pytest.raises(ShardIndexError, match=reason):
                Stream.from_shards(url).select(condition)
        with pytest.raises(
            ShardIndexError, match=r"contents of cls, txt have changed; rebuild it with `build_columns`"
        ):
            Stream.from_shards(url).select("twice > 4")
        assert len(Stream.from_shards(url).select("bytes == 4 and length == 4 and rank < 17")) == 5, (
            "which are the same"
        )
        assert len(build_columns(url, "cls")) == 1
        assert keys(Stream.from_shards(url).select("cls > 4 and rank < 17")) == list("01234")
        with pytest.raises(ShardIndexError, match=r"no column label; there are bytes, length, rank, cls;"):
            Stream.from_shards(url).select("cls > 4 and label > 4")


def double(sample):
    return 2 * int(sample["cls"])


def copied_plainly(folder: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", folder, target], check=True)


def copied_with_times(folder: Path, target: Path) -> None:
    subprocess.run(["cp", "-rp", folder, target], check=True)


def unpacked(folder: Path, target: Path) -> None:
    shutil.unpack_archive(shutil.make_archive(f"{target}.archive", "tar", folder), target)


@pytest.mark.parametrize("copy", [copied_plainly, copied_with_times, unpacked, "upload"])
def test_a_copied_dataset_selects_as_before(labels, tmp_path_factory, monkeypatch, caplog, copy):
    build_columns(str(labels), {"cls": "cls", "twice": double})
    target = tmp_path_factory.mktemp("copies") / "target"
    (copied_plainly if copy == "upload" else copy)(labels.parent, target)
    with serving(target) if copy == "upload" else nullcontext() as site:
        url = f"{target}/l-0.tar" if site is None else f"{site.url}/l-0.tar"
        for _ in range(2):
            assert keys(Stream.from_shards(url).select("cls > 4 and twice < 18")) == list("5678")
        assert not caplog.records
        renewed = [] if site is None else [f"{url}.columns.parquet"]
        assert build_columns(url, "cls") == renewed, "with the ETag of the copy"
        assert build_columns(url, "cls") == []
        monkeypatch.setattr(columns, "_checksums", None)
        assert keys(Stream.from_shards(url).select("cls > 4 and twice < 18")) == list("5678"), "nothing is compared"


def test_nothing_is_compared_of_a_shard_that_is_the_same(labels, monkeypatch):
    build_columns(str(labels), "cls")
    monkeypatch.setattr(columns, "_checksums", None)
    assert keys(Stream.from_shards(str(labels)).select("cls > 4")) == list("56789")
    assert build_columns(str(labels), "cls") == []


def test_a_comparison_of_all_fields_is_made_once(labels, tmp_path_factory, monkeypatch):
    build_columns(str(labels), "cls, length:txt")
    target = tmp_path_factory.mktemp("copies") / "target"
    copied_plainly(labels.parent, target)
    dataset, compared = Stream.from_shards(f"{target}/l-0.tar"), []
    checksums = columns._checksums
    monkeypatch.setattr(columns, "_checksums", lambda *given: compared.append(given[1]) or checksums(*given))
    for condition in ("cls > 4", "cls > 4 and length == 4", "cls > 4", "length == 4"):
        assert len(dataset.select(condition)) == (10 if condition == "length == 4" else 5)
    assert compared == [{"cls"}, {"cls", "txt"}]


def test_what_changed_a_moment_ago_is_compared(labels, monkeypatch):
    monkeypatch.setattr(derived, "SETTLED", 10**12)
    build_columns(str(labels), "cls")
    labelled(labels, 5)
    with pytest.raises(ShardIndexError, match="stale: the contents of cls have changed"):
        Stream.from_shards(str(labels)).select("cls > 4")


def test_columns_are_the_same_bytes_whenever_they_are_made(labels):
    (name,) = build_columns(str(labels), "cls")
    before = Path(name).read_bytes()
    os.replace(labels, labels.parent / "other.tar")
    labelled(labels, 0)
    assert build_columns(str(labels), "cls", overwrite=True) == [name]
    assert Path(name).read_bytes() == before


def test_columns_of_an_earlier_version_are_read_and_made_anew_once(labels):
    (name,) = build_columns(str(labels), "cls, length:txt")
    attach_columns(str(labels), labels.parent / "rank.csv")
    found = pq.read_table(name)
    about = json.loads(found.schema.metadata[b"tarshards-columns"])
    del about["crc32"]
    pq.write_table(found.replace_schema_metadata({b"tarshards-columns": json.dumps(about)}), name)
    assert keys(Stream.from_shards(str(labels)).select("cls > 4 and rank > 30")) == list("6789")
    moved(labels)
    assert build_columns(str(labels), "cls") == [name]
    assert keys(Stream.from_shards(str(labels)).select("cls > 4 and rank < 5")) == list("012")
    assert build_columns(str(labels), "cls") == []
    assert build_columns(str(labels), "cls, length:txt") == [name]


def test_lengths_of_other_contents_are_stale(labels):
    build_columns(str(labels), "length=cls")
    assert lengths_of(IndexedShards(str(labels)), "length").tolist() == list(range(10))
    moved(labels)
    with pytest.raises(ShardIndexError, match="stale: the contents of cls have changed"):
        lengths_of(IndexedShards(str(labels)), "length")


def test_columns_of_other_keys_are_stale_whatever_the_sizes(tmp_path, monkeypatch):
    """Neither the size of the shard nor its first and last headers tell."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, key: str) -> None:
        write_samples(({"__key__": key if i == 1 else f"{i}", "txt": key if i == 1 else "-"} for i in range(3)), name)
        list(refresh_indexes([name]))

    write("a.tar", "x")
    build_columns("a.tar", "txt, length:txt")
    Path("rows.csv").write_text("__key__,rank\nx,1\n")
    attach_columns("a.tar", "rows.csv")
    about = json.loads(pq.read_schema("a.tar.columns.parquet").metadata[b"tarshards-columns"])
    assert about["digest"] == read_head("a.tar").digest.hex()
    write("b.tar", "y")
    assert read_head("a.tar")[:3] == read_head("b.tar")[:3]
    for ending in "", ".index":
        os.replace(f"b.tar{ending}", f"a.tar{ending}")
    reason = (
        "a.tar.columns.parquet: stale: the shard has changed; rebuild it with `tarindex --columns` and "
        "`tarindex --attach`"
    )
    with pytest.raises(ShardIndexError, match=f"^{re.escape(reason)}$"):
        Stream.from_shards("a.tar").select('txt == "x"')
    build_columns("a.tar", "txt")
    assert [each["__key__"] for each in Stream.from_shards("a.tar").select('txt == "y"')] == ["y"]


def test_columns_and_indexes_without_a_digest_say_what_renews_them(shards, tmp_path):
    (first, *_) = build_columns(shards, "length:txt")
    table = pq.read_table(first)
    about = json.loads(table.schema.metadata[b"tarshards-columns"])
    del about["digest"]
    pq.write_table(table.replace_schema_metadata({b"tarshards-columns": json.dumps(about)}), first)
    reason = r"parquet: stale: written by an earlier version, without a digest; rebuild it with `tarindex --columns`"
    with pytest.raises(ShardIndexError, match=reason):
        Stream.from_shards(shards).select("length > 3")
    assert build_columns(shards, "length:txt") == [first]
    without_digest(str(tmp_path / "a-1.tar"))
    cure = r"a-1\.tar\.index: written by an earlier version, without a digest; renew it with `tarindex`"
    for use in (
        lambda: Stream.from_shards(shards).select("length > 3"),
        lambda: build_columns(shards, "length:txt", overwrite=True),
    ):
        with pytest.raises(ShardIndexError, match=cure):
            use()


def test_damaged_columns_are_an_error_and_made_anew(shards, tmp_path):
    build_columns(shards, "length:txt")
    path = tmp_path / "a-0.tar.columns.parquet"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", b"PAR1" + whole[100:]):
        path.write_bytes(damaged)
        with pytest.raises(ShardIndexError, match=r"a-0\.tar\.columns\.parquet: damaged"):
            Stream.from_shards(shards).select("length > 3")
    assert build_columns(shards, "length:txt") == [str(path)]
    assert table(tmp_path)["length"].to_pylist() == [i % 7 for i in range(10)]


def test_a_field_that_does_not_decode_is_null_or_an_error(tmp_path):
    name = str(tmp_path / "a.tar")
    bad = [{"__key__": "a", "jpg": image(3, 4, "JPEG")[:50]}, {"__key__": "b", "jpg": b"?"}, {"__key__": "c"}]
    bad[2]["jpg"] = image(3, 4, "JPEG")
    write_samples(bad, name)
    list(refresh_indexes([name]))
    with pytest.raises(DecodeError) as caught:
        build_columns(name, "width:jpg")
    assert (caught.value.key, caught.value.field) == ("a", "jpg")
    assert not (tmp_path / "a.tar.columns.parquet").exists()
    ledger = Ledger(max_errors=float("inf"))
    build_columns(name, "width height:jpg", on_error=ledger)
    assert pq.read_table(f"{name}.columns.parquet").to_pydict() == {
        "__key__": ["a", "b", "c"],
        "width": [None, None, 3],
        "height": [None, None, 4],
    }
    assert [error.key for error in ledger.quarantined] == ["a", "a", "b", "b"]


def test_durations_are_those_that_were_written(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    name, sounds = str(tmp_path / "a.tar"), []
    for i, form in enumerate(["wav", "flac", "ogg"]):
        data = io.BytesIO()
        soundfile.write(data, np.zeros((800 * (i + 1), 2)), 8000, format=form)
        sounds.append({"__key__": form, form: data.getvalue()})
    cut = {"__key__": "cut", "wav": sounds[0]["wav"][:-100]}
    write_samples([*sounds, {"__key__": "none", "wav": b"RIFF"}, cut], name)
    list(refresh_indexes([name]))
    build_columns(name, "duration:wav;flac;ogg", on_error="skip")
    durations = pq.read_table(f"{name}.columns.parquet")["duration"].to_pylist()
    assert durations == pytest.approx([0.1, 0.2, 0.3, None, None])


def test_durations_of_what_ffmpeg_alone_reads(tmp_path):
    av, name, data = pytest.importorskip("av"), str(tmp_path / "a.tar"), io.BytesIO()
    with av.open(data, "w", format="ipod") as container:
        sound = container.add_stream("alac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4000), np.int16), format="s16p", layout="mono")
        frame.rate = 8000
        container.mux([*sound.encode(frame), *sound.encode(None)])
    write_samples([{"__key__": "a", "m4a": data.getvalue()}], name)
    list(refresh_indexes([name]))
    build_columns(name, "duration:m4a")
    assert pq.read_table(f"{name}.columns.parquet")["duration"].to_pylist() == [0.5]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("width", None),
        ("widht:jpg", "'widht:jpg' is no column"),
        ("", "'' is no column"),
        ("width:jpg, width:png", "two columns have the name width"),
        ("json.a-b", "'a-b' cannot be the name"),
        ("key=length:txt", "'key' cannot be the name"),
        (".score", "'.score' is no column"),
        ("width:", "'width:' is no column"),
    ],
)
def test_malformed_columns(wrong, words):
    if words is None:
        assert str(parse_columns(wrong)["width"]) == "width", "a field, whatever its name"
        return
    with pytest.raises(ValueError, match=words):
        parse_columns(wrong)


def test_values_of_several_types_are_an_error(tmp_path):
    name = str(tmp_path / "a.tar")
    write_samples([{"__key__": str(i), "json": {"a": value}} for i, value in enumerate([1, "one"])], name)
    list(refresh_indexes([name]))
    with pytest.raises(SampleError, match=r"a\.tar: column a: "):
        build_columns(name, "json.a")


def keys(dataset):
    return [found["__key__"] for found in dataset]


def test_selections_by_columns_are_those_by_samples(shards):
    build_columns(shards, EXPRESSION)
    by_columns = ShardDataset(shards, shuffle=True, seed=1).select("width >= 20 and score > 0.3 and key != '011'")
    by_samples = ShardDataset(shards, shuffle=True, seed=1).select(
        lambda s: ("jpg" in s or "png" in s) and s["__key__"] != "011" and twice(s) >= 20 and b"score" in s["json"]
    )
    assert keys(by_columns) == keys(by_samples)
    assert by_columns.source.digest == by_samples.source.digest
    assert keys(Stream.from_shards(shards).select("shard == 'a-1' and n % 2 == 0")) == [
        f"{i:03d}" for i in range(10, 20, 2)
    ]
    again = pickle.loads(pickle.dumps(by_columns))
    assert keys(again) == keys(by_columns)
    parts = (keys(ShardDataset(shards, world=World(rank, 3)).select("n < 21")) for rank in range(3))
    assert sorted(key for part in parts for key in part) == [f"{i:03d}" for i in range(21)]


def test_only_columns_are_read(shards, tmp_path):
    with serving(tmp_path) as site:
        urls = f"{site.url}/a-{{0..2}}.tar"
        build_columns(urls, "json.score, size:jpg")
        dataset = Stream.from_shards(urls, index=True)
        site.clear()
        assert len(dataset.select("size > 0 or not has('size')")) == 30
        assert site.asked(".tar") == 0, "the index has sizes"
        site.clear()
        selected = dataset.select("score > 2.5")
        assert site.asked(".tar") == 3, "one request each, for the ETag"
        site.clear()
        assert keys(selected) == ["026", "027", "028", "029"]
        assert {path for path, _ in site.requests if path.endswith(".tar")} == {"/a-2.tar"}


def test_columns_are_read_without_a_thread(shards, tmp_path):
    build_columns(shards, "length:txt")
    program = (
        "import os, pyarrow.parquet; from tarshards.index.columns import Location, ShardColumns; "
        "before = os.listdir('/proc/self/task'); ShardColumns.load(Location('a-0.tar')); "
        "print(os.listdir('/proc/self/task') == before)"
    )
    done = run(f'python3 -c "{program}"', tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_names_that_are_no_columns(shards):
    build_columns(shards, "json.score")
    with pytest.raises(ShardIndexError, match=r"no column width; there are score; add it with .*, or give fields="):
        Stream.from_shards(shards).select("score > 1 and width > 2")
    read = Stream.from_shards(shards).select("json['deep']['n'] > 25")
    assert keys(read) == ["026", "027", "028", "029"], "none of its names is a column"
    with pytest.raises(SampleError, match="score"):
        Stream.from_shards(shards).select("score > 1", fields="json")
    with pytest.raises(ValueError, match="cannot be asked of columns"):
        Stream.from_shards(shards).select("score > 1 and str(score) == 'x'")


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_tables_attach_by_key(shards, tmp_path, form):
    build_columns(shards, "length:txt")
    rows = pa.table(
        {"id": [f"{i:03d}" for i in range(29, 4, -1)] + ["zzz"], "mark": [*range(29, 4, -1), 99], "word": ["w"] * 26}
    )
    path = tmp_path / f"scores.{form}"
    if form == "parquet":
        pq.write_table(rows, path)
    else:
        lines = [
            ",".join(rows.column_names),
            *(f'"{row["id"]}",{row["mark"]},{row["word"]}' for row in rows.to_pylist()),
        ]
        path.write_text("\n".join(lines))
    attached = attach_columns(shards, path, key="id")
    assert (len(attached.written), attached.samples_without, attached.rows_without) == (3, 5, 1)
    assert table(tmp_path)["mark"].to_pylist() == [None] * 5 + [5, 6, 7, 8, 9]
    assert table(tmp_path).column_names == ["__key__", "length", "mark", "word"]
    assert keys(Stream.from_shards(shards).select("mark > 10 and length == 1")) == ["015", "022", "029"]
    assert build_columns(shards, "length:txt") == []


def run(line, folder):
    bin_ = Path(__file__).parents[2] / "bin"
    path = os.pathsep.join([str(bin_), os.path.dirname(sys.executable), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )


def test_the_tools(shards, tmp_path):
    write_samples([{"__key__": "029", "txt": b"", "json": b"{"}], str(tmp_path / "b.tar"))
    done = run("tarindex -q -j 2 --columns 'n=json.deep.n, length:txt' 'a-{0..2}.tar'", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for line in (
        "tarcat --where 'n >= 27 or length == 6 and n < 10' 'a-{0..2}.tar' | tarshow -f txt | cut -f 1",
        "targrep --where 'n >= 27 or length == 6 and n < 10' -l 'a-{0..2}.tar'",
        "tarsplit -q -o x-%d.tar --where 'n >= 27 or length == 6 and n < 10' 'a-{0..2}.tar'; targrep -l . x-0.tar",
        "tarproc -c true --where 'n >= 27 or length == 6 and n < 10' 'a-{0..2}.tar' | targrep -l .",
    ):
        done = run(line, tmp_path)
        assert (done.stdout.split(), done.returncode) == (["006", "027", "028", "029"], 0), (line, done.stderr)
    done = run("printf '027\n003\n' | tarcat --keys - --where 'n > 3' 'a-{0..2}.tar' | targrep -l .", tmp_path)
    assert (done.stdout.split(), done.returncode) == (["027"], 0)
    done = run("printf '027\nx\n' | tarcat --keys - --where 'n > 3' 'a-{0..2}.tar' -o y.tar", tmp_path)
    assert (done.returncode, done.stderr) == (1, "tarcat: no sample has 1 of 2 keys: x\n")
    done = run("tarcat --where '58 // n > 2' -f txt 'a-{0..2}.tar' >/dev/null", tmp_path)
    assert (done.returncode, "a-0.tar: 000: '58 // n > 2' fails: ZeroDivisionError" in done.stderr) == (1, True)
    done = run("tarcat --max-errors 1 --where '58 // n > 2' 'a-{0..2}.tar' | targrep -l .", tmp_path)
    assert done.stdout.split() == [f"{i:03d}" for i in range(1, 20)], done.stderr
    done = run("tarcat --where 'n > 3 and width > 2' 'a-{0..2}.tar' >/dev/null", tmp_path)
    assert (done.returncode, "no column width; there are n, length" in done.stderr) == (1, True)
    done = run("tarindex -q --columns json.a b.tar", tmp_path)
    assert (done.returncode, "b.tar: 029.json" in done.stderr) == (1, True), done.stderr
    done = run("tarindex -q --columns json.a --max-errors 1 b.tar", tmp_path)
    assert (done.returncode, "quarantined      1" in done.stderr) == (0, True), done.stderr
    (tmp_path / "t.csv").write_text("id,good\n000,true\n001,false\n29,true\n")
    done = run("tarindex -q --attach t.csv --key id 'a-{0..2}.tar'; targrep --where good -l 'a-{0..2}.tar'", tmp_path)
    assert (done.stdout, done.stderr) == ("000\n", "tarindex: 28 samples have no row, and 1 rows no sample\n")
    done = run("tarindex --columns widht:jpg a-0.tar", tmp_path)
    assert (done.returncode, "--columns: 'widht:jpg' is no column" in done.stderr) == (2, True)


def test_threads_only_read_what_arrow_parses(tmp_path, monkeypatch):
    """A thread that is in Arrow's C++ when the process ends would abort it."""
    names = [str(tmp_path / f"a-{i:02d}.tar") for i in range(40)]
    for i, name in enumerate(names):
        write_samples([{"__key__": str(i), "json": b'{"n": %d}' % i}], name)
    list(refresh_indexes(names))
    build_columns(names, "n=json.n")
    parse, threads, waits = columns.read_parquet, [], itertools.count(step=10**6)
    monkeypatch.setattr(columns, "read_parquet", lambda data: threads.append(threading.current_thread()) or parse(data))
    monkeypatch.setattr("tarshards.index.inventory._waits", lambda: next(waits))  # as of a slow disk
    monkeypatch.setattr("tarshards.index.inventory.FEW", 4)  # before it is known
    read_head, readers = columns.read_head, set()
    monkeypatch.setattr(columns, "read_head", lambda shard: readers.add(threading.get_ident()) or read_head(shard))
    assert len(Stream.from_shards(names).select("n >= 20")) == 20
    assert set(threads) == {threading.main_thread()}
    assert readers > {threading.main_thread().ident}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_of_csv_stays_text_unless_another_type_loses_nothing(shards, tmp_path, encoding):
    rows = "id,code,long,score,n\n000,007,12345678901234567890,0.50,1\n001,012,22345678901234567890,0.25,\n"
    (tmp_path / "t.csv").write_bytes(rows.encode(encoding))
    attach_columns(shards, tmp_path / "t.csv", key="id")
    table = pq.read_table(tmp_path / "a-0.tar.columns.parquet").select(["code", "long", "score", "n"]).slice(0, 2)
    assert table.to_pylist() == [
        {"code": "007", "long": "12345678901234567890", "score": 0.5, "n": 1},
        {"code": "012", "long": "22345678901234567890", "score": 0.25, "n": None},
    ]
    (tmp_path / "t.csv").write_text("id,a,a\n000,1,2\n")
    with pytest.raises(SampleError, match=r"t\.csv: two columns have the same name: id, a, a"):
        attach_columns(shards, tmp_path / "t.csv", key="id")


def test_tables_that_do_not_attach(shards, tmp_path):
    with pytest.raises(SampleError, match=r"no column 'key' of keys; there are id, mark"):
        attach_columns(shards, pa.table({"id": ["000"], "mark": [1]}), key="key")
    with pytest.raises(SampleError, match=r"several rows have this key"):
        attach_columns(shards, pa.table({"__key__": ["000", "000"], "mark": [1, 2]}))
    with pytest.raises(SampleError, match="no row has the key of a sample, such as 000"):
        attach_columns(shards, pa.table({"__key__": ["x"], "mark": [1]}))
    with pytest.raises(SampleError, match=r"a table of columns is a \.parquet or \.csv file"):
        attach_columns(shards, tmp_path / "a-0.tar")
    (tmp_path / "a.parquet").write_bytes(b"?")
    with pytest.raises(SampleError, match=r"a\.parquet: cannot read this table"):
        attach_columns(shards, tmp_path / "a.parquet")
    assert not Location(str(tmp_path / "a-0.tar.columns.parquet")).exists()


def test_shards_without_an_index(tmp_path):
    name = str(tmp_path / "a.tar")
    write_samples([sample(1)], name)
    with pytest.raises(ShardIndexError, match="no index found"):
        build_columns(name, "length:txt")


def test_columns_of_shards_with_faults_and_without_samples(tmp_path):
    names = [str(tmp_path / f"{name}.tar") for name in "abc"]
    write_samples([], names[0])
    write_samples([{"__key__": "a", "txt": "one"}, {"__key__": "b", "cls": 1}], names[1])
    write_samples([{"__key__": "c", "cls": 1}], names[2])
    list(refresh_indexes(names))
    build_columns(names, "length:txt")
    assert len(IndexedShards(names)) == 3
    assert np.asarray(keys(Stream.from_shards(names).select("length == 3"))).tolist() == ["a"]
