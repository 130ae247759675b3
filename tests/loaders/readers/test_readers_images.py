"""Images: Pillow and torchvision's rules as oracles; the same bytes however the work is cut up."""

import io
import resource
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from readers_data import npy, picture, read, saved, whole

from tarshards import kernels
from tarshards.errors import DecodeError
from tarshards.kernels import _jpeg_py
from tarshards.loaders.arrays.readers import crops, images
from tarshards.loaders.arrays.readers.draws import draws_of
from tarshards.loaders.arrays.readers.images import image
from tarshards.samples.codecs.image import decode_image
from tarshards.samples.payloads import Payloads

BILINEAR = Image.Resampling.BILINEAR
PICTURES = [picture(40, 60, 0), picture(64, 48, 1), picture(33, 35, 2), picture(120, 100, 3)]
PNGS = [saved(pixels, "PNG") for pixels in PICTURES]
JPEGS = [saved(pixels, quality=90) for pixels in PICTURES]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def close(batch, wanted, levels=1):
    assert batch.shape == wanted.shape
    assert np.abs(batch.astype(int) - wanted).max() <= levels


def by_pillow(pixels, box, size):
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], BILINEAR, box=tuple(map(float, box))))


def decoded(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def test_the_whole_image_is_resized():
    wanted = np.stack([by_pillow(p, (0, 0, p.shape[1], p.shape[0]), (20, 30)) for p in PICTURES])
    close(whole(image((20, 30)), PNGS), wanted)
    batch = whole(image((50, 90)), JPEGS)
    wanted = np.stack(
        [by_pillow(decoded(j), (0, 0, p.shape[1], p.shape[0]), (50, 90)) for p, j in zip(PICTURES, JPEGS)]
    )
    close(batch, wanted)


def test_center_is_torchvisions_resize_and_center_crop():
    # A square image is resized to 48, and its middle 32 pixels are kept.
    pixels = picture(32, 32)
    resized = np.asarray(Image.fromarray(pixels).resize((48, 48), BILINEAR))
    close(whole(image(32, crop="center", ratio=32 / 48), [saved(pixels, "PNG")])[0], resized[8:40, 8:40])
    # Of any other, the middle of the longer side.
    batch = whole(image((20, 10), crop="center"), PNGS[:2])
    close(batch[0], by_pillow(PICTURES[0], (20, 0, 40, 40), (20, 10)))
    close(batch[1], by_pillow(PICTURES[1], (8, 0, 40, 64), (20, 10)))


def test_a_center_crop_of_the_size_itself_only_cuts():
    pixels = picture(64, 64)
    np.testing.assert_array_equal(
        whole(image(48, crop="center", ratio=0.75), [saved(pixels, "PNG")])[0], pixels[8:56, 8:56]
    )


@pytest.mark.parametrize("datas", [PNGS, JPEGS], ids=["png", "jpeg"])
def test_random_resized_crops_are_those_of_the_draws(datas):
    draws = draws_of(5, 2, np.arange(4))
    heights, widths = np.array([p.shape[:2] for p in PICTURES]).T
    boxes = crops.random_resized(heights, widths, draws, (0.5, 1), (3 / 4, 4 / 3))
    mirrored = crops.flips_of(draws, 0.5)
    assert 0 < mirrored.sum() < 4
    pixels = PICTURES if datas is PNGS else [decoded(data) for data in datas]
    wanted = np.stack([by_pillow(p, box, (80, 70)) for p, box in zip(pixels, boxes)])
    wanted = np.where(mirrored[:, None, None, None] == 1, wanted[:, :, ::-1], wanted)
    batch = whole(image((80, 70), crop="random_resized", scale=(0.5, 1), flip=0.5), datas, seed=5, epoch=2)
    close(batch, wanted)


@example(height=1, width=354, seed=0, scale=[0.01, 0.0625], ratio=[1.0, 2.0])  # of boxes of 2 and 3 pixels
@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    seed=st.integers(0, 2**64),
    scale=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted),
    ratio=st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)).map(sorted),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_boxes_lie_in_the_image_and_keep_to_scale_and_ratio(height, width, seed, scale, ratio):
    draws = draws_of(seed, 0, np.arange(50))
    boxes = crops.random_resized(np.full(50, height), np.full(50, width), draws, scale, ratio)
    left, top, right, bottom = boxes.T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (right <= width).all()
    assert (bottom <= height).all()
    w, h = (right - left).astype(float), (bottom - top).astype(float)
    assert (w >= 1).all()
    assert (h >= 1).all()
    np.testing.assert_array_equal(boxes, np.rint(boxes))
    middle = crops._middle(np.array([height]), np.array([width]), ratio)
    drawn = (boxes != middle).any(axis=1)
    least, most = (part * height * width for part in scale)
    # Each side was rounded: the box that was drawn is up to half a pixel longer and higher, or shorter and lower.
    assert ((w + 0.5) * (h + 0.5) >= least * (1 - 1e-9))[drawn].all()
    assert ((w - 0.5) * (h - 0.5) <= most * (1 + 1e-9))[drawn].all()
    assert ((w + 0.51) / (h - 0.51).clip(1e-3) >= ratio[0])[drawn].all()
    assert ((w - 0.51) / (h + 0.51) <= ratio[1])[drawn].all()


