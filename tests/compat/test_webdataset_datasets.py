"""``WebDataset`` and similar classes over shards: URLs, error handlers, ranks and workers, ledgers, states, writers."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import tarfile
import time
from collections import Counter
from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset as upstream
from range_server import serving
from soak import some

import tarshards
import tarshards.webdataset as wds
from tarshards.epoch.world import World
from tarshards.errors import EncodeError, StateError, WorldError
from tarshards.webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander, url_opener, valid_sample


def keys(samples) -> list[str]:
    return [sample["__key__"] for sample in samples]


def one(shards: str) -> str:
    (url,) = wds.shardlists.expand_urls(shards)
    return url


def every(count: int) -> list[str]:
    return [f"{number:06d}" for number in range(count)]


@pytest.fixture(params=[False, True], ids=["streamed", "indexed"])
def shards(request, make_shards):
    """Four shards of five samples, without and with indexes."""
    return make_shards(4, 5, index=request.param)


def test_samples_are_those_of_the_shards(shards):
    samples = list(wds.WebDataset(shards))
    assert samples == list(tarshards.read_samples(shards))
    assert keys(wds.WebDataset(wds.shardlists.expand_urls(shards))) == every(20)
    assert keys(wds.WebDataset(shards.replace("{0000..0003}", "0001") + "::" + shards)) == every(20)[5:10] + every(20)


def test_urls_have_braces_colons_pipes_and_variables(shards, monkeypatch):
    folder = str(Path(shards).parent)
    monkeypatch.setenv("WDS_DATA", folder)
    assert keys(wds.WebDataset("${DATA}/set-{0000..0003}.tar")) == every(20)
    monkeypatch.setenv("WDS_ALL", "${DATA}/set-{0000..0003}.tar")
    assert keys(wds.WebDataset("${ALL}")) == every(20)
    assert keys(wds.WebDataset(f"pipe:cat {folder}/set-{{0000..0001}}.tar")) == every(10)
    assert keys(wds.WebDataset([f"pipe:cat {folder}/set-0000.tar", f"{folder}/set-0001.tar"])) == every(10)
    with pytest.raises(OSError, match="set-0009"):
        list(wds.WebDataset(f"{folder}/set-0009.tar"))


def test_every_dataset_has_a_ledger(shards):
    dataset = (
        wds.WebDataset(shards).select(lambda sample: sample["cls"] != b"3").decode().map(fail_at_seven, handler=skip)
    )
    assert len(list(dataset)) == 18
    ledger = dataset.ledger
    assert (ledger.shards, ledger.samples, ledger.failed) == (4, 18, 1)
    assert list(ledger.filtered.values()) == [1]
    assert [entry.key for entry in ledger.quarantined] == ["000007"]
    assert not ledger.unaudited
    next(iter(dataset))
    assert ledger.unaudited


skip = wds.ignore_and_continue


def keep(sample):
    return sample


def fail_at_seven(sample):
    if sample["cls"] == 7:
        raise ValueError("seven")
    return sample


def test_the_ledger_counts_over_workers(shards):
    dataset = wds.WebDataset(shards).map(fail_at_seven_undecoded, handler=skip)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
    assert len(list(loader)) == 19
    assert (dataset.ledger.shards, dataset.ledger.samples, dataset.ledger.failed) == (4, 19, 1)


def fail_at_seven_undecoded(sample):
    return fail_at_seven({**sample, "cls": int(sample["cls"])})


@pytest.fixture
def damaged(make_shards):
    """Three shards; the second is cut in the middle of its third sample."""
    urls = wds.shardlists.expand_urls(make_shards(3, 5))
    data = Path(urls[1]).read_bytes()
    Path(urls[1]).write_bytes(data[: 5 * 1024 + 100])
    return urls


@pytest.mark.parametrize(
    ("handler", "expected"),
    [(wds.ignore_and_continue, every(7) + every(15)[10:]), (wds.ignore_and_stop, every(7))],
)
def test_damage_is_told_and_the_handler_decides(damaged, handler, expected):
    for raising in (wds.reraise_exception, None):
        with pytest.raises(tarfile.ReadError, match=r"set-0001\.tar: offset \d+"):
            list(wds.WebDataset(damaged, handler=raising).map(keep, handler=raising))
    dataset = wds.WebDataset(damaged, handler=handler)
    assert keys(dataset) == expected
    assert [Path(entry.shard).name for entry in dataset.ledger.quarantined] == ["set-0001.tar"]
    expanded = wds.DataPipeline(
        wds.SimpleShardList(damaged), partial(url_opener, handler=handler), partial(tar_file_expander, handler=handler)
    )
    names = [file["fname"] for file in expanded]
    assert [name[:6] for name in names if name.endswith("cls")] == expected


def test_compressed_shards_that_end_early_are_told_too(make_shards, tmp_path):
    path = tmp_path / "a.tgz"
    path.write_bytes(gzip.compress(Path(one(make_shards(1, 50))).read_bytes())[:-40])
    with pytest.raises(tarfile.ReadError, match=r"a\.tgz"):
        list(wds.WebDataset(str(path)))
    assert len(keys(wds.WebDataset(str(path), handler=skip))) < 50


def test_files_are_selected_and_renamed(shards):
    (sample, *_) = wds.WebDataset(shards, select_files=lambda name: not name.endswith(".cls"))
    assert {"txt"} == sample.keys() - {"__key__", "__url__"}
    (sample, *_) = wds.WebDataset(shards, rename_files=lambda name: name.replace(".cls", ".class"))
    assert {"txt", "class"} == sample.keys() - {"__key__", "__url__"}


def test_the_stages_that_projects_put_together_anew(make_shards):
    shards = make_shards(3, 5)
    source = [{"url": url} for url in wds.shardlists.expand_urls(shards)]
    files = list(tar_file_expander(url_opener(source)))
    assert {"fname", "data", "__url__"} <= files[0].keys()
    assert list(group_by_keys(files)) == list(wds.WebDataset(shards))
    twice = tar_file_expander(url_opener(source[:1] * 2))
    assert keys(group_by_keys(twice)) == every(5) * 2
    bare = [{"fname": "a/b.C.jpg", "data": b"1", "__url__": "x"}, {"fname": "a/b.txt", "data": b"2", "__url__": "x"}]
    assert list(group_by_keys(bare)) == [{"__key__": "a/b", "__url__": "x", "c.jpg": b"1", "txt": b"2"}]
    assert list(group_by_keys(bare, suffixes={"txt"})) == [{"__key__": "a/b", "__url__": "x", "txt": b"2"}]
    with pytest.raises(ValueError, match="duplicate"):
        list(group_by_keys(bare[:1] * 2))
    assert list(group_by_keys([*bare[:1] * 2, *bare[1:]], handler=skip)) == []
    marked = [bare[0], {}, bare[1], {}]  # webdataset's own expander marks the end of an archive so
    assert [sample.keys() - {"__key__", "__url__"} for sample in group_by_keys(marked)] == [{"c.jpg"}, {"txt"}]
    assert (base_plus_ext("a.b/c.d.e"), base_plus_ext("a.b/c")) == (("a.b/c", "d.e"), (None, None))
    assert [valid_sample(each) for each in (None, {}, {"__bad__": True}, bare[0])] == [False, False, False, True]


def test_shards_are_shuffled_alike_everywhere_and_differently_each_epoch(make_shards):
    shards = make_shards(30, 1)
    orders = [
        [keys(dataset) for _ in range(2)] for dataset in (wds.WebDataset(shards, shardshuffle=True) for _ in "ab")
    ]
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == sorted(orders[0][1]) == every(30)
    assert keys(wds.WebDataset(shards, shardshuffle=30, seed=1)) != orders[0][0]


def test_resampled_shards_go_on_for_ever(shards):
    drawn = keys(wds.WebDataset(shards, resampled=True, seed=3).slice(200))
    assert drawn == keys(wds.WebDataset(shards, resampled=True, seed=3).slice(200))
    assert set(drawn) == set(every(20))
    assert Counter(drawn).most_common(1)[0][1] > 5
    unseeded = [tuple(url["url"] for url in wds.ResampledShards(shards, nshards=40)) for _ in range(3)]
    assert len(set(unseeded)) == 3
    with pytest.raises(ValueError, match="no shards"):
        wds.ResampledShards([])


SEEDS = [True, False, None, 0, 7]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("workers", "seed"), [*product([0, 1], SEEDS), *product([3], some(SEEDS, 2))])
def test_workers_agree_on_the_order_of_a_list_of_shards(make_shards, seed, workers):
    """They share it out, so that an order of each worker's own would lose shards and read others twice."""
    stages = wds.SimpleShardList(make_shards(20, 7), seed=seed), wds.split_by_worker, wds.tarfile_to_samples()
    loader = wds.WebLoader(wds.DataPipeline(*stages), batch_size=None, num_workers=workers)
    first, second = keys(loader), keys(loader)
    assert sorted(first) == every(140)
    assert first == second
    assert (first[0] == every(1)[0]) is (seed is None)


