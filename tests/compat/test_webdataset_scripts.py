"""Training as in open_clip and timm: full batches, equal steps on all ranks, every sample accounted for."""

from __future__ import annotations

import io
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from soak import SOAK

from tarshards import ShardWriter

SCRIPTS = Path(__file__).with_name("scripts.py")
SHARDS, EACH = 8, 10


def picture() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (200, 10, 10)).save(stream, "jpeg")
    return stream.getvalue()


@pytest.fixture
def make(tmp_path):
    """Return a function that writes shards with captions, but for the samples *bad*, and returns their expression."""

    def write(bad: range = range(0), *, index: bool = False) -> str:
        with ShardWriter(tmp_path / "set-%04d.tar", max_samples=EACH, index=index, sync=False) as writer:
            for number in range(SHARDS * EACH):
                fields = {"jpg": picture(), "cls": number, "txt": f"a {number}"}
                if number in bad:
                    fields["txt"] = "skip"
                    if number % 3 == 0:
                        fields |= {"jpg": b"no picture"}
                    elif number % 3 == 1:
                        del fields["txt"]
                writer.write({"__key__": f"{number:06d}", **fields})
        return str(tmp_path / f"set-{{0000..{SHARDS - 1:04d}}}.tar")

    return write


@pytest.fixture
def run(tmp_path, python_with_torch) -> Callable[..., list[dict]]:
    """Return a function that runs a script on its ranks, and returns the report of each."""

    def run(name: str, **options) -> list[dict]:
        folder = tmp_path / name
        folder.mkdir()
        settings = {
            "module": "tarshards.webdataset",
            "workers": 2,
            "ranks": 2,
            "size": 5,
            "epochs": 2,
            "lenient": False,
            "context": None,
        }
        settings |= {"samples": SHARDS * EACH, **options}
        path = folder / "settings.json"
        path.write_text(json.dumps(settings))
        ranks = range(settings["ranks"])
        commands = [[python_with_torch, str(SCRIPTS), str(path), str(rank)] for rank in ranks]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        try:
            said = [process.communicate(timeout=90)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [process.returncode for process in processes] == [0] * len(processes), said
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]

    return run


def seen(reports: list[dict], epoch: int) -> Counter[str]:
    return Counter(key for report in reports for batch in report["epochs"][epoch] for key in batch)


def check_batches(report: dict) -> None:
    """All batches are full, all epochs have equally many, and so has the other rank."""
    assert report["equal"]
    assert [[len(batch) for batch in batches] for batches in report["epochs"]] == [[5] * report["steps"]] * 2


ALL = {f"{number:06d}" for number in range(SHARDS * EACH)}


@pytest.mark.parametrize(
    ("script", "lenient", "index", "ranks", "workers"),
    [
        ("clip", False, False, 2, 2),
        *[("clip", False, True, 2, 2), ("clip", False, True, 1, 2)] * (SOAK > 1),
        ("clip", True, False, 2, 2),
        ("timm", False, False, 2, 2),
        ("timm", False, True, 2, 0),
    ],
)
def test_every_sample_comes_once_in_full_batches_and_equal_steps(make, run, script, lenient, index, ranks, workers):
    urls = make(index=index)
    reports = run("job", urls=urls, script=script, lenient=lenient, ranks=ranks, workers=workers)
    for report in reports:
        check_batches(report)
        assert report["steps"] == SHARDS * EACH // 5 // ranks
    assert [seen(reports, epoch) for epoch in range(2)] == [Counter(ALL)] * 2
    assert reports[0]["epochs"][0] != reports[0]["epochs"][1]


def test_workers_that_are_spawned_know_their_rank(make, run):
    """They have no process group to ask, and a launcher that sets variables is not required."""
    reports = run("job", urls=make(), script="clip", context="spawn", epochs=1)
    assert seen(reports, 0) == Counter(ALL)


@pytest.mark.parametrize("script", ["clip", "timm"])
def test_bad_samples_are_left_out_and_batches_stay_full(make, run, script):
    """A shard of bad samples: its worker starts over for want of others, so that the ranks take equal steps."""
    bad = range(12, 24)
    reports = run("job", urls=make(bad), script=script)
    good = {f"{number:06d}" for number in range(SHARDS * EACH) if number not in bad}
    good |= {f"{number:06d}" for number in bad if number % 3 == (2 if script == "clip" else 1)}
    for report in reports:
        check_batches(report)
    for epoch in range(2):
        assert set(seen(reports, epoch)) <= good
    assert len(good - set(seen(reports, 0) | seen(reports, 1))) < 5
    if script == "clip":
        for name in ("filtered", "failed"):
            assert sum(report["counts"][name] for report in reports) > 0


def test_resampled_training_is_endless_and_draws_from_all_shards(make, run):
    reports = run("job", urls=make(), script="clip-resampled", samples=400)
    for report in reports:
        check_batches(report)
        assert report["steps"] == 40
    assert len(seen(reports, 0) | seen(reports, 1)) > SHARDS * EACH * 3 // 4


@pytest.mark.interop
@pytest.mark.parametrize("script", ["clip", "timm"])
def test_webdataset_itself_delivers_the_same_samples(make, run, script):
    pytest.importorskip("webdataset")
    urls = make()
    ours = run("ours", urls=urls, script=script)
    theirs = run("theirs", urls=urls, script=script, module="webdataset")
    assert [seen(ours, epoch) for epoch in range(2)] == [seen(theirs, epoch) for epoch in range(2)]
