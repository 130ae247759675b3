"""Text, packed into rows without padding; a killed run resumes: examples/text.py 'text-{000..099}.tar' state.pt."""

import sys
from pathlib import Path

import torch
from torch import nn

from tarshards import ArrayLoader, ShardDataset, pack, readers

dataset = ShardDataset(sys.argv[1], shuffle=True)
fields = {"tokens": readers.ragged("int64")}
loader = ArrayLoader(dataset, 1, fields=fields, packing=pack("tokens", 128, overlong="split"), device="cpu")
model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if Path(sys.argv[2]).exists():
    loader.load_state_dict(torch.load(sys.argv[2]))
for step, batch in enumerate(loader, 1):
    tokens, inner = batch["tokens"], batch["position_ids"][1:] > 0
    loss = nn.functional.cross_entropy(model(tokens[:-1])[inner], tokens[1:][inner])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        torch.save(loader.state_dict(), sys.argv[2])
print(f"{step} rows, loss {loss.item():.3f}")
