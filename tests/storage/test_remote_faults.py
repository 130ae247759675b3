"""Schedules of faults of a web server: the dataset is delivered, or an error or the ledger names what is missing.

Never a sample twice, never a wrong byte, never silence, and no reader waits for ever.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import pytest
from soak import SOAK

from tarshards import ArrayLoader, IndexedShards, Ledger, ShardWriter, Stream, readers
from tarshards.errors import TarshardsError
from tarshards.parallel.calls import DaemonThreads
from tarshards.storage import tuning
from tarshards.storage.remote import Remote
from tarshards.testing.faulty_server import serving
from tarshards.testing.unreliable_site import BUCKET, PASSING, WRONG, UnreliableSite

SHARDS, SAMPLES = 3, 40
LIMIT = 60  # seconds of a schedule, at most; one takes less than a second unless it hangs
REMOTE = Remote(connections=4, timeout=1)

Content = tuple[bytes, bytes]  # the fields bin and txt


@dataclass
class Delivered:
    """What a reader gave: *samples* by key and content, and *errors* where it went on, or ended."""

    samples: list[tuple[str, Content]] = field(default_factory=list)
    errors: list[TarshardsError] = field(default_factory=list)

    def take(self, sample: dict[str, Any]) -> None:
        self.samples.append((sample["__key__"], (sample["bin"], sample["txt"])))


def content(version: int, number: int) -> Content:
    """The fields of a sample: in version 1 other bytes, in version 2 of another size."""
    rng = random.Random(f"{version}/{number}")
    size = random.Random(number).randrange(20, 5000) + (version == 2)
    return rng.randbytes(size), b"%d %06d" % (version, number)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, tuple[bytes, bytes, bytes]]:
    """Three versions of the files of a dataset: shards, sidecars and their manifest."""
    versions = []
    for version in range(3):
        folder = tmp_path_factory.mktemp("set")
        with ShardWriter(str(folder / "set-%02d.tar"), max_samples=SAMPLES, index=True) as writer:
            for number in range(SHARDS * SAMPLES):
                data, text = content(version, number)
                writer.write({"__key__": f"{number:06d}", "bin": data, "txt": text})
        versions.append({f"/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())})
    return {name: (data, versions[1][name], versions[2][name]) for name, data in versions[0].items()}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(tuning, "LONGEST_SECONDS", 0)


def shard_of(key: str) -> str:
    return f"set-{int(key) // SAMPLES:02d}.tar"


def streamed(urls: str, **options: Any) -> Iterator[dict[str, Any]]:
    yield from Stream.from_shards(urls, index=False, **options)


def planned(urls: str, **options: Any) -> Iterator[dict[str, Any]]:
    yield from Stream.from_shards(urls, index=True, **options)


def shuffled(urls: str, **options: Any) -> Iterator[dict[str, Any]]:
    yield from Stream.from_shards(urls, index=True, shuffle=True, seed=3, block=4, **options)


def arrays(urls: str, threads: int = 2, **options: Any) -> Iterator[dict[str, Any]]:
    stream = Stream.from_shards(urls, index=True, shuffle=True, block=4, **options)
    loader = ArrayLoader(stream, 7, fields={"bin": readers.bytes_(), "txt": readers.bytes_()}, threads=threads)
    for batch in loader:
        for key, data, text in zip(batch["__key__"], batch["bin"], batch["txt"]):
            yield {"__key__": key, "bin": bytes(data), "txt": bytes(text)}


def at_random(
    urls: str, remote: Remote, on_error: Callable[[Exception], None] | None = None
) -> Iterator[dict[str, Any]]:
    """The samples of IndexedShards in any order; those that fail go to *on_error*."""
    shards = IndexedShards(urls, remote=remote)
    for place in random.Random(0).sample(range(len(shards)), len(shards)):
        try:
            yield shards[place]
        except TarshardsError as error:
            if on_error is None:
                raise
            on_error(error)


READERS = (streamed, planned, shuffled, arrays, at_random)


def watched(work: Callable[[], None]) -> None:
    """Run *work* in a thread, which fails where it waits for ever."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    if thread.is_alive():
        stack = "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0]))
        pytest.fail(f"waits for ever:\n{stack}")
    if failures:
        raise failures[0]


def check(delivered: Delivered, ledger: Ledger | None, site: UnreliableSite, *, is_planned: bool) -> None:
    counts = Counter(key for key, _ in delivered.samples)
    assert not [key for key, count in counts.items() if count > 1]
    versions: dict[str, set[int]] = {}
    for key, fields in delivered.samples:
        known = [version for version in range(3) if content(version, int(key)) == fields]
        assert known, f"wrong bytes in {key}"
        versions.setdefault(shard_of(key), set()).update(known)
    assert all(len(found) == 1 for found in versions.values()), f"a shard changed silently: {versions}"
    missing = sorted({f"{number:06d}" for number in range(SHARDS * SAMPLES)} - set(counts))
    told = " ".join(str(error) for error in delivered.errors)
    if site.kinds == PASSING:
        assert not told
        assert not missing
    if delivered.errors:
        assert any(path.lstrip("/") in told for path in site.files), told
    elif ledger is not None:
        named = {(entry.shard or "").rpartition("/")[2] for entry in ledger.quarantined}
        keys = {entry.key for entry in ledger.quarantined}
        shards = {name.removesuffix(".index") for name in named}
        assert not [key for key in missing if key not in keys and shard_of(key) not in shards], str(ledger)
        if is_planned:
            ledger.check()
            assert ledger.samples == len(delivered.samples)
    else:
        assert not missing, "silence"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8 * SOAK))
