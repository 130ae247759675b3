"""Small videos, made by PyAV: a white square moves to the right over a gradient."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

#: By extension: the container's name, and codecs that this program's libraries encode.
CODECS = {
    "mp4": ("mp4", ("libx264", "libsvtav1", "libx265")),
    "m4v": ("mp4", ("mpeg4",)),
    "mov": ("mov", ("mpeg4",)),
    "mkv": ("matroska", ("libx264", "ffv1")),
    "webm": ("webm", ("libvpx-vp9", "libvpx")),
    "avi": ("avi", ("mpeg4", "mjpeg")),
    "ogv": ("ogg", ("libvpx",)),
}


def moving(frames: int = 12, height: int = 48, width: int = 64) -> np.ndarray:
    pixels = np.zeros((frames, height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 200, width, dtype=np.uint8)
    for i, frame in enumerate(pixels):
        frame[10:22, 3 * i % (width - 12) : 3 * i % (width - 12) + 12, 1] = 255
    return pixels


def made(
    extension: str, pixels: np.ndarray, codec: str | None = None, *, rate: int = 10, gop: int = 5, **container: str
) -> bytes:
    """Return *pixels* as a video of an extension, with a key frame every *gop* frames."""
    import av

    av.logging.set_level(av.logging.PANIC)
    name, codecs = CODECS[extension]
    codec = codec or codecs[0]
    with tempfile.TemporaryDirectory() as folder:  # some options write to a file twice
        path = Path(folder, f"video.{extension}")
        with av.open(str(path), "w", format=name, options=container) as output:
            stream = output.add_stream(codec, rate=rate)
            stream.height, stream.width = pixels.shape[1:3]
            stream.pix_fmt, stream.gop_size = "yuvj420p" if codec == "mjpeg" else "yuv420p", gop
            quiet = {"libx265": {"x265-params": "log-level=none"}, "libsvtav1": {"svtav1-params": "lp=1"}}
            stream.options = quiet.get(codec, {})
            for frame in pixels:
                output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            output.mux(stream.encode(None))
        return path.read_bytes()
