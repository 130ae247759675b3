"""reshard: every sample once, in an order as good as a true permutation, the same for any executor."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from pathlib import Path

import pytest
from click.testing import CliRunner
from inline import Inline
from soak import SOAK

from tarshards import SampleError, ShardWriter, TarError, read_samples
from tarshards.cli import tarreshard
from tarshards.index.build import build_index
from tarshards.index.sidecar import Index
from tarshards.parallel.process_pool import ProcessPool
from tarshards.tar.read import RECORD
from tarshards.write.reshard import reshard

TOOL = str(Path(__file__).parents[2] / "bin/tarreshard")


def command(pattern: str = "out-%03d.tar") -> list[str]:
    return [sys.executable, TOOL, "in.shards.json", *f"-o {pattern} -s 100000 -j 2 -q".split()]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(count: int = 2000, shards: int = 7) -> str:
    rng = random.Random(0)
    with ShardWriter("in-%02d.tar", max_samples=-(-count // shards)) as writer:
        for i in range(count):
            writer.write({"__key__": f"{i:06d}", "bin": rng.randbytes(rng.randrange(2000)), "cls": i})
    return "in.shards.json"


def samples(spec) -> list[tuple]:
    return [(sample["__key__"], sample["bin"], sample["cls"]) for sample in read_samples(spec)]


def order(spec) -> list[int]:
    return [int(sample["cls"]) for sample in read_samples(spec)]


def contents(pattern: str) -> dict[str, bytes]:
    return {path.name.partition("-")[2]: path.read_bytes() for path in Path().glob(pattern)}


CUTS: list[dict[str, int]] = [{"max_bytes": 150_000}, {"max_samples": 123}, {"shards": 9}, {}]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("cut", "shuffle"), [*product(CUTS, [True, False])] if SOAK > 1 else [*zip(CUTS, cycle([True, False]))]
)
def test_every_sample_is_there_once_and_shards_are_as_large_as_told(cut, shuffle):
    made = reshard(make(), "d/out-%03d.tar", seed=1, shuffle=shuffle, **cut)
    assert Counter(samples("d/out.shards.json")) == Counter(samples("in.shards.json"))
    assert [shard.url for shard in made] == [f"d/out-{i:03d}.tar" for i in range(len(made))]
    for shard in made:
        assert shard.size == os.path.getsize(shard.url)
        assert shard.samples == len(list(read_samples(shard.url)))
        assert Index.load(shard.url).pack() == build_index(shard.url).pack()
    counts = [shard.samples for shard in made]
    if "max_samples" in cut:
        assert counts == [123] * 16 + [2000 - 16 * 123]
    elif "shards" in cut:
        assert len(counts) == 9
        assert max(counts) - min(counts) <= 1
    elif cut:
        assert {shard.size for shard in made[:-1]} == {14 * RECORD}
    else:
        assert counts == [2000]
    if not shuffle:
        assert order("d/out.shards.json") == list(range(2000))
    assert sorted(path.name for path in Path("d").iterdir() if "out-" not in path.name) == ["out.shards.json"]


@pytest.mark.parametrize("most", [99_999, 10_240, 10_239, 1])
def test_without_a_shuffle_the_bytes_are_those_of_a_writer(most):
    reshard(make(25 if most < 99_999 else 700), "out-%03d.tar", shuffle=False, max_bytes=most)
    with ShardWriter("expected-%03d.tar", max_bytes=most) as writer:
        for sample in read_samples("in.shards.json"):
            writer.write(sample)
    assert contents("out-*.tar*") == contents("expected-*.tar*")


def test_the_bytes_are_the_same_for_any_workers_and_buckets(monkeypatch):
    make(700)
    made = []
    for number, pool in enumerate([ProcessPool(1), ProcessPool(4), ThreadPoolExecutor(3), ProcessPool(2)]):
        if number == 3:
            monkeypatch.setattr("tarshards.write.reshard.BUCKET", 10_000)
            monkeypatch.setattr("tarshards.write.reshard.BUFFER", 20_000)
        with pool:
            reshard("in.shards.json", f"out{number}-%03d.tar", seed=5, max_bytes=70_000, executor=pool)
        made.append(contents(f"out{number}-*.tar*"))
    assert made[0] == made[1] == made[2] == made[3]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_tool_does_not_depend_on_how_processes_begin(tmp_path, method):
    make(700)
    done = CliRunner().invoke(tarreshard.main, [*command("wanted-%03d.tar")[2:], "-j", "1"])
    assert (done.exit_code, done.output) == (0, "")
    (tmp_path / "sitecustomize.py").write_text(f"import multiprocessing\nmultiprocessing.set_start_method({method!r})")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command("out-%03d.tar"), env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert contents("out-*.tar*") == {
        name.replace("wanted", "out"): data for name, data in contents("wanted-*.tar*").items()
    }


def test_seeds_are_different_orders():
    make()
    for seed in (0, 1):
        reshard("in.shards.json", f"out{seed}-%d.tar", seed=seed)
    assert order("out0-0.tar") != order("out1-0.tar")


def correlation(left: list[int], right: list[int]) -> float:
    mean = (len(left) - 1) / 2
    return sum((a - mean) * (b - mean) for a, b in zip(left, right)) / sum((a - mean) ** 2 for a in left)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_passes_the_tests_of_a_true_permutation(seed):
    make(4000, 13)
    reshard("in.shards.json", "out-%d.tar", seed=seed)
    found = order("out-0.tar")
    true = list(range(4000))
    random.Random(seed).shuffle(true)
    bound = 4 / 4000**0.5  # four standard deviations
    for candidate in (found, true):
        assert sorted(candidate) == list(range(4000))
        assert abs(correlation(list(range(4000)), candidate)) < bound  # rank against place
        assert abs(correlation(candidate, candidate[1:] + candidate[:1])) < bound  # neighbours
        first_half = sum(place < 2000 for place in candidate[:2000])
        assert abs(first_half - 1000) < 4 * 16  # hypergeometric, deviation 15.8


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(6) if SOAK > 1 else [3])
def test_a_killed_run_goes_on(trial):
    make(3000)
    begun = time.monotonic()
    subprocess.run(command("expected-%03d.tar"), check=True)
    seconds = time.monotonic() - begun
    process = subprocess.Popen(command(), stderr=subprocess.PIPE)
    time.sleep(seconds * (0.2 + 0.13 * trial))
    process.kill()
    process.communicate()  # which ends when the last of its processes does
    again = subprocess.run(command(), capture_output=True, text=True)
    if "the file exists" in again.stderr:  # it had been done
        return
    told = r"(out-000\.tar, \.\.\.: \d+ of \d+ outputs kept from an earlier run\n)?"
    assert again.returncode == 0, again.stderr
    assert re.fullmatch(told, again.stderr)
    assert contents("out-*.tar*") == contents("expected-*.tar*")
    assert not list(Path().glob("*.reshard"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_and_no_half_shard(number):
    make(6000)
    process = subprocess.Popen(command(), stderr=subprocess.PIPE, text=True)
    while not list(Path().glob("out-*.tar")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + number or process.returncode == 0
    assert "Traceback" not in errors
    for path in Path().glob("out-*.tar"):
        list(read_samples(str(path)))


def test_the_marker_of_an_earlier_output_is_not_that_of_one_without_index(monkeypatch):
    make()
    save = Index.save

    def run(killed_at=None):
        def killed(index, location, **options):
            if location.url == killed_at:
                raise KeyboardInterrupt
            save(index, location, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Index, "save", killed)
            reshard("in.shards.json", "out-%03d.tar", max_samples=500, executor=Inline())

    with pytest.raises(KeyboardInterrupt):
        run("out-003.tar")
    Path("out-001.tar").unlink()
    with pytest.raises(KeyboardInterrupt):
        run("out-001.tar")
    assert not Path("out-001.tar.index").exists()
    run()
    for number in range(4):
        assert Index.load(f"out-{number:03d}.tar").pack() == build_index(f"out-{number:03d}.tar").pack()


def test_the_indexes_are_those_of_the_shards(monkeypatch):
    """They are made from the written samples, and name the same ones as a reader."""
    rng = random.Random(0)
    with ShardWriter("in-%d.tar", max_samples=100) as writer:
        for i in range(300):
            sample = {
                "__key__": f"{i % 3}/{i}" + "é" * 60 * (i % 50 == 0),
                "bin": bytes(rng.choice([0, 511, 512, 9000])),
            }
            sample |= {f"field{rng.randrange(40)}.jpg": bytes(rng.choice([100, 200_000]))} if i % 7 == 0 else {}
            sample |= {"big": bytes(3 << 20)} if i % 100 == 0 else {"cls": i}
            writer.write(sample)
    reads = []
    monkeypatch.setattr("tarshards.index.build.build_index", lambda *_: reads.append(1))
    made = reshard("in.shards.json", "out-%d.tar", max_bytes=2_000_000, executor=Inline())
    assert not reads
    for shard in made:
        expected = build_index(shard.url)
        assert Index.load(shard.url).pack() == expected.pack()


def test_another_call_begins_anew():
    make()
    os.makedirs("out-000.tar.reshard")
    Path("out-000.tar.reshard/reshard.json").write_text('{"digest": "of another"}')
    Path("out-000.tar.reshard/scattered-000000.npy").write_text("x")
    reshard("in.shards.json", "out-%03d.tar")
    assert sorted(order("out.shards.json")) == list(range(2000))


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_an_interrupted_call_is_continued_if_its_inputs_are_the_same(monkeypatch, caplog, is_rewritten):
    make(200, 2)
    save = Index.save

    def killed(index, location, **options):
        if location.url == "out-004.tar":
            raise KeyboardInterrupt
        save(index, location, **options)

    def run():
        reshard("in.shards.json", "out-%03d.tar", max_samples=20, executor=Inline())

    with monkeypatch.context() as patch:
        patch.setattr(Index, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run()
    if is_rewritten:
        path, (first, *_) = Path("in-00.tar"), samples("in-00.tar")
        before = path.stat()
        path.write_bytes(path.read_bytes().replace(first[1], first[1][::-1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    run()
    assert sorted(samples("out.shards.json")) == sorted(samples("in.shards.json"))
    told = "out-000.tar, ...: 4 of 10 outputs kept from an earlier run"
    assert [record.getMessage() for record in caplog.records] == ([] if is_rewritten else [told])


def test_killed_while_it_removes_its_folder(monkeypatch):
    """In any order of removing the folder's files, the rest is not resumed from."""
    make()

    def half(folder, ignore_errors=False):
        if ignore_errors:  # before the first pass
            return
        for path in [*Path(folder).glob("*.data"), *Path(folder).glob("*.done")]:
            path.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tarshards.write.reshard.shutil.rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            reshard("in.shards.json", "out-%03d.tar")
    whole = {path.name: path.read_bytes() for path in Path().glob("out-*.tar")}
    reshard("in.shards.json", "out-%03d.tar")
    assert {path.name: path.read_bytes() for path in Path().glob("out-*.tar")} == whole
    assert not Path("out-000.tar.reshard").exists()


