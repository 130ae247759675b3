"""Process pools, groups of child processes, and values that each process makes for itself."""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Lock, Thread, Timer

import pytest
from forked import in_child
from interrupts import interrupted_at
from leftovers import wait_until
from soak import SOAK

from tarshards.errors import OpenError, OpError, RemoteTraceback
from tarshards.parallel import process_pool
from tarshards.parallel.calls import DaemonThreads, bounded_map, settled_map, shared_map
from tarshards.parallel.children import ChildGroup
from tarshards.parallel.forks import PerProcess
from tarshards.parallel.process_pool import ProcessPool


def act(what: int | str) -> int:
    if what == "exit":
        os._exit(7)
    if what == "segfault":
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "raise":
        raise ValueError("six")
    if what == "lambda":
        return lambda: None  # type: ignore[return-value]
    if what == "sleep":
        time.sleep(100)
    return os.getpid()


@pytest.mark.usefixtures("start_method")
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("exit", OpError, "its process ended with status 7"),
        ("segfault", OpError, "its process was killed by signal 11"),
        ("raise", ValueError, "six"),
        ("lambda", OpError, "the result cannot be sent back"),
    ],
)
def test_only_the_culprit_fails(what, error, message):
    with ProcessPool(2) as pool:
        calls = [pool.submit(act, what if i in (3, 7) else i) for i in range(12)]
        wait(calls)
        for i, call in enumerate(calls):
            if i in (3, 7):
                with pytest.raises(error, match=message):
                    call.result()
            else:
                assert call.result() != os.getpid()


@pytest.mark.usefixtures("start_method")
def test_many_deaths_at_once_each_say_how():
    with ProcessPool(4) as pool:
        calls = [pool.submit(act, ("segfault", "exit", i)[i % 3]) for i in range(15)]
        messages = Counter(str(call.exception()) for call in calls)
    assert messages == {"its process was killed by signal 11": 5, "its process ended with status 7": 5, "None": 5}


def nest(number: int) -> list[int]:
    with ProcessPool(1) as pool:
        return list(pool.map(abs, [number]))


@pytest.mark.usefixtures("start_method")
def test_a_process_of_a_pool_starts_no_others_and_says_so():
    with ProcessPool(1) as pool:
        nested = pool.submit(nest, 1)
        with pytest.raises(RuntimeError, match="starts no other processes: pass executor="):
            nested.result(60)


def test_giving_up_ends_the_processes():
    begun = time.monotonic()
    with ProcessPool(2) as pool:
        results = bounded_map(act, ["sleep", "raise", "sleep"], executor=pool, window=3, ordered=False)
        with pytest.raises(ValueError, match="six"):
            list(results)
    assert time.monotonic() - begun < 60


def half(number: int) -> float:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number / 2


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("window", [1, 3, 100])
def test_failures_are_settled_and_the_rest_goes_on(window, ordered):
    with ThreadPoolExecutor(4) as pool:
        settled = [*settled_map(half, range(20), executor=pool, window=window, ordered=ordered)]
        assert [item for item, *_ in settled] == list(range(20)) or not ordered
        assert sorted(item for item, *_ in settled) == list(range(20))
        for item, result, error in settled:
            assert (result, str(error)) == ((item / 2, "None") if item % 2 == 0 else (None, f"{item} is odd"))
        results = bounded_map(half, [0, 2, 3, 4], executor=pool, window=window)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(ValueError, match="3 is odd"):
            next(results)
        assert list(results) == []
        with pytest.raises(TypeError, match="executor= takes an Executor"):
            next(settled_map(half, [0], executor=4, window=1))


def test_a_function_that_raises_stop_iteration_does_not_end_the_map():
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="generator raised StopIteration"):
        list(bounded_map(next, [iter("a"), iter("")], executor=pool, window=2))


@pytest.mark.parametrize("mapped", [settled_map, bounded_map])
def test_breaking_off_cancels_what_has_not_begun_and_waits_for_the_rest(mapped):
    begun, ended, gate = [], [], Event()

    def work(number):
        begun.append(number)
        if number:
            gate.wait(100)
        ended.append(number)

    with ThreadPoolExecutor(2) as pool:
        calls = mapped(work, range(10), executor=pool, window=5)
        next(calls)
        Timer(0.1, gate.set).start()
        calls.close()
        assert sorted(begun) == sorted(ended)
        assert len(begun) < 5


def test_an_error_of_the_items_is_raised_and_a_call_that_was_cancelled():
    def items():
        yield 0
        raise KeyError("items")

    with ThreadPoolExecutor(1) as pool:
        for mapped in (settled_map, bounded_map):
            with pytest.raises(KeyError, match="items"):
                list(mapped(half, items(), executor=pool, window=3))

    class Cancelling(ThreadPoolExecutor):
        def submit(self, *_):
            future = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    with Cancelling(1) as pool:
        for mapped in (settled_map, bounded_map):
            with pytest.raises(CancelledError):
                list(mapped(half, [1], executor=pool, window=3))


