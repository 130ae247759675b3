"""Images and texts, as CLIP is trained, with webdataset."""

import random
import sys

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from torch import nn


def tokenize(text):
    return torch.tensor(list(text.encode()[:24].ljust(24, b"\0")))


def crop(image):
    side = random.randint(min(image.size) // 2, min(image.size))
    left, top = random.randint(0, image.width - side), random.randint(0, image.height - side)
    image = image.resize((32, 32), Image.BILINEAR, (left, top, left + side, top + side))
    return torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1)


dataset = wds.WebDataset(sys.argv[1], shardshuffle=100).shuffle(1000).decode("pil")
dataset = dataset.select(lambda sample: sample["json"]["width"] >= 32)
dataset = dataset.to_tuple("jpg;png", "txt").map_tuple(crop, tokenize).batched(16)
loader = wds.WebLoader(dataset, batch_size=None, num_workers=0)

seeing = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8))
reading = nn.Sequential(nn.EmbeddingBag(256, 8))
optimizer = torch.optim.SGD([*seeing.parameters(), *reading.parameters()], 0.01)
for step, (images, texts) in enumerate(loader):  # noqa: B007
    scores = seeing(images) @ reading(texts).T
    loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{step + 1} steps, loss {loss.item():.3f}")
