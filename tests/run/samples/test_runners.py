"""Persistent workers: servers that speak JSON, and Python functions."""

from __future__ import annotations

import os
import sys

import pytest
from leftovers import processes_with, wait_until
from soak import SOAK

from tarshards.errors import OpError
from tarshards.run.samples.command import map_command

#: The seconds after which what hangs is ended, and within which a busy machine begins a process.
TIMEOUT = 6.0 if SOAK > 1 else 3.0
SERVER = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    with open(job["fields"]["txt"]) as file:
        text = file.read()
    print("server", os.getpid(), file=sys.stderr)
    if text == "die":
        os._exit(3)
    if text == "hang":
        time.sleep(60)
    if text == "nonsense":
        print("what?", flush=True)
        continue
    if text == "refuse":
        print(json.dumps({"error": "no, thanks"}), flush=True)
        continue
    with open(os.path.join(job["dir"], "sample.out"), "w") as file:
        file.write(f"{job['key']} {job['index']} {sorted(job['fields'])} {os.getpid()}")
    print("{}", flush=True)
"""

FUNCTIONS = """
import os, time
def upper(sample):
    print("words")
    return {**sample, "txt": sample["txt"].upper(), "cls": 7}
def several(sample):
    return [{"__key__": sample["__key__"] + f"-{i}", "txt": f"{i}"} for i in range(2)]
def odd(sample):
    text = sample["txt"].decode()
    if text == "die":
        os._exit(3)
    if text == "hang":
        time.sleep(60)
    if text == "raise":
        raise KeyError("oh")
    return {"none": None, "number": 3, "twice": [sample, sample], "dots": {"__key__": "a.b", "txt": "x"}}[text]
"""


def texts(*words: str) -> list[dict]:
    return [{"__key__": f"{i}", "__url__": "in.tar", "txt": word} for i, word in enumerate(words)]


def failures(work: list[dict], **options) -> tuple[list[str], list[str]]:
    """The keys that came through, and the reasons of those that did not."""
    reasons: list[str] = []
    found = map_command(
        work, on_error=lambda sample, error: reasons.append(f"{sample['__key__']}: {error.reason}"), **options
    )
    return [sample["__key__"] for sample in found], reasons


@pytest.fixture
def server(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    return f"exec {sys.executable} {tmp_path}/server.py"


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return "functions"


def test_a_server_answers_sample_after_sample(server):
    work = [{**sample, "cls": 1} for sample in texts(*"abcdef")]
    found = list(map_command(work, server=server, slots=2))
    assert [sample["out"].decode().rsplit(" ", 1)[0] for sample in found] == [
        f"{i} {i} ['cls', 'txt']" for i in range(6)
    ]
    assert len({sample["out"].split()[-1] for sample in found}) <= 2


def test_a_server_that_dies_or_refuses_fails_its_sample_only(server):
    keys, reasons = failures(texts("a", "die", "b", "refuse", "c", "nonsense", "d"), server=server)
    assert keys == ["0", "2", "4", "6"]
    assert reasons == [
        "1: the server ended with status 3",
        "3: the server says: no, thanks",
        r"5: the server answered b'what?\n', which is not a JSON object",
    ]


@pytest.mark.soak
def test_a_server_that_hangs_is_replaced(server):
    keys, reasons = failures(texts("a", "hang", "b"), server=server, timeout=TIMEOUT)
    assert keys == ["0", "2"]
    assert reasons == [f"1: the server ran for more than {TIMEOUT:g} s"]


def test_a_server_that_does_not_start():
    assert failures(texts("a", "b"), server="exit 5") == ([], [f"{i}: the server ended with status 5" for i in "01"])


def test_a_server_that_died_may_be_asked_again(server):
    keys, _ = failures(texts("a", "die", "b"), server=server, retries=1)
    assert keys == ["0", "2"]


def test_servers_end_with_the_run(tmp_path):
    command = f"while read -r line; do echo '{{}}'; done; echo bye >{tmp_path}/bye"
    assert len(list(map_command(texts("a", "b"), server=command))) == 2
    assert (tmp_path / "bye").read_text() == "bye\n", "a server sees the end of its input and may finish"


def test_functions(functions, capfd):
    found = list(map_command(texts("a", "b"), python=f"{functions}:upper", slots=2))
    assert found == [
        {"__key__": f"{i}", "__url__": "in.tar", "txt": t, "cls": b"7"} for i, t in enumerate([b"A", b"B"])
    ]
    assert capfd.readouterr() == ("", "words\nwords\n")


def test_functions_make_several_samples_or_none(functions):
    found = list(map_command(texts("a", "b"), python=f"{functions}:several"))
    assert [sample["__key__"] for sample in found] == ["0-0", "0-1", "1-0", "1-1"]
    assert list(map_command(texts("none"), python=f"{functions}:odd")) == []


@pytest.mark.soak
def test_functions_that_fail_name_their_sample(functions):
    work = texts("die", "none", "raise", "number", "twice", "dots", "hang")
    keys, reasons = failures(work, python=f"{functions}:odd", timeout=TIMEOUT)
    assert keys == []
    assert reasons == [
        "0: the function's process ended with status 3",
        "2: KeyError: 'oh'",
        "3: TypeError: the function returned int, not a dict, a list of dicts or None",
        "4: SampleError: 4: the function returned this key twice",
        "5: SampleError: a.b.txt: the name 'a.b.txt' would read back as key 'a', field 'b.txt'",
        f"6: the function ran for more than {TIMEOUT:g} s",
    ]


@pytest.mark.parametrize("name", ["nomodule:f", "functions:nothing", "functions:FUNCTIONS.x", "functions:os"])
def test_functions_that_are_none(functions, name):
    with pytest.raises(OpError, match=name):
        list(map_command(texts("a"), python=name))


def test_large_samples_pass(functions):
    work = [{"__key__": "a", "txt": os.urandom(5_000_000).hex()}]
    (found,) = map_command(work, python=f"{functions}:upper")
    assert found["txt"] == work[0]["txt"].upper().encode()


CRASHES = """
import multiprocessing, os, signal, subprocess, sys, time
def busy(sample):
    if sample["txt"] == b"hang":
        10 ** 1_000_000_000  # in C code, and in no system call
    return sample