def test_no_result_is_held_while_the_next_is_made():
    class Result:
        pass

    with ThreadPoolExecutor(1) as pool:
        results = bounded_map(lambda _: Result(), range(3), executor=pool, window=1)
        first = weakref.ref(next(results))
        wait_until(lambda: first() is None)


class Shared:
    """A work that counts its parts, and fails in one of them, or earlier or later, if told to."""

    def __init__(
        self, number: int, parts: int = 4, fails: object = None, gate: Event | None = None, makes: bool = False
    ):
        self.number, self.parts, self.fails, self.gate, self.makes = number, parts, fails, gate, makes
        self.asked, self.read_parts, self.is_finished = 0, [], False

    def begin(self, most: int) -> int:
        self.asked = most
        return self.at("begin", self.parts)

    def read(self, part: int) -> None:
        if self.gate is not None:
            self.gate.wait(100)
        self.read_parts.append(self.at(part, part))

    def finish(self) -> Shared:
        assert sorted(self.read_parts) == list(range(self.parts))
        self.is_finished = True
        return self.at("finish", Shared(self.number) if self.makes else self)

    def at(self, where: object, value):
        if where == self.fails:
            raise ValueError(f"{self.number} at {where}")
        return value


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("window", [1, 3, 40])
def test_shared_works_come_in_order_with_each_part_read_once(threads, window):
    works = [Shared(number, 1 + number % 5) for number in range(30)]
    with ThreadPoolExecutor(threads) as pool:
        for number, work in enumerate(shared_map(works, executor=pool, threads=threads, window=window)):
            assert (work, work.asked) == (works[number], threads)
            assert not any(later.asked for later in works[number + window :])


def test_threads_share_the_earliest_work():
    gate = Event()
    works = [Shared(number, 4, gate=gate) for number in range(9)]
    with ThreadPoolExecutor(8) as pool:
        results = shared_map(works, executor=pool, threads=8, window=9)
        Timer(0.2, gate.set).start()
        assert next(results) is works[0]
        assert sum(bool(work.asked) for work in works) >= 2
        results.close()
    late = [Shared(number, 4, gate=Event()) for number in range(9)]
    with ThreadPoolExecutor(8) as pool, closing(shared_map(late, executor=pool, threads=8, window=9)) as results:
        taking = Thread(target=next, args=(results, None))
        taking.start()
        wait_until(lambda: sum(bool(work.asked) for work in late) == 2)
        time.sleep(0.05)
        assert [bool(work.asked) for work in late] == [True] * 2 + [False] * 7, "eight threads have eight parts"
        for work in late:
            work.gate.set()
        taking.join()


@pytest.mark.parametrize("where", ["begin", 0, 3, "finish"])
def test_a_shared_work_that_fails_raises_at_its_turn(where):
    works = [Shared(0), Shared(1), Shared(2, fails=where), Shared(3)]
    with ThreadPoolExecutor(2) as pool:
        results = shared_map(works, executor=pool, threads=2, window=4)
        assert [next(results), next(results)] == works[:2]
        with pytest.raises(ValueError, match=f"2 at {where}"):
            next(results)
        assert list(results) == []


def test_left_shared_works_are_begun_no_more_and_parts_being_read_end():
    gate = Event()
    works = [Shared(number, gate=gate if number else None) for number in range(20)]
    with ThreadPoolExecutor(2) as pool:
        results = shared_map(works, executor=pool, threads=2, window=6)
        assert next(results) is works[0]
        Timer(0.1, gate.set).start()
        results.close()
        read = [list(work.read_parts) for work in works]
        assert sum(map(len, read[1:])) <= 2
        pool.submit(int).result()
        assert [work.read_parts for work in works] == read
    assert not works[2].is_finished


def test_no_shared_result_is_held_while_the_next_is_made():
    with ThreadPoolExecutor(2) as pool:
        works = (Shared(number, makes=True) for number in range(3))
        results = shared_map(works, executor=pool, threads=2, window=1)
        first = weakref.ref(next(results))
        wait_until(lambda: first() is None)


def test_a_function_that_cannot_be_sent_fails_alone():
    with ProcessPool(1) as pool:
        with pytest.raises(Exception, match=r"[Pp]ickle|local object"):
            pool.submit(lambda: None).result()
        assert pool.submit(act, 1).result()


