"""Lists of shards: sampling, and division among ranks and workers."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any
from urllib.parse import quote, urlparse

from torch.utils.data import IterableDataset

from tarshards.epoch.world import World
from tarshards.errors import WorldError
from tarshards.storage import expressions
from tarshards.storage.remote import Remote
from tarshards.webdataset import filters, tariterators
from tarshards.webdataset.handlers import Handler, absent, pytorch_worker_seed, reraise_exception

WITHOUT_EFFECT = {"always", "url_to_name", "validator", "verbose"}  # options of webdataset's copies of shards


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
    """The shards of a list, in order, or in an order determined by *seed*; True stands for 0.

    Ranks and workers divide the shards afterwards, so they need the same order and cannot draw their own.
    """

    def __init__(self, urls: Any, seed: int | bool | None = None):
        self.urls: list[str] = expand_urls(urls)
        self.seed = 0 if seed is True else seed

    def __len__(self) -> int:
        return len(self.urls)

    def __iter__(self) -> Iterator[dict[str, str]]:
        urls = list(self.urls)
        if self.seed is not None:
            random.Random(self.seed).shuffle(urls)
        return iter([{"url": url} for url in urls])


shardspec = SimpleShardList


class ResampledShards(IterableDataset):
    """Shards drawn with replacement, *nshards* of them or forever.

    If *deterministic*, they depend on *seed*, on the result of *worker_seed*, which by default differs between ranks
    and workers, and on *epoch*, which counts the iterations, in a pipeline also across restarted workers; else on
    nothing.
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
        self.urls: list[str] = expand_source(urls, max_urls)
        if empty_check and not self.urls:
            raise ValueError("ResampledShards has no shards to draw from")
        self.nshards = nshards
        self.seed = seed
        self.deterministic = deterministic
        self.epoch: int = -1
        self.worker_seed: Callable[[], int] = worker_seed or pytorch_worker_seed

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
    """Yield all items; raise ValueError if there are none."""
    iterator = iter(src)
    first = list(islice(iterator, 1))
    if not first:
        raise ValueError("no shards, or no samples: there may be fewer shards than ranks and workers")
    yield from chain(first, iterator)


def split_by_node(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Yield the shards of this rank: every world_size-th.

    Raises WorldError, on every rank, if there are fewer shards than ranks.
    """
    world, shards = World.detect(), iter(src)
    first = list(islice(shards, world.world_size))
    if first and len(first) < world.world_size:
        raise WorldError(f"{len(first)} shards for {world.world_size} ranks: write more and smaller shards")
    yield from islice(chain(first, shards), world.rank, None, world.world_size)


def single_node_only(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Yield the shards; raise WorldError if there are several ranks, which would all read everything."""
    if (ranks := World.detect().world_size) > 1:
        raise WorldError(f"{ranks} ranks would read the same shards: pass nodesplitter=split_by_node")
    yield from src


def split_by_worker(src: Iterable[Any]) -> Iterator[Any]:
    """Yield the shards of this worker of the DataLoader: every num_workers-th."""
    world = World.detect()
    return islice(src, world.worker, None, world.num_workers)


DirectoryShardList: Any = absent("DirectoryShardList", "name the shards, or the pattern of a folder such as data/*.tar")
MultiShardSample: Any = absent("MultiShardSample", "tarshards.mix draws from several datasets in proportion")


def cached_in(folder: Any, size: float) -> Remote | None:
    """Return the options for remote shards whose blocks *folder* caches, up to *size* bytes; None for no cache."""
    if folder is None or size == 0:
        return None
    return Remote(cache_dir=folder, cache_bytes=int(size) if size > 0 else None)


def cached_tarfile_to_samples(
    handler: Handler = reraise_exception, cache_size: float = -1, cache_dir: Any = None, **options: Any
) -> tariterators.TarSamples:
    """Return ``tarfile_to_samples`` with the cache of ``WebDataset``; there is none without *cache_dir*.

    *options* are those of ``tarfile_to_samples``; *verbose*, *always*, *validator* and *url_to_name* have no effect.
    """
    options = {name: each for name, each in options.items() if name not in WITHOUT_EFFECT}
    return tariterators.TarSamples(handler, remote=cached_in(cache_dir, cache_size), **options)


maybe_cached_tarfile_to_samples = cached_tarfile_to_samples


def cached_tarfile_samples(src: Iterable[Any], *args: Any, **options: Any) -> Any:
    """Yield the samples of the shards *src*: ``cached_tarfile_to_samples`` as a function."""
    return cached_tarfile_to_samples(*args, **options)(src)


def cached_url_opener(
    data: Iterable[Any],
    handler: Handler = reraise_exception,
    cache_size: float = -1,
    cache_dir: Any = None,
    **without_effect: Any,
) -> Any:
    """Add streams to shards like ``url_opener``, with the cache of ``cached_tarfile_to_samples``."""
    if unknown := without_effect.keys() - WITHOUT_EFFECT:
        raise TypeError(f"cached_url_opener takes no {' '.join(sorted(unknown))}")
    remote = cached_in(cache_dir, cache_size)
    return filters.map.run(data, lambda shard: {**shard, "stream": tariterators.stream_of(shard, remote)}, handler)


FileCache: Any = absent(
    "FileCache", "WebDataset(cache_dir=...) and tarshards.Remote(cache_dir=...) keep blocks on a disk"
)
LRUCleanup: Any = absent("LRUCleanup", "cache_size= bounds the folder of cache_dir=, and tarcache lists and empties it")
StreamingOpen: Any = absent("StreamingOpen", "url_opener adds streams to shards")
check_tar_format: Any = absent("check_tar_format", "tarcheck says whether a shard is whole")


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
