"""Killed at any moment, the same line of tarjob ends with all outputs, as an undisturbed run writes them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from running import TARJOB
from soak import SOAK

from tarshards import read_samples
from tarshards.run.jobs.job_plan import make_plan

COUNT = 4 if SOAK > 1 else 2
MOMENTS = min(30, SOAK)
SLOW = "for i in 1 2 3 4; do cat in-{}.tar; sleep 0.05; done"
LINES = {
    "tarproc": [
        *("-s", f"{{00..{COUNT - 1:02d}}}", "--"),
        *("tarproc", "-q", "--tmpdir", "scratch", "-p", "2", "-c", "sleep 0.03; tr a-z A-Z <sample.txt >sample.up"),
        *("in-{}.tar", "-o", "out-{}.tar"),
    ],
    "tarproc in a line": [
        *("-s", f"{{00..{COUNT - 1:02d}}}", "--state", "state", "--"),
        "sleep 0.05; tarcat -q in-{}.tar | tarproc -q --tmpdir scratch -c 'sleep 0.01' -o out-{}.tar",
    ],
    "cat": ["-s", f"{{00..{COUNT - 1:02d}}}", "--", "bash", "-c", f"{SLOW} >out-$0.tar", "{}", "-o", "out-{}.tar"],
    "tar": [
        *("-s", f"{{00..{COUNT - 1:02d}}}", "--"),
        *("tar", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "--mode=644", "-cf"),
        *("out-{}.tar", "in-{}.tar", "--", "big"),
    ],
}


@pytest.fixture
def start(folder, path_with_started_tools):
    """Return a function that starts tarjob, by default in processes that can be found and killed."""

    def run(*line: object, path: str = path_with_started_tools) -> subprocess.Popen:
        words = [shutil.which("tarjob", path=path), *map(str, line)]
        environment = {**os.environ, "PATH": path}
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return run


@pytest.fixture
def again(start, path_with_tools):
    """Return a function that runs a line to its end, and expects it to succeed and to leave nothing."""

    def run(*line: object, path: str = path_with_tools) -> None:
        process = start(*line, path=path)
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, ""), errors
        assert "Traceback" not in errors
        wait_until(lambda: processes() == [])
        assert leftovers() == []

    return run


def processes() -> list[int]:
    """The processes of the jobs in this directory: commands, by their environment, and guards, by their arguments."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            text = Path(f"/proc/{name}/environ").read_bytes() + b"\0" + Path(f"/proc/{name}/cmdline").read_bytes()
            words = (b"TARJOB_RUN=" + os.getcwdb(), b"TAR_SCRATCH=" + os.getcwdb())
            if any(word.startswith(words) for word in text.split(b"\0")):
                found.append(int(name))
    return found


def wait_until(holds) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def leftovers() -> list[str]:
    """Files that a finished job must not leave."""
    ends = (".tmp", ".started", ".failed")
    return [str(path) for path in Path().rglob("*") if path.name.endswith(ends) or path.parts[0] == "scratch"][1:]


def outputs() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().glob("out-*.tar")}


def kill_tarjob(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(60)  # it holds its lock until then


def kill_tarproc(process: subprocess.Popen) -> None:
    for number in processes():
        with suppress(OSError):
            if b"bin/tarproc" in Path(f"/proc/{number}/cmdline").read_bytes():
                os.kill(number, signal.SIGKILL)
                return


def kill_all(process: subprocess.Popen) -> None:
    """Kill everything, guards first, as a machine that stops does."""
    process.send_signal(signal.SIGSTOP)
    kill_tarjob(process)
    while found := processes():
        for number in sorted(found, key=lambda n: b"guard.py" not in Path(f"/proc/{n}/cmdline").read_bytes()):
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)


KILLS = [kill_tarjob, kill_tarproc, kill_all]
EACH = [(line, kill) for line in LINES for kill in KILLS if kill != kill_tarproc or "tarproc" in line]


@pytest.mark.soak
@pytest.mark.parametrize(("line", "kill"), EACH if SOAK > 1 else EACH[2:7:2])  # every kill
def test_killed_at_any_moment(start, again, shards, path_with_started_tools, line, kill):
    shards(COUNT, samples=5)
    os.mkdir("scratch")
    Path("big").write_bytes(os.urandom(30_000_000 if line == "tar" else 1))
    words = ["-q", "-j", 2, *LINES[line]]
    begun = time.monotonic()
    again(*words, path=path_with_started_tools)
    seconds = time.monotonic() - begun
    whole = outputs()
    assert len(whole) == COUNT
    for moment in range(MOMENTS):
        for path in [*Path().glob("out-*"), *Path().glob("state/*"), *Path().glob(".tarjob/*/markers/*")]:
            path.unlink()
        process = start(*words)
        time.sleep(seconds * (moment + 0.5) / MOMENTS)
        with suppress(ProcessLookupError, FileNotFoundError):
            kill(process)
        if kill is kill_tarproc:
            process.communicate(timeout=60)
        again(*words)
        assert outputs() == whole
        if kill is not kill_tarproc:
            process.communicate(timeout=10)


