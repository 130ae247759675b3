"""What is fetched ahead: within its budget and in the order of need; and files read forwards, never of two versions."""

from __future__ import annotations

import gc
import random
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leftovers import wait_until
from range_server import Site, serving

from tarshards.errors import OpenError
from tarshards.storage import ahead, traffic, tuning
from tarshards.storage.ahead import Fetch, FetchQueue, ForwardReader, opened_ahead
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url
from tarshards.storage.remote import Remote
from tarshards.storage.servers import WebServer
from tarshards.storage.transfer import Transfer
from tarshards.storage.wire import Steps, pausing
from tarshards.testing.faulty_server import Answer
from tarshards.testing.faulty_server import serving as misbehaving


@pytest.fixture(autouse=True)
def small_requests(monkeypatch):
    """Requests of some hundred bytes, and no pauses."""
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.001)
    for name, size in (("FIRST_BYTES", 500), ("REQUEST_BYTES", 2000)):
        monkeypatch.setattr(tuning, name, size)


@pytest.fixture
def site(tmp_path):
    with serving(tmp_path) as site:
        yield site


@pytest.fixture(autouse=True)
def no_fetch_is_left():
    yield
    while Numbers.made:
        Numbers.made.pop().allowed.set()


class Number(Fetch):
    def __init__(self, number: int, size: int = 10):
        self.number, self.size = number, size


class Numbers:
    """A queue of fetches; each brings its number when it is *allowed* to."""

    made: ClassVar[list[Numbers]] = []

    def __init__(self, sizes: list[int], budget: int, connections: int = 4):
        self.fetches = [Number(number, size) for number, size in enumerate(sizes)]
        self._waiting, self.allowed = list(self.fetches), Event()
        self.began: list[int] = []
        self.queue = FetchQueue(connections, budget, upcoming=self._upcoming, run=self._run)
        self.made.append(self)

    def _upcoming(self) -> Number | None:
        return self._waiting.pop(0) if self._waiting else None

    def _run(self, fetch: Number) -> Steps[int]:
        self.began.append(fetch.number)
        while not self.allowed.is_set():
            yield from pausing(0.001)
        if fetch.number == 13:
            raise OpenError("unlucky")
        return fetch.number

    @property
    def under_way(self) -> list[int]:
        return [fetch.number for fetch in self.fetches if fetch.work is not None]


def test_a_queue_fetches_in_order_as_far_as_its_budget_allows():
    numbers = Numbers([10, 20, 30, 5], budget=35)
    numbers.queue.extend()
    assert (numbers.under_way, numbers.queue.held) == ([0, 1], 30), "none overtakes the one that does not fit"
    numbers.allowed.set()
    assert numbers.queue.take(numbers.fetches[0]) == 0
    assert numbers.under_way == [0, 1], "it is held until it is released"
    numbers.queue.release(numbers.fetches[0])
    assert numbers.under_way == [0, 1]
    numbers.queue.release(numbers.fetches[1])
    assert (numbers.under_way, numbers.queue.held) == ([0, 1, 2, 3], 35)


def test_a_queue_begins_at_once_what_a_reader_waits_for():
    numbers = Numbers([10, 100, 10], budget=20)
    numbers.allowed.set()
    numbers.queue.extend()
    assert numbers.under_way == [0]
    assert numbers.queue.take(numbers.fetches[1]) == 1
    assert numbers.queue.held == 110
    numbers.queue.release(numbers.fetches[1])
    assert numbers.under_way == [0, 1, 2]


def test_a_fetch_larger_than_the_budget_comes_alone():
    numbers = Numbers([100, 100], budget=1)
    numbers.queue.extend()
    assert numbers.under_way == [0]


def test_what_is_released_is_freed_at_once():
    """Not when cycles are collected: its bytes would be held until then, and the next ones need new memory."""
    queue = FetchQueue(2, 1000, upcoming=lambda: None, run=lambda fetch: pausing(0.01))
    gc.collect()
    gc.disable()
    try:
        fetch = Fetch()
        queue.take(fetch)
        known = weakref.ref(fetch)
        queue.release(fetch)
        del fetch
        wait_until(lambda: known() is None)
    finally:
        gc.enable()