def test_a_killed_parent_leaves_no_process():
    code = "import os, time; from tarshards.parallel.process_pool import ProcessPool; p = ProcessPool(3)\n"
    code += "calls = [p.submit(os.getpid) for _ in range(40)]\n"
    code += "print(*{call.result() for call in calls}, flush=True)\ntime.sleep(200)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workers = process.stdout.readline().split()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 100
    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_cannot_be_started_ends_those_before_it(monkeypatch):
    started = []
    begin = process_pool._Process.__init__

    def limited(process, shared):
        if len(started) == 2:
            raise OSError(errno.EAGAIN, "no more processes")
        begin(process, shared)
        started.append(process._process)

    monkeypatch.setattr(process_pool._Process, "__init__", limited)
    pool = ProcessPool(3)
    with pytest.raises(OSError, match="no more processes"):
        pool.submit(abs, 1)
    assert [process.exitcode for process in started] == [0, 0]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_that_starts_processes_when_it_is_imported_is_told_so(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\nfrom tarshards.parallel.process_pool import ProcessPool\n"
        f"multiprocessing.set_start_method({method!r}, force=True)\n"
        "ProcessPool(1).submit(len, 'abc').result()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    told = r"its process ended( with status 1)? before its first result; a script must start processes below "
    assert re.search(told + '`if __name__ == "__main__":`$', done.stderr, re.MULTILINE), done.stderr


def test_a_signal_at_the_fork_ends_what_is_forked():
    code = (
        "import multiprocessing, os, signal, sys\n"
        "from tarshards.parallel.process_pool import ProcessPool\n"
        "multiprocessing.set_start_method('fork')\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "print(ProcessPool(1).submit(abs, 1).exception())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("its process was killed by signal 15\n", "")


def test_no_calls_after_the_end():
    pool = ProcessPool(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="takes no calls"):
        pool.submit(act, 1)
    with pytest.raises(ValueError, match="at least 1 process"):
        ProcessPool(0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def start_with_child(tmp_path: Path, rest: str) -> tuple[ChildGroup, int]:
    """Start a shell that starts another process; return the shell and the id of that process."""
    group = ChildGroup(["bash", "-c", f"sleep 200 & echo $!; {rest}"], stdin=os.devnull, stdout=subprocess.PIPE)
    with os.fdopen(group.stdout, "rb") as output:
        return group, int(output.readline())


@pytest.fixture(params=["waits without reaping", "reaps"])
def system(request, monkeypatch):
    """What the system offers: macOS has no descriptors of processes, and its Python before 3.13 no waitid."""
    if request.param == "reaps":
        monkeypatch.delattr("os.pidfd_open")
        monkeypatch.delattr("os.waitid")


@pytest.mark.usefixtures("system")
def test_a_child_group_is_ended_whole(tmp_path):
    group, child = start_with_child(tmp_path, "wait")
    assert not group.wait(0.05)
    assert is_running(child)
    assert group.end() == group.status == -signal.SIGKILL
    wait_until(lambda: not is_running(child))
    assert group.end() == -signal.SIGKILL, "once reaped, its id is not signalled again"


@pytest.mark.usefixtures("system")
def test_what_the_leader_leaves_running_is_ended_too_or_left(tmp_path):
    group, child = start_with_child(tmp_path, "exit 3")
    assert group.wait(100)
    assert is_running(child)
    assert group.end() == 3
    wait_until(lambda: not is_running(child))
    group, child = start_with_child(tmp_path, "exit 4")
    assert group.reap() == 4
    assert is_running(child)
    os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("system")
def test_a_child_group_has_a_grace_period():
    def start(handler: str) -> ChildGroup:
        group = ChildGroup(["bash", "-c", f"trap '{handler}' TERM; echo; sleep 60 & wait"], stdout=subprocess.PIPE)
        with os.fdopen(group.stdout, "rb") as output:
            output.readline()
        return group

    assert start("exit 7").end(100) == 7
    assert start("sleep 200").end(0.1) == -signal.SIGKILL


def test_the_ends_of_a_child_group(tmp_path):
    (tmp_path / "in").write_text("text")
    with open(tmp_path / "out", "wb") as file:
        group = ChildGroup(["cat"], stdin=str(tmp_path / "in"), stdout=file.fileno())
    assert group.reap() == 0
    assert (tmp_path / "out").read_text() == "text"
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        ChildGroup(["no-such-program"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_deadlines_without_pidfd(monkeypatch):
    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    group = ChildGroup(["sleep", "200"])
    assert not group.wait(0.02)
    os.kill(group.pid, signal.SIGTERM)
    assert group.wait(100)
    assert group.end() == -signal.SIGTERM


class Unmade:
    """Pickles, and cannot be made again."""

    def __reduce__(self):
        return int, ("apples",)


def fail(how: str) -> None:
    if how == "tree":
        error = OpenError("full", url="a.tar", offset=7, key="k", field="f", errno=errno.ENOSPC)
        error.cost = "all of it"
        error.add_note("as it should be")
        try:
            raise KeyError("behind it")
        except KeyError as cause:
            raise error from cause
    if how == "unmade":
        error = RuntimeError("7 apples")
        error.held = Unmade()  # type: ignore[attr-defined]
        raise error
    error = ValueError("with a lock")
    error.lock = Lock()  # type: ignore[attr-defined]
    raise error


@pytest.mark.usefixtures("start_method")
def test_errors_arrive_with_all_that_they_hold():
    with ProcessPool(1) as pool:
        error = pool.submit(fail, "tree").exception()
        assert type(error) is OpenError
        assert str(error) == "a.tar: offset 7: k.f: full"
        assert (error.url, error.offset, error.key, error.field) == ("a.tar", 7, "k", "f")
        assert (error.errno, error.cost, error.__notes__) == (errno.ENOSPC, "all of it", ["as it should be"])
        assert isinstance(error.__cause__, RemoteTraceback)
        assert "KeyError: 'behind it'" in str(error.__cause__)
        for how, text in (("unmade", "RuntimeError: 7 apples"), ("lock", "ValueError: with a lock")):
            error = pool.submit(fail, how).exception()
            assert type(error) is OpError
            assert str(error) == text
            assert "in fail" in str(error.__cause__)
        assert pool.submit(act, "pid").result() > 0


def test_errors_of_the_tree_cross_the_standard_pool():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        error = pool.submit(fail, "tree").exception()
    assert type(error) is OpenError
    assert (error.url, error.errno, error.cost, error.__notes__) == (
        "a.tar",
        errno.ENOSPC,
        "all of it",
        ["as it should be"],
    )


def returned(number: int) -> int:
    return number


class Last:
    """Ends the thread that takes it, in place of a future."""

    def set_running_or_notify_cancel(self) -> None:
        raise SystemExit


def test_threads_that_could_not_be_started_are_started_later(monkeypatch):
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = DaemonThreads(2)
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                threads.submit(abs, -1)
    assert threads.submit(abs, -1).result(30) == 1


class EndingThreads(DaemonThreads):
    """Those of the package wait for calls until the process ends: thousands of pools would have too many."""

    def _serve(self) -> None:
        with suppress(SystemExit):
            super()._serve()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in range(self._workers):
            self._calls.put((Last(), None, (), {}))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that is closed
@pytest.mark.soak
@pytest.mark.parametrize(
    ("executor", "ordered"),
    [("threads", True), ("threads", False), ("ours", True), ("ours", False), ("threads", "shared")],
)
def test_a_signal_between_any_two_instructions_leaves_no_lock_that_a_thread_needs(executor, ordered):
    def called(pool):
        if ordered == "shared":
            works = map(partial(Shared, parts=2), range(5))
            with closing(shared_map(works, executor=pool, threads=2, window=3)) as results:
                return [work.number for work in results]
        with closing(bounded_map(returned, range(5), executor=pool, window=3, ordered=ordered)) as results:
            return list(results)

    def interrupted(number):
        pool = ThreadPoolExecutor(2) if executor == "threads" else EndingThreads(2)
        try:
            found = interrupted_at(number, partial(called, pool))
        except KeyboardInterrupt:
            found = None
        probes = [pool.submit(returned, i) for i in range(4)]
        done = wait(probes, 20).done
        assert len(done) == 4, f"a thread hangs after a signal at instruction {number}"
        pool.shutdown()
        return found

    number, uninterrupted = 1, 0
    while uninterrupted < 3:
        found = interrupted(number)
        uninterrupted = 0 if found is None else uninterrupted + 1
        assert found in (None, [0, 1, 2, 3, 4]) or (not ordered and sorted(found) == [0, 1, 2, 3, 4])
        number += 53 if SOAK == 1 else 1
    assert number > 1000


@pytest.mark.forks
def test_a_child_makes_its_own_values():
    numbers = PerProcess(lambda: [len(made)])
    made = []
    assert numbers() is numbers() == [0]
    made.append(1)
    assert in_child(lambda: numbers() == [1]) == 0
    assert numbers() == [0]


def test_threads_that_ask_at_once_get_one_value():
    begun, go, found = [], Event(), []

    def make():
        begun.append(1)
        go.wait(60)
        return object()

    value = PerProcess(make)
    threads = [Thread(target=lambda: found.append(value())) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: begun)
    go.set()
    for thread in threads:
        thread.join()
    assert len(begun) == 1
    assert len(set(map(id, found))) == 1


@pytest.mark.forks
def test_a_lock_that_a_thread_holds_at_a_fork_is_free_in_the_child():
    held = PerProcess(Lock)
    with held():
        assert in_child(lambda: held().acquire(timeout=1)) == 0