def test_ranks_agree_on_the_order_of_a_list_of_shards(make_shards, ranks):
    urls = make_shards(20, 1)
    seen = []
    for rank in range(3):
        ranks(rank, 3)
        stages = wds.SimpleShardList(urls, seed=True), wds.split_by_node, wds.tarfile_to_samples()
        seen += keys(wds.DataPipeline(*stages))
    assert sorted(seen) == every(20)


def _drawn(urls, workers, epochs=2):
    stages = wds.ResampledShards(urls, nshards=20, deterministic=True, seed=5), wds.tarfile_to_samples()
    loader = wds.WebLoader(wds.DataPipeline(*stages), batch_size=None, num_workers=workers)
    return [keys(loader) for _ in range(epochs)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_deterministic_resampling_is_the_same_in_every_run_and_another_in_every_epoch(make_shards, workers):
    urls = make_shards(20, 1)
    epochs = _drawn(urls, workers)
    assert epochs == _drawn(urls, workers)
    assert epochs[0] != epochs[1]
    if workers == 3:
        assert len({tuple(epochs[0][number::3]) for number in range(3)}) == 3


def test_repeat_makes_a_dataset_endless(shards):
    assert keys(islice(wds.WebDataset(shards, repeat=True), 45)) == every(20) * 2 + every(5)


@pytest.fixture
def ranks(monkeypatch):
    """Return a function that sets which rank this process is."""

    def be(rank: int, ranks: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))

    return be


