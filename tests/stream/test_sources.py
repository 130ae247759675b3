"""Sources of streams: planned with indexes, streamed without, and never a mixture of both."""

from __future__ import annotations

import gzip
import json
import logging
import os
import pickle
import subprocess
from itertools import chain, islice
from pathlib import Path

import pytest
from range_server import serving
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import IndexedShards, Ledger, Remote, ShardWriter, Stream, TarWriter, World, read_samples
from tarshards.epoch import plan
from tarshards.epoch.epoch_options import EpochOptions
from tarshards.epoch.loop import Part
from tarshards.errors import AuditError, OpenError, SampleError, ShardIndexError, StateError, TarError
from tarshards.index.access import SampleSequence
from tarshards.index.opening_options import Opening
from tarshards.samples.keys import split_name
from tarshards.storage import tuning
from tarshards.stream import sources
from tarshards.stream.sources import PlannedSource, ShardSource
from tarshards.stream.sources import open_shards as open_source
from tarshards.testing.faulty_server import Answer
from tarshards.testing.faulty_server import serving as misbehaving


def open_shards(urls, index="auto", **options):
    return open_source(urls, Opening(index=index), EpochOptions(**options))


def classes(samples) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


def test_auto_plans_where_all_shards_have_an_index(make_shards, caplog):
    caplog.set_level(logging.INFO, "tarshards")
    assert isinstance(open_shards(make_shards(3, index=True)), PlannedSource)
    assert caplog.messages == []


def test_auto_streams_where_none_has_one_and_says_so_once(make_shards, tmp_path, caplog):
    caplog.set_level(logging.INFO, "tarshards")
    stream = Stream.from_shards(make_shards(3))
    for _ in range(2):
        assert classes(stream.map(dict)) == list(range(9))
    assert caplog.messages == [
        f"{tmp_path}/set-0000.tar: no indexes found, so shards are streamed whole; create them with `tarindex`"
    ]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_auto_refuses_halves_and_names_one(make_shards, tmp_path, missing):
    urls = make_shards(3, index=True)
    (tmp_path / f"set-000{missing}.tar.index").unlink()
    with pytest.raises(
        ShardIndexError, match=rf"set-000{missing}\.tar: no index found, but other shards have one; .*`tarindex`"
    ):
        open_shards(urls)
    with pytest.raises(ShardIndexError, match=rf"set-000{missing}\.tar\.index: no index found"):
        open_shards(urls, index=True)
    assert classes(Stream.from_shards(urls, index=False)) == list(range(9))


def test_auto_over_http(make_shards, tmp_path):
    make_shards(3, index=True)
    with serving(tmp_path) as site:
        assert isinstance(open_shards(f"{site.url}/set-{{0000..0002}}.tar"), PlannedSource)
        (tmp_path / "set-0001.tar.index").unlink()
        with pytest.raises(ShardIndexError, match=r"http://.*set-0001\.tar: no index found"):
            open_shards(f"{site.url}/set-{{0000..0002}}.tar")


@pytest.mark.parametrize("status", [403, 401])
def test_auto_streams_signed_urls(make_shards, tmp_path, status):
    """A store answers so for an object that may not be listed, or whose name has another signature."""
    make_shards(3)
    with serving(tmp_path) as site:
        site.missing = status
        urls = f"{site.url}/set-{{0000..0002}}.tar?signature=secret"
        assert classes(Stream.from_shards(urls)) == list(range(9))
        (tmp_path / "set-0001.tar").unlink()
        with pytest.raises(OpenError, match=rf"/set-0001\.tar\?signature=\.\.\.: {status} "):
            classes(Stream.from_shards(urls))


@pytest.mark.parametrize("status", ["400 Bad Request", "429 Too Many Requests", "500 Failed"])
def test_auto_does_not_take_other_answers_for_a_missing_index(status, monkeypatch):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.001)
    with misbehaving() as server, pytest.raises(OpenError, match=status):
        Stream.from_shards(server.play(body=b"", default=Answer(status=status)) + ".tar", remote=Remote(retries=1))


