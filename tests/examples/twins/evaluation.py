"""Evaluation by random access, with wids."""

import sys

import numpy as np
import torch
import wids
from torch.utils.data import DataLoader


def convert(sample):
    return torch.from_numpy(np.asarray(sample[".png"], np.float32) / 255).permute(2, 0, 1), sample[".cls"]


model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
dataset = wids.ShardListDataset(sys.argv[1])
dataset.add_transform(convert)
hits = 0
for images, labels in DataLoader(dataset, 64, num_workers=2):
    hits += (model(images).argmax(1) == labels).sum().item()
print(f"accuracy {hits / len(dataset):.1%} of {len(dataset)}; sample 7 is of class {dataset[7][1]}")
