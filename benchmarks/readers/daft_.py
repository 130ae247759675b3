"""Daft: what each task of read_webdataset runs for a file, without the decoders by extension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _members import one_file, own_shards
from daft.io.webdataset import _webdataset as module

PACKAGES = ("daft==0.7.26",)
module._is_eagerly_decoded = lambda field: False


def read(expression: str) -> Iterator[dict[str, Any]]:
    for path in module._resolve_archive_paths(one_file(expression), None):  # it takes globs, in no order
        for sample in module._iter_archive_samples(path, None):
            yield {name: value_of(value) for name, value in sample.items()}


def value_of(value: Any) -> Any:
    if isinstance(value, str):
        return value
    with value.open() as file:
        return file.read()


def load(urls: list[str]) -> Iterator[dict[str, Any]]:
    for url in own_shards(urls):
        yield from read(url)
