"""Images, on several GPUs, with webdataset."""

import random
import sys

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def augment(image):
    side = random.randint(min(image.size) // 2, min(image.size))
    left, top = random.randint(0, image.width - side), random.randint(0, image.height - side)
    image = image.resize((32, 32), Image.BILINEAR, (left, top, left + side, top + side))
    image = image.transpose(Image.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image
    return torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1)


distributed.init_process_group()
rank, ranks = distributed.get_rank(), distributed.get_world_size()
dataset = wds.WebDataset(sys.argv[1], shardshuffle=100, nodesplitter=wds.split_by_node)
dataset = dataset.shuffle(1000).decode("pil").to_tuple("jpg;png", "cls").map_tuple(augment, int)
loader = wds.WebLoader(dataset.batched(16), batch_size=None, num_workers=2)
steps = int(sys.argv[2]) // (16 * ranks)
loader = loader.repeat(2).with_epoch(steps)

model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    for step, (images, labels) in enumerate(loader):  # noqa: B007
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}, epoch {epoch}: {step + 1} steps, loss {loss.item():.3f}")
distributed.destroy_process_group()
