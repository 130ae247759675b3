"""A repeated key is an error of its sample, handled by --on-error; the error names both shards and a remedy."""

from __future__ import annotations

import os
import subprocess

import pytest

from tarshards import read_samples, write_samples

LINES = {
    "tarcat": "tarcat -q a.tar b.tar -o out.tar",
    "tarpcat": "tarpcat -q -p 1 a.tar b.tar -o out.tar",
    "tarsort": "tarsort -q a.tar b.tar -o out.tar",
    "targrep": "targrep -q . a.tar b.tar -o out.tar",
    "tarmix": "tarmix -q a.tar b.tar --until last -o out.tar",
    "tarsplit": "tarsplit -q -n 9 a.tar b.tar -o out-%d.tar",
    "tarproc": "tarproc -q -c 'echo $TAR_SHARD >>'$PWD/ran a.tar b.tar -o out.tar",
}


@pytest.fixture
def run(tmp_path, path_with_tools):
    """Return a function that runs a line of bash beside a.tar and b.tar, which share the key 2."""
    for name, keys in (("a", "12"), ("b", "23")):
        samples = ({"__key__": key, "txt": f"{key} of {name}"} for key in keys)
        write_samples(samples, str(tmp_path / f"{name}.tar"))

    def run(line: str) -> tuple[int, str]:
        environment = {**os.environ, "PATH": path_with_tools}
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr

    return run


@pytest.mark.parametrize("tool", [tool for tool in LINES if tool != "tarproc"])
def test_the_error_names_both_shards(run, tmp_path, tool):
    code, errors = run(LINES[tool])
    assert code == 1
    assert "2: this key is already in the shard: it comes from " in errors
    assert "a.tar" in errors
    assert "b.tar" in errors
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("tool", LINES)
def test_it_is_left_out_and_counted(run, tmp_path, tool):
    code, errors = run(f"{LINES[tool]} {'--failed' if tool == 'tarproc' else '--on-error'} skip")
    assert code == 0, errors
    assert "failed           1 sample" in errors
    (out,) = tmp_path.glob("out*.tar")
    assert sorted(sample["__key__"] for sample in read_samples(out)) == ["1", "2", "3"]


def test_the_quarantine_takes_one_sample_of_a_key(run, tmp_path):
    code, errors = run("tarcat -q a.tar b.tar b.tar b.tar -o out.tar --on-error quarantine=bad.tar")
    assert code == 0, errors
    assert [sample["__key__"] for sample in read_samples(tmp_path / "bad.tar")] == ["2", "3"]
    assert errors.count("not in the quarantine: bad.tar: ") == 3


def test_tarproc_keeps_all_other_results(run, tmp_path):
    code, errors = run(LINES["tarproc"])
    assert code == 1
    first, last = errors.splitlines()
    place = "it comes from a.tar, and again from b.tar; --rekey makes new keys"
    assert first == f"tarproc: out.tar: 2: this key is already in the shard: {place}"
    assert last == "tarproc: out.tar: 1 result could not be written; all others are in this file"
    found = {sample["__key__"]: sample["txt"] for sample in read_samples(tmp_path / "out.tar")}
    assert found == {"1": b"1 of a", "2": b"2 of a", "3": b"3 of b"}
    assert (tmp_path / "ran").read_text().split() == ["a.tar", "a.tar", "b.tar", "b.tar"]


def test_tarproc_makes_new_keys(run, tmp_path):
    assert run(f"{LINES['tarproc']} --rekey '{{shard}}/{{index}}'") == (0, "")
    keys = [sample["__key__"] for sample in read_samples(tmp_path / "out.tar")]
    assert keys == ["a/0", "a/1", "b/2", "b/3"]
