"""Masks, boxes and keypoints beside an image: the same crop and mirroring in every field of a sample."""

import io
from functools import partial

import numpy as np
import pytest
from PIL import Image
from readers_data import npy, picture, read, saved, whole
from with_torch import ShardDataset, ShardLoader, needs_torch

from tarshards import ArrayLoader, Ledger, ShardWriter, Stream, augment, readers
from tarshards.loaders.arrays.readers import crops
from tarshards.loaders.arrays.readers.draws import draws_of

SIZES = [(40, 60), (64, 48), (33, 35), (120, 100)]
SHAPE = 128, 256  # the middle of no pixel lies between two of a mask
CROPS = {"none": {}, "center": {"ratio": 0.7}, "random_resized": {"scale": (0.2, 0.9)}}


def palette(numbers):
    """A PNG with a palette, as the masks of VOC are."""
    image = Image.fromarray(numbers, "L").convert("P")
    image.putdata(numbers.ravel().tolist())
    image.putpalette([value for number in range(256) for value in (number * 7 % 256, 255 - number, number * 31 % 256)])
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def numbered(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 21, (height, width)).astype(np.uint8)


def nearest(numbers, box, size):
    """Pillow's nearest neighbours in a box, as the oracle."""
    resized = Image.fromarray(numbers).resize(size[::-1], Image.Resampling.NEAREST, box=tuple(map(float, box)))
    return np.asarray(resized)


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("encode", [palette, partial(saved, format="PNG")], ids=["palette", "grey"])
def test_masks_are_the_nearest_pixels_of_the_crop(crop, encode):
    masks = [numbered(*size, seed) for seed, size in enumerate(SIZES)]
    image = readers.image(SHAPE, crop=crop, flip=0.5, **CROPS[crop])
    batch = whole(readers.mask(image), [encode(each) for each in masks], seed=3)
    assert (batch.dtype, batch.shape) == (np.uint8, (4, *SHAPE))
    draws = draws_of(3, 0, np.arange(4))
    boxes = image.view.boxes(*np.array(SIZES).T, draws)
    flips = crops.flips_of(draws, 0.5)
    assert 0 < flips.sum() < 4
    for row, numbers in enumerate(masks):
        wanted = nearest(numbers, boxes[row], SHAPE)
        np.testing.assert_array_equal(batch[row], wanted[:, ::-1] if flips[row] else wanted)


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_an_image_and_its_mask_show_the_same_place(crop, format):
    """The image is the mask painted, so that its edges are the mask's."""
    options = {"quality": 100, "subsampling": 0} if format == "JPEG" else {}
    datas, masks = [], []
    for height, width in SIZES:
        numbers = np.zeros((height, width), np.uint8)
        numbers[height // 4 : height // 2, width // 3 : width - 5] = 200
        masks.append(saved(numbers, "PNG"))
        datas.append(saved(np.repeat(numbers[:, :, None], 3, 2), format, **options))
    image = readers.image(64, crop=crop, flip=0.5, **CROPS[crop])
    pixels, numbers = whole(image, datas), whole(readers.mask(image), masks)
    assert {*np.unique(numbers)} <= {0, 200}  # no number is made up
    assert ((pixels[..., 0] > 100) == (numbers > 0)).mean() > 0.99


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("form", ["PNG", "JPEG", "npy"])
def test_points_follow_the_image(crop, form):
    """A white square in each image, whose middle is a point, and which is a box."""
    sizes = SIZES if form != "npy" else [(64, 96)] * 4
    datas, boxes = [], []
    for number, (height, width) in enumerate(sizes):
        pixels = np.zeros((height, width, 3), np.uint8)
        top, left = height // 2 - 6 + number, width // 2 - 3 - number
        pixels[top : top + 8, left : left + 8] = 255
        datas.append(npy(pixels) if form == "npy" else saved(pixels, form))
        boxes.append([[left, top, left + 8, top + 8]])
    field = "npy" if form == "npy" else "jpg"
    image = readers.image((96, 128), crop=crop, flip=0.5, **(CROPS[crop] | {"scale": (0.9, 1)}))
    pixels, maps = whole(image, datas, field=field), whole(readers.affine(image), datas, field=field)
    assert (maps.dtype, maps.shape) == (np.float32, (4, 2, 3))
    batch = {
        "image": pixels,
        "map": maps,
        "boxes": np.array(boxes, np.float32),
        "points": np.array(boxes)[..., :2] + 4.0,
    }
    rng = np.random.default_rng(0)
    batch = augment.move_boxes(batch, rng, field="boxes", affine="map", image="image")
    planar = augment.move_boxes(
        {**batch, "boxes": np.array(boxes), "image": pixels.transpose(0, 3, 1, 2)},
        rng,
        field="boxes",
        affine="map",
        image="image",
    )
    np.testing.assert_array_equal(planar["boxes"], batch["boxes"])
    batch = augment.move_points(batch, rng, field="points", affine="map")
    for row in range(4):
        down, across = np.nonzero(pixels[row, :, :, 0] > 127)
        found = [across.min(), down.min(), across.max() + 1, down.max() + 1]
        np.testing.assert_allclose(batch["boxes"][row, 0], found, atol=1.5)
        np.testing.assert_allclose(batch["points"][row, 0], [across.mean() + 0.5, down.mean() + 0.5], atol=1)


def test_images_that_keep_their_size_are_at_most_mirrored():
    image = readers.image(flip=1)
    datas = [saved(picture(*size), "PNG") for size in SIZES]
    np.testing.assert_array_equal(
        whole(readers.affine(image), datas), [[[-1, 0, width], [0, 1, 0]] for _, width in SIZES]
    )
    masks = [numbered(*size) for size in SIZES]
    for mirrored, numbers in zip(whole(readers.mask(image), [saved(each, "PNG") for each in masks]), masks):
        np.testing.assert_array_equal(mirrored, numbers[:, ::-1])
    assert whole(readers.mask(image), [saved(masks[0], "PNG")] * 2).shape == (2, *SIZES[0])


def test_sizes_of_an_epoch_hold_for_all():
    image = readers.image({0: 16, 2: 24}, crop="center")
    for epoch, size in (0, 16), (1, 16), (2, 24):
        assert whole(readers.mask(image).at(epoch), [saved(numbered(40, 40), "PNG")]).shape == (1, size, size)
        (placed,) = whole(readers.affine(image).at(epoch), [saved(picture(40, 40), "PNG")])
        np.testing.assert_allclose(placed, [[size / 40, 0, 0], [0, size / 40, 0]])


def test_large_numbers_need_a_type_that_holds_them():
    objects = np.array([[0, 300], [1001, 65535]], np.uint16)
    image = readers.image(2)
    _, failed = read(readers.mask(image), [saved(objects, "PNG")])
    assert "numbers from 0 to 65535 in a mask of uint8; set dtype=" in str(failed[0])
    np.testing.assert_array_equal(whole(readers.mask(image, dtype="uint16"), [saved(objects, "PNG")])[0], objects)
    assert whole(readers.mask(image, dtype="int64"), [saved(objects, "PNG")]).dtype == np.int64
    black = Image.fromarray(np.array([[True, False]]))
    stream = io.BytesIO()
    black.save(stream, "PNG")
    assert whole(readers.mask(readers.image((1, 2))), [stream.getvalue()]).tolist() == [[[1, 0]]]


def test_what_is_no_mask():
    image = readers.image(8, crop="random_resized")
    good = saved(numbered(20, 20), "PNG")
    datas = [good, saved(picture(20, 20), "PNG"), b"no image", good[:-30], b"", good]
    batch, failed = read(readers.mask(image), datas)
    assert sorted(failed) == [1, 2, 3, 4]
    assert "colours (mode RGB) are no numbers of pixels" in str(failed[1])
    _, failed = read(readers.affine(image), datas)
    assert sorted(failed) == [2, 4]  # headers alone are read: readers.image finds the damage
    with pytest.raises(TypeError, match=r"mask takes the reader of the images, readers\.image\(\.\.\.\), not 8"):
        readers.mask(8)
    with pytest.raises(ValueError, match="dtype=float32 must be an integer type"):
        readers.mask(image, dtype="float32")
    with pytest.raises(ValueError, match="boxes: an array is wanted, not a list"):
        augment.move_points({"boxes": [], "map": np.zeros((0, 2, 3))}, None, field="boxes", affine="map")
    batch = {"boxes": np.zeros((1, 3)), "map": np.zeros((1, 2, 3)), "image": np.zeros((1, 8, 8, 3))}
    with pytest.raises(ValueError, match="boxes: boxes of four numbers are wanted"):
        augment.move_boxes(batch, None, field="boxes", affine="map", image="image")


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path / "x-{shard}.tar", max_samples=7) as writer:
        for number in range(24):
            height, width = rng.integers(40, 90, 2).tolist()
            boxes = np.sort(rng.uniform(0, 40, (number % 4, 2, 2)), axis=1).reshape(-1, 4).astype(np.float32)
            sample = {"jpg": picture(height, width, number), "mask.png": numbered(height, width, number)}
            writer.write({"__key__": f"{number:02d}", **sample, "boxes.npy": boxes})
    return str(tmp_path / "x.shards.json")