def test_index_true_false_and_nonsense(make_shards):
    plain, indexed = make_shards(3, name="plain"), make_shards(3, index=True)
    with pytest.raises(ShardIndexError, match="no index found; create one with `tarindex`"):
        open_shards(plain, index=True)
    assert isinstance(open_shards(indexed, index=False), ShardSource)
    assert isinstance(open_shards(indexed, index=True), PlannedSource)
    for nonsense in ("yes", None, 2):
        with pytest.raises(ValueError, match="index must be True, False or"):
            open_shards(indexed, index=nonsense)


@pytest.mark.parametrize("option", [{"tail": "pad"}, {"tail": "drop"}, {"block": 4}])
@pytest.mark.parametrize("index", [False, "auto"])
def test_tail_and_block_need_an_index(make_shards, option, index):
    with pytest.raises(ShardIndexError, match="tail=, block= require indexed shards; run `tarindex` first"):
        open_shards(make_shards(2), index=index, **option)


@pytest.mark.parametrize("index", [True, False])
def test_fields_are_all_that_comes(make_shards, index):
    urls = make_shards(3, index=True)
    for fields in ("cls", ["cls"], ("cls",)):
        samples = Stream.from_shards(urls, index=index, fields=fields).collect()
        assert all(sample.keys() == {"__key__", "__url__", "cls"} for sample in samples)
    assert classes(samples) == list(range(9))


NO_FIELD = r"no sample has a field {}; the fields are cls, txt"


@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset])
def test_a_field_that_no_sample_has_is_an_error_at_the_end_of_each_shard(make_shards, tmp_path, kind):
    urls = make_shards(2, 5)
    read: list[dict] = []
    with pytest.raises(SampleError, match=rf"set-0000\.tar: {NO_FIELD.format('jpgg')}"):
        read.extend(kind(urls, fields="cls jpgg"))
    assert len(read) == 5
    ledger = Ledger(max_errors=2)
    assert [set(sample) for sample in kind(urls, fields="cls jpgg", on_error=ledger)] == [
        {"__key__", "__url__", "cls"}
    ] * 10
    assert [entry.shard for entry in ledger.quarantined] == [f"{tmp_path}/set-000{i}.tar" for i in range(2)]
    assert (ledger.shards, ledger.samples) == (2, 10)


@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset, IndexedShards])
def test_a_field_that_no_sample_has_is_an_error_when_an_indexed_shard_is_opened(make_shards, kind):
    with pytest.raises(SampleError, match=rf"set-0000\.tar: {NO_FIELD.format('jpgg')}"):
        kind(make_shards(2, index=True), fields=["cls", "jpgg"])


def test_samples_of_a_shard_that_lacks_a_field_are_quarantined(tmp_path):
    """With a manifest shards are opened when they are needed."""
    with ShardWriter(f"{tmp_path}/a-%d.tar", max_samples=3, index=True) as writer:
        for i in range(6):
            writer.write({"__key__": f"{i}", "cls": i} | ({"txt": "x"} if i < 3 else {}))
    ledger = Ledger(max_errors=3)
    dataset = Stream.from_shards(f"{tmp_path}/a.shards.json", fields="cls txt", on_error=ledger)
    assert classes(dataset) == [0, 1, 2]
    ledger.check()
    assert {entry.reason for entry in ledger.quarantined} == {"no sample has a field txt; the fields are cls"}