def test_ranks_share_the_shards_or_are_told_that_they_do_not(shards, ranks):
    seen = []
    for rank in range(2):
        ranks(rank, 2)
        dataset = wds.WebDataset(shards, shardshuffle=True, nodesplitter=wds.split_by_node)
        seen.append(keys(dataset) + keys(dataset))
        with pytest.raises(WorldError, match="nodesplitter=split_by_node"):
            list(wds.WebDataset(shards))
    assert Counter(seen[0] + seen[1]) == Counter(every(20) * 2)
    for rank in range(5):  # on every rank, since one alone would leave the others waiting
        ranks(rank, 5)
        with pytest.raises(WorldError, match="4 shards for 5 ranks"):
            list(wds.WebDataset(shards, nodesplitter=wds.split_by_node))


def test_workers_share_the_shards(shards):
    for workers in (1, 2):
        loader = wds.WebLoader(wds.WebDataset(shards), batch_size=None, num_workers=workers)
        assert sorted(keys(loader)) == every(20)
    shard = wds.shardlists.expand_urls(shards)[0]
    loader = wds.WebLoader(wds.WebDataset(shard), batch_size=None, num_workers=2)
    with pytest.raises(ValueError, match="fewer shards than"):
        list(loader)
    loader = wds.WebLoader(wds.WebDataset(shard, empty_check=False), batch_size=None, num_workers=2)
    assert keys(loader) == every(5)


