"""Dataset cards describe the files correctly, and MLCommons' own library accepts them and reads the records."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from range_server import serving

from tarshards import ShardWriter, write_samples
from tarshards.errors import SampleError, UrlError
from tarshards.formats.croissant import CONTEXT, make_card, write_card
from tarshards.storage.expressions import find_shards

ABOUT = {
    "name": "digits",
    "description": "Digits, and what they look like.",
    "licence": "CC-BY-4.0",
    "authors": ["A. Author <a@example.org>", "B. Author"],
    "citation": "@misc{digits}",
    "version": "1.0.0",
    "published": "2026-11-23",
    "url": "https://example.org/digits",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 10), ("val", 3)):
        Path("shards").mkdir(exist_ok=True)
        with ShardWriter(f"shards/{split}-{{shard:d}}.tar", max_samples=4, sha256=split == "train") as writer:
            for number in range(count):
                writer.write(sample(number))
    return tmp_path


def sample(number: int) -> dict:
    """With a folder that has a dot, a field whose name ends like another's, and arrays of two shapes."""
    return {
        "__key__": f"d.x/{number:03d}",
        "cls": number,
        "png": np.full((8, 6, 3), number, "uint8"),
        "mask.png": np.zeros((8, 6), "uint8"),
        "json": {"number": number},
        "txt": f"text {number}",
        "x.npy": np.zeros((3, 4), "float32"),
        "y.npy": np.zeros(number + 1),
    }


SPLITS = {"train": "shards/train.shards.json", "val": "shards/val.shards.json"}


def by_id(nodes: list[dict]) -> dict[str, dict]:
    found = {node["@id"]: node for node in nodes}
    assert len(found) == len(nodes)
    return found


def references(value) -> list[str]:
    """The ids that a part of a card refers to."""
    if isinstance(value, list):
        return [name for each in value for name in references(each)]
    if not isinstance(value, dict):
        return []
    if set(value) == {"@id"}:
        return [value["@id"]]
    return [name for key, each in value.items() if key != "@context" for name in references(each)]


def test_a_card_says_what_was_said(here):
    write_card("digits.json", SPLITS, **ABOUT)
    card = json.loads(Path("digits.json").read_text())
    assert card["@context"] == CONTEXT
    assert (card["@type"], card["conformsTo"]) == ("sc:Dataset", "http://mlcommons.org/croissant/1.0")
    said = [card[key] for key in ("name", "description", "license", "citeAs", "version", "datePublished", "url")]
    assert said == [ABOUT[key] for key in ("name", "description", "licence", "citation", "version", "published", "url")]
    assert card["creator"] == [
        {"@type": "Person", "name": "A. Author", "email": "a@example.org"},
        {"@type": "Person", "name": "B. Author"},
    ]
    bare = make_card({"val": SPLITS["val"]}, name="digits")
    assert bare["description"] == "digits: 3 samples in 1 tar shards."
    assert not {"license", "creator", "citeAs", "version", "datePublished", "url"} & set(bare)


def test_the_suffix_of_a_card_selects_its_compression(here):
    write_card("digits.json", SPLITS, **ABOUT)
    write_card("digits.json.gz", SPLITS, **ABOUT)
    assert gzip.decompress(Path("digits.json.gz").read_bytes()) == Path("digits.json").read_bytes()
    with pytest.raises(UrlError, match=r"the suffix \.gzip is not supported"):
        write_card("digits.json.gzip", SPLITS, **ABOUT)


def test_every_shard_is_listed_with_its_size_and_checksum(here):
    Path("cards").mkdir()
    write_card("cards/digits.json", SPLITS, **ABOUT)
    card = json.loads(Path("cards/digits.json").read_text())
    files = [node for node in card["distribution"] if node["@type"] == "cr:FileObject"]
    assert [file["contentUrl"] for file in files] == [
        *(f"../shards/train-{number}.tar" for number in range(3)),
        "../shards/val-0.tar",
    ]
    for file in files:
        data = Path("cards", file["contentUrl"]).read_bytes()
        assert file["contentSize"] == f"{len(data)} B"
        assert file["sha256"] == hashlib.sha256(data).hexdigest()


def test_a_checksum_of_the_manifest_is_taken(here):
    """So that no shard is read for it."""
    shards = [shard._replace(sha256="0" * 64) for shard in find_shards(SPLITS["train"])]
    card = make_card({"train": shards}, name="digits")
    assert {file["sha256"] for file in card["distribution"] if "sha256" in file} == {"0" * 64}


