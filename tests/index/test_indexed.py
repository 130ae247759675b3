"""Samples of indexed shards in any order, from anywhere, reading no more than was asked for."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from range_server import serving
from with_torch import DataLoader, ShardDataset, Subset

from tarshards import IndexedShards, ShardWriter, TarWriter, expand_urls, read_samples
from tarshards.errors import OpenError, SampleError, ShardIndexError, UrlError
from tarshards.index import inventory
from tarshards.index import open as opening
from tarshards.index.build import build_index
from tarshards.parallel.calls import DaemonThreads
from tarshards.storage import wire
from tarshards.testing.faulty_server import Answer, Server
from tarshards.testing.faulty_server import serving as serving_answers

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture
def site(tmp_path):
    with serving(tmp_path) as site:
        yield site


@pytest.fixture
def memory():
    """A folder in fsspec's memory."""
    store = fsspec.filesystem("memory")
    folder = f"/{os.urandom(4).hex()}"
    yield f"memory:/{folder}"
    store.rm(folder, recursive=True)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes shards of samples with a small field, a large one and an empty one."""

    def make(count: int = 12, folder: str = str(tmp_path), large: int = 100_000) -> list[dict[str, bytes]]:
        samples = []
        with ShardWriter(f"{folder}/set-%02d.tar", max_samples=5) as writer:
            for i in range(count):
                big = random.Random(i).randbytes(large)
                samples.append({"__key__": f"{i:03d}", "a": b"%d" % i, "big": big, "nil": b"", "z": b"%d" % -i})
                writer.write(samples[-1])
        return samples

    return make


def keys(samples) -> list[str]:
    return [sample["__key__"] for sample in samples]


@pytest.mark.parametrize("name", ["a::b", "a:b", "zip::b", "d/a::b", "v::1/b"])
def test_names_with_colons_are_indexed_and_read(tmp_path, monkeypatch, name, path_with_tools):
    """As any others, by tools, from the manifest, and with a key index."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for shard in range(2):
        with TarWriter(str(tmp_path / f"{name}-{shard}.tar")) as writer:
            for i in range(3):
                writer.write({"__key__": f"{shard}{i}", "txt": f"{shard}{i}"})
    environment = {**os.environ, "PATH": path_with_tools}

    def texts(line: str) -> str:
        return subprocess.run(
            ["bash", "-ec", line], env=environment, stdout=subprocess.PIPE, check=True, text=True
        ).stdout

    shards = [f"{name}-{shard}.tar" for shard in range(2)]
    texts(f"tarindex --key-index {' '.join(shards)}")
    for urls in shards, "::".join(shards), f"{name}.shards.json" if "/" in name else f"./{name}.shards.json":
        assert len(IndexedShards(urls)) == len(list(read_samples(urls))) == 6
        assert IndexedShards(urls)["12"]["txt"] == b"12"
        assert IndexedShards(urls).shards.key_index is not None
    texts(f"tarindex --check {' '.join(shards)}")
    assert texts(f"tarcat --keys <(echo 12) {' '.join(shards)} | tar xO") == "12"
    assert os.path.basename(name) + "-1/12.txt" in texts(
        f"tarcat --rekey '{{shard}}/{{key}}' {' '.join(shards)} | tar t"
    )


def test_it_is_a_sequence_of_what_reading_gives(make_uneven):
    urls = make_uneven([3, 0, 5, 1, 0])
    expected = list(read_samples(urls))
    found = IndexedShards(urls)
    assert len(found) == 9
    assert list(found) == [found[i] for i in range(9)] == expected
    assert [found[i - 9] for i in range(9)] == expected
    for number in (9, -10, 10**20):
        with pytest.raises(IndexError):
            found[number]
    with pytest.raises(TypeError):
        found[1.0]
    assert expected[4] in found
    assert found.index(expected[4]) == 4
    assert list(reversed(found)) == expected[::-1]


@pytest.mark.parametrize("part", [slice(2, 7), slice(None, None, -1), slice(-3, None), slice(1, 9, 3), slice(5, 2)])
def test_slices_are_sequences_too(make_uneven, part):
    found = IndexedShards(make_uneven([3, 0, 5, 1, 0]))
    expected = list(found)
    assert isinstance(found[part], IndexedShards)
    assert list(found[part]) == expected[part]
    assert len(found[part]) == len(expected[part])
    assert list(found[part][1:][::-1]) == expected[part][1:][::-1]
    assert found[part].keys == keys(expected[part])


