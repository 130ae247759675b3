"""What the tests of writers share: a death at any step."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

KILLED = 9


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