def fields():
    image = readers.image(32, crop="random_resized", flip=0.5)
    return {
        "image:jpg": image,
        "mask:mask.png": readers.mask(image, dtype="int64"),
        "map:jpg": readers.affine(image),
        "boxes:boxes.npy": readers.ragged("f4"),
    }


MOVE = [partial(augment.move_boxes, field="boxes", affine="map", image="image")]


def by_key(batches):
    found = {}
    for batch in batches:
        (boxes, offsets), keys = batch["boxes"], batch["__key__"]
        for row, key in enumerate(keys):
            own = np.asarray(boxes)[int(offsets[row]) : int(offsets[row + 1])]
            found[key] = [np.asarray(batch[name][row]) for name in ("image", "mask", "map")] + [own]
    return found


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key in one:
        for left, right in zip(one[key], other[key], strict=True):
            np.testing.assert_array_equal(left, right)


def test_all_loaders_crop_the_fields_of_a_sample_alike(shards):
    options = {"shuffle": True, "seed": 5}
    wanted = by_key(ArrayLoader(Stream.from_shards(shards, **options), 5, fields=fields(), transforms=MOVE, threads=0))
    assert len(wanted) == 24
    for key, (_, mask, placed, boxes) in wanted.items():
        number = int(key)
        assert len(boxes) == number % 4  # none is left out
        assert ((boxes >= 0) & (boxes <= 32)).all()
        assert (boxes[:, 2:] >= boxes[:, :2]).all()
        assert mask.dtype == np.int64
        assert np.linalg.det(placed[:, :2]) != 0
    threads = ArrayLoader(Stream.from_shards(shards, **options), 24, fields=fields(), transforms=MOVE, threads=2)
    assert_equal(wanted, by_key(threads))


