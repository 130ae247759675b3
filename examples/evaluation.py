"""Evaluation by random access: examples/evaluation.py val.shards.json."""

import sys

import torch
from torch.utils.data import DataLoader

from tarshards import IndexedShards

if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    dataset = IndexedShards(sys.argv[1]).decode("torchrgb").to_tuple("png", "cls")
    hits = 0
    for images, labels in DataLoader(dataset, 64, num_workers=2):
        hits += (model(images).argmax(1) == labels).sum().item()
    print(f"accuracy {hits / len(dataset):.1%} of {len(dataset)}; sample 7 is of class {dataset[7][1]}")