def test_random_boxes_have_the_distribution_of_torchvisions_rule():
    rng = np.random.default_rng(0)

    def by_rule():
        while True:
            area, aspect = 240 * 300 * rng.uniform(0.08, 1), np.exp(rng.uniform(*np.log([3 / 4, 4 / 3])))
            w, h = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
            if 0 < w <= 300 and 0 < h <= 240:
                left, top = rng.integers(0, 300 - w + 1), rng.integers(0, 240 - h + 1)
                return left, top, left + w, top + h

    ruled = np.array([by_rule() for _ in range(4000)])
    draws = draws_of(0, 0, np.arange(4000))
    ours = crops.random_resized(np.full(4000, 240), np.full(4000, 300), draws, (0.08, 1), (3 / 4, 4 / 3))
    for column in range(4):
        both = np.sort(ruled[:, column]), np.sort(ours[:, column])
        grid = np.arange(301)
        distance = (
            np.abs(np.searchsorted(both[0], grid, "right") - np.searchsorted(both[1], grid, "right")).max() / 4000
        )
        assert distance < 1.95 * np.sqrt(2 / 4000)  # Kolmogorov and Smirnov's test at 0.001
    left, top, right, bottom = ours.T
    for edge, side, reached in (right, 300, right - left), (bottom, 240, bottom - top):
        assert (edge[reached < side] == side).any()  # the last place too
    assert (left == 0).any()
    assert (top == 0).any()


@pytest.mark.parametrize("kind", ["jpeg", "raw"])
def test_bytes_do_not_depend_on_parts_batches_or_neighbours(kind):
    images = [picture(32, 32, i) for i in range(24)]
    datas = [saved(p) if kind == "jpeg" else p.tobytes() for p in images]
    reader = image(24, crop="random_resized", flip=0.5, shape=None if kind == "jpeg" else (32, 32, 3))
    batch = whole(reader, datas, seed=1)
    for parts in 2, 4, 8, 24:
        np.testing.assert_array_equal(whole(reader, datas, seed=1, parts=parts), batch)
    order = np.random.default_rng(0).permutation(24)
    shuffled = whole(reader, [datas[i] for i in order], seed=1, samples=order)
    np.testing.assert_array_equal(shuffled, batch[order])
    for other in {"seed": 2}, {"seed": 1, "epoch": 1}:
        assert (whole(reader, datas, **other) != batch).any()


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_bytes_do_not_depend_on_threads(threads):
    sides = np.random.default_rng(0).integers(20, 90, (40, 2)).tolist()
    payloads = Payloads.of([saved(picture(height, width, height)) for height, width in sides])
    reader = image(24, crop="random_resized", flip=0.5).open("jpg", payloads[0])
    draws = draws_of(0, 0, np.arange(40))
    alone, together = reader.make(40), reader.make(40)
    assert not reader.read(alone, payloads, draws)
    together[:] = 0
    with ThreadPoolExecutor(threads) as pool:
        parts = [slice(first, first + 5) for first in range(0, 40, 5)]
        done = pool.map(lambda part: reader.read(together[part], payloads[part], draws[part]), parts)
        assert not any(done)
    np.testing.assert_array_equal(together, alone)


