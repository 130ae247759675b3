"""Commands, scripts, servers and functions mapped over samples, in Python."""

from __future__ import annotations

import random
import threading
import time

import pytest
from leftovers import processes_with, wait_until
from soak import SOAK

from tarshards.errors import OpError
from tarshards.run.samples.command import Halt, map_command


def samples(count: int) -> list[dict]:
    return [{"__key__": f"{i:04d}", "__url__": "in.tar", "txt": f"text {i}\n", "cls": i} for i in range(count)]


def mapped(count: int, command: str | None = None, **options) -> list[dict]:
    return list(map_command(samples(count), command, **options))


def test_true_changes_nothing_but_encodes():
    assert mapped(2, "true") == [
        {"__key__": f"000{i}", "__url__": "in.tar", "cls": b"%d" % i, "txt": b"text %d\n" % i} for i in range(2)
    ]


def test_what_remains_is_the_output():
    (sample,) = mapped(1, "tr a-z A-Z <sample.txt >sample.Upper.TXT; rm sample.cls; echo x >other.txt; touch sample")
    assert sample == {"__key__": "0000", "__url__": "in.tar", "txt": b"text 0\n", "upper.txt": b"TEXT 0\n"}


def test_suffixes_are_more_samples():
    found = mapped(
        2, "for i in b a; do echo $i >sample-$i.txt; done; touch sample-a.x.cls samplefoo.txt; rm sample.txt"
    )
    assert [(sample["__key__"], sorted(sample)[2:]) for sample in found[:3]] == [
        ("0000", ["cls"]),
        ("0000-a", ["txt", "x.cls"]),
        ("0000-b", ["txt"]),
    ]


def test_subdirectories_are_samples():
    found = mapped(1, "mkdir b a; echo 1 >b/sample.cls; cp sample.txt a; echo 2 >a/sample-x.cls", subdirs=True)
    assert [sample["__key__"] for sample in found] == ["0000-a", "0000-a-x", "0000-b"]
    assert found[0]["txt"] == b"text 0\n"


def test_nothing_left_is_no_sample():
    found = mapped(4, 'if [ "$TAR_INDEX" = 2 ]; then rm sample.*; fi')
    assert [sample["__key__"] for sample in found] == ["0000", "0001", "0003"]


def test_the_environment():
    found = mapped(6, 'echo -n "$TAR_KEY $TAR_INDEX $TAR_SHARD" >sample.txt; echo -n $TAR_SLOT >sample.cls', slots=2)
    assert [sample["txt"].decode() for sample in found] == [f"{i:04d} {i} in.tar" for i in range(6)]
    assert {sample["cls"] for sample in found} <= {b"1", b"2"}


def test_keys_never_become_paths():
    odd = [{"__key__": key, "txt": "x"} for key in ("../../up", "/root/a", "a/b", "$(touch x)", "ü ö", "-rf")]
    found = list(map_command(odd, 'printf %s "$TAR_KEY" >sample.key; ls -A >sample.ls'))
    assert [sample["__key__"] for sample in found] == [sample["__key__"] for sample in odd]
    assert [sample["key"].decode() for sample in found] == [sample["__key__"] for sample in odd]
    assert {sample["ls"] for sample in found} == {b"sample.key\nsample.ls\nsample.txt\n"}


def test_fields_may_hold_odd_characters(tmp_path):
    fields = {"$(touch x)": b"1", "a b\n": b"2", "..": b"3", "ü;*?'\"": b"4", "": b"5"}
    (found,) = map_command([{"__key__": "a", **fields}], "true", tmpdir=str(tmp_path))
    assert {name: value for name, value in found.items() if name != "__key__"} == fields


