"""By every source and loader, each sample comes once an epoch, and with the pixels that Pillow gives it."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from dali_photos import THREADS, by_hand, by_pillow, dataset, decode, jpeg_of
from nvidia.dali import fn
from PIL import Image

from tarshards import World
from tarshards.errors import ShardIndexError
from tarshards.loaders.arrays.loader import ArrayLoader
from tarshards.loaders.dali import array_source, batch_source, dali_loader, indexed_source, native_loader, sample_source

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
    loader = dali_loader(dataset(urls, world=world), decode, **CPU)
    return len(loader), pairs(loader)


def by_batch_source(urls, world):
    source = batch_source(dataset(urls, world=world), BATCH)
    return len(source), list(by_hand(source, BATCH, EPOCHS))


def by_sample_source(urls, world):
    source = sample_source(dataset(urls, world=world))
    return None, list(by_hand(source, BATCH, EPOCHS, batch=False))


def by_indexed_source(urls, world):
    source = indexed_source(dataset(urls, world=world))
    return None, list(by_hand(source, BATCH, EPOCHS, batch=False))


def by_native_loader(urls, world):
    loader = native_loader(urls, decode, world=world, **CPU)
    return len(loader), pairs(loader)


def by_array_source(urls, world):
    """What an ArrayLoader has decoded, DALI only passes on."""
    fields = {"jpg": lambda data: by_pillow(data), "cls": int}
    loader = ArrayLoader(dataset(urls, world=world), BATCH, fields=fields, threads=0)
    source = array_source(loader, fields="jpg cls")
    return len(loader), list(by_hand(source, BATCH, EPOCHS, decode=lambda *arrays: arrays))


WAYS = [by_dali_loader, by_batch_source, by_sample_source, by_indexed_source, by_native_loader, by_array_source]


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 101])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_sample_comes_once_an_epoch_with_the_pixels_of_pillow(photos, way, count):
    length, epochs = way(photos(count), World())
    assert len(epochs) == EPOCHS
    assert length is None or length == -(-count // BATCH)
    for epoch in epochs:
        assert sorted(label for _, label in epoch) == list(range(count))
    for image, label in epochs[-1]:
        assert np.abs(image.astype(int) - by_pillow(jpeg_of(label))).max() <= 3


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ranks_share_an_epoch(photos, way, ranks):
    urls = photos(101)
    by_rank = [way(urls, World(rank, ranks))[1] for rank in range(ranks)]
    for epoch in range(EPOCHS):
        labels = [label for rank in by_rank for _, label in rank[epoch]]
        assert set(labels) == set(range(101))
        if way is by_native_loader:  # the datasets' tail is "pad": all ranks deliver as many
            assert len(labels) == 101
        else:
            assert len({len(rank[epoch]) for rank in by_rank}) == 1


@pytest.mark.parametrize("cycle", [None, "raise"])
def test_batches_begin_again_whatever_dali_is_told(photos, cycle):
    for epoch in by_hand(batch_source(dataset(photos(30)), 8), 8, 3, cycle=cycle):
        assert sorted(label for _, label in epoch) == list(range(30))


# DALI leaves a socket to its workers open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_worker_processes_read_by_the_index(photos):
    data = dataset(photos(101, bad={7: b"no image"}))
    data.set_epoch(4)
    source = indexed_source(data)
    epochs = list(by_hand(source, 25, 2, batch=False, parallel=True))
    for number, epoch in enumerate(epochs):
        plan = data._source.plan(4 + number, 1)
        assert [label for _, label in epoch] == [
            20 * shard + place for shard, place in plan if (shard, place) != (0, 7)
        ]
    assert {(entry.key, entry.field) for entry in data.ledger.quarantined} == {("00007", "jpg")}


def test_an_indexed_source_needs_indexes(photos):
    with pytest.raises(ShardIndexError, match="tarindex"):
        indexed_source(dataset(photos(1), index=False))


def test_an_indexed_source_resumes_by_the_checkpoints_of_dali(photos):
    """They know the epoch and the iteration."""
    from nvidia.dali import Pipeline

    def build(checkpoint=None):
        source = indexed_source(dataset(photos(60)))
        options = {"checkpoint": checkpoint} if checkpoint else {}
        pipe = Pipeline(batch_size=10, num_threads=1, device_id=None, enable_checkpointing=True, **options)
        with pipe:
            pipe.set_outputs(*fn.external_source(source, num_outputs=3, batch=False))
        pipe.build()
        return pipe

    def labels(pipe):
        return np.array(pipe.run()[1].as_tensor()).tolist()

    pipe = build()
    seen = [labels(pipe) for _ in range(3)]
    rest = build(pipe.checkpoint())
    assert sorted(label for batch in [*seen, *(labels(rest) for _ in range(3))] for label in batch) == list(range(60))


def test_images_that_are_no_jpeg(write):
    """A field that has either, PNG and WebP by what their bytes say."""
    samples = []
    for i, (field, kind) in enumerate([("png", "PNG"), ("jpg", "JPEG"), ("png", "WEBP"), ("jpg", "BMP")]):
        stream = BytesIO()
        Image.fromarray(np.full((8, 8, 3), 10 * i, np.uint8)).save(stream, kind)
        samples.append({"__key__": str(i), field: stream.getvalue(), "cls": i})
    data = dataset(write(samples), shuffle=False)
    (batch,) = dali_loader(data, decode, fields="image:jpg;png cls", **CPU)
    assert batch["image"].shape == (4, 8, 8, 3)
    assert np.abs(batch["image"][:, 0, 0, 0].numpy() - 10.0 * batch["cls"].numpy()).max() <= 2
    assert batch["__key__"] == ["0", "1", "2", "3"]


LONG = "d" * 90 + "/" + "e" * 90 + "/" + "f" * 120
NAMES = {"long": LONG, "UTF-8": "ä/ö-日本", "spaced": "a b", "dotted folder": "a.b/c"}


def archive(path, form: int, key: str) -> str:
    """A shard by Python's tarfile, in one of its formats."""
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
        if way is by_native_loader and name == "spaced":
            continue
        _, (epoch, *_) = way([url], World())
        assert sorted(label for _, label in epoch) == [0, 1, 2]


@pytest.mark.parametrize("form", [1, 2], ids=["gnu", "pax"])
def test_the_native_loader_refuses_names_that_dali_misreads(tmp_path, form):
    url = archive(tmp_path / "names.tar", form, "a b")
    with pytest.raises(ShardIndexError, match=r"names.tar: a b0.jpg: .*tarcat --rekey"):
        native_loader(url, decode, **CPU)
