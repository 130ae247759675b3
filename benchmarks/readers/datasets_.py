"""Hugging Face datasets: its webdataset builder over its streaming archive reader, without decoders by extension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _members import BATCH, one_file, rank, ranks
from datasets import StreamingDownloadManager, disable_progress_bars, load_dataset
from datasets.distributed import split_dataset_by_node
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from torchdata.stateful_dataloader import StatefulDataLoader

WebDataset.DECODERS = {}
disable_progress_bars()


def read(expression: str) -> Iterator[dict[str, Any]]:
    archive = StreamingDownloadManager().iter_archive(one_file(expression))
    return WebDataset._get_pipeline_from_tar(expression, archive)


def load(urls: list[str]) -> StatefulDataLoader:
    data = load_dataset("webdataset", data_files={"train": urls}, split="train", streaming=True)
    data = split_dataset_by_node(data, rank(), ranks())
    return StatefulDataLoader(data, BATCH, num_workers=1, collate_fn=list)