@pytest.mark.parametrize("field", ["/../../../escaped", "a/b", "../x", "a\0b", "x" * 300])
def test_fields_never_leave_the_scratch_directory(tmp_path, field):
    with pytest.raises(OpError, match=r"a: .*(part of a file name|scratch directory)"):
        list(map_command([{"__key__": "a", field: b"x"}], "true", tmpdir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        "ln -s /etc/passwd sample.png",
        "ln -sf sample.cls sample.txt",
        "mkdir sample.dir",
        "mkfifo sample.fifo",
        "ln -s / sample-a.x",
        "echo >sample.TXT",
        "echo >sample-__x__.y__; mkdir sample.y",
        'cd ..; rm -r "$OLDPWD"',
    ],
)
def test_what_is_no_regular_file_is_refused(tmp_path, command):
    with pytest.raises(OpError, match=r"in.tar: 0000: .*(not a regular file|two files|scratch directory)"):
        mapped(1, command, tmpdir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_read_only_directories_are_removed_too(tmp_path):
    assert len(mapped(2, "mkdir -p a/b; touch a/b/c; chmod 0 a/b a; ln -s /etc b", tmpdir=str(tmp_path))) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_order_is_kept_under_random_sleeps():
    rng = random.Random(0)
    work = [{"__key__": f"{i:04d}", "nap": b"%.4f" % (rng.random() * 0.02)} for i in range(300 if SOAK > 1 else 40)]
    found = list(map_command(work, "sleep $(cat sample.nap)", slots=4))
    assert [sample["__key__"] for sample in found] == [sample["__key__"] for sample in work]


def test_unordered_gives_each_once_and_the_quick_first():
    work = [{"__key__": f"{i}", "nap": b"0.5" if i == 0 else b"0"} for i in range(12)]
    found = [sample["__key__"] for sample in map_command(work, "sleep $(cat sample.nap)", slots=2, ordered=False)]
    assert sorted(found, key=int) == [str(i) for i in range(12)]
    assert found[0] != "0"


def test_look_ahead_is_bounded(tmp_path):
    taken = []

    def source():
        for sample in samples(40):
            taken.append(sample["__key__"])
            yield sample

    nap = "test $TAR_INDEX != 0 && sleep 0.03 || sleep 0.6"
    command = f'{nap}; ls "{tmp_path}"/tarproc-* | grep -c "^[0-9]" >sample.scratch'
    found = map_command(source(), command, slots=2, tmpdir=str(tmp_path))
    first = next(found)
    assert len(taken) <= 9
    rest = list(found)
    assert max(int(sample["scratch"]) for sample in [first, *rest]) <= 2


def test_breaking_off_kills_and_removes(tmp_path):
    begun = time.monotonic()
    found = map_command(samples(50), "test $TAR_INDEX = 0 || sleep 200", slots=2, ordered=False, tmpdir=str(tmp_path))
    found.close()
    assert list(tmp_path.iterdir()) == []
    found = map_command(samples(8), "case $TAR_INDEX in [0-3]) ;; *) sleep 200;; esac", slots=1, tmpdir=str(tmp_path))
    assert next(found)["__key__"] == "0000"
    found.close()
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - begun < 60
    assert not [thread for thread in threading.enumerate() if thread.name == "tarshards-slot"]


def test_an_error_of_the_input_is_raised(tmp_path):
    def source():
        yield from samples(3)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(map_command(source(), "true", tmpdir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_the_first_failure_is_raised():
    with pytest.raises(OpError, match=r"^in.tar: 0002: the command ended with status 3$"):
        mapped(50, "test $TAR_INDEX != 2 || exit 3", slots=2)
    with pytest.raises(OpError, match=r"in.tar: 0000: the command was killed by signal 9$"):
        mapped(1, "kill -9 $$")
    with pytest.raises(OpError, match=r"ended with status 127$"):
        mapped(1, "no-such-command 2>/dev/null")


@pytest.mark.parametrize("keep", [False, True])
def test_on_error_takes_failures_in_their_turn(keep):
    failed = []
    command = "echo >sample.new; test $((TAR_INDEX % 3)) != 1"
    options = {"on_error": lambda sample, error: failed.append((sample["__key__"], str(error))), "keep_failed": keep}
    found = mapped(6, command, slots=2, **options)
    assert failed == [(key, f"in.tar: {key}: the command ended with status 1") for key in ("0001", "0004")]
    assert [(s["__key__"], "new" in s) for s in found if keep or s] == [
        (f"{i:04d}", i not in (1, 4)) for i in range(6) if keep or i not in (1, 4)
    ]


@pytest.mark.parametrize(("retries", "passes"), [(0, False), (1, False), (2, True)])
def test_retries(tmp_path, retries, passes):
    tries = f'"{tmp_path}/$TAR_KEY"'
    command = f"echo x >>{tries}; ls -A | grep -c ^junk >sample.junk; touch junk; test $(wc -l <{tries}) -ge 3"
    failed = []
    found = mapped(2, command, retries=retries, on_error=lambda *_: failed.append(1))
    assert (len(found), len(failed)) == ((2, 0) if passes else (0, 2))
    assert len((tmp_path / "0000").read_text().split()) == retries + 1
    assert {sample["junk"] for sample in found} <= {b"0\n"}, "every try begins in a fresh directory"


def test_a_timeout_kills_grandchildren(tmp_path):
    late = tmp_path / "late"
    with pytest.raises(OpError, match=r"the command ran for more than 0.2 s"):
        mapped(1, f"(sleep 100; touch {late}) & sleep 200", timeout=0.2)
    begun = time.monotonic()
    with pytest.raises(OpError, match=r"the command ran for more than 1 s"):
        mapped(1, f"trap '' TERM; (sleep 100; touch {late}) & sleep 200", timeout=1)
    assert 2.9 < time.monotonic() - begun < 60, "SIGKILL comes 2 s after a SIGTERM that is ignored"
    wait_until(lambda: processes_with(str(late)) == [])
    assert not late.exists()


def test_what_a_command_leaves_running_ends_with_it(tmp_path):
    begun = time.monotonic()
    mapped(3, "sleep 200 & echo")
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("text", ["now,fail=0", "later,fail=1", "now", "soon,fail=x%", "now,success=1", ""])
def test_wrong_halting_rules(text):
    with pytest.raises(ValueError, match="not a halting rule"):
        Halt.parse(text)


@pytest.mark.parametrize("when", ["now", "soon"])
def test_halting(tmp_path, when):
    nap = {"now": 100, "soon": 1}[when]
    first = f"touch {tmp_path}/begun; sleep {nap}; touch {tmp_path}/finished"
    failing = f"until test -e {tmp_path}/begun; do sleep 0.1; done; exit 1"
    command = f"case $TAR_INDEX in 0) {first};; 1|2) {failing};; esac"
    failed = []
    halt = Halt.parse(f"{when},fail=2")
    begun = time.monotonic()
    with pytest.raises(OpError, match="halted because 2 samples have failed"):
        mapped(40, command, slots=3, halt=halt, on_error=lambda *_: failed.append(1))
    assert halt.failed == 2
    assert (tmp_path / "finished").exists() == (when == "soon")
    assert (time.monotonic() - begun > nap) == (when == "soon")


def test_halting_by_percentage():
    halt = Halt.parse("soon,fail=50%")
    with pytest.raises(OpError, match="halted because 4 samples"):
        mapped(40, "test $TAR_INDEX -lt 4", halt=halt, on_error=lambda *_: None)
    assert (halt.finished, halt.failed) == (8, 4)
    assert len(mapped(6, "test $TAR_INDEX -gt 1", halt=Halt.parse("now,fail=1%"), on_error=lambda *_: None)) == 4


def test_the_log_is_a_field():
    (sample,) = mapped(1, "echo out; echo err >&2; rm sample.*", add_log="log")
    assert sample == {"__key__": "0000", "__url__": "in.tar", "log": b"out\nerr\n"}
    with pytest.raises(OpError, match="which the log would replace"):
        mapped(1, "echo", add_log="txt")


def test_scripts(tmp_path):
    script = tmp_path / "script"
    script.write_text("tr a-z A-Z <sample.txt >sample.up\n")
    assert mapped(1, script=str(script))[0]["up"] == b"TEXT 0\n"
    script.write_text("#!/usr/bin/env python3\nopen('sample.py', 'w').write('python')\n")
    script.chmod(0o755)
    assert mapped(1, script=str(script))[0]["py"] == b"python"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"command": "true", "server": "true"},
        {"python": "noname"},
        {"server": "x", "add_log": "log"},
        {"command": "true", "slots": 0},
        {"command": "true", "timeout": 0},
    ],
)
def test_wrong_options(options):
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own words
        map_command([], **options)
