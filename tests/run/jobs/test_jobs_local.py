"""tarjob on this machine: items run once, are retried as requested, and resume after any interruption."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from running import TARJOB
from soak import rounds

from tarshards import read_samples, write_samples

COUNT = "echo {} >>ran; "


def ran() -> Counter[str]:
    return Counter(Path("ran").read_text().split()) if Path("ran").exists() else Counter()


def test_every_item_runs_once(tarjob):
    code, out, errors = tarjob("-s", "{00..19}", "-j", 3, "--", f"{COUNT} echo {{#}} >out-{{}}")
    assert (code, out) == (0, "")
    assert errors.endswith("20 items done\n")
    assert ran() == dict.fromkeys([f"{i:02d}" for i in range(20)], 1)
    assert [Path(f"out-{i:02d}").read_text() for i in range(20)] == [f"{i + 1}\n" for i in range(20)]
    assert tarjob("-s", "{00..19}", "-j", 3, "-q", "--", f"{COUNT} echo {{#}} >out-{{}}") == (0, "", "")
    assert sum(ran().values()) == 20


def test_names_of_shards_are_no_commands(tarjob):
    names = ["$(touch hit).tar", "a b.tar", "it's.tar", '"q".tar', "new\nline.tar", "back\\slash.tar", "$HOME.tar"]
    for folder in ("in", "out"):
        Path(folder).mkdir()
    for name in names:
        Path("in", name).write_text(name)
    assert tarjob("-s", "in/*.tar", "--", """test -f "{}" && cat '{}' >"out/{/}" """)[0] == 0
    assert tarjob("-s", "in/*.tar", "-q", "--", "bash", "-c", 'cmp "{}" out/{/}') == (0, "", "")
    assert {path.name: path.read_text() for path in Path("out").iterdir()} == {name: name for name in names}
    assert not Path("hit").exists()
    code, _, errors = tarjob("-s", "in/$(*", "--", "echo `cat {}`")
    cure = 'begin the line with name={}; and write "$name" there'
    assert (code, errors.splitlines()[-1]) == (
        2,
        f"Error: 'in/$(touch hit).tar' cannot replace {{}} in backquotes: {cure}",
    )


def make_shards(count: int = 3) -> None:
    for number in range(count):
        write_samples([{"__key__": f"{number}", "txt": f"text {number}"}], f"in-{number}.tar")


def rewrite(name: str, text: str) -> None:
    before = os.stat(name)
    write_samples([{"__key__": "new", "txt": text}], name)
    os.utime(name, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_an_item_with_another_input_is_run_again(tarjob):
    make_shards()
    line = "-s", "{0..2}", "--", "tarcat", "-q", "in-{}.tar", "-o", "out-{}.tar"
    assert tarjob(*line)[2] == "tarjob: 3 items done\n"
    times = {name: os.stat(name).st_mtime_ns for name in ("out-0.tar", "out-2.tar")}
    rewrite("in-1.tar", "text 1")
    assert tarjob("status")[0] == 1
    assert tarjob(*line)[::2] == (0, "tarjob: 2 of 3 items kept from an earlier run\ntarjob: 3 items done\n")
    assert [sample["__key__"] for sample in read_samples("out-1.tar")] == ["new"]
    assert {name: os.stat(name).st_mtime_ns for name in times} == times
    os.unlink("in-1.tar")  # an input that is gone is not another one
    assert tarjob(*line)[2] == "tarjob: 3 of 3 items kept from an earlier run\ntarjob: 3 items done\n"


@pytest.mark.parametrize(
    "line", [f"{COUNT}sha1sum in-{{}}.tar >sum-{{}}; cp sum-{{}} copy-{{}}", f"{COUNT}touch in-{{}}.tar"]
)
def test_what_a_command_writes_is_no_input(tarjob, line):
    make_shards()
    for run in range(3):
        rewrite("in-0.tar", f"text {run}")
        assert tarjob("-s", "{0..2}", "-j", 1, "--", line)[0] == 0
    again = 3 if "sha1sum" in line else 1
    assert ran() == {"0": again, "1": 1, "2": 1}


@pytest.mark.parametrize("command", [["./step.sh", "{}"], ["python3", "step.py", "{}"], ["python3 -m step {}; true"]])
def test_an_edited_script_runs_again(tarjob, command):
    def edit(text: str) -> None:
        Path("step.sh").write_text(f"#!/bin/sh\necho $1 >>ran; x={text}\n")
        Path("step.sh").chmod(0o755)
        Path("step.py").write_text(f"import sys\nprint(sys.argv[1], file=open('ran', 'a'))\nx = {text}\n")

    line = "-s", "a", "--state", "state", "-q", "--", *command
    for text, runs in (("1", 1), ("1", 1), ("2", 2)):
        edit(text)
        assert tarjob(*line)[0] == 0
        assert sum(ran().values()) == runs


def test_markers_of_an_earlier_version_are_kept_and_told(tarjob):
    make_shards()
    line = "-s", "in-*.tar", "--state", "state", "--", f"{COUNT} ./step.sh"
    Path("step.sh").write_text("#!/bin/sh\n")
    Path("step.sh").chmod(0o755)
    assert tarjob(*line)[0] == 0
    for path in Path("state").glob("*.done"):
        record = json.loads(path.read_text())
        del record["inputs"], record["code"]
        path.write_text(json.dumps(record))
    rewrite("in-1.tar", "text 1")
    Path("step.sh").write_text("#!/bin/sh\necho\n")
    note = ", 3 by an earlier release, which did not record code and inputs"
    assert tarjob(*line)[2] == f"tarjob: 3 of 3 items kept from an earlier run{note}\ntarjob: 3 items done\n"


@pytest.mark.parametrize(
    "found", [[], "x", {"in-0.tar": 3}, {"http://127.0.0.1:1/x": [1]}, {"": None}, {"in-0.tar": [[]]}]
)
def test_no_marker_is_trusted(tarjob, found):
    make_shards(1)
    line = "-s", "in-*.tar", "--state", "state", "-q", "--", f"{COUNT} true"
    assert tarjob(*line)[0] == 0
    (path,) = Path("state").glob("*.done")
    path.write_text(json.dumps({**json.loads(path.read_text()), "inputs": found, "code": found}))
    assert tarjob(*line) == (0, "", "")


def test_what_fails_is_run_again_after_the_others(tarjob):
    fails_twice = f"{COUNT} test {{}} != 1 || test $(grep -c 1 ran) -ge 3"
    assert tarjob("-s", "{0..3}", "-j", 1, "--", fails_twice)[0] == 0
    assert Path("ran").read_text().split() == ["0", "1", "2", "3", "1", "1"]


def test_retries_end(tarjob):
    code, _, errors = tarjob("-s", "{0..2}", "--retries", 2, "--", f"{COUNT} echo no luck; echo; test {{}} != 1")
    assert code == 1
    assert "  1 1: status 1: no luck\n" in errors
    assert ran() == {"0": 1, "1": 3, "2": 1}


def test_42_is_for_good(tarjob):
    line = "-s", "{0..2}", "--", f"{COUNT} test {{}} != 1 || exit 42"
    code, _, errors = tarjob(*line)
    assert code == 1
    assert "  1 1: permanent: " in errors
    assert tarjob(*line)[0] == 1
    assert ran() == {"0": 1, "1": 1, "2": 1}
    assert tarjob("retry")[0] == 1
    assert ran() == {"0": 1, "1": 2, "2": 1}


def test_too_many_failures_end_the_run(tarjob):
    code, _, errors = tarjob("-s", "{0..99}", "-j", 1, "--max-failed", 2, "--retries", 0, "--", f"{COUNT} exit 3")
    assert code == 1
    assert 3 <= sum(ran().values()) <= 5
    assert "not run" in errors


def test_markers_stand_beside_the_outputs(tarjob, shards):
    shards(3)
    line = "--inputs", "in-{00..02}.tar", "--outputs", "out-{00..02}.tar", "--", "cp", "{1}", "{2}"
    assert tarjob(*line)[0] == 0
    assert {path.name for path in Path().glob("out*")} == {
        f"out-0{i}.tar{end}" for i in range(3) for end in ("", ".done")
    }


def test_an_output_that_was_removed_is_made_again(tarjob):
    words = "-s", "{0..3}", "--", "bash", "-c", "echo $0 >>ran; echo >$1", "{}", "out-{}", "-o", "out-{}"
    assert tarjob(*words)[0] == tarjob(*words)[0] == 0
    assert sum(ran().values()) == 4
    Path("out-2").unlink()
    assert tarjob(*words)[0] == 0
    assert ran() == {"0": 1, "1": 1, "2": 2, "3": 1}


def test_an_output_that_is_not_there_is_a_failure(tarjob):
    code, _, errors = tarjob("-s", "{0..1}", "--retries", 0, "--", "true", "{}", "-o", "out-{}")
    assert code == 1
    assert "the command succeeded, but did not write out-0" in errors
    assert not list(Path().glob("*.done"))


def test_another_command_is_not_done(tarjob):
    for word in ("a", "b", "b"):
        assert tarjob("-s", "{0..3}", "--state", "state", "--", f"echo {word} >>ran; : {{}}")[0] == 0
    assert ran() == {"a": 4, "b": 4}


def test_a_torn_marker_is_none(tarjob):
    line = "-s", "{0..3}", "--state", "state", "--", f"{COUNT} true"
    assert tarjob(*line)[0] == 0
    markers = sorted(Path("state").iterdir())
    assert len(markers) == 4
    markers[0].write_bytes(markers[0].read_bytes()[:20])
    markers[1].write_bytes(b"")
    assert tarjob(*line)[0] == 0
    assert sum(ran().values()) == 6


def test_a_command_that_does_not_exist(tarjob):
    code, _, errors = tarjob("-s", "{0..1}", "--retries", 0, "--", "no-such-program", "{}")
    assert code == 1
    assert "status 127: cannot run no-such-program: " in errors


def test_a_state_that_cannot_be_written(tarjob, folder):
    Path("state").write_text("a file")
    code, _, errors = tarjob("-s", "{0..1}", "--state", "state", "--", "true", "{}")
    assert code == 1
    assert "state" in errors


def test_groups_run_one_after_the_other(tarjob, shards):
    shards(5)
    line = "--inputs", "in-{00..04}.tar", "--outputs", "out-{00..04}.tar", "--group", 2, "--", "cp", "{1}", "{2}"
    assert tarjob(*line)[0] == 0
    assert len(list(Path().glob("out-*.tar.done"))) == 5


def test_status_logs_and_their_exit_codes(tarjob):
    assert tarjob("status")[0] == 1
    tarjob("-s", "{0..3}", "--name", "mine", "--retries", 0, "--", "echo hello {}; test {} -lt 2")
    code, out, _ = tarjob("status", "mine")
    assert code == 1
    assert out.splitlines() == [
        *(
            "job      mine",
            "items    4",
            "done     2",
            "running  0",
            "failed   2",
            "waiting  0",
        ),
        *("  2 2: status 1: hello 2", "  3 3: status 1: hello 3"),
    ]
    assert tarjob("logs", "mine")[1] == "hello 2\nhello 3\n"
    assert tarjob("logs", "mine", "0")[1] == "hello 0\n"
    assert tarjob("logs", "mine", "9")[0] == 1
    assert "no job other was started" in tarjob("status", "other")[2]


def start(*arguments: object, **environment: str) -> subprocess.Popen:
    line, variables = [*TARJOB, *map(str, arguments)], {**os.environ, **environment}
    return subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("way", ["cancel", signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_end_from_outside_ends_the_commands(tarjob, folder, way):
    seconds = f"3{os.getpid()}.5"
    process = start("-s", "{0..9}", "-j", 2, "--name", "sleeper", "--", f"{COUNT} sleep {seconds}")
    wait_for(lambda: len(ran()) == 2 and len(processes_with(seconds)) >= 3)
    assert tarjob("status", "sleeper")[0] == 3
    assert "already running" in tarjob("-s", "{0..9}", "--name", "sleeper", "--", f"{COUNT} sleep {seconds}")[2]
    if way == "cancel":
        assert "sleeper: cancelled" in tarjob("cancel", "sleeper")[2]
    else:
        process.send_signal(way)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == (143 if way == "cancel" else 128 + way), errors
    assert processes_with(seconds) == []
    assert sum(ran().values()) == 2
    assert tarjob("cancel", "sleeper")[2].endswith("nothing was running\n")


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(rounds(6)))
def test_a_killed_run_redoes_only_what_has_no_marker(folder, trial):
    command = "echo {} >>$RAN; sleep 0.0$((RANDOM % 4)); echo {} >out-{}"
    line = ("-s", "{00..23}", "-j", 2, "-q", "--state", "state", "--", command)
    process = start(*line, RAN="before")
    time.sleep(0.08 + random.Random(trial).random() * 0.4)
    process.kill()
    process.communicate()
    done = {path.name for path in Path("state").glob("*.done")} if Path("state").exists() else set()
    again = start(*line, RAN="ran")
    assert (again.communicate(timeout=100), again.returncode) == (("", ""), 0)
    assert sum(ran().values()) == 24 - len(done)
    assert [Path(f"out-{i:02d}").read_text() for i in range(24)] == [f"{i:02d}\n" for i in range(24)]


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("-- echo", "no items to run the command for; name them with -s ITEMS"),
        ("status-of-what", "name them with -s ITEMS"),
        ("--inputs a -- cat {1}", "--inputs requires --outputs"),
        ("-s a --inputs b --outputs c -- cat {1}", "-s cannot be combined with --inputs"),
        ("-s 0 1 2 3 -- echo {}", "'1' comes before --, where only options do; quote the items for the shell"),
        ("-s a tarcat in-{} -o out-{}", "No such option '-o'. Write the command after --."),
        ("-s a --", "no command given; write it after --"),
        ("-s a -- echo", "the command has no {}"),
        ("-s @empty -- echo {}", "@empty: the shard expression is empty"),
    ],
)
def test_wrong_command_lines_say_what_to_do(tarjob, folder, line, cure):
    Path("empty").touch()
    code, _, errors = tarjob(*line.split())
    assert code == 2
    assert cure in errors.splitlines()[-1]
