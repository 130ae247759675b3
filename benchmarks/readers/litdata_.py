"""LitData over its optimized chunks of the samples; ranks are set as torch.distributed would."""

from __future__ import annotations

from pathlib import Path

from _members import BATCH, made_once, rank, ranks, samples_of
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter
from litdata.utilities import env


def be_rank(rank: int, ranks: int) -> None:
    world = env._DistributedEnv(ranks, rank, 1)
    env._DistributedEnv.detect = classmethod(lambda cls: world)


def load(urls: list[str]) -> StreamingDataLoader:
    def write(folder: Path) -> None:
        writer = BinaryWriter(str(folder), chunk_bytes=1 << 16)
        for place, sample in enumerate(samples_of(urls)):
            writer.add_item(place, sample)
        writer.done()
        writer.merge(1)

    be_rank(0, 1)  # a writer waits for those of all ranks
    folder = made_once(urls, write)
    be_rank(rank(), ranks())
    data = StreamingDataset(str(folder), shuffle=False, drop_last=False)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=1, collate_fn=list)