def begun() -> list[str]:
    """The items whose commands have started, in order."""
    return Path("ran").read_text().split() if Path("ran").exists() else []


def test_the_commands_of_a_killed_tarjob_end(start, again, folder):
    """In any session, and before the next run of the line begins them."""
    command = "echo {} >>ran; echo {} >out-{}.tar; test -e again || { setsid sleep 100 & sleep 100; }"
    line = ("--inputs", "{0..3}", "--outputs", "out-{0..3}.tar", "-j", 2, "-q", "--", command)
    process = start(*line)
    wait_until(lambda: len(begun()) == 2 and len(processes()) >= 7)  # of each: bash, setsid or its sleep, sleep
    process.kill()
    process.communicate(timeout=10)
    wait_until(lambda: processes() == [])
    assert not list(Path().glob("*.done"))
    Path("again").touch()
    again(*line)
    assert len(begun()) == 6


@pytest.fixture
def tool(folder):
    """Return a function that makes a script with the name of a tool of ours."""

    def make(script: str) -> None:
        Path("tarcat").write_text(f"#!/bin/bash\n{script}\n")
        Path("tarcat").chmod(0o755)

    return make


@pytest.mark.parametrize("way", ["words", "line", "state", "outputs"])
def test_killed_between_the_output_and_its_marker(start, again, shards, tool, way):
    """The command itself kills tarjob as soon as its output is there: tarcat would refuse to replace it."""
    shards(2)
    tool('tarcat -q "$1" -o "$3" && { test -e again || { touch again; kill -9 $PPID; sleep 100; }; }')
    words = ["./tarcat", "in-{}.tar", "-o", "out-{}.tar"]
    line = {
        "words": ["-s", "{00..01}", "--", *words],
        "line": ["-s", "{00..01}", "--", f": {{}}; exec {' '.join(words)}"],
        "state": ["-s", "{00..01}", "--state", "state", "--", *words],
        "outputs": [
            "--inputs",
            "in-{00..01}.tar",
            "--outputs",
            "out-{00..01}.tar",
            "--",
            "./tarcat",
            "{1}",
            "-o",
            "{2}",
        ],
    }[way]
    process = start("-j", 1, "-q", *line)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert Path("out-00.tar").exists()
    again("-j", 1, "-q", *line)
    keys = [f"{shard}-{number}" for shard in ("00", "01") for number in range(3)]
    assert [sample["__key__"] for sample in read_samples("out-{00..01}.tar")] == keys


def test_what_a_failed_try_left_is_removed_before_the_next(tarjob, tool):
    tool("set -C; echo $1 >>ran; echo part >$2 && test $(grep -c $1 ran) -ge 2 || exit 5; echo whole >>$2")
    line = ("--inputs", "{0..2}", "--outputs", "out-{0..2}", "-j", 1, "--", "./tarcat", "{1}", "{2}")
    assert tarjob(*line)[0] == 0
    assert [Path(f"out-{i}").read_text() for i in range(3)] == ["part\nwhole\n"] * 3
    assert leftovers() == []


def test_what_failed_is_removed_by_a_later_run_too(tarjob, tool):
    tool("set -C; echo part >$2 && test -e good")
    line = ("--inputs", "{0..2}", "--outputs", "out-{0..2}", "--retries", 0, "--", "./tarcat", "{1}", "{2}")
    assert tarjob(*line)[0] == 1
    assert Path("out-1").read_text() == "part\n", "what failed can be looked at"
    Path("good").touch()
    assert tarjob(*line)[0] == 0
    assert leftovers() == []


def test_a_checkpoint_is_kept(tarjob, start, folder):
    """The output of another program may be the state from which it resumes."""
    command = "echo step >>{2}; test $(wc -l <{2}) -ge 3 || { test -e quick && exit 143; touch quick; sleep 100; }"
    line = ("--inputs", "{0..0}", "--outputs", "model-{0..0}", "--", command)
    process = start(*line)
    wait_until(Path("quick").exists)
    process.kill()
    process.communicate(timeout=10)
    assert tarjob(*line)[0] == 0
    assert Path("model-0").read_text() == "step\n" * 3
    assert leftovers() == []