def test_epochs_differ_in_workers_that_begin_anew(make_shards):
    dataset = wds.WebDataset(make_shards(30, 1), shardshuffle=True)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
    epochs = [keys(loader) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [sorted(epoch) for epoch in epochs] == [every(30)] * 3


def test_batches_are_mixed_again_behind_the_loader(shards):
    dataset = wds.WebDataset(shards).decode().to_tuple("cls", "txt").batched(4)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2).unbatched().shuffle(20).batched(5)
    batches = list(loader.with_epoch(4))
    assert [len(numbers) for numbers, _ in batches] == [5] * 4
    assert sorted(number for numbers, _ in batches for number in numbers) == list(range(20))
    assert all(text == f"text {number}" for numbers, texts in batches for number, text in zip(numbers, texts))


@pytest.mark.parametrize("stop", [0, 1, 7, 10, 19, 20])
def test_a_state_goes_on_where_the_loop_stood(shards, stop):
    def make():
        return wds.WebDataset(shards, shardshuffle=True).decode().select(lambda sample: sample["cls"] % 3)

    whole = [keys(dataset := make()), keys(dataset), keys(dataset)]
    dataset = make()
    list(dataset)
    iterator = iter(dataset)
    taken = [sample["__key__"] for _, sample in zip(range(stop), iterator)]
    state = json.loads(json.dumps(dataset.state_dict()))
    assert ("taken" in state, state["epoch"]) == (True, 1)
    again = make()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert taken + keys(again) == whole[1]
    assert keys(again) == whole[2]


def test_a_state_skips_samples_of_indexed_shards_unread(make_shards):
    read = []
    shards = make_shards(4, 5, index=True)
    dataset = wds.WebDataset(shards).decode().map(lambda sample: read.append(sample["cls"]) or sample)
    iterator = iter(dataset)
    for _ in range(12):
        next(iterator)
    state = dataset.state_dict()
    del read[:], iterator
    before = dataset.ledger.samples
    dataset.load_state_dict(state)
    assert len(list(dataset)) == 8
    assert read == list(range(12, 20))
    assert dataset.ledger.samples - before == 8


@pytest.mark.parametrize(
    ("index", "digest"), [(False, "dda52a5e51fdacc4884cb817e5016704"), (True, "a4151ec6550a87b1a6163b0a540ce3bb")]
)
def test_states_that_were_saved_before_are_taken(make_shards, index, digest):
    """The state of a pipeline of version 0.1.0, and the samples after it."""
    order = "SimpleShardList(None) shuffle(100, 100, 3) single_node_only() split_by_worker() _read_samples(None, None)"
    state = {"version": 1, "digest": digest, "epoch": 0, "order": [order], "taken": 11, "world": [0, 1, 0, 1]}
    dataset = wds.WebDataset(make_shards(4, 5, index=index), shardshuffle=True, seed=3).decode()
    dataset = dataset.select(lambda sample: sample["cls"] % 3)
    dataset.load_state_dict(state)
    assert keys(dataset) == ["000011", "000013", "000014", "000016", "000017", "000019"]


@pytest.mark.filterwarnings("ignore:.set_vital.")
def test_torchdata_saves_the_states_of_workers(shards):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        dataset = wds.WebDataset(shards, shardshuffle=True).decode()
        return loaders.StatefulDataLoader(dataset, batch_size=None, num_workers=2)

    whole = keys(make())
    loader = make()
    iterator = iter(loader)
    first = [next(iterator)["__key__"] for _ in range(7)]
    again = make()
    again.load_state_dict(loader.state_dict())
    assert first + keys(again) == whole


def every_other(samples):
    return islice(samples, 0, None, 2)


def test_what_holds_samples_back_is_made_again(shards):
    def make():
        return wds.WebDataset(shards).shuffle(8).compose(every_other).to_tuple("txt").batched(3)

    whole = list(make())
    dataset = make()
    iterator = iter(dataset)
    first = [next(iterator) for _ in range(3)]
    again = make()
    again.load_state_dict(dataset.state_dict())
    assert first + list(again) == whole


