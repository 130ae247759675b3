"""``tarshards.webdataset.wids``: samples by number, and samplers of chunks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tarshards import ShardWriter
from tarshards.webdataset import wids


@pytest.fixture
def manifest(tmp_path) -> Path:
    with ShardWriter(tmp_path / "set-%02d.tar", max_samples=4, sync=False) as writer:
        for number in range(14):
            fields = {"cls": number, "txt": f"text {number}", "png": np.full((2, 3, 3), number, np.uint8)}
            writer.write({"__key__": f"{number:03d}", **fields})
    return tmp_path / "set.shards.json"


def test_samples_by_number(manifest):
    dataset = wids.ShardListDataset(str(manifest), keep=True, dataset_name="set")
    assert len(dataset) == 14
    sample = dataset[9]
    assert (sample["__key__"], sample["__index__"], sample["__dataset__"]) == ("009", 9, "set")
    assert (sample[".cls"], sample[".txt"], sample[".png"].size) == (9, "text 9", (3, 2))
    assert sample["__shard__"].endswith("set-02.tar")
    listed = [
        {**each, "url": str(manifest.parent / each["url"])} for each in json.loads(manifest.read_text())["shardlist"]
    ]
    raw = wids.ShardListDataset(listed, transformations=None).add_transform(lambda sample: sample[".txt"])
    assert raw[3] == b"text 3"


def test_the_samples_are_those_of_wids_itself(manifest, tmp_path):
    theirs = pytest.importorskip("wids")
    options = {"keep": True, "cache_dir": str(tmp_path / "cache")}
    with pytest.warns(UserWarning, match="String specifications"):
        expected = theirs.ShardListDataset(str(manifest), base=str(tmp_path), **options)
    ours = wids.ShardListDataset(str(manifest), **options)
    for number in range(14):
        fields = [
            {name: sample[name] for name in (".cls", ".txt", "__key__")} for sample in (expected[number], ours[number])
        ]
        assert fields[0] == fields[1]
        assert expected[number][".png"].tobytes() == ours[number][".png"].tobytes()


def test_samplers_draw_every_sample_chunk_by_chunk(manifest):
    dataset = wids.ShardListDataset(str(manifest))
    assert list(wids.ChunkedSampler(dataset, chunksize=4, shuffle=False)) == list(range(14))
    sampler = wids.ChunkedSampler(dataset, chunksize=4)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(14))
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert sum(a // 4 != b // 4 for a, b in pairwise(first)) == 3
    loader = DataLoader(dataset, batch_size=None, sampler=wids.ChunkedSampler(dataset, chunksize=4), num_workers=2)
    assert sorted(sample[".cls"] for sample in loader) == list(range(14))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_ranks_have_parts_of_equal_length_that_cover_all(manifest, ranks):
    dataset = wids.ShardListDataset(str(manifest))
    places = [{"num_replicas": ranks, "rank": rank} for rank in range(ranks)]
    parts = [wids.DistributedChunkedSampler(dataset, chunksize=3, **place) for place in places]
    assert {len(part) for part in parts} == {-(-14 // ranks)}
    assert {number for part in parts for number in part} == set(range(14))
