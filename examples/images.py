"""Images, on several GPUs: torchrun --nproc-per-node 8 examples/images.py 'train-{0000..0146}.tar'."""

import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tarshards import ArrayLoader, ShardDataset, readers

distributed.init_process_group()
rank = distributed.get_rank()
images = readers.image(32, crop="random_resized", flip=0.5, dtype="float32", layout="CHW")
fields = {"image:jpg;png": images, "label:cls": readers.integer()}
loader = ArrayLoader(ShardDataset(sys.argv[1], shuffle=True), 16, fields=fields, device="cpu")

model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    for batch in loader:
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}, epoch {epoch}: {len(loader)} steps, loss {loss.item():.3f}")
distributed.destroy_process_group()
