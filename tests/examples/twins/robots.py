"""Windows of episodes with LeRobot's own dataset; the data does not resume: robots.py FOLDER."""

import json
import sys
from pathlib import Path

import torch

if torch.version.cuda is None:  # PyPI's torchvision needs these for its import
    for operator in "nms", "qnms":
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.datasets.lerobot_dataset import LeRobotDataset
from torch import nn
from torch.utils.data import DataLoader

DELTAS = {
    "observation.images.top": [-0.1, 0],
    "observation.state": [-0.1, 0],
    "action": [step / 10 for step in range(16)],
}

dataset = LeRobotDataset("me/pushes", root=sys.argv[1], delta_timestamps=DELTAS)
stats = json.loads(Path(sys.argv[1], "meta/stats.json").read_text())
mean, std = (torch.tensor(stats["action"][name]) for name in ("mean", "std"))

see = nn.Sequential(nn.Conv2d(6, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 8, 4), nn.ReLU(), nn.Flatten())
act = nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, 16 * 2), nn.Unflatten(1, (16, 2)))
optimizer = torch.optim.Adam([*see.parameters(), *act.parameters()], 1e-3)
for epoch in range(2):
    for batch in DataLoader(dataset, 32, shuffle=True, num_workers=2):
        images = see(batch["observation.images.top"].flatten(1, 2))
        actions = act(torch.cat([images, batch["observation.state"].flatten(1) / 512], 1))
        loss = (actions - (batch["action"] - mean) / std)[~batch["action_is_pad"]].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {len(dataset)} windows, loss {loss.item():.3f}")