def test_a_file_that_existed_before_is_not_touched(start, tarjob, shards, folder):
    shards(2)
    Path("out-01.tar").write_text("mine")
    line = ("-s", "{00..01}", "--retries", 1, "--", "tarcat", "-q", "in-{}.tar", "-o", "out-{}.tar")
    for _ in range(2):
        code, _, errors = tarjob(*line)
        assert code == 1
        assert "1 01: status 2: Error: out-01.tar exists; --overwrite replaces it" in errors
        assert Path("out-01.tar").read_text() == "mine"
    # Nor where the attempt is killed.
    words = ["-s", "{00..01}", "-q", "--", "bash", "-c", "touch begun; sleep 100", "{}", "-o", "out-{}.tar"]
    process = start(*words)
    wait_until(Path("begun").exists)
    process.kill()
    process.communicate(timeout=10)
    wait_until(lambda: processes() == [])
    assert tarjob(*line)[0] == 1
    assert Path("out-01.tar").read_text() == "mine"


def test_a_killed_guard_leaves_it_to_the_next_run(start, again, folder):
    command = "echo {} >>ran; test -e again || sleep 100"
    line = ("-s", "{0..1}", "-j", 2, "-q", "--", command)
    process = start(*line)
    wait_until(lambda: len(begun()) == 2)
    guards = [n for n in processes() if b"guard.py" in Path(f"/proc/{n}/cmdline").read_bytes()]
    assert len(guards) == 1, "one a run"
    process.send_signal(signal.SIGSTOP)
    os.kill(guards[0], signal.SIGKILL)
    process.kill()
    process.communicate(timeout=10)
    orphans = processes()
    assert orphans
    Path("again").touch()
    again(*line)
    assert not set(orphans) & set(processes())


def test_the_next_run_waits_for_a_command_that_it_cannot_find(start, folder):
    """One without our environment, which nobody can tell from others; the lock that it inherited tells."""
    inner = "echo begun >>$0; until test -e go-on; do sleep 0.05; done; echo $0 >>ended"
    line = ["-s", "{0..0}", "--", "env", "-i", "bash", "-c", inner, "out-{}", "-o", "out-{}"]
    process = start(*line)
    wait_until(Path("out-0").exists)
    process.kill()
    process.communicate(timeout=10)
    second = start(*line)
    for text in second.stderr:
        if "waits for an earlier command" in text:
            break
    assert Path("out-0").read_text() == "begun\n", "it was not begun again"
    Path("go-on").touch()
    _, errors = second.communicate(timeout=30)
    assert second.returncode == 0, errors
    assert Path("ended").read_text() == "out-0\nout-0\n"
    assert leftovers() == []


def test_a_marker_of_an_output_that_was_removed_is_not_valid_again(start, again, folder):
    command = "echo part >{2}; test -e quick || { touch begun; sleep 100; }; echo whole >>{2}"
    line = ("--inputs", "{0..0}", "--outputs", "out-{0..0}", "-q", "--", command)
    Path("quick").touch()
    again(*line)
    Path("out-0").unlink()
    Path("quick").unlink()
    process = start(*line)
    wait_until(Path("begun").exists)
    process.kill()
    process.communicate(timeout=10)
    Path("quick").touch()
    again(*line)
    assert Path("out-0").read_text() == "part\nwhole\n"


def test_a_record_of_an_item_that_is_done_is_removed(start, again, folder):
    """Of a tarjob that was killed after it wrote the marker, and before it removed the record."""
    command = "echo {} >{2}; test -e ok || kill -9 $PPID"
    line = ("--inputs", "{0..1}", "--outputs", "out-{0..1}", "-j", 1, "-q", "--", command)
    process = start(*line)
    process.communicate(timeout=30)
    plan = make_plan([command], inputs="{0..1}", outputs="out-{0..1}")
    record = json.loads(Path("out-0.started").read_text())
    Path(plan.marker(plan.items[0])).write_text(json.dumps(record))
    Path("ok").touch()
    again(*line)


def test_a_worker_removes_the_record_of_an_item_that_is_done(tarjob, folder):
    plan = make_plan(["touch {2}"], inputs="{0..1}", outputs="out-{0..1}")
    Path("plan.json").write_text(plan.dumps())
    assert tarjob("worker", "plan.json", "--index", 0)[0] == 0
    Path("out-0.started").write_text("{}")
    assert tarjob("worker", "plan.json", "--index", 0)[0] == 0
    assert leftovers() == []


