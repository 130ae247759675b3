"""Files are flushed before they are renamed, and the name by the end of the call; without sync nothing waits."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from failing_close import fail_to_close
from tool_lines import OTHERS, ROOT, WRITING, command_of, make_inputs

from tarshards import Catalog, ShardWriter, Stream, TarWriter, open_shard, open_url, write_dataset, write_samples
from tarshards.errors import OpenError, SampleError, ShardIndexError, TarError
from tarshards.formats.croissant import write_card
from tarshards.formats.exporting import export_dataset
from tarshards.formats.importing import import_dataset
from tarshards.index.build import build_index
from tarshards.index.energon import export_energon
from tarshards.index.manifests import Writing, update_manifests
from tarshards.index.refresh import export_indexes, refresh_indexes
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.storage.location import Location
from tarshards.storage.markers import Marker
from tarshards.verbs.repair import repair_shards
from tarshards.view.contact_sheet import write_contact_sheet
from tarshards.view.static_page import write_static_page
from tarshards.write.map import map_shards
from tarshards.write.reshard import reshard
from tarshards.write.split import split_samples

SAMPLES = [{"__key__": f"{i:03d}", "txt": b"text", "cls": b"%d" % (i % 3)} for i in range(9)]


@pytest.fixture
def events(tmp_path_factory, monkeypatch):
    """Return a function that lists the renames and flushes of this process and of those that it forks, in order."""
    log = tmp_path_factory.mktemp("events") / "events"
    descriptor = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    fsync, replace = os.fsync, os.replace

    def note(*event):
        os.write(descriptor, json.dumps(event).encode() + b"\n")

    def noting_fsync(file):
        number = file if isinstance(file, int) else file.fileno()
        fsync(file)
        note("fsync", os.readlink(f"/proc/self/fd/{number}"), os.fstat(number).st_size)

    def noting_replace(source, target, **options):
        size = os.stat(source).st_size
        replace(source, target, **options)
        note("replace", os.path.realpath(source), os.path.realpath(target), size)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    yield lambda: [json.loads(line) for line in log.read_text().splitlines()]
    os.close(descriptor)


def check(events, sync, *, at_least=1):
    """Look at the flushes around each rename; nothing may be written to the file after its own."""
    renames = [(i, *event[1:]) for i, event in enumerate(events) if event[0] == "replace"]
    assert len(renames) >= at_least
    if not sync:
        assert [event for event in events if event[0] == "fsync"] == []
        return
    for place, temporary, target, size in renames:
        assert ["fsync", temporary, size] in events[:place], f"{target} may be zeros"
        folder = os.path.dirname(target)
        assert any(event[:2] == ["fsync", folder] for event in events[place:]), f"{target} may have its old content"


@pytest.fixture
def shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_inputs(tmp_path)
    return "in-{0..2}.tar"


def to_a_url(sync):
    with open_url("out", "wb", sync=sync) as stream:
        stream.write(b"data")


def to_a_compressed_shard(sync):
    with open_shard("out.tar.zst", "wb", sync=sync) as stream:
        stream.write(bytes(10240))


def one_shard(sync):
    with TarWriter("out.tar", sync=sync) as writer:
        writer.write(SAMPLES[0])


def several_shards(sync):
    with ShardWriter("out-%d.tar", max_samples=4, sync=sync) as writer:
        for sample in SAMPLES:
            writer.write(sample)


def a_replaced_shard(sync):
    """Its counts are removed from the manifest in.shards.json, which is written too."""
    write_samples(SAMPLES, "in-0.tar", sync=sync)


def a_catalog(sync):
    catalog = Catalog(Location("out.yaml", sync=sync))
    catalog.add("all@1", {"all": "in.shards.json"})
    return catalog


CALLS = {  # the function, and how many files it renames
    to_a_url: 1,
    to_a_compressed_shard: 1,
    one_shard: 1,
    several_shards: 7,
    a_replaced_shard: 2,
    lambda sync: write_samples(SAMPLES, "out.tar", sync=sync): 1,
    lambda sync: write_dataset(SAMPLES, "out-%d.tar", executor=ThreadPoolExecutor(1), sync=sync): 4,
    lambda sync: map_shards(list, "in-{0..2}.tar", "out-%d.tar", progress=False, sync=sync): 11,
    lambda sync: reshard("in-{0..2}.tar", "out-%d.tar", shards=2, sync=sync): 11,
    lambda sync: split_samples(SAMPLES, Location("out-%d.tar", sync=sync), max_samples=5, index=True): 5,
    lambda sync: build_index("in-0.tar").save(Location("in-0.tar", sync=sync)): 1,
    lambda sync: list(refresh_indexes(["in-0.tar"], crc=True, how=Writing(sync=sync))): 1,
    lambda sync: list(export_indexes(["in-0.tar"], "dali", how=Writing(sync=sync))): 1,
    lambda sync: list(export_indexes(["in-0.tar"], "tar.idx", how=Writing(sync=sync))): 1,
    lambda sync: list(export_energon(["in-0.tar"], how=Writing(sync=sync))): 4,
    lambda sync: list(update_manifests([], "out.shards.json", how=Writing(sync=sync))): 1,
    lambda sync: Marker(Location("deep/out.done", sync=sync)).write({}): 1,
    lambda sync: import_dataset("rows.jsonl", "out-%d.tar", sync=sync): 6,
    lambda sync: export_dataset("in-{0..2}.tar", "out-%d.jsonl", sync=sync): 7,
    lambda sync: export_dataset("in-{0..2}.tar", "out", sync=sync): 22,
    lambda sync: write_contact_sheet(SAMPLES, Location("out.html", sync=sync), title=""): 1,
    lambda sync: write_static_page("in-{0..2}.tar", Location(".", sync=sync)): 1,
    lambda sync: repair_shards(["in-0.tar"], Location("out.tar", sync=sync)): 1,
    lambda sync: write_card(Location("out.json", sync=sync), {"all": "in-0.tar"}, name="all"): 1,
    lambda sync: a_catalog(sync).save(): 1,
}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_functions(shards, events, call, sync):
    call(sync=sync)
    check(events(), sync, at_least=CALLS[call])


def contents(folder="."):
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def written_by(call):
    """Return the names of the first and the last file that *call* writes, of each suffix."""
    Path("whole").mkdir()
    os.chdir("whole")
    make_inputs(Path())
    before = contents()
    call()
    names = sorted(name for name, content in contents().items() if before.get(name) != content)
    kinds = {os.path.splitext(name)[1]: name for name in reversed(names)}
    os.chdir("..")
    return sorted({*kinds.values(), *names[-1:]})


def check_that_none_is_named(name, before):
    assert contents().get(name) in (None, before.get(name))
    assert f".{name}.0.tmp" not in contents()


@pytest.mark.parametrize("call", CALLS)
def test_a_file_that_could_not_be_closed_does_not_get_its_name(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    for name in written_by(partial(call, sync=False)):
        (tmp_path / f"not {name}").mkdir()
        os.chdir(tmp_path / f"not {name}")
        make_inputs(Path())
        before = contents()
        with monkeypatch.context() as patched:
            fail_to_close(patched, f"/{name}", f"/.{name}.0.tmp")
            with pytest.raises(OpenError, match="Disk quota exceeded"):  # noqa: PT012
                for outcome in call(sync=False):
                    raise outcome.error
        check_that_none_is_named(name, before)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_shard_that_is_not_on_the_disk_is_not_finished(tmp_path, monkeypatch, number):
    """Its error is raised by the next write, or by close if it is the last; afterwards, nothing is written."""
    fsync, finished = os.fsync, []

    def failing_fsync(file):
        if f".s-{number}.tar" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(file)

    monkeypatch.setattr(os, "fsync", failing_fsync)
    options = {"max_samples": 4, "on_finish": lambda name, _: finished.append(os.path.basename(name))}
    writer = ShardWriter(tmp_path / "s-%d.tar", **options)
    with pytest.raises(OpenError, match=rf"/s-{number}\.tar: Input/output error$"):  # noqa: PT012
        for sample in SAMPLES:
            writer.write(sample)
        writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(SAMPLES[-1])
    writer.close()
    names = [f"s-{i}.tar" for i in range(number)]
    assert [os.path.basename(name) for name in writer.shards] == finished == names
    assert sorted(os.listdir(tmp_path)) == sorted(names + [f"{name}.index" for name in names])


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_shard_that_could_not_be_written_is_not_finished(tmp_path, monkeypatch, error):
    """Not even if close follows, as in a ``finally``."""
    writer = ShardWriter(tmp_path / "s-%d.tar", max_samples=4)
    for sample in SAMPLES[:5]:
        writer.write(sample)

    def fail(data):
        raise error

    monkeypatch.setattr(writer._writer._stream, "_write", fail)
    with pytest.raises((OpenError, KeyboardInterrupt)):
        writer.write(SAMPLES[5])
    with pytest.raises(ValueError, match="closed"):
        writer.write(SAMPLES[6])
    writer.close()
    assert [os.path.basename(name) for name in writer.shards] == ["s-0.tar"]
    assert sorted(os.listdir(tmp_path)) == ["s-0.tar", "s-0.tar.index"]


def test_jobs_wait_for_their_plan(shards, events):
    JobFolder("job").write("../../out.json", "{}")
    check(events(), True)


def test_what_a_resharding_resumes_from_is_on_the_disk_too(shards, events):
    reshard(shards, "out-%d.tar", shards=1)
    check(events(), True)
    renamed = {os.path.basename(event[2]) for event in events() if event[0] == "replace"}
    assert {f"scattered-00000{i}.data" for i in range(3)} <= renamed


QUARANTINE = ("tarcat", "{0}in-0.tar -f missing --on-error quarantine=bad.tar -o out.tar")


def test_no_tool_is_forgotten():
    assert WRITING.keys() | OTHERS == {path.name for path in (ROOT / "bin").iterdir()}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(("tool", "line"), [*WRITING.items(), QUARANTINE], ids=lambda value: value.split()[0])
def test_tools(shards, events, monkeypatch, tool, line, sync):
    monkeypatch.setattr(sys, "argv", [tool])
    with suppress(SystemExit):
        command_of(tool).main([*line.format("").split(), *([] if sync else ["--no-sync"])])
    check(events(), sync)


def test_spilled_data_waits_for_nothing(tmp_path, events, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_samples([{"__key__": f"{i}", "txt": bytes(10_000)} for i in range(300, 0, -1)], "in.tar", sync=False)
    monkeypatch.setattr(sys, "argv", ["tarsort"])
    command_of("tarsort").main(["in.tar", "-M", "1MB", "-o", "out.tar"])
    flushed = [os.path.basename(path) for kind, path, *_ in events() if kind == "fsync"]
    assert flushed == [".out.tar.0.tmp", os.path.basename(tmp_path)]


def test_names_are_given_in_one_place():
    calls = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tarshards").rglob("*.py")
        if re.search(
            r"\bos\.(replace|rename|link)\(|\.(replace|rename)\(\w*(path|target)\w*\)$", path.read_text(), re.M
        )
    }
    # Nothing waits for the disk in a cache: a block that a power loss has damaged is fetched again.
    assert calls == {"tarshards/storage/local.py", "tarshards/storage/cache.py"}


@pytest.mark.parametrize("length", [0, 1, 511, 512, 1024, 1536, 10240, 65536, 66560, 200_000, None])
def test_a_shard_of_zeros_is_no_empty_dataset(shards, length):
    """512 and 1,024 zeros are an empty archive, so there only an index or a manifest tells."""
    Path("in-0.tar").write_bytes(bytes(os.path.getsize("in-0.tar") if length is None else length))
    for options in {}, {"index": False}:
        for spec in "in.shards.json", *(["in-0.tar"] if not options or length not in (512, 1024) else []):
            with pytest.raises((TarError, SampleError, ShardIndexError), match=r"in-0\.tar"):
                Stream.from_shards(spec, **options).collect()
