"""The command line of tarproc: exit codes, options, what it refuses."""

from __future__ import annotations

import os
import subprocess
from itertools import product

import pytest
from leftovers import processes_with
from programs import need
from soak import SOAK

from tarshards import read_samples, write_samples
from tarshards.samples.codecs import decode_field


@pytest.mark.soak
@pytest.mark.parametrize(
    ("failing", "policy"),
    [*product([0, 1], ["skip", "keep"]), (120, "skip"), *[(120, "keep")] * (SOAK > 1)],
)
def test_failures_that_the_command_line_allows_are_counted(make_tar, tarproc, tmp_path, failing, policy):
    count = 125 if SOAK > 1 else failing + 5
    command = f"test $TAR_INDEX -ge {failing}"
    status, errors = tarproc("--failed", policy, "-p", 4, "-c", command, make_tar(count), "-o", "out.tar")
    assert status == 0
    assert errors.count("tarproc: ") == failing
    assert (f"failed      {failing:>6} samples" in errors) == (failing > 0)
    assert len(list(read_samples(tmp_path / "out.tar"))) == (count if policy == "keep" else count - failing)


@pytest.mark.soak
@pytest.mark.parametrize("options", ["--failed skip", "--failed keep", "", "--on-error skip --failed skip"])
@pytest.mark.parametrize(("failing", "code"), [(3, 0), (4, 1)])
def test_more_failures_than_allowed_end_the_run(make_tar, tarproc, tmp_path, options, failing, code):
    count = 500 if SOAK > 1 else 150 if code else 30
    command = f"echo $TAR_INDEX >>{tmp_path}/ran; test $TAR_INDEX -ge {failing}"
    status, errors = tarproc(*options.split(), "--max-errors", 3, "-c", command, make_tar(count), "-o", "out.tar")
    assert status == code, errors
    assert (tmp_path / "out.tar").exists() == (not code)
    if code:
        first = f"{tmp_path}/in.tar: 0000: the command ended with status 1"
        last = errors.splitlines()[-1]
        assert last == f"tarproc: 4 errors, but --max-errors allows 3; the first: {first}"
        assert len((tmp_path / "ran").read_text().splitlines()) < count


def test_failed_commands_and_bad_data_count_together(make_tar, tarproc, tmp_path):
    line = ("--failed", "skip", "--on-error", "skip", "-c", "test $TAR_INDEX != 1", make_tar(3), "missing.tar")
    assert tarproc(*line, "--max-errors", 2, "-o", "out.tar")[0] == 0
    status, errors = tarproc(*line, "--max-errors", 1, "-o", "less.tar")
    assert (status, "2 errors, but --max-errors allows 1" in errors) == (1, True)
    assert not (tmp_path / "less.tar").exists()


def test_abort_is_the_default(make_tar, tarproc, tmp_path):
    status, errors = tarproc("-c", "test $TAR_INDEX != 3", make_tar(9), "-o", "out.tar")
    assert (status, errors) == (1, "tarproc: " + f"{tmp_path}/in.tar: 0003: the command ended with status 1\n")
    assert not (tmp_path / "out.tar").exists()


def test_a_run_that_is_aborted_ends_the_command_that_it_reads_from(make_tar, tarproc, tmp_path):
    source = f"pipe:cat {make_tar(9)}; head -c 1000000 /dev/zero; sleep 200"
    assert tarproc("-c", "false", source, "-o", "out.tar")[0] == 1
    assert processes_with(str(tmp_path)) == []


def test_a_job_of_samples_that_may_fail_is_done(make_tar, tmp_path, path_with_tools):
    make_tar(5)
    work = "tarproc -q --failed skip -c 'test $TAR_KEY != 0003' in.tar -o out-{}.tar"
    environment = {**os.environ, "PATH": path_with_tools}
    for _ in range(2):
        command = ["tarjob", "-s", "{0..2}", "--retries", "1", "--", work]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [len(list(read_samples(tmp_path / f"out-{i}.tar"))) for i in range(3)] == [4, 4, 4]


def test_a_halt_is_a_failure_that_names_the_first(make_tar, tarproc, tmp_path):
    status, errors = tarproc("--halt", "soon,fail=4", "-c", "exit 1", make_tar(50), "-o", "out.tar")
    assert status == 1
    first = f"{tmp_path}/in.tar: 0000: the command ended with status 1"
    assert errors.endswith(f"tarproc: halted because 4 samples have failed; the first: {first}\n")
    assert not (tmp_path / "out.tar").exists()


def test_failing_samples_go_to_quarantine(make_tar, tarproc, tmp_path):
    line = ("--failed", "skip", "--on-error", "quarantine=bad.tar", "-c", "test $TAR_INDEX != 3")
    status, errors = tarproc(*line, make_tar(9), "-o", "out.tar")
    assert status == 0
    assert "failed           1 samples" in errors
    assert [sample["__key__"] for sample in read_samples(tmp_path / "bad.tar")] == ["0003"]


