"""Documents in packed rows; the data resumes, not the model: examples/language.py 'tokens-{00..99}.tar' state.pt."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from tarshards import ArrayLoader, ShardDataset, pack, readers

dataset = ShardDataset(sys.argv[1], shuffle=True)
packing = pack("ids.npy", 256, overlong="split")
loader = ArrayLoader(dataset, 1, fields={"ids.npy": readers.ragged()}, packing=packing, device="cpu")
embed, attend, output = nn.Embedding(2048, 32), nn.Linear(32, 96), nn.Linear(32, 2048)
optimizer = torch.optim.Adam([*embed.parameters(), *attend.parameters(), *output.parameters()], 0.01)
if Path(sys.argv[2]).exists():
    loader.load_state_dict(torch.load(sys.argv[2]))
for step, batch in enumerate(loader, 1):
    ids, positions = batch["ids.npy"].long(), batch["position_ids"]
    documents = (positions == 0).cumsum(0)
    mask = (documents[:, None] == documents).tril()  # of FlexAttention and FlashAttention: see docs/guides/language.md
    query, key, value = attend(embed(ids)).chunk(3, 1)
    hidden = scaled_dot_product_attention(query[None], key[None], value[None], mask)[0]
    inner = positions[1:] > 0
    loss = cross_entropy(output(hidden)[:-1][inner], ids[1:][inner])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        torch.save(loader.state_dict(), sys.argv[2])
print(f"{step} rows, loss {loss.item():.3f}")
