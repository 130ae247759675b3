"""DALI on the CPU: its reader gives fields, but no keys; without an index file it makes the index itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _members import fields_of, one_file
from nvidia.dali import Pipeline, fn


def read(expression: str) -> Iterator[dict[str, Any]]:
    names = fields_of(one_file(expression))
    pipe = Pipeline(1, 1, None, prefetch_queue_depth=1)
    with pipe:
        found = fn.readers.webdataset(paths=[expression], ext=names, missing_component_behavior="empty", name="shards")
        pipe.set_outputs(*([found] if len(names) == 1 else found))
    pipe.build()
    for _ in range(pipe.reader_meta("shards")["epoch_size"]):
        values = [bytes(output.at(0)) for output in pipe.run()]
        yield {"__key__": None, **{name: data for name, data in zip(names, values) if data}}
