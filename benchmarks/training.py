"""A small classifier of images for the task `train`: what an epoch takes with a model behind the loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CLASSES = 10


def make_step() -> Callable[[Any, Any], int]:
    """Return a function that trains on a batch of uint8 pixels, channels last or first, and returns its size."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other core is the loader's
    layers = [nn.Conv2d(3, 16, 8, stride=8), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))
    model.to(memory_format=torch.channels_last)
    optimizer, loss_of = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()

    def step(pixels: Any, labels: Any) -> int:
        images = torch.as_tensor(pixels)
        images = images.permute(0, 3, 1, 2) if images.shape[-1] == 3 else images
        optimizer.zero_grad()
        scores = model(images.float().div_(255))
        loss_of(scores, torch.as_tensor(labels).long() % CLASSES).backward()
        optimizer.step()
        return len(images)

    return step
