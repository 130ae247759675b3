"""Fixtures for all tests: small shards, tools run by this Python, and the report on skipped tests."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import count, islice
from multiprocessing import resource_tracker, spawn
from pathlib import Path
from typing import Any

import fork_server
import pytest
from hypothesis import HealthCheck, settings
from programs import COMPILER, PACKAGES, TUN, is_installed, need
from soak import SOAK

from tarshards import ShardWriter, TarWriter
from tarshards.index.build import build_index

# What is all torch's; the stand-ins of with_torch.py skip single tests.
collect_ignore_glob = [
    "*compat/*",
    "*test_demo.py",
    "*test_guides.py",
    "*test_notebooks.py",
    "*test_tensors.py",
    "*test_torch_*.py",
]
if find_spec("torch"):
    collect_ignore_glob = []

# Workers of pytest share the cores; threads of theirs that wait for each other would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ |= {"RAY_worker_niceness": "0"}  # else 15, and beside other tests its workers hardly run

# The servers of tests are on this machine.
os.environ["no_proxy"] = "*"

# No test outlives a power loss, and a disk takes milliseconds to flush a file.
os.fsync = lambda descriptor: None

# It takes as long to make a folder; tests' are in memory where it is large enough, but not in `make soak`.
MEMORY = "/dev/shm"
if SOAK == 1 and "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    tempfile.tempdir = os.environ["TMPDIR"] = MEMORY

# Threads of tests come and go; with a part of the heap for each, what they leave in it is never freed, 150 MB in all.
ONE_ARENA = -8, 1  # M_ARENA_MAX in malloc.h
getattr(ctypes.CDLL(None), "mallopt", max)(*ONE_ARENA)

# A busy machine is no failure.
settings.register_profile("tarshards", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tarshards")


def pytest_ignore_collect(collection_path, config):
    """Import neither helpers, which have no doctests, nor modules whose tests are not selected: interop, or docs.

    What they import takes seconds, in each process of a run.
    """
    if collection_path.suffix != ".py":
        return None
    if not collection_path.name.startswith("test_"):
        return True
    line = re.search(r"^pytestmark = .*", collection_path.read_text(), re.MULTILINE)
    marks = set(re.findall(r"mark\.(\w+)", line[0])) if line else set()
    chosen = config.option.markexpr
    if chosen.startswith("docs"):
        return None if "docs" in marks else True
    left_out = re.search(r"not \(?interop( or docs)?", chosen)
    is_interop, is_docs = "interop" in marks and "soak" not in marks, "docs" in marks
    return True if left_out and (is_interop or (left_out[1] and is_docs)) else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for no doctests in tests, which takes a tenth of a second in each process."""
    return [found for found in (yield) if type(found) is pytest.Module]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector away from modules and tests: each of its passes takes a second to walk over them.

    Let it pass less often over what tests make, too, which saves 3 to 4% of their time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()
        if ALONE not in os.environ:
            fork_server.collapse()


