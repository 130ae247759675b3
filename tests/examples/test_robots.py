"""Episodes of LeRobot's format v3.0, written here: how their videos are cut. The guide's test compares with LeRobot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tarshards import IndexedShards

pytestmark = pytest.mark.interop

PROGRAM = Path(__file__).parents[2] / "examples/from_lerobot.py"
INFO = {
    "fps": 10,
    "data_path": "data/{chunk_index}-{file_index}.parquet",
    "video_path": "videos/{video_key}-{chunk_index}-{file_index}.mp4",
    "features": {"eye": {"dtype": "video"}, "action": {"dtype": "float32"}},
}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a table; the folder has the rest of two episodes of 8 and 4 frames in one video."""
    av, pyarrow = (pytest.importorskip(name, reason=f"needs {name}") for name in ("av", "pyarrow"))
    from pyarrow import parquet

    def write(path: str, **columns: list) -> None:
        table = pyarrow.table({name.replace("__", "/"): column for name, column in columns.items()})
        parquet.write_table(table, tmp_path / path)

    for folder in "meta/episodes", "data", "videos":
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "meta/info.json").write_text(json.dumps(INFO))
    (tmp_path / "meta/stats.json").write_text("{}")
    with av.open(tmp_path / "videos/eye-0-0.mp4", "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"g": "4", "sc_threshold": "0"})
        stream.width = stream.height = 64
        for number in range(12):
            pixels = np.full((64, 64, 3), 20 * number + 10, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    write("meta/tasks.parquet", task_index=[0], task=["look"])
    write("data/0-0.parquet", action=[0.5 * number for number in range(12)], episode_index=[0] * 8 + [1] * 4)
    return write


def convert(folder: Path, write, begin: float) -> subprocess.CompletedProcess[str]:
    """Convert the episodes; the second begins at *begin* seconds."""
    places = (f"{of}__{name}" for of in ("data", "videos__eye") for name in ("chunk_index", "file_index"))
    columns = {"episode_index": [0, 1], "tasks": [["look"]] * 2, "videos__eye__from_timestamp": [0.0, begin]}
    write("meta/episodes/0.parquet", **columns, **{place: [0, 0] for place in places})
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(folder / "shards")], capture_output=True, text=True
    )


def test_frames_of_a_video_of_several_episodes(tmp_path, write):
    done = convert(tmp_path, write, 0.8)
    assert done.returncode == 0, done.stderr
    samples = list(IndexedShards(str(tmp_path / "shards/episodes.shards.json")).decode("video"))
    assert [sample["json"] for sample in samples] == [{"length": n, "tasks": ["look"]} for n in (8, 4)]
    assert [sample["action.npy"].tolist() for sample in samples] == [[0.5 * i for i in range(8)], [4, 4.5, 5, 5.5]]
    assert [(sample["eye.mp4"].frames[:, 0, 0, 0] // 20).tolist() for sample in samples] == [
        [*range(8)],
        [*range(8, 12)],
    ]
    assert samples[1]["eye.mp4"].times.round(3).tolist() == [0, 0.1, 0.2, 0.3]


@pytest.mark.parametrize("begin", [0.6, 0.9])  # between keyframes; where three frames are left
def test_frames_that_cannot_be_cut_are_an_error(tmp_path, write, begin):
    done = convert(tmp_path, write, begin)
    assert done.returncode == 1
    assert f"eye-0-0.mp4: no 4 frames from {begin} s on that begin with a keyframe" in done.stderr
