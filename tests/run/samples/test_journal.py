"""The state that a run resumes from, and the log."""

from __future__ import annotations

import sys

import pytest
from failing_close import fail_to_close
from soak import SOAK

from tarshards.errors import OpenError, OpError
from tarshards.run.samples.command import map_command
from tarshards.run.samples.journal import COLUMNS, Journal, SampleResult

OUTPUTS = [{"__key__": "a-ü", "__url__": "x", "txt": b"1\n\n", "b": b""}, {"__key__": "b", "bin": bytes(range(256))}]


def test_a_journal_that_could_not_be_closed_is_named(tmp_path, monkeypatch):
    journal = Journal(path := str(tmp_path / "journal"))
    fail_to_close(monkeypatch, path)
    with pytest.raises(OpenError, match="journal: Disk quota exceeded"):
        journal.close()


def test_a_journal_gives_back_what_it_was_given(tmp_path):
    path = str(tmp_path / "state")
    journal = Journal(path)
    journal.add("one", SampleResult(OUTPUTS, None))
    journal.add("two", SampleResult([], "odd"))
    assert journal.find("one") is None, "a run does not read its own records"
    journal.close()
    again = Journal(path)
    assert again.find("one") == SampleResult(OUTPUTS, None)
    assert again.find("two") == SampleResult([], "odd")
    assert again.find("three") is None
    again.close()
    third = Journal(path, retry_failed=True)
    assert third.find("two") is None
    third.close()


def test_any_truncation_leaves_the_records_before_it(tmp_path):
    path = tmp_path / "state"
    ends = [0]
    for name in ("a", "b", "c"):
        journal = Journal(str(path))
        journal.add(name, SampleResult(OUTPUTS[1:], None))
        journal.close()
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        journal = Journal(str(path))
        whole = sum(end <= length for end in ends) - 1
        assert [journal.find(name) is not None for name in "abc"] == [i < whole for i in range(3)]
        journal.add("d", SampleResult(OUTPUTS, None))
        journal.close()
        journal = Journal(str(path))
        assert journal.find("d") == SampleResult(OUTPUTS, None)
        journal.close()


def test_a_flipped_bit_is_no_record(tmp_path):
    path = tmp_path / "state"
    journal = Journal(str(path))
    journal.add("a", SampleResult(OUTPUTS, None))
    journal.close()
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    journal = Journal(str(path))
    assert journal.find("a") is None
    journal.close()


def test_two_runs_do_not_share_a_state(tmp_path):
    journal = Journal(str(tmp_path / "state"))
    with pytest.raises(OpenError, match="another run is using this state"):
        Journal(str(tmp_path / "state"))
    journal.close()
    with pytest.raises(OpenError, match="No such file"):
        Journal(str(tmp_path / "no/state"))


@pytest.fixture
def counted(tmp_path):
    """Return a function that maps a command over samples and tells which it ran on."""
    runs = tmp_path / "runs"

    def mapped(samples: list[dict], command: str | None = "true", **options) -> list[str]:
        runs.write_text("")
        command = command and f'echo "$TAR_KEY" >>{runs}; {command}'
        options = {"on_error": lambda *_: None, **options}
        list(map_command(samples, command, state=str(tmp_path / "state"), **options))
        return sorted(runs.read_text().split())

    return mapped


def test_what_is_done_is_not_run_again_unless_it_is_something_else(counted, tmp_path):
    def samples(shard: str = "a.tar", text: str = "x") -> list[dict]:
        return [{"__key__": key, "__url__": shard, "txt": text} for key in ("k1", "k2")]

    assert counted(samples()) == ["k1", "k2"]
    assert counted(samples()) == []
    assert counted([*samples(), {"__key__": "k3", "__url__": "a.tar", "txt": "x"}]) == ["k3"]
    for other in (samples(shard="b.tar"), samples(text="y")):
        assert counted(other) == ["k1", "k2"]
    assert counted(samples(), "echo other >sample.x") == ["k1", "k2"]
    assert counted(samples(), add_log="log") == ["k1", "k2"]
    assert counted(samples()) == []
    script = tmp_path / "script"
    for line, ran in (("true", 2), ("true", 0), ("echo", 2)):
        script.write_text(f'echo "$TAR_KEY" >>{tmp_path}/runs; {line}\n')
        assert len(counted(samples(), None, script=str(script))) == ran


