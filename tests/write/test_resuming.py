"""Killed runs resume, also those begun by an earlier version.

`begun.tar.gz` is what killed runs of earlier versions left, whose archives end with two blocks of zeros. Each had made
its first output; `second` had made the pieces between the passes, and two of its three shards; `sized` the first of
three.
"""

import os
import tarfile
from functools import partial
from pathlib import Path

import pytest
from inline import Inline
from soak import SOAK

from tarshards import IndexedShards, map_shards, read_samples, reshard, write_dataset
from tarshards.formats.exporting import export_dataset
from tarshards.formats.importing import import_dataset
from tarshards.run.jobs.job_plan import make_plan
from tarshards.run.jobs.worker import Worker

IN, REMOTE = "in-{0..1}.tar", "memory://begun/in-{0..1}.tar"
INLINE = Inline()


def items():
    for number in range(6):
        yield {"__key__": f"{number}", "txt": f"item {number}"}


def by_map():
    same = lambda samples: samples  # noqa: E731
    same.__qualname__ = "<lambda>.<locals>.<lambda>"  # the name in the marker of what cannot be pickled
    map_shards(same, IN, "mapped-%d.tar", executor=INLINE, progress=False)


def by_job():
    plan = make_plan(["cp", "{1}", "{2}"], inputs=IN, outputs="copied-{0..1}.tar")
    with Worker(plan, run="run", owner="owner") as worker:
        assert [worker.run(item).status for item in plan.items] == [0, 0]


def by_reshard(output):
    reshard(IN, output, seed=1, max_samples=2, executor=INLINE)


def by_import():
    import_dataset("memory://begun/rows-{0..1}.jsonl", "imported-%d.tar", max_bytes=100, executor=INLINE)


RUNS = {
    "mapped-0.tar mapped-0.tar.index": by_map,
    "second-0.tar second-0.tar.index second-1.tar second-1.tar.index": lambda: by_reshard("second-%d.tar"),
    "imported-0.tar imported-0.tar.index": by_import,
    "exported-0.jsonl": lambda: export_dataset(REMOTE, "exported-%d.jsonl", executor=INLINE),
    "folder/00.txt folder/02.cls": lambda: export_dataset(REMOTE, "folder", executor=INLINE),
    "written-0.tar written-0.tar.index": lambda: write_dataset(
        items(), "written-%d.tar", max_bytes=4096, executor=INLINE
    ),
    "copied-0.tar": by_job,
}


@pytest.fixture(autouse=True)
def begun(tmp_path, monkeypatch):
    import fsspec

    monkeypatch.chdir(tmp_path)
    with tarfile.open(Path(__file__).parent / "begun.tar.gz") as archive:
        archive.extractall(".", filter="data")
    for path in tmp_path.glob("*-?.*"):
        if path.name.startswith(("in-", "rows-")):
            fsspec.filesystem("memory").pipe(f"/begun/{path.name}", path.read_bytes())


def outputs(series):
    """Return the files of a run, less those that say when and where it was."""
    found = [path for path in Path().rglob("*") if str(path).startswith((series, f".{series}")) and path.is_file()]
    return {str(path): path.read_bytes() for path in found if path.suffix != ".done" and ".report" not in path.name}


def samples(series):
    """Return the samples of the shards of a run, in order; those that its manifest lists are read by their indexes."""
    shards = sorted(str(path) for path in Path().glob(f"{series}*.tar"))
    found = [{**sample, "__url__": ""} for shard in shards for sample in read_samples(shard)]
    if os.path.exists(manifest := f"{series[: series.index('-')] if '-' in series else series}.shards.json"):
        assert [{**sample, "__url__": ""} for sample in IndexedShards(manifest)] == found
    return found


@pytest.mark.parametrize(("kept", "run"), RUNS.items(), ids=[names.partition("-")[0][:8] for names in RUNS])
def test_what_an_earlier_version_made_is_kept(caplog, kept, run):
    before = {name: os.open(name, os.O_RDONLY) for name in kept.split()}  # so that no inode is used again
    run()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (run is not by_job)  # the tool tells it
    did_record_inputs = kept.startswith(("imported", "exported", "folder"))
    for line in told:
        assert " kept from an earlier run" in line
        assert ("by an earlier release" in line) is not did_record_inputs
    for name, descriptor in before.items():
        assert os.path.samestat(os.stat(name), os.fstat(descriptor)), name
        os.close(descriptor)
    series = kept[:6]
    resumed, entries = outputs(series), samples(series)
    assert not [path for path in resumed if path.endswith((".begun", ".writing", ".tmp"))]
    for path in Path().rglob("*"):
        if str(path).startswith(series) and path.is_file():
            path.unlink()
    run()
    assert samples(series) == entries
    if not entries:
        assert outputs(series) == resumed


def test_the_first_pass_of_an_earlier_version_is_kept():
    first = Path("in-0.tar").read_bytes()
    Path("in-0.tar").write_bytes(bytes(len(first)))  # which is not read again
    by_reshard("first-%d.tar")
    assert not os.path.exists("first-0.tar.reshard")
    Path("in-0.tar").write_bytes(first)
    keys = sorted(sample["__key__"] for sample in read_samples(IN))
    assert sorted(sample["__key__"] for sample in read_samples("first-{0..2}.tar")) == keys


def test_shards_that_ended_at_other_samples_are_not_kept():
    """The size of a shard does not include the same zeros at its end."""
    run = partial(reshard, IN, "sized-%d.tar", seed=1, max_bytes=6000, executor=INLINE)
    run()
    resumed = outputs("sized")
    assert sorted(sample["__key__"] for sample in samples("sized")) == ["00", "01", "02", "10", "11", "12"]
    for name in resumed:
        os.unlink(name)
    run()
    assert outputs("sized") == resumed


@pytest.mark.soak
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(("series", "run"), [("mapped", by_map), ("third", lambda: by_reshard("third-%d.tar"))])
def test_killed_at_any_step_the_next_run_goes_on_to_the_same_bytes(kill_at, series, run, place):
    for path in Path().glob(f"{series}*"):
        path.unlink()
    run()
    whole = outputs(series)
    for step in range(0, 200, 1 if SOAK > 1 else 5):
        for path in sorted(Path().rglob("*"), reverse=True):
            if str(path).startswith((series, f".{series}")):
                path.rmdir() if path.is_dir() else path.unlink()
        if kill_at(run, step, place) == 0:
            break
        run()
        assert outputs(series) == whole, step
        assert not os.path.exists(".tarshards.lock")
    assert step > 5
