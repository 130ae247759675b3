"""Planned samples of remote shards: in the order of local ones, each block asked for once, losses named."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import random
import time
import weakref
from base64 import b64decode, b64encode
from collections import Counter
from contextlib import closing
from itertools import islice, product
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leftovers import Leftovers, wait_until
from range_server import Site, serving
from soak import some

from tarshards import (
    ArrayLoader,
    IndexedShards,
    Ledger,
    Remote,
    Stream,
    TarWriter,
    World,
    build_index,
    mix,
    readers,
)
from tarshards.errors import OpenError, ShardIndexError
from tarshards.index import fetch
from tarshards.index.fetch import BlockFetcher, Blocks, SampleBlock
from tarshards.index.header_checks import HeldMembers
from tarshards.index.open import OpenShard
from tarshards.kernels import IS_COMPILED
from tarshards.storage import traffic, tuning, wire
from tarshards.storage.ahead import FetchQueue, _RangeFetch
from tarshards.storage.cache import Block, BlockCache, CacheFolder, MappedBlock
from tarshards.storage.manifest import Shard, dump_manifest
from tarshards.storage.wire import calling, run

SHARDS, SAMPLES, SIZE = 4, 150, 4000
BLOCKS = 28  # of 130,000 bytes


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.001)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, rng = tmp_path_factory.mktemp("shards"), random.Random(0)
    for shard in range(SHARDS):
        path = str(folder / f"{shard}.tar")
        with TarWriter(path) as writer:
            for i in range(SAMPLES):
                writer.write({"__key__": f"{shard}-{i}", "bin": rng.randbytes(SIZE), "cls": shard * SAMPLES + i})
        build_index(path).save(path)
    return folder


@pytest.fixture
def site(folder):
    with serving(folder) as site:
        yield site


def urls(site: Site) -> str:
    return f"{site.url}/{{0..{SHARDS - 1}}}.tar"


def keys(samples) -> list[str]:
    return [sample["__key__"] for sample in samples]


# What to fetch.


def blocks_of_four(*, whole: bool = False, singles: int = 0) -> Blocks:
    """Three shards of 10 samples of 100 bytes each."""
    return Blocks(np.full(3, 10), np.full(3, 4), np.full(3, 100.0), are_whole=whole, singles=singles)


def add(blocks: Blocks, *pairs: tuple[int, int]) -> None:
    shards, samples = np.array(pairs, np.int64).T
    blocks.add(shards, samples)


def begin_all(blocks: Blocks) -> list[SampleBlock]:
    """Begin to fetch all that is noted, as a queue does."""
    begun = []
    while (block := blocks.next()) is not None:
        block.settle()
        block.work = object()
        begun.append(block)
    return begun


def brought(blocks: Blocks) -> list[tuple[int, list[int], int]]:
    return [(block.shard, block.numbers.tolist(), block.size) for block in begin_all(blocks)]


def test_blocks_come_in_the_order_of_their_first_use_and_bring_what_is_used():
    blocks = blocks_of_four()
    add(blocks, (2, 9), (0, 3), (1, 5), (0, 1), (2, 8), (0, 4))
    assert brought(blocks) == [(2, [8, 9], 200), (0, [1, 3], 200), (1, [5], 100), (0, [4], 100)]


def test_whole_blocks_bring_all_their_samples():
    blocks = blocks_of_four(whole=True)
    add(blocks, (2, 9), (0, 3))
    assert brought(blocks) == [(2, [8, 9], 400), (0, [0, 1, 2, 3], 400)]


def test_the_first_samples_are_blocks_of_their_own():
    blocks = blocks_of_four(singles=3)
    add(blocks, (0, 1), (0, 2), (0, 1), (0, 3), (0, 0))
    add(blocks, (1, 0), (1, 1))
    assert brought(blocks) == [(0, [1], 100), (0, [2], 100), (0, [0, 1, 3], 300), (1, [0, 1], 200)]


def test_what_is_noted_later_joins_a_block_until_that_is_fetched():
    blocks = blocks_of_four()
    add(blocks, (0, 0))
    add(blocks, (0, 2))
    (block,) = begin_all(blocks)
    assert (block.numbers.tolist(), block.left, block.size) == ([0, 2], 2, 200)
    add(blocks, (0, 2), (1, 1))
    assert block.left == 3, "it brings this sample already"
    add(blocks, (0, 1), (0, 2))
    assert brought(blocks) == [(1, [1], 100), (0, [1, 2], 200)]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([0, 1, 10]),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_each_read_finds_its_block_and_none_is_left_over(reads, at_once, whole, singles, begins):
    blocks = blocks_of_four(whole=whole, singles=singles)
    for number, (shard, sample) in enumerate(reads):
        if number % at_once == 0:
            add(blocks, *reads[number : number + at_once])
        if begins[number]:
            begin_all(blocks)
        block = blocks.find(shard, sample)
        assert block.shard == shard
        assert sample in block.samples
        block.left -= 1
        if not block.left:
            blocks.remove(block)
    assert not any(blocks.at(shard, sample) for shard in range(3) for sample in range(10))


# What is read.


ORDERS = [{}, {"shuffle": True}, {"shuffle": True, "pool": 64}, {"shuffle": True, "pool": 64, "block": 5}]


@pytest.mark.soak
@pytest.mark.parametrize(("options", "ahead"), some([*product(ORDERS, [1, 20_000, None])], 2))
def test_the_order_and_the_bytes_are_those_of_local_shards(site, folder, options, ahead):
    local = list(Stream.from_shards(str(folder / "{0..3}.tar"), index=True, **options))
    remote = list(Stream.from_shards(urls(site), index=True, remote=Remote(ahead=ahead), **options))
    assert keys(remote) == keys(local)
    assert [sample["bin"] for sample in remote] == [sample["bin"] for sample in local]


def test_a_pool_too_large_for_the_memory_says_what_cures_it(site, caplog, monkeypatch):
    held, begin = [], FetchQueue._begin
    monkeypatch.setattr(FetchQueue, "_begin", lambda self, *each: [begin(self, *each), held.append(self.held)][0])
    stream = Stream.from_shards(urls(site), index=True, shuffle=True, remote=Remote(ahead=1_000_000))
    site.clear()
    assert len(list(stream)) == SHARDS * SAMPLES
    # Six parts of a block of 16, and what lies between their samples comes along.
    assert SHARDS * SAMPLES / 16 < site.asked(".tar") < SHARDS * SAMPLES / 2
    assert site.bytes < 3.5 * SHARDS * SAMPLES * SIZE
    assert max(held) <= 1_000_000
    (record,) = [record.getMessage() for record in caplog.records if "requested in parts" in record.getMessage()]
    assert "pool=" in record
    assert "cache_dir=" in record
    caplog.clear()
    assert len(list(Stream.from_shards(urls(site), index=True, shuffle=True, pool=10, block=1))) == SHARDS * SAMPLES
    assert not caplog.records


@pytest.mark.parametrize("block", [4, 16, None])
def test_each_block_is_asked_for_once(site, folder, block):
    stream = Stream.from_shards(urls(site), index=True, shuffle=True, block=block)
    site.clear()
    assert len(list(stream)) == SHARDS * SAMPLES
    asked = [path for path, _ in site.requests if path.endswith(".tar")]
    assert len(asked) <= 1.05 * SHARDS * -(-SAMPLES // (block or 16)) + 1
    assert site.bytes <= 1.05 * sum(path.stat().st_size for path in folder.iterdir())


def test_in_storage_order_requests_are_large(site, monkeypatch):
    for name in ("FAR_SECONDS", "LATE_SECONDS"):  # a busy machine answers late
        monkeypatch.setattr(tuning, name, 600.0)
    stream = Stream.from_shards(urls(site), index=True)
    site.clear()
    assert len(list(stream)) == SHARDS * SAMPLES
    assert len([path for path, _ in site.requests if path.endswith(".tar")]) == SHARDS


def test_workers_fetch_only_what_they_use(site, folder):
    found = []
    site.clear()
    for worker in range(4):
        world = World(worker=worker, num_workers=4)
        found += keys(Stream.from_shards(urls(site), index=True, shuffle=True, world=world))
    assert Counter(found) == Counter(f"{shard}-{i}" for shard in range(SHARDS) for i in range(SAMPLES))
    data = sum(path.stat().st_size for path in folder.glob("*.tar"))
    index = sum(path.stat().st_size for path in folder.glob("*.index"))
    assert site.bytes <= 2.5 * data + 4 * index  # members of others that lie between near ones come along


def test_fields_trim_what_is_fetched(site):
    stream = Stream.from_shards(urls(site), index=True, shuffle=True, fields="cls")
    site.clear()
    assert sorted(int(sample["cls"]) for sample in stream) == list(range(SHARDS * SAMPLES))
    stream = Stream.from_shards(urls(site), index=True, fields="cls", remote=Remote(ahead=1))
    assert sorted(int(sample["cls"]) for sample in stream) == list(range(SHARDS * SAMPLES))


def test_many_at_random_with_repeats(site, folder):
    numbers = np.random.default_rng(0).integers(0, SHARDS * SAMPLES, 500).tolist()
    local = IndexedShards(str(folder / "{0..3}.tar")).__getitems__(numbers)
    remote = IndexedShards(urls(site)).__getitems__(numbers)
    assert [(sample["__key__"], sample["bin"]) for sample in remote] == [
        (sample["__key__"], sample["bin"]) for sample in local
    ]


@pytest.mark.parametrize("threads", [0, 2])
def test_array_loader(site, folder, threads):
    def classes(where: str) -> list[int]:
        dataset = Stream.from_shards(where, index=True, shuffle=True)
        loader = ArrayLoader(dataset, 32, fields={"cls": readers.integer()}, threads=threads)
        return [int(each) for batch in loader for each in batch["cls"]]

    assert classes(urls(site)) == classes(str(folder / "{0..3}.tar"))


def test_a_block_whose_samples_have_all_been_read_takes_no_memory(site, monkeypatch):
    """Not even one that was read before its turn, and is still in the queue behind one that does not fit."""
    held, shards = {}, IndexedShards(urls(site)).shards
    hold = OpenShard.hold

    def hold_and_note(opened, *arguments):
        found = hold(opened, *arguments)
        held[opened.name[-5]] = [weakref.ref(members) for members in found]
        return found

    monkeypatch.setattr(OpenShard, "hold", hold_and_note)
    upcoming = [(np.repeat(np.arange(SHARDS), 3), np.tile([5, 70, 140], SHARDS))]
    budget = 4 * int(shards.sizes.max()) // SAMPLES  # one block, of three samples
    with closing(BlockFetcher(shards, upcoming, block=None, reach=100, budget=budget)) as reader:
        reader.read(0, 5)
        for sample in 5, 70, 140:
            assert reader.read(3, sample)["__key__"] == f"3-{sample}"
        assert sorted(held) == ["0", "3"], "the others do not fit"
        wait_until(lambda: not any(members() for members in held["3"]))
        assert all(members() for members in held["0"])
        for shard, sample in zip(*upcoming[0]):
            if shard < 3 and (shard, sample) != (0, 5):
                assert reader.read(shard, sample)["__key__"] == f"{shard}-{sample}"
        wait_until(lambda: not any(members() for found in held.values() for members in found))


def test_what_is_asked_for_without_notice_is_read_all_the_same(site):
    shards = IndexedShards(urls(site))
    fetcher = BlockFetcher(shards.shards, [], block=4, reach=10, budget=1 << 20)
    assert fetcher.read(2, 17)["cls"] == b"%d" % (2 * SAMPLES + 17)
    fetcher.close()


def test_a_shard_that_is_gone_costs_its_samples(site, folder, monkeypatch):
    stream = Stream.from_shards(urls(site), index=True, shuffle=True, on_error=(ledger := Ledger(max_errors=1000)))
    gone = folder / "1.tar"
    strict = Stream.from_shards(urls(site), index=True, shuffle=True)
    gone.rename(folder / "hidden")
    try:
        found = keys(stream)
        with pytest.raises(OpenError, match=r"1\.tar: .*404"):
            list(strict)
    finally:
        (folder / "hidden").rename(gone)
    assert sorted(found) == sorted(f"{shard}-{i}" for shard in (0, 2, 3) for i in range(SAMPLES))
    assert len(ledger.quarantined) == SAMPLES


def test_a_loop_that_is_left_stops_fetching(site):
    stream = Stream.from_shards(urls(site), index=True, shuffle=True, remote=Remote(connections=2), block=4)
    samples = iter(stream)
    for _ in range(5):
        next(samples)
    samples.close()
    before = len(site.requests)
    assert before < SHARDS * SAMPLES / 4


@pytest.mark.parametrize("ahead", [None, 200_000])
@pytest.mark.parametrize("index", [True, False])
def test_with_a_cache_nothing_is_fetched_twice(site, folder, tmp_path, index, ahead):
    remote = Remote(cache_dir=tmp_path / "cache", ahead=ahead)
    local = list(Stream.from_shards(str(folder / "{0..3}.tar"), index=index, shuffle=True))
    data = sum(path.stat().st_size for path in folder.glob("*.tar"))
    for epoch in range(3):
        stream = Stream.from_shards(urls(site), index=index, shuffle=True, remote=remote)
        stream.set_epoch(epoch)
        site.clear()
        samples = list(stream)
        if epoch == 0:
            assert [(each["__key__"], each["bin"]) for each in samples] == [
                (each["__key__"], each["bin"]) for each in local
            ]
        assert len({each["__key__"] for each in samples}) == SHARDS * SAMPLES
        sent = site.bytes - 4 * (folder / "0.tar.index").stat().st_size * index
        assert (0.95 * data <= sent <= 1.1 * data) if epoch == 0 else sent < 20_000


@pytest.fixture
def twins(tmp_path) -> list[Path]:
    """Two indexed shards of one size with the same members, but other data."""
    for name in "a", "b":
        path = str(tmp_path / f"{name}.tar")
        with TarWriter(path) as writer:
            for i in range(SAMPLES):
                writer.write({"__key__": f"{i:03d}", "txt": name * SIZE})
        build_index(path).save(path)
    return [tmp_path / "a.tar", tmp_path / "b.tar"]


def by_query(path: str, login: str) -> str:
    """The file that get.tar?f=a names, or get.tar.index?f=a."""
    found = urlsplit(path)
    return f"{parse_qs(found.query)['f'][0]}{found.path.removeprefix('/get')}"


def by_login(path: str, login: str) -> str:
    (user,) = b64decode(login.removeprefix("Basic ")).decode().partition(":")[0]
    return f"{user}{path.removeprefix('/get')}"


def letters(url: str, index: bool, remote: Remote) -> set[str]:
    """The letters in the data of a shard."""
    stream = Stream.from_shards(url, index=index, shuffle=index, remote=remote)
    return set("".join(sample["txt"].decode() for sample in stream))


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(
    ("find", "one", "other"),
    [
        (by_query, "get.tar?f=a", "get.tar?f=b"),
        (by_query, "get.tar?X-Amz-Signature=1&f=a", "get.tar?X-Amz-Signature=1&f=b"),
        (by_login, "a:secret@get.tar", "b:secret@get.tar"),
    ],
)
def test_a_cache_tells_files_of_one_path_apart(twins, tmp_path, index, find, one, other):
    """Both have one ETag and one size, as nginx gives them where files were written in the same second."""
    remote = Remote(cache_dir=tmp_path / "cache")
    with serving(tmp_path) as site:
        site.find = find
        for name, letter in (one, "a"), (other, "b"), (one, "a"):
            user, at, rest = name.rpartition("@")
            assert letters(site.url.replace("//", f"//{user}{at}") + f"/{rest}", index, remote) == {letter}
    held = b"".join(path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())
    for secret in b"Signature", b"a:secret", b64encode(b"a:secret"), b"f=a":
        assert secret not in held


@pytest.mark.interop
@pytest.mark.parametrize("index", [True, False])
def test_a_cache_tells_objects_of_one_name_in_two_stores_apart(twins, tmp_path, index):
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    for twin in twins:
        (tmp_path / twin.stem / "bucket").mkdir(parents=True)
        for path in twin, Path(f"{twin}.index"):
            path.rename(tmp_path / twin.stem / f"bucket/x{path.name[1:]}")
    with serving(tmp_path / "a") as a, serving(tmp_path / "b") as b:
        for site, letter in (a, "a"), (b, "b"):
            options = {"key": "any", "secret": "any", "endpoint_url": site.url}
            remote = Remote(cache_dir=tmp_path / "cache", storage_options=options)
            for _ in range(2):
                site.clear()
                assert letters("s3://bucket/x.tar", index, remote) == {letter}
            assert site.bytes < SAMPLES * SIZE, "signed again, it is the same object"


@pytest.mark.parametrize(
    "signed",
    [
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=k{0}%2Fs3&X-Amz-Date={0}&X-Amz-Expires=9&X-Amz-Signature={0}",
        "X-Goog-Credential=k{0}&X-Goog-Date={0}&X-Goog-Signature={0}",
        "AWSAccessKeyId=k{0}&Signature={0}&Expires={0}",
        "Policy={0}&Signature={0}&Key-Pair-Id={0}",
        "sv=2024-11-04&st={0}&se={0}&sr=b&sp=r&sig={0}",
        "token={0}",
    ],
)
def test_a_url_that_is_signed_again_is_of_the_same_file(twins, tmp_path, signed):
    remote = Remote(cache_dir=tmp_path / "cache")
    with serving(tmp_path) as site:
        for number in range(2):
            site.clear()
            assert letters(f"{site.url}/a.tar?{signed.format(number)}", True, remote) == {"a"}
        assert site.bytes < SAMPLES * SIZE


def lazy_letters(url: str, remote: Remote) -> set[str]:
    samples = IndexedShards(url, lazy="txt", remote=remote)
    return set("".join(sample["txt"].read().decode() for sample in samples))


@pytest.mark.parametrize("read", [lambda url, remote: letters(url, True, remote), lazy_letters])
@pytest.mark.parametrize("sample", [0, SAMPLES - 1])
def test_members_in_a_cache_are_compared_with_the_index(twins, tmp_path, sample, read):
    """A file that was replaced, but has its size and ETag, as nginx gives them within a second."""
    remote = Remote(cache_dir=tmp_path / "cache")
    with serving(tmp_path) as site:
        assert read(f"{site.url}/a.tar", remote) == {"a"}
        path = str(twins[0])
        with TarWriter(path) as writer:
            for i in range(SAMPLES):
                writer.write({"__key__": f"{i if i != sample else 900:03d}", "txt": "c" * SIZE})
        build_index(path).save(path)
        with pytest.raises(
            ShardIndexError, match=rf"'{sample:03d}.txt' .*`tarindex`, or .* `tarcache purge`"
        ) as caught:
            read(f"{site.url}/a.tar", remote)
        assert caught.value.key == "900"


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
def test_headers_of_cached_blocks_are_compared_by_the_kernel(site, tmp_path, monkeypatch):
    remote, checked = Remote(cache_dir=str(tmp_path / "cache")), []
    assert len(keys(Stream.from_shards(urls(site), remote=remote))) == SHARDS * SAMPLES
    monkeypatch.setattr(HeldMembers, "check", lambda self, member: checked.append((self.low, member)))
    stream = Stream.from_shards(urls(site), shuffle=True, remote=remote)
    assert len(keys(stream)) == SHARDS * SAMPLES
    assert len(checked) <= SHARDS * -(-SAMPLES * SIZE // tuning.REQUEST_BYTES), "at most the first one of a block"


@pytest.fixture
def cached(site, tmp_path, monkeypatch):
    """Shards whose blocks are in a cache and mapped, and what they are to hold."""
    monkeypatch.setattr(tuning, "REQUEST_BYTES", 130_000)
    remote = Remote(cache_dir=str(tmp_path / "cache"))
    shards = IndexedShards(urls(site), remote=remote)
    samples = {sample["__key__"]: sample["bin"] for sample in shards}
    site.clear()
    return shards, samples


def epoch(shards: IndexedShards, seed: int) -> dict[str, bytes]:
    order = np.random.default_rng(seed).permutation(SHARDS * SAMPLES)
    shard, sample = order // SAMPLES, order % SAMPLES
    return {sample["__key__"]: sample["bin"] for sample in shards.read_all(shard, sample)}


def blocks_of(shards: IndexedShards) -> list[Path]:
    paths = sorted(Path(shards.shards.remote.cache_dir).glob("??/*.block"))
    return [path for path in paths if b".tar.index" not in path.read_bytes()[:200]]


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
def test_blocks_of_a_cache_stay_mapped(cached, site, monkeypatch):
    shards, samples = cached
    monkeypatch.setattr(BlockCache, "fill", None)
    monkeypatch.setattr(BlockCache, "fill_mapped", None)
    before = traffic.so_far().cache_hits
    assert epoch(shards, 1) == samples
    assert traffic.so_far().cache_hits - before == len(blocks_of(shards)) == BLOCKS
    with shards.ahead(iter(()), block=None, reach=1) as reader:
        found = reader.read_aside_all(np.arange(SHARDS), np.arange(SHARDS))
        assert [each["bin"] for each in found] == [samples[f"{shard}-{shard}"] for shard in range(SHARDS)]
    assert site.requests == []
    copied = pickle.loads(pickle.dumps(shards))
    monkeypatch.undo()
    assert epoch(copied, 2) == samples


@pytest.mark.parametrize("removed", [1, BLOCKS])
def test_a_mapped_block_that_is_removed_is_fetched_again(cached, site, removed):
    shards, samples = cached
    for path in blocks_of(shards)[:removed]:
        path.unlink()
    for seed in range(3):
        site.clear()
        assert epoch(shards, seed) == samples
        assert len(site.requests) <= (removed if seed == 0 else 0)
    assert len(blocks_of(shards)) == BLOCKS


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
def test_blocks_that_are_removed_in_an_epoch_are_fetched_again_as_blocks(cached, site):
    shards, samples = cached
    order = np.random.default_rng(0).permutation(SHARDS * SAMPLES)
    reading = shards.read_all(order // SAMPLES, order % SAMPLES)
    found = [next(reading) for _ in range(100)]
    for path in blocks_of(shards):
        path.unlink()
    found += reading
    assert {sample["__key__"]: sample["bin"] for sample in found} == samples
    assert len(site.requests) <= BLOCKS


@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied"])
def test_a_mapped_block_that_is_written_to_is_fetched_again(cached, site, damage):
    shards, samples = cached
    for path in blocks_of(shards)[::7]:
        data = path.read_bytes()
        with open(path, "r+b") as file:
            if damage == "flipped":
                file.seek(len(data) // 2)
                file.write(bytes([data[len(data) // 2] ^ 1]))
            file.truncate({"flipped": len(data), "truncated": len(data) // 2, "emptied": 0}[damage])
    assert epoch(shards, 1) == samples
    assert epoch(shards, 2) == samples


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
@pytest.mark.parametrize("most", [0, 3, 1000])
def test_blocks_that_stay_mapped_are_held_open_as_far_as_there_are_files(cached, monkeypatch, most):
    shards, samples = cached
    monkeypatch.setattr(fetch, "most_held", lambda: most)
    again = pickle.loads(pickle.dumps(shards))
    monkeypatch.setattr(fetch, "_held_open", weakref.WeakSet())  # without the blocks of other datasets
    leftovers = Leftovers()
    for seed in range(2):
        assert epoch(again, seed) == samples
    assert sum(name.endswith(".block") for name in leftovers.files()) == min(most, BLOCKS)
    for path in blocks_of(shards):
        path.unlink()
    assert epoch(again, 3) == samples


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("kind", ["planned", "cached", "in order"])
def test_what_a_pass_held_is_free_when_it_has_ended(site, tmp_path, kind, most):
    """Without waiting for Python's collector of cycles, which many trainers switch off."""
    remote = Remote(2, ahead=1 << 22, cache_dir=str(tmp_path / "cache") if kind == "cached" else None)

    def held() -> int:
        return sum(type(each) in (OpenShard, HeldMembers, SampleBlock, _RangeFetch) for each in gc.get_objects())

    gc.collect()
    before = held()
    gc.disable()
    try:
        for _ in range(2):
            planned = kind != "in order"
            samples = iter(Stream.from_shards(urls(site), index=planned, shuffle=planned, remote=remote))
            assert len(list(islice(samples, most))) == (most or SHARDS * SAMPLES)
            del samples
            wait_until(lambda: held() <= before)
    finally:
        gc.enable()


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
def test_the_datasets_of_a_process_together_hold_few_files_open(cached, monkeypatch):
    shards, samples = cached
    monkeypatch.setattr(fetch, "most_held", lambda: 5)
    monkeypatch.setattr(fetch, "_held_open", weakref.WeakSet())
    datasets, leftovers = [pickle.loads(pickle.dumps(shards)) for _ in range(3)], Leftovers()
    for dataset in datasets:
        assert epoch(dataset, 0) == samples
    assert sum(name.endswith(".block") for name in leftovers.files()) == 5


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
def test_the_mappings_of_a_process_are_few(cached, site, monkeypatch):
    shards, samples = cached
    monkeypatch.setattr(fetch, "MOST_KEPT", 5)
    again = pickle.loads(pickle.dumps(shards))
    for seed in range(3):
        assert epoch(again, seed) == samples
    assert sum(len(shard.kept) for shard in again.shards.in_use.values()) == 5


