"""The key index finds what a dict of all keys finds, reads little for it, and notices that it is damaged or stale."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from forked import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from range_server import serving
from soak import SOAK

from tarshards import IndexedShards, ShardWriter, Stream, write_samples
from tarshards.errors import SampleError, ShardIndexError
from tarshards.index import key_index, manifests, refresh
from tarshards.index.key_index import KeyIndex, build_key_index

LONG = "folder/" * 30 + "a key that no header holds"


def write(folder: Path, keys: list[list[str]], name: str = "a") -> str:
    """Write shards with samples of these keys, their indexes, the manifest and the key index; return the manifest."""
    names = []
    for number, own in enumerate(keys):
        names.append(str(folder / f"{name}-{number:03d}.tar"))
        write_samples(
            ({"__key__": key, "txt": key.encode(errors="surrogateescape"), "cls": at} for at, key in enumerate(own)),
            names[-1],
            sync=False,
        )
    found = [outcome.shard for outcome in refresh.refresh_indexes(names, how=manifests.Writing(sync=False))]
    (manifest,) = manifests.update_manifests(found, how=manifests.Writing(sync=False))
    build_key_index(manifests.read_manifest(manifest), sync=False)
    return manifest


def places_of(keys: list[list[str]]) -> dict[str, list[int]]:
    numbers = defaultdict(list)
    for number, key in enumerate(key for own in keys for key in own):
        numbers[key].append(number)
    return numbers


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(key_index, "EACH", 4)


@pytest.fixture
def no_tables(monkeypatch):
    """Fail where all keys are loaded."""
    monkeypatch.setattr("tarshards.index.open.KeyTable", None)


KEYS = st.lists(
    st.sampled_from([*"abcdefgh", "x/y", "ü", "z" * 99, LONG, "\udcff"])
    | st.text("ab/", min_size=1).filter(
        lambda key: not key.endswith("/") and "//" not in key and not key.startswith("/")
    ),
    max_size=12,
    unique=True,
)


@settings(max_examples=30 if SOAK > 1 else 12, deadline=None)
@given(keys=st.lists(KEYS, min_size=1, max_size=5), bits=st.sampled_from([64, 64, 2, 0]))
def test_all_keys_are_found_and_no_others(tmp_path_factory, keys, bits):
    folder = tmp_path_factory.mktemp("keys")
    with pytest.MonkeyPatch.context() as patch:
        whole = key_index.hash_keys
        mask = np.uint64((1 << bits) - 1) if bits else np.uint64(0)
        patch.setattr(key_index, "hash_keys", lambda keys: (whole(keys) & mask) << np.uint64(64 - bits if bits else 0))
        samples = IndexedShards(write(folder, keys))
        assert samples.shards.key_index is not None
        expected = places_of(keys)
        for key in [*expected, "none", "a.b", ""]:
            assert samples.places(key) == expected.get(key, [])
        assert samples.locate([*expected]).tolist() == [own[0] for own in expected.values()]
        repeated = samples.repeated_key()
        assert repeated is None if max(map(len, expected.values()), default=0) < 2 else len(expected[repeated]) > 1


@pytest.fixture
def manifest(tmp_path):
    return write(tmp_path, [[f"{shard}/{i:03d}" for i in range(50)] for shard in range(6)])


@pytest.mark.usefixtures("no_tables")
def test_samples_are_found_without_indexes(manifest):
    samples = IndexedShards(manifest)
    assert samples.find("3/007") == 157
    assert samples.shards._local == {}
    assert samples["3/007"]["txt"] == b"3/007"
    assert [*samples.shards.in_use] == [3]
    with pytest.raises(KeyError, match="'none'"):
        samples["none"]
    with pytest.raises(TypeError, match="a key is a str, not 7"):
        samples.locate([7])
    part = samples[100:200]
    assert (part.find("2/001"), part["3/000"]["txt"]) == (1, b"3/000")
    with pytest.raises(KeyError):
        part.find("0/001")
    again = pickle.loads(pickle.dumps(samples))
    assert again.find("5/049") == 299


def test_a_slice_finds_the_copy_that_it_has(tmp_path):
    manifest = write(tmp_path, [["a", "b"], ["b", "c"]])
    for samples in (IndexedShards(manifest), IndexedShards([f"{tmp_path}/a-000.tar", f"{tmp_path}/a-001.tar"])):
        assert samples.places("b") == [1, 2]
        assert samples[2:].find("b") == 0
        assert samples[::-1].places("b") == [2, 1]


@pytest.mark.forks
@pytest.mark.usefixtures("no_tables")
def test_threads_and_forks(manifest):
    samples = IndexedShards(manifest)
    wanted = [f"{i % 6}/{i % 50:03d}" for i in range(600)]
    expected = [50 * (i % 6) + i % 50 for i in range(600)]
    found: dict[int, list[int]] = {}

    def look_up(number):
        found[number] = samples.locate(wanted).tolist()

    threads = [threading.Thread(target=look_up, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [expected] * 4
    assert in_child(lambda: samples.locate(wanted).tolist() == expected) == 0


@pytest.mark.forks
def test_a_process_that_is_forked_while_a_thread_opens_the_key_index_opens_its_own(manifest, monkeypatch):
    samples = IndexedShards(manifest)
    open_index = KeyIndex.open
    begun, go = threading.Event(), threading.Event()

    def wait_and_open(*args):
        if threading.current_thread() is thread:
            begun.set()
            go.wait()
        return open_index(*args)

    monkeypatch.setattr(KeyIndex, "open", wait_and_open)
    thread = threading.Thread(target=samples.find, args=("2/003",))
    thread.start()
    assert begun.wait(60)
    try:
        assert in_child(lambda: samples.find("2/003") == 103) == 0
    finally:
        go.set()
        thread.join()


@pytest.mark.usefixtures("no_tables")
def test_selections_read_no_other_indexes(manifest):
    dataset = Stream.from_shards(manifest)
    chosen = dataset.select(keys=["1/003", "4/000"])
    assert [sample["__key__"] for sample in chosen] == ["1/003", "4/000"]
    assert len(dataset.select(drop=["1/003", "none"])) == 299
    with pytest.raises(SampleError, match="no sample has 2 of 3 keys: none, x"):
        dataset.select(keys=["x", "1/003", "none"])


def test_other_shards_have_no_key_index(manifest, tmp_path):
    names = [f"{tmp_path}/a-{number:03d}.tar" for number in range(6)]
    assert IndexedShards(names).shards.key_index is not None
    for others in (names[:5], names[::-1], names + names[:1]):
        samples = IndexedShards(others)
        assert samples.shards.key_index is None
        assert samples[samples.find("3/007")]["txt"] == b"3/007"


def test_whoever_replaces_a_shard_removes_the_key_index(manifest, tmp_path):
    write_samples([{"__key__": "new", "txt": "?"}], str(tmp_path / "a-002.tar"))
    assert not (tmp_path / "a.shards.keys").exists()
    list(refresh.refresh_indexes([str(tmp_path / "a-002.tar")]))
    assert IndexedShards(f"{tmp_path}/a-{{000..005}}.tar").find("new") == 100


def test_a_shard_that_another_program_rewrote(manifest, tmp_path, caplog):
    """Of the same size and number of samples: only the digests tell."""
    write_samples(
        ({"__key__": f"2/{i:03d}", "txt": "2/000", "cls": i} for i in range(50, 100)), str(tmp_path / "x.tar")
    )
    (tmp_path / "x.tar").replace(tmp_path / "a-002.tar")
    list(manifests.update_manifests(outcome.shard for outcome in refresh.refresh_indexes([f"{tmp_path}/a-002.tar"])))
    samples = IndexedShards(manifest)
    assert samples.places("2/007") == [], "it was there"
    assert (samples.find("2/077"), samples.find("3/007")) == (127, 157)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/a.shards.keys: not used: shards have changed since it was made; "
        "rebuild it with `tarindex --key-index`"
    ]
    build_key_index(manifests.read_manifest(manifest))
    samples = IndexedShards(manifest)
    assert samples.shards.key_index is not None
    assert (samples.find("2/077"), samples.places("2/007")) == (127, [])


@pytest.mark.usefixtures("no_tables")
def test_damage_is_an_error_and_never_another_answer(manifest, tmp_path):
    path = tmp_path / "a.shards.keys"
    whole, rng = path.read_bytes(), random.Random(0)
    keys = [f"{i % 6}/{i % 50:03d}" for i in range(30)] + ["none", "?"]
    expected = IndexedShards(manifest).locate(keys).tolist()
    errors = 0
    for flip in rng.sample(range(8 * len(whole)), 150):
        damaged = bytearray(whole)
        damaged[flip // 8] ^= 1 << flip % 8
        path.write_bytes(damaged)
        samples = IndexedShards(manifest)
        for key, number in zip(keys, expected):
            try:
                assert samples.locate([key]).tolist() == [number]
            except ShardIndexError as error:
                errors += "a.shards.keys: damaged" in str(error)
    assert errors > 100
    for size in [0, 1, key_index.HEADER.size - 1, key_index.HEADER.size, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ShardIndexError, match=r"a\.shards\.keys: damaged"):
            IndexedShards(manifest).find("3/007")


@pytest.mark.usefixtures("no_tables")
def test_remote_keys_take_few_requests(manifest, tmp_path):
    with serving(tmp_path) as site:
        samples = IndexedShards(f"{site.url}/a.shards.json")
        site.clear()
        assert samples.find("3/007") == 157
        assert len(site.requests) <= 12
        assert site.asked(".tar") == 0
        assert samples["5/001"]["txt"] == b"5/001"
        with pytest.raises(KeyError):
            samples.find("none")


def test_it_takes_20_bytes_a_key_and_is_the_same_by_processes(tmp_path):
    from concurrent.futures import ProcessPoolExecutor

    key_index.EACH = 204
    keys = [[f"{shard}-{i}" for i in range(1000)] for shard in range(5)]
    manifest = write(tmp_path, keys)
    data = (tmp_path / "a.shards.keys").read_bytes()
    assert len(data) < 20.2 * 5000 + 2 * 4096
    with ProcessPoolExecutor(2) as pool:
        build_key_index(manifests.read_manifest(manifest), executor=pool)
    assert (tmp_path / "a.shards.keys").read_bytes() == data


def test_few_blocks_are_read(tmp_path, monkeypatch):
    keys = [[f"{i}" for i in range(20_000)]]
    samples = IndexedShards(write(tmp_path, keys))
    looked = []
    read = KeyIndex._block
    monkeypatch.setattr(KeyIndex, "_block", lambda self, *where: looked.append(where) or read(self, *where))
    for key in range(0, 20_000, 100):
        assert samples.find(str(key)) == key
    assert len(looked) <= 200 * 2, "of 5,000 blocks"


def test_the_tool(tmp_path, monkeypatch, path_with_tools):
    monkeypatch.setattr(key_index, "EACH", 204)
    with ShardWriter(str(tmp_path / "a-%03d.tar"), max_samples=10) as writer:
        for i in range(40):
            writer.write({"__key__": f"{i:03d}", "txt": f"{i}"})
    options = {"cwd": tmp_path, "env": os.environ | {"PATH": path_with_tools}, "capture_output": True, "text": True}
    for line in ("tarindex -q --key-index 'a-*.tar'", "tarindex -q -j 2 --key-index a.shards.json"):
        done = subprocess.run(line, shell=True, **options)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert IndexedShards(str(tmp_path / "a.shards.json")).shards.key_index is not None
    (tmp_path / "keys").write_text("031\n007\n")
    done = subprocess.run("targrep --keys keys -l a.shards.json", shell=True, **options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "007\n031\n", "")
    (tmp_path / "keys").write_text("031\nx\n")
    done = subprocess.run("targrep --keys keys -l a.shards.json", shell=True, **options)
    assert (done.returncode, done.stderr) == (1, "targrep: no sample has 1 of 2 keys: x\n")
    done = subprocess.run("tarindex --key-index --no-manifest a-000.tar", shell=True, **options)
    assert done.returncode == 2
