"""Training scripts as projects write them for webdataset, over the module that the settings name.

``clip`` imitates how open_clip trains, ``clip-resampled`` the same with shards drawn with replacement, and ``timm``
how timm reads: the same calls, on small pictures. Each rank is a process: ``scripts.py SETTINGS RANK`` writes what
its loop saw to ``RANK.json`` beside the settings. At every step the ranks exchange the keys of their batches, so that
a rank with fewer steps would leave the others waiting.
"""

from __future__ import annotations

import io
import json
import math
import random
import sys
from functools import partial
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

settings = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text()))
RANK = int(sys.argv[2])
torch.set_num_threads(1)

wds: Any = import_module(settings.module)
filters: Any = import_module(f"{settings.module}.filters")
shardlists: Any = import_module(f"{settings.module}.shardlists")
tariterators: Any = import_module(f"{settings.module}.tariterators")


def go_on(error: Exception) -> bool:
    return True


class EpochCount:
    """The epoch, which workers see too."""

    def __init__(self) -> None:
        self.shared = get_context(settings.context).Value("i", 0)

    def get(self) -> int:
        value: int = self.shared.value
        return value


class ShuffleShards(wds.PipelineStage):
    """Shuffles alike in all ranks and workers, differently each epoch."""

    def __init__(self, epoch: EpochCount, bufsize: int = 2000, initial: int = 500, seed: int = 0):
        self.epoch, self.bufsize, self.initial, self.seed = epoch, bufsize, initial, seed

    def run(self, src: Any) -> Any:
        return filters._shuffle(src, self.bufsize, self.initial, random.Random(self.seed + self.epoch.get()))


class DrawShards(IterableDataset):
    """Draws shards with replacement, each worker by its own seed."""

    def __init__(self, urls: str, epoch: EpochCount):
        self.urls, self.epoch = shardlists.expand_urls(urls), epoch

    def __iter__(self) -> Any:
        info = get_worker_info()
        seed = wds.utils.pytorch_worker_seed() if info is None else info.seed
        rng = random.Random(seed + self.epoch.get())
        while True:
            yield {"url": rng.choice(self.urls)}


def group_leniently(files: Any, handler: Any = None) -> Any:
    """Groups members by key; a key that comes twice begins a new sample."""
    sample: dict[str, Any] | None = None
    for file in files:
        prefix, suffix = tariterators.base_plus_ext(file["fname"])
        if prefix is None:
            continue
        suffix = suffix.lower()
        if sample is None or prefix != sample["__key__"] or suffix in sample:
            if tariterators.valid_sample(sample):
                yield sample
            sample = {"__key__": prefix, "__url__": file["__url__"]}
        sample[suffix] = file["data"]
    if tariterators.valid_sample(sample):
        yield sample


def read_leniently(src: Any, handler: Any = go_on) -> Any:
    streams = tariterators.url_opener(src, handler=handler)
    return group_leniently(tariterators.tar_file_expander(streams, handler=handler), handler=handler)


def has_both(sample: dict[str, Any]) -> bool:
    return "txt" in sample and any(name in sample for name in ("png", "jpg", "jpeg"))


def to_tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).float().mean((0, 1))


def tokenize(text: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in text.ljust(8)])


