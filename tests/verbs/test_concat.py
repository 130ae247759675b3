"""Shards in turn, interleaved, by several readers at once: every sample exactly once, or an error."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leftovers import Leftovers

from tarshards import Ledger, read_samples, write_samples
from tarshards.errors import OpenError, SampleError, TarError
from tarshards.index.build import build_index
from tarshards.storage.expressions import find_shards
from tarshards.stream.ops import add_source, rekey
from tarshards.verbs.cat import interleave, read_parallel, round_robin


def keys(samples) -> list[str]:
    return [sample["__key__"] for sample in samples]


def within(seconds: float, function):
    """Return the function's result, or raise its error; fail where it takes longer."""
    result: list = []

    def work():
        try:
            result.append((function(), None))
        except Exception as error:
            result.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert result, f"still at work after {seconds} s"
    value, error = result[0]
    if error is not None:
        raise error
    return value


@given(st.lists(st.lists(st.integers())), st.integers(1, 5))
def test_round_robin(sources, width):
    tagged = [[(i, item) for item in source] for i, source in enumerate(sources)]
    # The law, said another way: in each round every one of the places gives one item, an empty place takes the next.
    waiting, places, expected = list(tagged), [], []
    places, waiting = waiting[:width], waiting[width:]
    place = 0
    while places:
        place %= len(places)
        if places[place]:
            expected.append(places[place][0])
            places[place] = places[place][1:]
            place += 1
        elif waiting:
            places[place] = waiting.pop(0)
        else:
            del places[place]
    assert list(round_robin(tagged, width)) == expected


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 9))
def test_round_robin_gives_each_item_once_and_each_source_in_its_order(sizes, width):
    items = list(round_robin([[(i, j) for j in range(size)] for i, size in enumerate(sizes)], width))
    assert sorted(items) == [(i, j) for i, size in enumerate(sizes) for j in range(size)]
    for i, size in enumerate(sizes):
        assert [item for item in items if item[0] == i] == [(i, j) for j in range(size)]


def test_round_robin_opens_no_more_than_it_needs():
    opened = []

    def source(i):
        opened.append(i)
        yield i

    items = round_robin(map(source, range(100)), 3)
    assert [next(items), next(items)] == [0, 1]
    assert opened == [0, 1]
    with pytest.raises(ValueError, match="at least 1"):
        round_robin([], 0)


def test_interleave(make_shards):
    shards = make_shards(4, 2)
    assert keys(interleave(shards, 3)) == [f"{i:06d}" for i in (0, 2, 4, 1, 3, 5, 6, 7)]
    before = Leftovers()
    samples = interleave(shards, 3)
    list(zip(range(3), samples))
    assert len(before.files()) == 3
    samples.close()
    assert not before.files()


def test_interleave_with_a_damaged_shard(make_shards, tmp_path):
    shards = make_shards(3, 2)
    os.truncate(tmp_path / "set-0001.tar", 2600)
    with pytest.raises(TarError, match="set-0001"):
        keys(interleave(shards, 2))
    ledger = Ledger(max_errors=1)
    assert keys(interleave(shards, 2, on_error=ledger)) == [f"{i:06d}" for i in (0, 2, 1, 4, 5)]
    assert (ledger.samples, len(ledger.quarantined), ledger.shards) == (5, 1, 2)


def test_rekey_leaves_the_caller_s_samples():
    samples = [{"__key__": "x", "__url__": "d/a.tar", "cls": 1}, {"__key__": "x", "__url__": "d/b.tar.gz", "cls": 2}]
    assert list(rekey(samples, "{shard}/{index:02d}{key}")) == [
        {"__key__": "a/00x", "__url__": "d/a.tar", "cls": 1},
        {"__key__": "b/01x", "__url__": "d/b.tar.gz", "cls": 2},
    ]
    assert keys(samples) == ["x", "x"]


@given(st.lists(st.text(min_size=1)))
def test_rekeying_by_index_makes_keys_distinct_and_sorted(names):
    new = keys(rekey([{"__key__": name} for name in names], "{index:09d}"))
    assert new == sorted(set(new))
    assert len(new) == len(names)


