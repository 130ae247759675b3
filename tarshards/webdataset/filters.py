"""The stages of a pipeline: each is an op of ours, under webdataset's name and with its arguments."""

from __future__ import annotations

import builtins
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from functools import partial as bind
from functools import wraps
from io import BytesIO
from itertools import islice
from numbers import Number
from typing import Any

import numpy as np
import torch

from tarshards.errors import SampleError, shortened
from tarshards.samples.codecs import decode_field
from tarshards.samples.fields import find_field, no_field, pick_field
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import Ledger
from tarshards.stream import ops
from tarshards.stream.collate import collate
from tarshards.stream.op import BoundOp, op
from tarshards.webdataset import handlers
from tarshards.webdataset.autodecode import Decoder
from tarshards.webdataset.handlers import Asking, Handler, PipelineStage, absent, reraise_exception, stoppable
from tarshards.webdataset.handlers import identity as identity


class FilterFunction:
    """A stage: a function of an iterator, and its other arguments."""

    def __init__(self, f: Callable[..., Any], *args: Any, **kw: Any):
        self.f = f
        self.args: tuple[Any, ...] = args
        self.kw: dict[str, Any] = kw

    def __call__(self, data: Iterable[Any]) -> Any:
        return self.bind().run(data, 0, 0, None)

    def bind(self, ledger: Ledger | None = None) -> BoundOp:
        """Return the stage as an op of ours, whose errors the *ledger* records."""
        return BoundOp(ops.pipe, (self.f, *self.args), self.kw)

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self.kw.items()]
        return f"<{self.f.__name__} {' '.join([*(repr(each) for each in self.args), *options])}>"


def pipelinefilter(f: Callable[..., Any]) -> Callable[..., FilterFunction]:
    """Return a function that makes stages from a user's function ``f(iterator, *args, **options)``."""
    return bind(FilterFunction, f)


RestCurried = pipelinefilter


class NativeStage(FilterFunction):
    """A stage that is an op of ours: *f* returns it for webdataset's arguments, with the handler as ``on_error``."""

    def __init__(self, *args: Any, **kw: Any):
        self.args: tuple[Any, ...] = args
        self.kw: dict[str, Any] = kw

    @classmethod
    def run(cls, data: Iterable[Any], *args: Any, **kw: Any) -> Any:
        """Run the stage over *data*."""
        return cls(*args, **kw)(data)

    def bind(self, ledger: Ledger | None = None) -> BoundOp:
        bound = self.f(*self.args, **self.kw)
        handler = bound.options.get("on_error")
        if handler is None:
            return bound
        if handler is reraise_exception:
            return bound._replace(options={**bound.options, "on_error": None})
        asking = Asking(handler, None if ledger is None else ledger.fail)
        return BoundOp(stoppable(bound.function), bound.args, {**bound.options, "on_error": asking})


def native(f: Callable[..., BoundOp]) -> Any:
    """Return the class of the stages of *f*, which returns an op of ours for webdataset's arguments."""
    attributes = {"f": staticmethod(f), "__doc__": f.__doc__, "__module__": f.__module__}
    return type(f.__name__, (NativeStage,), attributes)


def per_sample(function: Callable[..., Any]) -> Any:
    """Return the class of the stages that apply *function*, of a sample and webdataset's arguments, to each sample."""

    @wraps(function)
    def make(*args: Any, handler: Handler = reraise_exception, **kw: Any) -> BoundOp:
        return BoundOp(ops.map, (lambda sample: function(sample, *args, **kw),), {"on_error": handler})

    return native(make)


@native
def map(f: Callable[[Any], Any], handler: Handler = reraise_exception) -> BoundOp:
    """Yield ``f(sample)`` of every sample, unless it is None; a resulting dict keeps the sample's key."""

    def keeping_key(sample: Any) -> Any:
        result = f(sample)
        if isinstance(result, dict) and isinstance(sample, dict) and "__key__" in sample:
            result.setdefault("__key__", sample["__key__"])
        return result

    keeping_key.__name__ = getattr(f, "__name__", type(f).__name__)
    return BoundOp(ops.map, (keeping_key,), {"drop_none": True, "on_error": handler})


@native
def map_tuple(*args: Callable[[Any], Any] | None, handler: Handler = reraise_exception) -> BoundOp:
    """Apply the n-th function to the n-th element of each tuple."""
    return BoundOp(ops.map_tuple, args, {"on_error": handler})


@native
def select(predicate: Callable[[Any], Any], handler: Handler = reraise_exception) -> BoundOp:
    """Yield the samples for which *predicate* holds."""
    return BoundOp(ops.filter, (predicate,), {"on_error": handler})


