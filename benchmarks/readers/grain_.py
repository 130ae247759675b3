"""Grain over ArrayRecord files of the samples, by threads."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
from _members import BATCH, made_once, rank, ranks, samples_of
from array_record.python.array_record_module import ArrayRecordWriter


class Loader:
    """An epoch of a MapDataset's iterator."""

    def __init__(self, folder: Path):
        source = grain.sources.ArrayRecordDataSource([str(folder / "samples.array_record")])
        samples = grain.MapDataset.source(source).map(pickle.loads)[rank() :: ranks()]
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self.iterator = iter(samples.batch(BATCH, batch_fn=list).to_iter_dataset(options))

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self.iterator

    def state_dict(self) -> Any:
        return self.iterator.get_state()

    def load_state_dict(self, state: Any) -> None:
        self.iterator.set_state(state)


def load(urls: list[str]) -> Loader:
    def write(folder: Path) -> None:
        writer = ArrayRecordWriter(str(folder / "samples.array_record"), "group_size:1,uncompressed")
        for sample in samples_of(urls):
            writer.write(pickle.dumps(sample))
        writer.close()

    return Loader(made_once(urls, write))
