"""Images made smaller before training, in a stream, in ``map_shards`` and over all of a dataset."""

from __future__ import annotations

from functools import partial
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tarshards import ArrayLoader, ShardWriter, Stream, map_shards, ops, readers
from tarshards.errors import DecodeError, SampleError


@pytest.fixture
def urls(tmp_path):
    with ShardWriter(tmp_path / "raw-%02d.tar", max_samples=30) as writer:
        for i in range(60):
            side = 64 if i % 2 else 20
            writer.write({"__key__": f"{i:03d}", "photo.jpg": np.full((side, 2 * side, 3), i, np.uint8), "cls": i})
    return str(tmp_path / "raw.shards.json")


def test_the_longest_side_and_the_quality(urls):
    before = Stream.from_shards(urls).collect()
    after = Stream.from_shards(urls).shrink_images("photo.jpg", max_resolution=48, jpeg_quality=50).collect()
    for old, new in zip(before, after):
        with Image.open(BytesIO(new["photo.jpg"])) as image:
            assert (image.format, image.size) == ("JPEG", (40, 20) if int(old["cls"]) % 2 == 0 else (48, 24))
        assert (new["photo.jpg"] == old["photo.jpg"]) == (int(old["cls"]) % 2 == 0)
        assert new.keys() == old.keys()


def test_a_proportion_is_jpeg_and_the_others_are_raw(urls):
    stream = Stream.from_shards(urls).shrink_images("photo.jpg;photo.png", max_resolution=32, proportion=0.5)
    kinds = {s["__key__"]: "photo.jpg" in s for s in stream}
    assert 15 < sum(kinds.values()) < 45
    assert {s["__key__"]: "photo.jpg" in s for s in stream} == kinds
    assert not any("photo.jpg" in s for s in Stream.from_shards(urls).shrink_images("photo.jpg", proportion=0))
    other = Stream.from_shards(urls).shrink_images("photo.jpg", proportion=0.5, seed=1)
    assert {s["__key__"]: "photo.jpg" in s for s in other} != kinds


def test_map_shards_writes_them_and_a_loader_reads_both_kinds(urls, tmp_path):
    shrink = partial(ops.shrink_images, field="photo.jpg", max_resolution=32, proportion=0.5)
    map_shards(shrink, urls, str(tmp_path / "small-{shard:02d}.tar"))
    dataset = Stream.from_shards(str(tmp_path / "small-*.tar"))
    fields = {"image:photo.jpg;photo.ppm": readers.image(16), "cls": readers.integer()}
    for batch in ArrayLoader(dataset, 20, fields=fields):
        assert batch["image"].shape == (20, 16, 16, 3)
        assert np.abs(batch["image"].mean(axis=(1, 2, 3)) - batch["cls"]).max() < 3


@pytest.mark.parametrize("option", [{"max_resolution": 0}, {"jpeg_quality": 101}, {"proportion": 1.5}])
def test_options_out_of_range(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        Stream(()).shrink_images("jpg", **option)


def test_what_is_no_image_is_named():
    with pytest.raises(DecodeError, match=r"a\.jpg: "):
        Stream([{"__key__": "a", "jpg": b"no image"}]).shrink_images("jpg").collect()
    with pytest.raises(SampleError, match="no field png"):
        Stream([{"__key__": "a", "jpg": b"no image"}]).shrink_images("png").collect()