def pytest_collection_modifyitems(items):
    """Give every property test a sixth of its examples, but at least 12; or in `make soak` SOAK times as many."""
    for test in {getattr(item, "obj", None) for item in items}:
        if (ours := getattr(test, "_hypothesis_internal_use_settings", None)) is not None:
            count = SOAK * ours.max_examples if SOAK > 1 else max(12, ours.max_examples // 6)
            test._hypothesis_internal_use_settings = settings(ours, max_examples=count)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that forks in a separate process: a fork of this one may wait for a lock that a thread held."""
    forks = pyfuncitem.get_closest_marker("forks") or "kill_at" in pyfuncitem.fixturenames
    if not forks or ALONE in os.environ:
        return None
    fixture = pyfuncitem._request.getfixturevalue
    folder = fixture("tmp_path_factory").mktemp("alone")
    command = [fixture("python_with_torch"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "_hypothesis_pytestplugin"]  # and none of the other plugins, which take longer than most tests
    imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # hypothesis, before the fork
    done = subprocess.run(
        [*command, "-W", imported, f"--basetemp={folder}", pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, ALONE: str(fixture("forks")), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True


def fail_skipped(report: Any, item: pytest.Item | pytest.Collector) -> None:
    """In CI, turn a skip into a failure with its reason; only things that no package provides may be missing there."""
    is_there = not item.get_closest_marker("gpu") and not (report.skipped and TUN in str(report.longrepr))
    if report.skipped and os.environ.get("CI") == "true" and is_there:
        report.outcome, report.longrepr = "failed", f"{item.nodeid}: skipped in CI: {report.longrepr[2]}"


@pytest.fixture(autouse=True)
def _no_idle_connections():
    """Close connections kept alive to a test's servers, whose threads would wait for them."""
    yield
    if servers := sys.modules.get("tarshards.storage.servers"):
        servers.close_connections()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    fail_skipped(report, item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    fail_skipped(report, collector)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Report in the last line how many tests were skipped, for which missing programs, and how to install these."""
    yield
    missing: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        if found := re.search(r"\bneeds (.*)", report.longrepr[2]):
            missing.update(found[1].split(", "))
    parts = [
        ", ".join(f"{name} ({count})" for name, count in sorted(missing.items()) if (name in PACKAGES) == program)
        for program in (True, False)
    ]
    if parts[0]:
        parts[0] += ": `make programs` installs programs with apt"
    if any(parts):
        terminalreporter.write_line(f"Tests were skipped that need {'; and '.join(filter(None, parts))}.", yellow=True)


# In a background job SIGINT is ignored, and by nohup SIGHUP; the tools that tests interrupt would inherit that.
for number, handler in (signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

BIN = Path(__file__).parents[1] / "bin"
KILLED = 9
ALONE = "TARSHARDS_TEST_ALONE"  # a variable of the process of one test: the folder of the fork servers
FORKS = pytest.StashKey[Path]()  # the folder of the fork servers that the processes of a run share


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Let the processes of a run share fork servers, which take seconds to start."""
    if FORKS not in node.config.stash:
        folder = node.config.stash[FORKS] = fork_server.make_shared_folder()
        node.config.add_cleanup(partial(shutil.rmtree, folder))
    node.workerinput["forks"] = str(node.config.stash[FORKS])


FORKED: list[int] = []  # the forks since this process's memory was moved to huge pages
os.register_at_fork(after_in_parent=lambda: FORKED.append(1))


@pytest.fixture(scope="module", autouse=True)
def _trimmed():
    """Keep forks cheap, which copy the entry of each page: return what a module's tests have freed, 500 MB in some.

    What is written while a fork lives is split from its huge page, so after some forks move memory to such pages again.
    """
    yield
    getattr(ctypes.CDLL(None), "malloc_trim", id)(0)
    if len(FORKED) >= 20 and ALONE not in os.environ:
        FORKED.clear()
        fork_server.collapse()


@pytest.fixture(autouse=True)
def _brief_joins():
    """Let DataLoaders whose loops were left give their workers half a second to end, not five: most need the signal."""
    if utils := sys.modules.get("torch.utils.data._utils"):
        utils.MP_STATUS_CHECK_INTERVAL = 0.5


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a disk, which tmp_path may not be."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def memory():
    """fsspec's store memory://, empty before and after."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


@pytest.fixture
def squirrel(monkeypatch):
    """Squirrel's package, which `make test-interop` installs in a separate folder."""
    monkeypatch.syspath_prepend(Path(sys.prefix, "squirrel"))
    pytest.importorskip("squirrel", reason="squirrel-core is not installed")


@pytest.fixture
def daft(monkeypatch):
    """Daft's package, which `make test-interop` installs in a separate folder, for programs with our path."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(sys.prefix, "daft"))])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture(scope="session")
def s3_server():
    from object_store import serving

    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with serving() as server:
        yield server


@pytest.fixture
def s3(s3_server, monkeypatch):
    """moto's S3 with one bucket, `s3://bucket`, empty; fsspec's own configuration names it."""
    import fsspec

    monkeypatch.setitem(fsspec.config.conf, "s3", s3_server.options)
    for name, value in s3_server.options.items():  # for new processes
        monkeypatch.setenv(f"FSSPEC_S3_{name.upper()}", value)
    s3_server.reset()
    yield s3_server
    s3_server.look = None


@pytest.fixture
def make_shards(tmp_path):
    """Return a function that writes *shards* shards of *samples* samples each, and returns their expression."""

    def make(shards: int, samples: int = 3, name: str = "set", *, index: bool = False) -> str:
        with ShardWriter(str(tmp_path / f"{name}-%04d.tar"), max_samples=samples, index=index) as writer:
            for i in range(shards * samples):
                writer.write({"__key__": f"{i:06d}", "cls": i, "txt": f"text {i}"})
        return str(tmp_path / f"{name}-{{0000..{shards - 1:04d}}}.tar")

    return make


@pytest.fixture
def make_uneven(tmp_path):
    """Return a function that writes a shard of each of *sizes* samples, with indexes, and returns their expression."""

    def make(sizes: list[int], name: str = "set") -> str:
        numbers = count()
        for shard, size in enumerate(sizes):
            url = str(tmp_path / f"{name}-{shard:04d}.tar")
            with TarWriter(url) as writer:
                for i in islice(numbers, size):
                    writer.write({"__key__": f"{i:06d}", "cls": i, "txt": f"text {i}"})
            build_index(url).save(url)
        return str(tmp_path / f"{name}-{{0000..{len(sizes) - 1:04d}}}.tar")

    return make


@pytest.fixture(params=[pytest.param("fork", marks=pytest.mark.forks), "spawn", "forkserver"])
def start_method(request):
    """Begin processes in each way: by fork as Python 3.11 to 3.13 does on Linux, by forkserver as 3.14 does."""
    if request.param != "fork":
        request.getfixturevalue("quick_spawn")
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(scope="session")
def path_with_started_tools(tmp_path_factory) -> str:
    """A PATH on which the tools of this tree come first, run by this interpreter, and it, as ``python3``."""
    folder = tmp_path_factory.mktemp("bin")
    for name, program in [("python3", ""), *((tool.name, tool) for tool in BIN.iterdir())]:
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture(scope="session")
def chromium():
    """The one browser of a process: Playwright can be started once in it."""
    need("chromium")
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    from rigs import browser

    with browser.chromium() as each:
        yield each


@pytest.fixture(scope="session")
def forks(pytestconfig) -> Iterator[Path]:
    """The folder of the fork servers."""
    worker = getattr(pytestconfig, "workerinput", {})
    if shared := os.environ.get(ALONE) or worker.get("forks"):
        yield Path(shared)
        return
    folder = fork_server.make_shared_folder()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def path_with_tools(forks, path_with_started_tools) -> str:
    """The same, of tools that start in milliseconds, where a compiler is found; see fork_server.py."""
    if not is_installed(COMPILER):
        return path_with_started_tools
    folder = fork_server.share(forks, "tools", [tool.name for tool in BIN.iterdir()], BIN)
    return f"{folder}:{path_with_started_tools}"


@pytest.fixture(scope="session")
def python_with_torch(forks) -> str:
    """A Python that has imported torch when it starts, where a compiler is found; see fork_server.py."""
    if not is_installed(COMPILER) or find_spec("torch") is None:
        return sys.executable
    return str(fork_server.share(forks, "python", [fork_server.PYTHON]) / fork_server.PYTHON)


@pytest.fixture
def quick_spawn(python_with_torch) -> Iterator[None]:
    """Let processes be spawned, and a forkserver begin, by that Python."""
    resource_tracker.ensure_running()  # by another, for it outlives us
    before = spawn.get_executable()
    multiprocessing.set_executable(python_with_torch)
    yield
    multiprocessing.set_executable(before)


@pytest.fixture
def interrupt(tmp_path, path_with_tools):
    """Return a function that interrupts a tool which waits for bytes of never.tar, and sees that it leaves nothing."""

    def run(line: str, number: signal.Signals) -> None:
        os.mkfifo(tmp_path / "never.tar")
        before = sorted(path.name for path in tmp_path.iterdir())
        command = ["bash", "-c", f"exec {line}"]
        environment = {**os.environ, "PATH": path_with_tools}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        writer = os.open(tmp_path / "never.tar", os.O_WRONLY)  # returns when the tool waits for our bytes
        time.sleep(0.3)  # so that it has done what it does before it waits
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        os.close(writer)
        assert process.returncode == 128 + number, errors
        assert "Traceback" not in errors
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    return run


@pytest.fixture
def kill_at():
    """Return a function that calls another in a process, which dies before or after its change *step* of a name.

    It returns 0 where the call ended before that, and raises where it failed.
    """

    def run(function: Callable[[], object], step: int, place: str) -> int:
        child = os.fork()
        if child:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (0, KILLED)
            return status
        left = step

        def dying(change):
            def call(*arguments, **options):
                nonlocal left
                if left == 0 and place == "before":
                    os._exit(KILLED)
                result = change(*arguments, **options)
                if left == 0:
                    os._exit(KILLED)
                left -= 1
                return result

            return call

        try:
            os.replace, os.unlink = dying(os.replace), dying(os.unlink)
            function()
            os._exit(0)
        finally:
            os._exit(1)

    return run
