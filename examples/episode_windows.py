"""Windows of the episodes that from_lerobot.py writes: the items of LeRobotDataset, from shards."""

import json
import os
from functools import lru_cache
from typing import Any

import torch
from torchcodec.decoders import VideoDecoder

from tarshards import IndexedShards, open_url


class Windows:
    """``windows[episode, frame]`` is the item of LeRobotDataset for this frame, with images as uint8."""

    def __init__(self, folder: str, delta_timestamps: dict[str, list[float]]):
        info, self.tasks = load(f"{folder}/info.json"), load(f"{folder}/tasks.json")
        self.kinds = {name: feature["dtype"] for name, feature in info["features"].items()}
        if unknown := delta_timestamps.keys() - self.kinds:
            raise KeyError(f"{folder} has no {', '.join(sorted(unknown))}")
        self.steps = {
            name: torch.tensor(times).mul(info["fps"]).round().long() for name, times in delta_timestamps.items()
        }
        videos = [f"{name}.mp4" for name, kind in self.kinds.items() if kind == "video"]
        shards = f"{folder}/episodes.shards.json"
        self.episodes = IndexedShards(shards, lazy=videos).decode()
        self.lengths = [sample["json"]["length"] for sample in IndexedShards(shards, fields="json").decode()]

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Any]:
        number, frame = place
        item: dict[str, Any] = {}
        for name, values in opened(self, os.getpid(), number).items():
            wanted = frame + self.steps.get(name, torch.tensor([0]))
            found = wanted.clamp(0, self.lengths[number] - 1)
            if self.kinds[name] == "video":
                item[name] = values.get_frames_at(found.tolist()).data.squeeze(0)
            else:
                item[name] = values[found] if name in self.steps else values[found][0]
            if name in self.steps:
                item[f"{name}_is_pad"] = found != wanted
        return item | {"task": self.tasks[item["task_index"]]}


def load(url: str) -> Any:
    with open_url(url) as file:
        return json.load(file)


@lru_cache(maxsize=100)
def opened(windows: Windows, process: int, number: int) -> dict[str, Any]:
    """Return an episode's columns as tensors, and its videos, open; processes cannot share them."""
    sample = windows.episodes[number]
    return {
        name: VideoDecoder(sample[f"{name}.mp4"], seek_mode="approximate", num_ffmpeg_threads=1)
        if kind == "video"
        else torch.from_numpy(sample[f"{name}.npy"])
        for name, kind in windows.kinds.items()
    }