def test_a_schedule_of_faults(files, tmp_path, seed):
    rng = random.Random(f"faults/{seed}")
    reader = READERS[seed % len(READERS)]
    site = UnreliableSite(files=files, seed=seed, rate=rng.choice([0.05, 0.2, 0.5]))
    site.kinds = rng.choice([PASSING, PASSING + WRONG])
    goes_on, is_cached = rng.random() < 0.5, rng.random() < 0.5
    names = rng.choice(["set.shards.json", f"set-{{00..{SHARDS - 1:02d}}}.tar"])
    remote = replace(REMOTE, cache_dir=tmp_path if is_cached else None, ahead=rng.choice([None, 1, 100_000]))
    is_store = rng.random() < 0.25 and find_spec("s3fs") is not None

    def work() -> None:
        folder, here = site.url, remote
        if is_store:
            options = {"key": "any", "secret": "any", "client_kwargs": {"endpoint_url": site.url}}
            folder, here = f"s3:/{BUCKET}", replace(remote, storage_options=options)
        for _ in range(1 + is_cached):
            ledger = Ledger(max_errors=float("inf")) if goes_on else None
            delivered = Delivered()
            try:
                for sample in reader(f"{folder}/{names}", on_error=ledger, remote=here):
                    delivered.take(sample)
            except TarshardsError as error:
                delivered.errors.append(error)
            check(delivered, ledger, site, is_planned=reader not in (streamed, at_random))

    with serving(site):
        watched(work)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3 * SOAK))
def test_a_schedule_of_faults_where_shards_are_written(files, seed):
    """What is stored is whole; a shard that the writer gave no error for is there."""
    site = UnreliableSite(seed=seed, rate=(0.1, 0.3, 0.6)[seed % 3], kinds=tuple({*PASSING} - {"stall"}))
    failures: list[TarshardsError] = []

    def work() -> None:
        try:
            with ShardWriter(f"{site.url}/set-%02d.tar", max_samples=SAMPLES) as writer:
                for number in range(SHARDS * SAMPLES):
                    data, text = content(0, number)
                    writer.write({"__key__": f"{number:06d}", "bin": data, "txt": text})
        except TarshardsError as error:
            failures.append(error)

    with serving(site):
        watched(work)
    assert not failures
    assert {name for name in site.stored if name.endswith(".tar")} == {n for n in files if n.endswith(".tar")}
    assert all(data == files[name][0] for name, data in site.stored.items() if name.endswith(".tar"))


def test_blocks_that_come_at_once(files, monkeypatch):
    """A fetch may have ended before the thread that asked for it goes on."""
    submit = DaemonThreads.submit

    def submit_and_wait(self, *call):
        future = submit(self, *call)
        wait([future], 0.02)
        return future

    monkeypatch.setattr(DaemonThreads, "submit", submit_and_wait)
    delivered = Delivered()
    site = UnreliableSite(files=files)

    def work() -> None:
        for sample in shuffled(f"{site.url}/set.shards.json", remote=REMOTE):
            delivered.take(sample)

    with serving(site):
        watched(work)
    check(delivered, None, site, is_planned=True)


@pytest.mark.soak
@pytest.mark.parametrize("ahead", [1, 20_000, 400_000])
def test_threads_that_read_faster_than_memory_allows(files, ahead):
    """A thread may need a block before those that were to be fetched first."""
    site = UnreliableSite(files=files)

    def work() -> None:
        for _ in range(1 if SOAK == 1 else 10):
            delivered = Delivered()
            for sample in arrays(f"{site.url}/set.shards.json", remote=replace(REMOTE, ahead=ahead), threads=6):
                delivered.take(sample)
            check(delivered, None, site, is_planned=True)

    with serving(site):
        watched(work)


@pytest.mark.parametrize("reader", [planned, shuffled, arrays, at_random])
def test_a_shard_that_is_shorter_than_its_index_says(files, reader):
    name = "/set-01.tar"
    cut = files[name][0][:-20_000]
    delivered, ledger = Delivered(), Ledger(max_errors=float("inf"))
    site = UnreliableSite(files={**files, name: (cut, cut, cut)}, kinds=WRONG)

    def work() -> None:
        for sample in reader(f"{site.url}/set.shards.json", on_error=ledger, remote=REMOTE):
            delivered.take(sample)

    with serving(site):
        watched(work)
    check(delivered, ledger, site, is_planned=reader is not at_random)
    assert {shard_of(key) for key, _ in delivered.samples} == {"set-00.tar", "set-02.tar"}
