"""JPEGs to tensors on a GPU: DALI decodes them there, or our loaders on the CPU; and a ResNet-50 trains on them.

The training needs torchvision, for its model.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from measure import DATA, about, machine, record
from photos import write_photos
from processes import cpu_seconds

from tarshards import ArrayLoader, ShardDataset, ShardLoader, Stream, build_index, expand_urls, readers
from tarshards.index.exports import write_dali

SAMPLES, SHARD, WIDTH, HEIGHT = 8192, 1024, 500, 375
BATCH, CROP, ROUNDS, LEAST = 256, 224, 3, 1.5  # LEAST: seconds of a round
THREADS = os.cpu_count() or 1
FEW = 4  # the default of dali_loader
STEPS = 32  # of a training round
AREA, RATIO = [0.08, 1.0], [3 / 4, 4 / 3]
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet's pixels

READER = "DALI's `fn.readers.webdataset`"
BEGUN = time.perf_counter()
CONSTANT = "one constant batch"


def crop_while_decoding(jpg: Any, cls: Any) -> tuple[Any, Any]:
    """Decode only the crop."""
    from nvidia.dali import fn

    options = {"random_area": AREA, "random_aspect_ratio": RATIO}
    images = fn.decoders.image_random_crop(jpg, device="mixed", **options)
    return normalized_by_dali(fn.resize(images, size=[CROP, CROP])), cls


def crop_when_decoded(jpg: Any, cls: Any) -> tuple[Any, Any]:
    """Decode the whole image, which the GPU's JPEG engine can do."""
    from nvidia.dali import fn

    options = {"random_area": AREA, "random_aspect_ratio": RATIO}
    images = fn.random_resized_crop(fn.decoders.image(jpg, device="mixed"), size=[CROP, CROP], **options)
    return normalized_by_dali(images), cls


def only_pass_on(jpg: Any, cls: Any) -> tuple[Any, Any]:
    """Take the encoded images, and return their sizes in bytes."""
    return jpg.shape(), cls


def normalized_by_dali(images: Any) -> Any:
    from nvidia.dali import fn, types

    options = {"mean": MEAN, "std": STD, "dtype": types.FLOAT, "output_layout": "CHW"}
    return fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), **options)


def normalized_by_torch(images: torch.Tensor) -> torch.Tensor:
    """Return pixels of uint8, (n, height, width, channel) on the GPU, as the floats that DALI would return."""
    mean, std = constants()
    return ((images.permute(0, 3, 1, 2).float() - mean) / std).contiguous()


@cache
def constants() -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = (torch.tensor(each, device="cuda").view(1, 3, 1, 1) for each in (MEAN, STD))
    return mean, std


Batches = Callable[[], Iterator[tuple[torch.Tensor, Any]]]  # one epoch


def by_dali_loader(urls: str, graph: Callable[..., Any], threads: int) -> Batches:
    from tarshards import dali

    dataset = ShardDataset(urls, fields="jpg cls", shuffle=True, seed=0)
    loader = dali.dali_loader(dataset, graph, batch_size=BATCH, num_threads=threads)
    return lambda: ((batch["jpg"], batch["cls"]) for batch in loader)


def build(graph: Callable[..., Any], inputs: Callable[[], Any], threads: int) -> Any:
    from nvidia.dali import Pipeline

    pipe = Pipeline(batch_size=BATCH, num_threads=threads, device_id=0, seed=0)
    with pipe:
        pipe.set_outputs(*graph(*inputs()))
    pipe.build()
    return pipe


def by_batch_source(urls: str, graph: Callable[..., Any], threads: int) -> Batches:
    from nvidia.dali import fn

    from tarshards import dali

    source = dali.batch_source(ShardDataset(urls, fields="jpg cls", shuffle=True, seed=0), BATCH)
    pipe = build(graph, lambda: fn.external_source(source, num_outputs=source.num_outputs, no_copy=True), threads)

    def epoch() -> Iterator[tuple[torch.Tensor, Any]]:
        while True:
            try:
                images, labels = pipe.run()
            except StopIteration:
                break
            yield torch.from_dlpack(images.as_tensor()), labels
        pipe.reset()

    return epoch


def by_reader(urls: str, graph: Callable[..., Any], threads: int) -> Batches:
    """Batches of DALI's own reader, which shuffles in a buffer; its labels stay text."""
    from nvidia.dali import fn
    from peers.dali import Loader

    shards = list(expand_urls(urls))
    indexes = [write_dali(build_index(url), url, None) for url in shards]
    options = {"random_shuffle": True, "initial_fill": 1000, "name": "shards"}
    pipe = build(
        graph,
        lambda: fn.readers.webdataset(paths=shards, index_paths=indexes, ext=["jpg", "cls"], **options),
        threads,
    )
    loader = Loader(pipe, (0, 1), lambda count, images, labels: (torch.from_dlpack(images.as_tensor())[:count], labels))
    return lambda: iter(loader)


def fields() -> dict[str, Any]:
    image = readers.image(CROP, crop="random_resized", flip=0.5)
    return {"jpg": image, "cls": readers.integer()}


