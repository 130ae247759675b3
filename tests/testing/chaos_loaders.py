"""Loaders of a user for test_chaos: one that is right, and some that are wrong in ways that users have met."""

from __future__ import annotations

import io
import os
import socket
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from typing import Any


def read(url: str) -> bytes:
    if not url.startswith("http"):
        with open(url, "rb") as file:
            return file.read()
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read()


class Plain:
    """Every rank takes each WORLD_SIZE-th sample, and a state is the number of those that it has taken."""

    def __init__(self, urls: list[str]):
        self.urls, self.taken = urls, 0

    def samples(self) -> Iterator[dict[str, Any]]:
        for url in self.urls:
            found: dict[str, dict[str, Any]] = {}
            with tarfile.open(fileobj=io.BytesIO(self.content(url))) as tar:
                for member in tar:
                    key, _, name = member.name.partition(".")
                    found.setdefault(key, {"__key__": key})[name] = tar.extractfile(member).read()
            yield from found.values()

    def content(self, url: str) -> bytes:
        return read(url)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        mine = [sample for place, sample in enumerate(self.samples()) if place % ranks == rank]
        for sample in mine[self.taken :]:
            self.taken += 1
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class DropsTheTail(Plain):
    """Leaves out the last samples, so that all ranks have as many."""

    def samples(self):
        every = list(super().samples())
        return iter(every[: len(every) // 4 * 4 - 4])


class StartsAnew(Plain):
    """Takes a state, and begins at the first sample."""

    def load_state_dict(self, state):
        """Do nothing."""


class CountsAhead(Plain):
    """Counts what it has prefetched as taken."""

    def state_dict(self):
        return {"taken": self.taken + 1}


class SameShare(Plain):
    """Every rank reads everything."""

    def __iter__(self):
        for sample in list(self.samples())[self.taken :]:
            self.taken += 1
            yield sample


class GoesOn(Plain):
    """Leaves out shards that cannot be read, as warn_and_continue does."""

    def content(self, url):
        try:
            data = read(url)
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                for member in tar:
                    tar.extractfile(member).read()
        except (OSError, tarfile.TarError):
            return tarfile.NUL * 1024
        return data


class Hangs(Plain):
    """Waits for ever for a shard that is missing."""

    def content(self, url):
        while True:
            try:
                return read(url)
            except OSError:
                time.sleep(0.1)


class MixesThemUp(Plain):
    """Gives a resumed epoch the texts of other samples."""

    def samples(self):
        every = list(super().samples())
        for sample, other in pairwise(every):
            if self.taken:
                sample["txt"] = other["txt"]
        return iter(every)


class WaitsForOthers(Plain):
    """Takes each step at the same time as all ranks, as collective operations do: they meet at MASTER_PORT."""

    def __iter__(self):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        samples, ranks = super().__iter__(), int(os.environ["WORLD_SIZE"])
        if os.environ["RANK"] == "0":
            with socket.create_server(address) as server:
                others = [server.accept()[0] for _ in range(ranks - 1)]
                yield from self.together(samples, others)
        else:
            with self.connection(address) as leader:
                yield from self.together(samples, [leader])

    def connection(self, address):
        while True:
            try:
                return socket.create_connection(address)
            except OSError:
                time.sleep(0.01)

    def together(self, samples, others):
        for sample in samples:
            for other in others:
                other.send(b"1")
            while not all(other.recv(1) for other in others):
                time.sleep(0.1)  # for a rank that has died
            yield sample


class FailsAlone(WaitsForOthers):
    """Rank 0 has an error, and the others wait for it."""

    def together(self, samples, others):
        for step, sample in enumerate(super().together(samples, others)):
            if step == 2 and os.environ["RANK"] == "0":
                raise OSError("the disk is gone")
            yield sample


def is_broken(urls: list[str]) -> list[dict[str, Any]]:
    raise ValueError("no module is here")
