"""A plugin of pytest that reports the CPU time of each item: ``make test TIMES=1``.

An item's time is that of its set-up, call and teardown, in all threads and in the processes that it waited for, with
those of the fork server (fork_server.py). What several tests share counts for the first one that asks for it.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest

FILE = "TARSHARDS_TEST_TIMES"  # a variable with the file to which the fork server appends
BUDGET = 0.3  # CPU seconds that an item may take in `make test`

spent: Counter[str] = Counter()  # by item
collections: list[float] = []  # CPU seconds of each process's collection
before = 0.0


def seconds() -> float:
    """Return the CPU time of this process and of those that it waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        os.environ[FILE] = tempfile.mkstemp(prefix="times-")[1]


def pytest_collection_finish(session):
    global before
    before = seconds()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["collection"] = before
    elif session.items:
        collections.append(before)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    collections.append(node.workeroutput["collection"])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    global before
    report = yield
    report.cpu, before = seconds() - before, seconds()
    return report


def pytest_runtest_logreport(report):
    spent[report.nodeid] += report.cpu


def add_forks(file: Path) -> None:
    """Add what the fork server appended: a line for each of its processes, with the item and its seconds."""
    for line in file.read_text(errors="replace").splitlines():
        item, _, taken = line.rpartition("\t")
        spent[item if item in spent else "other forks"] += float(taken)
    file.unlink()


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput"):
        return
    add_forks(Path(os.environ[FILE]))
    terminalreporter.section("CPU seconds")
    dear = [(taken, name) for name, taken in spent.most_common() if taken > BUDGET]
    for taken, name in dear:
        terminalreporter.write_line(f"{taken:.2f} {name}")
    terminalreporter.write_line(
        f"{len(spent)} items take {sum(spent.values()):.0f} s, {len(dear)} of them more than {BUDGET} s:"
        f" {sum(taken for taken, _ in dear):.0f} s; collection in each process: {max(collections, default=0):.1f} s"
    )
