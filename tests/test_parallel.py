"""A pool of processes whose deaths have a name."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import wait

import pytest

from tarshards.errors import OpError
from tarshards.parallel import ProcessPool, bounded_map


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


def test_many_deaths_at_once_hang_nothing():
    with ProcessPool(4) as pool:
        calls = [pool.submit(act, "exit" if i % 2 else i) for i in range(60)]
        assert sum(call.exception() is not None for call in calls) == 30


def test_giving_up_ends_the_processes():
    begun = time.monotonic()
    with ProcessPool(2) as pool:
        results = bounded_map(act, ["sleep", "raise", "sleep"], executor=pool, window=3, ordered=False)
        with pytest.raises(ValueError, match="six"):
            list(results)
    assert time.monotonic() - begun < 20


def test_a_function_that_cannot_be_sent_fails_alone():
    with ProcessPool(1) as pool:
        with pytest.raises(Exception, match=r"[Pp]ickle|local object"):
            pool.submit(lambda: None).result()
        assert pool.submit(act, 1).result()


def test_a_killed_parent_leaves_no_process():
    code = "import os, time; from tarshards.parallel import ProcessPool; p = ProcessPool(3)\n"
    code += "calls = [p.submit(os.getpid) for _ in range(40)]\n"
    code += "print(*{call.result() for call in calls}, flush=True)\ntime.sleep(99)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workers = process.stdout.readline().split()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_calls_after_the_end():
    pool = ProcessPool(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="takes no calls"):
        pool.submit(act, 1)
    with pytest.raises(ValueError, match="at least 1 process"):
        ProcessPool(0)
