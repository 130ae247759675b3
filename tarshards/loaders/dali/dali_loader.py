"""A DALI pipeline over a dataset, in the dataset's order, with its ledger and an exact state."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from typing import Any, Literal

from nvidia.dali import Pipeline, backend, fn

from tarshards.epoch.permutations import hash_of
from tarshards.errors import DecodeError
from tarshards.loaders.dali.external_source import (
    BatchSource,
    EncodedSource,
    LastBatch,
    LoaderSource,
    open_dataset,
)
from tarshards.loaders.dali.image_check import BadImagePolicy, EncodedBatch, ImageCheck, ImageGuard
from tarshards.loaders.dali.outputs import ArrayLibrary, numpy_to_array, output_to_arrays
from tarshards.loaders.monitor import Stopwatch
from tarshards.loaders.passes import Pass, Passes, ResumableLoader
from tarshards.samples.ledger import Ledger, Tally

Device = Literal["gpu", "cpu"]


def dali_loader(
    urls_or_dataset: Any,
    pipeline: Callable[..., Any],
    *,
    batch_size: int | None = None,
    fields: str | Iterable[str] = ("jpg", "cls"),
    outputs: Sequence[str] | None = None,
    device: Device = "gpu",
    device_id: int | None = None,
    num_threads: int = 4,
    last_batch: LastBatch = "partial",
    on_bad: BadImagePolicy = "drop",
    check: ImageCheck = "header",
    arrays: ArrayLibrary = "torch",
) -> DaliLoader:
    """Run a DALI pipeline over a dataset: an iterable of ``{field: array, ..., "__key__": [...]}``.

    *pipeline* is a function that takes one DataNode for each of *fields* and returns one for each name in *outputs*
    (default: the fields)::

        dali_loader(urls, lambda jpg, cls: (fn.decoders.image(jpg, device="mixed"), cls), batch_size=256)

    or a ``pipeline_def`` whose only argument is the source, which it passes to ``fn.external_source(source,
    num_outputs=..., no_copy=True)``. The seed of the pipeline is derived from that of the dataset.

    *urls_or_dataset* is a shard expression or a ``ShardDataset`` (``Stream``). The loader follows its order, tail, rank
    and ledger; its ops run before the pipeline. It may also be a loader whose batches have *fields*, such as a
    ``RemoteLoader``: batches, order, ledger and state are then those of this loader.

    *device* "gpu" uses the GPU *device_id* (default: torch's current one), "cpu" uses none; RuntimeError is raised if
    there is no GPU. *last_batch* applies to the last batch of this rank: "partial" keeps it short, "pad" repeats its
    last sample, "drop" leaves it out.

    A bad image raises DecodeError. If the ledger accepts the error, *on_bad* "drop" leaves the sample out and "mask"
    replaces the image by a black one. With "mask" or "pad" each batch has an array ``valid``, False for masked and
    repeated samples. *check* "header" examines images by their headers before DALI sees them, "full" decodes them. If
    DALI itself fails on an image, the loader finds it by running the batch again in parts, and continues without it. A
    batch without samples is an empty dict.

    *arrays* are torch's, numpy's or cupy's: one per output, or a list of them if the samples differ in shape. Those
    of cupy are on the GPU.

    ``state_dict`` does not include the pipeline's random state: a resumed run draws new random numbers.
    """
    if arrays not in ("torch", "numpy", "cupy"):
        raise ValueError(f'arrays is "torch", "numpy" or "cupy", not {arrays!r}')
    guard = ImageGuard(fields, on_bad=on_bad, check=check)
    source: EncodedSource
    if isinstance(urls_or_dataset, ResumableLoader):
        if batch_size is not None or last_batch != "partial":
            raise TypeError("a loader makes its batches itself: batch_size= and last_batch= are for datasets")
        source = LoaderSource(urls_or_dataset, guard)
    elif batch_size is None:
        raise TypeError("a dataset requires batch_size=")
    else:
        source = BatchSource(open_dataset(urls_or_dataset, guard), batch_size, guard, last_batch)
    size, ledger = source.passes.maker.size, source.passes.stream.ledger
    options = {"batch_size": size, "num_threads": num_threads, "device_id": find_device(device, device_id)}
    names = list(guard.names if outputs is None else outputs)

    def build(feed: PipelineInput, seed: int) -> Pipeline:
        return build_pipeline(pipeline, feed, len(guard.fields), names, seed=seed, **options)

    return DaliLoader(source, PipelineRunner(build, guard, ledger), names, arrays)


class DaliLoader(ResumableLoader[dict[str, Any]]):
    """An iterable of dicts of arrays, one epoch per iteration; see ``dali_loader``."""

    def __init__(self, source: EncodedSource, runner: PipelineRunner, outputs: Sequence[str], library: ArrayLibrary):
        self.source = source
        self.passes: Passes = source.passes
        self._runner, self._outputs, self._library = runner, outputs, library

    def make_batches(self, this: Pass) -> Generator[dict[str, Any], None, None]:
        begun = this.state.get("position", this.passed) if this.state else 0
        seeds = (getattr(self.passes.stream.source, "seed", 0), this.epoch, begun, this.world.rank)
        with self.source.counted(this), closing(self.source.batches(this)) as batches:
            stopwatch = Stopwatch()
            for batch, pipe, outputs in self._runner.run(batches, seeds, this):
                self.monitor.add(*stopwatch.take())
                self.monitor.samples += len(batch.keys)
                if this.plan is not None:
                    self.source.arrive(batch)
                yield {} if outputs is None else self._named(batch, pipe, outputs)
                if this.plan is None:  # each batch waits for the next
                    self.source.arrive(batch)
                stopwatch.begin()

    def _named(self, batch: EncodedBatch, pipe: Pipeline, outputs: Sequence[Any]) -> dict[str, Any]:
        named: dict[str, Any] = {
            name: output_to_arrays(output, self._library, share=pipe.exec_dynamic)
            for name, output in zip(self._outputs, outputs, strict=True)
        }
        named["__key__"] = batch.keys
        if self.source.has_valid:
            named["valid"] = numpy_to_array(batch.valid, self._library)
        return named


class PipelineInput:
    """The callable that a pipeline calls for its next batch; *in_flight* has the batches not yet delivered."""

    def __init__(self, batches: Iterator[EncodedBatch]):
        self.batches = batches
        self.in_flight: deque[EncodedBatch] = deque()
        self.error: Exception | None = None

    def __call__(self) -> tuple[Any, ...]:
        try:
            for batch in self.batches:
                self.in_flight.append(batch)
                if batch.real:
                    return tuple(batch.inputs())
        except Exception as error:  # raised later, after the batches before it are delivered
            self.error = error
        raise StopIteration


class PipelineRunner:
    """Feeds batches to a pipeline; builds a new pipeline after a sample has ended the last one."""

    def __init__(self, build: Callable[[PipelineInput, int], Pipeline], guard: ImageGuard, ledger: Ledger):
        self._build_pipeline, self._guard, self._ledger = build, guard, ledger
        self._idle: tuple[PipelineInput, Pipeline] | None = None
        self._builds = 0

    def run(
        self, batches: Iterator[EncodedBatch], seeds: Sequence[int], this: Pass
    ) -> Iterator[tuple[EncodedBatch, Pipeline, Any]]:
        """Yield each batch with its pipeline and the pipeline's outputs, None for a batch without samples.

        The seed of a pipeline that is built here is derived from *seeds*. The samples are those of *this* pass.
        """
        feed, pipe = self._take(seeds)
        feed.batches = batches
        while True:
            try:
                outputs = pipe.run()
            except StopIteration:
                break
            except Exception as error:
                again, late = self._without_bad(list(feed.in_flight), error, seeds, this), feed.error
                feed, pipe = self._take(seeds)
                feed.batches, feed.error = chain(again, batches), late
                continue
            while not feed.in_flight[0].real:
                yield feed.in_flight.popleft(), pipe, None
            yield feed.in_flight.popleft(), pipe, outputs
        while feed.in_flight:
            yield feed.in_flight.popleft(), pipe, None
        if feed.error is not None:
            raise feed.error
        pipe.reset()
        self._idle = feed, pipe

    def _take(self, seeds: Sequence[int]) -> tuple[PipelineInput, Pipeline]:
        """Return the idle pipeline, or build one, which on a GPU takes as long as many batches."""
        taken, self._idle = self._idle, None
        if taken is None:
            self._builds += 1
            feed = PipelineInput(iter(()))
            taken = feed, self._build_pipeline(feed, int(hash_of(*seeds, self._builds)[0] >> 33))
        return taken

    def _without_bad(
        self, in_flight: list[EncodedBatch], error: Exception, seeds: Sequence[int], this: Pass
    ) -> list[EncodedBatch]:
        """Return the batches of a failed pipeline without the samples it failed on; raise *error* if no sample did it.

        DALI does not always say which sample failed, so the first batch is run again in ever smaller parts. The first
        part has the samples that the CPU decodes: mostly the others are the bad ones, and few pipelines are built.
        """
        number = next(i for i, batch in enumerate(in_flight) if batch.real)
        batch = in_flight[number]
        is_decodable = [self._guard.is_decodable(batch, row) for row in range(batch.real)]
        order = sorted(range(batch.real), key=is_decodable.__getitem__, reverse=True)
        found = self._find_bad(batch.take(order), seeds, split=sum(is_decodable) % batch.real)
        bad = {order[i]: reason for i, reason in found.items()}
        if not bad or len(bad) == batch.real > 1:
            raise error
        left_out = set()
        for row in sorted(bad):
            self._ledger.fail(DecodeError(bad[row], url=batch.urls[row], key=batch.keys[row]))
            if self._guard.on_bad == "mask" and batch.sound[row]:  # a black image that also fails is left out
                self._guard.mask(batch, row)
            else:
                left_out.add(row)
                this.count(self._ledger, Tally(failed=1, in_flight=-1))
        kept = [row for row in range(batch.real) if row not in left_out]
        in_flight[number] = batch.take(kept, fill=len(batch.keys) - batch.real)
        return in_flight

    def _find_bad(
        self, batch: EncodedBatch, seeds: Sequence[int], reason: str | None = None, *, split: int = 0
    ) -> dict[int, str]:
        """Return the rows of a batch that a pipeline fails on, each with DALI's message.

        Some of the samples are bad, or none by itself. *reason* is why they fail, if they were run together. They are
        run in two parts: *split* samples, or half of them, and the rest.
        """
        if batch.real == 1:
            reason = reason or self._failure_of(batch, seeds)
            return {0: reason} if reason else {}
        split = split or batch.real // 2
        bad: dict[int, str] = {}
        for begun, end in (0, split), (split, batch.real):
            part = batch.take(range(begun, end))
            is_last_hope = begun and not bad  # then its own parts are run at once
            reason = None if is_last_hope else self._failure_of(part, seeds)
            if reason or is_last_hope:
                bad |= {begun + i: why for i, why in self._find_bad(part, seeds, reason).items()}
        return bad

    def _failure_of(self, batch: EncodedBatch, seeds: Sequence[int]) -> str | None:
        """Return DALI's message if a pipeline fails on *batch*; one that does not fail is idle afterwards.

        The error itself would keep the pipeline, and its memory of the GPU.
        """
        feed, pipe = self._take(seeds)
        feed.batches = iter([batch])
        try:
            pipe.run()
        except Exception as error:
            return shorten_message(error)
        with suppress(StopIteration):
            pipe.run()
        pipe.reset()
        feed.in_flight.clear()
        self._idle = feed, pipe
        return None


def build_pipeline(
    pipeline: Callable[..., Any], source: Any, num_outputs: int, names: list[str], **options: Any
) -> Pipeline:
    """Build the pipeline of a function of DataNodes or of a ``pipeline_def``, with *source* as its input."""
    if getattr(pipeline, "_is_pipeline_def", False):
        pipe = pipeline(source, **options)
    else:
        pipe = Pipeline(**options)
        with pipe:
            results = pipeline(*fn.external_source(source, num_outputs=num_outputs, no_copy=True))
            pipe.set_outputs(*(results if isinstance(results, (tuple, list)) else [results]))
    pipe.build()
    if pipe.num_outputs != len(names):
        raise ValueError(f"the pipeline has {pipe.num_outputs} outputs for the names {' '.join(names)}; set outputs=")
    return pipe


def find_device(device: Device, device_id: int | None) -> int | None:
    """Return the number of the GPU for a pipeline, None for the CPU; raise RuntimeError if there is no GPU."""
    if device == "cpu":
        if device_id is not None:
            raise ValueError('device_id= names a GPU, but device="cpu" uses none')
        return None
    if device != "gpu":
        raise ValueError(f'device is "gpu" or "cpu", not {device!r}')
    cuda: Any = backend  # its type stubs are incomplete
    if not cuda.GetCUDADeviceCount():
        raise RuntimeError('no NVIDIA GPU found; device="cpu" runs the pipeline without one')
    torch = sys.modules.get("torch")
    if device_id is None and torch is not None and torch.cuda.is_available():
        return torch.cuda.current_device()
    return device_id or 0


def shorten_message(error: Exception) -> str:
    """Return the essential line of one of DALI's long messages.

    >>> shorten_message(RuntimeError("Critical error in pipeline:\\nencountered:\\n\\nFailed to decode\\nCurrent ..."))
    'Failed to decode'
    """
    text = str(error).partition("encountered:")[2] or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
