"""Images with masks, boxes and keypoints, cropped alike, with webdataset and torchvision."""

import io
import sys

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from torch import nn

if torch.version.cuda is None:  # PyPI's torchvision needs these for its import
    for operator in "nms", "qnms":
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from torchvision import tv_tensors
from torchvision.transforms import v2

SIZE = 128
transform = v2.Compose(
    [
        v2.RandomResizedCrop(SIZE, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
    ]
)


def prepare(sample):
    image = tv_tensors.Image(Image.open(io.BytesIO(sample["jpg"])).convert("RGB"))
    mask = tv_tensors.Mask(np.array(Image.open(io.BytesIO(sample["mask.png"]))))
    size = image.shape[-2:]
    boxes = tv_tensors.BoundingBoxes(np.load(io.BytesIO(sample["boxes.npy"])), format="XYXY", canvas_size=size)
    points = tv_tensors.KeyPoints(np.load(io.BytesIO(sample["points.npy"])), canvas_size=size)
    return transform((image, mask, boxes, points))


def collate(samples):
    images, masks, boxes, points = zip(*samples)
    return torch.stack(images), torch.stack(masks).long(), boxes, points


dataset = wds.WebDataset(sys.argv[1], shardshuffle=100).shuffle(1000).map(prepare)
loader = wds.WebLoader(dataset.batched(16, collation_fn=collate), batch_size=None, num_workers=2)

model = nn.Conv2d(3, 2, 9, padding=4)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
steps = 0
for images, masks, boxes, points in loader:  # noqa: B007
    loss = nn.functional.cross_entropy(model(images), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
boxes = torch.cat(boxes)
visible = (boxes[:, 2:] > boxes[:, :2]).all(1)
print(f"{steps} steps, loss {loss.item():.3f}; {visible.sum()} of {len(boxes)} boxes in the last crops")
