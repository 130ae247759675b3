"""DALI's own reader, kept from losing and repeating samples."""

from __future__ import annotations

from itertools import islice

import pytest
from dali_photos import THREADS, decode, jpeg_of

from tarshards import UrlError, World
from tarshards.loaders.dali import native_loader

pytestmark = pytest.mark.interop

CPU = {"device": "cpu", "num_threads": THREADS}


def labels(batches) -> list[int]:
    return [int(label) for batch in batches for label in batch["cls"]]


@pytest.mark.parametrize("shuffle", [0, 30])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_sample_comes_once_an_epoch_over_all_ranks(photos, ranks, shuffle):
    urls = photos(50)
    loaders = [
        native_loader(urls, decode, batch_size=8, world=World(r, ranks), shuffle=shuffle, **CPU) for r in range(ranks)
    ]
    orders = []
    for _ in range(ranks + 1):
        lengths = [len(loader) for loader in loaders]
        epoch = [list(loader) for loader in loaders]
        assert [len(batches) for batches in epoch] == lengths
        orders.append([label for batches in epoch for label in labels(batches)])
        assert sorted(orders[-1]) == list(range(50))
    assert (sorted(orders[0]) != orders[0]) == (shuffle > 0)


def test_an_epoch_that_is_broken_off_is_over(photos):
    urls = photos(50)
    broken, whole = [native_loader(urls, decode, batch_size=8, world=World(1, 2), **CPU) for _ in range(2)]
    for _ in islice(broken, 2):
        pass
    list(whole)
    assert labels(broken) == labels(whole) == list(range(25))
    assert labels(broken) == labels(whole) == list(range(25, 50))


@pytest.mark.parametrize(("last_batch", "sizes"), [("partial", [8, 8, 4]), ("pad", [8, 8, 8]), ("drop", [8, 8])])
def test_the_last_batch(photos, last_batch, sizes):
    loader = native_loader(photos(20), decode, batch_size=8, last_batch=last_batch, **CPU)
    assert len(loader) == len(sizes)
    for _ in range(2):
        batches = list(loader)
        assert [len(batch["cls"]) for batch in batches] == [len(batch["jpg"]) for batch in batches] == sizes
    if last_batch == "pad":
        assert [int(batch["valid"].sum()) for batch in batches] == [8, 8, 4]


def test_shards_without_samples_and_without_indexes_are_read(photos, tmp_path):
    urls = photos(0, name="empty") + photos(20)
    for index in tmp_path.glob("set-*.index"):
        index.unlink()
    assert labels(native_loader(urls, decode, batch_size=8, **CPU)) == list(range(20))


def test_a_stream_is_refused():
    with pytest.raises(UrlError, match=r"local files alone.*dali_loader"):
        native_loader("http://127.0.0.1:9/a.tar", decode, batch_size=8, **CPU)


def test_a_sample_without_a_field_is_an_error(write):
    urls = write([{"__key__": "a", "jpg": jpeg_of(0)}])
    with pytest.raises(RuntimeError, match=r"[Uu]nderful"):
        list(native_loader(urls, decode, batch_size=1, **CPU))