@pytest.mark.parametrize("index", [True, False])
def test_fields_that_some_sample_has_and_alternatives(tmp_path, index):
    with ShardWriter(f"{tmp_path}/a-%d.tar", index=index) as writer:
        writer.write({"__key__": "0", "cls": 0})
        writer.write({"__key__": "1", "cls": 1, "png": b"", "__odd__": b""})
        writer.write({"__key__": "2", "cls": 2, "jpg": b""})
    for fields, wanted in (("jpg", "jpg"), ("cls jpg;gif", "cls jpg"), (["jpg;png", "gif;cls"], "jpg png cls")):
        read = Stream.from_shards(f"{tmp_path}/a-0.tar", fields=fields)
        assert set().union(*read) - {"__key__", "__url__"} == set(wanted.split())
    with pytest.raises(SampleError, match="no sample has a field gif or tiff; the fields are cls, jpg, png"):
        list(Stream.from_shards(f"{tmp_path}/a-0.tar", fields="gif;tiff cls"))


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_without_samples_lacks_no_field(make_uneven, index):
    assert classes(Stream.from_shards(make_uneven([0, 3, 0]), index=index, fields="cls")) == [0, 1, 2]


def test_what_is_broken_off_lacks_no_field(make_shards):
    assert len(list(islice(Stream.from_shards(make_shards(1, 5), fields="jpgg"), 4))) == 4


def test_planned_is_what_streaming_gives_in_storage_order(make_uneven):
    urls = make_uneven([3, 0, 7, 1])
    assert Stream.from_shards(urls).collect() == Stream.from_shards(urls, index=False).collect()


