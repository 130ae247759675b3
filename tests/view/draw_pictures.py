"""Draw the pictures of docs/view.md, all or some, with Chromium: ``python tests/view/draw_pictures.py [NAME...]``."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[1]))

import videos
from rigs.browser import chromium
from shard_rig import serving

from tarshards import ShardWriter

PICTURES = Path(__file__).parents[2] / "docs/view"
SHAPES = ["circle", "square", "triangle"]
NAMES = {"circle": "a ball", "square": "a box", "triangle": "a tent"}


def scene(number: int) -> dict[str, Any]:
    """Return a picture of a shape on a meadow, its mask, its box, and what else there is to see."""
    rng = np.random.default_rng(number)
    shape = SHAPES[number % 3]
    sky, grass = (tuple(int(each) for each in rng.integers(low, high)) for low, high in
                  (([110, 160, 210], [190, 210, 255]), ([60, 120, 40], [120, 190, 90])))  # fmt: skip
    image, mask = Image.new("RGB", (256, 192), sky), Image.new("L", (256, 192))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 120, 256, 192), fill=grass)
    left, top, size = (int(each) for each in rng.integers([20, 40, 50], [150, 90, 90]))
    box = (left, top, left + size, top + size)
    colour = tuple(int(each) for each in rng.integers(40, 255, 3))
    for each, fill in ((draw, colour), (ImageDraw.Draw(mask), 255)):
        if shape == "circle":
            each.ellipse(box, fill=fill)
        elif shape == "square":
            each.rectangle(box, fill=fill)
        else:
            each.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=fill)
    stream = io.BytesIO()
    image.save(stream, "jpeg", quality=90)
    x, y = np.meshgrid(np.linspace(-3, 3, 64), np.linspace(-2, 2, 40))
    about = {"bbox": [left, top, size, size], "label": shape, "score": round(float(rng.random()), 3)}
    text = f"A picture of {NAMES[shape]} on a meadow, number {number}.\nIt was drawn, not photographed. "
    return {
        "__key__": f"{shape}/{number:05d}",
        "jpg": stream.getvalue(),
        "mask.png": np.asarray(mask),
        "cls": number % 3,
        "json": {**about, "tags": ["meadow", "drawn"], "camera": {"lens": None, "exposure": [1, 250]}},
        "txt": text + "<script>alert('nothing of this runs')</script>",
        "npy": (np.sin(x * x + number) * np.cos(y) + rng.normal(0, 0.05, x.shape)).astype("f4"),
    }


def sound() -> bytes:
    file = io.BytesIO()
    times = np.arange(3 * 16000) / 16000
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        loudness = np.exp(-((times % 0.75) * 5)) * (0.4 + 0.6 * (times < 1.6))
        writer.writeframes((26000 * loudness * np.sin(2 * np.pi * 330 * times)).astype("<i2").tobytes())
    return file.getvalue()


def write(folder: str) -> None:
    with ShardWriter(f"{folder}/scenes-%03d.tar", max_samples=250) as writer:
        for number in range(1000):
            writer.write(scene(number))
    with ShardWriter(f"{folder}/media-%03d.tar", max_samples=10) as writer:
        writer.write({"__key__": "bell", "wav": sound(), "txt": "four strokes of a bell"})
        times = np.linspace(0, 6, 72, dtype=np.float32)[:, None]
        turns = {"joints.npy": np.sin(times * np.linspace(1, 3, 6, dtype=np.float32))}
        writer.write({"__key__": "noise", "mp4": videos.written(count=60, size=(240, 320)), "cls": 1, **turns})
    damaged = Path(folder, "scenes-002.tar")
    data = bytearray(damaged.read_bytes())
    for begin, size in ((400_000, 6000), (1_500_000, 40_000)):
        begin -= begin % 512
        data[begin : begin + size] = bytes(np.random.default_rng(begin).integers(0, 256, size, np.uint8))
    Path(folder, "damaged-000.tar").write_bytes(data)


def main(*names: str) -> None:
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        os.chdir(folder)
        write(folder)

        def draw(name: str, urls: str, address: str, *clicks: str, show: str = "", **options: Any) -> None:
            if names and name not in names:
                return
            with serving(urls) as server:
                page = browser.new_page(**{"viewport": {"width": 900, "height": 600}, **options})
                page.goto(server.url + address)
                page.wait_for_timeout(1500)
                for click in clicks:
                    page.click(click)
                    page.wait_for_timeout(700)
                if show:
                    page.eval_on_selector(show, "each => each.scrollIntoView()")
                page.mouse.move(2, 2)
                page.wait_for_timeout(500)
                shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                shot.quantize(128, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)
                page.close()

        epoch = json.dumps({"seed": 7, "epoch": 2, "rank": 1, "ranks": 4, "batch_size": 16})
        draw("images", "scenes-{000..003}.tar", "")
        draw("table", "scenes-{000..003}.tar", "#view=table&shown=jpg,txt,cls,json")
        draw("curves", "media-000.tar", "#sample=1", "canvas.curves", show="[aria-label=mp4]",
             viewport={"width": 900, "height": 760})  # fmt: skip
        draw("sample", "scenes-{000..003}.tar", "#sample=4", "text=mask.png over it", show="[aria-label=jpg]")
        draw("audio", "media-000.tar", "#sample=0")
        draw("video", "media-000.tar", "#sample=1", show="[aria-label=mp4]")
        draw("text", "scenes-{000..003}.tar", "#sample=4", show="[aria-label=txt]")
        draw("json", "scenes-{000..003}.tar", "#sample=4", "summary:has-text('bbox')", "summary:has-text('camera')",
             show="[aria-label=json]")  # fmt: skip
        draw("array", "scenes-{000..003}.tar", "#sample=4", show="[aria-label=npy]")
        draw("filter", "scenes-{000..003}.tar", "#where=cls+%3D%3D+1+and+json%5B%22score%22%5D+%3E+0.5",
             "summary:has-text('histograms')")  # fmt: skip
        draw("batch", "scenes-{000..003}.tar", f"#step=3&epoch={epoch}")
        draw("damage", "{scenes-000,damaged-000}.tar", "#show=shards&check=1")
        narrow = {"viewport": {"width": 390, "height": 700}, "color_scheme": "dark"}
        draw("narrow", "scenes-{000..003}.tar", "", **narrow)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
