"""If two writers would write the same shard at once, the second is refused while the first is open."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from interrupts import interrupted_at
from soak import SOAK

from tarshards import OpenError, ShardWriter, map_shards, read_samples, reshard, write_dataset, write_samples
from tarshards.formats.importing import import_dataset
from tarshards.index.manifests import read_manifest
from tarshards.storage.claims import LOCKS, Claims
from tarshards.write.split import split_samples

PATTERN = "out-%06d.tar"
OTHER = "shard-{shard:06d}.tar"

#: Writes a shard of two samples, begins the next, and goes on with what comes on stdin.
HOLDER = """
import sys
from tarshards import ShardWriter
with ShardWriter(sys.argv[1], max_samples=2, start=int(sys.argv[2])) as writer:
    for number in range(int(sys.argv[3])):
        writer.write({"__key__": f"first{number}", "txt": "first"})
    print("begun", flush=True)
    for line in sys.stdin:
        writer.write({"__key__": line.strip(), "txt": "first"})
"""


def samples(count: int = 6, text: str = "second"):
    return [{"__key__": f"{number:06d}", "txt": text} for number in range(count)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    write_samples(samples(), tmp_path / "in.tar")
    (tmp_path / "rows.csv").write_text("name\n" + "row\n" * 6)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def hold():
    """Return a function that starts a process which writes shards, and waits when it has begun the last of them."""
    started = []

    def begin(pattern: str = PATTERN, start: int = 0, count: int = 3) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, pattern, str(start), str(count)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "begun\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def texts(pattern: str = "out-*.tar") -> set[bytes]:
    return {sample["txt"] for sample in read_samples(pattern)}


def by_shard_writer(pattern=PATTERN, **options):
    with ShardWriter(pattern, **{"max_samples": 2, **options}) as writer:
        for sample in samples():
            writer.write(sample)


def by_upstream_names():
    wds = pytest.importorskip("tarshards.webdataset", exc_type=ImportError)  # which needs torch
    with wds.ShardWriter(PATTERN, maxcount=2) as writer:
        for sample in samples():
            writer.write(sample)


def by_executor(function, *arguments, **options):
    with ThreadPoolExecutor(1) as executor:
        return function(*arguments, executor=executor, **options)


def same(each):
    return each


WRITERS = {
    "ShardWriter": by_shard_writer,
    "ShardWriter, by another spelling": lambda: by_shard_writer(os.path.abspath("out-{shard:06d}.tar")),
    "webdataset.ShardWriter": by_upstream_names,
    "split_samples": lambda: split_samples(samples(), PATTERN, max_samples=2, overwrite=True),
    "write_dataset": lambda: by_executor(write_dataset, samples(), PATTERN),
    "reshard": lambda: by_executor(reshard, "../in.tar", PATTERN, max_samples=2),
    "map_shards": lambda: by_executor(map_shards, same, "../in.tar", PATTERN, progress=False),
    "map_shards, by names": lambda: by_executor(map_shards, same, "../in.tar", "out-000000.tar", progress=False),
    "import_dataset": lambda: by_executor(import_dataset, "../rows.csv", PATTERN, overwrite=True),
}


NEEDS_PYARROW = {"import_dataset": pytest.mark.interop}


@pytest.mark.parametrize("second", [pytest.param(name, marks=NEEDS_PYARROW.get(name, ())) for name in WRITERS])
def test_the_second_writer_is_refused_by_name_while_the_first_lives(hold, second):
    first = hold()
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    with pytest.raises(OpenError, match=rf"out-000000\.tar: .*process {first.pid} on {os.uname().nodename}"):
        WRITERS[second]()
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before
    first.communicate("fourth\nfifth\n", timeout=60)
    assert first.returncode == 0
    assert [sample["__key__"] for sample in read_samples("out.shards.json")] == [
        *("first0", "first1", "first2", "fourth", "fifth")
    ]
    assert not os.path.exists(LOCKS)
    WRITERS[second]()
    assert b"first" not in {sample.get("txt") for sample in read_samples("out-000000.tar")}
    assert not os.path.exists(LOCKS)


@pytest.mark.parametrize("line", ["tarsplit -q -n 2 -o out", f"tarreshard -q -n 2 -o {PATTERN}"])
def test_a_tool_is_refused_too(hold, line, path_with_tools):
    first = hold()
    command = f"{line} --overwrite ../in.tar"
    environment = {**os.environ, "PATH": path_with_tools}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"out-000000.tar: a writer of process {first.pid}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    first.communicate()
    assert texts() == {b"first"}


def test_of_two_tools_that_write_a_file_which_is_not_there_the_second_is_refused(path_with_started_tools):
    environment = {**os.environ, "PATH": path_with_started_tools}
    with subprocess.Popen(["tarcat", "-q", "-", "-o", "all.tar"], stdin=subprocess.PIPE, env=environment) as first:
        deadline = time.monotonic() + 60
        while not os.path.exists(LOCKS) or not Path(LOCKS).read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second = ["tarcat", "-q", "../in.tar", "-o", "all.tar"]
        done = subprocess.run(second, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr.startswith(f"tarcat: all.tar: a writer of process {first.pid} on ")
        write_samples(samples(text="first"), first.stdin)
        first.stdin.close()
        assert first.wait(60) == 0
    assert texts("all.tar") == {b"first"}
    assert os.listdir() == ["all.tar"]


def test_of_many_writers_at_once_one_writes(folder, python_with_torch):
    code = f"""
