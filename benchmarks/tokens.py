"""Benchmark tokens: rows of packed documents, beside litdata's TokensLoader and Megatron's GPTDataset.

`tokens.py DOCUMENTS` takes another number of documents than a million, which have 1e9 tokens. One format is on the disk
at a time, of at most 3 GB. Each run has a process of its own on one core.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from environments import make, read_peer
from measure import DATA, about, machine, record

PACKAGES = ("litdata==0.2.76", "megatron-core==0.16.1", "torch==2.13.0")  # of an environment for the two peers
DOCUMENTS, SHARD = 10**6, 10**5
LENGTH, ROWS = 2048, 8  # tokens of a row, rows of a batch
VOCABULARY, END = 50_257, 50_256
RUNS = 3


def documents(count: int) -> Iterator[np.ndarray]:
    """Yield documents of 16 to 32,768 tokens, 991 in the mean; they end in END."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, END, 1 << 22).astype(np.uint16)
    for length in np.clip(rng.lognormal(6.4, 1, count).astype(int), 16, 32_768).tolist():
        begin = int(rng.integers(0, len(text) - length))
        document = text[begin : begin + length].copy()
        document[-1] = END
        yield document


def write_tarshards(folder: Path, count: int) -> None:
    from tarshards import ShardWriter

    with ShardWriter(folder / "tokens-{shard:02d}.tar", max_samples=SHARD, max_bytes=None, sync=False) as writer:
        for number, ids in enumerate(documents(count)):
            writer.write({"__key__": f"{number:09d}", "ids.npy": ids})


def read_tarshards(folder: Path) -> Iterator[int]:
    from tarshards import ArrayLoader, ShardDataset, pack, readers

    dataset = ShardDataset(str(folder / "tokens.shards.json"), shuffle=True)
    packing = pack("ids.npy", LENGTH, overlong="split")
    for batch in ArrayLoader(dataset, ROWS, fields={"ids.npy": readers.ragged()}, packing=packing, device="cpu"):
        yield len(batch["ids.npy"])


def write_litdata(folder: Path, count: int) -> None:
    from litdata.streaming import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes="200MB", item_loader=TokensLoader())
    for number, ids in enumerate(documents(count)):
        writer.add_item(number, ids)
    writer.done()
    writer.merge(1)


def read_litdata(folder: Path) -> Iterator[int]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(str(folder), item_loader=TokensLoader(LENGTH), shuffle=True)
    for batch in StreamingDataLoader(dataset, batch_size=ROWS, num_workers=0):
        yield batch.numel()


def read_litdata_documents(folder: Path) -> Iterator[int]:
    """The documents of the rows are found by their ends, as attention masks need them."""
    import torch
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(str(folder), item_loader=TokensLoader(LENGTH), shuffle=True)
    for batch in StreamingDataLoader(dataset, batch_size=ROWS, num_workers=0):
        begins = (batch.flatten().int() == END).roll(1)
        begins[::LENGTH] = True
        offsets = begins.nonzero().flatten()
        positions = torch.arange(len(begins)) - offsets[begins.cumsum(0) - 1]
        yield len(positions)


def write_megatron(folder: Path, count: int) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "tokens.bin"), dtype=np.uint16)
    for ids in documents(count):
        builder.add_document(torch.from_numpy(ids), [len(ids)])
    builder.finalize(str(folder / "tokens.idx"))


def read_megatron(folder: Path) -> Iterator[int]:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split
    from torch.utils.data import DataLoader

    tokenizer: Any = SimpleNamespace(vocab_size=VOCABULARY, eod=END, pad=-1, unique_identifiers={"name": "numbers"})
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=LENGTH,
        blend=([str(folder / "tokens")], None),
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
    )
    low = IndexedDataset(str(folder / "tokens"))
    indices = np.arange(len(low.document_indices) - 1, dtype=np.int32)
    dataset = GPTDataset(low, str(folder / "tokens"), indices, None, Split.train, config)
    for batch in DataLoader(dataset, batch_size=ROWS, num_workers=0):
        yield batch["tokens"].numel()


WAYS: dict[str, tuple[str, Callable[[Path, int], None], Callable[[Path], Iterator[int]]]] = {
    "tarshards": ("ids, cu_seqlens, position_ids; shuffled documents", write_tarshards, read_tarshards),
    "litdata": ("ids; shuffled rows of documents in a line", write_litdata, read_litdata),
    "litdata, documents": ("ids, cu_seqlens, position_ids; the same", write_litdata, read_litdata_documents),
    "megatron": ("ids, labels, loss_mask, position_ids; rows of shuffled documents", write_megatron, read_megatron),
}


def run(name: str, folder: Path) -> dict[str, float]:
    """Read an epoch on one core; return the tokens, the seconds to the first batch, and the CPU seconds of the rest."""
    import torch

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    begun = time.perf_counter()
    batches = WAYS[name][2](folder)
    tokens = first = next(batches)
    ready, cpu = time.perf_counter(), time.process_time()
    for count in batches:
        tokens += count
    spent = time.process_time() - cpu
    return {"tokens": tokens, "ready": ready - begun, "rate": (tokens - first) / spent}


def child(name: str, task: str, folder: Path, count: int) -> Any:
    """Return what a process of its own says, with the packages of *name*."""
    python = sys.executable if name == "tarshards" else make(read_peer(Path(__file__)))
    command = [python, __file__, task, name, str(folder), str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, count: int) -> list[str]:
    lines = ["| loader | tokens a CPU second | from .. to | first batch, s | tokens read | GB | a batch has |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, (form, _, _) in WAYS.items():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        size = child(name, "write", folder, count)
        runs = [child(name, "read", folder, count) for _ in range(RUNS + 1)][1:]
        rates = [each["rate"] for each in runs]
        cells = [name, f"{about(rates)}{median(rates):,.0f}", f"{min(rates):,.0f} .. {max(rates):,.0f}"]
        cells += [
            f"{median(each['ready'] for each in runs):.1f}",
            f"{runs[0]['tokens']:,.0f}",
            f"{size / 1e9:.2f}",
            form,
        ]
        lines.append(f"| {' | '.join(cells)} |")
        shutil.rmtree(folder)
    return lines


def main(count: int = DOCUMENTS) -> None:
    tokens = sum(map(len, documents(count)))
    told = f"{count:,} documents of uint16, {tokens:,} tokens; rows of {LENGTH:,}, batches of {ROWS} rows, one core:"
    record("Tokens", [machine("numpy", "torch"), "", told, "", *measure(DATA / "tokens", count)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        _, _, name, folder, count = sys.argv
        WAYS[name][1](Path(folder), int(count))
        print(sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()))
    elif sys.argv[1:2] == ["read"]:
        print(json.dumps(run(sys.argv[2], Path(sys.argv[3]))))
    else:
        main(*map(int, sys.argv[1:]))
