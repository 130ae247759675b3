"""Patches of NIfTI volumes and their labels with webdataset, which reads each volume whole."""

import sys

import nibabel
import numpy as np
import torch
import webdataset as wds
from torch import nn

SIZE, COUNT = (32, 32, 16), 4
rng = np.random.default_rng()


def seed(worker):
    global rng
    rng = np.random.default_rng(torch.initial_seed())


def patches(sample):
    scan = nibabel.Nifti1Image.from_bytes(sample["scan.nii"]).dataobj
    label = nibabel.Nifti1Image.from_bytes(sample["label.nii"]).dataobj
    corners = rng.integers(0, np.subtract(scan.shape, SIZE), (COUNT, 3), endpoint=True)
    boxes = [tuple(map(slice, corner, corner + SIZE)) for corner in corners]
    return {"scan": np.stack([scan[box] for box in boxes]), "label": np.stack([label[box] for box in boxes])}


dataset = wds.WebDataset(sys.argv[1], shardshuffle=100).shuffle(100).map(patches)
loader = wds.WebLoader(dataset, 2, num_workers=2, worker_init_fn=seed)

model = nn.Conv3d(1, 2, 5, padding=2)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
steps = 0
for batch in loader:
    scans, labels = batch["scan"].flatten(0, 1), batch["label"].flatten(0, 1)
    loss = nn.functional.cross_entropy(model(scans[:, None].float() / 1000), labels.long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
print(f"{steps} steps, loss {loss.item():.3f}")
