"""Lists of shards: how they are sampled, how ranks and workers share them out, and copies of them on a local disk."""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import chain, islice
from tempfile import TemporaryDirectory, gettempdir
from typing import Any
from urllib.parse import quote, urlparse

from torch.utils.data import IterableDataset

from tarshards.epoch.world import World
from tarshards.errors import WorldError
from tarshards.samples.ledger import Ledger
from tarshards.samples.read import read_shard
from tarshards.storage import expressions
from tarshards.storage.location import Location
from tarshards.webdataset import filters
from tarshards.webdataset.handlers import Handler, absent, pytorch_worker_seed, reraise_exception
from tarshards.webdataset.tariterators import gopen


def expand_urls(urls: Any) -> list[str]:
    """Return the URLs of a shard expression, or of a list of them; ``${NAME}`` is the variable WDS_NAME."""
    if isinstance(urls, str):
        for _ in range(10):  # a value may name variables
            urls = re.sub(r"\$\{(\w+)\}", lambda match: os.environ["WDS_" + match[1]], urls)
        return expressions.expand_urls(urls)
    return [url for each in urls for url in (expand_urls(each) if isinstance(each, str) else [os.fspath(each)])]


def expand_source(source: Any, max_urls: int = int(1e9)) -> list[str]:
    """Return the first *max_urls* URLs of a shard expression, or of an iterable of shards."""
    shards = expand_urls(source) if isinstance(source, str) else source
    return [each["url"] if isinstance(each, dict) else os.fspath(each) for each in islice(shards, max_urls)]


class SimpleShardList(IterableDataset):
    """The shards of a list, in its order; with *seed* in an order that this determines; True stands for 0.

    Ranks and workers share the shards out afterwards, so they must have one order: none can be drawn by each of them.
    """

    def __init__(self, urls: Any, seed: int | bool | None = None):
        self.urls, self.seed = expand_urls(urls), 0 if seed is True else seed

    def __len__(self) -> int:
        return len(self.urls)

    def __iter__(self) -> Iterator[dict[str, str]]:
        urls = list(self.urls)
        if self.seed is not None:
            random.Random(self.seed).shuffle(urls)
        return iter([{"url": url} for url in urls])


shardspec = SimpleShardList


class ResampledShards(IterableDataset):
    """Shards drawn with replacement, *nshards* of them or for ever.

    If *deterministic* they depend on *seed*, on what *worker_seed* returns, which by default differs between ranks and
    workers, and on *epoch*, which counts the iterations, in a pipeline over workers that begin anew; else on nothing.
    """

    def __init__(
        self,
        urls: Any,
        nshards: int = sys.maxsize,
        seed: int = 0,
        worker_seed: Callable[[], int] | None = None,
        deterministic: bool = False,
        max_urls: int = int(1e6),
        empty_check: bool = True,
    ):
        self.urls = expand_source(urls, max_urls)
        if empty_check and not self.urls:
            raise ValueError("ResampledShards has no shards to draw from")
        self.nshards, self.seed, self.deterministic, self.epoch = nshards, seed, deterministic, -1
        self.worker_seed = worker_seed or pytorch_worker_seed

    def __iter__(self) -> Iterator[dict[str, str]]:
        self.epoch += 1
        rng = random.Random(f"{self.seed}/{self.epoch}/{self.worker_seed()}" if self.deterministic else None)
        return ({"url": rng.choice(self.urls)} for _ in range(self.nshards))


ResampledShardList = ResampledShards


def _resampled(shards: Iterable[Any], n: int = sys.maxsize) -> Iterator[Any]:
    """Draw *n* of the shards with replacement."""
    rng, known = random.Random(), list(shards)
    return (rng.choice(known) for _ in range(n if known else 0))


resampled = filters.pipelinefilter(_resampled)


def non_empty(src: Iterable[Any]) -> Iterator[Any]:
    """Yield what comes; raise ValueError if nothing does."""
    iterator = iter(src)
    first = list(islice(iterator, 1))
    if not first:
        raise ValueError("no shards, or no samples: there may be fewer shards than ranks and workers")
    yield from chain(first, iterator)


