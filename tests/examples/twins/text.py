"""Text, packed into rows, with webdataset, which does not resume."""

import sys

import torch
import webdataset as wds
from torch import nn


def packed(samples, capacity=128):
    tokens, positions = [], []
    for sample in samples:
        document = torch.frombuffer(bytearray(sample["tokens"]), dtype=torch.int64)
        for begin in range(0, len(document), capacity):
            piece = document[begin : begin + capacity]
            if sum(map(len, tokens)) + len(piece) > capacity:
                yield torch.cat(tokens), torch.cat(positions)
                tokens, positions = [], []
            tokens.append(piece)
            positions.append(torch.arange(len(piece)))
    if tokens:
        yield torch.cat(tokens), torch.cat(positions)


dataset = wds.WebDataset(sys.argv[1], shardshuffle=100).shuffle(1000).decode().compose(packed)
loader = wds.WebLoader(dataset, batch_size=None, num_workers=0)
model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step, (tokens, positions) in enumerate(loader, 1):  # noqa: B007
    inner = positions[1:] > 0
    loss = nn.functional.cross_entropy(model(tokens[:-1])[inner], tokens[1:][inner])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{step} rows, loss {loss.item():.3f}")
