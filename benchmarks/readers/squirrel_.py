"""Squirrel over its messagepack shards of the samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _members import made_once, own_shards, samples_of
from squirrel.driver import MessagepackDriver


def load(urls: list[str]) -> Iterator[dict[str, Any]]:
    def write(folder: Path) -> None:
        store = MessagepackDriver(str(folder / "shards")).store
        for number, url in enumerate(urls):
            store.set(list(samples_of([url])), key=f"{number:06d}")

    driver = MessagepackDriver(str(made_once(urls, write) / "shards"))
    return iter(driver.get_iter(keys_iterable=own_shards(sorted(driver.keys())), max_workers=1))