def split_by_node(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Yield the shards of this rank: every world_size-th.

    Raises WorldError, on every rank, where there are fewer shards than ranks.
    """
    world, shards = World.detect(), iter(src)
    first = list(islice(shards, world.world_size))
    if first and len(first) < world.world_size:
        raise WorldError(f"{len(first)} shards for {world.world_size} ranks: write more and smaller shards")
    yield from islice(chain(first, shards), world.rank, None, world.world_size)


def single_node_only(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Yield the shards; raise WorldError where there are several ranks, which would all read everything."""
    if (ranks := World.detect().world_size) > 1:
        raise WorldError(f"{ranks} ranks would read the same shards: pass nodesplitter=split_by_node")
    yield from src


def split_by_worker(src: Iterable[Any]) -> Iterator[Any]:
    """Yield the shards of this worker of the DataLoader: every num_workers-th."""
    world = World.detect()
    return islice(src, world.worker, None, world.num_workers)


DirectoryShardList = absent("DirectoryShardList", "name the shards, or the pattern of a folder such as data/*.tar")
MultiShardSample = absent("MultiShardSample", "tarshards.mix draws from several datasets in proportion")


# Whole remote shards on a local disk; ``tarshards.Remote(cache_dir=...)`` keeps blocks of them.

SCHEMES = ["http", "https", "file", "ftp", "ftps", "gs", "s3", "ais"]


def url_to_cache_name(url: str, ndir: int = 0) -> str:
    """Return the base name of *url*, with *ndir* folders before it; the end of the quoted URL for an unknown scheme."""
    assert isinstance(url, str)
    parsed = urlparse(url)
    if parsed.scheme not in ("", *SCHEMES):
        return quote(url, safe="_+{}*,-")[-128:]
    return "/".join(parsed.path.lstrip("/").split("/")[-1 - ndir :])


def pipe_cleaner(spec: str) -> str:
    """Return the URL that a ``pipe:`` command names, else *spec* itself."""
    words = spec.split() if spec.startswith("pipe:") else [spec]
    return next((word for word in words if word.partition("://")[0] in SCHEMES), spec)


def check_tar_format(name: str) -> bool:
    """Say whether a file is a whole shard."""
    ledger = Ledger(max_errors=float("inf"))
    deque(read_shard(name, ledger=ledger), maxlen=0)
    return not ledger.quarantined


class LRUCleanup:
    """Removes the oldest files of a folder where all have more than *cache_size* bytes, every *interval* seconds."""

    def __init__(
        self,
        cache_dir: Any = None,
        cache_size: float = 1e12,
        keyfn: Any = os.path.getctime,
        verbose: bool = False,
        interval: float | None = 30,
    ):
        self.cache_dir, self.cache_size, self.keyfn, self.interval = cache_dir, cache_size, keyfn, interval
        self.last_run = 0.0

    def set_cache_dir(self, cache_dir: Any) -> None:
        """Clean up another folder."""
        self.cache_dir = cache_dir

    def cleanup(self) -> None:
        """Remove what is too much."""
        if self.interval is not None and time.time() - self.last_run < self.interval:
            return
        self.last_run = time.time()
        files = []
        for folder, _, names in os.walk(self.cache_dir):
            for path in (os.path.join(folder, name) for name in names):
                with suppress(FileNotFoundError):  # another worker cleans up too
                    files.append((self.keyfn(path), path, os.path.getsize(path)))
        total = sum(size for *_, size in files)
        for _, path, size in sorted(files):
            if total <= self.cache_size:
                return
            total -= size
            with suppress(FileNotFoundError):
                os.remove(path)


class StreamingOpen:
    """Adds to shards the ``stream`` that reads them, and to local ones their ``local_path``."""

    def __init__(self, verbose: bool = False, handler: Handler = reraise_exception):
        self.handler = handler

    def __call__(self, urls: Iterable[Any]) -> Iterator[dict[str, Any]]:
        return filters.map.run(urls, lambda shard: self.open(self.with_path(shard)), self.handler)

    def local(self, urls: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Add to shards their ``local_path`` only."""
        return filters.map.run(urls, self.with_path, self.handler)

    def with_path(self, shard: Any) -> dict[str, Any]:
        shard = {"url": shard} if isinstance(shard, str) else shard
        path = Location.of(shard["url"]).path or self.get_file(shard["url"])
        return {**shard, "local_path": path} if path else shard

    def get_file(self, url: str) -> str | None:
        """Return the path of the copy of a remote shard; there is none."""
        return None

    def open(self, shard: dict[str, Any]) -> dict[str, Any]:
        return {**shard, "stream": gopen(shard["url"])}


class FileCache(StreamingOpen):
    """Adds to shards the ``local_path`` of their copy in *cache_dir*, made when it is missing, and its ``stream``.

    A copy has its name only when it is whole and *validator*, if any, accepts it. The name is what *url_to_name*
    returns, behind a digest of the URL: shards of two datasets often have one base name.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        url_to_name: Callable[[str], str] = url_to_cache_name,
        verbose: bool = False,
        validator: Callable[[str], bool] | None = check_tar_format,
        handler: Handler = reraise_exception,
        cache_size: float = -1,
        cache_cleanup_interval: float = 30,
    ):
        super().__init__(verbose, handler)
        folder = cache_dir or os.path.join(gettempdir(), f"tarshards-webdataset-{os.getuid()}")
        self.cache_dir = os.path.expanduser(os.fspath(folder))
        self.url_to_name, self.validator = url_to_name, validator
        size = cache_size if cache_size > 0 else float("inf")
        self.cleaner = LRUCleanup(self.cache_dir, size, interval=cache_cleanup_interval)

    def get_file(self, url: str) -> str:
        """Return the path of the copy of *url*."""
        folder, name = os.path.split(self.url_to_name(url))
        digest = blake2b(url.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        path = os.path.join(self.cache_dir, folder, f"{digest}-{name}")
        if os.path.exists(path):
            return path
        self.cleaner.cleanup()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with TemporaryDirectory(dir=os.path.dirname(path)) as folder:
            partial = os.path.join(folder, "partial.tar")
            with gopen(url) as source, open(partial, "wb") as target:
                shutil.copyfileobj(source, target)
            if self.validator is not None and not self.validator(partial):
                raise ValueError(f"{Location.of(url).name}: not a whole shard, so it is not cached")
            os.replace(partial, path)
        return path

    def open(self, shard: dict[str, Any]) -> dict[str, Any]:
        return {**shard, "stream": open(shard["local_path"], "rb")}