def test_failed_ones_are_resumed(make_tar, tarproc, tmp_path):
    line = ("--failed", "skip", "-c", f"test $TAR_INDEX != 3 -o -e {tmp_path}/cured", make_tar(9), "-o", "out.tar")
    assert tarproc(*line, "--resume")[0] == 0
    assert (tmp_path / "out.tar.tarproc").exists(), "kept while something failed"
    (tmp_path / "cured").touch()
    status, errors = tarproc(*line, "--resume", "--overwrite")
    assert (status, "(in an earlier run)" in errors) == (0, True)
    told = "results of 8 of 9 samples kept from an earlier run\n"
    assert tarproc(*line, "--resume-failed", "--overwrite") == (0, told)
    assert len(list(read_samples(tmp_path / "out.tar"))) == 9
    assert not (tmp_path / "out.tar.tarproc").exists()


def test_an_output_of_its_own_is_replaced_on_a_resume(make_tar, tarproc, tmp_path):
    """As after a kill between the rename of the output and the removal of the state."""
    line = ("--resume", "--failed", "skip", "-c", "test $TAR_INDEX != 2", make_tar(4), "-o", "out.tar")
    assert tarproc(*line)[0] == 0
    before = (tmp_path / "out.tar").read_bytes()
    assert (tmp_path / "out.tar.tarproc").exists()
    code, errors = tarproc(*line)
    assert code == 0, errors
    assert (tmp_path / "out.tar").read_bytes() == before
    code, errors = tarproc(*line, "--count", 3)
    assert code == 2
    assert "out.tar exists" in errors
    (tmp_path / "out.tar.tarproc").unlink()
    assert "out.tar exists" in tarproc(*line)[1]


def test_a_failure_that_halts_the_run_is_told_though_an_earlier_sample_still_runs(make_tar, tarproc):
    command = "test $TAR_INDEX != 0 || sleep 100; exit 3"
    code, errors = tarproc("-p", 2, "--halt", "now,fail=1", "-c", command, make_tar(4), "-o", "out.tar")
    assert code == 1
    assert "0001: the command ended with status 3" in errors.splitlines()[0]


def test_nothing_is_written_beside_the_target(make_tar, tarproc, tmp_path):
    assert tarproc("-c", "true", make_tar(3), "-o", "out.tar") == (0, "")
    assert sorted(os.listdir(tmp_path)) == ["in.tar", "out.tar", "scratch"]


@pytest.mark.parametrize(
    "options",
    [
        "",
        "-c true --script /etc/passwd",
        "-c true --halt never",
        "-c true --halt now,fail=1 --failed abort",
        "-c true --failed skip --on-error fail --max-errors 1",
        "-c true --resume",
        "-c true --state x",
        "-c true --timeout 0",
        "-c true -p -1",
        "--server cat --add-log log",
        "--python nothing",
        "-c true -o in.tar",
    ],
)
def test_wrong_command_lines(make_tar, tarproc, tmp_path, options):
    status, errors = tarproc(*options.split(), make_tar(1))
    assert status == 2, errors
    assert "Traceback" not in errors
    assert sorted(os.listdir(tmp_path)) == ["in.tar", "scratch"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KB, and on it a folder."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk]).returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--resume --state disk/state", "disk/state: No space left on device"),
        ("--joblog disk/log", "disk/log: No space left on device"),
        ("--joblog disk/none/log", "disk/none/log: No such file or directory"),
        ("--resume --state disk/none/state", "disk/none/state: No such file or directory"),
        ("--tmpdir disk", "{}/in.tar: 0000: scratch directory: [Errno 28] No space left on device"),
        ("--tmpdir /proc", "/proc: no scratch directory can be made here: No such file or directory"),
    ],
)
def test_a_full_disk_is_an_error_of_one_line(make_tar, tarproc, tmp_path, small_disk, options, message):
    if "/proc" not in options:
        (small_disk / "ballast").write_bytes(bytes(48 << 10))
    line = (
        f"{options} -p 2 --python zeros:of -o out.tar" if "tmpdir" not in options else f"{options} -c true -o out.tar"
    )
    (tmp_path / "zeros.py").write_text("def of(sample):\n    return {**sample, 'zeros.bin': bytes(2000)}\n")
    if options == "--tmpdir disk":
        write_samples([{"__key__": "0000", "bin": bytes(1 << 16)}], str(tmp_path / "in.tar"))
    tar = tmp_path / "in.tar" if options == "--tmpdir disk" else make_tar(400)
    assert tarproc(*line.split(), tar) == (1, f"tarproc: {message.format(tmp_path)}\n")
    assert not (tmp_path / "out.tar").exists()


def test_the_line_of_the_slides(tmp_path, path_with_tools):
    need("gm")
    import numpy as np

    image = np.zeros((300, 400, 3), np.uint8)
    write_samples(({"__key__": f"{i}", "jpg": image, "cls": i} for i in range(3)), str(tmp_path / "small.tar"))
    line = "tarproc -p 5 -c 'ls; gm mogrify -size 256x256 *.jpg -resize 256x256' small.tar > out.tar"
    environment = {**os.environ, "PATH": path_with_tools}
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "sample.cls\nsample.jpg\n" * 3
    resized = line.replace("*.jpg -resize 256x256", "-resize 256x256 *.jpg").replace("out.tar", "resized.tar")
    subprocess.run(["bash", "-c", resized], cwd=tmp_path, env=environment, capture_output=True, check=True)
    for name, shape in (("out.tar", (300, 400, 3)), ("resized.tar", (192, 256, 3))):  # gm heeds what precedes a file
        images = [decode_field("jpg", sample["jpg"], "rgb8") for sample in read_samples(tmp_path / name)]
        assert [image.shape for image in images] == [shape] * 3