def test_requests_under_way_are_as_many_as_the_connections():
    numbers = Numbers([1] * 9, budget=1000, connections=3)
    numbers.queue.extend()
    assert numbers.under_way == [0, 1, 2]
    numbers.allowed.set()
    wait_until(lambda: numbers.under_way == list(range(9)))


def test_what_is_released_or_dropped_before_it_begins_never_does():
    numbers = Numbers([10] * 4, budget=10)
    numbers.queue.extend()
    numbers.queue.release(numbers.fetches[1])
    numbers.queue.drop(numbers.fetches[2])
    numbers.queue.release(numbers.fetches[0])
    assert numbers.under_way == [0, 3]


def test_an_error_is_raised_at_who_takes_the_fetch_and_others_go_on():
    numbers = Numbers([1] * 15, budget=1000)
    numbers.allowed.set()
    numbers.queue.extend()
    with pytest.raises(OpenError, match="unlucky"):
        numbers.queue.take(numbers.fetches[13])
    assert numbers.queue.take(numbers.fetches[14]) == 14


def test_who_releases_a_fetch_begins_the_next_if_no_thread_can_be_started(monkeypatch):
    def refuse(function):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ahead, "soon", refuse)
    numbers = Numbers([1] * 4, budget=1000, connections=2)
    numbers.allowed.set()
    numbers.queue.extend()
    for number in range(2):
        assert numbers.queue.take(numbers.fetches[number]) == number
        numbers.queue.release(numbers.fetches[number])
    wait_until(lambda: numbers.under_way == list(range(4)))


def test_a_closed_queue_begins_nothing_and_ends_what_has_begun():
    numbers = Numbers([1] * 20, budget=1000, connections=10)
    numbers.queue.extend()
    wait_until(lambda: len(numbers.began) == 10)
    numbers.queue.close()
    for fetch in numbers.fetches[:10]:
        with pytest.raises(CancelledError):
            numbers.queue.take(fetch)
    numbers.allowed.set()
    assert (numbers.under_way, len(numbers.began), numbers.queue.held) == (list(range(10)), 10, 0)


def test_waiting_is_counted():
    numbers = Numbers([1], budget=10)
    before = traffic.so_far()
    numbers.queue.extend()
    numbers.allowed.set()
    numbers.queue.take(numbers.fetches[0])
    waited = traffic.so_far().waited
    numbers.queue.take(numbers.fetches[0])
    assert waited >= before.waited
    assert traffic.so_far().waited == waited, "for what is there nobody waits"


def write(folder: Path, sizes: list[int]) -> list[bytes]:
    datas = [random.Random(size).randbytes(size) for size in sizes]
    for number, data in enumerate(datas):
        (folder / f"{number}.bin").write_bytes(data)
    return datas


def locations(site: Site, count: int, **options: object) -> list[Location]:
    return [Location(f"{site.url}/{number}.bin", Remote(**options)) for number in range(count)]


SIZES = [0, 1, 499, 500, 501, 2000, 2001, 10_000, 33_333]


def test_files_one_after_the_other_are_what_they_are(site, tmp_path):
    datas = write(tmp_path, SIZES)
    found = []
    for location in opened_ahead(locations(site, len(SIZES))):
        with location.open() as stream:
            found.append(b"".join(iter(lambda stream=stream: stream.read(700), b"")))
    assert found == datas
    whole = [path for path, wanted in site.requests if wanted is None]
    assert set(whole) <= {"/0.bin"}, "only the empty one has no range"
    assert site.bytes == sum(SIZES)


def test_a_file_alone(site, tmp_path):
    for number, data in enumerate(write(tmp_path, SIZES)):
        site.clear()
        with open_url(f"{site.url}/{number}.bin") as stream:
            assert stream.read() == data
        assert site.bytes == len(data)


def test_what_follows_is_asked_for_while_one_is_read(site, tmp_path):
    write(tmp_path, [10_000] * 5)
    shards = opened_ahead(locations(site, 5))
    with next(shards).open() as stream:
        while stream.read(100):
            pass
        wait_until(lambda: site.asked("/1.bin"))
    shards.close()


