"""Record pushes in the simulation gym-pusht as a LeRobot dataset, by LeRobot's own writer: examples/push.py FOLDER."""

import sys

import datasets
import numpy as np
import torch

if torch.version.cuda is None:  # PyPI's torchvision, which LeRobot imports, needs these for its import
    for operator in "nms", "qnms":
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import gym_pusht  # noqa: F401
import gymnasium
from lerobot.datasets.lerobot_dataset import LeRobotDataset

sizes = {"observation_width": 96, "observation_height": 96, "visualization_width": 128, "visualization_height": 96}
world = gymnasium.make("gym_pusht/PushT-v0", obs_type="pixels_agent_pos", disable_env_checker=True, **sizes)
axes = ["height", "width", "channels"]
features = {
    "observation.images.top": {"dtype": "video", "shape": (96, 96, 3), "names": axes},
    "observation.images.marked": {"dtype": "video", "shape": (96, 128, 3), "names": axes},  # with the action before
    "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
}
datasets.disable_progress_bars()
dataset = LeRobotDataset.create("me/pushes", fps=10, features=features, root=sys.argv[1])
rng = np.random.default_rng(0)
for number in range(6):
    seen, _ = world.reset(seed=number)
    for _ in range(rng.integers(15, 26)):
        block = np.array(world.unwrapped.block.position)
        action = np.clip(rng.normal(block, 60), 0, 512).astype(np.float32)  # pushes where the block is, roughly
        frame = {
            "observation.images.top": seen["pixels"],
            "observation.images.marked": world.render(),
            "observation.state": seen["agent_pos"].astype(np.float32),
            "action": action,
            "task": ("Push the T", "Push the T away")[number % 2],
        }
        dataset.add_frame(frame)
        seen, *_ = world.step(action)
    dataset.save_episode()
dataset.finalize()
print(f"{dataset.num_episodes} episodes, {dataset.num_frames} frames, in {sys.argv[1]}")
