"""Pipelines of stages, and the classes that have the stages as methods: ``WebDataset``, ``WebLoader`` and others.

It also serves as ``compat``, ``extradatasets``, ``mix`` and ``pytorch``.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch.utils.data import DataLoader, IterableDataset

from tarshards.epoch.world import World
from tarshards.loaders.torch.shard_dataset import SharedEpochCounter
from tarshards.samples.ledger import Ledger
from tarshards.storage.location import Location
from tarshards.stream import ops
from tarshards.stream.op import BoundOp
from tarshards.stream.sources import IterableSource, Progress
from tarshards.stream.stream import Stream
from tarshards.webdataset import filters, shardlists
from tarshards.webdataset.filters import FilterFunction
from tarshards.webdataset.handlers import Handler, PipelineStage, reraise_exception
from tarshards.webdataset.tariterators import Reached, TarSamples, is_indexed, tarfile_samples


class _StageSource(IterableSource):
    """The first stages of a pipeline, up to the one that reads samples, as the source of a stream."""

    ordered_by: ClassVar[tuple[str, ...]] = ("stages",)

    def __init__(self, stages: list[Any], ledger: Ledger):
        self.first, *self.others = stages
        super().__init__(self.first.run if isinstance(self.first, PipelineStage) else self.first)
        self.reads = isinstance(stages[-1], TarSamples)
        self.ledger = ledger if self.reads else None
        self.order = [" ".join(map(_words, stages))]

    @property
    def names(self) -> list[str]:  # type: ignore[override]
        """The shards, and whether they are read through an index."""
        urls = getattr(self.first, "urls", [])
        return [*urls, str(any(map(is_indexed, map(Location.of, urls[:1]))))]

    def iterate(self, progress: Progress) -> Iterator[Any]:
        if isinstance(self.first, shardlists.ResampledShards):
            self.first.epoch = progress.epoch - 1  # its own count restarts in every worker
        samples: Any = self._begin()
        for stage in self.others[: -1 if self.reads else None]:
            samples = bound(stage).run(samples, progress.epoch, 0, None)
        if not self.reads:
            return samples
        progress.loop = reached = Reached(progress.begun)  # type: ignore[assignment]
        return self.others[-1].read(samples, self.ledger, reached)


def _words(stage: Any) -> str:
    """Return the name and the numeric arguments of a stage, on which the order of the shards depends."""
    if isinstance(stage, FilterFunction):
        numbers = [repr(each) for each in (*stage.args, *stage.kw.values()) if isinstance(each, int | float | None)]
        return f"{stage.f.__name__}({', '.join(numbers)})"
    return f"{getattr(stage, '__name__', type(stage).__name__)}({getattr(stage, 'seed', '')})"


class _PipelineStream(Stream):
    """The stages of a pipeline as a stream: the first ones are its source, the others its ops."""

    def __init__(self, pipeline: DataPipeline):
        stages = [TarSamples() if stage is tarfile_samples else stage for stage in pipeline.pipeline]
        if not stages:
            raise ValueError("a pipeline without stages has no samples")
        readers = [number for number, stage in enumerate(stages) if isinstance(stage, TarSamples)]
        first = 1 + (readers[0] if readers else 0)
        self.source = _StageSource(stages[:first], pipeline.ledger)
        self.ops = tuple(bound(stage, pipeline.ledger) for stage in stages[first:])
        for op, limit, unlimited in (ops.repeat, pipeline.repetitions, 1), (ops.take, pipeline.nsamples, None):
            if limit != unlimited:
                self.ops += (BoundOp(op, (limit,), {}),)
        self.epochs, self._world = pipeline.epochs, World.detect()
        self._begin_state()

    def _begin(self) -> Progress:
        progress = super()._begin()
        progress.world.check_announced(progress.epoch)
        return progress

    def _is_resumable(self) -> bool:
        return self.source.reads and all(op.traits.resumable for op in self.ops)


def bound(stage: Any, ledger: Ledger | None = None) -> BoundOp:
    """Return a stage of any kind as an op."""
    if isinstance(stage, FilterFunction):
        return stage.bind(ledger)
    function = stage.run if isinstance(stage, PipelineStage) else stage
    if not callable(function):
        raise ValueError(f"a stage is a function of an iterator or a PipelineStage, not {stage!r:.100}")
    return BoundOp(ops.pipe, (function,), {})


class DataPipeline(IterableDataset, PipelineStage):
    """A sequence of stages: an iterable, then functions from an iterator to an iterator.

    Its *ledger* counts the outcome of the samples that a ``tarfile_to_samples`` stage reads, over all iterations and
    workers.
    """

    def __init__(self, *args: Any, **options: Any):
        stages = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
        self.pipeline: list[Any | Any] = [stage for stage in stages if stage is not None]
        self.repetitions: int | None = 1
        self.nsamples: int | None = None
        self.size: int | None = None
        self.ledger: Ledger = Ledger(max_errors=float("inf"))
        self.ledger.share()
        self.epochs: SharedEpochCounter = SharedEpochCounter()
        self._run: _PipelineStream | None = None
        self._ranks: World | None = None
        self._state: Mapping[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        is_spawning = get_spawning_popen() is not None
        return {**self.__dict__, "_run": None, "_ranks": World.detect() if is_spawning else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._ranks is not None and "WORLD_SIZE" not in os.environ:  # a spawned worker has no process group
            os.environ |= {"RANK": str(self._ranks.rank), "WORLD_SIZE": str(self._ranks.world_size)}

    def __iter__(self) -> Iterator[Any]:
        self._run = run = _PipelineStream(self)
        if self._state is not None:
            run.load_state_dict(self._state)
            self._state = None
        return iter(run)

    def run(self) -> Iterator[Any]:
        return iter(self)

    iterator: Any = run
    iterator1: Any = run

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError(f"a {type(self).__name__} has no length; with_length(n) sets one")
        return self.size

    def __bool__(self) -> bool:
        return True  # even without a length

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; later iterations count from there."""
        self.epochs.set(epoch)

    def close(self) -> None:
        """Close the stages that can be closed; leaving an iteration closes the files that it opened."""
        for stage in self.pipeline:
            if hasattr(stage, "close"):
                stage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def stage(self, i: int) -> Any:
        """Return the stage of this number."""
        return self.pipeline[i]

    def append(self, f: Any) -> None:
        """Add a stage."""
        self.pipeline.append(f)

    def compose(self, *args: Any) -> Self:
        """Return a pipeline with more stages."""
        other = copy.copy(self)
        other.__dict__ |= {"pipeline": [*self.pipeline, *args], "epochs": self.epochs.copy(), "_run": None}
        return other

    def with_length(self, n: int, silent: bool = False) -> Self:
        """Set ``len`` of this pipeline to *n*, and return the pipeline."""
        self.size = n
        return self

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Let this pipeline yield *nsamples*, or *nbatches*, an iteration, and return it; it starts over as needed."""
        return self.repeat(nbatches=max(nsamples, nbatches))

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """Let this pipeline start over *nepochs* times, or until *nbatches* have come, and return it."""
        self.repetitions, self.nsamples = (None if number < 0 else number for number in (nepochs, nbatches))
        self._run = None
        return self


class FluidInterface:
    """The stages as methods; each returns a new pipeline."""

    compose: Callable[..., Any]

    def shuffle(self, size: int, **kw: Any) -> Any:
        return self if size < 1 else self.compose(filters.shuffle(size, **kw))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _method(stages: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kw: Any) -> Any:
        return self.compose(stages(*args, **kw))

    method.__doc__ = stages.__doc__
    return method


METHODS = """
    associate batched decode extract_keys listed log_keys map map_dict map_tuple rename rename_keys rsample select slice
    to_tuple unbatched unlisted xdecode
