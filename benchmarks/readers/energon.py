"""Megatron Energon: the shard is prepared, as by `energon prepare`, and read as crude samples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _members import BATCH, made_once, one_file, rank, ranks
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator


class Encoder(DefaultTaskEncoder):
    """Hand samples over as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = None
        self.cookers = [Cooker(self.cook)]

    @stateless
    def cook(self, sample: Any) -> Any:
        return sample

    @stateless
    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


def prepare(paths: list[str], folder: Path) -> None:
    """Do what `energon prepare` does, in a folder with links to the shards."""
    names = [f"{number}.tar" for number, _ in enumerate(paths)]
    for name, path in zip(names, paths):
        (folder / name).symlink_to(path)
    WebdatasetPreparator.prepare_dataset(
        EPath(folder), names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
    )
    lines = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (folder / ".nv-meta" / "dataset.yaml").write_text(lines)


def plain(sample: Any) -> dict[str, Any]:
    fields = {name: data for name, data in sample.items() if not name.startswith("__")}
    return {"__key__": sample["__key__"], **fields}


def read(expression: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        prepare([one_file(expression)], Path(folder))
        options = {"worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0), "batch_size": 1}
        dataset = get_val_dataset(folder, split_part="train", task_encoder=Encoder(), **options)
        for (sample,) in get_loader(dataset):
            yield plain(sample)


class Loader:
    """An epoch of the training data, with the state of this rank."""

    def __init__(self, folder: Path):
        worker = WorkerConfig(rank=rank(), world_size=ranks(), num_workers=1)
        options = {"worker_config": worker, "batch_size": BATCH, "task_encoder": Encoder(), "repeat": False}
        data = get_train_dataset(folder, shuffle_buffer_size=None, max_samples_per_sequence=None, **options)
        self.loader = get_savable_loader(data, checkpoint_every_sec=0, checkpoint_every_min_n_samples=1)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for batch in self.loader:
            yield [plain(sample) for sample in batch]

    def state_dict(self) -> Any:
        return self.loader.save_state_rank()

    def load_state_dict(self, state: Any) -> None:
        self.loader.restore_state_rank(state)


def load(urls: list[str]) -> Loader:
    return Loader(made_once(urls, lambda folder: prepare(urls, folder)))