@native
def decode(*args: Any, handler: Handler = reraise_exception, allow_unsafe: bool = False, **kw: Any) -> BoundOp:
    """Decode the fields: *args* and options are those of ``Decoder``; *allow_unsafe* enables pickle and torch.load."""
    decoder = Decoder(args, **kw)
    own = (decoder.decode1,) if decoder.handlers or (decoder.post, decoder.only) != (None, None) else ()
    allow_unsafe = allow_unsafe and not handlers.enforce_security
    return BoundOp(ops.decode, own, {"only": decoder.only, "allow_unsafe": allow_unsafe, "on_error": handler})


@per_sample
def map_dict(sample: Sample, /, **kw: Callable[[Any], Any]) -> Sample:
    """Replace each field that is named by its function's result; a missing field is a KeyError."""
    return {**sample, **{name: function(sample[name]) for name, function in kw.items()}}


def getfirst(a: Sample, keys: Any, default: Any = None, missing_is_error: bool = True) -> Any:
    """Return the first of the fields "jpg;png" that the sample *a* has; raise ValueError, or return *default*."""
    names = _alternatives(keys)
    name = pick_field(a, names) if missing_is_error else find_field(a, names)
    return default if name is None else a[name]


def _alternatives(names: Any) -> list[str]:
    return names.split(";") if isinstance(names, str) else names


@native
def to_tuple(
    *args: Any, handler: Any = reraise_exception, missing_is_error: bool = True, none_is_error: bool | None = None
) -> BoundOp:
    """Yield the given fields as a tuple; None is an error like a missing field, unless *none_is_error* is given."""
    words = args[0].split() if len(args) == 1 and isinstance(args[0], str) else args
    fields = [_alternatives(each) for each in words]
    refuses_none = missing_is_error if none_is_error is None else none_is_error

    def pick(sample: Sample) -> tuple[Any, ...]:
        values = tuple([getfirst(sample, names, missing_is_error=missing_is_error) for names in fields])
        if refuses_none and any(value is None for value in values):
            raise SampleError("a field is None; none_is_error=False allows that").at(sample)
        return values

    return BoundOp(ops.map, (pick,), {"on_error": handler})


@native
def rename(handler: Handler = reraise_exception, keep: bool = True, **kw: Any) -> BoundOp:
    """Rename fields by ``new="old;older"``; without *keep* the others are removed."""
    names = {new: _alternatives(old) for new, old in kw.items()}
    gone = {name for alternatives in names.values() for name in alternatives}

    def renamed(sample: Sample) -> Sample:
        others = {name: value for name, value in sample.items() if name not in gone} if keep else {}
        return {**others, **{new: sample[pick_field(sample, old)] for new, old in names.items()}}

    return BoundOp(ops.map, (renamed,), {"on_error": handler})


@per_sample
def associate(sample: Sample, /, associator: Any, **kw: Any) -> Sample:
    """Add to each sample the fields that *associator*, a dict or a function, has for its key."""
    key = sample["__key__"]
    return {**sample, **(associator(key, **kw) if callable(associator) else associator.get(key, {}))}


def _matches(patterns: Any, field: str) -> bool:
    return any(fnmatch(field, pattern) or fnmatch(f".{field}", pattern) for pattern in _alternatives(patterns))


@per_sample
def extract_keys(
    sample: Sample, /, *patterns: Any, duplicate_is_error: bool = True, ignore_missing: bool = False
) -> tuple[Any, ...]:
    """Yield as a tuple the fields that match the *patterns*; "*.png;*.jpg" are alternatives."""
    values = []
    for each in patterns:
        found = [name for name in sample if _matches(each, name)]
        if len(found) > 1 and duplicate_is_error:
            raise SampleError(f"{' and '.join(found)} match {each}").at(sample)
        if not found and not ignore_missing:
            raise SampleError(no_field(_alternatives(each), sample)).at(sample)
        values += [sample[name] for name in found[:1]]
    return tuple(values)