@needs_torch
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_crop_the_fields_of_a_sample_alike(shards, workers):
    options = {"shuffle": True, "seed": 5}
    wanted = by_key(ArrayLoader(Stream.from_shards(shards, **options), 5, fields=fields(), transforms=MOVE))
    loader = ShardLoader(ShardDataset(shards, **options), 4, fields=fields(), transforms=MOVE, num_workers=workers)
    assert_equal(wanted, by_key(loader))
    resumed = ShardLoader(ShardDataset(shards, **options), 4, fields=fields(), transforms=MOVE, num_workers=workers)
    batches = iter(loader)
    first = by_key([next(batches), next(batches)])
    resumed.load_state_dict(loader.state_dict())
    whole_epoch = ArrayLoader(_in_epoch(shards, options, 1), 24, fields=fields(), transforms=MOVE)
    assert_equal(by_key(whole_epoch), first | by_key(resumed))


def _in_epoch(shards, options, epoch):
    stream = Stream.from_shards(shards, **options)
    stream.set_epoch(epoch)
    return stream


def test_a_sample_without_its_mask_is_an_error_or_left_out(tmp_path):
    with ShardWriter(tmp_path / "y-{shard}.tar") as writer:
        for number in range(3):
            sample = {"__key__": str(number), "jpg": picture(20, 20)}
            writer.write(sample | ({"mask.png": numbered(20, 20)} if number != 1 else {}))
    ledger = Ledger(max_errors=1)
    stream = Stream.from_shards(str(tmp_path / "y.shards.json"), on_error=ledger)
    image = readers.image(8)
    (batch,) = ArrayLoader(stream, 3, fields={"jpg": image, "mask.png": readers.mask(image)})
    assert batch["__key__"] == ["0", "2"]
    assert (ledger.quarantined[0].key, ledger.failed) == ("1", 1)
