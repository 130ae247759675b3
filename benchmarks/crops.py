"""Benchmark the input of image training: JPEG, random resized crop, flip; readers or Python code, floats or uint8."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from multiprocessing import active_children
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from checks import make
from measure import DATA, machine, record
from peers import _torchvision  # noqa: F401 - before what imports torchvision
from processes import TICKS
from sets import data_of

from tarshards import ArrayLoader, ShardDataset, ShardLoader, Stream, readers

ROOT, SET = DATA / "suite", "photos256-1k"
SIZE, BATCH, WORKERS, ROUNDS = 224, 64, 2, 7
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PILLOW = "ShardLoader, Pillow and torchvision"


def fields(*, as_float: bool) -> dict[str, Any]:
    options: Any = {"dtype": "float32", "mean": MEAN, "std": STD} if as_float else {}
    jpg = readers.image(SIZE, crop="random_resized", flip=0.5, layout="CHW", **options)
    return {"jpg": jpg, "cls": readers.integer()}


def pillow_transform(*, as_float: bool) -> Callable[[Any], Any]:
    from torchvision import transforms as v1

    crop = [v1.RandomResizedCrop(SIZE), v1.RandomHorizontalFlip()]
    return v1.Compose([*crop, *([v1.ToTensor(), v1.Normalize(MEAN, STD)] if as_float else [v1.PILToTensor()])])


def tensor_transform() -> Callable[[Any], Any]:
    from torchvision.transforms import v2

    crop = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    return v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def decode_simplejpeg(data: bytes) -> torch.Tensor:
    import simplejpeg

    return torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB")).permute(2, 0, 1)


def loaders(urls: list[str]) -> dict[str, Iterable[Any]]:
    """Return a loader for each way whose packages are installed."""
    options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True}
    found: dict[str, Iterable[Any]] = {}
    for form, as_float in (("float32", True), ("uint8", False)):
        if find_spec("torchvision"):
            dataset = ShardDataset(urls, shuffle=True).decode("pilrgb")
            transform = pillow_transform(as_float=as_float)
            found[f"{PILLOW}, {form}"] = ShardLoader(dataset.map_fields({"jpg": transform}), BATCH, **options)
        read = fields(as_float=as_float)
        dataset = ShardDataset(urls, shuffle=True)
        found[f"ShardLoader, fields=, {form}"] = ShardLoader(dataset, BATCH, fields=read, **options)
        stream = Stream.from_shards(urls, shuffle=True)
        found[f"ArrayLoader, {form}"] = ArrayLoader(stream, BATCH, fields=read, threads=WORKERS, device="cpu")
    if find_spec("torchvision") and find_spec("webdataset"):
        from webdataset import WebDataset, WebLoader

        transform = tensor_transform()
        dataset = WebDataset(urls, shardshuffle=100).shuffle(1000).to_tuple("jpg", "cls")
        dataset = dataset.map_tuple(lambda data: transform(decode_simplejpeg(data)), int).batched(BATCH)
        found["webdataset, simplejpeg and torchvision v2, float32"] = WebLoader(dataset, batch_size=None, **options)
    return found


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the workers that are running."""
    stats = [Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split() for child in active_children()]
    return time.process_time() + sum(int(stat[11]) + int(stat[12]) for stat in stats) / TICKS


def epoch(loader: Iterable[Any], count: int) -> tuple[float, float, float]:
    """Return the seconds, the CPU seconds and those of the parent of an epoch."""
    begun, cpu, parent = time.perf_counter(), cpu_seconds(), time.process_time()
    came = 0
    for batch in loader:
        came += len(batch["cls"] if isinstance(batch, dict) else batch[1])
    assert came == count
    return time.perf_counter() - begun, cpu_seconds() - cpu, time.process_time() - parent


def main() -> None:
    torch.set_num_threads(1)
    make(SET, ROOT)
    data, _ = data_of(SET, ROOT, "tarshards")
    ways = loaders(list(data.urls))
    spent: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, loader in ways.items():
            times = epoch(loader, data.count)
            if number:
                spent[name].append(times)
    base = spent.get(f"{PILLOW}, float32")
    lines = ["| | samples/s | CPU us a sample | of it the parent's | CPU, x less |", "|---|---|---|---|---|"]
    for name, times in spent.items():
        rates = sorted(data.count / each[0] for each in times)
        cpus, parents = (sorted(each[i] / data.count * 1e6 for each in times) for i in (1, 2))
        ratio = "" if base is None else f"{median(b[1] / own[1] for b, own in zip(base, times)):.2f}"
        rate = f"{median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f})"
        cpu = f"{median(cpus):,.0f} ({cpus[0]:,.0f} to {cpus[-1]:,.0f})"
        lines.append(f"| {name} | {rate} | {cpu} | {np.median(parents):,.0f} | {ratio} |")
    about = (
        f"JPEGs of 256 x 256, decoded, a random resized crop to {SIZE}, mirrored or not, in batches of {BATCH} by "
        f"{WORKERS} worker processes or threads; float32 is normalised. Medians, fastest and slowest of {ROUNDS} "
        f"interleaved epochs; the last column compares CPU time with {PILLOW}, float32, round by round."
    )
    packages = [name for name in ("numpy", "torch", "torchvision", "simplejpeg", "webdataset") if find_spec(name)]
    record("Random crops of JPEGs, by readers and by Python code", [about, "", *lines, "", machine(*packages)])


if __name__ == "__main__":
    main()