@per_sample
def rename_keys(
    sample: Sample,
    /,
    *args: tuple[str, str],
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    **kw: str,
) -> Sample:
    """Rename the fields whose whole names match a pattern: ``new="*.old"``, or pairs of a name and a pattern.

    Of several matching patterns the last applies, and of several fields with one new name the first.
    """
    pairs = [*args, *kw.items()]
    renamed: Sample = {}
    matched = set()
    for name, value in sample.items():
        base = name.rpartition("/")[2].lower()
        new, pattern = next((pair for pair in reversed(pairs) if fnmatch(base, pair[1])), (name, None))
        if pattern is None and not keep_unselected and name[:2] != "__":
            continue
        if new in renamed and duplicate_is_error:
            raise SampleError(f"two fields would get the name {new}").at(sample)
        renamed.setdefault(new, value)
        matched.add(pattern)
    if must_match and (unmatched := [pattern for _, pattern in pairs if pattern not in matched]):
        raise SampleError(no_field(unmatched, sample)).at(sample)
    return renamed


@per_sample
def xdecode(sample: Sample, /, *args: tuple[str, Callable[[Any], Any]], must_decode: bool = True, **kw: Any) -> Sample:
    """Decode fields by functions of a stream: ``png=imread``, or pairs of a pattern and a function.

    Of several matching patterns the last applies; False instead of a function leaves a field unchanged. Values that are
    not bytes are passed to the function unchanged. Our codecs decode fields without a function.
    """
    functions: list[Any] = [("*.bin", False), *args, *((f"*.{name}", function) for name, function in kw.items())]
    result = dict(sample)
    for name, value in sample.items():
        if name[:2] == "__":
            continue
        base = name.rpartition("/")[2].lower()
        function = next((function for pattern, function in reversed(functions) if _matches(pattern, base)), None)
        if function is None and isinstance(value, bytes):
            result[name] = decode_field(name, value)
            if must_decode and result[name] is value:
                reason = "no decoder for this field; must_decode=False leaves it as bytes"
                raise SampleError(reason, field=name).at(sample)
        elif function:
            result[name] = function(BytesIO(value) if isinstance(value, bytes) else value)
    return result


@native
def shuffle(
    bufsize: int = 1000, initial: int = 100, rng: Any = None, seed: int | None = None, handler: Any = None
) -> BoundOp:
    """Yield in random order out of a buffer: another order each epoch, and the same in every run unless *rng* says.

    A buffer of 0 keeps the order.
    """
    drawn = (seed or 0) if rng is None else rng.getrandbits(63)
    size = max(1, bufsize)
    return BoundOp(ops.shuffle, (size,), {"initial": min(initial, size), "seed": drawn})


class detshuffle(PipelineStage):
    """Shuffle in an order that depends only on *seed* and the number of runs of the stage."""

    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1):
        self.bufsize = bufsize
        self.initial = initial
        self.seed = seed
        self.epoch: int = epoch

    def run(self, src: Iterable[Any]) -> Iterator[Any]:
        self.epoch += 1
        size = max(1, self.bufsize)
        return ops.shuffle(src, size, initial=min(self.initial, size), seed=self.seed, epoch=self.epoch)