def dies_twice(sample):
    with open(sample["__key__"], "a+") as file:
        file.write("x")
        tries = file.tell()
    if tries == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if tries == 2:
        raise ValueError("not yet")
    return {"txt": str(tries)}
def forks(sample):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
    os._exit(4)
def reads(sample):
    return {"input.txt": sys.stdin.read(), "child": subprocess.run("cat", capture_output=True).stdout}
def exits(sample):
    sys.exit(5)
"""


@pytest.fixture
def crashes(tmp_path, monkeypatch):
    (tmp_path / "crashes.py").write_text(CRASHES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.soak
def test_a_timeout_ends_a_function_in_c_code(crashes):
    keys, reasons = failures(texts("a", "hang", "b"), python="crashes:busy", timeout=1)
    assert keys == ["0", "2"]
    assert reasons == ["1: the function ran for more than 1 s"]


@pytest.mark.parametrize(("retries", "passes"), [(1, False), (2, True)])
def test_a_function_that_kills_its_process_is_tried_again(crashes, tmp_path, retries, passes):
    keys, reasons = failures(texts(*"abc"), python="crashes:dies_twice", retries=retries, slots=2)
    assert (keys, reasons) == (
        (["0", "1", "2"], []) if passes else ([], [f"{i}: ValueError: not yet" for i in range(3)])
    )
    assert [(tmp_path / key).read_text() for key in "012"] == ["x" * (retries + 1)] * 3


def test_a_function_that_leaves_a_fork_fails_at_once(crashes, tmp_path):
    keys, reasons = failures(texts("a", "b"), python="crashes:forks", tmpdir=str(tmp_path))
    assert (keys, reasons) == ([], [f"{i}: the function's process ended with status 4" for i in "01"])
    wait_until(lambda: processes_with(str(tmp_path)) == [])


def test_a_function_and_its_children_have_no_input(crashes):
    found = list(map_command(texts("a", "b"), python="crashes:reads"))
    assert [(sample["input.txt"], sample["child"]) for sample in found] == [(b"", b"")] * 2


def test_a_function_that_exits_fails_its_sample(crashes):
    assert failures(texts("a"), python="crashes:exits") == ([], ["0: the function's process ended with status 5"])


def test_a_function_is_called_in_the_process_of_its_slot(tmp_path, monkeypatch):
    pids = "{'pid.txt': str(os.getpid()), 'ppid.txt': str(os.getppid())}"
    (tmp_path / "place.py").write_text(f"import os\ndef of(sample): return {pids}")
    monkeypatch.chdir(tmp_path)
    found = list(map_command(texts(*"abcdef"), python="place:of", slots=2))
    assert {sample["ppid.txt"] for sample in found} == {b"%d" % os.getpid()}
    assert len({sample["pid.txt"] for sample in found}) <= 2