def test_a_killed_worker_leaves_nothing_running(folder, path_with_started_tools, tarjob):
    seconds = f"3{os.getpid()}.5"
    command = f"echo {{}} >{{2}}; test -e again || {{ setsid sleep {seconds} & sleep {seconds}; }}"
    plan = make_plan([command], inputs="a", outputs="b")
    Path("plan.json").write_text(plan.dumps())
    environment = {**os.environ, "PATH": path_with_started_tools, "JOB_COMPLETION_INDEX": "0"}
    words = [sys.executable, "-m", "tarshards.run.jobs", "worker", "plan.json"]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)

    def sleepers() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                    found.append(path.parent.name)
        return found

    wait_until(lambda: len(sleepers()) == 2)
    process.kill()
    process.communicate(timeout=10)
    wait_until(lambda: sleepers() == [])
    Path("again").touch()
    assert tarjob("worker", "plan.json", "--index", 0)[0] == 0
    assert leftovers() == []


def test_two_workers_of_one_item_run_one_after_the_other(folder, path_with_started_tools):
    """As when a node is lost and found again: two pods of one index never write one output at once."""
    command = "echo b >>log; echo {} >{2}; until test -e go-on; do sleep 0.05; done; echo e >>log"
    plan = make_plan([command], inputs="a", outputs="out")
    Path("plan.json").write_text(plan.dumps())
    environment = {**os.environ, "PATH": path_with_started_tools, "JOB_COMPLETION_INDEX": "0"}
    words = [*TARJOB, "worker", "plan.json"]
    first = subprocess.Popen(words, env=environment)
    wait_until(Path("out").exists)
    second = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    assert "waits for an earlier command" in second.stderr.readline()
    Path("go-on").touch()
    assert first.wait(30) == 0
    assert second.wait(30) == 0
    second.stderr.close()
    assert Path("log").read_text() == "b\ne\n", "the second found it done"


def test_the_first_failure_is_told(tarjob, folder):
    command = "echo {} >>ran; test $(grep -c {} ran) -gt 1 || { echo the cause of {}; exit 3; }; echo exists; exit 2"
    code, _, errors = tarjob("-s", "{0..1}", "--retries", 2, "--", command)
    assert code == 1
    assert "  0 0: status 3: the cause of 0\n" in errors
    assert "status 3: the cause of 1\n" in tarjob("status")[1]
    assert "status 2: exists\n" in tarjob("-s", "{0..1}", "--retries", 0, "--", command)[2], "of this run"


def test_the_first_failure_of_all_pods_is_told(tarjob, folder):
    command = "echo {} >>ran; test $(wc -l <ran) -gt 1 || { echo the cause; exit 3; }; echo exists; exit 2"
    plan = make_plan([command], ["{0..0}"], state="state")
    Path("plan.json").write_text(plan.dumps())
    for _ in range(2):
        assert "status 3: the cause" in tarjob("worker", "plan.json", JOB_COMPLETION_INDEX="0")[2]
    record = json.loads(Path(plan.marker(plan.items[0], "failed")).read_text())
    assert (record["status"], record["line"]) == (3, "the cause")
    again = tarjob("worker", "plan.json", JOB_COMPLETION_INDEX="0", SLURM_ARRAY_JOB_ID="7")[2]
    assert "status 2: exists" in again, "another run"


def test_status_42_is_told_whenever_it_comes(tarjob, folder):
    command = "echo {} >>ran; test $(wc -l <ran) -gt 1 || { echo bad luck; exit 3; }; echo bad input; exit 42"
    assert "permanent: bad input" in tarjob("-s", "{0..0}", "--", command)[2]


def test_a_silent_try_is_not_given_the_words_of_an_earlier_one(tarjob, folder):
    line = ("-s", "{0..0}", "--retries", 0, "--", "test -e silent || echo words; kill -9 $$; : {}")
    assert "status 137: words" in tarjob(*line)[2]
    Path("silent").touch()
    assert "status 137: was killed by signal 9" in tarjob(*line)[2]


def test_failures_to_be_tried_again_are_told_when_the_job_ends_early(tarjob, folder):
    command = "test {} != 1 || exit 42; echo no luck; exit 3"
    code, _, errors = tarjob("-s", "{0..3}", "-j", 1, "--max-failed", 0, "--", command)
    assert code == 1
    assert "  0 0: status 3: no luck\n" in errors
    assert "  1 1: permanent: " in errors


def test_another_line_of_the_same_name_leaves_a_running_job_alone(tarjob, start, folder):
    process = start(
        "-s", "{0..1}", "--name", "mine", "--", "touch begun; until test -e go-on; do sleep 0.05; done; : {}"
    )
    wait_until(Path("begun").exists)
    assert "already running" in tarjob("-s", "{0..8}", "--name", "mine", "--", "true {}")[2]
    assert "items    2\n" in tarjob("status", "mine")[1]
    Path("go-on").touch()
    process.communicate(timeout=30)
    assert process.returncode == 0
