"""Compare each item of LeRobotDataset with the window of this frame: lerobot_items.py FOLDER SHARDS..."""

import sys
from pathlib import Path

import torch

if torch.version.cuda is None:  # PyPI's torchvision needs these for its import
    for operator in "nms", "qnms":
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.datasets.lerobot_dataset import LeRobotDataset

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from episode_windows import Windows

STEPS = {
    "observation.images.top": [-0.3, 0, 0.2],
    "observation.images.marked": [0.0],
    "action": [-0.1, 0, 0.1, 0.2, 1.5],
    "timestamp": [0.0],
}


def is_same(theirs, ours) -> bool:
    if isinstance(theirs, str):
        return theirs == ours
    ours = ours / 255 if ours.dtype == torch.uint8 else ours
    return theirs.dtype == ours.dtype and torch.equal(theirs, ours)


count = 0
for steps in STEPS, {"action": [0, 0.1]}:
    dataset = LeRobotDataset("me/pushes", root=sys.argv[1], delta_timestamps=steps)
    windows = [Windows(folder, steps) for folder in sys.argv[2:]]
    places = [(number, frame) for number, length in enumerate(windows[0].lengths) for frame in range(length)]
    for place, item in zip(places, dataset, strict=True):
        for each in windows:
            window = each[place]
            assert item.keys() == window.keys()
            assert [name for name in item if not is_same(item[name], window[name])] == [], place
            count += 1
print(f"{count} equal items")
