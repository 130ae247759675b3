"""Benchmark videos: frames a second of decode("video") and of readers.video, against PyAV alone doing the same."""

from __future__ import annotations

import io
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from measure import interleave, machine, record

from tarshards import ArrayLoader, ShardWriter, Stream, readers
from tarshards.index.build import build_index

HEIGHT, WIDTH, RATE, FRAMES, VIDEOS = 240, 320, 25, 100, 16
CLIP, SIZE, BATCH = 16, 112, 8
KINDS = {"mp4 h264": ("mp4", "libx264"), "webm vp9": ("webm", "libvpx-vp9")}


def encode(kind: str, seed: int) -> bytes:
    """A texture that moves."""
    import av

    rng, stream = np.random.default_rng(seed), io.BytesIO()
    texture = np.kron(rng.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    format, codec = KINDS[kind]
    with av.open(stream, "w", format=format) as container:
        video = container.add_stream(codec, rate=RATE, options={"g": "25", "cpu-used": "8", "deadline": "realtime"})
        video.width, video.height = WIDTH, HEIGHT
        for i in range(FRAMES):
            pixels = np.roll(texture, (i, 2 * i), (0, 1))
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode(None))
    return stream.getvalue()


def path_of(folder: Path, kind: str) -> str:
    return str(folder / f"{kind.partition(' ')[0]}-0.tar")


def write(folder: Path, kind: str) -> list[bytes]:
    datas = [encode(kind, seed) for seed in range(VIDEOS)]
    field = KINDS[kind][0]
    with ShardWriter(str(folder / f"{field}-%d.tar")) as writer:
        for i, data in enumerate(datas):
            writer.write({"__key__": f"{i:03d}", field: data})
    build_index(path_of(folder, kind))
    return datas


def decode_ours(folder: Path, kind: str) -> None:
    field = KINDS[kind][0]
    samples = Stream.from_shards(path_of(folder, kind)).decode("video")
    assert sum(len(sample[field].frames) for sample in samples) == VIDEOS * FRAMES


def decode_theirs(datas: list[bytes]) -> None:
    import av

    for data in datas:
        with av.open(io.BytesIO(data)) as container:
            container.streams.video[0].codec_context.thread_count = 1
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        assert len(frames) == FRAMES


def clips_ours(folder: Path, kind: str) -> None:
    reader = readers.video(CLIP, SIZE, start="middle")
    loader = ArrayLoader(Stream.from_shards(path_of(folder, kind)), BATCH, fields={KINDS[kind][0]: reader}, threads=0)
    assert sum(len(batch[KINDS[kind][0]]) for batch in loader) == VIDEOS


def clips_theirs(datas: list[bytes]) -> None:
    """Seek to the keyframe before the clip in the middle, and decode to its end."""
    import av

    start = (FRAMES - CLIP) / 2 / RATE
    for first in range(0, len(datas), BATCH):
        batch = np.empty((BATCH, CLIP, SIZE, SIZE, 3), np.uint8)
        for clip, data in zip(batch, datas[first : first + BATCH]):
            taken = 0
            with av.open(io.BytesIO(data)) as container:
                video = container.streams.video[0]
                video.codec_context.thread_count = 1
                container.seek(int(start / video.time_base), stream=video)
                for frame in container.decode(video):
                    if frame.time >= start - 1e-3:
                        clip[taken] = frame.to_ndarray(format="rgb24", width=SIZE, height=SIZE, interpolation="AREA")
                        taken += 1
                        if taken == CLIP:
                            break
            assert taken == CLIP


def main() -> None:
    lines = [
        machine("numpy", "av"),
        "",
        f"Videos of {WIDTH} x {HEIGHT}, {FRAMES} frames; one thread. Clips: {CLIP} frames of {SIZE} x {SIZE}.",
        "",
        "| video | work | frames/s | x PyAV alone |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            datas = write(folder, kind)
            works = {
                "decode": (partial(decode_ours, folder, kind), partial(decode_theirs, datas), FRAMES),
                "clips": (partial(clips_ours, folder, kind), partial(clips_theirs, datas), CLIP),
            }
            for work, (ours, theirs, frames) in works.items():
                times = interleave({"tarshards": ours, "PyAV alone": theirs}, runs=3)
                peer = median(times["PyAV alone"])
                for key, seconds in times.items():
                    middle = median(seconds)
                    lines.append(f"| {kind} | {work}, {key} | {VIDEOS * frames / middle:.0f} | {peer / middle:.2f} |")
    record("Video", lines)


if __name__ == "__main__":
    main()
