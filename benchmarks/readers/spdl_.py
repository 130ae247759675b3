"""SPDL's iter_tarfile over the bytes of a shard, and over a file, grouped by the rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spdl.io
from _members import grouped, one_file, own_shards
from spdl.pipeline import PipelineBuilder


def read(expression: str) -> Iterator[dict[str, Any]]:
    return grouped(spdl.io.iter_tarfile(Path(one_file(expression)).read_bytes()))


def read_file(expression: str) -> Iterator[dict[str, Any]]:
    with open(one_file(expression), "rb") as file:
        yield from grouped(spdl.io.iter_tarfile(file))


def load(urls: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the samples of a shard at a time, which a thread of a pipeline reads."""
    builder = PipelineBuilder().add_source(own_shards(urls)).pipe(lambda url: list(read(url))).add_sink()
    pipeline = builder.build(num_threads=1)
    with pipeline.auto_stop():
        yield from pipeline