def test_every_field_of_a_split_is_a_record_set(here):
    card = make_card(SPLITS, **ABOUT)
    nodes = by_id([*card["distribution"], *card["recordSet"]])
    fields = by_id([field for record_set in card["recordSet"] for field in record_set["field"]])
    assert set(references(card)) <= set(nodes) | set(fields)
    assert nodes["splits"]["data"] == [{"splits/name": "train"}, {"splits/name": "val"}]
    names = [name for name in sample(0) if name != "__key__"]
    sets = {split + "/" + name for split in SPLITS for name in names}
    assert sets == {name for name, node in nodes.items() if node["@type"] == "cr:RecordSet"} - {"splits"}
    kinds = {name: fields[f"train/{name}/content"]["dataType"] for name in names}
    text, image = "sc:Text", "sc:ImageObject"
    assert list(kinds.values()) == ["sc:Integer", image, image, text, text, text, text]
    described = [fields[f"train/{name}/content"]["description"] for name in names]
    arrays = ["float32 array of shape 3 x 4", "float64 arrays of several shapes"]
    assert described == ["int", "png image", "png image", "dict", "str", *arrays]
    members = nodes["train/png-members"]
    assert (members["includes"], members["excludes"]) == ("*.png", ["*.mask.png"])
    assert members["encodingFormat"] == "image/png"
    assert [each["@id"] for each in members["containedIn"]] == [f"shards/train-{number}.tar" for number in range(3)]


def test_what_is_not_what_its_name_says_is_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_samples([{"__key__": "a", "cls": b"cat", "npy": b"no array", "pkl": b"", "xyz": b"\xff"}], "a.tar")
    card = make_card({"all": "a.tar"}, name="odd")
    contents = [field for record_set in card["recordSet"] for field in record_set["field"] if "content" in field["@id"]]
    assert {(field["dataType"], field["description"]) for field in contents} == {("sc:Text", "bytes")}


def test_the_same_dataset_gives_the_same_card(here):
    write_card("a.json", SPLITS, **ABOUT)
    write_card("b.json", SPLITS, **ABOUT)
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


def test_urls_have_no_credentials(here):
    with serving(Path(here)) as site:
        base = f"{site.url.removeprefix('http://')}/shards/val-0.tar"
        card = make_card({"val": f"http://me:password@{base}?signature=secret12"}, name="digits")
    text = json.dumps(card)
    assert card["distribution"][0]["contentUrl"] == f"http://{base}"
    assert not any(secret in text for secret in ("password", "secret12", "me:"))


def test_what_has_no_card(here):
    with pytest.raises(UrlError, match="a card names files, and this is a stream"):
        make_card({"all": "pipe:cat shards/val-0.tar"}, name="digits")
    with pytest.raises(UrlError, match=r"the shard shards/val-0.tar comes twice in the splits a, b"):
        make_card({"a": SPLITS["val"], "b": "shards/val-0.tar"}, name="digits")
    write_samples([], "empty.tar")
    with pytest.raises(SampleError, match="the split all has no samples"):
        make_card({"all": "empty.tar"}, name="digits")
    with pytest.raises(ValueError, match="at least one split"):
        make_card({}, name="digits")
    with pytest.raises(UrlError):
        write_card("never.json", {"all": "pipe:true"}, name="digits")
    assert not Path("never.json").exists()


READ = """
import json, sys
from mlcroissant import Dataset
dataset = Dataset(sys.argv[1])
issues = dataset.metadata.ctx.issues
def plain(value):
    value = getattr(value, "size", value)
    return value.decode("latin-1") if isinstance(value, bytes) else value if type(value) is int else str(value)
records = {name: [{key: plain(value) for key, value in record.items()} for record in dataset.records(name)]
           for name in [record_set.uuid for record_set in dataset.metadata.record_sets]}
print(json.dumps([sorted(issues.errors), sorted(issues.warnings), records]))
"""


@pytest.mark.interop
def test_mlcroissant_finds_nothing_wrong_and_reads_the_records(here):
    """In a separate process, since the library chooses a folder for unpacked shards when it is imported."""
    pytest.importorskip("mlcroissant")
    write_card("digits.json", SPLITS, **ABOUT)
    environment = {**os.environ, "CROISSANT_CACHE": str(here / "unpacked")}
    command = [sys.executable, "-W", "ignore", "-c", READ, "digits.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors, warnings, records = json.loads(done.stdout)
    assert (errors, warnings) == ([], [])
    assert records["splits"] == [{"splits/name": "train"}, {"splits/name": "val"}]
    for split, count in (("train", 10), ("val", 3)):
        for field, content in (("cls", int), ("txt", "text {}".format), ("json", '{{"number":{}}}'.format)):
            found = {
                each[f"{split}/{field}/key"]: each[f"{split}/{field}/content"] for each in records[f"{split}/{field}"]
            }
            found = {key: value.replace(" ", "") if field == "json" else value for key, value in found.items()}
            assert found == {f"d.x/{number:03d}": content(number) for number in range(count)}
        assert {each[f"{split}/mask.png/content"] for each in records[f"{split}/mask.png"]} == {"(6, 8)"}
        assert len(records[f"{split}/x.npy"]) == count
