"""The program that Slurm runs: ``python -m tarshards.run.jobs worker PLAN`` is the same as ``tarjob worker PLAN``."""

from __future__ import annotations

import signal
import sys

from tarshards.errors import TarshardsError, visible
from tarshards.run.jobs.worker import FAILED, run_task


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "worker":
        print("usage: python -m tarshards.run.jobs worker PLAN", file=sys.stderr)  # noqa: T201
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run_task(arguments[1])
    except TarshardsError as error:
        print(f"tarjob: {visible(str(error))}", file=sys.stderr)  # noqa: T201
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