def test_states_of_other_pipelines_and_of_chance_are_refused(shards, make_shards):
    state = wds.WebDataset(shards, shardshuffle=True).state_dict()
    with pytest.raises(StateError, match="another order"):
        wds.WebDataset(shards, shardshuffle=True, seed=1).load_state_dict(state)
    with pytest.raises(StateError, match="another dataset"):
        wds.WebDataset(make_shards(2, name="other")).load_state_dict(state)
    for dataset, name in [
        (wds.WebDataset(shards, resampled=True), "ResampledShards"),
        (wds.WebDataset(shards).shuffle(5, rng=random.Random(1)), "shuffle"),
        (wds.WebDataset(shards).compose(wds.detshuffle(5)), "detshuffle"),
    ]:
        with pytest.raises(TypeError, match=f"what {name} does cannot be repeated"):
            dataset.state_dict()


def test_loaders_have_no_state_that_a_trainer_would_ask_for(shards):
    loader = wds.WebLoader(wds.WebDataset(shards), batch_size=None)
    assert not hasattr(loader, "state_dict")  # Lightning saves the state of every loader that has one


def test_a_faulty_sample_of_an_indexed_shard_keeps_its_place_in_a_state(make_shards):
    shards = make_shards(2, 5, index=True)
    path = Path(wds.shardlists.expand_urls(shards)[0])
    data = bytearray(path.read_bytes())
    at = data.index(b"000002.cls\0")
    data[at : at + 6] = b"xxxxxx"  # a member has another name than in the index
    path.write_bytes(data)
    dataset = wds.WebDataset(shards, handler=skip)
    whole = keys(dataset)
    assert len(whole) == 9
    for stop in range(9):
        iterator = iter(dataset)
        taken = [next(iterator)["__key__"] for _ in range(stop)]
        again = wds.WebDataset(shards, handler=skip)
        again.load_state_dict(dataset.state_dict())
        assert taken + keys(again) == whole


def test_blocks_of_shards_are_cached(shards, tmp_path):
    folder = Path(wds.shardlists.expand_urls(shards)[0]).parent
    with serving(folder) as site:
        urls = f"{site.url}/set-{{0000..0003}}.tar"
        dataset = wds.WebDataset(urls, cache_dir=tmp_path / "cache")
        first = list(dataset)
        assert keys(first) == every(20)
        assert first[0]["__url__"] == f"{site.url}/set-0000.tar"
        assert list((tmp_path / "cache").iterdir())
        site.clear()
        assert keys(dataset) == every(20)
        assert site.bytes <= 4, "each server is asked for the version of its file"
        assert keys(wds.WebDataset(urls, cache_dir=str(tmp_path / "none"), cache_size=0)) == every(20)
        assert site.bytes > 4000
        assert not (tmp_path / "none").exists()
        with pytest.raises(ValueError, match="cache_bytes must be at least"):
            wds.WebDataset(urls, cache_dir=str(tmp_path / "none"), cache_size=1000)


def one_name(url):
    return "folder/x.tar"


