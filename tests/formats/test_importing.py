"""Imports survive an export: JSON lines, folders, and Python datasets."""

from __future__ import annotations

import gzip
import json
import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest
import range_server
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline
from PIL import Image
from soak import SOAK

from tarshards import (
    Ledger,
    Stream,
    export_dataset,
    import_dataset,
    open_url,
    read_msgpack,
    read_rows,
    read_samples,
    write_dataset,
    write_samples,
)
from tarshards.errors import OpenError, SampleError, TarshardsError, UrlError
from tarshards.formats import importing
from tarshards.formats.importing import row_to_sample
from tarshards.formats.naming import SUFFIX
from tarshards.samples.codecs import decode_field


def write_lines(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_lines(paths) -> list:
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().split("\n")[:-1]]
    return [{name: value for name, value in row.items() if name != "__key__"} for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_lines_become_fields(tmp_path):
    rows = [{"Caption": "hé", "cls": 3, "width": 7, "meta": {"a": [1, None]}, "raw": {"base64": "/w=="}, "none": None}]
    source = write_lines(tmp_path / "train.v1.jsonl", rows)
    assert import_dataset(source, str(tmp_path / "out-%06d.tar")) == [str(tmp_path / "out-000000.tar")]
    (sample,) = read_samples(str(tmp_path / "out.shards.json"))
    assert sample == {
        "__key__": "train-v1/000000000",
        "__url__": str(tmp_path / "out-000000.tar"),
        "caption.txt": "hé".encode(),
        "cls": b"3",
        "width.json": b"7",
        "meta.json": b'{"a": [1, null]}',
        "raw.bin": b"\xff",
        "none.json": b"null",
    }
    record = json.loads((tmp_path / f"out{SUFFIX}").read_text())
    assert record["order"] == list(rows[0])
    assert record["fields"]["caption.txt"] == "Caption"


NAMES = st.sampled_from(["a", "B", "cls", "txt", "jpg", "seg.png", "meta.json", "a b", "ä", "__x__", "x/y", ".z", ""])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
ROWS = st.lists(st.dictionaries(NAMES, JSON, min_size=1, max_size=5), min_size=1, max_size=8)


@given(rows=ROWS, max_bytes=st.sampled_from([1, 50, 10**6]))
def test_lines_come_back(tmp_path_factory, rows, max_bytes):
    folder = tmp_path_factory.mktemp("rows")
    source = write_lines(folder / "a.jsonl", rows)
    options = {"executor": Inline(), "sync": False}
    shards = import_dataset(source, str(folder / "out-%d.tar"), max_bytes=max_bytes, **options)
    back = export_dataset(shards, str(folder / "back-%d.jsonl"), **options)
    assert read_lines(back) == rows
    assert [sample["__key__"] for sample in read_samples(shards)] == [f"a/{n:09d}" for n in range(len(rows))]
    left = {path.name for path in folder.iterdir() if path.name.startswith(".") or path.suffix in (".done", ".begun")}
    assert not left


def test_keys_come_from_the_rows_or_a_template(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"__key__": "x", "n": 1}, {"n": 2}, {"n": 30, "s": "t"}])
    (shard,) = import_dataset(source, str(tmp_path / "o-%d.tar"), key="{file}-{record}-{n:04d}")
    assert [sample["__key__"] for sample in read_samples(shard)] == ["x", "a-1-0002", "a-2-0030"]
    with pytest.raises(SampleError, match=r"a\.jsonl: line 2: no column 's' for the key"):
        import_dataset(source, str(tmp_path / "p-%d.tar"), key="{s}")
    with pytest.raises(ValueError, match=r"\{record:q\}"):
        import_dataset(source, str(tmp_path / "p-%d.tar"), key="{record:q}")


