"""Both through dali_loader and batch_source, each sample comes once an epoch, with the pixels that Pillow decodes."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from dali_photos import THREADS, by_hand, by_pillow, dataset, decode, jpeg_of
from PIL import Image

from tarshards import SampleError, World, dali

pytestmark = pytest.mark.interop

BATCH = 50
CPU = {"batch_size": BATCH, "device": "cpu", "num_threads": THREADS}
EPOCHS = 3
Epoch = list[tuple[np.ndarray, int]]


def pairs(loader, epochs: int = EPOCHS) -> list[Epoch]:
    """The images and labels of some epochs of a loader."""
    return [
        [
            (np.asarray(image), int(label))
            for batch in loader
            for image, label in zip(batch["jpg"], batch["cls"], strict=True)
        ]
        for _ in range(epochs)
    ]


def by_dali_loader(urls, world):
    loader = dali.dali_loader(dataset(urls, world=world), decode, **CPU)
    return len(loader), pairs(loader)


def by_batch_source(urls, world):
    source = dali.batch_source(dataset(urls, world=world), BATCH)
    return len(source), list(by_hand(source, BATCH, EPOCHS))


WAYS = [by_dali_loader, by_batch_source]


@pytest.mark.parametrize("count", [1, 49, 50, 51, 101])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_sample_comes_once_an_epoch_with_the_pixels_of_pillow(photos, way, count):
    length, epochs = way(photos(count), World())
    assert len(epochs) == EPOCHS
    assert length == -(-count // BATCH)
    for epoch in epochs:
        assert sorted(label for _, label in epoch) == list(range(count))
    for image, label in epochs[-1]:
        assert np.abs(image.astype(int) - by_pillow(jpeg_of(label))).max() <= 3


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_no_samples_are_an_error(photos, way):
    with pytest.raises(SampleError, match="no samples in this shard"):
        way(photos(0), World())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ranks_share_an_epoch(photos, way, ranks):
    urls = photos(101)
    by_rank = [way(urls, World(rank, ranks))[1] for rank in range(ranks)]
    for epoch in range(EPOCHS):
        labels = [label for rank in by_rank for _, label in rank[epoch]]
        assert set(labels) == set(range(101))
        assert len({len(rank[epoch]) for rank in by_rank}) == 1  # the datasets' tail is "pad"


@pytest.mark.parametrize("options", [{}, {"cycle": "raise"}, {"no_copy": True}], ids=str)
def test_batches_begin_again_whatever_dali_is_told(photos, options):
    for epoch in by_hand(dali.batch_source(dataset(photos(30)), 8), 8, 3, **options):
        assert sorted(label for _, label in epoch) == list(range(30))


def test_images_that_are_no_jpeg(write):
    """A field of either extension; PNG, WebP and BMP are recognized by their bytes."""
    samples = []
    for i, (field, kind) in enumerate([("png", "PNG"), ("jpg", "JPEG"), ("png", "WEBP"), ("jpg", "BMP")]):
        stream = BytesIO()
        Image.fromarray(np.full((8, 8, 3), 10 * i, np.uint8)).save(stream, kind)
        samples.append({"__key__": str(i), field: stream.getvalue(), "cls": i})
    data = dataset(write(samples), shuffle=False)
    (batch,) = dali.dali_loader(data, decode, fields="image:jpg;png cls", **CPU)
    assert batch["image"].shape == (4, 8, 8, 3)
    assert np.abs(batch["image"][:, 0, 0, 0].numpy() - 10.0 * batch["cls"].numpy()).max() <= 2
    assert batch["__key__"] == ["0", "1", "2", "3"]


LONG = "d" * 90 + "/" + "e" * 90 + "/" + "f" * 120
NAMES = {"long": LONG, "UTF-8": "ä/ö-日本", "spaced": "a b", "dotted folder": "a.b/c"}


def archive(path, form: int, key: str) -> str:
    """Write a shard with Python's tarfile, in one of its formats."""
    import tarfile

    with tarfile.open(path, "w", format=form) as tar:
        for i in range(3):
            for field, data in ("jpg", jpeg_of(i)), ("cls", b"%d" % i):
                member = tarfile.TarInfo(f"{key}{i}.{field}")
                member.size = len(data)
                tar.addfile(member, BytesIO(data))
    return str(path)


@pytest.mark.parametrize("form", [1, 2], ids=["gnu", "pax"])
@pytest.mark.parametrize("name", NAMES)
def test_names_and_formats_are_right_through_our_sources(tmp_path, name, form):
    from tarshards.index.build import build_index

    url = archive(tmp_path / "names.tar", form, NAMES[name])
    build_index(url).save(url)
    for way in WAYS:
        _, (epoch, *_) = way([url], World())
        assert sorted(label for _, label in epoch) == [0, 1, 2]