@pytest.mark.parametrize("budget", [1, 1000, 5000, 1 << 20])
def test_no_more_is_held_than_the_budget_allows(site, tmp_path, budget):
    datas = write(tmp_path, [20_000] * 3)
    reader = ForwardReader(locations(site, 3, ahead=budget))
    for number, data in enumerate(datas):
        with reader.open(number) as stream:
            pieces = []
            while piece := stream.read(300):
                pieces.append(piece)
                assert reader._queue.held <= budget + tuning.REQUEST_BYTES
            assert b"".join(pieces) == data
    reader.close()
    assert reader._queue.held == 0


def test_who_reads_a_beginning_fetches_little(site, tmp_path):
    write(tmp_path, [1_000_000])
    with open_url(f"{site.url}/0.bin") as stream:
        assert len(stream.read(100)) == 100
    assert site.bytes < 20_000


def test_servers_without_ranges_are_asked_once_a_file(site, tmp_path):
    site.ranges = False
    datas = write(tmp_path, [10_000] * 4)
    found = []
    for location in opened_ahead(locations(site, 4)):
        with location.open() as stream:
            found.append(stream.read())
    assert found == datas
    assert len(site.requests) == 4


def test_servers_without_ranges_are_asked_twice_a_file_where_there_is_a_cache(site, tmp_path, monkeypatch):
    """And for no other range before the file is opened as a whole."""
    datas, take = write(tmp_path, [10_000] * 2), FetchQueue.take

    def taken_late(queue, fetch):
        try:
            return take(queue, fetch)
        finally:
            queue.extend()  # as a thread does when a request has ended
            time.sleep(0.1)

    monkeypatch.setattr(FetchQueue, "take", taken_late)
    site.ranges = False
    remote = Remote(cache_dir=str(tmp_path / "cache"))
    for location, data in zip(opened_ahead([Location(f"{site.url}/{n}.bin", remote) for n in range(2)]), datas):
        with location.open() as stream:
            assert stream.read() == data
    assert len(site.requests) == 4


def test_a_file_that_is_missing_is_an_error_of_its_own(site, tmp_path):
    datas = write(tmp_path, [3000] * 4)
    (tmp_path / "2.bin").unlink()
    found = []
    for number, location in enumerate(opened_ahead(locations(site, 4))):
        if number == 2:
            with pytest.raises(OpenError, match=r"/2\.bin: 404 Not Found"):
                location.open()
        else:
            with location.open() as stream:
                found.append(stream.read())
    assert found == [datas[0], datas[1], datas[3]]


def test_a_file_that_changes_is_an_error(site, tmp_path):
    write(tmp_path, [100_000])
    with open_url(f"{site.url}/0.bin", remote=Remote(ahead=1000)) as stream:
        stream.read(400)
        site.etag = '"v2"'
        with pytest.raises(OpenError, match="changed while it was read"):
            stream.read()


def test_a_reader_that_is_left_leaves_no_thread_at_work(site, tmp_path):
    write(tmp_path, [100_000] * 3)
    reader = ForwardReader(locations(site, 3))
    stream = reader.open(0)
    stream.read(2000)
    fetches = [fetch for file in reader._files for fetch in file.fetches]
    stream.close()
    reader.close()
    assert fetches
    for fetch in fetches:
        assert fetch.is_over
    wait_until(lambda: all(fetch.work is None or fetch.work.done() for fetch in fetches))
    wait_until(lambda: not reader._queue._under_way)


def test_a_file_is_whole_though_others_come_while_it_is_opened(site, tmp_path, monkeypatch):
    (data,), begin = write(tmp_path, [20_000]), Transfer.begin
    reader = ForwardReader(locations(site, 1))

    def begun_late(*arguments):
        reader._queue.extend()  # as a thread does when a request has ended
        return (yield from begin(*arguments))

    monkeypatch.setattr(Transfer, "begin", begun_late)
    with reader.open(0) as stream:
        assert stream.read() == data


def test_a_file_that_is_opened_again_is_whole_again(site, tmp_path):
    datas = write(tmp_path, [20_000] * 2)
    for location, data in zip(opened_ahead(locations(site, 2)), datas):
        for _ in range(2):
            with location.open() as stream:
                assert data.startswith(stream.read(3000))
        with location.open() as stream:
            assert stream.read() == data


