"""Calls on a Ray cluster of two workers: map_shards by its executor, and tarjob's verbs; workers are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tarshards import OpError, ShardWriter, map_shards, read_samples

TARJOB = [sys.executable, str(Path(__file__).parents[2] / "bin/tarjob")]
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def address():
    """The address of a cluster."""
    ray = pytest.importorskip("ray", reason="needs ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        found = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield found["gcs_address"]
        ray.shutdown()


@pytest.fixture
def executor(address):
    from tarshards.engines.ray import RayExecutor

    with RayExecutor() as executor:
        yield executor


@pytest.fixture
def shards(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    with ShardWriter(f"{tmp_path}/in-%d.tar", max_samples=50) as writer:
        for i in range(300):
            writer.write({"__key__": f"{i:06d}", "txt": f"text {i}"})
    return f"{tmp_path}/in-{{0..5}}.tar"


def upper(folder: str, sample: dict) -> dict:
    killed = f"{folder}/killed"
    if sample["__key__"] == "000120" and not os.path.exists(killed):
        open(killed, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return {**sample, "txt": sample["txt"].upper()}


def refuse(sample: dict) -> dict:
    raise ZeroDivisionError("no")


def pause(path: str) -> None:
    Path(path).touch()
    while True:  # Ray interrupts Python code, not a call that waits
        time.sleep(0.05)


def test_map_shards_writes_each_sample_once_though_a_worker_is_killed(executor, shards, tmp_path):
    function = partial(upper, str(tmp_path))
    rows = map_shards(
        function, shards, f"{tmp_path}/out-{{0..5}}.tar", executor=executor, per_sample=True, progress=False
    )
    assert (tmp_path / "killed").exists()
    assert [row.samples_out for row in rows] == [50] * 6
    assert [sample["txt"] for sample in read_samples("out.shards.json")] == [f"TEXT {i}".encode() for i in range(300)]
    assert not [*tmp_path.glob(".*.tmp")]


def test_an_error_is_that_of_the_function(executor, shards, tmp_path):
    outputs = f"{tmp_path}/out-{{0..5}}.tar"
    with pytest.raises(OpError, match="ZeroDivisionError: no"):
        map_shards(refuse, shards, outputs, executor=executor, per_sample=True, progress=False)
    with pytest.raises(ZeroDivisionError, match="no"):
        executor.submit(refuse, {}).result()


def test_a_call_that_is_cancelled_ends(executor, tmp_path):
    future = executor.submit(pause, str(tmp_path / "begun"))
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    assert future.cancel()
    assert executor.submit(max, 3, 4).result(60) == 4
    assert executor.slots == 2


def tarjob(address: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONWARNINGS": "ignore"}
    return subprocess.run([*TARJOB, *words], env=environment, capture_output=True, text=True, timeout=300)


def test_tarjob_runs_its_items_on_the_cluster(address, shards):
    dies = "test {} != 2 -o -e died || { touch died; kill -9 $PPID; }"
    fails = "echo hello {}; test {} != 3 -o -e mended"
    command = f"{dies}; {fails} && tar -tf in-{{}}.tar | wc -l >count-{{}}"
    line = ["-b", "ray", "-s", "{0..5}", "-q", "--retries", "1", "--", command]
    done = tarjob(address, *line)
    assert done.returncode == 1
    assert "  3 3: status 1: hello 3\n" in done.stderr
    assert Path("died").exists()
    assert "5 of 6 items done" in tarjob(address, "status").stdout or "5" in tarjob(address, "status").stdout
    assert "hello 3" in tarjob(address, "logs").stdout
    Path("mended").touch()
    assert tarjob(address, "retry", "-q").returncode == 0
    assert [int(Path(f"count-{i}").read_text()) for i in range(6)] == [50] * 6


def test_tarjob_cancel_ends_what_runs_there(address, shards):
    environment = {**os.environ, "RAY_ADDRESS": address}
    command = [*TARJOB, "-b", "ray", "-q", "-s", "{0..1}", "--", "echo $$ >pid-{}; exec sleep 600"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as running:
        while not all(Path(f"pid-{i}").exists() and Path(f"pid-{i}").read_text() for i in range(2)):
            assert running.poll() is None
            time.sleep(0.1)
        assert "cancelled" in tarjob(address, "cancel").stderr
        assert running.wait(60)
    for i in range(2):
        pid, deadline = Path(f"pid-{i}").read_text().strip(), time.monotonic() + 60
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
