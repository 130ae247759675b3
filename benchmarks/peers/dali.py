"""NVIDIA DALI on the CPU, plain tars: its own reader of webdataset shards, by the indexes of its wds2idx; threads."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn
from sets import FIELDS, Data
from wds2idx import IndexCreator

PACKAGES = ("nvidia-dali-cuda120==2.4.0", "numpy==2.4.6")
SYSTEM = ()
OWN = False
THREADS = ("stream", "arrays", "decode", "crop", "resume", "restore")
DECODERS = ("libjpeg-turbo of its own",)
CANNOT = {"random": "its readers deliver epochs; no access by number", "write": "reads only"}
BATCH, POOL, CROP, AHEAD = 64, 1000, 224, 2  # AHEAD: batches made ahead, its default


def indexes(data: Data) -> list[str]:
    return [str(data.folder / f"{Path(url).stem}.idx") for url in data.urls]


def index(data: Data) -> None:
    for url, path in zip(data.urls, indexes(data)):
        with IndexCreator(url, path, verbose=False) as creator:
            creator.create_index()


class Loader:
    """The epochs of a pipeline over its reader; the padding of the last batch is cut off.

    It can stop after any batch and resume from a checkpoint made there. `Pipeline.run` would start batches of the next
    epoch at the end of one, and decode them while no clock runs; here an epoch begins and ends with an empty queue.
    """

    def __init__(self, pipe: Pipeline, share: tuple[int, int], deliver: Callable[..., Any], taken: int = 0) -> None:
        self.pipe, self.deliver, self.taken, self.begun, self.ahead = pipe, deliver, taken, False, 0
        samples = pipe.reader_meta("shards")["epoch_size"]
        rank, ranks = share
        self.count = samples * (rank + 1) // ranks - samples * rank // ranks
        longest = (samples + ranks - 1) // ranks  # all ranks' shares are padded to this length
        self.steps = (longest + pipe.max_batch_size - 1) // pipe.max_batch_size

    def __iter__(self) -> Iterator[Any]:
        while self.taken < self.steps:
            while self.ahead < min(AHEAD, self.steps - self.taken):
                self.pipe.schedule_run()  # the first time it fills the queue
                self.ahead, self.begun = self.ahead + (1 if self.begun else AHEAD), True
            outputs = self.pipe.outputs()
            self.ahead -= 1
            real = self.count - self.taken * self.pipe.max_batch_size
            self.taken += 1
            if real > 0:
                yield self.deliver(min(real, self.pipe.max_batch_size), *outputs)
        self.taken = 0

    def state(self) -> bytes:
        return pickle.dumps((self.taken, self.pipe.checkpoint()))


def load(
    data: Data,
    graph: Callable[[Any], Any],
    deliver: Callable[..., Any],
    threads: int,
    *,
    shuffled: bool,
    size: int = BATCH,
    state: bytes | None = None,
    **options: Any,
) -> Loader:
    taken, checkpoint = pickle.loads(state) if state else (0, None)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    pipe = Pipeline(size, threads, None, seed=0, checkpoint=checkpoint, prefetch_queue_depth=AHEAD, **options)
    with pipe:
        *payloads, label = fn.readers.webdataset(
            paths=list(data.urls),
            index_paths=[path for path in indexes(data) if Path(path).exists()],
            ext=[*FIELDS[data.kind], "cls"],
            missing_component_behavior="error",
            random_shuffle=shuffled,
            initial_fill=POOL,
            shard_id=rank,
            num_shards=ranks,
            stick_to_shard=True,
            pad_last_batch=True,
            name="shards",
        )
        pipe.set_outputs(*map(graph, payloads), label)
    pipe.build()
    return Loader(pipe, (rank, ranks), deliver, taken)


def as_bytes(count: int, *outputs: Any) -> tuple[list[np.ndarray], ...]:
    """Arrays of bytes, one per field of each sample, in DALI's memory."""
    return tuple([np.asarray(each.at(i)) for i in range(count)] for each in outputs)


def as_arrays(count: int, payloads: Any, labels: Any) -> tuple[np.ndarray, list[int]]:
    """An array in DALI's memory, and the labels, which DALI cannot decode."""
    return np.asarray(payloads.as_tensor())[:count], [int(np.asarray(labels.at(i)).tobytes()) for i in range(count)]


def stream(data: Data, *, shuffled: bool, workers: int) -> Iterable[Any]:
    if "://" in data.urls[0]:
        raise NotImplementedError("its reader opens local files alone")
    return load(data, lambda payload: payload, as_bytes, workers, shuffled=shuffled)


def arrays(data: Data, *, size: int, workers: int) -> Iterable[Any]:
    def graph(payload: Any) -> Any:
        if data.kind == "otto":
            return fn.decoders.numpy(payload)
        return fn.reshape(payload, shape=[32, 32, 3])

    return load(data, graph, as_arrays, workers, shuffled=True, size=size)


def decode(data: Data, *, workers: int) -> Iterable[Any]:
    return load(data, fn.decoders.image, as_arrays, workers, shuffled=False)


def crop(data: Data, *, workers: int) -> Iterable[Any]:
    def graph(payload: Any) -> Any:
        images = fn.decoders.image_random_crop(payload, random_area=[0.08, 1], random_aspect_ratio=[3 / 4, 4 / 3])
        return fn.flip(fn.resize(images, size=[CROP, CROP]), horizontal=fn.random.coin_flip())

    return load(data, graph, as_arrays, workers, shuffled=True)


def start(data: Data, *, workers: int) -> tuple[Loader, Callable[[], bytes]]:
    loader = load(data, lambda payload: payload, as_bytes, workers, shuffled=True, enable_checkpointing=True)
    return loader, loader.state


def restore(data: Data, state: bytes, *, workers: int) -> Iterator[Any]:
    options = {"state": state, "enable_checkpointing": True}
    return iter(load(data, lambda payload: payload, as_bytes, workers, shuffled=True, **options))


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    *payloads, labels = item
    if task in ("stream", "resume"):
        parts = ([part.tobytes() for part in payload] for payload in payloads)
        yield from zip(map(b"".join, zip(*parts)), (int(label.tobytes()) for label in labels))
    else:
        yield from zip(payloads[0], map(int, labels))


def size(task: str, item: Any) -> int:
    return len(item[-1])
