"""A real Dask cluster of two processes; one is killed during the map."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tarshards import TarWriter
from tarshards.errors import OpenError
from tarshards.stream.dask import dask_executor, dask_map
from tarshards.write.map import map_shards

# Dask leaves sockets and loops to the garbage collector.
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def client():
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50)
    with cluster, distributed.Client(cluster) as client:
        yield client


def slow_upper(samples, folder):
    for sample in samples:
        number = sample["__key__"].partition("-")[0]
        with open(f"{folder}/ran", "a") as file:
            file.write(f"{number} {os.getpid()}\n")
        time.sleep(0.05)
        yield {**sample, "up": sample["txt"].upper()}


def at_the_first_sample_of_a_shard(ran: Path) -> int:
    """Wait until some work is done; return the process that has just begun the next, with most of it before it."""
    while True:
        lines = ran.read_text().splitlines() if ran.exists() else []
        if len(lines) >= 10 and lines.count(lines[-1]) == 1:
            return int(lines[-1].split()[1])
        time.sleep(0.02)


def test_a_worker_that_is_killed_changes_nothing(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        with TarWriter(f"in-{number:02d}.tar") as writer:
            for i in range(3):
                writer.write({"__key__": f"{number:02d}-{i}", "txt": f"text {number} {i}"})
    function = partial(slow_upper, folder=str(tmp_path))
    inputs = f"{tmp_path}/in-{{00..19}}.tar"
    executor = dask_executor(client)
    calls = []
    real = executor.submit

    def submit(*arguments, **options):
        calls.append(real(*arguments, **options))
        if len(calls) == 20:
            os.kill(at_the_first_sample_of_a_shard(Path("ran")), signal.SIGKILL)
        return calls[-1]

    monkeypatch.setattr(executor, "submit", submit)
    reports = map_shards(function, inputs, f"{tmp_path}/out-{{00..19}}.tar", executor=executor)
    ran = [line.split()[0] for line in Path("ran").read_text().splitlines()]
    assert len(ran) > 60  # some ran twice
    assert [(row.samples_in, row.samples_out, row.failed, row.error) for row in reports] == [(3, 3, 0, None)] * 20
    assert [row.bytes for row in reports] == [os.path.getsize(row.output) for row in reports]
    assert len(Path("out.report.jsonl").read_text().splitlines()) == 20
    for number in range(20):
        map_shards(function, f"{tmp_path}/in-{number:02d}.tar", "serial.tar", resume=False, progress=False)
        assert Path("serial.tar").read_bytes() == Path(f"out-{number:02d}.tar").read_bytes()


def double(number: int) -> int:
    time.sleep(0.002 * (number % 3))
    return 2 * number


def test_dask_map_keeps_the_order(client):
    assert list(dask_map(range(50), double, client=client)) == [2 * i for i in range(50)]
    assert sorted(dask_map(range(50), double, client=client, ordered=False)) == [2 * i for i in range(50)]
    assert list(dask_map([3, 3], double)) == [6, 6]  # of the client that is current


def test_errors_come_home(client):
    with pytest.raises(ZeroDivisionError):
        list(dask_map([1, 0], partial(divmod, 1), client=client))


def full(_):
    error = OpenError("full", url="a.tar", offset=7, key="k", field="f", errno=28)
    error.cost = "all of it"
    error.add_note("as it should be")
    raise error


def test_errors_arrive_with_all_that_they_hold(client):
    error = dask_executor(client).submit(full, 0).exception()
    assert (type(error), str(error)) == (OpenError, "a.tar: offset 7: k.f: full")
    assert (error.url, error.offset, error.key, error.field, error.errno) == ("a.tar", 7, "k", "f", 28)
    assert (error.cost, error.__notes__) == ("all of it", ["as it should be"])