import sys
from tarshards import ShardWriter, OpenError
sys.stdin.read()
try:
    with ShardWriter({PATTERN!r}, max_samples=2, sync=False) as writer:
        for number in range(20):
            writer.write({{"__key__": str(number), "txt": sys.argv[1]}})
except OpenError as error:
    sys.exit(17)
"""
    for _ in range(3):
        for path in folder.iterdir():
            path.unlink()
        command = [python_with_torch, "-c", code]
        racers = [subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE) for number in range(4)]
        for racer in racers:
            racer.stdin.close()
        ended = [racer.wait(60) for racer in racers]
        assert set(ended) <= {0, 17}
        # A writer that starts after another has ended rewrites the shards; no shard mixes two writers.
        assert len(texts()) == 1
        assert ended[int(texts().pop())] == 0
        assert not os.path.exists(LOCKS)


def test_writers_of_other_shards_of_the_pattern_go_on(hold):
    first = hold(start=0)
    second = hold(start=1000)
    by_shard_writer(start=2000)
    for process in first, second:
        process.communicate()
        assert process.returncode == 0
    shards = [shard.url for shard in read_manifest("out.shards.json")]
    assert shards == [f"out-{number:06d}.tar" for number in (0, 1, 1000, 1001, 2000, 2001, 2002)]
    assert shards == sorted(map(str, Path().glob("*.tar")))
    assert not os.path.exists(LOCKS)


@pytest.mark.parametrize("first", ["its", "that of the others"])
def test_the_manifest_has_the_shards_of_all_writers_in_whichever_order_they_end(first):
    writers = [ShardWriter(PATTERN, max_samples=2, start=start) for start in (0, 10, 20)]
    for writer in writers:
        for sample in samples():
            writer.write(sample)
    for writer in writers if first == "its" else reversed(writers):
        writer.close()
    assert [(shard.url, shard.samples) for shard in read_manifest("out.shards.json")] == [
        (f"out-{start + number:06d}.tar", 2) for start in (0, 10, 20) for number in range(3)
    ]


def test_shards_that_two_writers_begin_elsewhere_are_refused_where_they_meet(hold):
    hold(start=2)
    with pytest.raises(OpenError, match=r"out-000002\.tar: a writer of process"):
        by_shard_writer()
    assert texts("out-00000[01].tar") == {b"second"}
    assert texts("out-000002.tar") == {b"first"}
    hold(OTHER, start=0, count=9)
    with pytest.raises(OpenError, match=r"shard-000003\.tar"):  # which it has written, and left
        by_shard_writer(OTHER, start=3)


def test_a_crash_frees_the_shards_and_the_next_run_leaves_nothing(hold):
    first = hold()
    first.kill()
    first.wait()
    assert os.path.exists(LOCKS)
    by_shard_writer()
    assert texts() == {b"second"}
    assert not os.path.exists(LOCKS)
    assert not list(Path().glob(".*"))


def test_an_interrupted_dataset_is_not_taken_over_from_a_call_that_lives():
    kept = []

    def slow(item):
        if item == 290:
            kept.extend(path.name for path in Path().glob("*.tar"))
            with pytest.raises(OpenError, match="another writer of this process"):
                by_executor(write_dataset, samples(), PATTERN)
            assert {path.name for path in Path().glob("*.tar")} >= set(kept)
        return {"txt": str(item)}

    shards = by_executor(write_dataset, list(range(300)), PATTERN, to_sample=slow, max_bytes=20_000, sync=False)
    assert kept
    assert [int(sample["txt"]) for sample in read_samples(shards)] == list(range(300))
    assert not list(Path().glob(".*"))


@pytest.mark.soak
def test_a_signal_between_any_two_instructions_leaves_no_file_of_locks():
    def claim():
        claims.take("a.tar")
        claims.release()

    number, uninterrupted = 1, 0
    while uninterrupted < 3:
        claims = Claims()
        try:
            interrupted_at(number, claim)
            uninterrupted += 1
        except KeyboardInterrupt:
            uninterrupted = 0
        claims.release()
        assert os.listdir() == [], f"after a signal at instruction {number}"
        number += 7 if SOAK == 1 else 1
    assert number > 500


def test_another_call_with_the_same_tmpdir_keeps_out_of_the_folder_between_the_passes():
    with Claims() as claims:
        os.mkdir("tmp")
        claims.take("tmp/out-000000.tar.reshard")
        with pytest.raises(OpenError, match=r"out-000000\.tar\.reshard: another writer of this process"):
            by_executor(reshard, "../in.tar", f"elsewhere/{PATTERN}", tmpdir="tmp")


def test_series_of_a_split_go_on_beside_those_with_other_values():
    Path("in.tsv").write_text("")

    def route(sample):
        return sample["txt"].decode() if isinstance(sample["txt"], bytes) else sample["txt"]

    def others():
        yield from samples(text="first")
        with pytest.raises(OpenError, match=r"first-000000\.tar: another writer of this process"):
            split_samples(samples(text="first"), "{by}-%06d.tar", max_samples=2, routes={"by": route})
        split_samples(samples(text="second"), "{by}-%06d.tar", max_samples=2, routes={"by": route})

    split_samples(others(), "{by}-%06d.tar", max_samples=2, routes={"by": route})
    assert len(list(Path().glob("*.tar"))) == 6
    assert not os.path.exists(LOCKS)


def test_a_dry_run_claims_nothing(hold):
    hold()
    assert len(split_samples(samples(), PATTERN, max_samples=2, overwrite=True, dry_run=True)) == 3


@pytest.mark.forks
def test_a_process_that_was_forked_is_another_writer_and_holds_nothing_of_its_parent(folder):
    """A worker that outlives its parent must not keep the shards; a copy of the writer must not write them."""
    read, write = os.pipe()
    ending, end = os.pipe()
    parent = os.fork()
    if not parent:
        os.close(end)
        writer = ShardWriter(PATTERN, max_samples=1, sync=False)
        for sample in samples(2, "first"):
            writer.write(sample)
        if os.fork() == 0:
            os.close(read)
            try:
                with pytest.raises(OpenError, match=r"out-000000\.tar: a writer of process"):
                    by_shard_writer()
                os.write(write, b"refused")
                os.read(ending, 1)
            finally:
                os._exit(0)
        os.close(write)
        os.kill(os.getpid(), signal.SIGSTOP)
    os.close(write)
    assert os.read(read, 7) == b"refused"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    by_shard_writer()  # the child is alive
    assert texts() == {b"second"}
    os.close(end)
    assert not os.path.exists(LOCKS)


def test_a_writer_that_has_not_begun_can_be_pickled():
    with pickle.loads(pickle.dumps(ShardWriter(PATTERN))) as writer:
        writer.write(samples()[0])
    assert texts() == {b"second"}


def test_a_writer_that_is_forgotten_frees_its_shards():
    writer = ShardWriter(PATTERN)
    writer.write(samples()[0])
    with pytest.raises(OpenError, match=r"out-000000\.tar: another writer of this process writes it; wait until"):
        by_shard_writer()
    with pytest.warns(RuntimeWarning, match="not closed"):
        del writer
    by_shard_writer()
    assert not os.path.exists(LOCKS)


def test_a_failing_writer_frees_its_shards():
    def fail():
        with ShardWriter(PATTERN) as writer:
            for sample in [*samples(), *samples()]:
                writer.write(sample)

    with pytest.raises(ValueError, match="already in the shard"):
        fail()
    assert not os.path.exists(LOCKS)
    by_shard_writer()


def test_where_files_cannot_be_locked_a_warning_says_so(monkeypatch, caplog):
    def none(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", none)
    by_shard_writer()
    assert [record.getMessage().partition(".tarshards")[2] for record in caplog.records] == [
        ".lock: No locks available; nothing tells whether others write under the same pattern"
    ]
    assert texts() == {b"second"}
    assert not os.path.exists(LOCKS)


@pytest.mark.parametrize("target", ["no/folder/out-%d.tar", "/dev/null%d/x.tar", "a\0-%d.tar", "\ud800-%d.tar"])
def test_where_nothing_can_be_written_the_writer_says_so(target):
    with pytest.raises(OpenError, match=r"No such file|Not a directory|ermission|null (byte|character)|surrogates"):
        by_shard_writer(target)


def test_a_line_that_is_damaged_hides_no_claim(hold):
    first = hold()
    with open(LOCKS, "a", errors="surrogateescape") as file:
        file.write("\n7\n1 2\n\udcff 1 2\n")
    with pytest.raises(OpenError, match=f"process {first.pid} on"):
        by_shard_writer()
    Path(LOCKS).write_bytes(b"")
    with pytest.raises(OpenError, match="a writer of another process writes it"):
        by_shard_writer()


@pytest.mark.soak
def test_claims_come_and_go_without_a_race(folder, python_with_torch):
    """The file of locks is removed and made again all the time: nobody is refused, and no name is held by two."""
    code = """
