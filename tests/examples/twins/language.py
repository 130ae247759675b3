"""Documents, packed into rows, with webdataset, which does not resume."""

import sys

import torch
import webdataset as wds
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


def packed(samples, capacity=256):
    ids, positions = [], []
    for sample in samples:
        document = torch.from_numpy(sample["ids.npy"]).long()
        for begin in range(0, len(document), capacity):
            piece = document[begin : begin + capacity]
            if sum(map(len, ids)) + len(piece) > capacity:
                yield torch.cat(ids), torch.cat(positions)
                ids, positions = [], []
            ids.append(piece)
            positions.append(torch.arange(len(piece)))
    if ids:
        yield torch.cat(ids), torch.cat(positions)


dataset = wds.WebDataset(sys.argv[1], shardshuffle=100).shuffle(1000).decode().compose(packed)
loader = wds.WebLoader(dataset, batch_size=None, num_workers=0)
embed, attend, output = nn.Embedding(2048, 32), nn.Linear(32, 96), nn.Linear(32, 2048)
optimizer = torch.optim.Adam([*embed.parameters(), *attend.parameters(), *output.parameters()], 0.01)
for step, (ids, positions) in enumerate(loader, 1):  # noqa: B007
    documents = (positions == 0).cumsum(0)
    mask = (documents[:, None] == documents).tril()
    query, key, value = attend(embed(ids)).chunk(3, 1)
    hidden = scaled_dot_product_attention(query[None], key[None], value[None], mask)[0]
    inner = positions[1:] > 0
    loss = cross_entropy(output(hidden)[:-1][inner], ids[1:][inner])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{step} rows, loss {loss.item():.3f}")