def test_a_bad_line_names_file_and_line_and_costs_no_other(tmp_path):
    lines = [
        '{"n": 0}',
        '{"n": 1',
        "[2]",
        '{"n": 3}',
        "",
        '{"n": 1e999}',
        '{"n": 1, "N": 2}',
        '{"__key__": "a.b", "n": 7}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*map(str.encode, lines), b'{"n": "\xff"}', b'{"n": 8}\n']))
    source, pattern = str(tmp_path / "a.jsonl"), str(tmp_path / "o-%d.tar")
    with pytest.raises(SampleError, match=r"a\.jsonl: line 2: .*Expecting"):
        import_dataset(source, pattern)
    ledger = Ledger(max_errors=6)
    shards = import_dataset(source, pattern, on_error=ledger, overwrite=True)
    assert [sample["n.json"] for sample in read_samples(shards)] == [b"0", b"3", b"8"]
    places = [entry.shard for entry in ledger.quarantined]
    assert places == [*(f"{source}: line {line}" for line in (2, 3, 6, 7)), source, f"{source}: line 9"]
    assert ledger.quarantined[-2].key == "a.b"
    assert (ledger.samples, ledger.failed) == (3, 6)
    with pytest.raises(TarshardsError, match="line 7"):
        import_dataset(source, pattern, on_error=Ledger(max_errors=3), overwrite=True)


def test_lines_of_json_with_nan_are_kept_as_decoding_reads_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": NaN, "y": [1, -Infinity]}\n{"x": 1.5, "y": []}\n')
    (shard,) = import_dataset(str(tmp_path / "a.jsonl"), str(tmp_path / "o-%d.tar"))
    first, second = (next(iter(Stream([sample]).decode())) for sample in read_samples(shard))
    assert np.isnan(first["x.mp"])
    assert first["y.mp"] == [1, -np.inf]
    assert (second["x.json"], second["y.json"]) == (1.5, [])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_lines_of_json_in_the_encoding_of_their_byte_order_mark(tmp_path, encoding):
    (tmp_path / "a.jsonl").write_bytes('{"t": "ü"}\n{"t": "é"}\n'.encode(encoding))
    shards = import_dataset(str(tmp_path / "a.jsonl"), str(tmp_path / "o-%d.tar"), max_bytes=1)
    assert [sample["t.txt"].decode() for sample in read_samples(shards)] == ["ü", "é"]


def test_pieces_of_one_file_are_the_same_for_any_executor(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", ({"n": n, "t": "x" * (n % 90)} for n in range(300)))
    one, other = tmp_path / "one", tmp_path / "other"
    import_dataset(source, str(one / "o-%03d.tar"), max_bytes=2000)
    import_dataset(source, str(other / "o-%03d.tar"), max_bytes=2000, executor=Inline())
    assert contents(one) == contents(other)
    assert len(list(one.glob("*.tar"))) > 5
    assert [sample["n.json"] for sample in read_samples(str(one / "o.shards.json"))] == [b"%d" % n for n in range(300)]


def test_compressed_lines_stay_whole(tmp_path):
    rows = [{"n": n} for n in range(50)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    shards = import_dataset(str(tmp_path / "a.jsonl.gz"), str(tmp_path / "o-%d.tar"), max_bytes=10)
    assert len(shards) == 1
    assert read_lines(export_dataset(shards, str(tmp_path / "b-%d.jsonl"))) == rows


def test_a_damaged_file_keeps_what_precedes_the_damage_and_the_other_files(tmp_path):
    data = gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(10)))
    (tmp_path / "a.jsonl.gz").write_bytes(data[:-8])
    write_lines(tmp_path / "b.jsonl", [{"n": 10}])
    ledger = Ledger(max_errors=1)
    shards = import_dataset(str(tmp_path / "*.jsonl*"), str(tmp_path / "o-%d.tar"), on_error=ledger)
    assert [sample["n.json"] for sample in read_samples(shards)] == [b"%d" % n for n in range(11)]
    assert ledger.quarantined[0].shard == str(tmp_path / "a.jsonl.gz")


def test_files_of_one_name_have_keys_of_their_folders(tmp_path):
    for name in "xy":
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "a.jsonl", [{"n": 1}])
    shards = import_dataset([str(tmp_path / name / "a.jsonl") for name in "xy"], str(tmp_path / "o-%d.tar"))
    assert [sample["__key__"] for sample in read_samples(shards)] == ["x/a/000000000", "y/a/000000000"]