def test_a_batch_takes_no_new_memory():
    payloads = Payloads.of([saved(picture(90, 120, i)) for i in range(16)])
    reader = image(64, crop="random_resized").open("jpg", payloads[0])
    batch = reader.make(16)
    faults = []
    for epoch in range(9):
        begun = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        assert not reader.read(batch, payloads, draws_of(0, epoch, np.arange(16)))
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - begun)
    assert min(faults) < len(batch)  # pages; of an image at a time would take more


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_are_in_0_to_1_and_then_normalised(layout, dtype):
    pixels = whole(image(16), PNGS)
    wanted = pixels / np.float32(255)
    normal = (wanted - MEAN) / STD
    if layout == "CHW":
        wanted, normal = wanted.transpose(0, 3, 1, 2), normal.transpose(0, 3, 1, 2)
    batch = whole(image(16, dtype=dtype, layout=layout), PNGS)
    assert batch.dtype == dtype
    np.testing.assert_array_equal(batch, wanted.astype(np.float32).astype(dtype))
    batch = whole(image(16, dtype=dtype, layout=layout, mean=MEAN, std=STD), PNGS)
    np.testing.assert_allclose(batch, normal, atol=2e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 1), (20, 30, 3), (20, 30, 4)])
def test_raw_pixels_and_npy_keep_their_channels(shape, layout):
    images = np.random.default_rng(0).integers(0, 256, (3, *shape), dtype=np.uint8)
    reader = image(12, crop="center", ratio=0.9, layout=layout, shape=shape)
    batch = whole(reader, [pixels.tobytes() for pixels in images])
    channels = shape[2] if len(shape) == 3 else 1
    planes = images.reshape(3, 20, 30, channels)
    box = (6, 1, 24, 19)
    wanted = np.stack([[by_pillow(plane[:, :, c], box, (12, 12)) for c in range(channels)] for plane in planes])
    close(batch, wanted if layout == "CHW" else wanted.transpose(0, 2, 3, 1))
    again = whole(image(12, crop="center", ratio=0.9, layout=layout), [npy(pixels) for pixels in images], field="npy")
    np.testing.assert_array_equal(again, batch)


def test_images_that_stay_as_they_are():
    jpegs = [saved(picture(32, 24, i)) for i in range(3)]
    wanted = np.stack([decoded(data) for data in jpegs])
    for reader in image(), image((32, 24)):
        np.testing.assert_array_equal(whole(reader, jpegs), wanted)
    np.testing.assert_array_equal(whole(image(flip=1), jpegs), wanted[:, :, ::-1])
    np.testing.assert_array_equal(whole(image(layout="CHW"), jpegs), wanted.transpose(0, 3, 1, 2))
    raw = [pixels.tobytes() for pixels in wanted]
    np.testing.assert_array_equal(whole(image(shape=(32, 24, 3)), raw), wanted)
    np.testing.assert_array_equal(whole(image(shape=(32, 24, 3), flip=1), raw), wanted[:, :, ::-1])


def test_images_of_one_size_without_a_size_are_decoded_into_the_batch():
    jpegs = [saved(picture(32, 24, i)) for i in range(3)]
    payloads, draws = Payloads.of(jpegs), np.zeros(3, np.uint64)
    reader = image().open("jpg", jpegs[0])
    rows = reader.make(3)
    assert not reader.read(rows, payloads, draws)
    batch = reader.join(rows)
    assert all(np.shares_memory(row, batch) for row in rows)
    kept = reader.join(rows[1:])
    np.testing.assert_array_equal(kept, batch[1:])
    assert kept.shape == (2, 32, 24, 3)


def test_images_of_several_sizes_without_a_size_are_a_list():
    batch = whole(image(), PNGS)
    assert isinstance(batch, list)
    for pixels, wanted in zip(batch, PICTURES):
        np.testing.assert_array_equal(pixels, wanted)


def test_scaled_crops_lie_where_unscaled_ones_do():
    # A ramp from left to right, of an odd size: a box in the wrong place is brighter or darker.
    ramp = np.broadcast_to((np.arange(405) * 255 / 404).astype(np.uint8)[None, :, None], (301, 405, 3))
    jpeg, png = saved(np.ascontiguousarray(ramp), quality=98, subsampling=0), saved(np.ascontiguousarray(ramp), "PNG")
    reader = image(20, crop="random_resized", scale=(0.3, 0.9))
    close(whole(reader, [jpeg] * 16), whole(reader, [png] * 16), levels=3)


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_other_jpegs_are_what_the_codec_gives(mode):
    data = saved(np.asarray(Image.fromarray(PICTURES[0]).convert(mode))) if mode != "CMYK" else None
    if data is None:
        import io

        stream = io.BytesIO()
        Image.fromarray(PICTURES[0]).convert("CMYK").save(stream, "JPEG")
        data = stream.getvalue()
    from tarshards.samples.codecs import decode_field

    np.testing.assert_array_equal(whole(image(), [data])[0], decode_field("jpg", data, "rgb8"))


