"""COCO's images and annotations to shards: python examples/coco.py instances.json train2017 'coco-{shard}.tar'."""

import sys
from pathlib import Path

import numpy as np
from pycocotools.coco import COCO

from tarshards import ShardWriter

annotations, folder, shards = sys.argv[1:]
coco = COCO(annotations)
numbers = {category: number for number, category in enumerate(sorted(coco.cats), 1)}  # 0 is the background
with ShardWriter(shards, max_bytes=10**9) as writer:
    for image in sorted(coco.imgs.values(), key=lambda image: image["file_name"]):
        objects = coco.loadAnns(coco.getAnnIds(image["id"]))
        mask = np.zeros((image["height"], image["width"]), np.uint8)
        for each in objects:
            mask[coco.annToMask(each) > 0] = numbers[each["category_id"]]
        boxes = np.array([each["bbox"] for each in objects], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]  # COCO's are x, y, width, height
        points = [each["keypoints"] for each in objects if "keypoints" in each]
        sample = {
            "jpg": Path(folder, image["file_name"]).read_bytes(),
            "mask.png": mask,
            "boxes.npy": boxes,
            "labels.npy": np.array([numbers[each["category_id"]] for each in objects], np.int64),
            "points.npy": np.array(points, np.float32).reshape(-1, 3),  # x, y, visibility
            "json": objects,
        }
        writer.write({"__key__": Path(image["file_name"]).stem} | sample)
