"""A LeRobot dataset of format 3.0 to shards with a sample for each episode: examples/from_lerobot.py FOLDER TARGET."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
from pyarrow.parquet import read_table

from tarshards import ShardWriter

source, target = map(Path, sys.argv[1:])
info = json.loads((source / "meta/info.json").read_text())
features = {name: feature["dtype"] for name, feature in info["features"].items()}
if "image" in features.values():
    sys.exit("images in Parquet: make videos of them first, by `lerobot-edit-dataset`")


def cut(path: Path, start: float, length: int) -> bytes:
    """Return *length* frames of a video from *start* on, in seconds, as an MP4; nothing is encoded again."""
    part, zero = io.BytesIO(), 0
    keyframes: list[bool] = []
    with av.open(path) as video, av.open(part, "w", format="mp4") as episode:
        frames = video.streams.video[0]
        copy = episode.add_stream_from_template(frames, opaque=True)
        first, last = (round((start + edge / info["fps"]) / frames.time_base) for edge in (-0.5, length - 0.5))
        video.seek(first, stream=frames)
        for packet in video.demux(frames):
            if packet.pts is None or packet.dts is None or packet.dts >= last:
                break
            if first <= packet.pts < last:
                zero = zero if keyframes else packet.pts
                keyframes.append(packet.is_keyframe)
                packet.pts, packet.dts, packet.stream = packet.pts - zero, packet.dts - zero, copy
                episode.mux(packet)
    if len(keyframes) != length or not keyframes[0]:
        raise ValueError(f"{path}: no {length} frames from {start} s on that begin with a keyframe")
    return part.getvalue()


def place(episode: dict[str, Any], of: str) -> dict[str, Any]:
    return {name: episode[f"{of}/{name}"] for name in ("chunk_index", "file_index")}


target.mkdir()
for name in "info.json", "stats.json":
    shutil.copy(source / "meta" / name, target)
texts = read_table(source / "meta/tasks.parquet").sort_by("task_index").drop_columns("task_index")[0].to_pylist()
(target / "tasks.json").write_text(json.dumps(texts))
with ShardWriter(target / "episodes-{shard:05d}.tar", max_bytes=10**9) as writer:
    for episode in read_table(source / "meta/episodes").sort_by("episode_index").to_pylist():
        number = episode["episode_index"]
        path = source / info["data_path"].format(**place(episode, "data"))
        rows = read_table(path, filters=[("episode_index", "=", number)])
        meta = {"length": len(rows), "tasks": episode["tasks"]}
        sample: dict[str, Any] = {"__key__": f"episode_{number:06d}", "json": meta}
        for name, kind in features.items():
            if kind == "video":
                of = f"videos/{name}"
                path = source / info["video_path"].format(video_key=name, **place(episode, of))
                sample[f"{name}.mp4"] = cut(path, episode[f"{of}/from_timestamp"], len(rows))
            else:
                sample[f"{name}.npy"] = np.array(rows[name].to_pylist(), kind)
        writer.write(sample)
