"""Speech in batches of a minute; the data resumes, not the model: examples/speech.py SHARDS STATE [SHARDS OF AUDIO]."""

import sys
from pathlib import Path

import torch
from torch import nn

from tarshards import ArrayLoader, ShardDataset, bucket, readers

dataset = ShardDataset(sys.argv[1], shuffle=True)
if sys.argv[3:]:
    dataset = dataset.join(sys.argv[3], fields="flac;wav;mp3;opus")
fields = {"sound:flac;wav;mp3;opus": readers.audio(8000), "letters:txt": readers.ragged()}
loader = ArrayLoader(dataset, 1, fields=fields, packing=bucket("duration", budget=60), device="cpu")
model = nn.Sequential(nn.Conv1d(1, 64, 400, 80), nn.ReLU(), nn.Conv1d(64, 256, 5, padding=2), nn.LogSoftmax(1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
if Path(sys.argv[2]).exists():
    loader.load_state_dict(torch.load(sys.argv[2]))
for batch in loader:
    (sounds, lengths), (letters, ends) = batch["sound"], batch["letters"]
    scores = model(sounds.mT).permute(2, 0, 1)
    loss = nn.functional.ctc_loss(scores, letters.long(), (lengths - 320) // 80, ends.diff())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(loader.state_dict(), sys.argv[2])
print(f"{len(loader)} batches, loss {loss.item():.2f}")