def test_shuffled_epochs_are_whole_and_differ(make_uneven):
    stream = Stream.from_shards(make_uneven([3, 0, 17, 1]), shuffle=True, seed=1)
    epochs = [classes(stream) for _ in range(3)]
    assert all(sorted(epoch) == list(range(21)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    stream.set_epoch(0)
    assert classes(stream) == epochs[0]
    other = Stream.from_shards(stream.source.shards.urls, shuffle=True, seed=2)
    assert classes(other) != epochs[0]


def test_more_ranks_and_workers_than_shards(make_uneven):
    urls = make_uneven([13])
    worlds = [World(rank, 3, worker, 4) for rank in range(3) for worker in range(4)]
    parts = [classes(Stream.from_shards(urls, shuffle=True, world=world, tail="exact")) for world in worlds]
    assert sorted(chain(*parts)) == list(range(13))
    dataset = Stream.from_shards(urls, world=World(2, 3))
    assert (len(dataset), len(dataset.collect())) == (5, 5), "padded to equal lengths"


def test_length(make_shards):
    urls = make_shards(3, index=True)
    stream = Stream.from_shards(urls)
    assert len(stream) == len(stream.decode().shuffle(5).to_tuple("cls").enumerate()) == 9
    assert len(Stream.from_shards(urls, world=World(1, 2), tail="drop")) == 4
    for changed in (stream.filter(bool), stream.batched(2), stream.take(3), stream.repeat(2)):
        with pytest.raises(TypeError, match="changes the number of samples"):
            len(changed)
    for endless in (Stream.from_shards(urls, index=False), Stream([1])):
        assert endless, "true, though of unknown length"
        with pytest.raises(TypeError, match="length"):
            len(endless)


LAZY = {
    "nothing": lambda stream: stream,
    "filter": lambda stream: stream.filter(lambda sample: int(sample["cls"]) % 3),
    "batched": lambda stream: stream.to_tuple("cls").batched(4),
}
HOLDING = {
    "shuffle": lambda stream: stream.shuffle(10),
    "flatten": lambda stream: stream.map(lambda sample: [sample, sample]).flatten(),
    "async_map": lambda stream: stream.async_map(dict, workers=2),
    "repeat": lambda stream: stream.repeat(2),
    "take": lambda stream: stream.shuffle(4).take(11),
}


@pytest.mark.parametrize("op", [*LAZY, *HOLDING])
@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("stop", [0, 1, 5, 9])
def test_a_stream_resumes_where_it_stood(make_shards, op, index, stop):
    urls = make_shards(4, 6, index=True)

    def fresh(seed: int = 3):
        world = World(0, 1, 1, 2)
        return (LAZY | HOLDING)[op](Stream.from_shards(urls, index=index, shuffle=True, seed=seed, world=world))

    stream = fresh()
    stream.set_epoch(2)
    expected = stream.collect()
    stream.set_epoch(2)
    delivered = list(islice(stream, stop)) if stop else []
    resumed = fresh()
    if not stop:
        resumed.set_epoch(2)
    else:
        state = json.loads(json.dumps(stream.state_dict()))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state, "until it is iterated"
    assert repr(delivered + resumed.collect()) == repr(expected)
    assert resumed.state_dict()["epoch"] == 2
    assert repr(resumed.collect()) == repr(fresh_epoch(fresh, 3)), "the next epoch is whole"


def fresh_epoch(fresh, epoch: int) -> list:
    stream = fresh()
    stream.set_epoch(epoch)
    return stream.collect()


def test_resuming_reads_only_what_is_left(make_shards, monkeypatch):
    stream = Stream.from_shards(make_shards(2, 50, index=True), shuffle=True)
    iterator = iter(stream)
    delivered = classes(islice(iterator, 60))
    resumed = Stream.from_shards(stream.source.shards.urls, shuffle=True)
    resumed.load_state_dict(stream.state_dict())
    assert sorted(delivered + classes(resumed)) == list(range(100))
    assert resumed.ledger.samples == 40


def test_states_that_do_not_fit(make_shards):
    urls = make_shards(4, index=True)
    stream = Stream.from_shards(urls, shuffle=True)
    state = stream.state_dict()
    for other, word in (
        (Stream.from_shards(urls, shuffle=True, seed=1), "order"),
        (Stream.from_shards(urls), "order"),
        (Stream.from_shards(urls, shuffle=True, pool=7), "order"),
        (Stream.from_shards(urls, shuffle=True, index=False), "another dataset"),
        (stream.shuffle(3), "other ops"),
    ):
        with pytest.raises(StateError, match=word):
            other.load_state_dict(state)
    elsewhere = Stream.from_shards(urls, shuffle=True, world=World(1, 2))
    elsewhere.load_state_dict(state)
    with pytest.raises(StateError, match=r"rank 0 of 1, .* this is rank 1 of 2"):
        elsewhere.collect()


def test_two_iterations_at_once_stand_where_each_is(make_shards):
    stream = Stream.from_shards(make_shards(2, 5)).shuffle(2)
    first, second = iter(stream), iter(stream)
    next(first)
    next(second)
    for _ in range(3):
        next(first)
    assert stream.state_dict()["delivered"] == 1, "that of the one begun last"


def test_a_shard_rewritten_in_place_is_told_at_the_epochs_end(make_shards, tmp_path):
    stream = Stream.from_shards(make_shards(2, 5, index=True))
    iterator = iter(stream)
    next(iterator)
    path = tmp_path / "set-0000.tar"
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data.replace(b"text", b"TEXT"))
    with pytest.raises(OpenError, match=r"set-0000\.tar: changed while it was read"):
        list(iterator)


def test_a_shard_that_shrinks_is_an_error_of_its_samples(make_shards, tmp_path):
    ledger = Ledger(max_errors=100)
    stream = Stream.from_shards(make_shards(2, 50, index=True), on_error=ledger)
    iterator = iter(stream)
    next(iterator)
    with (tmp_path / "set-0000.tar").open("r+b") as file:
        file.truncate(8192)
    delivered = 1 + len(list(iterator))
    shrunk = [entry for entry in ledger.quarantined if "shrunk" in entry.reason]
    assert delivered + len(shrunk) == 100
    assert len(shrunk) > 40
    assert "changed while" in ledger.quarantined[-1].reason, "what was read before it shrank is in doubt too"
    ledger.check()


def test_a_sample_that_is_lost_is_named(make_shards, monkeypatch):
    read_all = SampleSequence.read_all
    stream = Stream.from_shards(make_shards(3, 5, index=True))
    monkeypatch.setattr(
        SampleSequence, "read_all", lambda *places: (s for s in read_all(*places) if s["__key__"] != "000007")
    )
    with pytest.raises(AuditError, match=r"set-0001\.tar \(1\)$"):
        stream.collect()


def test_positions_that_are_passed_over_are_found_at_the_end(make_shards, monkeypatch):
    read = Part.read
    stream = Stream.from_shards(make_shards(3, 100, index=True))
    monkeypatch.setattr(Part, "read", lambda self, *args: iter(()) if self.positions[0] else read(self, *args))
    with pytest.raises(AuditError, match=r"300 samples planned, 1 delivered.*set-0002\.tar \(0 of 100\)"):
        stream.collect()


def test_two_streams_on_one_ledger_at_once(make_shards):
    ledger = Ledger()
    one = Stream.from_shards(make_shards(2, 5, "one", index=True), on_error=ledger, shuffle=True)
    two = Stream.from_shards(make_shards(3, 4, "two", index=True), on_error=ledger)
    assert len(list(zip(one, two.map(dict)))) == 10
    assert ledger.samples == 20
    assert ledger.unaudited, "the longer one was broken off"
    assert len(list(zip(two, two))) == 12
    ledger.clear()
    assert (len(list(one)), len(list(two))) == (10, 12)
    ledger.check()


def test_an_epoch_broken_off_is_unaudited(make_shards):
    stream = Stream.from_shards(make_shards(2, 5, index=True))
    list(islice(stream, 3))
    assert stream.ledger.unaudited
    assert "3 delivered + 7 not taken (left early: unaudited)" in str(stream.ledger)
    stream.ledger.check()


def test_errors_of_a_shard_are_not_kept_for_the_next_epoch(make_shards, tmp_path):
    ledger = Ledger(max_errors=100)
    dataset = ShardDataset(make_shards(2, 5, index=True), on_error=ledger)
    path = tmp_path / "set-0001.tar"
    path.rename(f"{path}.away")
    assert (len(list(dataset)), len(ledger.quarantined)) == (5, 5)
    Path(f"{path}.away").rename(path)
    assert len(list(dataset)) == 10
    ledger.check()


READERS = [read_samples, Stream.from_shards, ShardDataset]


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_resumes_after_damage(make_shards, tmp_path, reader):
    urls = make_shards(2, 100)
    shard = tmp_path / "set-0000.tar"
    data = bytearray(shard.read_bytes())
    data[50 * 2048] ^= 1  # the first header of the 51st sample
    shard.write_bytes(data)
    ends, resyncs = Ledger(max_errors=1), Ledger(max_errors=3)
    assert len(list(reader(urls, on_error=ends))) == 149  # the 50th sample may lack a member
    assert len(list(reader(urls, on_error=resyncs, on_damage="resync"))) == 199
    assert resyncs.samples == 199
    with pytest.raises(ValueError, match='on_damage="resync" needs an on_error='):
        reader(urls, on_damage="resync")
    with pytest.raises(ValueError, match='on_damage is "end" or "resync", not \'repair\''):
        reader(urls, on_error=ends, on_damage="repair")


@pytest.mark.parametrize("on_damage", ["end", "resync"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_remote_archives_that_were_cut_are_accepted(make_shards, tmp_path, suffix, on_damage):
    """In the padding of the last member, too."""
    make_shards(2)
    for shard in tmp_path.glob("*.tar"):
        data = shard.read_bytes().rstrip(b"\0")
        (tmp_path / f"{shard.name}.gz").write_bytes(gzip.compress(data))
        shard.write_bytes(data)
    with serving(tmp_path) as site:
        urls = f"{site.url}/set-{{0000..0001}}.tar{suffix}"
        read = ShardDataset(urls, end="optional", on_damage=on_damage, on_error=Ledger())
        assert [sample["__key__"] for sample in pickle.loads(pickle.dumps(read))] == [f"{i:06d}" for i in range(6)]
        with pytest.raises(TarError, match=r"set-0000\.tar.*: truncated: no block of zeros .* `--end optional`"):
            list(ShardDataset(urls, on_damage=on_damage, on_error=Ledger()))


@pytest.mark.parametrize("on_damage", ["end", "resync"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_accepts_archives_that_were_cut(make_shards, tmp_path, reader, on_damage):
    urls = make_shards(2)
    for shard in tmp_path.glob("*.tar"):
        shard.write_bytes(shard.read_bytes().rstrip(b"\0").ljust(3 * 2048, b"\0"))
    ledger = Ledger()
    read = reader(urls, on_error=ledger, on_damage=on_damage, end="optional")
    assert [sample["__key__"] for sample in read] == [f"{i:06d}" for i in range(6)]
    assert (ledger.shards, ledger.samples, ledger.members, ledger.quarantined) == (2, 6, 12, [])
    with pytest.raises(TarError, match=r"set-0000\.tar: offset 6144: truncated: no block of zeros"):
        list(reader(urls, on_error=Ledger(), on_damage=on_damage))
    with pytest.raises(ValueError, match='end is "required" or "optional", not \'maybe\''):
        reader(urls, end="maybe")


def by_first_letter(name: str) -> tuple[str, str]:
    return name[:5], name[5:]


@pytest.mark.parametrize("on_damage", ["end", "resync"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_takes_a_key_rule(make_shards, reader, on_damage):
    read = list(reader(make_shards(1, 12), on_error=Ledger(), on_damage=on_damage, split=by_first_letter))
    assert [(sample["__key__"], len(sample) - 2) for sample in read] == [("00000", 20), ("00001", 4)]


@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset])
def test_indexes_have_one_key_rule(make_shards, kind):
    urls = make_shards(1, 12, index=True)
    assert len(list(kind(urls, split=by_first_letter))) == 2
    with pytest.raises(ValueError, match="split= requires index=False"):
        kind(urls, index=True, split=by_first_letter)
    assert len(list(kind(urls, index=True, split=split_name))) == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_resume_after_damage(make_shards, tmp_path, workers):
    urls = make_shards(2, 100)
    shard = tmp_path / "set-0001.tar"
    data = bytearray(shard.read_bytes())
    data[50 * 2048] ^= 1
    shard.write_bytes(data)
    ledger = Ledger(max_errors=3)
    dataset = ShardDataset(urls, on_error=ledger, on_damage="resync")
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert sorted(int(sample["cls"]) for sample in loader) == [i for i in range(200) if i != 150]
    assert ledger.samples == 199


@pytest.mark.parametrize("index", [True, False])
def test_a_dataset_without_samples_is_an_error(make_uneven, index):
    stream = Stream.from_shards(make_uneven([0, 0, 0]), index=index)
    for _ in range(2):
        with pytest.raises(SampleError, match="no samples in this shard nor in 2 more"):
            list(stream)
    with pytest.raises(SampleError, match="no samples"):
        next(iter(stream.shuffle(10).repeat().batched(2)))


def test_a_rank_without_samples_is_none(make_uneven):
    worlds = [World(rank, 2, 0, 1) for rank in range(2)]
    streams = [Stream.from_shards(make_uneven([0, 3]), index=False, shuffle=False, world=world) for world in worlds]
    assert [len(list(stream)) for stream in streams] == [0, 3]


def test_what_on_error_lets_pass_may_be_all(make_uneven, tmp_path):
    ledger = Ledger(max_errors=1)
    assert list(Stream.from_shards(f"{tmp_path}/missing.tar", index=False, on_error=ledger)) == []
    assert len(ledger.quarantined) == 1


@pytest.fixture
def whole_files_only(tmp_path):
    """A server without ranges, such as Python's http.server, of two indexed shards."""
    with ShardWriter(str(tmp_path / "t-%d.tar"), max_samples=3, index=True) as writer:
        for i in range(6):
            writer.write({"__key__": f"{i}", "txt": f"{i}"})
    with serving(tmp_path) as site:
        site.ranges = False
        yield site


@pytest.mark.parametrize("names", ["t-{0..1}.tar", "t.shards.json"])
def test_a_server_without_ranges_has_its_shards_streamed(whole_files_only, names, caplog):
    url = f"{whole_files_only.url}/{names}"
    stream = Stream.from_shards(url)
    assert [sample["txt"] for sample in stream] == [b"%d" % i for i in range(6)]
    (told,) = [record.getMessage() for record in caplog.records if "no ranges" in record.getMessage()]
    assert "t-0.tar: the server serves no ranges, so shards are streamed whole, as with index=False" in told
    for options in {"shuffle": True}, {"tail": "pad"}, {"pool": 10}, {"resample": True}:
        with pytest.raises(
            OpenError, match=r"t-0.tar: the server serves no ranges.*; index=False streams shards whole"
        ):
            Stream.from_shards(url, **options)
        if "tail" not in options and "pool" not in options:
            assert len(list(Stream.from_shards(url, index=False, **options))) == 6
    with pytest.raises(OpenError, match=r"t-\d.tar.*: the server serves no ranges.*; index=False streams shards whole"):
        list(Stream.from_shards(url, index=True))
    with pytest.raises(OpenError, match=r"t-0.tar.*: the server serves no ranges.*; index=False streams shards whole"):
        IndexedShards(url)[0]


def test_tools_read_indexed_shards_of_a_server_without_ranges(whole_files_only, path_with_tools, tmp_path):
    urls = f"'{whole_files_only.url}/t-{{0..1}}.tar'"
    (tmp_path / "keys").write_text("4\n")
    with TarWriter(str(tmp_path / "other.tar")) as writer:
        for key in "53140":
            writer.write({"__key__": key, "cls": f"c{key}".encode()})
    environment = {**os.environ, "PATH": path_with_tools, "no_proxy": "*"}

    def texts(line: str) -> str:
        line = f"set -o pipefail; cd {tmp_path}; {line} | tar xO"
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert texts(f"tarcat --keys keys {urls}") == "4"
    assert texts(f"tarmerge --missing skip other.tar {urls}") == "c55c33c11c44c00"
    done = subprocess.run(["bash", "-c", f"tarcheck {urls}"], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("shards    2"), done.stdout


@pytest.mark.parametrize("ranks", [1, 64])
def test_ranks_that_mix_few_blocks_are_told_of_a_larger_pool(make_shards, monkeypatch, caplog, ranks):
    monkeypatch.setattr(plan, "POOL", 192 * 2)
    monkeypatch.setattr(plan, "POOL_BYTES", 1)  # as with large samples
    monkeypatch.setattr(plan, "MIXED_BLOCKS", 6)
    urls = make_shards(2, 600, index=True)
    for rank, worker, is_told in [(1, 0, False), (0, 1, False), (0, 0, ranks > 1)]:
        if rank >= ranks:
            continue
        sources._log_few_blocks.cache_clear()
        caplog.clear()
        next(iter(Stream.from_shards(urls, shuffle=True, world=World(rank, ranks, worker, 2))))
        words = "each of 64 ranks mixes only 0 blocks of 16 neighbouring samples at a time"
        assert [words in record.getMessage() for record in caplog.records] == [True] * is_told
    next(iter(Stream.from_shards(urls, shuffle=True, world=World(0, ranks), pool=1200)))
    next(iter(Stream.from_shards(urls, world=World(0, ranks))))
    assert len(caplog.records) == is_told


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_tells_of_a_larger_pool_once_and_not_in_its_workers(make_shards, monkeypatch, caplog, workers):
    monkeypatch.setattr(plan, "POOL", 192 * 2)
    monkeypatch.setattr(plan, "POOL_BYTES", 1)
    monkeypatch.setattr(plan, "MIXED_BLOCKS", 6)
    sources._log_few_blocks.cache_clear()
    dataset = ShardDataset(make_shards(2, 600, index=True), shuffle=True, world=World(0, 64))
    loader = ShardLoader(dataset, 4, num_workers=workers)
    for _ in range(2):
        list(loader)
    words = "each of 64 ranks mixes only 0 blocks"  # logged by the parent, not by workers, which begin again each epoch
    assert [words in record.getMessage() for record in caplog.records] == [True]
