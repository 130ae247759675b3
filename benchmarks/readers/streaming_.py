"""MosaicML Streaming over MDS files of the samples."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from _members import BATCH, made_once, samples_of
from peers import _torchvision  # noqa: F401 - before what imports torchvision
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory


def load(urls: list[str]) -> StreamingDataLoader:
    def write(folder: Path) -> None:
        columns = {"__key__": "str", "bin": "bytes", "cls": "bytes"}
        with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 16) as writer:
            for sample in samples_of(urls):
                writer.write(sample)

    folder = made_once(urls, write)
    if not dist.is_initialized():  # else each step makes its own group, and some groups never form
        dist.init_process_group("gloo")
    clean_stale_shared_memory()
    data = StreamingDataset(local=str(folder), shuffle=False, batch_size=BATCH, num_canonical_nodes=1)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=1)
