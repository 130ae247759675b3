"""Images with masks, boxes and keypoints: a photo in the layouts of VOC, COCO and two folders; ImageNet's archive.

The photo, its outline, box and keypoints are those that the package imgaug contains.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from quokka import Quokka

from tarshards import ArrayLoader, IndexedShards, ShardWriter, Stream, augment, readers

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/masks.md").read_text()
CLASS = 12  # of dogs, in VOC: the photo's animal is of no class there
XML = """<annotation><object><name>dog</name><bndbox>
<xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object></annotation>"""


@pytest.fixture(scope="module")
def quokka() -> Quokka:
    return Quokka()


def run_example(name: str, folder: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def run_line(tmp_path, path_with_tools) -> Callable[[str], str]:
    """Return a function that runs the block of the page that contains some words, and returns its output."""

    def run(words: str) -> str:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        (block,) = [text for language, text in blocks if not language and words in text]
        command = ["bash", "-euo", "pipefail", "-c", block]
        environment = os.environ | {"PATH": path_with_tools}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def extent(mask: np.ndarray) -> list[int]:
    """The box around the pixels that are not 0."""
    down, across = np.nonzero(mask)
    return [across.min(), down.min(), across.max() + 1, down.max() + 1]


def check_crops(shards: Path, count: int, number: int) -> None:
    """In random crops the box of a sample is that of its mask; of one that is cut, the mask's is within it."""
    image = readers.image(256, crop="random_resized", scale=(0.3, 1), flip=0.5)
    fields: dict[str, Any] = {"mask.png": readers.mask(image), "map:jpg": readers.affine(image), "jpg": image}
    fields |= {"boxes.npy": readers.ragged(), "labels.npy": readers.ragged()}
    move = partial(augment.move_boxes, field="boxes.npy", affine="map", image="jpg")
    flipped = whole = 0
    for epoch in range(20):
        stream = Stream.from_shards(str(shards), seed=7)
        stream.set_epoch(epoch)
        for batch in ArrayLoader(stream, 8, fields=fields, transforms=[move]):
            assert len(batch["__key__"]) == count
            assert batch["labels.npy"][0].tolist() == [number] * count
            assert {*np.unique(batch["mask.png"])} <= {0, number}
            flipped += int((batch["map"][:, 0, 0] < 0).sum())
            for mask, box in zip(batch["mask.png"], batch["boxes.npy"][0]):
                is_cut = box.min() == 0 or box.max() == 256
                if not is_cut:
                    np.testing.assert_allclose(box, extent(mask), atol=2.5)
                    whole += 1
                elif mask.any():
                    left, top, right, bottom = box - extent(mask)
                    assert max(left, top) < 2.5
                    assert min(right, bottom) > -2.5
    assert 0 < flipped < 20 * count
    assert whole


def test_voc(quokka, tmp_path, run_line):
    folder = tmp_path / "VOCdevkit/VOC2012"
    for name in "ImageSets/Segmentation", "JPEGImages", "SegmentationClass", "Annotations":
        (folder / name).mkdir(parents=True)
    names = ["2011_000003", "2011_000006"]
    (folder / "ImageSets/Segmentation/train.txt").write_text("".join(f"{name}\n" for name in names))
    mask = quokka.mask(CLASS)
    left, top, right, bottom = extent(np.asarray(mask))
    mask.putpalette([value for index in range(256) for value in (index, 255 - index, index * 7 % 256)])
    assert mask.mode == "P"
    for name in names:
        (folder / f"JPEGImages/{name}.jpg").write_bytes(quokka.jpg)
        mask.save(folder / f"SegmentationClass/{name}.png")
        (folder / f"Annotations/{name}.xml").write_text(XML.format(left + 1, top + 1, right, bottom))
    run_example("voc.py", tmp_path, "VOCdevkit/VOC2012", "train", "voc-{shard}.tar")
    check_crops(tmp_path / "voc.shards.json", 2, CLASS)
    run_line("ImageSets")
    samples = IndexedShards(str(tmp_path / "voc-train.shards.json"))
    assert [sample["__key__"] for sample in samples] == names
    assert samples[0].keys() == {"__key__", "__url__", "jpg", "mask.png"}


def test_coco(quokka, tmp_path):
    pytest.importorskip("pycocotools")
    from pycocotools import mask as runs

    width, height = quokka.image.size
    polygon = [value for point in quokka.outline for value in point]
    encoded = runs.merge(runs.frPyObjects([polygon], height, width))
    points = [value for x, y in quokka.points for value in (x, y, 2)]
    note = {"segmentation": [polygon], "bbox": runs.toBbox(encoded).tolist(), "area": float(runs.area(encoded))}
    note |= {"category_id": 17, "iscrowd": 0, "keypoints": points, "num_keypoints": len(quokka.points)}
    images = [{"id": number, "file_name": f"{number:012d}.jpg", "width": width, "height": height} for number in (9, 4)]
    notes = [note | {"id": 1, "image_id": 9}, note | {"id": 2, "image_id": 4}]
    found = {
        "images": images,
        "annotations": notes,
        "categories": [{"id": 3, "name": "car"}, {"id": 17, "name": "animal"}],
    }
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances.json").write_text(json.dumps(found))
    (tmp_path / "photos").mkdir()
    for image in images:
        (tmp_path / "photos" / image["file_name"]).write_bytes(quokka.jpg)
    run_example("coco.py", tmp_path, "annotations/instances.json", "photos", "coco-{shard}.tar")
    check_crops(tmp_path / "coco.shards.json", 2, 2)
    first = IndexedShards(str(tmp_path / "coco.shards.json")).decode()[0]
    assert first["__key__"] == "000000000004"
    assert first["json"][0]["category_id"] == 17
    np.testing.assert_array_equal(first["points.npy"][:, :2], quokka.points)


