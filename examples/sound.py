"""Sounds of any rate and format, cut to equal lengths: examples/sound.py 'sounds-{000..099}.tar'."""

import sys

import torch
from torch import nn

from tarshards import ArrayLoader, ShardDataset, readers

sounds = readers.audio(8000, seconds=0.5, crop="random", channels=1)
fields = {"sound:wav;flac": sounds, "label:cls": readers.integer()}
loader = ArrayLoader(ShardDataset(sys.argv[1], shuffle=True), 8, fields=fields, device="cpu")
model = nn.Sequential(nn.Conv1d(1, 8, 64, 8), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for batch in loader:
    samples, lengths = batch["sound"]
    loss = nn.functional.cross_entropy(model(samples.mT), batch["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{len(loader)} steps, loss {loss.item():.3f}")
