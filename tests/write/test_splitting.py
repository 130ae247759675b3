"""Splitting keeps every sample and its order, and gives each series what belongs to it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarshards import read_samples, write_samples
from tarshards.errors import OpenError, OpError, SampleError
from tarshards.tar.read import RECORD
from tarshards.write.split import (
    MAX_SERIES,
    ShardCommand,
    SplitShard,
    is_safe,
    route_by_field,
    route_by_ratios,
    split_samples,
)

SAMPLES = [{"__key__": f"k{i:02d}", "cls": i % 3, "txt": "x" * i} for i in range(20)]


def keys(path) -> list[str]:
    return [sample["__key__"] for sample in read_samples(str(path))]


def split(folder: Path, samples, pattern: str = "a-%03d.tar", **options) -> list[SplitShard]:
    return split_samples(samples, str(folder / pattern), **options)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 4000), max_size=30),
    st.none() | st.integers(1, 10),
    st.none() | st.integers(1, 20_000),
    st.integers(0, 5),
)
def test_the_shards_are_the_input_cut_where_they_are_full(tmp_path_factory, sizes, max_samples, max_bytes, first):
    folder = tmp_path_factory.mktemp("law")
    samples = [{"__key__": f"{i:03d}", "bin": bytes(size)} for i, size in enumerate(sizes)]
    shards = split(folder, samples, max_samples=max_samples, max_bytes=max_bytes, first=first)
    assert [Path(shard.name).name for shard in shards] == [f"a-{first + i:03d}.tar" for i in range(len(shards))]
    assert sorted(shard.name for shard in shards) == sorted(map(str, folder.iterdir()))
    assert [key for shard in shards for key in keys(shard.name)] == [sample["__key__"] for sample in samples]
    for shard in shards:
        assert shard.bytes == os.path.getsize(shard.name)
        assert shard.samples == len(keys(shard.name)) >= 1
        assert max_samples is None or shard.samples <= max_samples
        assert max_bytes is None or shard.bytes <= max_bytes or shard.samples == 1
    for shard, following in pairwise(shards):
        more = 512 + -(-sizes[int(keys(following.name)[0])] // 512) * 512
        has_space = max_bytes is None or shard.bytes + more <= max_bytes // RECORD * RECORD
        assert not has_space or shard.samples == max_samples


def test_a_dry_run_says_what_a_run_does(tmp_path):
    options = {"max_samples": 3, "routes": {"cls": route_by_field("cls")}}
    told = split(tmp_path, SAMPLES, "{cls}-%d.tar", dry_run=True, on_finish=pytest.fail, **options)
    assert list(tmp_path.iterdir()) == []
    assert split(tmp_path, SAMPLES, "{cls}-%d.tar", **options) == told


def test_existing_shards_are_kept_unless_told(tmp_path):
    (tmp_path / "a-001.tar").write_text("precious")
    with pytest.raises(OpenError, match=r"a-001\.tar: the file exists"):
        split(tmp_path, SAMPLES, max_samples=10)
    assert (tmp_path / "a-001.tar").read_text() == "precious"
    assert len(split(tmp_path, SAMPLES, max_samples=10, overwrite=True)) == 2
    assert len(keys(tmp_path / "a-001.tar")) == 10


def test_reading_stops_when_there_are_enough_shards(tmp_path):
    read = []

    def samples():
        for sample in SAMPLES:
            read.append(sample)
            yield sample

    shards = split(tmp_path, samples(), max_samples=4, max_shards=2)
    assert [shard.samples for shard in shards] == [4, 4]
    assert len(read) == 9
    assert len(list(tmp_path.iterdir())) == 2


def test_series_by_a_field(tmp_path):
    routes = {"cls": route_by_field("cls")}
    shards = split(tmp_path, SAMPLES, "{cls}-%d.tar", max_samples=5, routes=routes)
    for cls in range(3):
        series = sorted(shard.name for shard in shards if Path(shard.name).name.startswith(f"{cls}-"))
        assert [key for name in series for key in keys(name)] == [s["__key__"] for s in SAMPLES if s["cls"] == cls]


UNSAFE = ["", " ", "a/b", "..", ".hidden", "/etc", "a\0b", "a\nb", "pipe:x", "-", "@x", "a*", "{shard}", "\\x"]


@pytest.mark.parametrize("value", UNSAFE)
def test_values_that_are_no_part_of_a_name_are_refused(tmp_path, value):
    sample = {"__key__": "odd", "__url__": "x.tar", "cls": value}
    with pytest.raises(SampleError, match=r"x\.tar: odd\.cls: .* is not safe"):
        split(tmp_path, [sample], "{cls}-%d.tar", routes={"cls": route_by_field("cls")})
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=5))
def test_a_safe_value_stays_in_its_folder(text):
    if is_safe(text):
        assert os.path.normpath(f"folder/{text}-0.tar") == f"folder/{text}-0.tar"
        assert ":" not in text


def test_the_length_of_a_safe_value_is_that_of_its_bytes():
    assert is_safe("é" * 127)
    assert not is_safe("é" * 128)


@pytest.mark.parametrize("value", ["100%", "%06d", "a b", "ünï", "n07.2"])
def test_other_values_name_their_shard_as_they_are(tmp_path, value):
    (shard,) = split(
        tmp_path, [{"__key__": "a", "cls": value.encode()}], "{cls}-%d.tar", routes={"cls": route_by_field("cls")}
    )
    assert Path(shard.name).name == f"{value}-0.tar"


def test_samples_without_a_series_can_be_left_out(tmp_path):
    samples = [SAMPLES[0], {"__key__": "odd", "txt": ""}, {"__key__": "bad", "cls": b"\xff"}, SAMPLES[3]]
    rejected = []
    (shard,) = split(
        tmp_path,
        samples,
        "{cls}-%d.tar",
        routes={"cls": route_by_field("cls")},
        reject=lambda sample, error: rejected.append((sample["__key__"], str(error))),
    )
    assert keys(shard.name) == ["k00", "k03"]
    assert [key for key, _ in rejected] == ["odd", "bad"]
    assert "no such field" in rejected[0][1]


def test_too_many_series_are_refused(tmp_path):
    samples = [{"__key__": str(i), "cls": i} for i in range(MAX_SERIES + 1)]
    with pytest.raises(OpenError, match="more than 500 series"):
        split(tmp_path, samples, "{cls}-%d.tar", routes={"cls": route_by_field("cls")})
    assert list(tmp_path.iterdir()) == []


def test_two_series_never_write_one_shard(tmp_path):
    samples = [{"__key__": "a", "cls": 11}, *({"__key__": str(i), "cls": 1} for i in range(11))]
    routes = {"cls": route_by_field("cls")}
    with pytest.raises(OpenError, match=r"110\.tar: two series"):
        split(tmp_path, samples, "{cls}%d.tar", max_samples=1, routes=routes, overwrite=True)


def test_ratios_are_met_and_hang_on_the_key_alone(tmp_path):
    samples = [{"__key__": f"{i:05d}", "cls": i} for i in range(5000)]
    route = route_by_ratios({"train": 0.7, "val": 0.2, "test": 0.1})
    split_of = {sample["__key__"]: route(sample) for sample in samples}
    counts = Counter(split_of.values())
    for name, ratio in (("train", 0.7), ("val", 0.2), ("test", 0.1)):
        assert abs(counts[name] - 5000 * ratio) < 4 * (5000 * ratio * (1 - ratio)) ** 0.5
    random.Random(0).shuffle(samples)
    shards = split(tmp_path, samples[:1000], "{split}-%d.tar", routes={"split": route}, max_samples=100)
    for shard in shards:
        assert {split_of[key] for key in keys(shard.name)} == {Path(shard.name).name.split("-")[0]}
    assert sum(shard.samples for shard in shards) == 1000


def test_other_seeds_other_splits():
    samples = [{"__key__": str(i)} for i in range(100)]
    routes = [route_by_ratios({"a": 0.5, "b": 0.5}, seed=seed) for seed in range(20)]
    assert len({tuple(map(route, samples)) for route in routes}) == 20


def test_the_split_of_a_key_is_for_ever():
    route = route_by_ratios({"train": 0.5, "val": 0.5})
    assert "".join(route({"__key__": f"k{i}"})[0] for i in range(16)) == "vvtttvtvvtvttttt"


@pytest.mark.parametrize("ratios", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": 1, "b": 0}, {"a": float("nan")}])
def test_wrong_ratios(ratios):
    with pytest.raises(ValueError, match="their sum must be 1"):
        route_by_ratios(ratios)


def test_a_command_for_each_shard_gets_its_final_name(tmp_path):
    with ShardCommand(f"test -s {{}} && echo $TAR_SHARD {{}} >>{tmp_path}/log") as command:
        shards = split(tmp_path, SAMPLES, "a b%d.tar", max_samples=5, on_finish=command)
    assert (tmp_path / "log").read_text() == "".join(f"{shard.name} {shard.name}\n" for shard in shards)


@pytest.mark.parametrize("jobs", [1, 3])
def test_no_more_commands_at_a_time_than_asked_for(tmp_path, jobs):
    line = f"echo + >>{tmp_path}/log; sleep 0.1; echo - >>{tmp_path}/log"
    with ShardCommand(line, jobs=jobs) as command:
        for i in range(6):
            command(str(i))
    running = most = 0
    for mark in (tmp_path / "log").read_text().split():
        running += 1 if mark == "+" else -1
        most = max(most, running)
    assert running == 0
    assert most == jobs


def test_a_shard_is_deleted_when_its_command_has_succeeded_and_only_then(tmp_path):
    def run():
        with ShardCommand("[[ {} != *a-001.tar ]]", delete=True) as command:
            split(tmp_path, SAMPLES, max_samples=5, on_finish=command)

    with pytest.raises(OpError, match=r"a-001\.tar: the command for this shard ended with status 1; the shard is kept"):
        run()
    # It ran beside the writing of the next shard, at whose end its failure was seen.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-001.tar", "a-002.tar"]
    assert keys(tmp_path / "a-001.tar") == [sample["__key__"] for sample in SAMPLES[5:10]]


def test_a_command_that_is_killed_has_failed(tmp_path):
    command = ShardCommand("kill -9 $$")
    command("a.tar")
    with pytest.raises(OpError, match="killed by signal 9"):
        command.close()


def test_breaking_off_ends_the_commands(tmp_path):
    def run():
        with ShardCommand(f"echo $$ >{tmp_path}/pid; sleep 100 & wait") as command:
            command("a.tar")
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                time.sleep(0.01)
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert time.monotonic() - begun < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def shell(line: str, folder: Path, path: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PATH": path}
    return subprocess.run(["bash", "-uc", line], cwd=folder, env=environment, capture_output=True, text=True)


def test_enough_shards_end_a_pipe_well(tmp_path, path_with_tools):
    samples = [{"__key__": f"{i:05d}", "bin": bytes(2000)} for i in range(3000)]
    write_samples(samples, str(tmp_path / "all.tar"))
    done = shell("cat all.tar | tarsplit -n 5 -o a --maxshards 2; echo ${PIPESTATUS[1]}", tmp_path, path_with_tools)
    words = "tarsplit: stopped after 2 shards; the rest of the input was not read\n"
    assert (done.stdout, done.stderr) == ("0\n", words)
    assert sorted(path.name for path in tmp_path.glob("a-*")) == ["a-000000.tar", "a-000001.tar"]


def test_the_name_of_a_shard_is_no_command(tmp_path, path_with_tools):
    labels = ["$(touch hit)", "it's", '"q"', "`touch hit`", "a b"]
    write_samples([{"__key__": str(i), "txt": label} for i, label in enumerate(labels)], str(tmp_path / "all.tar"))
    line = """tarsplit -q all.tar --by txt -o 'x-{txt}-%d.tar' --post 'cp "{}" "copy of "{}'"""
    done = shell(line, tmp_path, path_with_tools)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.glob("copy*")} == {f"copy of x-{label}-0.tar" for label in labels}
    assert not (tmp_path / "hit").exists()
    reason = r"x-\$y.tar: the command for this shard was not run: 'x-\$y.tar' cannot replace \{\} in backquotes"
    with pytest.raises(OpError, match=reason):
        ShardCommand("echo `cat {}`")("x-$y.tar")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_a_command(tmp_path, path_with_tools, number):
    write_samples(SAMPLES, str(tmp_path / "all.tar"))
    process = subprocess.Popen(
        ["bash", "-c", "exec tarsplit all.tar -n 7 -o a-%d.tar --delete --post 'echo $$ >pid; sleep 100 & wait'"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path_with_tools},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "a-1.tar").exists() or not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    time.sleep(0.2)  # so that it waits for the command
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], errors
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-0.tar", "a-1.tar", "all.tar", "pid"]
