"""Benchmark videos of 320 x 240: all frames, and clips of 8 frames at 112 x 112, against PyAV alone in a loop."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from measure import interleave, machine, record

from tarshards import ArrayLoader, ShardWriter, Stream, readers
from tarshards.index.build import build_index

VIDEOS, FRAMES, RATE, CLIP, SIZE = 24, 72, 24, 8, 112


def write(folder: Path) -> None:
    import av

    noise = np.random.default_rng(0).integers(0, 40, (240, 320, 3), dtype=np.uint8)
    with ShardWriter(str(folder / "v-%d.tar")) as writer:
        for number in range(VIDEOS):
            file = io.BytesIO()
            with av.open(file, "w", format="mp4") as container:
                stream = container.add_stream("libx264", rate=RATE)
                stream.height, stream.width, stream.pix_fmt, stream.gop_size = 240, 320, "yuv420p", RATE
                stream.options = {"preset": "veryfast"}
                for i in range(FRAMES):
                    pixels = np.roll(noise, 3 * i, axis=1)
                    pixels[40:100, (number + 2 * i) % 260 :][:, :60] = 200
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
                container.mux(stream.encode(None))
            writer.write({"__key__": f"{number:03d}", "mp4": file.getvalue()})
    build_index(folder / "v-0.tar")


def payloads(folder: Path) -> list[bytes]:
    return [sample["mp4"] for sample in Stream.from_shards(str(folder / "v-0.tar"))]


def pyav_all(folder: Path) -> int:
    import av

    frames = 0
    for payload in payloads(folder):
        with av.open(io.BytesIO(payload)) as container:
            container.streams.video[0].codec_context.thread_count = 1
            clip = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        frames += len(clip)
    return frames


def our_all(folder: Path) -> int:
    return sum(len(sample["mp4"].frames) for sample in Stream.from_shards(str(folder / "v-0.tar")).decode("video"))


def pyav_clips(folder: Path) -> int:
    import av

    frames = 0
    for payload in payloads(folder):
        with av.open(io.BytesIO(payload)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            middle = int(stream.duration - CLIP / RATE / stream.time_base) // 2
            container.seek(middle, stream=stream)
            clip = []
            for frame in container.decode(stream):
                if frame.pts >= middle:
                    clip.append(frame.to_ndarray(format="rgb24", height=SIZE, width=SIZE, interpolation="BILINEAR"))
                if len(clip) == CLIP:
                    break
        frames += len(np.stack(clip))
    return frames


def our_clips(folder: Path, threads: int = 1) -> int:
    stream = Stream.from_shards(str(folder / "v-0.tar"))
    loader = ArrayLoader(stream, 8, fields={"mp4": readers.video(CLIP, SIZE)}, threads=threads)
    return sum(batch["mp4"].shape[0] * CLIP for batch in loader)


WORKS: dict[str, dict[str, Callable[[Path], int]]] = {
    "all frames": {"PyAV alone": pyav_all, 'tarshards, decode("video")': our_all},
    "clips of 8": {
        "PyAV alone": pyav_clips,
        "tarshards, readers.video, 1 thread": our_clips,
        "tarshards, readers.video, 2 threads": partial(our_clips, threads=2),
    },
}


def main() -> None:
    lines = [
        machine("numpy", "av"),
        "",
        "PyAV alone opens the bytes of each video, decodes with one thread, and stacks the frames.",
        "",
        "| work | reader | frames/s | x PyAV alone | at least |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        for work, ways in WORKS.items():
            counts = {way(Path(name)) for way in ways.values()}
            if len(counts) > 1:
                raise SystemExit(f"{work}: {counts} frames")
            (count,) = counts
            times = interleave({way: partial(function, Path(name)) for way, function in ways.items()}, runs=5)
            alone = median(times["PyAV alone"])
            for way, seconds in times.items():
                ratio, least = alone / median(seconds), "0.9" if "tarshards" in way and "2" not in way else ""
                least = f"**short:** {least}" if least and ratio < float(least) else least
                lines.append(f"| {work} | {way} | {count / median(seconds):,.0f} | {ratio:.2f} | {least} |")
    record("Video", lines)


if __name__ == "__main__":
    main()
