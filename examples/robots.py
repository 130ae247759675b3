"""Train a policy on windows of episodes; the data resumes, not the model: examples/robots.py FOLDER STATE."""

import json
import sys
from pathlib import Path

import torch
from episode_windows import Windows, load
from torch import nn
from torch.utils.data import DataLoader

from tarshards import EpochPlan

DELTAS = {
    "observation.images.top": [-0.1, 0],
    "observation.state": [-0.1, 0],
    "action": [step / 10 for step in range(16)],
}


def main(folder: str, saved: Path) -> None:
    windows = Windows(folder, DELTAS)
    stats = load(f"{folder}/stats.json")
    mean, std = (torch.tensor(stats["action"][name]) for name in ("mean", "std"))
    plan = EpochPlan(windows.lengths, seed=0, epoch=0)
    if saved.exists():
        plan = EpochPlan.restore(windows.lengths, json.loads(saved.read_text()), ranks=1, tail="exact")

    see = nn.Sequential(nn.Conv2d(6, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 8, 4), nn.ReLU(), nn.Flatten())
    act = nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, 16 * 2), nn.Unflatten(1, (16, 2)))
    optimizer = torch.optim.Adam([*see.parameters(), *act.parameters()], 1e-3)
    loss = torch.tensor(torch.nan)
    while plan.epoch < 2:
        for step, batch in enumerate(DataLoader(windows, 32, sampler=plan, num_workers=2), 1):
            images = see(batch["observation.images.top"].flatten(1, 2) / 255)
            actions = act(torch.cat([images, batch["observation.state"].flatten(1) / 512], 1))
            loss = (actions - (batch["action"] - mean) / std)[~batch["action_is_pad"]].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            saved.write_text(json.dumps(plan.state(min(32 * step, len(plan)))))
        print(f"epoch {plan.epoch}: {len(plan)} windows, loss {loss.item():.3f}")
        plan = EpochPlan(windows.lengths, seed=0, epoch=plan.epoch + 1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