@pytest.mark.parametrize("names", [{}, {"url_to_name": wds.shardlists.url_to_cache_name}, {"url_to_name": one_name}])
def test_shards_of_one_name_are_cached_apart(tmp_path, names):
    """Two datasets in two folders of a server, or two objects that a query tells apart."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
        with tarshards.TarWriter(tmp_path / folder / "train-000.tar", sync=False) as writer:
            writer.write({"__key__": folder, "txt": folder})
    with serving(tmp_path) as site:
        for _ in range(2):
            for folder in "ab":
                dataset = wds.WebDataset(f"{site.url}/{folder}/train-000.tar", cache_dir=tmp_path / "cache", **names)
                assert keys(dataset) == [folder]


def test_a_cache_folder_may_begin_with_a_tilde(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with serving(Path(wds.shardlists.expand_urls(shards)[0]).parent) as site:
        assert keys(wds.WebDataset(f"{site.url}/set-0000.tar", cache_dir="~/cache")) == every(5)
    assert (tmp_path / "cache").is_dir()
    assert not (tmp_path / "~").exists()


def test_states_of_datasets_with_a_cache(shards, tmp_path):
    """They are those of datasets without; earlier ones name the stage that the cache was."""
    with serving(Path(wds.shardlists.expand_urls(shards)[0]).parent) as site:
        url = f"{site.url}/set-{{0000..0003}}.tar"
        dataset = wds.WebDataset(url, cache_dir=tmp_path / "cache", shardshuffle=True, seed=3)
        iterator = iter(dataset)
        taken = keys(islice(iterator, 7))
        state = json.loads(json.dumps(dataset.state_dict()))
        iterator.close()
        (stages,) = state["order"]
        earlier = {**state, "order": [stages.replace(" _read_samples", " local() _read_samples")]}
        for each in (state, earlier):
            again = wds.WebDataset(url, shardshuffle=True, seed=3)
            again.load_state_dict(each)
            assert sorted(taken + keys(again)) == sorted(every(20))


def test_remote_shards_are_fetched_ahead(make_shards, tmp_path):
    make_shards(20, 5)
    with serving(tmp_path) as site:
        urls = f"{site.url}/set-{{0000..0019}}.tar"
        dataset = wds.WebDataset(urls)
        assert keys(dataset) == every(100)
        assert dataset.ledger.samples == 100
        site.clear()
        iterator = iter(dataset)
        next(iterator)
        deadline = time.monotonic() + 30
        while not site.asked("set-0001.tar"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        iterator.close()
        mixed = wds.WebDataset([urls, str(tmp_path / "set-0003.tar")])
        assert len(keys(mixed)) == 105
        listed = [{"url": url} for url in (f"{site.url}/none.tar", f"{site.url}/set-0000.tar", "odd:x")]
        dataset = wds.DataPipeline(lambda: iter(listed), wds.tarfile_to_samples(handler=skip))
        assert keys(dataset) == every(5)
        assert len(dataset.ledger.quarantined) == 2


def test_half_a_shard_is_an_error_with_a_cache_too(shards, tmp_path):
    path = Path(wds.shardlists.expand_urls(shards)[0])
    path.write_bytes(path.read_bytes()[:3000])
    with serving(path.parent) as site:
        for _ in range(2):
            with pytest.raises(tarfile.ReadError, match="truncated"):
                list(wds.WebDataset(f"{site.url}/set-0000.tar", cache_dir=tmp_path / "cache"))


def test_schemes_of_a_users_own(shards, monkeypatch):
    path = wds.shardlists.expand_urls(shards)[0]
    monkeypatch.setitem(wds.gopen_schemes, "mine", lambda url, mode, bufsize, **options: io.FileIO(path, mode))
    with wds.gopen("mine:x") as stream:
        assert stream.read() == Path(path).read_bytes()
    assert keys(wds.WebDataset("mine:x")) == every(5)


@pytest.mark.parametrize("url", ["pipe:cat x.tar", "x.tar"])
def test_commands_and_local_files_can_be_refused(monkeypatch, url):
    monkeypatch.setattr(wds.utils, "enforce_security", True)
    with pytest.raises(ValueError, match="unsafe_gopen is False"):
        wds.gopen(url)
    with pytest.raises(ValueError, match="unsafe_gopen is False"):
        list(wds.WebDataset([url]))


ENCODERS = {
    "json": lambda value: json.dumps(value, sort_keys=True),
    "cls": lambda value: value + 1,
    "bin": bytearray,
    "npy": lambda value: memoryview(bytes(value)),
    "bad": lambda value: 1 / value,
}


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_our_codecs_encode_what_an_encoder_leaves(packed):
    """An encoder runs before them: it may give the text of JSON, another value, or any buffer."""
    sample = {"json": {"b": 1, "a": 2}, "cls": 3, "bin": b"x", "npy": [7], "txt": "y", "raw": bytearray(b"z")}
    stream = io.BytesIO()
    with wds.TarWriter(stream, encoder=ENCODERS) as writer:
        writer.write({"__key__": "a", **{f"{name}{packed}": value for name, value in sample.items()}})
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}
    fields = {"json": b'{"a": 2, "b": 1}', "cls": b"4", "bin": b"x", "npy": b"\x07", "txt": b"y", "raw": b"z"}
    assert {name: gzip.decompress(data) if packed else data for name, data in found.items()} == {
        f"a.{name}{packed}": data for name, data in fields.items()
    }


@pytest.mark.parametrize("field", ["bad", "a.BAD", "bad.gz"])
def test_the_error_of_an_encoder_is_the_cause(field):
    """The error names the sample to write; the shard it was read from has no part in it."""
    with wds.TarWriter(io.BytesIO(), encoder=ENCODERS) as writer:
        with pytest.raises(EncodeError, match=rf"^k\.{field}: division by zero$") as caught:
            writer.write({"__key__": "k", "__url__": "in.tar", field: 0})
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert (caught.value.key, caught.value.field) == ("k", field)


def test_tar_writer_writes_what_is_read(tmp_path):
    sample = {"__key__": "a", "txt": "x", "json": {"b": 1}, "cls": 3, "_note": "y"}
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        assert writer.write(sample) == 3 * 1024
    (read,) = wds.WebDataset(str(tmp_path / "a.tar")).decode()
    assert {name: value for name, value in read.items() if name != "__url__"} == {
        "__key__": "a",
        "txt": "x",
        "json": {"b": 1},
        "cls": 3,
    }
    with wds.TarWriter(str(tmp_path / "b.tar"), encoder={"cls": lambda value: b"%d!" % value}) as writer:
        writer.write(sample)
    assert next(iter(wds.WebDataset(str(tmp_path / "b.tar"))))["cls"] == b"3!"
    with (
        pytest.raises(ValueError, match=r"a\.txt: without an encoder"),
        wds.TarWriter(io.BytesIO(), encoder=False) as w,
    ):
        w.write(sample)
    packed = io.BytesIO()
    with wds.TarWriter(packed, compress=True) as writer:
        writer.write(sample)
    assert gzip.decompress(packed.getvalue()) == (tmp_path / "a.tar").read_bytes()
    with wds.TarWriter(str(tmp_path / "c.tar"), compress=True) as writer:
        writer.write(sample)
    assert gzip.decompress((tmp_path / "c.tar").read_bytes()) == (tmp_path / "a.tar").read_bytes()
    for word, magic in [("gz", b"\x1f\x8b"), ("bz2", b"BZh"), ("xz", b"\xfd7z"), (False, b"a.cls")]:
        with wds.TarWriter(str(tmp_path / "d.tar"), compress=word) as writer:
            writer.write(sample)
        assert (tmp_path / "d.tar").read_bytes().startswith(magic)
    for name, word in [("d.tgz", False), ("d.tgz", "bz2"), ("d.tar", "rar")]:
        with pytest.raises(ValueError, match=rf"compress={word!r}|the suffix \.{word} is not supported"):
            wds.TarWriter(str(tmp_path / name), compress=word)
    with pytest.warns(UserWarning, match="mtime and format are fixed"):
        wds.TarWriter(io.BytesIO(), mtime=0).close()
    with pytest.raises(TypeError, match="takes no mtimes"):
        wds.TarWriter(io.BytesIO(), mtimes=0)


FLOATS = np.linspace(0, 1, 60).reshape(4, 5, 3)
WRITTEN = [
    *(("json", value) for value in ["5", "hello", {1: 2}, (1, float("inf")), {"ü": None}, [True], 7]),
    *(("cls", value) for value in ["7", 7, True, 1.5, np.int64(3)]),
    *(("mp", value) for value in ["5", {1: (2, 3)}, [b"x", 1.5]]),
    *((field, "hello") for field in ("npy", "pth", "pkl", "png", "html", "caption", "txt", "txt.gz", "json.gz")),
    *((field, b"hello") for field in ("json", "raw", "txt.gz", "raw.gz")),
    *((field, value) for field in ("png", "jpg", "tif", "ppm", "image") for value in (FLOATS, FLOATS.astype("f4"))),
    *((field, (FLOATS * 255).astype("u1")) for field in ("png", "jpg")),
    *((field, np.arange(6.0)) for field in ("npy", "ten", "x.npy.gz")),
    *(("pyd", value) for value in [[1, (2,)]]),
]


@pytest.mark.parametrize(("field", "value"), WRITTEN, ids=[f"{field}-{n}" for n, (field, _) in enumerate(WRITTEN)])
def test_writers_write_what_webdataset_writes(field, value):
    found = []
    for writer in upstream.TarWriter, wds.TarWriter:
        stream = io.BytesIO()
        with writer(stream) as shard:
            shard.write({"__key__": "a", field: value})
        stream.seek(0)
        with tarfile.open(fileobj=stream) as archive:
            (member,) = archive
            data = archive.extractfile(member).read()
        found.append((member.name, gzip.decompress(data) if field.endswith(".gz") else data))
    if field == "pyd":
        found = [(name, pickle.loads(data)) for name, data in found]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("field", "value", "data"),
    [
        *[(field, "null", b"null") for field in ("json", "mp", "npy", "pth", "cls", "xyz")],
        ("json", {"a": float("nan"), "é": (1, 2), 3: None}, b'{"a": NaN, "\\u00e9": [1, 2], "3": null}'),
        ("mp", (1, 2), b"\x92\x01\x02"),
        ("count", 1.5, b"1.5"),
        ("cls", True, b"True"),
        ("cls", torch.tensor(3), b"3"),
    ],
)
def test_the_writer_encodes_as_webdataset_does(tmp_path, field, value, data):
    with wds.ShardWriter(str(tmp_path / "a-%d.tar")) as writer:
        writer.write({"__key__": "a", field: value, f"{field}.gz": value, "raw.gz": data})
    (sample,) = wds.WebDataset(str(tmp_path / "a-0.tar"))
    assert (sample[field], gzip.decompress(sample[f"{field}.gz"])) == (data, data)
    assert gzip.decompress(sample["raw.gz"]) == data


def test_a_value_that_does_not_encode_is_told_with_its_place(tmp_path):
    with wds.TarWriter(io.BytesIO()) as writer:
        with pytest.raises(ValueError, match=r"a\.json: .* not JSON serializable"):
            writer.write({"__key__": "a", "json": {1, 2}})
        writer.write({"__key__": "a", "cls": 1})


def test_shard_writer_writes_numbered_shards_with_indexes(tmp_path):
    finished = []
    with wds.ShardWriter(str(tmp_path / "s-%03d.tar"), maxcount=4, post=finished.append, start_shard=2) as writer:
        for number in range(10):
            writer.write({"__key__": f"{number:06d}", "cls": number})
            assert (writer.total, writer.count, writer.shard) == (number + 1, number % 4 + 1, 3 + number // 4)
    assert [Path(name).name for name in finished] == ["s-002.tar", "s-003.tar", "s-004.tar"]
    assert len(tarshards.IndexedShards(str(tmp_path / "s-{002..004}.tar"))) == 10
    opened = []
    with wds.ShardWriter(str(tmp_path / "t-%d.tar"), opener=lambda name: opened.append(name) or open(name, "wb")) as w:
        w.write({"__key__": "a", "cls": 1})
    assert opened == [str(tmp_path / "t-0.tar")]


def test_a_persistent_generator_of_torch_does_not_matter(shards):
    torch.manual_seed(0)
    first = keys(wds.WebDataset(shards, shardshuffle=True).shuffle(10))
    torch.manual_seed(1)
    assert keys(wds.WebDataset(shards, shardshuffle=True).shuffle(10)) == first


def test_the_rank_and_worker_are_told():
    assert wds.utils.pytorch_worker_info() == (0, 1, 0, 1)
    assert wds.utils.pytorch_worker_seed() == World.detect().rank
