"""Options for reading files, above all remote ones: connections, memory, retries, a folder for a cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tarshards.errors import whole_number
from tarshards.parallel.host import available_memory

#: The variables that have the defaults of two options; they are read whenever a Remote is made.
VARIABLES = ("TARSHARDS_CONNECTIONS", "TARSHARDS_CACHE_DIR")

LEAST_AHEAD = 1 << 24  # bytes to fetch ahead even if the available memory is short or unknown
LEAST_CACHE = 1 << 24  # bytes: a smaller cache would hold too few blocks to be useful
PART = 4  # bytes fetched ahead may fill one part in this many of the available memory


def _connections() -> int:
    text = os.environ.get(VARIABLES[0]) or "32"
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"the variable {VARIABLES[0]} must be a whole number of at least 1, not {text!r}")
    return int(text)


def _cache_dir() -> str | None:
    folder = os.path.expanduser(os.environ.get(VARIABLES[1], ""))
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ValueError(f"the variable {VARIABLES[1]} must name a folder, not {folder!r}")
    return folder or None


@dataclass(frozen=True)
class Remote:
    """How files of web servers and object stores are read.

    - *connections*: requests under way at once in a process, each on a connection of its own that is kept alive; by
      default the value of the variable TARSHARDS_CONNECTIONS, or 32
    - *ahead*: the most bytes fetched before they are needed, and the most bytes of indexes held; by default a
      quarter of the available memory, shared by the ranks and workers of the host
    - *timeout*: seconds without a byte of the body, or for everything before it, after which a request has failed
    - *retries*: failures in a row without progress before a file is given up
    - *storage_options*: arguments of fsspec's store (endpoint, credentials); by default it finds them itself
    - *cache_dir*: a local folder for the blocks that were fetched, shared by all processes of the host and kept for
      later epochs and runs; by default that of the variable TARSHARDS_CACHE_DIR, or none
    - *cache_bytes*: the maximum size of the files in *cache_dir*, at least 16 MiB; None is nine tenths of the sum of
      the free space on its disk and their current size
    - *max_ratio*: of a compressed shard, local ones too, a member of more than 256 MiB must not be more than this many
      times as large as the shard: a decompression bomb would fill the memory; None is 200

    Raises ValueError or TypeError for invalid values.
    """

    connections: int = field(default_factory=_connections)
    ahead: int | None = None
    timeout: float = 30.0
    retries: int = 5
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)  # they may hold credentials
    cache_dir: str | os.PathLike[str] | None = field(default_factory=_cache_dir)
    cache_bytes: int | None = None
    max_ratio: float | None = None

    def __post_init__(self) -> None:
        whole_number("connections", self.connections, 1)
        whole_number("retries", self.retries, 0)
        for name, least in (("ahead", 1), ("cache_bytes", LEAST_CACHE)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least)
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ValueError(f"timeout must be a number of seconds above 0, not {self.timeout!r}")
        if self.max_ratio is not None:
            check_ratio(self.max_ratio)
        if self.storage_options is not None and not isinstance(self.storage_options, Mapping):
            raise TypeError(f"storage_options must be a dict, not {type(self.storage_options).__name__}")
        if self.cache_dir is None and self.cache_bytes is not None:
            raise ValueError("cache_bytes= requires cache_dir=")
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", os.path.expanduser(os.fspath(self.cache_dir)))

    def __hash__(self) -> int:
        cache = self.cache_dir, self.cache_bytes
        return hash((self.connections, self.ahead, self.timeout, self.retries, cache, self.max_ratio))

    def budget(self, processes: int = 1) -> int:
        """Return the bytes that one of *processes* on this host may fetch ahead."""
        if self.ahead is not None:
            return self.ahead
        return max(LEAST_AHEAD, available_memory() // PART // processes)

    def held(self) -> int:
        """Return the bytes of indexes that may be held; the default depends on the memory that is available now."""
        return max(LEAST_AHEAD, self.budget())


def check_ratio(max_ratio: Any) -> None:
    """Raise ValueError unless *max_ratio* is a number of at least 1."""
    if isinstance(max_ratio, bool) or not isinstance(max_ratio, int | float) or not max_ratio >= 1:
        raise ValueError(f"max_ratio must be a number of at least 1, not {max_ratio!r}")


def default_remote() -> Remote:
    """Return the options where none are passed: the same object as long as the variables have the same values."""
    return _remote_of(*map(os.environ.get, VARIABLES))


@cache
def _remote_of(*values: str | None) -> Remote:
    return Remote()


def with_options(remote: Remote | None, **options: Any) -> Remote | None:
    """Return *remote*, or else the default options, with those of these *options* that are not None."""
    given = {name: value for name, value in options.items() if value is not None}
    return replace(remote or Remote(), **given) if given else remote