def test_keypoints_stay_on_their_pixels(quokka, tmp_path):
    """Each keypoint is marked by a green square, which is where the crop has it."""
    marked = np.array(quokka.image)
    for x, y in quokka.points:
        marked[int(y) - 4 : int(y) + 4, int(x) - 4 : int(x) + 4] = 0, 255, 0
    encoded = io.BytesIO()
    Image.fromarray(marked).save(encoded, "JPEG", quality=95)
    image = readers.image(320, crop="random_resized", scale=(0.3, 1), flip=0.5)
    with ShardWriter(tmp_path / "x-{shard}.tar") as writer:
        points = np.array(quokka.points, np.float32)
        writer.write({"__key__": "a", "jpg": encoded.getvalue(), "points.npy": points})
    fields: dict[str, Any] = {"jpg": image, "map:jpg": readers.affine(image), "points.npy": readers.array()}
    move = partial(augment.move_points, field="points.npy", affine="map")
    inside = 0
    for epoch in range(10):
        stream = Stream.from_shards(str(tmp_path / "x.shards.json"))
        stream.set_epoch(epoch)
        (batch,) = ArrayLoader(stream, 1, fields=fields, transforms=[move])
        for x, y in batch["points.npy"][0]:
            if 4 < x < 316 and 4 < y < 316:
                red, green, blue = batch["jpg"][0, int(y), int(x)].astype(int)
                assert green > 180 > 90 > max(red, blue)
                inside += 1
    assert inside > 20


def test_pairs_in_two_folders(quokka, tmp_path, run_line):
    for name in "images", "seg_masks":
        (tmp_path / "train_data" / name).mkdir(parents=True)
    for number in range(1, 4):
        (tmp_path / f"train_data/images/image_{number:02d}.jpg").write_bytes(quokka.jpg)
        quokka.mask(number).save(tmp_path / f"train_data/seg_masks/seg_mask_{number:02d}.png")
    run_line("seg_masks")
    samples = IndexedShards(str(tmp_path / "pairs.shards.json")).decode(png="l8")
    found = [(sample["__key__"], int(sample["mask.png"].max())) for sample in samples]
    assert found == [("01", 1), ("02", 2), ("03", 3)]


def test_masks_of_another_size_are_found(quokka, tmp_path, run_line):
    pytest.importorskip("pyarrow")
    half = quokka.mask(1).resize((480, 321), Image.Resampling.NEAREST)
    with ShardWriter(tmp_path / "pairs-{shard}.tar") as writer:
        for number in range(4):
            mask = half if number == 2 else quokka.mask(1)
            writer.write({"__key__": f"{number:02d}", "jpg": quokka.jpg, "mask.png": mask})
    assert [line.split()[0] for line in run_line("w=width").splitlines()] == ["02"]


def test_imagenet(tmp_path, run_line):
    """Tiles of two photos in an archive of ImageNet's layout, by Python's tarfile."""
    datasets = pytest.importorskip("sklearn.datasets")
    classes = ["n01440764", "n01443537", "n15075141"]
    photos = datasets.load_sample_images().images
    with tarfile.open(tmp_path / "ILSVRC2012_img_train.tar", "w") as archive:
        for number, name in enumerate(classes):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for tile in range(5):
                    pixels = photos[tile % 2][100 * number : 100 * number + 120, 100 * tile : 100 * tile + 150]
                    encoded = io.BytesIO()
                    Image.fromarray(pixels).save(encoded, "JPEG")
                    add(tar, f"{name}_{100 + tile}.JPEG", encoded.getvalue())
            add(archive, f"{name}.tar", inner.getvalue())
    run_example("imagenet.py", tmp_path, "ILSVRC2012_img_train.tar", "train-{shard:06d}.tar")
    samples = IndexedShards(str(tmp_path / "train.shards.json")).decode("rgb8")
    wanted = [(f"{name}/{name}_{100 + tile}", number) for number, name in enumerate(classes) for tile in range(5)]
    assert [(sample["__key__"], sample["cls"]) for sample in samples] == wanted
    assert {sample["jpg"].shape for sample in samples} == {(120, 150, 3)}
    run_line("tar -xO")
    with_tools = IndexedShards(str(tmp_path / "imagenet-train.shards.json"))
    assert with_tools.keys == [key.partition("/")[2] for key, _ in wanted]
    assert with_tools[3]["jpeg"] == IndexedShards(str(tmp_path / "train.shards.json"))[3]["jpg"]


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(data)
    tar.addfile(header, io.BytesIO(data))
