"""Patches of NIfTI volumes and their labels, without reading the volumes whole: examples/medicine.py SHARDS."""

import sys
from typing import Any

import nibabel
import numpy as np
import torch
from torch import nn

from tarshards import ShardDataset, ShardLoader

SIZE, COUNT = (32, 32, 16), 4


def patches(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    scan = nibabel.Nifti1Image.from_stream(sample["scan.nii"]).dataobj  # reads the header; a slice reads its bytes
    label = nibabel.Nifti1Image.from_stream(sample["label.nii"]).dataobj
    corners = rng.integers(0, np.subtract(scan.shape, SIZE), (COUNT, 3), endpoint=True)
    boxes = [tuple(map(slice, corner, corner + SIZE)) for corner in corners]
    return {"scan": np.stack([scan[box] for box in boxes]), "label": np.stack([label[box] for box in boxes])}


if __name__ == "__main__":
    dataset = ShardDataset(sys.argv[1], lazy="scan.nii label.nii", shuffle=True)
    loader = ShardLoader(dataset.map(patches, rng=True), 2, num_workers=2)

    model = nn.Conv3d(1, 2, 5, padding=2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for batch in loader:
        scans, labels = batch["scan"].flatten(0, 1), batch["label"].flatten(0, 1)
        loss = nn.functional.cross_entropy(model(scans[:, None].float() / 1000), labels.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{len(loader)} steps, loss {loss.item():.3f}")