LINES = """
from pathlib import Path

def function(sample):  # the first
    with open("runs", "a") as file:
        print(sample["__key__"], file=file)
    return helper()

def helper():
    return {"txt": b"1"}
"""


def test_a_function_is_identified_by_the_code_of_its_module(counted, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    samples = [{"__key__": key, "__url__": "a.tar", "txt": b"x"} for key in ("k1", "k2")]
    (tmp_path / "package").mkdir()
    edits = (
        (LINES, 2),
        (LINES, 0),
        (LINES.replace("# the first", "# commented\n"), 0),
        (LINES.replace('b"1"', 'b"2"'), 2),
        (LINES, 0),
    )
    for text, ran in edits:
        (tmp_path / "package/steps.py").write_text(text)
        assert len(counted(samples, None, python="package.steps:function")) == ran
    assert {record.getMessage() for record in caplog.records} == {
        "results of 2 of 2 samples kept from an earlier run",
    }
    assert "package.steps" not in sys.modules


def test_a_journal_of_an_earlier_version_is_continued(counted, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    samples = [{"__key__": key, "__url__": "a.tar", "txt": b"x"} for key in ("k1", "k2")]
    (tmp_path / "steps.py").write_text(LINES)
    with monkeypatch.context() as patch:
        patch.setattr("tarshards.run.samples.runners.digest_module", lambda name: None)
        assert counted(samples[:1], None, python="steps:function") == ["k1"]
    assert counted(samples, None, python="steps:function") == ["k2"]
    told = "results of 1 of 2 samples kept from an earlier run, 1 by an earlier release, which did not record code"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_failures_stand_until_they_are_to_be_run_again(counted, tmp_path):
    samples = [{"__key__": f"k{i}", "__url__": "a.tar", "txt": "x"} for i in range(4)]
    command = f'test "$TAR_KEY" != k2 || test -e {tmp_path}/cured'
    assert counted(samples, command) == ["k0", "k1", "k2", "k3"]
    (tmp_path / "cured").touch()
    reasons: list[str] = []
    assert counted(samples, command, on_error=lambda sample, error: reasons.append(str(error))) == []
    assert reasons == ["a.tar: k2: the command ended with status 1 (in an earlier run)"]
    with pytest.raises(OpError, match=r"k2: .*earlier run"):
        counted(samples, command, on_error=None)
    assert counted(samples, command, retry_failed=True, on_error=None) == ["k2"]
    assert counted(samples, command, retry_failed=True, on_error=None) == []


@pytest.mark.soak
def test_the_joblog(tmp_path):
    timeout = 6 if SOAK > 1 else 3
    log = tmp_path / "log"
    samples = [{"__key__": key, "__url__": "a\tb.tar", "txt": b"four"} for key in ("ok", "three", "killed", "slow")]
    command = "case $TAR_KEY in\nthree) exit 3;;\tkilled) kill -9 $$;; slow) sleep 100;; ok) echo -n 1 >sample.a; esac"
    list(map_command(samples, command, joblog=str(log), timeout=timeout, on_error=lambda *_: None))
    head, *rows = [line.split("\t") for line in log.read_text().splitlines()]
    assert head == COLUMNS
    assert " ".join(head) == "Seq Host Starttime JobRuntime Send Receive Exitval Signal Command Shard Key"
    told = [dict(zip(head, row)) for row in rows]
    assert [(row["Seq"], row["Key"], row["Exitval"], row["Signal"]) for row in told] == [
        ("1", "ok", "0", "0"),
        ("2", "three", "3", "0"),
        ("3", "killed", "0", "9"),
        ("4", "slow", "-1", "15"),
    ]
    assert (told[0]["Send"], told[0]["Receive"], told[0]["Shard"]) == ("4", "5", r"a\tb.tar")
    assert told[0]["Command"] == command.replace("\n", r"\n").replace("\t", r"\t")
    assert timeout <= float(told[3]["JobRuntime"]) < 60