import os, sys, time
from tarshards import OpenError
from tarshards.storage.claims import Claims
own, end, refused = sys.argv[1], time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < end:
    with Claims() as claims:
        claims.take("own-" + own)
        try:
            claims.take("shared")
        except OpenError:
            refused += 1
            continue
        os.close(os.open("held", os.O_CREAT | os.O_EXCL))
        os.unlink("held")
print(refused)
"""
    command = [python_with_torch, "-c", code]
    seconds = "3" if SOAK > 1 else "0.25"
    racers = [subprocess.Popen([*command, name, seconds], stdout=subprocess.PIPE) for name in "abcd"]
    refused = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4
    assert sum(refused)
    assert list(folder.iterdir()) == []


def by_tool(name: str, *arguments: str) -> None:
    main = importlib.import_module(f"tarshards.cli.{name}").main
    done = CliRunner().invoke(main, ["-q", "../in.tar", "-o", *arguments])
    if done.exit_code:
        raise OpenError(done.output)


LATE = {
    "ShardWriter, start=": lambda: by_shard_writer(start=1),
    "split_samples": lambda: split_samples(samples(), PATTERN, max_samples=2),
    "reshard": lambda: by_executor(reshard, "../in.tar", PATTERN, max_samples=2, overwrite=False),
    "import_dataset": lambda: by_executor(import_dataset, "../rows.csv", PATTERN),
    "tarcat": lambda: by_tool("tarcat", "out-000000.tar"),
    "tarreshard": lambda: by_tool("tarreshard", PATTERN, "-n", "2", "-j", "1"),
}


@pytest.mark.parametrize("second", [pytest.param(name, marks=NEEDS_PYARROW.get(name, ())) for name in LATE])
def test_what_another_writer_has_made_just_before_a_claim_is_not_replaced(monkeypatch, second):
    take = Claims.take

    def take_late(claims, url):
        monkeypatch.setattr(Claims, "take", take)
        with ShardWriter(PATTERN, max_samples=2) as writer:
            for sample in samples(text="first"):
                writer.write(sample)
        take(claims, url)

    monkeypatch.setattr(Claims, "take", take_late)
    with pytest.raises(OpenError, match=r"out-00000[01]\.tar.* exists"):
        LATE[second]()
    assert len(list(read_samples("out-*.tar"))) == 6
    assert texts() == {b"first"}
    assert not list(Path().glob(".*"))


def test_a_later_shard_that_exists_stops_a_reshard_and_the_next_call_too():
    write_samples(samples(text="first"), "out-000002.tar")
    for _ in range(2):
        with pytest.raises(OpenError, match=r"out-000002\.tar: the file exists; --overwrite replaces it"):
            by_executor(reshard, "../in.tar", PATTERN, max_samples=2, overwrite=False)
    assert sorted(os.listdir()) == ["out-000002.tar"]
    by_executor(reshard, "../in.tar", PATTERN, max_samples=2)
    assert texts() == {b"second"}


def test_writers_that_end_at_once_have_all_their_shards_in_the_manifest():
    def map_one(number: int) -> None:
        map_shards(same, "../in.tar", f"out-{number:06d}.tar", executor=threads, progress=False)

    with ThreadPoolExecutor(4) as threads, ThreadPoolExecutor(8) as callers:
        list(callers.map(map_one, range(24)))
    assert len(read_manifest("out.shards.json")) == 24