def test_a_cache_that_is_full_of_something_else(site, folder, tmp_path, monkeypatch):
    """What is held stays within the memory that is allowed; the rest is read sample by sample."""
    remote = Remote(ahead=100_000, cache_dir=str(tmp_path), cache_bytes=1 << 24)
    cache = BlockCache.of(remote)
    size = 1 << 20
    for number in range(16):
        block = Block("http://host/other", '"v"', 1 << 30, number * size, size - 8000)
        run(cache.fill(block, lambda: calling(bytes, size - 8000)))
    monkeypatch.setattr(tuning, "REQUEST_BYTES", 50_000)
    held = []
    fits = FetchQueue.fits

    def watched(self: FetchQueue, block: object) -> bool:
        held.append(self.held)
        return fits(self, block)

    monkeypatch.setattr(FetchQueue, "fits", watched)
    stream = Stream.from_shards(urls(site), index=True, shuffle=True, remote=remote)
    local = Stream.from_shards(str(folder / "{0..3}.tar"), index=True, shuffle=True)
    assert [sample["bin"] for sample in stream] == [sample["bin"] for sample in local]
    assert max(held) <= 100_000


def test_the_first_samples_are_asked_for_by_themselves(site, folder, monkeypatch):
    monkeypatch.setattr(tuning, "WINDOW_BYTES", 10_000)
    monkeypatch.setattr(tuning, "REQUEST_BYTES", 1 << 17)
    samples = iter(Stream.from_shards(urls(site), index=True, shuffle=True, remote=Remote(connections=2)))
    site.clear()
    size = sum(path.stat().st_size for path in folder.glob("*.tar"))
    found = [next(samples) for _ in range(min(SHARDS * SAMPLES // tuning.SOON_SAMPLES, size // tuning.REQUEST_BYTES))]
    assert found
    single = [request for request in site.requests if 0 < span(request) < 2 * SIZE]
    assert len(single) == len(found)
    assert len({sample["__key__"] for sample in [*found, *samples]}) == SHARDS * SAMPLES


@pytest.mark.parametrize("window", [10_000, 3000])
def test_the_first_batch_takes_three_rounds_of_requests(site, folder, monkeypatch, window):
    """The manifest, the indexes (of one window, or three), the samples: what can be asked for at once is."""
    monkeypatch.setattr(tuning, "WINDOW_BYTES", window)
    monkeypatch.setattr(tuning, "REQUEST_BYTES", 50_000)  # for many blocks, and so many connections
    shards = [Shard(path.name, SAMPLES, path.stat().st_size, indexed=True) for path in sorted(folder.glob("*.tar"))]
    (folder / "s.shards.json").write_text(dump_manifest(shards))
    site.hold = 0.5
    samples = iter(Stream.from_shards(f"{site.url}/s.shards.json", index=True, shuffle=True))
    assert len([next(samples) for _ in range(8)]) == 8
    assert site.rounds == 3


def test_the_indexes_of_the_first_samples_are_asked_for_before_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SOON_SAMPLES", 4)
    for shard in range(70):
        path = str(tmp_path / f"{shard:02d}.tar")
        with TarWriter(path) as writer:
            for i in range(16):
                writer.write({"__key__": f"{shard}-{i}", "txt": b"x"})
        build_index(path).save(path)
    shards = [Shard(path.name, 16, path.stat().st_size, indexed=True) for path in sorted(tmp_path.glob("*.tar"))]
    (tmp_path / "s.shards.json").write_text(dump_manifest(shards))
    with serving(tmp_path) as site:
        remote = Remote(connections=1)
        samples = iter(Stream.from_shards(f"{site.url}/s.shards.json", index=True, shuffle=True, remote=remote))
        found = keys([next(samples) for _ in range(4)])
        first = [path for path, _ in site.requests][1:5]
        assert first == [f"/{int(key.split('-')[0]):02d}.tar.index" for key in found]
        assert len({*found, *keys(samples)}) == 70 * 16


def span(request: tuple[str, str | None]) -> int:
    """Return how many bytes a request asks for, 0 for a whole file."""
    begin, _, end = (request[1] or "=0-0").partition("=")[2].partition("-")
    return int(end) - int(begin)


def test_workers_with_a_cache_fetch_each_block_once(site, folder, tmp_path):
    remote = Remote(cache_dir=tmp_path / "cache")
    found, sent = [], 0
    for worker in range(4):
        world = World(worker=worker, num_workers=4)
        stream = Stream.from_shards(urls(site), index=True, shuffle=True, world=world, remote=remote)
        site.clear()
        found += keys(stream)
        sent += sum(1 for path, wanted in site.requests if path.endswith(".tar"))
    assert Counter(found) == Counter(f"{shard}-{i}" for shard in range(SHARDS) for i in range(SAMPLES))
    assert sent <= 1.05 * SHARDS * -(-SAMPLES // 16) + 4 * SHARDS


def test_a_small_cache_holds_what_is_shuffled_together(site, folder, tmp_path):
    options = {"index": True, "shuffle": True, "pool": 200, "block": 5}
    remote = Remote(cache_dir=tmp_path / "cache", cache_bytes=1 << 24, ahead=1 << 16, connections=4)
    data = sum(path.stat().st_size for path in folder.glob("*.tar"))
    local = list(Stream.from_shards(str(folder / "{0..3}.tar"), **options))
    site.clear()
    assert keys(Stream.from_shards(urls(site), remote=remote, **options)) == keys(local)
    assert site.bytes <= 1.1 * data + 4 * (folder / "0.tar.index").stat().st_size


def test_mixed_and_joined_shards_come_in_blocks_too(site, folder, write_labels):
    def mixed(where: str) -> list[str]:
        parts = {name: Stream.from_shards(f"{where}/{name}.tar", index=True, shuffle=True) for name in ("0", "1", "2")}
        return keys(mix(parts, weights={"0": 2, "1": 1, "2": 1}))

    assert mixed(site.url) == mixed(str(folder))
    site.clear()
    mixed(site.url)
    assert site.asked(".tar") <= 3 * -(-SAMPLES // 16) + 10

    def joined(where: str) -> list[tuple[str, bytes]]:
        left = Stream.from_shards(f"{where}/{{0..3}}.tar", index=True, shuffle=True, fields="cls")
        return [(each["__key__"], each["label"]) for each in left.join(f"{where}/labels-{{0..3}}.tar")]

    assert joined(site.url) == joined(str(folder))


@pytest.fixture
def write_labels(folder):
    for shard in range(SHARDS):
        path = str(folder / f"labels-{shard}.tar")
        with TarWriter(path) as writer:
            for i in range(SAMPLES):
                writer.write({"__key__": f"{shard}-{i}", "label": str(i).encode()})
        build_index(path).save(path)
    yield
    for path in folder.glob("labels-*"):
        path.unlink()


def test_connections_are_opened_while_the_first_indexes_are_loaded(site, folder, monkeypatch, tmp_path):
    counts = []
    monkeypatch.setattr(fetch, "connect_ahead", lambda url, count, **_: counts.append((url, count)))
    manifest = str(tmp_path / "x.shards.json")
    shards = [Shard(f"{site.url}/{shard}.tar", SAMPLES, (folder / f"{shard}.tar").stat().st_size) for shard in range(4)]
    Path(manifest).write_text(dump_manifest(shards))
    stream = Stream.from_shards(manifest, index=True, shuffle=True, remote=Remote(connections=5))
    assert len(list(stream)) == len(list(stream)) == SHARDS * SAMPLES
    ((url, count),) = counts
    assert url.startswith(site.url)
    assert count == SHARDS, "a block each"
    cached = Remote(cache_dir=tmp_path / "cache")
    for _ in range(2):
        assert len(list(Stream.from_shards(manifest, index=True, remote=cached))) == SHARDS * SAMPLES
    assert len(counts) == 2, "what is cached needs no connection"


def test_connections_are_opened_while_a_manifest_is_read(site, folder, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(fetch, "connect_ahead", lambda url, count, **_: calls.append((count, len(site.requests))))
    shards = [Shard(path.name, SAMPLES, path.stat().st_size, indexed=True) for path in sorted(folder.glob("?.tar"))]
    (folder / "s.shards.json").write_text(dump_manifest(shards))
    for spec in f"{site.url}/s.shards.json", urls(site), str(folder / "s.shards.json"):
        for index in (True, False):
            site.clear()
            Stream.from_shards(spec, index=index, remote=Remote(connections=5))
    assert calls == [(5, 0)], "before the manifest, by who reads it through indexes"
    cached = Remote(cache_dir=tmp_path / "cache")
    for _ in range(2):
        calls.clear()
        assert len(list(Stream.from_shards(f"{site.url}/s.shards.json", index=True, remote=cached))) == SHARDS * SAMPLES
    assert calls == [], "what is cached needs no connection"
    with pytest.raises(OpenError, match="localhost:1"):
        Stream.from_shards("http://localhost:1/s.shards.json", index=True, remote=Remote(retries=0))


@pytest.mark.parametrize("described", [True, False])
def test_with_a_cache_the_processes_of_a_host_fetch_an_index_once(site, folder, tmp_path, described):
    path = str(folder / "s.shards.json")
    shards = [Shard(path.name, SAMPLES, path.stat().st_size) for path in sorted(folder.glob("?.tar"))]
    Path(path).write_text(dump_manifest(shards))
    where = f"{site.url}/s.shards.json" if described else urls(site)
    remote, size = Remote(cache_dir=tmp_path / "cache"), (folder / "0.tar.index").stat().st_size
    for number in range(3):
        before, site.bytes = traffic.so_far().cache_hits, 0
        opened = IndexedShards(where, remote=remote)
        assert [opened.shards.index(shard).key(0) for shard in range(SHARDS)] == [f"{n}-0" for n in range(SHARDS)]
        assert site.bytes < SHARDS * 3000 + (SHARDS * size if number == 0 else 0)
        assert traffic.so_far().cache_hits - before == SHARDS * (number > 0)
        index = opened.shards.index(1)
        assert index.keys == [f"1-{i}" for i in range(SAMPLES)]
        assert index.pack() == (folder / "1.tar.index").read_bytes()
    assert CacheFolder.existing(str(tmp_path / "cache")).purge("*.tar.index")[0] == SHARDS
    assert index.key(1) == "1-1", "what was mapped stays"


def test_an_index_in_a_cache_takes_no_memory_and_is_renewed(tmp_path):
    """Of a file that was replaced within a second, the size and ETag may be as they were."""
    remote, path = Remote(cache_dir=tmp_path / "cache"), str(tmp_path / "a.tar")
    with serving(tmp_path) as site:
        for first in 1000, 2000:
            with TarWriter(path) as writer:
                for i in range(500):
                    writer.write({"__key__": str(first + i), "txt": "a"})
            build_index(path).save(path)
            index = IndexedShards(f"{site.url}/a.tar", remote=remote).shards.index(0)
            assert index.key(0) == str(first)
            assert isinstance(index._sidecar, MappedBlock) == IS_COMPILED


@pytest.fixture
def large(tmp_path):
    """A site of four shards with indexes of 35 KB, and its manifest."""
    shards = []
    for number in range(SHARDS):
        path = str(tmp_path / f"{number}.tar")
        with TarWriter(path) as writer:
            for i in range(1000):
                writer.write({"__key__": f"{number}-{i}", "txt": b"x"})
        (index := build_index(path)).save(path)
        shards.append(index.shard(f"{number}.tar"))
    (tmp_path / "s.shards.json").write_text(dump_manifest(shards))
    with serving(tmp_path) as site:
        yield site


@pytest.mark.forks
@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
def test_forked_processes_fetch_and_hold_an_index_once(large):
    opened = IndexedShards(f"{large.url}/s.shards.json")
    large.clear()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def work() -> None:
        found = [opened.shards.index(number) for number in range(SHARDS)]
        results.put([(index.key(999), index.keys[0], isinstance(index._sidecar, memoryview)) for index in found])

    workers = [context.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for _ in workers:
        assert results.get() == [(f"{number}-999", f"{number}-0", True) for number in range(SHARDS)]
    for worker in workers:
        worker.join()
    work()
    assert large.asked(".index") == SHARDS


@pytest.mark.forks
@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
def test_another_process_fetches_what_a_killed_one_was_fetching(large):
    opened = IndexedShards(f"{large.url}/s.shards.json")
    large.clear()
    large.hold, large._last = 5, 0
    worker = multiprocessing.get_context("fork").Process(target=lambda: opened.shards.index(0))
    worker.start()
    while not large._last:  # it has asked, and waits for the answer
        assert worker.is_alive()
    worker.kill()
    worker.join()
    large.hold = 0
    assert opened.shards.index(0).key(0) == "0-0"


@pytest.mark.forks
@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
def test_processes_that_fetch_indexes_for_each_other_do_not_wait_for_each_other(tmp_path):
    """Each needs what the other fetches, for more indexes than there are threads to load them."""
    count = 2 * wire.LOADERS + 4
    for number in range(count):
        path = str(tmp_path / f"{number:02d}.tar")
        with TarWriter(path) as writer:
            writer.write({"__key__": str(number), "txt": b"x"})
        build_index(path).save(path)
    context = multiprocessing.get_context("fork")
    results, half_asked = context.SimpleQueue(), context.Barrier(2)
    with serving(tmp_path) as site:
        opened = IndexedShards(f"{site.url}/{{00..{count - 1}}}.tar", remote=Remote(timeout=5)).shards
        site.clear()
        site.hold = 0.3

        def work(numbers: list[int]) -> None:
            works = [wire.start(opened.ahead(opened.index, number)) for number in numbers[: count // 2]]
            time.sleep(0.1)  # they are claimed
            half_asked.wait()
            works += [wire.start(opened.ahead(opened.index, number)) for number in numbers[count // 2 :]]
            results.put([work.result().key(0) for work in works])

        numbers = list(range(count))
        workers = [context.Process(target=work, args=(order,)) for order in (numbers, numbers[::-1])]
        for worker in workers:
            worker.start()
        found = [results.get() for _ in workers]
        for worker in workers:
            worker.join()
        assert sorted(found, key=lambda keys: int(keys[0])) == [
            [str(n) for n in numbers],
            [str(n) for n in numbers[::-1]],
        ]
        assert site.asked(".index") == count


@pytest.mark.parametrize("shared", [True, False])
def test_indexes_that_do_not_fit_are_fetched_again_which_a_warning_says(large, monkeypatch, caplog, shared):
    if not shared:  # a system without files in memory
        monkeypatch.setattr("tarshards.storage.shared.SharedBytes.of", lambda count, remote: None)
    monkeypatch.setattr("tarshards.index.open.LEAST_AHEAD", 1)
    monkeypatch.setattr(Remote, "held", lambda remote: 80_000)
    opened = IndexedShards(f"{large.url}/s.shards.json", remote=Remote())
    large.clear()
    for _ in range(3):
        assert [opened.shards.use(number).index.key(1) for number in range(SHARDS)] == [f"{n}-1" for n in range(SHARDS)]
    assert SHARDS < large.asked(".index") <= 3 * SHARDS
    assert sum(index.nbytes for number in range(SHARDS) if (index := opened.shards.loaded(number))) <= 80_000
    (record,) = caplog.records
    assert "cache_dir=" in record.getMessage()


def test_an_index_that_is_wrong_is_asked_for_again(large):
    path = large.folder / "0.tar.index"
    right = path.read_bytes()
    path.write_bytes(right[:-1])
    opened = IndexedShards(f"{large.url}/s.shards.json")
    with pytest.raises(ShardIndexError, match="damaged"):
        opened.shards.index(0)
    path.write_bytes(right)
    assert opened.shards.index(0).key(0) == "0-0"
