"""The pages of errors tell the truth: what they name as a cause raises an error that leads there."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from tarshards import (
    EncodeError,
    IndexedShards,
    ShardWriter,
    Stream,
    TarshardsError,
    expand_urls,
    read_samples,
    write_samples,
)
from tarshards.cli.advice import anchor, headings, place_of

pytestmark = pytest.mark.docs

SAMPLE = {"__key__": "a", "txt": "text"}


def read(data: bytes) -> None:
    Path("made.tar").write_bytes(data)
    list(read_samples("made.tar"))


def whole() -> bytes:
    return Path("a-00.tar").read_bytes()


def damaged() -> bytes:
    return whole()[:1540] + b"x" + whole()[1541:]


def without_index() -> None:
    Path("a-00.tar.index").unlink()
    IndexedShards("a-00.tar")


def decode(**fields: bytes) -> None:
    Stream([{"__key__": "a", **fields}]).decode("rgb8").collect()


def out_of_order() -> None:
    with tarfile.open("mixed.tar", "w") as archive:
        for name in ("a.txt", "b.txt", "a.cls"):
            archive.addfile(tarfile.TarInfo(name))
    list(read_samples("mixed.tar"))


CAUSES = {
    "No such file or directory": lambda: list(read_samples("nothing.tar")),
    "a command runs only with allow_pipe=True": lambda: list(read_samples("pipe:cat a-00.tar")),
    "no file matches": lambda: expand_urls("nothing-*.tar"),
    "unbalanced braces": lambda: expand_urls("a-{00..01.tar"),
    "unknown scheme": lambda: list(read_samples("nowhere://a.tar")),
    "an empty name in a shard expression": lambda: list(read_samples("")),
    "bad header checksum": lambda: read(damaged()),
    "truncated in this member": lambda: read(whole()[:1000]),
    "truncated: no block of zeros at the end of the archive": lambda: read(whole()[:3072]),
    "members after the end of the archive": lambda: read(whole() * 2),
    "empty input, not a tar archive": lambda: read(b""),
    "an HTML page, not a tar archive": lambda: read(b"<!DOCTYPE html>".ljust(2000)),
    "a list of names, to be read as @FILE, not a tar archive": lambda: read(b"a-00.tar\na-01.tar\n"),
    "members of this key are not adjacent": out_of_order,
    "this key is already in the shard": lambda: write_samples([SAMPLE, SAMPLE], "out.tar"),
    "a sample needs a __key__ that is a str": lambda: write_samples([{"txt": "text"}], "out.tar"),
    "a sample without fields cannot be written": lambda: write_samples([{"__key__": "a"}], "out.tar"),
    "would read back as key": lambda: write_samples([{"__key__": "a.b", "txt": "text"}], "out.tar"),
    "KeyError: 'jpg'": lambda: Stream.from_shards("a-*.tar").map(lambda sample: sample["jpg"]).collect(),
    "can run code from the data; decode it with allow_unsafe=True": lambda: decode(pkl=b"x"),
    "Truncated File Read": lambda: decode(jpg=b"\xff\xd8\xff\xe0xxxx"),
    "'utf-8' codec can't decode byte": lambda: decode(txt=b"\xff"),
    "EOF: reading magic string, expected 8 bytes got": lambda: decode(npy=b"x"),
    "is not a decimal integer": lambda: decode(cls=b"cat"),
    "no encoder for": lambda: write_samples([{"__key__": "a", "parquet": [1]}], "out.tar"),
    "no index found; create one with": without_index,
    "tail=, block= require indexed shards;": lambda: Stream.from_shards("a-*.tar", index=False, tail="pad"),
    "streams have no index": lambda: IndexedShards("-"),
    "not a state from state_dict():": lambda: Stream.from_shards("a-*.tar").load_state_dict({"a": 1}),
}


@pytest.mark.parametrize("message", CAUSES)
def test_a_cause_raises_an_error_that_leads_to_its_heading(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ShardWriter("a-{shard:02d}.tar", max_samples=2) as writer:
        for number in range(4):
            writer.write({"__key__": f"{number}", "txt": "text" * 200})
    with pytest.raises(TarshardsError, match=re.escape(message)) as caught:
        CAUSES[message]()
    places = {f"troubleshooting/{page}/#{anchor(text)}": text.replace("…", "") for page, _, text in headings()}
    assert message in places[place_of(caught.value)]


def test_encode_errors_are_those_of_values():
    with pytest.raises(EncodeError, match=r"^a\.cls: "):
        write_samples([{"__key__": "a", "cls": "three"}], "out.tar")
