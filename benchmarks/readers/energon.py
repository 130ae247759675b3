"""Megatron Energon: the shard is prepared, as by `energon prepare`, and read as crude samples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _members import one_file
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset, stateless
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


def read(expression: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.tar").symlink_to(one_file(expression))
        WebdatasetPreparator.prepare_dataset(
            EPath(folder), ["a.tar"], split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
        )
        (Path(folder) / ".nv-meta" / "dataset.yaml").write_text(
            "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
        )
        options = {"worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0), "batch_size": 1}
        dataset = get_val_dataset(folder, split_part="train", task_encoder=Encoder(), **options)
        for (sample,) in get_loader(dataset):
            key = sample["__key__"]
            yield {"__key__": key, **{name: data for name, data in sample.items() if not name.startswith("__")}}
