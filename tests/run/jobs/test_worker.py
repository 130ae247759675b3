"""What a scheduler starts for each index: killed anywhere and started twice, it comes to the bytes of a serial run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import need
from running import TARJOB, upper
from soak import SOAK

from tarshards.run.jobs.job_plan import make_plan
from tarshards.run.jobs.kubernetes_objects import WORKER
from tarshards.run.jobs.worker import GRACE

COMMAND = ["tarproc", "-q", "-c", "tr a-z A-Z <sample.txt >sample.up", "in-{}.tar", "--overwrite", "-o", "out-{}.tar"]


@pytest.fixture
def plan(folder):
    plan = make_plan(COMMAND, ["{00..25}"])
    Path("plan.json").write_text(plan.dumps())
    return plan


def pod(index: int, path: str) -> subprocess.Popen:
    """Start the container of one index: the command of the Job, with the plan where it is mounted."""
    assert WORKER[:2] == ["tarjob", "worker"]
    environment = {**os.environ, "PATH": path, "JOB_COMPLETION_INDEX": str(index)}
    return subprocess.Popen(
        [*TARJOB, "worker", "plan.json"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,
    )


@pytest.mark.soak
def test_random_kills_end_in_the_bytes_of_a_serial_run(plan, shards, path_with_started_tools):
    count = min(13 * SOAK, len(plan.items)) if SOAK > 1 else 2
    shards(count)
    rng = random.Random(7 if SOAK > 1 else 88)  # which kills the first of three after 0.15 s
    todo = [(index, True) for index in range(count) for _ in range(1 + (index % 7 == 0))]  # some run twice at once
    running: dict[subprocess.Popen, tuple[int, float]] = {}
    kills = 0
    deadline = time.monotonic() + 600
    while todo or running:
        assert time.monotonic() < deadline
        while todo and len(running) < 4:
            index, mortal = todo.pop(0)
            life = rng.uniform(0.05, 0.6) if mortal and rng.random() < 0.5 else 1e9
            running[pod(index, path_with_started_tools)] = index, time.monotonic() + life
        for process, (index, end) in list(running.items()):
            if process.poll() is not None:
                del running[process]
                _, errors = process.communicate()
                assert process.returncode in (0, -9), errors
                if process.returncode:
                    kills += 1
                    todo.insert(0, (index, rng.random() < 0.3))  # as the Job does, until it succeeds
            elif time.monotonic() > end:
                os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.01)
    assert kills >= (3 if SOAK > 1 else 1)
    made = {path.name: path.read_bytes() for path in Path().glob("out-*.tar")}
    assert len(made) == len(list(Path().glob("*.done"))) == count
    for item in plan.items[:count]:
        assert made[f"out-{item.values[0]}.tar"] == upper(f"in-{item.values[0]}.tar")


def worker(tarjob, index: int) -> tuple[int, str, str]:
    return tarjob("worker", "plan.json", JOB_COMPLETION_INDEX=str(index))


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1), (7, 1), (42, 42)])
def test_exit_codes(tarjob, status, code):
    plan = make_plan([f"echo {{}}; exit {status}"], ["{a,b}"], state="state")
    Path("plan.json").write_text(plan.dumps())
    exit_code, out, errors = worker(tarjob, 1)
    assert (exit_code, out) == (code, "b\n")
    kind = "done" if status == 0 else "failed"
    record = json.loads(Path(plan.marker(plan.items[1], kind)).read_text())
    assert record["item"] == ["b"]
    if status:
        assert (record["status"], record["line"]) == (status, "b")
        assert f"tarjob: b: status {status}: b" in errors
    assert len(list(Path("state").iterdir())) == 1


def test_a_group_goes_on_after_a_failure_and_is_not_for_good_unless_all_are(tarjob):
    plan = make_plan(["echo {} >>ran; exit {}"], [["1", "42", "0"]], state="state")
    Path("plan.json").write_text(plan._replace(tasks=(tuple(plan.items),)).dumps())
    assert worker(tarjob, 0)[0] == 1
    assert worker(tarjob, 0)[0] == 1
    assert Path("ran").read_text().split() == ["1", "42", "0", "1", "42"]


def test_slurm_names_the_task_too(tarjob, plan, shards):
    shards(2)
    assert tarjob("worker", "plan.json", SLURM_ARRAY_TASK_ID="1")[0] == 0
    assert Path("out-01.tar.done").exists()
    command = [sys.executable, "-m", "tarshards.run.jobs", "worker", "plan.json"]
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "1"}
    assert subprocess.run(command, env=environment).returncode == 0


def test_no_task(tarjob, plan):
    assert "no task given" in tarjob("worker", "plan.json")[2]
    assert "no task 26: the plan has 26 tasks" in worker(tarjob, 26)[2]
    assert worker(tarjob, 26)[0] == 1
    assert "No such file" in tarjob("worker", "nothing.json", JOB_COMPLETION_INDEX="0")[2]


def test_sigterm_ends_the_command(folder, path_with_started_tools):
    Path("plan.json").write_text(make_plan(["echo $$ >pid; sleep 100; : {}"], ["a"], state="state").dumps())
    process = pod(0, path_with_started_tools)
    while not Path("pid").exists() or not Path("pid").read_text():
        time.sleep(0.02)
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 143
    assert not Path(f"/proc/{Path('pid').read_text().strip()}").exists()
    assert not Path("state").exists()


def test_a_command_has_longer_than_a_local_one_to_save_what_it_has(folder, path_with_started_tools):
    save = f"sleep {GRACE + 1}; echo >saved; exit"
    script = f"trap '{save}' TERM; echo >began; while :; do sleep 0.02; done; : {{}}"
    Path("plan.json").write_text(make_plan([script], ["a"], state="state").dumps())
    process = pod(0, path_with_started_tools)
    while not Path("began").exists():
        time.sleep(0.02)
    process.terminate()
    process.communicate(timeout=60)
    assert (process.returncode, Path("saved").exists()) == (143, True)


@pytest.fixture
def container(folder, path_with_started_tools):
    """Return a function that starts a plan's first task as process 1 of a new namespace of processes."""
    need("unshare")
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--mount-proc", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("needs namespaces")

    def start(script: str) -> subprocess.Popen:
        Path("script").write_text(script)
        Path("plan.json").write_text(make_plan(["bash", "{}"], ["script"], state="state").dumps())
        environment = {**os.environ, "PATH": path_with_started_tools, "JOB_COMPLETION_INDEX": "0"}
        return subprocess.Popen([*unshare, *TARJOB, "worker", "plan.json"], env=environment)

    return start


def test_as_process_1_it_reaps_what_commands_leave_behind(container):
    waits = "for i in {1..500}; do test -s orphan && test ! -e /proc/$(cat orphan) && exit 42; sleep 0.02; done"
    assert container(f"(setsid bash -c 'echo $$ >orphan' &)\n{waits}").wait(60) == 42


def test_as_process_1_it_ends_the_command_when_terminated(container):
    process = container("trap 'echo >ended; exit' TERM\necho >began\nwhile :; do sleep 0.02; done")
    while not Path("began").exists():
        assert process.poll() is None
        time.sleep(0.02)
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    assert process.wait(60) == 143
    assert Path("ended").exists()
    assert not Path("state").exists()
