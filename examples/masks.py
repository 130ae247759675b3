"""Images with masks, boxes and keypoints, cropped alike: python examples/masks.py 'quokka-{0..3}.tar'."""

import sys
from functools import partial

import torch
from torch import nn

from tarshards import ShardDataset, ShardLoader, augment, readers

image = readers.image(128, crop="random_resized", flip=0.5, dtype="float32", layout="CHW")
fields = {
    "image:jpg": image,
    "mask:mask.png": readers.mask(image, dtype="int64"),
    "map:jpg": readers.affine(image),
    "boxes:boxes.npy": readers.ragged(),
    "points:points.npy": readers.ragged(),
}
move = [
    partial(augment.move_boxes, field="boxes", affine="map", image="image"),
    partial(augment.move_points, field="points", affine="map"),
]

if __name__ == "__main__":
    dataset = ShardDataset(sys.argv[1], shuffle=True)
    loader = ShardLoader(dataset, 16, num_workers=2, fields=fields, transforms=move)

    model = nn.Conv2d(3, 2, 9, padding=4)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for batch in loader:
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["mask"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    boxes, _ = batch["boxes"]
    visible = (boxes[:, 2:] > boxes[:, :2]).all(1)
    print(f"{len(loader)} steps, loss {loss.item():.3f}; {visible.sum()} of {len(boxes)} boxes in the last crops")
