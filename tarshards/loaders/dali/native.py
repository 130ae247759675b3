"""DALI's own reader of tar shards, kept from losing samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import finalize

import numpy as np
from nvidia.dali import Pipeline, fn, types

from tarshards.epoch.world import World
from tarshards.errors import ShardIndexError, UrlError
from tarshards.index.build import build_index
from tarshards.index.exports import pack_dali
from tarshards.index.sidecar import MISSING, Index
from tarshards.loaders.dali.guard import DECODED
from tarshards.loaders.dali.loader import Device, find_device
from tarshards.loaders.dali.sources import LastBatch
from tarshards.loaders.dali.tensors import Arrays, batch_of
from tarshards.samples.codecs import decode_field
from tarshards.storage.expressions import expand_urls
from tarshards.storage.local import local_path
from tarshards.storage.opening import room_of
from tarshards.storage.streams import public

READER = "shards"
NUMBERS = DECODED - {"npy"}  # which the reader gives as their digits


class NativeLoader:
    """An iterable of dicts of arrays, an epoch an iteration; see ``native_loader``."""

    def __init__(
        self,
        build: Callable[[int, int], Pipeline],
        samples: int,
        world: World,
        batch_size: int,
        outputs: Sequence[str],
        last_batch: LastBatch,
        arrays: Arrays,
    ):
        self.samples, self.world, self.batch_size = samples, world, batch_size
        self._build, self._outputs, self._last_batch, self._arrays = build, outputs, last_batch, arrays
        self._epoch = 0
        self._idle: Pipeline | None = None

    def _share(self, epoch: int) -> int:
        """How many samples this rank has in an epoch: the reader goes on to the next rank's part after each."""
        part, parts = (self.world.rank + epoch) % self.world.world_size, self.world.world_size
        return self.samples * (part + 1) // parts - self.samples * part // parts

    def __len__(self) -> int:
        """The batches that the next iteration delivers to this rank."""
        whole, left = divmod(self._share(self._epoch), self.batch_size)
        return whole + (left > 0 and self._last_batch != "drop")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._run(epoch)

    def _run(self, epoch: int) -> Iterator[dict[str, Any]]:
        left, size, parts = self._share(epoch), self.batch_size, self.world.world_size
        if not self.samples:
            return
        pipe, self._idle = self._idle or self._build(epoch, (self.world.rank + epoch) % parts), None
        longest = (self.samples + parts - 1) // parts  # with the padding, all parts are
        for _ in range(0, longest, size):
            outputs = pipe.run()
            real = min(left, size)
            left -= real
            if real == size or (real and self._last_batch != "drop"):
                yield self._named(pipe, outputs, real)
        self._idle = pipe

    def _named(self, pipe: Pipeline, outputs: Sequence[Any], real: int) -> dict[str, Any]:
        kept = self.batch_size if self._last_batch == "pad" else real
        parsed = [_parse(name, output) for name, output in zip(self._outputs, outputs)]
        batch = batch_of(self._outputs, parsed, self._arrays, share=pipe.exec_dynamic)
        batch = {name: value[:kept] for name, value in batch.items()}
        if self._last_batch == "pad":
            valid = np.arange(self.batch_size) < real
            batch |= batch_of(["valid"], [valid], self._arrays, share=True)
        return batch


def native_loader(
    urls: Any,
    pipeline: Callable[..., Any],
    *,
    batch_size: int,
    fields: str | Iterable[str] = ("jpg", "cls"),
    outputs: Sequence[str] | None = None,
    shuffle: int = 0,
    seed: int = 0,
    world: World | None = None,
    device: Device = "gpu",
    device_id: int | None = None,
    num_threads: int = 4,
    last_batch: LastBatch = "partial",
    arrays: Arrays = "torch",
) -> NativeLoader:
    """Run a DALI pipeline over ``fn.readers.webdataset``: an iterable of ``{field: array}``.

    For local, uncompressed shards whose images are all known to be good: one bad image ends it, there is no ledger, and
    no state. *pipeline*, *fields*, *outputs*, *device*, *num_threads*, *last_batch* and *arrays* are those of
    ``dali_loader``, but the pipeline is a function of DataNodes, which are bytes; numbers that it returns as they came
    are parsed after it. *shuffle* is the reader's buffer, in samples. Each rank (*world*, by default as detected) reads
    every sample of its part once an epoch, and goes on to the next rank's part in the next one: what the reader repeats
    to make all parts equal is cut off.

    The reader gets an index of ours, the shard's sidecar or one made here. Raises ShardIndexError for names with white
    space, which it would misread, and SampleError for shards that do not form samples.
    """
    names = fields.split() if isinstance(fields, str) else list(fields)
    shards = expand_urls(urls)
    for url in shards:
        if room_of(url) != "local":
            raise UrlError("DALI's reader opens local files alone; dali_loader reads the others", url=public(url))
    indexes = {url: _index(url) for url in shards}
    full = [url for url in shards if len(indexes[url])]
    texts = [pack_dali(indexes[url], url).encode("utf-8", "surrogateescape") for url in full]
    folder = TemporaryDirectory(prefix="tarshards-dali-")
    paths = [str(Path(folder.name) / f"{number}.idx") for number in range(len(full))]
    for path, text in zip(paths, texts):
        Path(path).write_bytes(text)
    world = world or World.detect()
    options = {"batch_size": batch_size, "num_threads": num_threads, "device_id": find_device(device, device_id)}

    def build(epoch: int, part: int) -> Pipeline:
        pipe = Pipeline(seed=seed + epoch, **options)
        with pipe:
            nodes: Any = fn.readers.webdataset(
                paths=[local_path(url) for url in full],
                index_paths=paths,
                ext=names,
                missing_component_behavior="error",
                shard_id=part,
                num_shards=world.world_size,
                pad_last_batch=True,
                random_shuffle=shuffle > 0,
                initial_fill=max(shuffle, 1),
                name=READER,
            )
            results = pipeline(*(nodes if len(names) > 1 else [nodes]))
            pipe.set_outputs(*(results if isinstance(results, (tuple, list)) else [results]))
        pipe.build()
        return pipe

    samples = sum(map(len, indexes.values()))
    loader = NativeLoader(build, samples, world, batch_size, list(outputs or names), last_batch, arrays)
    finalize(loader, folder.cleanup)
    return loader


def _index(url: str) -> Index:
    try:
        return Index.load(url)
    except ShardIndexError as error:
        if error.reason != MISSING:
            raise
        return build_index(url)


def _parse(name: str, output: Any) -> Any:
    """Turn the digits of numbers into numbers."""
    if name.rpartition(".")[2] not in NUMBERS or output.dtype != types.DALIDataType.UINT8 or output.ndim() != 1:
        return output
    return np.array([decode_field(name, np.asarray(output[i]).tobytes()) for i in range(len(output))])
