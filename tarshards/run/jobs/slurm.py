"""Runs a plan as Slurm array jobs: the script, its submission, and its state from squeue and sacct."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from typing import Any

from tarshards.errors import OpenError
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_options import Options, parse_quantity
from tarshards.run.jobs.job_plan import JobPlan
from tarshards.run.jobs.scheduler import WATCH, Poll, tasks_of
from tarshards.run.jobs.worker import PERMANENT

MAX_ARRAY = 1001  # Slurm's default MaxArraySize: one more than the size of the largest array
RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT"}
OPEN = RUNNING | {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "SUSPENDED", "SIGNALING", "STOPPED"}
FINE = OPEN | {"COMPLETED", "FAILED"}  # states without a note: markers describe failed commands

SCRIPT = """\
#!/bin/bash
{directives}
# Slurm requeues tasks after preemption or a node failure, which is not a try; this script requeues failed tasks.
{worker} {plan}
status=$?
tries={folder}/tries/${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}
if [ $status != 0 ] && [ $status != {permanent} ]; then
    echo $status >>"$tries"
    if [ $(wc -l <"$tries") -le {retries} ] && scontrol requeue ${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}; then
        sleep 60  # until Slurm ends this run of it
    fi
fi
exit $status
"""


class Slurm:
    """The Slurm cluster whose sbatch is on the PATH; its nodes must share the working directory."""

    def __init__(self, options: Options, folder: JobFolder):
        self.options = options
        self.folder = folder

    def preview(self, plan: JobPlan) -> str:
        return "\n".join(
            self._script(part, f"{self.folder.path}/run-1-{i}.json") for i, part in enumerate(self._parts(plan))
        )

    def submit(self, plan: JobPlan, number: int) -> Iterator[dict[str, Any]]:
        os.makedirs(f"{self.folder.path}/tries", exist_ok=True)
        for i, part in enumerate(self._parts(plan, _max_array())):
            path = self.folder.write(f"run-{number}-{i}.json", part.dumps())
            script = self.folder.write(f"run-{number}-{i}.sh", self._script(part, path))
            job = _call(["sbatch", "--parsable", script]).strip().partition(";")[0]
            yield {"id": job, "tasks": tasks_of(part)}

    def poll(self, parts: list[dict[str, Any]]) -> Poll:
        poll = Poll()
        for part in parts:
            states = _states(part["id"])
            poll.running += sum(state in RUNNING for state in states.values())
            poll.ended = poll.ended and not any(state in OPEN for state in states.values())
            tasks = part["tasks"]
            for index, state in sorted(states.items()):
                if state not in FINE and index < len(tasks):
                    poll.notes.append(f"items {' '.join(map(str, tasks[index]))}: {state}")
        return poll

    def wait(self, parts: list[dict[str, Any]]) -> None:
        time.sleep(WATCH)

    def log(self, part: dict[str, Any], index: int) -> str:
        with (
            suppress(FileNotFoundError),
            open(self._log(part["id"], index), encoding="utf-8", errors="replace") as file,
        ):
            return file.read()
        return ""

    def cancel(self, parts: list[dict[str, Any]]) -> None:
        for part in parts:
            _call(["scancel", part["id"]])

    def _log(self, job: str, index: int | str) -> str:
        return f"{self.folder.path}/logs/{job}_{index}.log"

    def _parts(self, plan: JobPlan, limit: int = MAX_ARRAY) -> list[JobPlan]:
        tasks = plan.tasks
        return [plan._replace(tasks=tasks[i : i + limit - 1]) for i in range(0, len(tasks), limit - 1)]

    def _script(self, plan: JobPlan, path: str) -> str:
        options = self.options
        limit = f"%{options.parallelism}" if options.parallelism else ""
        directives = [
            f"--job-name={plan.name}",
            f"--array=0-{len(plan.tasks) - 1}{limit}",
            f"--output={self._log('%A', '%a')}",
            "--open-mode=append",
            "--requeue",
        ]
        if options.partition is not None:
            directives.append(f"--partition={options.partition}")
        if options.cpu is not None:
            directives.append(f"--cpus-per-task={ceil(parse_quantity(options.cpu))}")
        if options.memory is not None:
            directives.append(f"--mem={ceil(parse_quantity(options.memory) / 2**20)}M")
        if options.storage is not None:
            directives.append(f"--tmp={ceil(parse_quantity(options.storage) / 2**20)}M")
        if options.gpu:
            directives.append(f"--gpus-per-task={options.gpu}")
        if options.deadline is not None:
            directives.append(f"--time={ceil(options.deadline / 60)}")
        directives += options.sbatch
        return SCRIPT.format(
            directives="\n".join(f"#SBATCH {line}" for line in directives),
            worker=shlex.join(worker_command()),
            plan=shlex.quote(path),
            folder=shlex.quote(self.folder.path),
            permanent=PERMANENT,
            retries=options.retries,
        )


def worker_command() -> list[str]:
    """Return the command that runs a task on a machine with the same files."""
    return [sys.executable, "-m", "tarshards.run.jobs", "worker"]


def _states(job: str) -> dict[int, str]:
    """Return the states of an array's tasks, as far as Slurm knows them."""
    states: dict[int, str] = {}
    with suppress(OpenError):  # accounting may be off; it keeps jobs longer than squeue
        rows = _call(["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", job])
        states.update(_rows(line.partition("_")[2] for line in rows.splitlines()))
    with suppress(OpenError):  # Slurm may have forgotten the job
        rows = _call(["squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%K|%T"])
        states.update(_rows(rows.splitlines()))
    return states


def _rows(lines: Any) -> dict[int, str]:
    pairs = (line.split("|")[:2] for line in lines if "|" in line)
    return {int(index): state.split()[0] for index, state in pairs if index.isdigit()}


def _max_array() -> int:
    with suppress(OpenError, StopIteration):
        lines = _call(["scontrol", "show", "config"]).splitlines()
        return max(2, int(next(line for line in lines if line.startswith("MaxArraySize")).rpartition("=")[2]))
    return MAX_ARRAY


def _call(command: list[str]) -> str:
    """Run one of Slurm's programs and return its output; raise OpenError with its error message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise OpenError(f"{command[0]} is not on the PATH; submit from a machine of a Slurm cluster") from error
    if done.returncode:
        raise OpenError(f"{command[0]}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'failed'}")
    return done.stdout