def default_collation_fn(samples: list[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Return a batch of dicts or tuples: numbers and arrays of a field as one array, tensors as one, others a list.

    Numbers are those of Python, which include numpy's float64. Samples that are lists count as tuples.
    """
    rows: list[Any] = [tuple(sample) if isinstance(sample, list) else sample for sample in samples]
    first = rows[0]
    if not isinstance(first, dict | tuple):
        raise SampleError(f"a batch is made of dicts or tuples, not {shortened(first)}; collation_fn=None lists them")
    combined = (int, float) if combine_scalars else (), (np.ndarray, torch.Tensor) if combine_tensors else ()
    fields: dict[Any, Any] = first if isinstance(first, dict) else dict(enumerate(first))
    kept = {
        name
        for name, value in fields.items()
        if (isinstance(value, Number) or hasattr(value, "shape")) and not isinstance(value, combined)
    }
    if not kept:
        return collate(rows)
    if isinstance(first, dict):
        batch = collate([{name: [value] if name in kept else value for name, value in row.items()} for row in rows])
        return {name: [value for (value,) in values] if name in kept else values for name, values in batch.items()}
    batch = collate([tuple([value] if i in kept else value for i, value in enumerate(row)) for row in rows])
    return tuple([value for (value,) in values] if i in kept else values for i, values in enumerate(batch))


@native
def batched(batchsize: int = 20, collation_fn: Any = default_collation_fn, partial: bool = True) -> BoundOp:
    """Yield batches; the last one may be smaller if *partial*. Without *collation_fn* a batch is a list."""
    return BoundOp(ops.batched, (batchsize,), {"collate": collation_fn or list, "partial": partial})


@native
def listed(batchsize: int = 20, partial: bool = True) -> BoundOp:
    """Yield lists of samples."""
    return BoundOp(ops.batched, (batchsize,), {"collate": list, "partial": partial})


@native
def unbatched(handler: Handler = reraise_exception) -> BoundOp:
    """Yield the samples of every batch, a list of fields or a tuple, a dict, or one array or tensor."""
    return BoundOp(_apart, (), {"on_error": handler})


@op(context=("on_error",), instead="join the batches of a batch in collate_fn=")
def _apart(batches: Iterable[Any], *, on_error: Any = None) -> Iterator[Any]:
    return ops.unbatched(builtins.map(_as_fields, batches), on_error=on_error)


def _as_fields(batch: Any) -> Any:
    """Return a *batch* with lists of values, as ``collate`` makes it; torch's DataLoader makes lists of tuples."""
    if isinstance(batch, dict):
        return {name: list(values) if isinstance(values, tuple) else values for name, values in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(list(values) if isinstance(values, tuple) else values for values in batch)
    return batch


@native
def unlisted() -> BoundOp:
    """Yield the elements of every list."""
    return BoundOp(ops.pipe, (_elements,), {})


def _elements(lists: Iterable[Any]) -> Iterator[Any]:
    for elements in lists:
        if not isinstance(elements, list):
            raise SampleError(f"unlisted takes lists, not {shortened(elements)}")
        yield from elements


@native
def slice(*args: int | None) -> BoundOp:
    """Yield the samples that ``itertools.islice`` would."""
    return BoundOp(ops.take, args, {}) if len(args) == 1 else BoundOp(ops.pipe, (islice, *args), {})


@native
def rsample(p: float = 0.5, seed: int = 0) -> BoundOp:
    """Yield each sample with the probability *p*."""
    return BoundOp(_sample_at_random, (p,), {"seed": seed})


@op(leaves_out="filtered", context=("epoch",))
def _sample_at_random(samples: Iterable[Any], p: float, *, seed: int, epoch: int = 0) -> Iterator[Any]:
    drawn = random.Random(f"{seed}/{epoch}").random
    return (sample for sample in samples if drawn() < p)


def _info(
    data: Iterable[Sample], fmt: str | None = None, n: int = 3, every: int = -1, width: int = 50, stream: Any = None,
    name: str = "",
) -> Iterator[Sample]:  # fmt: skip
    """Print the first *n* samples, and every *every*-th, to *stream* or stderr."""
    stream = stream or sys.stderr
    for number, sample in enumerate(data):
        if number < n or (every > 0 and (number + 1) % every == 0):
            lines = [f"--- {name}", *(f"{field} {value!r:.{width}}" for field, value in sample.items())]
            print("\n".join(lines) if fmt is None else fmt.format(**sample), file=stream)
        yield sample


info = pipelinefilter(_info)


def _log_keys(data: Iterable[Sample], logfile: str | None = None) -> Iterator[Sample]:
    """Append a line for every sample to *logfile*, if any: its number, ``__worker__``, ``__rank__`` and key."""
    for number, sample in enumerate(data):
        if logfile:
            with open(logfile, "a") as file:  # one write per line, so that workers may share the file
                names = "__worker__", "__rank__", "__key__"
                file.write("\t".join([f"{number}", *(f"{sample.get(each)}" for each in names)]) + "\n")
        yield sample


log_keys = pipelinefilter(_log_keys)


def transform_with(sample: Any, transformers: Any) -> list[Any]:
    """Apply the n-th function to the n-th element of *sample*."""
    if len(transformers or ()) > len(sample):
        raise ValueError(f"{len(transformers)} transformers for {len(sample)} elements")
    functions = [*(transformers or ()), *[None] * len(sample)]
    return [value if function is None else function(value) for value, function in zip(sample, functions)]


class Cached(PipelineStage):
    """Keep all samples in memory: the second run reads nothing."""

    cached: list[Any] | None = None

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        if self.cached is not None:
            yield from self.cached
            return
        samples = []
        for sample in source:
            samples.append(sample)
            yield sample
        self.cached = samples


LMDBCached = absent("LMDBCached", "mcached() keeps samples in memory, and Remote(cache_dir=...) blocks on a disk")

_shuffle, _select, _map, _map_dict, _map_tuple = shuffle.run, select.run, map.run, map_dict.run, map_tuple.run
_to_tuple, _rename, _rename_keys, _extract_keys = to_tuple.run, rename.run, rename_keys.run, extract_keys.run
_decode, _xdecode, _associate, _rsample = decode.run, xdecode.run, associate.run, rsample.run
_batched, _unbatched, _unlisted = batched.run, unbatched.run, unlisted.run