def clip(epoch: EpochCount, resampled: bool = False) -> tuple[Any, int]:
    """Return the loader and the steps of an epoch."""
    pipeline = [DrawShards(settings.urls, epoch) if resampled else wds.SimpleShardList(settings.urls)]
    if not resampled:
        pipeline += [ShuffleShards(epoch), wds.split_by_node, wds.split_by_worker]
    pipeline += [
        read_leniently if settings.lenient else wds.tarfile_to_samples(handler=go_on),
        wds.shuffle(bufsize=20, initial=5),
        wds.select(has_both),
        wds.decode("pilrgb", handler=go_on),
        wds.rename(image="jpg;png;jpeg", text="txt", key="__key__"),
        wds.map_dict(image=to_tensor, text=tokenize),
        wds.to_tuple("image", "text", "key"),
        wds.batched(settings.size, partial=False, collation_fn=default_collate),
    ]
    batches = math.ceil(settings.samples / (settings.size * settings.ranks))
    batches_of_worker = math.ceil(batches / max(1, settings.workers))
    dataset = wds.DataPipeline(*pipeline).with_epoch(batches_of_worker)
    options = {"num_workers": settings.workers, "persistent_workers": settings.workers > 0}
    loader = wds.WebLoader(dataset, batch_size=None, shuffle=False, multiprocessing_context=settings.context, **options)
    loader.dataset = dataset
    loader.num_batches = batches_of_worker * max(1, settings.workers)
    return loader, loader.num_batches


def decode_for_timm(sample: dict[str, Any], image_key: str = "jpg", image_mode: str = "RGB") -> dict[str, Any] | None:
    if b"skip" in sample.get("txt", b""):
        return None
    with io.BytesIO(filters.getfirst(sample, image_key)) as stream:
        image = Image.open(stream)
        image.load()
    return {"jpg": to_tensor(image.convert(image_mode)), "target": int(sample["cls"])}


class TimmReader(IterableDataset):
    """Builds its pipeline in the worker, whose seed its shuffling depends on."""

    def __init__(self, epoch: EpochCount):
        self.epoch, self.pipeline = epoch, None

    def _share(self, src: Any) -> Any:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return islice(src, RANK * workers + worker, None, settings.ranks * workers)

    def __iter__(self) -> Any:
        info = get_worker_info()
        if self.pipeline is None:
            self.pipeline = wds.DataPipeline(
                [
                    wds.SimpleShardList(shardlists.expand_urls(settings.urls)),
                    ShuffleShards(self.epoch, 500),
                    self._share,
                    wds.tarfile_to_samples(handler=go_on),
                    wds.shuffle(bufsize=20, initial=5, rng=random.Random(info.seed if info else 0)),
                    wds.map(partial(decode_for_timm, image_key="jpg;png"), handler=go_on),
                    wds.rename(image="jpg;png", target="target"),
                ]
            )
        each = math.ceil(settings.samples / (settings.ranks * (info.num_workers if info else 1)))
        for sample in self.pipeline.with_epoch(math.ceil(each / settings.size) * settings.size):
            yield sample["image"], sample["target"], sample["__key__"]


def timm(epoch: EpochCount) -> tuple[Any, int]:
    loader = DataLoader(TimmReader(epoch), batch_size=settings.size, num_workers=settings.workers, drop_last=True)
    workers = max(1, settings.workers)
    each = math.ceil(settings.samples / (settings.ranks * workers))
    return loader, math.ceil(each / settings.size) * workers


def main() -> None:
    folder = Path(sys.argv[1]).parent
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=RANK, world_size=settings.ranks
    )
    epoch = EpochCount()
    kinds = {"clip": clip, "clip-resampled": partial(clip, resampled=True), "timm": timm}
    loader, steps = kinds[settings.script](epoch)
    epochs, equal = [], True
    for number in range(settings.epochs):
        epoch.shared.value = number
        batches = []
        for _, other, keys in loader:
            gathered: list[Any] = [None] * settings.ranks
            torch.distributed.all_gather_object(gathered, (len(batches), len(keys)))
            equal = equal and len(set(gathered)) == 1 and len(other) == len(keys)
            batches.append(list(keys))
        epochs.append(batches)
    torch.distributed.barrier()
    ledger = getattr(getattr(loader, "dataset", None), "ledger", None)
    counts = {} if ledger is None else {"read": ledger._total().samples, "filtered": sum(ledger.filtered.values())}
    counts |= {} if ledger is None else {"failed": ledger.failed, "delivered": ledger.samples}
    report = {"epochs": epochs, "steps": steps, "equal": equal, "counts": counts}
    (folder / f"{RANK}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