@pytest.mark.parametrize(
    "names",
    [
        ["train.0.jsonl", "train.1.jsonl"],
        ["cuts.000000.jsonl.gz", "cuts.000001.jsonl.gz"],
        ["c4-train.00000-of-01024.json.gz", "c4-train.00001-of-01024.json.gz"],
        ["train-00000-of-00002.jsonl.zst", "train-00001-of-00002.jsonl.zst"],
        ["a.jsonl-00000-of-00002", "a.jsonl-00001-of-00002"],
        ["part.v1.ndjson.xz", "part.v2.ndjson.xz"],
        ["data.2024.01.jsonl.bz2", "data.2024.02.jsonl.bz2"],
    ],
)
def test_files_that_a_number_tells_apart_have_keys_of_their_own(tmp_path, names):
    for number, name in enumerate(names):
        with open_url(str(tmp_path / name), "wb") as stream:
            stream.write(b'{"n": %d}\n' % number)
    together = import_dataset([str(tmp_path / name) for name in names], str(tmp_path / "a-%d.tar"))
    alone = [import_dataset(str(tmp_path / name), str(tmp_path / f"{i}-%d.tar"))[0] for i, name in enumerate(names)]
    for shards in (together, alone):
        samples = list(read_samples(shards))
        assert [json.loads(sample["n.json"]) for sample in samples] == [0, 1]
        keys = [sample["__key__"] for sample in samples]
        assert len({*keys}) == 2
        assert not any("." in key for key in keys)
    templated = import_dataset(
        [str(tmp_path / name) for name in names], str(tmp_path / "t-%d.tar"), key="{file}_{record}"
    )
    assert len({sample["__key__"] for sample in read_samples(templated)}) == 2


@pytest.mark.parametrize("form", [str, lambda folder: f"{folder}/"])
def test_a_folder_of_jsonl(tmp_path, form):
    rows = [{"n": i} for i in range(4)]
    for name, store in (("squirrel", "{}.gz"), ("files", "a.{}.jsonl")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / ".hidden").write_text("no row")
        for i in range(2):
            with open_url(str(folder / store.format(i)), "wb") as stream:
                stream.write("".join(json.dumps(row) + "\n" for row in rows[2 * i :][:2]).encode())
        assert [row["n"] for row in read_rows(form(folder), format="jsonl")] == [0, 1, 2, 3]
        import_dataset(form(folder), str(tmp_path / f"{name}-%d.tar"), format="jsonl")
    assert [row["n"] for row in read_rows(form(tmp_path / "files"))] == [0, 1, 2, 3], "all its files say that"
    with pytest.raises(UrlError, match="a folder without files of csv; name these files"):
        read_rows(form(tmp_path / "files"), format="csv")


def test_json_that_is_one_array_is_named(tmp_path):
    (tmp_path / "a.json").write_text('[{"n": 1},\n {"n": 2}]\n')
    with pytest.raises(SampleError, match=r"a\.json: line 1: "):
        import_dataset(str(tmp_path / "a.json"), str(tmp_path / "a-%d.tar"))
    (tmp_path / "b.json").write_text('{"n": 1}\n{"n": 2}\n')
    for source in (tmp_path / "b.json", [str(tmp_path / "b.json")], str(tmp_path / "b*.json")):
        assert [row["n"] for row in read_rows(source)] == [1, 2]


