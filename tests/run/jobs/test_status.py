"""What a person sees of a job."""

from __future__ import annotations

import re
import sys
import time

from tarshards.run.jobs.job_plan import make_plan
from tarshards.run.jobs.status import IN_LOG, Display, Status, table

PLAN = make_plan(["cat", "{}"], ["{00..99}"], state="state", name="job")
FAILED = {7: {"status": 42, "line": "never"}, 3: {"status": 1, "line": "bad luck"}}


def test_the_table_has_counts_and_failures():
    status = Status(100, done=set(range(10, 60)), failed=FAILED, running=8, ended=False)
    text = table(PLAN, status)
    assert text.splitlines() == [
        *("job      job", "items    100", "done     50", "running  8", "failed   2", "waiting  40"),
        *("  3 03: status 1: bad luck", "  7 07: permanent: never"),
    ]


def test_what_was_not_run_is_said():
    assert "not run  98" in table(PLAN, Status(100, failed=FAILED))


def test_many_failures_are_some_and_a_number():
    failed = {number: {"status": 1, "line": "x"} for number in range(50)}
    lines = table(PLAN, Status(100, failed=failed)).splitlines()
    assert lines[-1] == "  and 30 more"
    assert len(lines) == 6 + 20 + 1


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    with Display(PLAN, Status(100)) as display:
        display.update(Status(100, done={1}))
    assert capsys.readouterr().err == "", "30 seconds have not passed"
    monkeypatch.setitem(IN_LOG, "mininterval", 0)
    with Display(PLAN, Status(100)) as display:
        time.sleep(0.01)
        display.update(Status(100, done={1}, failed=dict(list(FAILED.items())[:1]), running=3))
        display.update(Status(100, done={1, 2}, failed=FAILED))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert re.fullmatch(r"1/100 done \[00:0\d<\d\d:\d\d, .* items/s, 3 running, 1 failed\]", lines[0])
    assert lines[1] == "  7 07: permanent: never"
    assert lines[2].startswith("2/100 done [")
    assert lines[3] == "  3 03: status 1: bad luck"
    with Display(PLAN, Status(100), quiet=True) as display:
        display.update(Status(100, done={1}, failed=FAILED))
    assert capsys.readouterr().err == ""


def test_what_was_done_before_is_no_rate(capsys, monkeypatch):
    monkeypatch.setitem(IN_LOG, "mininterval", 0)
    with Display(PLAN, Status(100, done=set(range(90)))) as display:
        time.sleep(0.01)
        display.update(Status(100, done=set(range(90))))
    assert re.search(r"90/100 done \[00:0\d<\?, \? items/s, 0 running, 0 failed\]", capsys.readouterr().err)


def test_a_terminal_shows_failures_above_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Display(PLAN, Status(100)) as display:
        display.update(Status(100, done={1}, failed=FAILED))
    text = capsys.readouterr().err
    assert "| 0/100 [" in text
    shown = [line.rpartition("\r")[2] for line in text.split("\n")]
    assert shown[:2] == ["  3 03: status 1: bad luck", "  7 07: permanent: never"]
    assert shown[2] == "", "and the bar is gone in the end"
