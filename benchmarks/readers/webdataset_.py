"""webdataset's WebDataset, and wids, its indexed part, which copies a shard into its cache."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from typing import Any

import torch.utils.data  # noqa: F401 - which webdataset imports at first use
from _members import BATCH, one_file
from webdataset import WebDataset, WebLoader, split_by_node
from wids import ShardListDataset
from wids.wids import compute_num_samples


def read(expression: str) -> Iterable[dict[str, Any]]:
    return WebDataset(expression, shardshuffle=False, empty_check=False)


def read_by_wids(expression: str) -> Iterator[dict[str, Any]]:
    path = one_file(expression)
    shards = [{"url": path, "nsamples": compute_num_samples(path), "filesize": os.path.getsize(path)}]
    with tempfile.TemporaryDirectory() as cache:
        with redirect_stderr(io.StringIO()):  # to which it prints a summary of each set
            dataset = ShardListDataset(shards, cache_dir=cache, transformations=[])
        for i in range(len(dataset)):
            yield {name.removeprefix("."): value_of(value) for name, value in dataset[i].items()}


def value_of(value: Any) -> Any:
    return value.read() if hasattr(value, "read") else value


def load(urls: list[str]) -> WebLoader:
    dataset = WebDataset(urls, shardshuffle=False, nodesplitter=split_by_node).batched(BATCH, collation_fn=list)
    return WebLoader(dataset, batch_size=None, num_workers=1)