def test_damage_is_an_error_and_leaves_no_shard():
    make()
    data = Path("in-03.tar").read_bytes()
    Path("in-03.tar").write_bytes(data[: len(data) // 2])
    with pytest.raises(TarError, match=r"in-03\.tar: offset"):
        reshard("in-{00..06}.tar", "out-%03d.tar")
    assert not list(Path().glob("out-*.tar"))


def test_equal_keys_are_told_and_can_be_changed():
    for name in ("a", "b"):
        with ShardWriter(f"{name}-%d.tar") as writer:
            for i in range(20):
                writer.write({"__key__": f"{i}", "txt": name})
    with pytest.raises(
        SampleError,
        match=r"out-0\.tar: \d+: this key is already in the shard, from another input; make the keys unique",
    ):
        reshard("{a,b}-0.tar", "out-%d.tar")
    reshard("{a,b}-0.tar", "out-%d.tar", rekey="{shard}-{key}")
    found = {(sample["__key__"], sample["txt"]) for sample in read_samples("out-0.tar")}
    assert found == {(f"{name}-0-{i}", name.encode()) for name in "ab" for i in range(20)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 1, "shards": 1}, "max_bytes, max_samples and shards"),
        ({"shards": 0}, "shards must be at least 1, not 0"),
        ({"output_pattern": "out.tar"}, "needs a shard number"),
        ({"output_pattern": "s3://b/out-%d.tar"}, "with tmpdir"),
        ({"rekey": "{nonsense}"}, "nonsense"),
    ],
)
def test_what_makes_no_sense(options, message):
    make(10)
    with pytest.raises(ValueError, match=message):
        reshard("in.shards.json", **{"output_pattern": "out-%d.tar", **options})