def test_rekey_refuses_a_template_at_once():
    with pytest.raises(ValueError, match="not among index, key, shard"):
        rekey([], "{cls}")


def test_a_key_that_would_not_read_back_is_not_written(tmp_path):
    samples = rekey([{"__key__": "x", "cls": 1}], "{key}.{index}")
    with pytest.raises(SampleError, match=r"x\.0\.cls"):
        write_samples(samples, str(tmp_path / "a.tar"))


def test_add_source(make_shards, tmp_path):
    (sample,) = add_source(read_samples(make_shards(1, 1)))
    assert sample["source"] == sample["__url__"] == str(tmp_path / "set-0000.tar")
    with pytest.raises(SampleError, match=r"000000\.source: two fields would get the name source"):
        list(add_source([sample]))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("memory", [1, 5000, 1 << 20])
@pytest.mark.parametrize("readers", [1, 3, 8, 20])
def test_every_sample_exactly_once(make_shards, readers, memory, ordered):
    shards = make_shards(12, 30)
    ledger = Ledger()
    options = {"readers": readers, "memory": memory, "ordered": ordered, "on_error": ledger}
    found = within(100, lambda: keys(read_parallel(shards, **options)))
    assert (found if ordered else sorted(found)) == [f"{i:06d}" for i in range(360)]
    assert (ledger.samples, ledger.members, ledger.shards, ledger.unaudited) == (360, 720, 12, False)


@pytest.mark.parametrize("ordered", [False, True])
def test_exactly_once_with_readers_and_writer_of_changing_speed(make_shards, monkeypatch, ordered):
    from tarshards.verbs import cat as concat

    rng = random.Random(ordered)
    read_shard = concat.read_shard

    def slow(url, **options):
        for sample in read_shard(url, **options):
            if rng.random() < 0.2:
                time.sleep(rng.random() / 500)
            yield sample

    monkeypatch.setattr(concat, "read_shard", slow)
    shards = make_shards(12, 30)

    def consume():
        for sample in read_parallel(shards, readers=8, memory=300, ordered=ordered):
            if rng.random() < 0.1:
                time.sleep(rng.random() / 500)
            yield sample

    found = within(100, lambda: keys(consume()))
    assert (found if ordered else sorted(found)) == [f"{i:06d}" for i in range(360)]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("damaged", [0, 5, 11])
def test_one_damaged_shard_of_twelve(make_shards, tmp_path, damaged, ordered):
    shards = make_shards(12, 30)
    os.truncate(tmp_path / f"set-{damaged:04d}.tar", 20 * 2048 + 600)
    options = {"readers": 8, "memory": 2000, "ordered": ordered}
    with pytest.raises(TarError, match=f"set-{damaged:04d}.tar: offset"):
        within(100, lambda: keys(read_parallel(shards, **options)))
    ledger = Ledger(max_errors=1)
    found = within(100, lambda: keys(read_parallel(shards, on_error=ledger, **options)))
    assert set(found) == {f"{i:06d}" for i in range(360)} - {f"{damaged * 30 + i:06d}" for i in range(20, 30)}
    assert len(found) == 350
    assert (ledger.samples, ledger.shards, [entry.shard for entry in ledger.quarantined]) == (
        350,
        11,
        [str(tmp_path / f"set-{damaged:04d}.tar")],
    )


def test_in_order_all_before_the_damage_is_yielded(make_shards, tmp_path):
    shards = make_shards(12, 30)
    os.truncate(tmp_path / "set-0005.tar", 20 * 2048 + 600)
    samples = read_parallel(shards, readers=8, ordered=True)
    assert keys(next(samples) for _ in range(170)) == [f"{i:06d}" for i in range(170)]
    with pytest.raises(TarError, match="set-0005"):
        next(samples)


def test_a_missing_shard():
    with pytest.raises(OpenError, match=r"none-1\.tar"):
        within(100, lambda: keys(read_parallel("none-{1..1}.tar")))


