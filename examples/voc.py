"""Pascal VOC's images, masks and boxes to shards: python examples/voc.py VOCdevkit/VOC2012 train 'voc-{shard}.tar'."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from tarshards import ShardWriter

CLASSES = (  # from 1 on, as in the masks
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep "
    "sofa train tvmonitor"
)
SIDES = "xmin", "ymin", "xmax", "ymax"
FIRST = np.array([1, 1, 0, 0], np.float32)  # VOC counts pixels from 1, and the last one belongs to the box

folder, split, shards = sys.argv[1:]
with ShardWriter(shards, max_bytes=10**9) as writer:
    for name in Path(folder, "ImageSets/Segmentation", f"{split}.txt").read_text().split():
        objects = ElementTree.parse(Path(folder, "Annotations", f"{name}.xml")).findall("object")
        boxes = [[float(each.findtext(f"bndbox/{side}", "")) for side in SIDES] for each in objects]
        labels = [1 + CLASSES.split().index(each.findtext("name", "")) for each in objects]
        sample = {
            "jpg": Path(folder, "JPEGImages", f"{name}.jpg").read_bytes(),
            "mask.png": Path(folder, "SegmentationClass", f"{name}.png").read_bytes(),
            "boxes.npy": np.array(boxes, np.float32).reshape(-1, 4) - FIRST,
            "labels.npy": np.array(labels, np.int64),
        }
        writer.write({"__key__": name} | sample)
