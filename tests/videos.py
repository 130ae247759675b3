"""Videos written by PyAV, and their contents as PyAV reads them."""

import io
from fractions import Fraction

import numpy as np

RATE = 10

# The videos of the tests: container, encoder, options of the encoder and of the container.
KINDS = {
    "mp4 h264": ("mp4", "libx264", {"bf": "2"}, {}),
    "mp4 mpeg4": ("mp4", "mpeg4", {"bf": "2"}, {}),
    "mov h264": ("mov", "libx264", {"x264-params": "open-gop=1", "bf": "3"}, {}),
    "fragmented mp4": ("mp4", "libx264", {}, {"movflags": "frag_keyframe+empty_moov"}),
    "mkv h264": ("matroska", "libx264", {"bf": "2"}, {}),
    "mkv ffv1": ("matroska", "ffv1", {}, {}),
    "webm vp9": ("webm", "libvpx-vp9", {"auto-alt-ref": "1", "lag-in-frames": "8"}, {}),
    "webm vp8": ("webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "8"}, {}),
    "live webm": ("webm", "libvpx-vp9", {}, {"live": "1"}),
    "avi h264": ("avi", "libx264", {"bf": "2"}, {}),
    "avi mpeg4": ("avi", "mpeg4", {"bf": "2"}, {}),
    "avi mjpeg": ("avi", "mjpeg", {}, {}),
    "ogv vp8": ("ogg", "libvpx", {}, {}),
}


def pictures(count, height=32, width=48):
    """A square that moves over noise."""
    noise = np.random.default_rng(0).integers(0, 200, (height, width, 3), dtype=np.uint8)
    frames = np.stack([np.roll(noise, i, 1) for i in range(count)])
    for i, frame in enumerate(frames):
        frame[i % height : i % height + 8, i : i + 8] = 255
    return frames


def written(kind="mp4 h264", count=12, *, times=None, size=(32, 48), group=6, turn=None):
    """A video of *count* frames with a keyframe in each *group*; *times* in milliseconds; *turn* as in upright."""
    import av

    format, codec, options, container_options = KINDS[kind]
    stream = io.BytesIO()
    with av.open(stream, "w", format=format, options=container_options) as container:
        video = container.add_stream(codec, rate=RATE, options={"g": str(group), **options})
        video.height, video.width = size
        video.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        video.codec_context.thread_count = 1
        if turn is not None:
            video.set_display_rotation(*turn)
        for i, pixels in enumerate(pictures(count, *size)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
                video.codec_context.time_base = frame.time_base
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
    return stream.getvalue()


def upright(frames, degrees=0, hflip=False, vflip=False):
    """Frames turned counterclockwise, and then mirrored, as PyAV defines it."""
    frames = np.rot90(frames, degrees // 90, axes=(1, 2))
    return frames[:, :: -1 if vflip else 1, :: -1 if hflip else 1]


def peer(data, **options):
    """The frames that PyAV reads, and their times."""
    import av

    with av.open(io.BytesIO(data)) as container:
        frames = [(frame.to_ndarray(format="rgb24", **options), frame.time) for frame in container.decode(video=0)]
    return np.stack([pixels for pixels, _ in frames]), np.array([time for _, time in frames])
