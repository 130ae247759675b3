"""map_shards: each shard once, complete and reported, with any executor and any kill."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from pickle import dumps

import pytest
import range_server
from inline import Inline

from tarshards import Ledger, OpError, TarError, TarWriter, expand_urls, read_samples
from tarshards.index.build import build_index
from tarshards.index.manifests import write_manifest
from tarshards.index.sidecar import Index
from tarshards.parallel.process_pool import ProcessPool
from tarshards.storage.manifest import Shard
from tarshards.storage.markers import digest_of
from tarshards.write.map import map_shards
from tarshards.write.once import output_names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shards(folder):
    for number in range(8):
        with TarWriter(f"in-{number}.tar") as writer:
            for i in range(number + 1):
                writer.write({"__key__": f"{number}-{i}", "txt": f"text {number} {i}"})
    return "in-{0..7}.tar"


def upper(samples):
    for sample in samples:
        yield {**sample, "up": sample["txt"].upper()}


def upper_one(sample):
    return {"up": sample["txt"].upper()}


def even_ones(sample):
    return sample if sample["__key__"].endswith(("0", "2", "4", "6")) else None


def crash(samples, how, shard):
    for sample in samples:
        if sample["__key__"].startswith(f"{shard}-"):
            if how == "exit":
                os._exit(9)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "segfault":
                faulthandler.disable()  # whose words are not ours
                os.kill(os.getpid(), signal.SIGSEGV)
            raise ValueError("no")
        yield sample


def fail_on_odd(sample):
    if sample["__key__"][-1] in "13579":
        raise ValueError("odd")
    return sample


def fail_once(samples, shard):
    name = Path(f"failed-{shard}")
    for sample in samples:
        if sample["__key__"].startswith(f"{shard}-") and not name.exists():
            name.touch()
            raise ValueError("once")
        yield sample


def fail_otherwise(samples, shard):
    """Fail on one shard, and the first time for another reason."""
    samples = list(samples)
    if samples[0]["__key__"].startswith(f"{shard}-"):
        if not os.path.exists("failed"):
            Path("failed").touch()
            raise RuntimeError("the cause")
        raise RuntimeError("a consequence")
    yield from samples


def keys(spec) -> list[str]:
    return [sample["__key__"] for sample in read_samples(spec)]


@pytest.mark.parametrize("make_executor", [None, lambda: ProcessPool(2), lambda: ThreadPoolExecutor(3)])
def test_every_shard_becomes_its_output(shards, make_executor):
    executor = make_executor() if make_executor else None
    reports = map_shards(upper, shards, "d/out-{shard:03d}.tar", executor=executor)
    if executor:
        executor.shutdown()
    assert [(row.input, row.output) for row in reports] == [(f"in-{i}.tar", f"d/out-{i:03d}.tar") for i in range(8)]
    assert [(row.samples_in, row.samples_out, row.failed) for row in reports] == [(i + 1, i + 1, 0) for i in range(8)]
    for i, row in enumerate(reports):
        assert row.bytes == os.path.getsize(row.output)
        assert [sample["up"] for sample in read_samples(row.output)] == [f"TEXT {i} {j}".encode() for j in range(i + 1)]
        assert Index.load(row.output).pack() == build_index(row.output).pack()
    rows = [json.loads(line) for line in Path("d/out.report.jsonl").read_text().splitlines()]
    assert [row["output"] for row in rows] == [row.output for row in reports]
    manifest = json.loads(Path("d/out.shards.json").read_text())
    assert [(entry["url"], entry["nsamples"]) for entry in manifest["shardlist"]] == [
        (f"out-{i:03d}.tar", i + 1) for i in range(8)
    ]
    assert keys("d/out.shards.json") == keys(shards)


def test_the_outputs_do_not_depend_on_how_processes_begin(shards, start_method):
    map_shards(upper, shards, "out-{shard:03d}.tar")
    for i in range(8):
        assert [sample["up"] for sample in read_samples(f"out-{i:03d}.tar")] == [
            f"TEXT {i} {j}".encode() for j in range(i + 1)
        ]


def test_concatenated_inputs(shards):
    Path("all.tar").write_bytes(Path("in-3.tar").read_bytes() + Path("in-4.tar").read_bytes())
    with pytest.raises(TarError, match="members after the end"):
        map_shards(upper, "all.tar", "out-{0..0}.tar")
    write_manifest("all.shards.json", [Shard("all.tar", concatenated=True)])
    for inputs, options in ("all.tar", {"concatenated": True}), ("all.shards.json", {}):
        [report] = map_shards(upper, inputs, "out-{0..0}.tar", resume=False, **options)
        assert (report.samples_in, report.samples_out) == (9, 9)


def test_by_samples(shards):
    map_shards(upper_one, shards, "out-{0..7}.tar", per_sample=True)
    assert {tuple(sample) for sample in read_samples("out-{0..7}.tar")} == {("__key__", "__url__", "up")}
    reports = map_shards(even_ones, shards, "even-{0..7}.tar", per_sample=True)
    assert [(row.samples_in, row.samples_out) for row in reports] == [(i + 1, i // 2 + 1) for i in range(8)]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "in-3.tar: its process ended with status 9"),
        ("kill", "in-3.tar: its process was killed by signal 9"),
        ("segfault", "in-3.tar: its process was killed by signal 11"),
        ("raise", "in-3.tar: ValueError: no"),
    ],
)
def test_a_shard_that_crashes_is_named_and_the_rest_is_done(shards, how, message):
    errors = []
    reports = map_shards(partial(crash, how=how, shard=3), shards, "out-{0..7}.tar", on_error=errors.append)
    assert [str(error) for error in errors] == [message]
    assert [row.error for row in reports] == [message if i == 3 else None for i in range(8)]
    assert sorted(path.name for path in Path().glob("out-*.tar")) == [f"out-{i}.tar" for i in range(8) if i != 3]
    with pytest.raises(OpError, match=message):
        map_shards(partial(crash, how=how, shard=3), shards, "out-{0..7}.tar")


def test_a_failure_is_tried_again(shards):
    reports = map_shards(partial(fail_once, shard=2), shards, "out-{0..7}.tar", retries=1)
    assert [row.error for row in reports] == [None] * 8
    assert keys("out-{0..7}.tar") == keys(shards)


def test_the_first_failure_of_a_shard_is_told(shards):
    with pytest.raises(OpError, match=r"in-3.tar: RuntimeError: the cause"):
        map_shards(partial(fail_otherwise, shard=3), shards, "out-{0..7}.tar", retries=2)


def test_samples_that_fail_are_counted_and_told(shards):
    with pytest.raises(OpError, match=r"in-1\.tar: 1-1: ValueError: odd"):
        map_shards(fail_on_odd, "in-1.tar", "x.tar", per_sample=True)
    ledger = Ledger(max_errors=float("inf"))
    reports = map_shards(fail_on_odd, shards, "out-{0..7}.tar", per_sample=True, on_error=ledger)
    assert [(row.samples_in, row.samples_out, row.failed) for row in reports] == [
        (i + 1, i // 2 + 1, (i + 1) // 2) for i in range(8)
    ]
    assert {(entry.shard, entry.key, entry.reason) for entry in ledger.quarantined} == {
        (f"in-{i}.tar", f"{i}-{j}", "ValueError: odd") for i in range(8) for j in range(1, i + 1, 2)
    }


@pytest.mark.parametrize("per_sample", [True, False])
def test_damage_never_shortens_an_output(shards, per_sample):
    data = Path("in-5.tar").read_bytes()
    Path("in-5.tar").write_bytes(data[:4000])
    function = upper_one if per_sample else upper
    with pytest.raises(TarError, match=r"in-5\.tar: offset"):
        map_shards(function, shards, "out-{0..7}.tar", per_sample=per_sample)
    errors = []
    reports = map_shards(function, shards, "out-{0..7}.tar", per_sample=per_sample, on_error=errors.append)
    assert [row.output for row in reports if row.error] == ["out-5.tar"]
    assert not Path("out-5.tar").exists()
    assert len(errors) == 1


def test_resuming_does_only_what_is_not_done(shards):
    first = map_shards(upper, shards, "out-{0..7}.tar")
    before = {path.name: path.stat().st_mtime_ns for path in Path().glob("out-*.tar")}
    Path("out-2.tar").unlink()
    Path("out-4.tar.done").unlink()
    Path("out-6.tar.done").write_text("{")
    again = map_shards(upper, shards, "out-{0..7}.tar")
    assert [row.resumed for row in again] == [i not in (2, 4, 6) for i in range(8)]
    changed = {path.name for path in Path().glob("out-*.tar") if path.stat().st_mtime_ns != before[path.name]}
    assert changed == {"out-2.tar", "out-4.tar", "out-6.tar"}
    assert [(row.samples_out, row.bytes) for row in again] == [(row.samples_out, row.bytes) for row in first]
    assert not any(row.resumed for row in map_shards(upper, shards, "out-{0..7}.tar", resume=False))
    assert not any(row.resumed for row in map_shards(partial(crash, how="", shard=9), shards, "out-{0..7}.tar"))


def mapped(function, shards="in-{0..7}.tar", **options) -> list[int]:
    """Map the shards; return the numbers of those that were kept."""
    options = {"executor": Inline(), "per_sample": True, **options}
    rows = map_shards(function, shards, f"out-{{0..{len(expand_urls(shards)) - 1}}}.tar", **options)
    return [number for number, row in enumerate(rows) if row.resumed]


def add(name: str, body: str, **values):
    """A function of this module of this name with this body."""
    exec(f"def {name}(sample):\n    {body}\n", values)
    values[name].__module__ = __name__
    return values[name]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (add("upper_one", "return {'up': sample['txt'].upper()}"), upper_one),
        (add("upper_one", "return {'cls': 1}"), add("upper_one", "return {'cls': 2}")),
        (lambda sample: {"cls": 1}, lambda sample: {"cls": 2}),
        (lambda sample, n=1: {"cls": n}, lambda sample, n=2: {"cls": n}),
        ((lambda n: lambda sample: {"cls": n})(1), (lambda n: lambda sample: {"cls": n})(2)),
        (partial(lambda sample, n: {"cls": n}, n=1), partial(lambda sample, n: {"cls": n}, n=2)),
    ],
)
def test_an_edited_function_makes_its_outputs_again(shards, caplog, first, second):
    assert mapped(first, "in-{0..1}.tar") == []
    same = second is upper_one  # the first case is the same code in another place
    assert mapped(first, "in-{0..1}.tar") == [0, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "out-0.tar, ...: 2 of 2 outputs kept from an earlier run; resume=False makes them again"
    ]
    made = list(read_samples("out-{0..1}.tar"))
    assert mapped(second, "in-{0..1}.tar") == ([0, 1] if same else [])
    assert (list(read_samples("out-{0..1}.tar")) == made) is same
    assert len(caplog.records) == 1 + same


def test_a_rewritten_input_is_mapped_again(shards):
    assert mapped(upper_one) == []
    before = Path("in-3.tar").stat()
    Path("in-3.tar").write_bytes(Path("in-3.tar").read_bytes().replace(b"text", b"TEXT"))
    os.utime("in-3.tar", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    Path("in-5.tar").unlink()  # nothing says that its output is not what it was
    assert mapped(upper_one) == [0, 1, 2, 4, 5, 6, 7]
    assert mapped(upper_one) == [*range(8)]


def test_a_rewritten_remote_input_is_mapped_again(shards, tmp_path):
    with range_server.serving(tmp_path) as site:
        inputs = f"{site.url}/in-{{0..1}}.tar"
        assert mapped(upper_one, inputs) == []
        assert mapped(upper_one, inputs) == [0, 1]
        site.etag = '"v2"'
        assert mapped(upper_one, inputs) == []


def test_an_output_that_lacks_failed_samples_is_kept_only_where_they_may_fail(shards):
    assert mapped(fail_on_odd, "in-{0..1}.tar", on_error="skip") == []
    assert mapped(fail_on_odd, "in-{0..1}.tar", on_error="skip") == [0, 1]
    with pytest.raises(OpError, match="1-1"):
        mapped(fail_on_odd, "in-{0..1}.tar")
    assert mapped(fail_on_odd, "in-{0..1}.tar", on_error="skip") == [0]


def test_an_output_of_another_function_has_no_marker_of_the_first(shards, monkeypatch):
    """A run that is killed between an output and its marker must not make the marker of an earlier run valid."""
    first, second = (lambda sample: {"cls": 1}), (lambda sample: {"cls": 2})
    assert mapped(first) == []
    with monkeypatch.context() as patch:
        patch.setattr("tarshards.storage.markers.Marker.write", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            mapped(second)
    assert mapped(first) == [*range(1, 8)]
    assert {sample["cls"] for sample in read_samples("out-{0..7}.tar")} == {b"1"}


def test_markers_of_an_earlier_version_are_kept_and_told(shards, caplog):
    mapped(upper_one)
    for number in range(8):
        marker = Path(f"out-{number}.tar.done")
        record = json.loads(marker.read_text())
        del record["inputs"]
        function = digest_of(dumps(upper_one).hex())
        record["digest"] = digest_of(f"in-{number}.tar", f"out-{number}.tar", True, function)
        marker.write_text(json.dumps(record))
    Path("out-2.tar").unlink()
    assert mapped(upper_one) == [0, 1, 3, 4, 5, 6, 7]
    assert [record.getMessage() for record in caplog.records] == [
        "out-0.tar, ...: 7 of 8 outputs kept from an earlier run, 7 by an earlier release, which did not record code "
        "and inputs; resume=False makes them again"
    ]
    assert mapped(upper_one) == [*range(8)]
    assert "8 of 8 outputs kept from an earlier run, 7 by an earlier release" in caplog.records[-1].getMessage()


def test_what_cannot_be_compared_is_named_once(shards, caplog):
    lock = threading.Lock()

    def locked(sample):
        with lock:
            return sample

    assert mapped(locked) == []
    name = f"{test_what_cannot_be_compared_is_named_once.__name__}.<locals>.locked"
    told = f"map_shards: a change of lock of {name} (lock) is not noticed when outputs are kept"
    assert [record.getMessage() for record in caplog.records] == [told]
    assert mapped(locked) == [*range(8)]


@pytest.mark.parametrize("resume", [True, False])
def test_the_marker_of_an_earlier_output_is_not_that_of_one_without_index(shards, monkeypatch, resume):
    def run(resume=True):
        return map_shards(upper, shards, "out-{0..7}.tar", executor=Inline(), resume=resume)

    run()
    if resume:
        Path("out-2.tar").unlink()
    save = Index.save

    def killed(index, location, **options):
        if location.url == "out-2.tar":
            raise KeyboardInterrupt
        save(index, location, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run(resume)
    assert Path("out-2.tar").exists()
    assert not Path("out-2.tar.index").exists()
    assert not run()[2].resumed
    assert Index.load("out-2.tar").keys == ["2-0", "2-1", "2-2"]


def test_outputs_that_make_no_sense(shards):
    with pytest.raises(ValueError, match="8 inputs and 7 outputs"):
        map_shards(upper, shards, "out-{0..6}.tar")
    with pytest.raises(ValueError, match=r"2 shards would write a\.tar"):
        output_names("{a,a}.tar", 2)


def test_an_async_function_is_refused(shards):
    async def function(samples):
        return samples

    for each in function, partial(function):
        with pytest.raises(TypeError, match=r"^map_shards does not await .*async_map\(\)"):
            map_shards(each, shards, "out-%d.tar")
