"""A real Slurm: arrays that are preempted, requeued, failed and cancelled come to the bytes of a serial run."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from running import start_slurm, upper
from slurm_cluster import call, until

from tarshards.errors import OpenError
from tarshards.run.jobs import slurm as backend
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_options import Options
from tarshards.run.jobs.job_plan import make_plan
from tarshards.run.jobs.slurm import Slurm

pytestmark = pytest.mark.interop

# Items 00, 01 and 10 hang at first, until Slurm ends them; 03 fails at first, 05 for good.
WORK = """
echo $1 >>began
case $1-$(grep -c $1 began) in
00-1|01-1|10-1) sleep 100 ;;
03-1) echo bad luck; exit 7 ;;
05-*) echo never; exit 42 ;;
esac
exec tarproc -q -c 'tr a-z A-Z <sample.txt >sample.up' --overwrite in-$1.tar -o $3
"""
LINE = ("-s", "{00..19}", "-b", "slurm", "--name", "words", "--", "bash", "work.sh", "{}", "-o", "out-{}.tar")


def job_id() -> str:
    (part,) = json.loads(Path(".tarjob/words/job.json").read_text())["parts"]
    return part["id"]


def tasks(job: str, state: str) -> list[int]:
    rows = call("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%K|%T").split()
    return [int(row.partition("|")[0]) for row in rows if row.endswith(f"|{state}")]


def began() -> Counter[str]:
    return Counter(Path("began").read_text().split()) if Path("began").exists() else Counter()


def test_tasks_of_srun_are_told_that_they_are_no_ranks(slurm, shards, python_with_torch):
    """A script of sbatch, and a step of one task, are not."""
    shards(2)
    program = "from tarshards import ShardDataset; print(len([*ShardDataset('in-{00..01}.tar')]))"
    command = f'env -u RANK -u WORLD_SIZE {python_with_torch} -c "{program}"'
    Path("job.sh").write_text(f"#!/bin/bash\n#SBATCH -n2\n{command}\nsrun -n1 {command}\nexit\n")
    call("sbatch", "--wait", "-o", "alone", "job.sh")
    done = subprocess.run(["srun", "-n2", "bash", "-c", command], capture_output=True, text=True, timeout=100)
    assert done.stderr.count("srun started 2 processes, and each of them reads the whole dataset") == 2
    count, _ = done.stdout.split()
    assert done.stdout.split() == [count] * 2
    assert Path("alone").read_text().split() == [count] * 2


def test_an_array_that_is_preempted_requeued_and_failed(slurm, tarjob, shards):
    shards(20)
    Path("work.sh").write_text(WORK)
    code, out, errors = tarjob(*LINE)
    assert (code, out) == (0, ""), errors
    assert "submitted 20 items as words" in errors
    job = job_id()
    until(lambda: {"00", "01"} <= set(began()), slurm.log)
    assert tarjob("status")[0] == 3
    code, _, errors = tarjob(*LINE)
    assert (code, "words is already running" in errors) == (1, True)
    # All four cores for somebody more important; then one task back into the queue by hand.
    call("sbatch", "-p", "high", "-n", "4", "-o", "/dev/null", "--wrap", "sleep 0.3")
    until(lambda: began()["00"] == began()["01"] == 2, slurm.log)
    until(lambda: "10" in began(), slurm.log)
    call("scontrol", "requeue", f"{job}_10")
    code, _, errors = tarjob("status", "words", "--wait", "-q")
    assert code == 1, errors
    assert sorted(began()) == [f"{number:02d}" for number in range(20)]
    assert (began()["10"], began()["03"], began()["05"]) == (2, 2, 1)
    assert tarjob("status", "words")[1].splitlines() == [
        *("job      words", "items    20", "done     19", "running  0", "failed   1", "waiting  0"),
        "  5 05: permanent: never",
    ]
    assert "bad luck\n" in tarjob("logs", "words", "3")[1]
    for number in set(range(20)) - {5}:
        assert Path(f"out-{number:02d}.tar").read_bytes() == upper(f"in-{number:02d}.tar")
    # The same line finds all done but what can never be; a retry tries that again.
    assert tarjob(*LINE)[0] == 1
    assert job_id() == job
    Path("work.sh").write_text(WORK.replace("exit 42", "true"))
    assert tarjob("retry", "words", "--wait", "-q")[0] == 0
    assert len(list(Path().glob("out-*.tar.done"))) == 20


def test_tries_are_counted_and_end(slurm, tarjob):
    line = ("-s", "{a,b}", "-b", "slurm", "--retries", 1, "--wait", "-q", "--", "echo {} >>ran; test {} = a")
    code, _, errors = tarjob(*line)
    assert code == 1
    assert "  1 b: status 1: " in errors
    assert Counter(Path("ran").read_text().split()) == {"a": 1, "b": 2}


def test_cancel(slurm, tarjob):
    tarjob("-s", "{0..9}", "-b", "slurm", "--name", "words", "--", "echo {} >>ran; sleep 100")
    until(lambda: Path("ran").exists(), slurm.log)
    assert "words: cancelled" in tarjob("cancel", "words")[2]
    code, out, _ = tarjob("status", "words", "--wait", "-q")
    assert code == 1
    code, out, _ = tarjob("status", "words")
    assert "not run  10" in out
    assert "items 9: CANCELLED" in out
    assert "nothing was running" in tarjob("cancel", "words")[2]


def test_accounting_remembers_what_the_queue_has_forgotten(tmp_path_factory, folder, monkeypatch):
    running = start_slurm(tmp_path_factory, accounting=True)
    try:
        plan = make_plan(["test {} != 1 || sleep 100"], ["{0..2}"], state="state")
        place = JobFolder(plan.name)
        place.save(plan)
        scheduler = Slurm(Options(), place)
        parts = list(scheduler.submit(plan, 1))
        until(lambda: len(list(Path("state").glob("*.done"))) == 2, running.log)
        call("scancel", f"{parts[0]['id']}_1")
        until(lambda: scheduler.poll(parts).ended, running.log)
        real = backend._call

        def without_queue(command, **options):
            if command[0] == "squeue":
                raise OpenError("Invalid job id specified")
            return real(command, **options)

        monkeypatch.setattr(backend, "_call", without_queue)
        until(lambda: scheduler.poll(parts).notes, running.log)
        assert scheduler.poll(parts).notes == ["items 1: CANCELLED"]
    finally:
        running.stop()


def test_the_script(folder):
    options = Options(parallelism=50, retries=2, cpu="1500m", memory="4Gi", storage="1Gi", gpu=2, deadline=90)
    scheduler = Slurm(options, JobFolder("ocr"))
    plan = make_plan(["cat", "{}"], ["{0000..1499}"], name="ocr", state="state")
    first, second = scheduler.preview(plan).split("#!/bin/bash\n")[1:]
    for line in (
        *("--job-name=ocr", "--array=0-999%50", "--requeue", "--cpus-per-task=2", "--mem=4096M", "--tmp=1024M"),
        *("--gpus-per-task=2", "--time=2", f"--output={folder}/.tarjob/ocr/logs/%A_%a.log"),
    ):
        assert f"#SBATCH {line}\n" in first
    assert "#SBATCH --array=0-499%50\n" in second
    assert subprocess.run(["bash", "-n"], input=first, text=True).returncode == 0


def test_other_options_and_quantities_that_are_none(tarjob):
    line = ("-s", "a", "-b", "slurm", "--print")
    out = tarjob(*line, "--sbatch=--account=me", "--partition", "low", "--", "true {}")[1]
    assert "#SBATCH --partition=low\n#SBATCH --account=me\n" in out
    assert "#SBATCH --array=0-0\n" in tarjob(*line, "-j", "0", "--", "true {}")[1]
    code, _, errors = tarjob(*line, "--memory", "much", "--", "true {}")
    assert (code, "'much' is not a quantity" in errors) == (2, True)


def test_no_slurm(tarjob, monkeypatch):
    code, _, errors = tarjob("-s", "a", "-b", "slurm", "--", "true {}", PATH="/nowhere")
    assert code == 1
    assert "sbatch is not on the PATH" in errors or "scontrol is not on the PATH" in errors


@pytest.mark.parametrize("option", ["--image=x", "--service-account=x", "--secret-env=x", "--namespace=x"])
def test_options_of_another_engine_are_refused(tarjob, option):
    code, _, errors = tarjob("-s", "a", "-b", "slurm", option, "--", "true {}")
    assert code == 2
    assert "goes with --backend kubernetes" in errors