def test_an_existing_shard_is_not_replaced_unasked(tmp_path):
    source, pattern = write_lines(tmp_path / "a.jsonl", [{"n": 1}]), str(tmp_path / "o-%d.tar")
    import_dataset(source, pattern)
    with pytest.raises(OpenError, match=r"o-0\.tar: the file exists; --overwrite replaces it"):
        import_dataset(source, pattern)
    import_dataset(source, pattern, overwrite=True)
    with pytest.raises(OpenError, match="the folder has files"):
        export_dataset(str(tmp_path / "o-0.tar"), str(tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("place", ["before", "after"])
def test_killed_at_any_step_the_next_run_goes_on_to_the_same_bytes(tmp_path, kill_at, place):
    source = write_lines(tmp_path / "a.jsonl", ({"n": n} for n in range(9)))
    options = {"executor": Inline(), "sync": False}

    def run(folder: Path):
        shards = import_dataset(source, str(folder / "o-%d.tar"), max_bytes=30, **options)
        export_dataset(shards, str(folder / "e-%d.jsonl"), **options)

    run(tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    for step in range(0, 200, 1 if SOAK > 1 else 5):
        folder = tmp_path / f"step-{step}"
        if kill_at(partial(run, folder), step, place) == 0:
            break
        resume(folder, source, options)
        assert contents(folder) == whole, step
    assert step > 20


def resume(folder: Path, source: str, options) -> None:
    """A rerun: the same two calls; a finished one refuses."""
    with suppress(OpenError):
        import_dataset(source, str(folder / "o-%d.tar"), max_bytes=30, **options)
    with suppress(OpenError):
        export_dataset(str(folder / "o-{0..2}.tar"), str(folder / "e-%d.jsonl"), **options)


def test_a_killed_run_does_only_what_is_left_and_sees_what_was_changed(tmp_path, kill_at):
    source, pattern = write_lines(tmp_path / "a.jsonl", ({"n": n} for n in range(9))), str(tmp_path / "o-%d.tar")
    options = {"max_bytes": 30, "executor": Inline(), "sync": False}
    assert kill_at(lambda: import_dataset(source, pattern, **options), 7, "after")
    first = os.stat(tmp_path / "o-0.tar").st_ino
    import_dataset(source, pattern, **options)
    assert os.stat(tmp_path / "o-0.tar").st_ino == first
    for path in tmp_path.glob("o*"):
        path.unlink()
    assert kill_at(lambda: import_dataset(source, pattern, **options), 7, "after")
    write_lines(tmp_path / "a.jsonl", ({"n": 100 + n} for n in range(9)))
    shards = import_dataset(source, pattern, **options)
    assert [sample["n.json"] for sample in read_samples(shards)] == [b"%d" % (100 + n) for n in range(9)]


def test_a_remote_input_that_was_changed_after_an_interrupt_is_imported_again(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    files = [write_lines(tmp_path / f"site/{n}.jsonl", [{"n": n}]) for n in range(3)]
    with range_server.serving(tmp_path / "site") as site:
        urls = [f"{site.url}/{Path(file).name}" for file in files]
        make = partial(import_dataset, urls, str(tmp_path / "o-%d.tar"), executor=Inline(), sync=False)
        write = importing.write_shard

        def interrupted(samples, output, **options):
            if output.url.endswith("o-2.tar"):
                raise KeyboardInterrupt
            return write(samples, output, **options)

        with monkeypatch.context() as patch:
            patch.setattr(importing, "write_shard", interrupted)
            with pytest.raises(KeyboardInterrupt):
                make()
        for n in range(3):
            write_lines(tmp_path / f"site/{n}.jsonl", [{"n": n + 5}])
        site.etag = '"v2"'
        assert [sample["n.json"] for sample in read_samples(make())] == [b"5", b"6", b"7"]


def test_a_file_that_was_removed_after_a_kill_is_made_again(tmp_path, kill_at):
    source, options = write_lines(tmp_path / "a.jsonl", ({"n": n} for n in range(9))), {"executor": Inline()}
    make = partial(import_dataset, source, str(tmp_path / "o-%d.tar"), max_bytes=30, sync=False, **options)
    assert kill_at(make, 7, "after")
    (tmp_path / "o-0.tar").unlink()
    shards = make()
    assert len(list(read_samples(shards))) == 9
    export = partial(export_dataset, shards, str(tmp_path / "e-%d.jsonl"), sync=False, **options)
    assert kill_at(export, 5, "after")
    (tmp_path / "e-0.jsonl").unlink()
    assert len([line for name in export() for line in Path(name).read_text().splitlines()]) == 9


def tree(folder: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return str(folder)


def test_a_folder_of_classes_comes_back(tmp_path):
    files = {f"{name}/{n:02d}.jpg": b"%d" % n for name in ("cat", "dog", "eel/deep") for n in range(5)}
    source = tree(tmp_path / "tree", files)
    shards = import_dataset(source, str(tmp_path / "o-%d.tar"), max_bytes=4)
    samples = list(read_samples(shards))
    assert len(shards) > 2
    assert [(sample["__key__"], sample["cls"]) for sample in samples][::5] == [
        *(("cat/00", b"0"), ("dog/00", b"1"), ("eel/deep/00", b"2"))
    ]
    export_dataset(shards, str(tmp_path / "back"))
    assert contents(tmp_path / "back") == files


def test_a_file_of_a_folder_that_cannot_be_read_costs_its_sample(tmp_path):
    source = tree(tmp_path / "tree", {"cat/0.jpg": b"0", "cat/1.jpg": b"1"})
    (tmp_path / "tree/cat/0.jpg").unlink()
    (tmp_path / "tree/cat/0.jpg").symlink_to(tmp_path / "tree/cat")
    tree(tmp_path / "tree", {"cat/2.jpg": b"2", "cat/2.cls": b"7"})
    ledger = Ledger(max_errors=2)
    shards = import_dataset(source, str(tmp_path / "o-%d.tar"), on_error=ledger)
    assert [sample["__key__"] for sample in read_samples(shards)] == ["cat/1"]
    assert [entry.key for entry in ledger.quarantined] == ["cat/2"]
    with pytest.raises(SampleError, match="not in a folder named after its class"):
        import_dataset(tree(tmp_path / "flat", {"a.jpg": b""}), str(tmp_path / "p-%d.tar"))


def test_files_are_not_written_outside_of_the_folder(tmp_path):
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("../evil.txt", "/evil.txt", "good.txt"):
            archive.addfile(tarfile.TarInfo(name))
    ledger = Ledger(max_errors=2)
    export_dataset(str(tmp_path / "a.tar"), str(tmp_path / "out"), on_error=ledger)
    assert contents(tmp_path) == {"a.tar": (tmp_path / "a.tar").read_bytes(), "out/good.txt": b""}
    assert [entry.key for entry in ledger.quarantined] == ["../evil", "/evil"]


def test_no_file_of_a_folder_is_written_twice(tmp_path):
    rows = [["a", "x/b"], ["a", "c"], ["./a", "x//b", "x/./c"]]
    for number, keys in enumerate(rows):
        samples = [{"__key__": key, "txt": f"{number} {key}"} for key in keys]
        write_samples(samples, str(tmp_path / f"a-{number}.tar"))
    shards, folder = str(tmp_path / "a-{0..2}.tar"), tmp_path / "out"
    reason = r"a-[12]\.tar: .*: the file .* is of another sample, in .*a-0\.tar; export the shards to folders of"
    with pytest.raises(SampleError, match=reason):
        export_dataset(shards, str(folder))
    ledger = Ledger(max_errors=3)
    export_dataset(shards, str(folder), on_error=ledger, overwrite=True)
    assert contents(folder) == {"a.txt": b"0 a", "x/b.txt": b"0 x/b", "c.txt": b"1 c", "x/c.txt": b"2 x/./c"}
    assert sorted(str(entry.key) for entry in ledger.quarantined) == ["./a", "a", "x//b"]
    assert (ledger.samples, ledger.failed) == (4, 3)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({1: "a"}, "the name 1 in a dict, of type int, would not come back as it is"),
        ([msgpack.ExtType(3, b"x")], "bytes is not JSON"),
        (float("inf"), "Out of range float"),
    ],
)
def test_what_json_does_not_hold_is_named_with_its_column(tmp_path, value, reason):
    write_samples([{"__key__": "a", "meta.mp": [value]}, {"__key__": "b", "meta.mp": [1]}], str(tmp_path / "a.tar"))
    with pytest.raises(TarshardsError, match=rf"a\.tar: a\.meta\.mp: .*{reason}"):
        export_dataset(str(tmp_path / "a.tar"), str(tmp_path / "b-%d.jsonl"))
    (back,) = export_dataset(str(tmp_path / "a.tar"), str(tmp_path / "b-%d.jsonl"), on_error="skip", overwrite=True)
    assert read_lines([back]) == [{"meta.mp": [1]}]


class Dataset:
    """A map-style dataset as torch's are."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int):
        if number >= 5:
            raise IndexError
        return {"image": np.full((2, 2), number, np.uint8), "label": number, "name": f"n{number}"}


def test_any_map_style_dataset(tmp_path):
    shards = write_dataset(Dataset(), str(tmp_path / "o-%d.tar"), to_sample=row_to_sample)
    assert [sample["__key__"] for sample in read_samples(shards)] == [f"{n:09d}" for n in range(5)]
    (back,) = export_dataset(shards, str(tmp_path / "b-%d.gz"))
    for found, row in zip(read_msgpack(back), Dataset(), strict=True):
        assert np.array_equal(found["image.npy"], row["image"])
        assert (found["label.json"], found["name.txt"]) == (row["label"], row["name"])
    image = Image.new("RGB", (3, 2), (1, 2, 3))
    sample = row_to_sample({"image": image, "jpg": 7})
    assert decode_field("png", sample["image.png"], "rgb8").tolist() == [[[1, 2, 3]] * 3] * 2
    with pytest.raises(TypeError, match="a row is a dict of columns"):
        row_to_sample((1, 2))


def test_the_page_on_formats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/formats.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    assert read_lines(["back-000000.jsonl"])[1] == {"caption": "a dog", "cls": 4, "box": None}


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("a.xyz", {}, "cannot tell the format from the name"),
        ("-", {"format": "jsonl"}, "reads its files more than once"),
        ("pipe:cat a.jsonl", {"format": "jsonl"}, "reads its files more than once"),
        ("a.jsonl", {"format": "xml"}, "format is one of parquet"),
        ("a.jsonl", {"split": "train"}, "split= applies to"),
        ("a.jsonl", {"max_bytes": 0}, "max_bytes"),
        ("empty.jsonl", {}, "no samples: no row became one"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, source, options, reason):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", [{"n": 1}])
    (tmp_path / "a.xyz").touch()
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises((ValueError, UrlError, SampleError), match=reason):
        import_dataset(source, "o-%d.tar", **options)


def test_exports_name_what_they_cannot_hold(tmp_path):
    rows = [{"__key__": "a", "x": float("nan")}, {"__key__": "b", "x": 1.5}]
    shards = write_dataset(rows, str(tmp_path / "o-%d.tar"), to_sample=row_to_sample)
    with pytest.raises(TarshardsError, match=r"o-0\.tar: a\.x\.mp: Out of range float"):
        export_dataset(shards, str(tmp_path / "b-%d.jsonl"))
    ledger = Ledger(max_errors=1)
    back = export_dataset(shards, str(tmp_path / "b-%d.jsonl"), on_error=ledger, overwrite=True)
    assert read_lines(back) == [{"x.json": 1.5}]
    with pytest.raises(UrlError, match="cannot tell the format from the name"):
        export_dataset(shards, str(tmp_path / "b-%d.xyz"))


def test_a_damaged_shard_exports_what_precedes_the_damage(tmp_path, make_shards):
    shards = make_shards(2)
    path = tmp_path / "set-0000.tar"
    path.write_bytes(path.read_bytes()[:4000])
    ledger = Ledger(max_errors=1)
    back = export_dataset(shards, str(tmp_path / "b-%d.jsonl"), on_error=ledger)
    assert [row["cls"] for row in read_lines(back)] == [0, 3, 4, 5]
    assert ledger.quarantined[0].shard == str(path)