@pytest.mark.parametrize("size", [None, 16])
def test_what_does_not_decode_fails_alone(size):
    flipped = bytearray(JPEGS[1])
    flipped[2] ^= 255
    datas = [JPEGS[0], JPEGS[1][:-300], b"", b"not an image", PNGS[2], PNGS[2][:-30], bytes(flipped), JPEGS[0]]
    batch, failed = read(image(size), datas, parts=2)
    assert sorted(failed) == [1, 2, 3, 5, 6]
    assert all(type(error) is DecodeError and "\n" not in str(error) for error in failed.values())
    np.testing.assert_array_equal(batch[0], batch[7])
    np.testing.assert_array_equal(batch[0], whole(image(size), JPEGS[:1])[0])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("options", [{}, {"size": (20, 10), "crop": "center"}, {"size": (9, 30), "layout": "CHW"}])
def test_exif_orientation_comes_before_crops(options, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    smooth = np.linspace(0, 255, 61 * 83 * 3).reshape(61, 83, 3).astype(np.uint8)
    for form in "JPEG", "PNG":
        data = saved(smooth, form, exif=exif)
        upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        wanted = whole(image(**options), [saved(upright, "PNG")])
        batch = whole(image(**options, exif_transpose=True), [data])
        close(np.asarray(batch[0]), np.asarray(wanted[0]), levels=2)


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    _, failed = read(image(8), [JPEGS[0], PNGS[0]])
    assert ["bomb" in str(error) for error in failed.values()] == [True, True]


def test_without_the_kernel_pillow_decodes(monkeypatch):
    wanted = [whole(reader, JPEGS[:1]) for reader in (image((40, 60)), image(30, crop="center"))]
    monkeypatch.setattr(kernels, "jpeg", _jpeg_py)
    np.testing.assert_array_equal(whole(image((40, 60)), JPEGS[:1]), wanted[0])
    close(whole(image(30, crop="center"), JPEGS[:1]), wanted[1])


def test_jpegs_are_decoded_together_and_only_others_one_by_one(monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    cmyk = io.BytesIO()
    Image.fromarray(PICTURES[0]).convert("CMYK").save(cmyk, "JPEG")
    datas = [*JPEGS, PNGS[0], cmyk.getvalue(), JPEGS[0][:-99], saved(PICTURES[0], exif=exif), b""]
    alone: list[bytes] = []
    monkeypatch.setattr(images, "decode_image", lambda data, spec: alone.append(data) or decode_image(data, spec))
    for size in 16, None:
        alone.clear()
        _, failed = read(image(size, exif_transpose=True), datas)
        assert alone == datas[4:8]
        assert sorted(failed) == [6, 8]


def test_a_raw_member_of_another_size_fails_alone():
    datas = [bytes(12), bytes(13), bytes(12)]
    for reader in image(shape=(2, 2, 3)), image(5, shape=(2, 2, 3)):
        batch, failed = read(reader, datas)
        assert {row: str(error) for row, error in failed.items()} == {
            1: "13 bytes instead of 12 for uint8 of shape (2, 2, 3)"
        }
        assert not batch[[0, 2]].any()


@pytest.mark.parametrize("array", [np.ones((2, 2, 3)), np.ones((2, 2, 2), np.uint8), np.ones(4, np.uint8)])
def test_arrays_that_are_no_images_are_refused(array):
    with pytest.raises(DecodeError, match="is no image: uint8 of"):
        image(4).open("npy", Payloads.of([npy(array)])[0])


@pytest.mark.parametrize(
    "options",
    [
        {"crop": "middle"},
        {"layout": "NHWC"},
        {"size": None, "crop": "center"},
        {"crop": "center", "ratio": 1.5},
        {"crop": "center", "ratio": (1, 2)},
        {"crop": "random_resized", "scale": (0, 1)},
        {"crop": "random_resized", "ratio": (2, 1)},
        {"crop": "random_resized", "ratio": 0.5},
        {"flip": 2},
        {"size": 0},
        {"dtype": "int32"},
        {"mean": 0.5},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=r"size|crop|ratio|scale|flip|dtype"):
        image(**{"size": 8, **options})


def test_mean_and_std_must_fit_the_channels():
    with pytest.raises(ValueError, match="mean"):
        image(8, dtype="float32", mean=(0.5, 0.5)).open("png", Payloads.of(PNGS[:1])[0])