def by_array_loader(urls: str) -> Batches:
    dataset = Stream.from_shards(urls, shuffle=True, seed=0)
    loader = ArrayLoader(dataset, BATCH, fields=fields(), device="cuda", threads=THREADS)
    return lambda: ((normalized_by_torch(batch["jpg"]), batch["cls"]) for batch in loader)


def by_shard_loader(urls: str) -> Batches:
    options = {"num_workers": THREADS, "pin_memory": True, "persistent_workers": True}
    loader = ShardLoader(ShardDataset(urls, shuffle=True, seed=0), BATCH, fields=fields(), **options)

    def epoch() -> Iterator[tuple[torch.Tensor, Any]]:
        for batch in loader:
            labels = batch["cls"].to("cuda", non_blocking=True)
            yield normalized_by_torch(batch["jpg"].to("cuda", non_blocking=True)), labels

    return epoch


class Round(NamedTuple):
    images: int
    seconds: float
    cpu: float  # seconds, of this process and its workers


def run_epochs(epoch: Batches, least: float = LEAST) -> Round:
    """Take whole epochs until *least* seconds have passed, and wait for the GPU."""
    torch.cuda.synchronize()
    images, begun, spent = 0, time.perf_counter(), cpu_seconds()
    while time.perf_counter() - begun < least:
        found = 0
        for batch, _ in epoch():
            found += len(batch)
        if found != SAMPLES:
            raise RuntimeError(f"{found} images instead of {SAMPLES}")
        images += found
    torch.cuda.synchronize()
    return Round(images, time.perf_counter() - begun, cpu_seconds() - spent)


def memory_used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def spread(rates: list[float]) -> tuple[str, str]:
    """Return the cells of the median, and of slowest and fastest."""
    return f"{about(rates)}{median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}"


class Contender:
    """One way to the GPU: opened when it is first asked, run in rounds, and what it added to the memory in use."""

    def __init__(self, name: str, make: Callable[[], Batches]):
        self.name, self.rounds = name, list[Round]()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, begun = memory_used(), time.perf_counter()
        self.epoch = make()
        for number, (images, _) in enumerate(self.epoch()):
            if not number:
                self.check(images)
        del images
        self.memory = memory_used() - before
        say(f"{name}: opened in {time.perf_counter() - begun:.1f} s")

    def check(self, images: torch.Tensor) -> None:
        pass

    def row(self, first: Contender) -> str:
        rates = [each.images / each.seconds for each in self.rounds]
        ratio = median(
            mine.images / mine.seconds / (its.images / its.seconds) for mine, its in zip(first.rounds, self.rounds)
        )
        cpu = median(1e6 * each.cpu / each.images for each in self.rounds)
        cells = [self.name, *spread(rates), f"{ratio:.2f}", f"{cpu:,.0f}", f"{self.memory / 2**30:.1f}"]
        return f"| {' | '.join(cells)} |"


class ImageContender(Contender):
    def check(self, images: torch.Tensor) -> None:
        """Refuse what is not a batch of normalized crops on the GPU."""
        expected = (BATCH, 3, CROP, CROP), torch.float32, "cuda"
        if (tuple(images.shape), images.dtype, images.device.type) != expected:
            raise RuntimeError(f"{self.name}: {tuple(images.shape)} {images.dtype} {images.device}, not {expected}")
        if not (0.1 < images.std().item() < 3 and images.mean().abs().item() < 3):
            raise RuntimeError(f"{self.name}: pixels of mean {images.mean().item()}, deviation {images.std().item()}")


def say(words: str) -> None:
    print(f"[{time.perf_counter() - BEGUN:5.1f}] {words}", file=sys.stderr, flush=True)


def compare(contenders: list[Contender]) -> list[str]:
    """Run all in turn, and return their table."""
    for number in range(ROUNDS):
        for each in contenders:
            each.rounds.append(run_epochs(each.epoch))
        say(f"round {number}: " + ", ".join(f"{e.rounds[-1].images / e.rounds[-1].seconds:,.0f}" for e in contenders))
    head = "| | images/s | range | `dali_loader` / this | CPU us/image | GPU memory, GiB |"
    return [head, "|---|---|---|---|---|---|", *(each.row(contenders[0]) for each in contenders)]


def open_all(kind: type[Contender], makers: dict[str, Callable[[], Batches]]) -> list[Contender]:
    return [kind(name, make) for name, make in makers.items()]


def decoders(urls: str) -> list[Contender]:
    whole, part = crop_when_decoded, crop_while_decoding
    loaders = open_all(  # first: workers are forked, and DALI has threads
        ImageContender,
        {
            f"`ShardLoader`, {THREADS} workers": partial(by_shard_loader, urls),
            f"`ArrayLoader`, {THREADS} threads": partial(by_array_loader, urls),
        },
    )
    makers: dict[str, Callable[[], Batches]] = {}
    for words, graph in {"`decoders.image`": whole, "`decoders.image_random_crop`": part}.items():
        for threads in (FEW, THREADS):
            makers[f"`dali_loader`, {words}, {threads} threads"] = partial(by_dali_loader, urls, graph, threads)
            makers[f"{READER}, {words}, {threads} threads"] = partial(by_reader, urls, graph, threads)
    makers[f"`batch_source`, `decoders.image`, {THREADS} threads"] = partial(by_batch_source, urls, whole, THREADS)
    return [*open_all(ImageContender, makers), *loaders]