"""
_STAGES = {name: getattr(filters, name) for name in METHODS.split()}
for _name, _stage in {**_STAGES, "mcached": filters.Cached, "lmdb_cached": filters.LMDBCached}.items():
    setattr(FluidInterface, _name, _method(_stage))


class WebDataset(DataPipeline, FluidInterface):
    """The samples of shards, with the stages as methods.

    *urls* is a shard expression, a list, or a stage that yields dicts with a ``url``. *shardshuffle*, True or the size
    of a buffer, shuffles the shards, in an order that is the same in all ranks and workers and differs between epochs;
    *seed* (0) determines it. With *resampled* shards are drawn with replacement, forever. *nodesplitter* and
    *workersplitter* divide the shards. *handler* decides about shards and samples that cannot be read. *cache_dir*
    keeps blocks of remote shards on a disk like ``tarshards.Remote``, up to *cache_size* bytes if positive, none if 0.
    With *empty_check* a worker without samples raises ValueError. *mode*, *detshuffle*, *url_to_name* and *verbose* are
    accepted and have no effect.

    The other arguments are those of 2019: *extensions* names the elements of tuples, as in ``to_tuple``; *decoder* is
    an imagespec, None for bytes, or by default "rgb" if *extensions* or *shuffle* is given; *transforms* has a
    function, or None, for each element; *shuffle* is the size of a buffer of samples, and shuffles the shards too.

    ``state_dict`` returns the position of the last iteration, and ``load_state_dict`` makes the next one continue
    there: shards with an index are entered in the middle, others are read again; if stages hold samples back, the
    iteration is repeated and its earlier samples skipped, which a user's own stages must allow. A stage that draws at
    random does not (TypeError).
    """

    def __init__(
        self,
        urls: Any,
        handler: Handler = reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,
        shardshuffle: bool | int | None = None,
        cache_size: float = -1,
        cache_dir: str | os.PathLike[str] | None = None,
        url_to_name: Any = shardlists.url_to_cache_name,
        detshuffle: bool = False,
        nodesplitter: Any = shardlists.single_node_only,
        workersplitter: Any = shardlists.split_by_worker,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = None,
        *,
        extensions: str | None = None,
        decoder: Any = ...,
        transforms: Iterable[Callable[[Any], Any] | None] = (),
        shuffle: int = 0,
    ):
        super().__init__()
        shardshuffle = bool(shuffle) if shardshuffle is None else shardshuffle
        if isinstance(urls, IterableDataset | PipelineStage):
            self.append(urls)
        elif resampled or mode == "resampled":
            self.append(shardlists.ResampledShards(urls, seed=seed or 0, deterministic=seed is not None))
        else:
            self.append(shardlists.SimpleShardList(urls))
            if shardshuffle:
                size = 100 if shardshuffle is True else shardshuffle
                self.append(filters.shuffle(size, initial=size, seed=seed))
            self.pipeline += [splitter for splitter in (nodesplitter, workersplitter) if splitter is not None]
        remote = shardlists.cached_in(cache_dir, cache_size)
        self.append(TarSamples(handler, select_files, rename_files, remote, empty_check))
        self.repetitions = None if repeat else 1
        transforms = list(transforms or ())
        if transforms and not extensions:
            raise ValueError("transforms= are functions of the elements that extensions= names")
        if decoder is ...:  # images were decoded by default where one of these arguments is given
            decoder = "rgb" if extensions or shuffle else None
        if shuffle:
            self.append(filters.shuffle(shuffle, seed=seed))
        if decoder is not None:
            self.append(filters.decode(decoder))
        if extensions:
            self.append(filters.to_tuple(*extensions.split()))
        if transforms:
            self.append(filters.map_tuple(*transforms))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the last iteration in this rank and worker."""
        if self._state is not None:
            return dict(self._state)
        self._check_resumable()
        return (self._run or _PipelineStream(self)).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue at *state*; raise StateError for the state of another pipeline."""
        self._check_resumable()
        if isinstance(state, Mapping) and isinstance(order := state.get("order"), list):
            state = {**state, "order": [str(words).replace(" local()", "") for words in order]}  # a cache was a stage
        _PipelineStream(self).load_state_dict(state)
        self._state = dict(state)

    def _check_resumable(self) -> None:
        for stage in filter(_is_random, self.pipeline):
            name = getattr(stage, "__name__", type(stage).__name__)
            raise TypeError(f"there is no state: what {name} does cannot be repeated; ShardLoader resumes anywhere")


def _is_random(stage: Any) -> bool:
    """Return whether a stage draws from a generator that is not in the state."""
    if isinstance(stage, FilterFunction):
        is_drawing = any(isinstance(value, random.Random) for value in (*stage.args, *stage.kw.values()))
        return is_drawing or stage.f is shardlists._resampled
    return getattr(stage, "deterministic", True) is False or isinstance(stage, RandomMix | filters.detshuffle)


class FluidWrapper(DataPipeline, FluidInterface):
    """Any iterable, with the stages as methods."""

    def __init__(self, initial: Any):
        super().__init__()
        self.append(initial)


class WebLoader(FluidWrapper):
    """A DataLoader, with the stages as methods."""

    def __init__(self, *args: Any, **kw: Any):
        super().__init__(DataLoader(*args, **kw))


class MockDataset(IterableDataset):
    """The same sample, *length* times."""

    def __init__(self, sample: Any, length: int):
        self.sample = sample
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter([self.sample] * self.length)


def with_epoch(dataset: Any, length: int) -> DataPipeline:
    """Return a pipeline over *dataset* of *length* samples an iteration."""
    return FluidWrapper(dataset).with_epoch(length)


def with_length(dataset: Any, length: int) -> DataPipeline:
    """Return a pipeline over *dataset* for which ``len`` is *length*."""
    return FluidWrapper(dataset).with_length(length)


check_empty = shardlists.non_empty


def _mixed(
    left: dict[Iterator[Any], float], turn: Callable[[dict[Iterator[Any], float]], list[Iterator[Any]]], longest: bool
) -> Iterator[Any]:
    """Yield a sample of each iterator in a *turn* of those *left*, until one ends or, if *longest*, until all have."""
    while left:
        for iterator in turn(left):
            for sample in iterator:
                yield sample
                break
            else:
                if not longest:
                    return
                del left[iterator]


def _drawn(left: dict[Iterator[Any], float]) -> list[Iterator[Any]]:
    weights = [*left.values()]
    return random.choices([*left], weights if any(weights) else None)


def random_samples(
    sources: Iterable[Iterator[Any]], probs: Iterable[float] | None = None, longest: bool = False
) -> Iterator[Any]:
    """Yield from iterators in random turns, with weights *probs*; until one ends or, if *longest*, until all have."""
    sources = list(sources)
    return _mixed(dict(zip(sources, [1.0] * len(sources) if probs is None else probs)), _drawn, longest)


def round_robin_shortest(*sources: Iterator[Any]) -> Iterator[Any]:
    """Yield from iterators by turns, until one ends."""
    return _mixed(dict.fromkeys(sources, 1.0), list, False)


def round_robin_longest(*sources: Iterator[Any]) -> Iterator[Any]:
    """Yield from iterators by turns, until all have ended."""
    return _mixed(dict.fromkeys(sources, 1.0), list, True)


class RandomMix(IterableDataset):
    """The datasets in random turns, with the weights *probs*; until the first ends or, if *longest*, until all have."""

    def __init__(self, datasets: Iterable[Any], probs: Iterable[float] | None = None, longest: bool = False):
        self.datasets: list[Any] = list(datasets)
        self.longest = longest
        self.probs: list[float] | None = None if probs is None else list(probs)
        if self.probs is not None and len(self.probs) != len(self.datasets):
            raise ValueError(f"probs has {len(self.probs)} weights for {len(self.datasets)} datasets")

    def __iter__(self) -> Iterator[Any]:
        return random_samples(map(iter, self.datasets), self.probs, self.longest)


class RoundRobin(RandomMix):
    """The datasets by turns, until the first ends or, if *longest*, until all have."""

    def __init__(self, datasets: Iterable[Any], longest: bool = False):
        super().__init__(datasets, longest=longest)

    def __iter__(self) -> Iterator[Any]:
        turns = round_robin_longest if self.longest else round_robin_shortest
        return turns(*map(iter, self.datasets))
