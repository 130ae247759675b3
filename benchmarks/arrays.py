"""Batches of arrays from plain shards, beside FFCV's own format, DALI and torch's DataLoader."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measure import DATA, interleave, machine, rates, record
from PIL import Image

from tarshards import ShardWriter, Stream
from tarshards.array_loader import ArrayLoader
from tarshards.index import IndexedShards
from tarshards.readers import array, image, integer

# FFCV builds against OpenCV and libturbojpeg: apt-get install libopencv-dev libturbojpeg0-dev pkg-config g++
FFCV = "ffcv==1.0.2 numba llvmlite opencv-python-headless fastargs terminaltables psutil assertpy"
OTTO, CIFAR, PHOTOS, SIDE, CROP = 39_601, 50_000, 4_000, 256, 224
RUNS = int(os.environ.get("RUNS", "9"))


def install_ffcv() -> str:
    """Build FFCV into a folder of its own, once; return its version."""
    folder = DATA / "ffcv"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--target", str(folder), *FFCV.split()], check=True)
    sys.path.append(str(folder))
    return FFCV.partition(" ")[0].replace("==", " ")


def npy(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def otto() -> Iterable[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for number in range(OTTO):
        values = rng.poisson(0.7, 93).astype(np.float32)
        yield {"__key__": f"{number:06d}", "x.npy": npy(values), "cls": number % 9}


def cifar() -> Iterable[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for number in range(CIFAR):
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((32, 32), Image.Resampling.BICUBIC))
        yield {"__key__": f"{number:06d}", "rgb": pixels.tobytes(), "cls": number % 10}


def photos() -> Iterable[dict[str, Any]]:
    """Crops of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    pictures, rng = load_sample_images().images, np.random.default_rng(0)
    for number in range(PHOTOS):
        picture, stream = pictures[number % len(pictures)], io.BytesIO()
        top, left = (int(rng.integers(0, side - SIDE + 1)) for side in picture.shape[:2])
        Image.fromarray(picture[top : top + SIDE, left : left + SIDE]).save(stream, "JPEG", quality=90)
        yield {"__key__": f"{number:06d}", "jpg": stream.getvalue(), "cls": number % len(pictures)}


def write(name: str, samples: Callable[[], Iterable[dict[str, Any]]], per_shard: int) -> str:
    """Write a set's shards once; return their expression."""
    folder = DATA / f"arrays-{name}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        with ShardWriter(f"{part}/{name}-{{shard:02d}}.tar", max_samples=per_shard) as writer:
            for sample in samples():
                writer.write(sample)
        part.rename(folder)
    return f"{folder}/{name}.shards.json"


class Samples:
    """A dataset for torch and for FFCV's writer: what *read* makes of each sample, and its label."""

    def __init__(self, urls: str, read: Callable[[dict[str, Any]], Any]):
        self.shards, self.read = IndexedShards(urls), read

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        sample = self.shards[int(place)]
        return self.read(sample), int(sample["cls"])


class Arrays:
    """A dataset as the seeds have it: arrays in memory, a sample at a time."""

    def __init__(self, samples: Samples, transform: Callable[[Any], Any] | None = None):
        rows = [samples[place] for place in range(len(samples))]
        self.values, self.labels = np.stack([row[0] for row in rows]), [row[1] for row in rows]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        value = self.values[place]
        return (value if self.transform is None else self.transform(value)), self.labels[place]


def read_npy(sample: dict[str, Any]) -> np.ndarray:
    return np.load(io.BytesIO(sample["x.npy"]))


def read_rgb(sample: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(sample["rgb"], np.uint8).reshape(32, 32, 3)


def read_jpg(sample: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(sample["jpg"])).convert("RGB"))


def beton(name: str, samples: Samples, field: Any) -> str:
    """Write a set in FFCV's format, once."""
    from ffcv.fields import IntField
    from ffcv.writer import DatasetWriter

    path = DATA / f"arrays-{name}.beton"
    if not path.exists():
        with contextlib.redirect_stderr(io.StringIO()):
            DatasetWriter(str(path), {"x": field, "y": IntField()}, num_workers=1).from_indexed_dataset(samples)
    return str(path)