def test_a_stream_that_can_no_longer_be_read_does_not_end_as_a_whole_one(site, tmp_path):
    """Of one file, or of two, only the stream that was opened last can be read on."""
    datas = write(tmp_path, [3 << 20] * 2)
    for second in range(2):
        reader = ForwardReader(locations(site, 2))
        with reader.open(0) as first:
            begun = first.read(100)
            with reader.open(second) as stream:
                assert stream.read() == datas[second]
            with pytest.raises(OpenError, match=r"/0\.bin: .* opened since"):
                begun += first.read()
            assert datas[0].startswith(begun)
        with reader.open(second) as stream:
            assert stream.read() == datas[second]


def test_a_stream_that_was_read_is_at_its_end_whatever_is_opened_since(site, tmp_path):
    datas = write(tmp_path, [20_000] * 2)
    reader = ForwardReader(locations(site, 2))
    with reader.open(0) as first:
        assert first.read() == datas[0]
        with reader.open(1) as stream:
            assert stream.read() == datas[1]
        assert first.read() == b""


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_is_opened_again_may_be_another(ranges):
    """Nothing that is known of the first lets the second be short."""
    datas = [random.Random(seed).randbytes(20_000) for seed in range(2)]
    with misbehaving() as server:
        reader = ForwardReader([Location(server.play(body=datas[0], default=Answer(ranges=ranges)))])
        for data, etag in zip(datas, ('"v1"', '"v2"')):
            server.play(body=data, default=Answer(ranges=ranges, etag=etag))
            with reader.open(0) as stream:
                assert stream.read() == data
        server.play(body=datas[1], default=Answer(ranges=ranges, etag=None, cut=5000))
        with reader.open(0) as stream, pytest.raises(OpenError, match="broke off, and cannot be resumed"):
            stream.read()


def test_a_retry_leaves_the_random_numbers_of_a_program_as_they_are():
    """A retry in a thread would change the augmentations of a program that seeds them."""
    body = bytes(20_000)
    with misbehaving() as server:
        url = server.play(Answer(cut=5000), Answer(status="503 Busy"), body=body)
        told = traffic.so_far()
        random.seed(5)
        before = random.getstate()
        with open_url(url, remote=Remote(retries=4)) as stream:
            assert stream.read() == body
        assert (traffic.so_far() - told).retries >= 1
        assert random.getstate() == before


FAULTS = st.builds(
    Answer,
    cut=st.one_of(st.none(), st.integers(0, 3000)),
    status=st.sampled_from(["200 OK"] * 4 + ["503 Busy", "429 Slow Down", "500 Oops"]),
    end=st.sampled_from(["close", "reset"]),
    etag=st.sampled_from(['"v1"'] * 5 + ['"v2"', None]),
    shift=st.sampled_from([0] * 6 + [1]),
    ranges=st.sampled_from([True] * 5 + [False]),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(FAULTS, max_size=12), st.sampled_from([800, 4000, 1 << 20]))
def test_the_right_bytes_or_an_error(answers, budget):
    body = random.Random(0).randbytes(25_000)
    with misbehaving() as server:
        url = server.play(*answers, body=body)
        found = b""
        try:
            with open_url(url, remote=Remote(ahead=budget, retries=4, connections=4, timeout=5)) as stream:
                while data := stream.read(1000):
                    found += data
        except OpenError:
            assert body.startswith(found)
        else:
            assert found == body


@pytest.mark.parametrize(("is_far", "size"), [(False, 500), (True, 2000)])
def test_many_small_requests_of_a_near_server_and_few_large_ones_of_one_far_away(
    site, tmp_path, monkeypatch, is_far, size
):
    """Connections are slow at their beginning: many are as fast as the line sooner than a few."""
    data, _ = write(tmp_path, [50_000, 10])
    monkeypatch.setattr(WebServer, "is_far", is_far)
    files = opened_ahead(locations(site, 2))
    with next(files).open() as stream:
        assert stream.read(10) == data[:10]
        wait_until(lambda: len(site.requests) > 4)
        sizes = [span(wanted) for _, wanted in site.requests[1:5]]
    assert sizes == [size] * 4
    files.close()


def span(wanted: str | None) -> int:
    begin, end = (wanted or "").removeprefix("bytes=").split("-")
    return int(end) - int(begin) + 1