def test_what_is_no_error_of_data_is_raised_too(make_shards, monkeypatch):
    from tarshards.verbs import cat as concat

    def broken(url, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(concat, "read_shard", broken)
    with pytest.raises(ZeroDivisionError):
        within(100, lambda: keys(read_parallel(make_shards(3), on_error=Ledger(max_errors=99))))


@pytest.mark.parametrize("ordered", [False, True])
def test_breaking_off_stops_the_readers_and_closes_what_they_opened(make_shards, ordered):
    shards, before = make_shards(12, 30), Leftovers()
    ledger = Ledger()
    samples = read_parallel(shards, readers=8, memory=1000, ordered=ordered, on_error=ledger)
    for _ in range(40):
        next(samples)
    samples.close()
    assert not before.files() | before.threads()
    assert ledger.unaudited


def test_breaking_off_kills_a_command_that_a_reader_waits_for(make_shards, tmp_path):
    command = f"pipe:echo $$ >{tmp_path}/pid; sleep 100; true"
    samples = read_parallel(find_shards([make_shards(1), command], allow_pipe=True), readers=2)
    next(samples)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.01)
    within(60, samples.close)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_nothing_starts_before_the_first_sample_is_asked_for(make_shards):
    before = Leftovers()
    samples = read_parallel(make_shards(3), readers=3)
    assert not before.threads()
    next(samples)
    samples.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_memory_is_bounded(tmp_path, ordered):
    size, memory, readers = 10_000, 55_000, 4
    for i in range(6):
        write_samples(({"__key__": f"{i}-{j}", "bin": bytes(size)} for j in range(20)), str(tmp_path / f"{i}.tar"))
    alive = [0, 0]

    class Counted(dict):
        def __init__(self, sample):
            super().__init__(sample)
            alive[0] += 1
            alive[1] = max(alive)

        def __del__(self):
            alive[0] -= 1

    from tarshards.verbs import cat as concat

    read_shard = concat.read_shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concat, "read_shard", lambda *args, **options: map(Counted, read_shard(*args, **options)))
        samples = read_parallel(
            str(tmp_path / "{0..5}.tar"), readers=readers, memory=memory, ordered=ordered, on_error=Ledger()
        )
        count = 0
        for _ in samples:
            end = time.monotonic() + 60
            while alive[1] < memory // size and time.monotonic() < end:
                time.sleep(0.01)
            if count < 5:
                time.sleep(0.05)  # so that the readers run as far ahead as they may
            count += 1
    assert count == 120
    # What waits, one in the hands of each reader while it reads the next, one in ours, one that always has room.
    assert memory // size <= alive[1] <= memory // size + 2 * readers + 2


def test_a_sample_larger_than_the_memory_passes(tmp_path):
    write_samples(({"__key__": str(i), "bin": bytes(10_000)} for i in range(5)), str(tmp_path / "a.tar"))
    for ordered in False, True:
        shards = [str(tmp_path / "a.tar")] * 3
        found = within(100, lambda: keys(read_parallel(shards, readers=3, memory=100, ordered=ordered)))  # noqa: B023
        assert sorted(found) == sorted([*"01234"] * 3)


@pytest.mark.parametrize("options", [{"readers": 0}, {"memory": 0}])
def test_bad_limits(options):
    with pytest.raises(ValueError, match=r"at least 1|positive"):
        read_parallel("a.tar", **options)


@pytest.mark.parametrize("read", [lambda urls: read_parallel(urls, readers=3), lambda urls: interleave(urls, 3)])
def test_a_shard_cut_anywhere_is_an_error(make_shards, tmp_path, read):
    shards = make_shards(3)
    whole = (tmp_path / "set-0001.tar").read_bytes()
    end = build_index(str(tmp_path / "set-0001.tar")).end
    for length in [*range(0, end, 173), end - 1, end]:
        (tmp_path / "set-0001.tar").write_bytes(whole[:length])
        with pytest.raises(TarError, match=r"set-0001\.tar"):
            list(read(shards))