def ours(urls: str, size: int, fields: dict[str, Any], threads: int | None = None) -> ArrayLoader:
    stream = Stream.from_shards(urls, shuffle=True)
    return ArrayLoader(stream, size, fields={**fields, "cls": integer()}, threads=threads)


def theirs(path: str, size: int, workers: int, order: str, pipeline: list[Any] | None = None) -> Any:
    from ffcv.loader import Loader, OrderOption

    pipelines = {} if pipeline is None else {"x": pipeline}
    options = {"os_cache": True, "drop_last": False, "order": OrderOption[order], "pipelines": pipelines}
    return Loader(path, batch_size=size, num_workers=workers, **options)


def torchs(samples: Any, size: int, workers: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(samples, size, shuffle=True, num_workers=workers)


def run(loader: Iterable[Any], count: int) -> Callable[[], None]:
    """Return what takes all batches of an epoch."""

    def work() -> None:
        taken = 0
        for batch in loader:
            taken += len(batch["cls"] if isinstance(batch, dict) else batch[1])
        if taken != count:
            raise RuntimeError(f"{taken} samples instead of {count}")

    return work


def first_epoch(loader: ArrayLoader, count: int) -> tuple[float, float]:
    """Return the seconds until the first batch, and the samples a second of the rest of the epoch."""
    begun = time.perf_counter()
    batches = iter(loader)
    taken = len(next(batches)["cls"])
    opened = time.perf_counter()
    for _ in batches:
        pass
    return opened - begun, (count - taken) / (time.perf_counter() - opened)


def table(title: str, works: dict[str, Callable[[], None]], count: int, runs: int = RUNS) -> tuple[list[str], Any]:
    """Time the works, the first of them ours; return a section's lines, and how many times as fast it is as another."""
    mine = next(iter(works))
    seconds = interleave(works, runs=runs)
    head = [title, "", "| | samples/s | range | ours / this |", "|---|---|---|---|"]

    def ratio(*names: str) -> float:
        """Beside the fastest of those whose names begin so."""
        chosen = [times for name, times in seconds.items() if name.startswith(names)]
        best = min(chosen, key=median)
        return median(other / own for other, own in zip(best, seconds[mine], strict=True))

    return [*head, *rates(seconds, count, mine), ""], ratio


def otto_rows() -> list[str]:
    from ffcv.fields import NDArrayField

    urls = write("otto", otto, 10_000)
    samples = Samples(urls, read_npy)
    path = beton("otto", samples, NDArrayField(shape=(93,), dtype=np.dtype("float32")))
    fields = {"x.npy": array()}
    opened, first = first_epoch(ours(urls, 1024, fields), OTTO)
    works = {"`ArrayLoader`, from tars": run(ours(urls, 1024, fields), OTTO)}
    works["`ArrayLoader`, 2 threads"] = run(ours(urls, 1024, fields, 2), OTTO)
    for order in "RANDOM", "QUASI_RANDOM":
        for workers in 1, 2:
            works[f"FFCV, {order}, {workers} workers"] = run(theirs(path, 1024, workers, order), OTTO)
    lines, ratio = table(
        f"**Otto-like: {OTTO:,} x 93 float32 in `.npy` and a label, shuffled, batches of 1024**", works, OTTO
    )
    lines += [f"Ours is {ratio('FFCV'):.1f} x FFCV's best shuffled order.", ""]
    dataset = Arrays(samples)
    slow = {"ours": works["`ArrayLoader`, from tars"]}
    slow |= {f"torch {workers}": run(torchs(dataset, 1024, workers), OTTO) for workers in (0, 1, 2)}
    _, ratio = table("", slow, OTTO, runs=3)
    steady = OTTO / median(interleave({"ours": slow["ours"]}, runs=RUNS)["ours"])
    lines += [
        "Where twice FFCV's rate is not reached: about a third of an epoch's time each goes to the copies (headers "
        "compared and labels parsed on the way), to the plan, and to Python between the batches. Threads do not "
        "help, as the row shows; planning ahead in a thread, which was tried, gave 0.87 of the rate.",
        "",
        f"It is {ratio('torch 0'):.0f}, {ratio('torch 1'):.0f} and {ratio('torch 2'):.0f} x torch's DataLoader over "
        f"arrays in memory with 0, 1 and 2 workers. The first batch comes {1000 * opened:.0f} ms after the beginning "
        "(indexes loaded, shards mapped and touched); the rest of the first epoch has "
        f"{first / steady:.2f} x the rate of later epochs.",
        "",
    ]
    return lines


def cifar_rows() -> list[str]:
    from ffcv.fields import RGBImageField
    from ffcv.fields.decoders import CenterCropRGBImageDecoder
    from ffcv.transforms import ToTensor, ToTorchImage

    urls = write("cifar", cifar, 10_000)
    samples = Samples(urls, read_rgb)
    path = beton("cifar", samples, RGBImageField(write_mode="raw"))
    lines = []
    for size in 128, 1024:
        works = {"`ArrayLoader`, from tars": run(ours(urls, size, {"rgb": image(shape=(32, 32, 3))}), CIFAR)}
        for order in "RANDOM", "QUASI_RANDOM":
            for workers in 1, 2:
                works[f"FFCV SimpleRGB, {order}, {workers} workers"] = run(theirs(path, size, workers, order), CIFAR)
        title = f"**CIFAR-like: {CIFAR:,} raw 32 x 32 x 3, shuffled, batches of {size}, uint8 HWC**"
        part, ratio = table(title, works, CIFAR)
        lines += [*part, f"Ours is {ratio('FFCV'):.1f} x FFCV's best.", ""]
    options = {"shape": (32, 32, 3), "crop": "center", "ratio": 32 / 48, "layout": "CHW"}
    fields, same = ({"rgb": image(32, dtype=dtype, **options)} for dtype in ("float32", "uint8"))
    works = {f"`ArrayLoader`, {threads} threads": run(ours(urls, 128, fields, threads), CIFAR) for threads in (2, 1)}
    works["`ArrayLoader`, uint8, 2 threads"] = run(ours(urls, 128, same, 2), CIFAR)
    for workers in 1, 2:
        crop = [CenterCropRGBImageDecoder((32, 32), 2 / 3), ToTensor(), ToTorchImage()]  # of one loader only
        loader = theirs(path, 128, workers, "QUASI_RANDOM", crop)
        works[f"FFCV CenterCrop, uint8, {workers} workers"] = run(loader, CIFAR)
    title = "**The same, resized to 48, its middle 32 x 32 cut out, float32 CHW, batches of 128**"
    part, ratio = table(title, works, CIFAR)
    lines += [*part, f"Ours is {ratio('FFCV'):.1f} x FFCV's best."]
    pil = run(torchs(Arrays(samples, resize_by_pil), 128, 1), CIFAR)
    _, ratio = table("", {"ours": next(iter(works.values())), "torch": pil}, CIFAR, runs=1)
    return [*lines, f"It is {ratio('torch'):.0f} x torch's DataLoader and PIL with 1 worker.", ""]


def resize_by_pil(pixels: np.ndarray) -> np.ndarray:
    resized = Image.fromarray(pixels).resize((48, 48), Image.Resampling.BILINEAR).crop((8, 8, 40, 40))
    return np.asarray(resized, np.float32).transpose(2, 0, 1) / 255


def random_crop_by_pil(sample: dict[str, Any]) -> np.ndarray:
    """What torchvision's RandomResizedCrop and RandomHorizontalFlip do, without torchvision."""
    rng = np.random.default_rng()
    with Image.open(io.BytesIO(sample["jpg"])) as opened:
        pixels = opened.convert("RGB")
    area, aspect = rng.uniform(0.08, 1) * SIDE * SIDE, np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    width, height = (min(SIDE, round(side)) for side in (np.sqrt(area * aspect), np.sqrt(area / aspect)))
    left, top = rng.integers(0, SIDE - width + 1), rng.integers(0, SIDE - height + 1)
    box = (left, top, left + width, top + height)
    resized = pixels.resize((CROP, CROP), Image.Resampling.BILINEAR, box=tuple(map(float, box)))
    return np.asarray(resized)[:, :: rng.choice([-1, 1])].copy()


def dali(urls: str, threads: int) -> Callable[[], None]:
    """DALI's fused decode-and-crop, flip and resize, from its reader of tars."""
    from nvidia.dali import fn, types

    from tarshards.dali import native_loader

    def read(jpg: Any, cls: Any) -> tuple[Any, Any]:
        images = fn.decoders.image_random_crop(jpg, output_type=types.RGB)
        return fn.resize(images, size=[CROP, CROP]), cls

    def flipped(jpg: Any, cls: Any) -> tuple[Any, Any]:
        images, cls = read(jpg, cls)
        return fn.flip(images, horizontal=fn.random.coin_flip()), cls

    loader = native_loader(urls, flipped, batch_size=64, device="cpu", num_threads=threads)
    return run(loader, PHOTOS)


def photo_rows() -> list[str]:
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    urls = write("photos", photos, 500)
    path = beton("photos", Samples(urls, read_jpg), RGBImageField(write_mode="jpg", jpeg_quality=90))
    fields = {"jpg": image(CROP, crop="random_resized", flip=0.5)}
    crop = [RandomResizedCropRGBImageDecoder((CROP, CROP)), RandomHorizontalFlip(), ToTensor()]
    works = {"`ArrayLoader`, 2 threads": run(ours(urls, 64, fields, 2), PHOTOS)}
    works["FFCV, its JPEG mode, 2 workers"] = run(theirs(path, 64, 2, "QUASI_RANDOM", crop), PHOTOS)
    works["DALI on the processor, 2 threads"] = dali(urls, 2)
    works["torch's DataLoader and PIL, 2 workers"] = run(torchs(Samples(urls, random_crop_by_pil), 64, 2), PHOTOS)
    works["`ArrayLoader`, 1 thread"] = run(ours(urls, 64, fields, 1), PHOTOS)
    title = f"**{PHOTOS:,} JPEGs of {SIDE} x {SIDE}: random resized crop to {CROP} and flip, batches of 64**"
    lines, ratio = table(title, works, PHOTOS)
    lines += [
        f"Ours is {ratio('FFCV'):.1f} x FFCV, {ratio('DALI'):.1f} x DALI, {ratio('torch'):.1f} x torch and PIL.",
        "",
    ]
    works = {"`ArrayLoader`, 2 threads": run(ours(urls, 64, {"jpg": image(SIDE)}, 2), PHOTOS)}
    works["bare `simplejpeg`, 2 threads"] = bare(urls)
    part, ratio = table("**The same JPEGs, decoded only**", works, PHOTOS)
    return [*lines, *part, f"Ours is {ratio('bare'):.2f} x the bare decoder.", ""]


def bare(urls: str) -> Callable[[], None]:
    import simplejpeg

    datas = [sample["jpg"] for sample in IndexedShards(urls, fields="jpg")]
    rows = [np.empty((SIDE, SIDE, 3), np.uint8) for _ in range(64)]

    def decode(half: int) -> None:
        for i in range(half, len(datas), 2):
            simplejpeg.decode_jpeg(datas[i], "RGB", buffer=rows[i % 64])

    def work() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(decode, range(2)))

    return work


def main() -> None:
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # numba's finalizers trip over FFCV's loaders
    version = install_ffcv()
    import torch

    torch.set_num_threads(1)
    lines = [machine("torch", "numpy", "simplejpeg", "nvidia-dali-cuda120") + f", {version}", ""]
    lines += ["One process each, all data in the page cache; the rate of whole epochs after the first.", ""]
    for rows in otto_rows, cifar_rows, photo_rows:
        lines += rows()
    record("Arrays", lines[:-1])


if __name__ == "__main__":
    Path(DATA).mkdir(parents=True, exist_ok=True)
    main()
