"""torchdata's StatefulDataLoader over webdataset, which it replays; both are in the environment of the benchmarks."""

from __future__ import annotations

from _members import BATCH
from torchdata.stateful_dataloader import StatefulDataLoader
from webdataset import WebDataset, split_by_node


def load(urls: list[str]) -> StatefulDataLoader:
    dataset = WebDataset(urls, shardshuffle=False, nodesplitter=split_by_node)
    return StatefulDataLoader(dataset, BATCH, num_workers=1, collate_fn=list)
