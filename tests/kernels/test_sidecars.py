"""The beginnings of many sidecars, and which of them a folder has."""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from soak import rounds

from tarshards import TarWriter
from tarshards.index.build import build_index


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> tuple[str, bytes]:
    name = str(tmp_path_factory.mktemp("head") / "a.tar")
    with TarWriter(name) as writer:
        for i in range(20):
            writer.write({"__key__": f"{i}", "cls": i})
    build_index(name).save(name)
    return name, Path(f"{name}.index").read_bytes()


def numbers_in(found: bytes) -> list[tuple[int, ...]]:
    numbers = array("q", found)
    return [tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 3)]


def test_of_many_sidecars_each_is_read(sidecars, tmp_path):
    """In a folder of their own or beside their shards; some have no shard, or a folder, or one of another size."""
    (tmp_path / "idx").mkdir()
    wanted, names = [], []
    for i in range(12):
        path, count = tmp_path / f"{i}.tar", 7**i % 100_000
        size = (count + 1) * 512 + i
        if i == 0:
            path.mkdir()
            size = path.stat().st_size
        elif i != 5:
            path.touch()
            os.truncate(path, size + (i == 6))
        entries = {"size": size, "fingerprint": 9, "digest": bytes(16), "split": "last", "archives": 2, "end": size}
        shard = {entry: entries[entry] for entry in list(entries)[: 2 + i % 5]}
        packed = msgpack.packb({"format": "tarshards-index", "version": 1 + i % 2, "shard": shard, "keys": count * [0]})
        for folder in tmp_path, tmp_path / "idx":
            (folder / f"{i}.tar.index").write_bytes(packed[:300])
        names.append(str(path))
        wanted.append((-2, -1, -1) if i in (0, 5, 6) else (count, size, int("split" in shard)))
    folder = os.fsencode(f"{tmp_path}/")
    for indexes in folder, folder + b"idx/":
        assert numbers_in(sidecars.read_heads(folder, indexes, "\0".join(names).encode())) == wanted
    beyond = "\0".join([*names, f"{tmp_path}/" + "n" * 5000, f"{tmp_path}/", ""]).encode()
    outcomes = numbers_in(sidecars.read_heads(folder, folder, beyond))[len(names) :]
    assert [samples for samples, _, _ in outcomes] == [-2, -1, -1]


def test_what_the_kernel_reads_of_a_damaged_index_is_what_it_says(sidecars, head):
    """Where the kernel gives no numbers, the parser of the twin decides, so that the same comes of both."""
    name, right = head
    folder, path = os.fsencode(os.path.dirname(name) + "/"), os.fsencode(name)
    rng, outcomes = random.Random(0), set()
    for _ in range(rounds(900)):
        data = bytearray(right)
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(130)
            data[at : at + rng.randrange(3)] = rng.choice([b"", b"\0", b"\xcf", b"\x81", b"\xa5", rng.randbytes(1)])
        Path(f"{name}.index").write_bytes(data[: rng.choice([400, 400, rng.randrange(200)])])
        native, twin = (numbers_in(one.read_heads(folder, folder, path)) for one in (sidecars.kernel, sidecars.twin))
        assert native in ([(-2, -1, -1)], twin)
        outcomes.add((native == twin, twin[0][0] < 0))
    assert outcomes >= {(True, True), (True, False)}


@given(names=st.lists(st.sampled_from(["a", "b", "c", "d", "", "x" * 300, "a.tar", "b.tar"]), min_size=1))
def test_the_names_in_a_folder_are_found(sidecars, tmp_path_factory, names):
    folder = tmp_path_factory.getbasetemp() / "listed"
    folder.mkdir(exist_ok=True)
    for name in "a", "c", "a.tar":
        (folder / name).touch()
    text = "\0".join(names).encode()
    assert list(sidecars.are_listed(os.fsencode(folder), text)) == [name in ("a", "c", "a.tar") for name in names]
    with pytest.raises(FileNotFoundError):
        sidecars.are_listed(b"/nowhere/at/all", text)
    for path in "/nowhere/at/all/", f"{folder}/":
        shards = os.fsencode("\0".join(path + name for name in names))
        unreadable = [name for name in names if len(name) > 255 and path == f"{folder}/"]
        found = numbers_in(sidecars.read_heads(os.fsencode(path), os.fsencode(path), shards))
        assert found.count((-2, -1, -1)) == len(unreadable)
        assert found.count((-1, -1, -1)) == len(names) - len(unreadable)