def test_keys_and_find(make_uneven):
    found = IndexedShards(make_uneven([3, 0, 5]))
    assert found.keys == [f"{i:06d}" for i in range(8)]
    assert [found.find(key) for key in found.keys] == list(range(8))
    assert found[4:].find("000005") == 1
    for missing in (lambda: found.find("nobody"), lambda: found[4:].find("000003")):
        with pytest.raises(KeyError):
            missing()


def test_a_key_in_two_shards_is_found_in_the_first(make_uneven):
    urls = make_uneven([2])
    twice = IndexedShards([urls, urls])
    assert twice.find("000001") == 1
    message = r"^000001: 2 samples have this key, in .*\.tar: \[1\] and \[3\] read the first two, and places\(key\)"
    with pytest.raises(SampleError, match=message):
        twice["000001"]
    assert twice[2:]["000001"]["__key__"] == "000001"


def test_its_repr_tells_data_apart_and_is_the_same_everywhere(make_uneven):
    samples = IndexedShards(make_uneven([5, 3]))
    assert repr(samples).startswith("IndexedShards(8 samples of 2 shards, digest ")
    assert repr(samples) == repr(pickle.loads(pickle.dumps(samples))) == repr(IndexedShards(make_uneven([5, 3])))
    others = [samples[:7], samples[1:], samples[[3, 1]], samples[[1, 3]], samples.decode(), samples.map(len)]
    others += [IndexedShards(make_uneven([3, 5])), IndexedShards(make_uneven([5, 3], "other"))]
    assert len({repr(each) for each in [samples, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("index", "kind", "words"),
    [
        ([1, 2.5], TypeError, r"a number, a key, a slice, or a list .*, not \[+1, 2\.5\]+$"),
        (np.eye(2, dtype=int), TypeError, "a list or array of one axis, not of [23]$"),
        (1.0, TypeError, r"True and False, not \[?1\.0\]?$"),
        (None, TypeError, r"True and False, not \[?None\]?$"),
        (b"a", TypeError, r"True and False, not \[?b'a'\]?$"),
        (9999, IndexError, "^there is no sample 9999 of 60, which are numbered from 0$"),
        (-9999, IndexError, "^there is no sample -9999 of 60, "),
    ],
)
def test_indices_that_are_none(make_uneven, index, kind, words):
    samples = IndexedShards(make_uneven([3, 57]))
    for ask in lambda: samples[index], lambda: samples.__getitems__([index]):
        with pytest.raises(kind, match=words):
            ask()
    assert samples[np.int64(-1)] == samples[len(samples) - 1] == samples[len(samples) - 1 : np.int8(60)][0]
    with pytest.raises(TypeError, match="keys are a list of str, not one str '000'"):
        samples.locate("000")


def test_fields(write, tmp_path):
    samples = write()
    urls = str(tmp_path / "set.shards.json")
    assert IndexedShards(urls, fields="a z")[3].keys() == {"__key__", "__url__", "a", "z"}
    assert IndexedShards(urls, fields=["nil"])[3]["nil"] == b""
    assert IndexedShards(urls, fields=())[3].keys() == {"__key__", "__url__"}
    assert IndexedShards(urls)[11]["big"] == samples[11]["big"]


@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_as_a_map_style_dataset(make_uneven, method):
    found = IndexedShards(make_uneven([3, 0, 9]))
    found[1]
    options = {"num_workers": 2, "multiprocessing_context": method} if method else {}
    batches = list(DataLoader(found, batch_size=5, **options))
    assert [key for batch in batches for key in batch["__key__"]] == found.keys
    parts = DataLoader(Subset(found, [7, 2, 2]), batch_size=2, collate_fn=keys)
    assert list(parts) == [["000007", "000002"], ["000002"]]


def test_pickled_copies_open_anew(write, tmp_path):
    samples = write()
    found = IndexedShards(str(tmp_path / "set-*.tar"))
    assert len(found[3]["big"]) == 100_000
    packed = pickle.dumps(found[2:])
    assert len(packed) < 2000
    assert keys(pickle.loads(packed)) == keys(samples)[2:]


def test_threads_are_started_only_for_many_files_that_are_waited_for(make_uneven, monkeypatch):
    pools = []
    monkeypatch.setattr(wire, "looking_threads", lambda: pools.append(1) or DaemonThreads(4))
    urls = expand_urls(make_uneven([4, 7, 1]))
    assert (len(IndexedShards(urls)), pools) == (12, [])
    monkeypatch.setattr(inventory, "FEW", 2)
    monkeypatch.setattr(inventory, "_waits", count(0, 2).__next__)
    assert (len(IndexedShards(urls)), len(pools)) == (12, 1)


def test_many_threads(make_uneven, monkeypatch):
    """Few shards are held, so they are opened and released all the time."""
    monkeypatch.setattr(opening, "most_open", lambda: 3)
    found = IndexedShards(make_uneven([4, 7, 1, 9, 5, 6, 3]))
    numbers = random.Random(0).choices(range(35), k=2000)
    with ThreadPoolExecutor(8) as threads:
        assert [sample["cls"] for sample in threads.map(found.__getitem__, numbers)] == [b"%d" % i for i in numbers]
    assert len(found.shards._local) <= 3


def test_over_http_only_what_is_asked_for(write, site):
    samples = write()
    found = IndexedShards(f"{site.url}/set.shards.json")
    assert len(found) == 12
    assert [path for path, _ in site.requests] == ["/set.shards.json"], (
        "the manifest is enough to know how many there are"
    )
    sample = found[7]
    assert {name: sample[name] for name in samples[7]} == samples[7]
    assert (site.asked(".index"), site.asked("set-01.tar"), site.asked("set-00.tar")) == (1, 1, 0)
    site.clear()
    assert found[8]["big"] == samples[8]["big"]
    assert len(site.requests) == 1, "one request for what stands together"
    assert 100_000 < site.bytes < 105_000


def test_over_http_other_fields_are_not_read(write, site):
    write()
    found = IndexedShards(f"{site.url}/set-{{00..02}}.tar", fields="a z")
    found[0]
    site.clear()
    assert [found[i]["z"] for i in range(1, 5)] == [b"-1", b"-2", b"-3", b"-4"]
    assert (len(site.requests), site.bytes < 8 * 2500) == (8, True), "of 100 KB a sample"
    empty = IndexedShards(f"{site.url}/set-{{00..02}}.tar", fields="nil")
    assert [sample["nil"] for sample in empty] == [b""] * 12


def test_a_planned_dataset_over_http_reads_at_once(write, site):
    write(40, large=10)
    dataset = ShardDataset(f"{site.url}/set.shards.json", shuffle=True, fields="a")
    assert site.asked(".index") == 0, "the manifest says that they are there"
    site.clear()
    for _ in range(2):
        assert sorted(int(sample["a"]) for sample in dataset) == list(range(40))
        assert site.asked(".index") == 8, "and read once, however many threads want it"
    assert len(dataset) == 40


def test_http_without_ranges_or_that_changes(write, site):
    write()
    found = IndexedShards(f"{site.url}/set-00.tar")
    found[0]
    site.etag = '"v2"'
    with pytest.raises(OpenError, match=r"set-00\.tar.*changed while it was read"):
        found[3]
    site.ranges = False
    with pytest.raises(OpenError, match="no ranges"):
        IndexedShards(f"{site.url}/set-00.tar")[0]


def test_http_in_workers_after_the_parent_has_read(write, site):
    """The parent's threads are not there in forked workers."""
    write(20, large=10)
    dataset = ShardDataset(f"{site.url}/set.shards.json", shuffle=True, fields="a")
    assert sorted(int(sample["a"]) for sample in dataset) == list(range(20))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert sorted(int(sample["a"]) for sample in loader) == list(range(20))


def test_in_a_store_of_fsspec(write, memory):
    samples = write(12, memory)
    found = IndexedShards(f"{memory}/set.shards.json")
    assert [sample["big"] for sample in found] == [sample["big"] for sample in samples]
    loader = DataLoader(
        found, batch_size=4, collate_fn=keys, num_workers=2, multiprocessing_context="fork", timeout=100
    )
    assert [key for batch in loader for key in batch] == keys(samples)


class OneProcess(MemoryFileSystem):
    """Like the stores that have a thread of their own: not to be used in a process forked since."""

    protocol = "oneprocess"

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.process = os.getpid()

    def cat_file(self, path, start=None, end=None, **options):
        if self.process != os.getpid():
            raise RuntimeError("not fork-safe")
        return super().cat_file(path, start, end, **options)


def test_a_store_that_knows_one_process(write):
    fsspec.register_implementation("oneprocess", OneProcess, clobber=True)
    samples = write(12, "oneprocess://fork")
    found = IndexedShards("oneprocess://fork/set-{00..02}.tar")
    assert keys(found) == keys(samples)
    loader = DataLoader(
        found, batch_size=4, collate_fn=keys, num_workers=1, multiprocessing_context="fork", timeout=100
    )
    assert [key for batch in loader for key in batch] == keys(samples)


def test_no_index(make_shards, tmp_path):
    with pytest.raises(ShardIndexError, match=r"set-0000\.tar\.index: no index found; create one with `tarindex`"):
        IndexedShards(make_shards(2))
    with pytest.raises(OpenError, match=r"nobody\.tar: No such file"):
        IndexedShards(str(tmp_path / "nobody.tar"))
    with pytest.raises(UrlError):
        IndexedShards([])
    with pytest.raises(ShardIndexError, match="streams have no index"):
        IndexedShards("pipe:cat set.tar")


def test_a_compressed_shard_is_refused_with_a_hint(tmp_path):
    url = str(tmp_path / "a.tar.gz")
    with TarWriter(url) as writer:
        writer.write({"__key__": "a", "txt": "x"})
    with pytest.raises(ShardIndexError, match=r"a\.tar\.gz: compressed \(gzip\).*tarcat"):
        IndexedShards(url)


def test_a_stale_index_is_refused(make_uneven, tmp_path):
    urls = make_uneven([3, 4])
    found = IndexedShards(urls)
    index = (tmp_path / "set-0001.tar.index").read_bytes()
    with TarWriter(str(tmp_path / "set-0001.tar")) as writer:
        for i in range(4):
            writer.write({"__key__": f"new{i}", "cls": i, "txt": f"text {i}"})
    (tmp_path / "set-0001.tar.index").write_bytes(index)
    with pytest.raises(ShardIndexError, match=r"set-0001\.tar\.index: stale"):
        found[4]
    with pytest.raises(ShardIndexError, match=r"set-0001\.tar\.index: stale"):
        found[4]
    assert found[1]["cls"] == b"1"
    with pytest.raises(ShardIndexError, match=r"\.index: stale"):
        IndexedShards(urls)[4]
    build_index(str(tmp_path / "set-0001.tar")).save(str(tmp_path / "set-0001.tar"))
    assert IndexedShards(urls)[4]["__key__"] == "new1"


def test_a_damaged_index_is_refused(make_uneven, tmp_path):
    urls = make_uneven([3, 4])
    path = tmp_path / "set-0001.tar.index"
    whole = path.read_bytes()
    for damaged in (whole[:-1], b"", whole[:50] + b"?" + whole[51:]):
        path.write_bytes(damaged)
        with pytest.raises(ShardIndexError, match=r"set-0001\.tar\.index: "):
            IndexedShards(urls)[4]


def test_a_manifest_that_counts_wrongly(write, tmp_path):
    write()
    manifest = tmp_path / "set.shards.json"
    manifest.write_text(manifest.read_text().replace('"nsamples": 5', '"nsamples": 6', 1))
    found = IndexedShards(str(manifest))
    with pytest.raises(ShardIndexError, match=r"set-00\.tar\.index: 5 samples, but 6 in the manifest"):
        found[0]
    assert found[6]["__key__"] == "005"


def test_a_manifest_alone_plans_and_indexes_load_when_a_block_is_opened(write, tmp_path):
    write(50, large=10)
    for path in tmp_path.glob("*.index"):
        path.rename(f"{path}.away")
    dataset = ShardDataset(str(tmp_path / "set.shards.json"), index=True, shuffle=True)
    assert len(dataset) == 50
    for path in tmp_path.glob("*.away"):
        path.rename(str(path).removesuffix(".away"))
    assert sorted(int(sample["a"]) for sample in dataset) == list(range(50))


def test_members_between_samples_and_long_names(tmp_path):
    """What is no field lies between; names need extended headers."""
    import tarfile

    url = str(tmp_path / "a.tar")
    names = ["dir/", *(f"{'deep/' * 40}{i:03d}.{field}" for i in range(5) for field in ("txt", "cls"))]
    with tarfile.open(url, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            path = tmp_path / "member"
            path.write_bytes(name.encode())
            info = archive.gettarinfo(path, name)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            with path.open("rb") as file:
                archive.addfile(info, None if info.isdir() else file)
    build_index(url).save(url)
    assert list(IndexedShards(url)) == list(read_samples(url))
    assert Path(url).stat().st_size < 100_000


def test_the_sidecars_of_remote_shards_are_loaded_several_at_once(tmp_path, make_shards):
    make_shards(4, index=True)
    both = threading.Barrier(2, timeout=30)

    class Pairs(Server):
        """Answers no request for a sidecar before another one has come."""

        def choose(self, method, path, headers, body):
            if path.endswith(".index"):
                both.wait()
            return Answer(), (tmp_path / path.lstrip("/")).read_bytes()

    with serving_answers(Pairs()) as server:
        shards = IndexedShards(f"{server.url}/set.shards.json")
        assert shards.keys == [f"{number:06d}" for number in range(12)]