def feeders(urls: str) -> list[Contender]:
    makers = {
        "`dali_loader`": partial(by_dali_loader, urls, only_pass_on, FEW),
        "`batch_source`": partial(by_batch_source, urls, only_pass_on, FEW),
        READER: partial(by_reader, urls, only_pass_on, FEW),
    }
    return open_all(Contender, makers)


class Trainer:
    """A ResNet-50 in bfloat16, trained by steps on batches of any source."""

    def __init__(self) -> None:
        from torchvision.models import resnet50

        torch.backends.cudnn.benchmark = True
        self.model = resnet50().cuda().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loss = torch.nn.CrossEntropyLoss()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.loss(self.model(images.contiguous(memory_format=torch.channels_last)), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def rate(self, epoch: Batches) -> float:
        """Train for STEPS steps, over as many epochs as this takes, and return the images per second."""
        torch.cuda.synchronize()
        steps, begun = 0, time.perf_counter()
        while steps < STEPS:
            for images, labels in epoch():
                self.step(images, torch.as_tensor(labels, device="cuda").long())
                steps += 1
        torch.cuda.synchronize()
        return steps * BATCH / (time.perf_counter() - begun)


def train(urls: str) -> list[str]:
    trainer = Trainer()
    images = torch.randn(BATCH, 3, CROP, CROP, device="cuda")
    labels = torch.randint(1000, (BATCH,), device="cuda")
    epochs: dict[str, Batches] = {
        CONSTANT: lambda: ((images, labels) for _ in range(SAMPLES // BATCH)),
        f"`ShardLoader`, {THREADS} workers": by_shard_loader(urls),
        f"`ArrayLoader`, {THREADS} threads": by_array_loader(urls),
        f"`dali_loader`, {FEW} threads": by_dali_loader(urls, crop_when_decoded, FEW),
    }
    rates: dict[str, list[float]] = {name: [] for name in epochs}
    for number in range(ROUNDS + 1):
        for name, epoch in epochs.items():
            rate = trainer.rate(epoch)
            if number:
                rates[name].append(rate)
        say(f"training, round {number}: " + ", ".join(f"{each[-1]:,.0f}" for each in rates.values() if each))
    rows = []
    for name, found in rates.items():
        share = median(mine / own for mine, own in zip(found, rates[CONSTANT]))
        rows.append(f"| {' | '.join([name, *spread(found), f'{share:.2f}'])} |")
    return ["| batches of | images/s | range | of the model's own rate |", "|---|---|---|---|", *rows]


def main() -> None:
    if not torch.cuda.is_available():
        print("gpu: not measured, for there is no NVIDIA GPU")
        return
    folder = DATA / f"gpu-{SAMPLES}-{WIDTH}x{HEIGHT}"
    urls = write_photos(folder, SAMPLES, SHARD, HEIGHT, WIDTH, classes=1000)
    say("photos are written")
    kilobytes = sum(Path(url).stat().st_size for url in expand_urls(urls)) / SAMPLES / 1000
    photos = f"{SAMPLES:,} JPEGs of {WIDTH} x {HEIGHT} ({kilobytes:.0f} KB each), batches of {BATCH}"
    rounds = f"median, slowest and fastest of {ROUNDS} rounds of whole epochs"
    where = f"{torch.cuda.get_device_name()}, " + machine("torch", "nvidia-dali-cuda120", "numpy")
    words = [
        f"{photos}, as tensors of float32 ({CROP} x {CROP}, normalized) on the GPU, randomly cropped and flipped. "
        f"Images per second: {rounds}, each at least {LEAST} s, and how many times as fast as this the first row "
        "is. CPU time of all threads and workers. GPU memory: what opening and one epoch add.",
        "",
        'With DALI the GPU decodes (`device="mixed"`); `decoders.image` decodes the whole image, '
        "`decoders.image_random_crop` only the crop. `ArrayLoader` and `ShardLoader` decode on the CPU "
        "(`readers.image`), copy bytes to the GPU and normalize there.",
    ]
    record("Images on a GPU", [where, "", *words, "", *compare(decoders(urls))])
    words = [
        f"{photos}, encoded, into a pipeline on the GPU that returns their sizes, with {FEW} threads. Images per "
        f"second: {rounds}."
    ]
    record("Feeding a GPU's pipeline", [where, "", *words, "", *compare(feeders(urls))])
    words = [
        f"A ResNet-50 in bfloat16 (channels last, SGD) takes {STEPS} steps of {BATCH} images in a round. Images per "
        f"second: {rounds}, and the share of the rate at which the model trains on one constant batch."
    ]
    record("Training a ResNet-50 on a GPU", [where, "", *words, "", *train(urls)])


if __name__ == "__main__":
    main()
