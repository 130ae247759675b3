"""Sounds of any rate and format, cut to equal lengths, with webdataset."""

import io
import random
import sys

import numpy as np
import soundfile
import soxr
import torch
import webdataset as wds
from torch import nn


def read(data):
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    samples = soxr.resample(samples.mean(1), rate, 8000)
    begin = random.randint(0, max(0, len(samples) - 4000))
    samples = samples[begin : begin + 4000]
    return torch.from_numpy(np.pad(samples, (0, 4000 - len(samples))))[None]


dataset = wds.WebDataset(sys.argv[1], shardshuffle=100).shuffle(1000)
dataset = dataset.to_tuple("wav;flac", "cls").map_tuple(read, int).batched(8)
loader = wds.WebLoader(dataset, batch_size=None, num_workers=0)
model = nn.Sequential(nn.Conv1d(1, 8, 64, 8), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step, (samples, labels) in enumerate(loader):  # noqa: B007
    loss = nn.functional.cross_entropy(model(samples), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{step + 1} steps, loss {loss.item():.3f}")
