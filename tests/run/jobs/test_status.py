"""What a person sees of a job."""

from __future__ import annotations

import sys

import pytest

from tarshards.run.jobs.job_plan import make_plan
from tarshards.run.jobs.status import Clock, Display, Status, one_line, table

PLAN = make_plan(["cat", "{}"], ["{00..99}"], state="state", name="job")
FAILED = {7: {"status": 42, "line": "never"}, 3: {"status": 1, "line": "bad luck"}}


def test_the_table_has_counts_rate_and_failures():
    status = Status(100, done=set(range(10, 60)), failed=FAILED, running=8, ended=False)
    text = table(PLAN, status)
    assert text.splitlines() == [
        *("job      job", "items    100", "done     50", "running  8", "failed   2", "waiting  40"),
        *("  3 03: status 1: bad luck", "  7 07: permanent: never"),
    ]
    assert "rate" in table(PLAN, status, Clock(0, now=0.0))


def test_what_was_not_run_is_said():
    assert "not run  98" in table(PLAN, Status(100, failed=FAILED))


def test_many_failures_are_some_and_a_number():
    failed = {number: {"status": 1, "line": "x"} for number in range(50)}
    lines = table(PLAN, Status(100, failed=failed)).splitlines()
    assert lines[-1] == "  and 30 more"
    assert len(lines) == 6 + 20 + 1


@pytest.mark.parametrize(
    ("done", "seconds", "line"),
    [
        (0, 10, ""),
        (10, 0, ""),
        (50, 10, "5/s, 0:00:10 left"),
        (1, 3600, "0.000278/s, 99:00:00 left"),
        (100, 1, "100/s, 0:00:00 left"),
    ],
)
def test_the_time_left(done, seconds, line):
    assert Clock(0, now=0.0).line(Status(100, done=set(range(done))), now=float(seconds)) == line


def test_what_was_done_before_is_no_rate():
    clock = Clock(90, now=0.0)
    assert clock.line(Status(100, done=set(range(95))), now=5.0) == "1/s, 0:00:05 left"
    assert one_line(Status(100, done=set(range(90))), clock) == "90/100 done, 0 running, 0 failed"


def test_a_log_gets_a_line_now_and_then(capsys):
    with Display(PLAN, Status(100), every=0) as display:
        display.update(Status(100, done={1}, failed=dict(list(FAILED.items())[:1])))
        display.update(Status(100, done={1, 2}, failed=FAILED))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "  7 07: permanent: never"
    assert lines[1].startswith("1/100 done, 0 running, 1 failed")
    assert lines[2] == "  3 03: status 1: bad luck"
    with Display(PLAN, Status(100)) as display:
        display.update(Status(100, done={1}))
    with Display(PLAN, Status(100), every=0, quiet=True) as display:
        display.update(Status(100, done={1}))
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_failures_above_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Display(PLAN, Status(100)) as display:
        display.update(Status(100, done={1}, failed=FAILED))
    text = capsys.readouterr().err
    assert text.startswith("\r\x1b[K  3 03: status 1: bad luck\n\r\x1b[K  7 07: permanent: never\n\r\x1b[K1/100 done")
    assert text.endswith("\r\x1b[K")
