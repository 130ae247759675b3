"""Lazy fields in loaders: files come out of workers, arrays are made of their bytes."""

from __future__ import annotations

import logging
import random

import pytest
from range_server import serving
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import ArrayLoader, Remote, ShardWriter, Stream, readers

pytestmark = [
    pytest.mark.usefixtures("quick_spawn"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
DATA = [random.Random(number).randbytes(size) for number, size in enumerate((10, 100_000, 0, 300_000))]


@pytest.fixture(params=["local", "remote"])
def urls(request, tmp_path):
    with ShardWriter(f"{tmp_path}/set-%d.tar", max_samples=2) as writer:
        for number, data in enumerate(DATA):
            writer.write({"__key__": f"{number}", "bin": data, "cls": b"%d" % number})
    with serving(tmp_path) as site:
        yield f"{tmp_path if request.param == 'local' else site.url}/set-{{0,1}}.tar"


@pytest.mark.parametrize("index", [True, False])
def test_an_array_loader_reads_them_whole(urls, index):
    dataset = Stream.from_shards(urls, index=index, lazy="bin")
    batches = list(ArrayLoader(dataset, 2, fields={"bin": readers.bytes_(), "cls": readers.integer()}))
    assert [data for batch in batches for data in batch["bin"]] == DATA
    assert [batch["cls"].tolist() for batch in batches] == [[0, 1], [2, 3]]


WORKERS = [("local", "fork"), ("remote", "fork"), ("remote", "spawn")]


@pytest.mark.parametrize(("urls", "method"), WORKERS, indirect=["urls"])
def test_a_worker_sends_files(urls, method):
    index = method == "fork"
    dataset = ShardDataset(urls, index=index, lazy="bin").decode()
    for batch in ShardLoader(dataset, 2, num_workers=1 + index, multiprocessing_context=method):
        assert [file.read() for file in batch["bin"]] == [DATA[number] for number in batch["cls"]]
    if index:
        for sample in DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method):
            assert sample["bin"].read() == DATA[sample["cls"]]


def test_an_epoch_holds_memory_for_what_it_reads_alone(tmp_path, caplog):
    with ShardWriter(f"{tmp_path}/set-%d.tar") as writer:
        for number in range(64):
            writer.write({"__key__": f"{number}", "bin": DATA[1], "cls": b"%d" % number})
    caplog.set_level(logging.WARNING, "tarshards")
    with serving(tmp_path) as site:
        options = {"shuffle": True, "block": 2, "remote": Remote(ahead=1 << 20)}
        for lazy in ("bin", None):
            caplog.clear()
            stream = Stream.from_shards(f"{site.url}/set-0.tar", index=True, lazy=lazy, **options)
            site.clear()
            assert sorted(int(sample["cls"]) for sample in stream) == list(range(64))
            assert (site.bytes < 1_000_000) == (lazy is not None)
            assert bool(caplog.messages) == (lazy is None)