def test_compressed_shards_and_remote_ones():
    import fsspec

    make(50)
    reshard("in.shards.json", "out-%d.tar.gz", max_samples=20)
    assert sorted(order("out-{0..2}.tar.gz")) == list(range(50))
    reshard(
        "in.shards.json", "memory://resharded/out-%d.tar", max_samples=20, tmpdir=".", executor=ThreadPoolExecutor(1)
    )
    assert sorted(order([f"memory://resharded/out-{i}.tar" for i in range(3)])) == list(range(50))
    assert "/resharded/out.shards.json" in fsspec.filesystem("memory").find("/resharded")


def test_more_inputs_than_a_process_may_have_open(folder):
    """Also in an order that takes a sample of another input each time."""
    make(200, 100)
    limit = ["bash", "-c", 'ulimit -n 60 && exec "$@"', "bash"]
    subprocess.run([*limit, *command()], check=True)
    assert Counter(samples("out.shards.json")) == Counter(samples("in.shards.json"))


class Measuring(ThreadPoolExecutor):
    """Threads, and the largest task that processes would have been sent."""

    largest = 0

    def submit(self, function, /, *args, **options):
        self.largest = max(self.largest, len(pickle.dumps((function, args, options))))
        return super().submit(function, *args, **options)


@pytest.mark.parametrize("shuffle", [True, False])
def test_tasks_do_not_grow_with_the_inputs(tmp_path, shuffle):
    largest = []
    for count in 2, 60:
        for number in range(count):
            with ShardWriter(str(tmp_path / f"{count}-{number:03d}-%d.tar")) as writer:
                writer.write({"__key__": f"{number}", "txt": b"x"})
        with Measuring(2) as executor:
            outputs, inputs = str(tmp_path / f"out-{count}-%03d.tar"), str(tmp_path / f"{count}-*.tar")
            assert len(reshard(inputs, outputs, shuffle=shuffle, max_samples=2, executor=executor)) == count // 2
        largest.append(executor.largest)
    assert largest[1] < largest[0] + 100
