"""Batches out of a DALI pipeline, in the order of a dataset, with its ledger and a state that is exact."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Literal

from nvidia.dali import Pipeline, backend, fn

from tarshards.epoch.permutations import key_of
from tarshards.errors import DecodeError
from tarshards.loaders.base import Pass, ResumableLoader
from tarshards.loaders.dali.guard import BadImage, Check, Guard, Row, describe
from tarshards.loaders.dali.sources import Batch, BatchSource, LastBatch, guarded
from tarshards.loaders.dali.tensors import Arrays, batch_of
from tarshards.samples.ledger import Ledger

Device = Literal["gpu", "cpu"]


class Feed:
    """What a pipeline calls for its next batch; *flying* are those that it was given and has not yet delivered."""

    def __init__(self, batches: Iterator[Batch]):
        self.batches = batches
        self.flying: deque[Batch] = deque()
        self.error: Exception | None = None

    def __call__(self) -> tuple[Any, ...]:
        try:
            for batch in self.batches:
                self.flying.append(batch)
                if batch.rows:
                    return tuple(batch.columns())
        except Exception as error:  # to be raised after the batches before it are delivered
            self.error = error
        raise StopIteration


class Engine:
    """A pipeline that is fed batches, and built anew where a sample has ended it."""

    def __init__(self, build: Callable[[Feed, int], Pipeline], guard: Guard, ledger: Ledger):
        self._build_pipeline, self._guard, self._ledger = build, guard, ledger
        self._idle: tuple[Feed, Pipeline] | None = None
        self._builds = 0

    def run(self, batches: Iterator[Batch], place: Sequence[int]) -> Iterator[tuple[Batch, Pipeline, Any]]:
        """Yield the batches with their pipeline and its outputs; None where nothing is left of a batch.

        *place* is where in the dataset this begins: a pipeline that is built draws from another seed at each.
        """
        (feed, pipe), self._idle = self._idle or self._build(place), None
        feed.batches = batches
        while True:
            try:
                outputs = pipe.run()
            except StopIteration:
                break
            except Exception as error:
                again, late = self._without_bad(list(feed.flying), error, place), feed.error
                feed, pipe = self._build(place)
                feed.batches, feed.error = chain(again, batches), late
                continue
            while not feed.flying[0].rows:
                yield feed.flying.popleft(), pipe, None
            yield feed.flying.popleft(), pipe, outputs
        while feed.flying:
            yield feed.flying.popleft(), pipe, None
        if feed.error is not None:
            raise feed.error
        pipe.reset()
        self._idle = feed, pipe

    def _build(self, place: Sequence[int]) -> tuple[Feed, Pipeline]:
        self._builds += 1
        feed = Feed(iter(()))
        return feed, self._build_pipeline(feed, int(key_of(*place, self._builds)[0] >> 33))

    def _without_bad(self, flying: list[Batch], error: Exception, place: Sequence[int]) -> list[Batch]:
        """Return the batches that a broken pipeline had, without the samples that broke it; raise what is no sample's.

        DALI does not always say which sample it was: the first of the batches is run again, in ever smaller parts.
        """
        number = next(i for i, batch in enumerate(flying) if batch.rows)
        rows, real = flying[number].rows, flying[number].real
        bad = self._find_bad(rows[:real], place)
        if not bad or len(bad) == real > 1:
            raise error
        kept = []
        for i, row in enumerate(rows[:real]):
            if i in bad:
                self._ledger(DecodeError(bad[i], url=row.sample.get("__url__"), key=row.sample.get("__key__")))
            if i not in bad:
                kept.append(row)
            elif self._guard.on_bad == "mask" and row.valid:  # a blank image that fails as well is left out
                kept.append(self._guard.mask(row))
        fill = kept[-1:] * (len(rows) - real)
        flying[number] = Batch(kept + fill, len(kept))
        return flying

    def _find_bad(self, rows: list[Row], place: Sequence[int]) -> dict[int, str]:
        """Return the places of the rows that a pipeline does not survive, and what it says of them."""
        feed, pipe = self._build(place)
        feed.batches = iter([Batch(rows, len(rows))])
        try:
            pipe.run()
        except Exception as error:
            if len(rows) == 1:
                return {0: describe(error)}
            half = len(rows) // 2
            after = self._find_bad(rows[half:], place)
            return self._find_bad(rows[:half], place) | {half + i: reason for i, reason in after.items()}
        return {}


class DaliLoader(ResumableLoader):
    """An iterable of dicts of arrays, an epoch an iteration; see ``dali_loader``."""

    def __init__(self, source: BatchSource, engine: Engine, outputs: Sequence[str], arrays: Arrays):
        self.source, self.passes = source, source.passes
        self._engine, self._outputs, self._arrays = engine, outputs, arrays

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._run(self.passes.begin())

    def _run(self, this: Pass) -> Iterator[dict[str, Any]]:
        begun = this.state.get("position", this.passed) if this.state else 0
        place = (getattr(self.passes.stream._source, "seed", 0), this.epoch, begun, this.world.rank)
        with closing(self.source.batches(this)) as batches:
            for batch, pipe, outputs in self._engine.run(batches, place):
                this.delivered += 1
                yield {} if outputs is None else self._named(batch, pipe, outputs)
        self.passes.end(this)

    def _named(self, batch: Batch, pipe: Pipeline, outputs: Sequence[Any]) -> dict[str, Any]:
        made = batch_of(self._outputs, outputs, self._arrays, share=pipe.exec_dynamic)
        made["__key__"] = [row.sample.get("__key__") for row in batch.rows]
        if self.source.tells_valid:
            made |= batch_of(["valid"], [batch.valid], self._arrays, share=True)
        return made


def dali_loader(
    urls_or_dataset: Any,
    pipeline: Callable[..., Any],
    *,
    batch_size: int,
    fields: str | Iterable[str] = ("jpg", "cls"),
    outputs: Sequence[str] | None = None,
    device: Device = "gpu",
    device_id: int | None = None,
    num_threads: int = 4,
    last_batch: LastBatch = "partial",
    on_bad: BadImage = "drop",
    check: Check = "header",
    arrays: Arrays = "torch",
) -> DaliLoader:
    """Run a DALI pipeline over a dataset: an iterable of ``{field: array, ..., "__key__": [...]}``.

    *pipeline* is a function of DataNodes, one for each of *fields*, that returns as many as *outputs* names (by default
    the fields)::

        dali_loader(urls, lambda jpg, cls: (fn.decoders.image(jpg, device="mixed"), cls), batch_size=256)

    or a ``pipeline_def`` whose one argument is the source, which it hands to ``fn.external_source(source,
    num_outputs=...)``. Its seed follows from the dataset's.

    *urls_or_dataset* is a shard expression or a ``ShardDataset`` (``Stream``), whose order, tail, rank and ledger it
    follows; its ops run first. *device* "gpu" is that of *device_id*, by default torch's current one, and "cpu" runs
    without any. *last_batch* is about the last batch of this rank: shorter ("partial"), filled up with its last sample
    ("pad") or left out ("drop"). Bad images raise DecodeError, or where the ledger takes them are left out of their
    batch, or replaced by black ones (*on_bad* "mask"); a tensor ``valid`` says where something was replaced or filled
    up. *check* is what the guard before the decoder looks at: see ``Guard``. What it lets through and DALI
    does not is found by running the batch again in parts, and the pipeline goes on without it. A batch of which nothing
    is left is an empty dict. *arrays* are torch's, numpy's or cupy's; images of several sizes are a list of them.

    The state of what is random in the pipeline is no part of ``state_dict``: a resumed run draws anew.
    """
    if arrays not in ("torch", "numpy", "cupy"):
        raise ValueError(f'arrays is "torch", "numpy" or "cupy", not {arrays!r}')
    dataset, guard = guarded(urls_or_dataset, fields, on_bad, check)
    source = BatchSource(dataset, batch_size, guard, last_batch)
    options = {"batch_size": batch_size, "num_threads": num_threads, "device_id": find_device(device, device_id)}
    names = list(guard.names if outputs is None else outputs)

    def build(feed: Feed, seed: int) -> Pipeline:
        return build_pipeline(pipeline, feed, len(guard.fields), names, seed=seed, **options)

    return DaliLoader(source, Engine(build, guard, dataset.ledger), names, arrays)


def build_pipeline(
    pipeline: Callable[..., Any], source: Any, num_outputs: int, names: list[str], **options: Any
) -> Pipeline:
    """Return the pipeline that a function of DataNodes describes, or a ``pipeline_def`` makes of *source*."""
    if getattr(pipeline, "_is_pipeline_def", False):
        pipe = pipeline(source, **options)
    else:
        pipe = Pipeline(**options)
        with pipe:
            results = pipeline(*fn.external_source(source, num_outputs=num_outputs))
            pipe.set_outputs(*(results if isinstance(results, (tuple, list)) else [results]))
    pipe.build()
    if pipe.num_outputs != len(names):
        raise ValueError(f"the pipeline has {pipe.num_outputs} outputs, and there are the names {' '.join(names)}")
    return pipe


def find_device(device: Device, device_id: int | None) -> int | None:
    """Return the number of the GPU for a pipeline, None for the CPU; raise RuntimeError where there is none."""
    if device == "cpu":
        if device_id is not None:
            raise ValueError('device_id= is of a GPU, and device="cpu" uses none')
        return None
    if device != "gpu":
        raise ValueError(f'device is "gpu" or "cpu", not {device!r}')
    cuda: Any = backend  # of which its stubs do not tell all
    if not cuda.GetCUDADeviceCount():
        raise RuntimeError('there is no NVIDIA GPU here; device="cpu" runs the pipeline without')
    torch = sys.modules.get("torch")
    if device_id is None and torch is not None and torch.cuda.is_available():
        return torch.cuda.current_device()
    return device_id or 0
