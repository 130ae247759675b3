"""Images and texts, as CLIP is trained: examples/pairs.py 'pairs-{00000..00999}.tar'."""

import sys

import numpy as np
import torch
from torch import nn

from tarshards import ArrayLoader, ShardDataset, readers


def tokenize(data: bytes) -> np.ndarray:
    return np.frombuffer(data[:24].ljust(24, b"\0"), np.uint8).astype(np.int64)


dataset = ShardDataset(sys.argv[1], shuffle=True).select("json['width'] >= 32")
images = readers.image(32, crop="random_resized", dtype="float32", layout="CHW")
loader = ArrayLoader(dataset, 16, fields={"image:jpg;png": images, "text:txt": tokenize}, device="cpu")

seeing = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8))
reading = nn.Sequential(nn.EmbeddingBag(256, 8))
optimizer = torch.optim.SGD([*seeing.parameters(), *reading.parameters()], 0.01)
for batch in loader:
    scores = seeing(batch["image"]) @ reading(batch["text"]).T
    loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{len(loader)} steps, loss {loss.item():.3f}")
