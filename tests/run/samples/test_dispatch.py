"""How samples are distributed to slots: fast ones are sent several at once, without any other visible effect."""

from __future__ import annotations

import math
import os
import random
import resource
import sys
from collections import Counter

import pytest
from soak import SOAK

from tarshards.errors import OpError
from tarshards.run.samples import command
from tarshards.run.samples.command import Halt, map_command

SERVER = """
import json, os, sys, time
log = open(sys.argv[1], "a", buffering=1)
for line in sys.stdin:
    job = json.loads(line)
    with open(job["fields"]["nap"]) as file:
        nap = float(file.read())
    log.write(f"{job['index']} {os.getpid()}\\n")
    while nap == float("inf") and len({line.split()[1] for line in open(sys.argv[1])}) < 3:
        time.sleep(0.01)
    time.sleep(nap if 0 < nap < float("inf") else 0)
    print(json.dumps({"error": "no"} if nap < 0 else {}), flush=True)
"""


@pytest.fixture
def serve(tmp_path):
    """Return a function that maps a server, which naps or fails on request, and one that lists the started samples.

    An infinite nap ends once three slots have begun. That list is of pairs: the number of a sample, and the slot's
    process.
    """
    (tmp_path / "server.py").write_text(SERVER)
    line = f"exec {sys.executable} {tmp_path}/server.py {tmp_path}/log"

    def serve(naps: list[float], **options) -> list[int]:
        work = ({"__key__": f"{i}", "nap": f"{nap}".encode()} for i, nap in enumerate(naps))
        return [int(sample["__key__"]) for sample in map_command(work, server=line, **options)]

    def begun() -> list[tuple[int, int]]:
        return [(int(index), int(slot)) for index, slot in map(str.split, (tmp_path / "log").read_text().splitlines())]

    return serve, begun


@pytest.mark.soak
@pytest.mark.parametrize("slots", [1, 3])
def test_each_is_run_once_and_given_back_in_order(serve, slots):
    serve, begun = serve
    count = 2000 if SOAK > 1 else 300
    rng = random.Random(slots)
    naps = rng.choices([0, 0.001, 0.005, 0.03, -1], [400, 20, 10, 5, 5], k=count)
    failed: list[int] = []
    found = serve(naps, slots=slots, on_error=lambda sample, _: failed.append(int(sample["__key__"])))
    assert found == [i for i, nap in enumerate(naps) if nap >= 0]
    assert failed == [i for i, nap in enumerate(naps) if nap < 0]
    assert Counter(index for index, _ in begun()) == Counter(range(count))


def test_a_slot_begins_nothing_after_the_failure_that_halts(serve):
    serve, begun = serve
    naps = [0.0] * 700 + [-1.0] + [0.0] * 300
    with pytest.raises(OpError, match="700: the server says: no"):
        serve(naps)
    assert [index for index, _ in begun()] == list(range(701))
    with pytest.raises(OpError, match="halted because 1 samples"):
        serve(naps, halt=Halt("soon", fail=1), on_error=lambda *_: None)
    assert [index for index, _ in begun()[701:]] == list(range(701))


def test_what_was_sent_to_a_slot_that_is_slow_goes_to_others(serve):
    serve, begun = serve
    naps = [math.inf] * 3 + [0.0] * 500 + [1.5] * 6 + [0.0] * 100
    found = serve(naps, slots=3, ordered=False)
    assert sorted(found) == list(range(609))
    naps_of = Counter(slot for index, slot in begun() if naps[index] == 1.5)
    assert max(naps_of.values()) <= 3, "six naps on three slots"


@pytest.mark.parametrize(("size", "least", "most"), [(10, 16, 10_000), (100_000, 2, 12)])
def test_quick_slots_have_more_ahead_as_long_as_it_is_small(monkeypatch, tmp_path, size, least, most):
    monkeypatch.setattr(command, "SMALL", 1 << 20)
    taken = given = ahead = 0

    def source():
        nonlocal taken
        for taken in range(1, 601):
            yield {"__key__": f"{taken}", "bin": bytes(size)}

    for given, _ in enumerate(map_command(source(), server="while read -r _; do echo '{}'; done", slots=2), start=1):
        ahead = max(ahead, taken - given + 1)
    assert (taken, given) == (600, 600)
    assert least <= ahead <= most


def test_large_samples_both_ways(tmp_path, monkeypatch):
    (tmp_path / "same.py").write_text("def same(sample): return sample")
    monkeypatch.chdir(tmp_path)
    sizes = [10] * 200 + [3_000_000, 10] * 15
    work = ({"__key__": f"{i}", "bin": bytes([i % 256]) * size} for i, size in enumerate(sizes))
    for i, sample in enumerate(map_command(work, python="same:same", slots=2)):
        assert sample["bin"] == bytes([i % 256]) * sizes[i]
    assert i == len(sizes) - 1


def test_a_slot_that_is_killed_ends_the_run(tmp_path):
    work = [{"__key__": f"{i}", "txt": "x"} for i in range(20)]
    with pytest.raises(OpError, match=r"^the process of a slot was killed by signal 9$"):
        list(map_command(work, "test $TAR_INDEX != 5 || kill -9 $PPID; sleep 0.1", slots=2, tmpdir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_slot_that_is_ended_many_times_says_nothing(capfd):
    kill = "import os, signal; [os.kill(os.getppid(), signal.SIGTERM) for _ in range(2000)]"
    for _ in range(5):
        with pytest.raises(OpError, match="slot"):
            list(map_command([{"__key__": "a"}], f"trap '' TERM; exec {sys.executable} -S -c '{kill}'"))
    assert capfd.readouterr().err == ""


def test_more_slots_than_the_system_has_room_for(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        with pytest.raises(OpError, match=r"no more than \d+ slots can be started: Too many open files"):
            list(map_command([], "true", slots=100, tmpdir=str(tmp_path)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert list(tmp_path.iterdir()) == []
