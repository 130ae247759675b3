"""Iterator -> iterator: one short generator function per op; ``Stream`` offers each as a method.

``@op`` declares the traits of each: see ``Traits``.
"""

from __future__ import annotations

import builtins
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from inspect import isasyncgenfunction, iscoroutine
from itertools import count as count_from
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from tarshards.errors import (
    DecodeError,
    OpError,
    SampleError,
    TarshardsError,
    check_function,
    flag,
    is_coroutine_function,
    shortened,
    whole_number,
)
from tarshards.samples.codecs.decoding import Decoding, Handler, decoding_of
from tarshards.samples.conditions import Template, shard_of
from tarshards.samples.fields import (
    apply_terms,
    check_mapping,
    check_name,
    parse_terms,
    pick_field,
    split_fields,
)
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.ledger import ErrorPolicy, OnError, error_handler
from tarshards.stream.collate import collate, unbatch
from tarshards.stream.op import op

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from tarshards.samples.codecs.image import Imagespec
    from tarshards.storage.traffic import Traffic


@op(
    per_sample=True,
    resumable=True,
    one_for_one=True,
    filters_with="drop_none",
    context=("epoch", "seed", "on_error"),
)
def map(
    samples: Iterable[Any],
    function: Callable[..., Any],
    *,
    drop_none: bool = False,
    rng: bool = False,
    seed: int = 0,
    epoch: int = 0,
    on_error: ErrorPolicy = None,
) -> Iterator[Any]:
    """Yield ``function(sample)`` for every sample; with *drop_none*, leave out the results that are None.

    With *rng*, yield ``function(sample, rng)``, where rng is a numpy Generator that is seeded for each sample by
    *seed*, *epoch*, the name of its shard and its key: random values are the same on any number of workers and after a
    resume. In a stream of shards, *seed* is by default that of the shards. Raises TypeError for a sample without a key.

    An exception in *function* is raised unchanged, with a note of the sample's origin; or *on_error*, a function or
    "skip", receives an OpError and the sample is left out.

    >>> list(map([1, 2], str)), list(map([1, 2], {1: "one"}.get, drop_none=True))
    (['1', '2'], ['one'])
    """
    check_function(function, "map")
    if flag("rng", rng):
        function = _with_rng(function, seed, epoch)
    results = _map(samples, function, _handler(on_error))
    return (result for result in results if result is not None) if flag("drop_none", drop_none) else results


def _with_rng(function: Callable[..., Any], seed: int, epoch: int) -> Callable[[Any], Any]:
    from tarshards.stream.randomness import SampleGenerator  # loads numpy

    rng = SampleGenerator(whole_number("seed", seed), whole_number("epoch", epoch))
    return lambda sample: function(sample, rng.seeded(sample))


def _map(samples: Iterable[Any], function: Callable[[Any], Any], handle: OnError) -> Iterator[Any]:
    for sample in samples:
        try:
            result = function(sample)
        except Exception as error:
            handle(_op_error(error, sample))
            continue
        yield result


@op(per_sample=True, resumable=True, leaves_out="filtered", context=("on_error",))
def filter(samples: Iterable[Any], predicate: Callable[[Any], Any], *, on_error: ErrorPolicy = None) -> Iterator[Any]:
    """Yield the samples for which *predicate* holds; failures as in ``map``.

    >>> list(filter(range(5), lambda x: x % 2))
    [1, 3]
    """
    check_function(predicate, "filter")
    pairs = map(samples, lambda sample: (sample, predicate(sample)), on_error=on_error)
    return (sample for sample, wanted in pairs if wanted)


@op(per_sample=True, resumable=True, one_for_one=True, context=("epoch", "seed", "on_error"))
def map_fields(
    samples: Iterable[Sample],
    functions: Mapping[str, Callable[..., Any]],
    *,
    rng: bool = False,
    seed: int = 0,
    epoch: int = 0,
    on_error: ErrorPolicy = None,
) -> Iterator[Sample]:
    """Replace each field that *functions* names by its function's result; *rng* and failures as in ``map``.

    The functions of one sample draw from the same Generator, in order.

    >>> list(map_fields([{"x": 1, "y": 2}], {"x": str}))
    [{'x': '1', 'y': 2}]
    """
    for function in check_mapping(functions, "map_fields", "{field: function}").values():
        check_function(function, "map_fields")
    return map(samples, partial(_map_fields, functions), rng=rng, seed=seed, epoch=epoch, on_error=on_error)


def _map_fields(functions: Mapping[str, Callable[..., Any]], sample: Sample, *rng: Any) -> Sample:
    names = [(pick_field(sample, [field]), function) for field, function in functions.items()]
    return {**sample, **{name: function(sample[name], *rng) for name, function in names}}


@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def keep_fields(samples: Iterable[Sample], *fields: str, on_error: ErrorPolicy = None) -> Iterator[Sample]:
    """Keep only the given fields, and ``__key__`` and similar; ``"jpg;png"`` keeps the first that a sample has.

    A sample that has none of the alternatives raises SampleError; or *on_error*, a function or "skip", receives the
    error and the sample is left out.

    >>> list(keep_fields([{"__key__": "a", "jpg": 1, "cls": 2}], "jpg;png"))
    [{'__key__': 'a', 'jpg': 1}]
    """
    return _each(samples, partial(_keep_fields, split_fields(fields)), error_handler(on_error))


def _keep_fields(names: list[list[str]], sample: Sample) -> Sample:
    kept = {field: value for field, value in sample.items() if is_reserved(field)}
    for alternatives in names:
        field = pick_field(sample, alternatives)
        kept[field] = sample[field]
    return kept


@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def rename_fields(
    samples: Iterable[Sample], names: Mapping[str, str], *, on_error: ErrorPolicy = None
) -> Iterator[Sample]:
    """Rename fields by ``{new: old}``, where old may be alternatives like ``"jpg;png"``; other fields stay.

    A sample that has none of the alternatives, or already has the new field, raises SampleError, as in ``keep_fields``.

    >>> list(rename_fields([{"jpg": 1, "cls": 2}], {"image": "jpg;png"}))
    [{'image': 1, 'cls': 2}]
    """
    pairs = check_mapping(names, "rename_fields", '{"new": "old"}').items()
    alternatives = {check_name(new): check_name(old).split(";") for new, old in pairs}
    return _each(samples, partial(_rename_fields, alternatives), error_handler(on_error))


def _rename_fields(alternatives: dict[str, list[str]], sample: Sample) -> Sample:
    new_of = {pick_field(sample, old): new for new, old in alternatives.items()}
    renamed: Sample = {}
    for field, value in sample.items():
        name = new_of.get(field, field)
        if name in renamed:
            raise SampleError(f"two fields would get the name {name}").at(sample)
        renamed[name] = value
    return renamed


@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def select_fields(samples: Iterable[Sample], spec: str, *, on_error: ErrorPolicy = None) -> Iterator[Sample]:
    """Keep and rename fields by *spec*: ``new:old1;old2`` renames, ``jpg;png`` keeps one, ``*`` keeps the others.

    ``__key__`` and similar stay. A sample that has none of the alternatives, or would have two fields of one name,
    raises SampleError, as in ``keep_fields``.

    >>> list(select_fields([{"__key__": "a", "jpg": 1, "cls": 2, "txt": 3}], "image:png;jpg txt"))
    [{'__key__': 'a', 'image': 1, 'txt': 3}]
    """
    return _each(samples, partial(apply_terms, terms=parse_terms(spec)), error_handler(on_error))


@overload
def to_tuple(samples: Iterable[Sample], field: str, /, *, on_error: ErrorPolicy = None) -> Iterator[tuple[Any]]: ...
@overload
def to_tuple(
    samples: Iterable[Sample], first: str, second: str, /, *, on_error: ErrorPolicy = None
) -> Iterator[tuple[Any, Any]]: ...
@overload
def to_tuple(
    samples: Iterable[Sample], first: str, second: str, third: str, /, *, on_error: ErrorPolicy = None
) -> Iterator[tuple[Any, Any, Any]]: ...
@overload
def to_tuple(samples: Iterable[Sample], *fields: str, on_error: ErrorPolicy = None) -> Iterator[tuple[Any, ...]]: ...
@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def to_tuple(samples: Iterable[Sample], *fields: str, on_error: ErrorPolicy = None) -> Iterator[tuple[Any, ...]]:
    """Yield the given fields as a tuple; ``"jpg;png"`` is the first of these fields that a sample has.

    A sample that has none of the alternatives raises SampleError, as in ``keep_fields``.

    >>> list(to_tuple([{"jpg": 1, "cls": 2}], "jpg;png", "cls"))
    [(1, 2)]
    """
    return _each(samples, partial(_to_tuple, split_fields(fields)), error_handler(on_error))


def _to_tuple(names: list[list[str]], sample: Sample) -> tuple[Any, ...]:
    return tuple([sample[pick_field(sample, alternatives)] for alternatives in names])


def _each(samples: Iterable[Any], function: Callable[[Any], Any], on_error: OnError | None) -> Iterator[Any]:
    """Yield ``function(sample)`` for every sample; *on_error* receives the SampleError of a sample that is left out."""
    for sample in samples:
        try:
            result = function(sample)
        except SampleError as error:
            if on_error is None:
                raise
            on_error(error)
            continue
        yield result


@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def map_tuple(
    samples: Iterable[tuple[Any, ...]], *functions: Callable[[Any], Any] | None, on_error: ErrorPolicy = None
) -> Iterator[tuple[Any, ...]]:
    """Apply the n-th function to the n-th element of each tuple; None leaves the element unchanged.

    Elements after the last function also stay. Failures are as in ``map``; an OpError names the element, counted from
    0. A tuple with fewer elements than functions fails with a SampleError.

    >>> list(map_tuple([(1, "a", 2.5)], str, None))
    [('1', 'a', 2.5)]
    """
    if not functions:
        raise ValueError("map_tuple takes one function for each element, or None")
    for function in functions:
        if function is not None:
            check_function(function, "map_tuple")
    return _map_tuple(samples, functions, _handler(on_error))


def _map_tuple(
    samples: Iterable[Any], functions: Sequence[Callable[[Any], Any] | None], handle: OnError
) -> Iterator[Any]:
    for sample in samples:
        where = ""
        try:
            if not isinstance(sample, tuple | list) or len(sample) < len(functions):
                what = f"{len(sample)} elements" if isinstance(sample, tuple | list) else type(sample).__name__
                raise SampleError(f"map_tuple has {len(functions)} functions for a tuple, and this is {what}")
            results = list(sample)
            for number, function in builtins.enumerate(functions):
                if function is not None:
                    where = f"element {number}: "
                    results[number] = function(results[number])
        except Exception as error:
            handle(_op_error(error, sample, where))
            continue
        yield tuple(results)


def _op_error(error: Exception, sample: Any, where: str = "") -> OpError:
    here = OpError("").at(sample)
    has_origin = isinstance(error, TarshardsError) and (error.url, error.key) == (here.url, here.key)
    reason = error.reason if has_origin else error  # type: ignore[attr-defined]
    failure = OpError(f"{where}{type(error).__name__}: {reason}").at(sample)
    failure.__cause__ = error
    return failure


def _handler(on_error: ErrorPolicy) -> OnError:
    return error_handler(on_error) or _raise_cause


def _raise_cause(failure: Exception) -> None:
    cause = failure.__cause__
    assert cause is not None
    cause.add_note(str(failure))
    raise cause


@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def decode(
    samples: Iterable[Sample],
    /,
    images: Imagespec | str | Handler | Mapping[str, Any] | None = None,
    *handlers: str | Handler | Mapping[str, Any],
    only: str | Iterable[str] | None = None,
    exif_transpose: bool = False,
    rotate: bool = True,
    allow_unsafe: bool = False,
    max_ratio: float | None = None,
    on_error: ErrorPolicy = None,
    **by_field: Any,
) -> Iterator[Sample]:
    """Decode every field by its extension; images by the imagespec *images*, or not at all if it is None.

    ``decode("rgb8", "audio", "video")`` also decodes audio and video, which otherwise stay bytes.

    ``decode(jpg=f)`` decodes the field jpg, and all fields that end in .jpg, with ``f(data)``. A dict does the same for
    names with dots and for alternatives: ``{"seg.png": f, "jpg;jpeg": g}``. If a field ends in several of the names,
    the longest applies. An imagespec may replace the function. For ``json.gz``, a function for json gets the
    decompressed data. Fields without such a function go to the *handlers*, ``handler(field, data)``: the first result
    that is not None is the value. All other fields are decoded by their extension. With *only*, fields that it does not
    name stay unchanged; values that are not bytes always do. A name that matches no field of the first 100 samples
    (fewer if the stream is shorter), or in a loader of the first local shard, causes a warning. With *exif_transpose*,
    imagespecs rotate images by their EXIF orientation; videos are rotated unless *rotate* is False. *allow_unsafe*
    enables pickle and full torch.load. A field of gzip or a zip (npz, pth) must not give both more than 256 MiB and
    *max_ratio* times its size, by default 200.

    A field that does not decode raises DecodeError with its origin; or *on_error*, a function or "skip", receives the
    error and the sample is left out.

    >>> list(decode([{"cls": b"7", "txt": b"seven"}]))
    [{'cls': 7, 'txt': 'seven'}]
    >>> list(decode([{"cls": b"7", "left.txt": b"seven", "raw": b""}], cls=float, only="cls txt"))
    [{'cls': 7.0, 'left.txt': 'seven', 'raw': b''}]
    """
    options: Any = {"only": only, "exif_transpose": exif_transpose, "rotate": rotate, "allow_unsafe": allow_unsafe}
    decoding = decoding_of(images, *handlers, max_ratio=max_ratio, **options, **by_field)
    if isinstance(decoding, Decoding):
        samples = decoding.watched(samples)
    return _decode(samples, error_handler(on_error), decoding)


def _decode(
    samples: Iterable[Sample], on_error: OnError | None, decoding: Callable[[str, bytes], Any]
) -> Iterator[Sample]:
    for sample in samples:
        field = ""
        decoded = {}
        try:
            for field, value in sample.items():
                if isinstance(value, bytes) and not is_reserved(field):
                    value = decoding(field, value)
                decoded[field] = value
        except DecodeError as error:
            failure = DecodeError(error.reason, field=field).at(sample)
            cause = error.__cause__ or error
            if on_error is None:
                raise failure from cause
            failure.__cause__ = cause
            on_error(failure)
            continue
        yield decoded


@op(instead="its function may hold samples across batches; map() takes one, and a DataLoader runs any")
def pipe(samples: Iterable[Any], function: Callable[..., Any], /, *args: Any, **options: Any) -> Iterator[Any]:
    """Yield from ``function(samples, *args, **options)``, any function from an iterator to an iterator.

    The function is called when the first sample is requested; in a worker, it gets the samples of that worker. It may
    hold samples back, leave some out and make new ones, so the ledger counts a sample as delivered when the function
    takes it. Raises TypeError if the result is not iterable.

    >>> def pairs(samples, gap=""):
    ...     for sample in samples:
    ...         yield sample + gap + next(samples, "")
    >>> list(pipe("abc", pairs, gap="-"))
    ['a-b', 'c-']
    """
    check_function(function, "pipe")
    return _pipe(samples, function, args, options)


def _pipe(samples: Iterable[Any], function: Callable[..., Any], args: Any, options: Any) -> Iterator[Any]:
    results = function(iter(samples), *args, **options)
    try:
        iterator = iter(results)
    except TypeError:
        name = getattr(function, "__qualname__", shortened(function))
        advice = "a function in a pipe yields samples, or returns an iterator of them"
        raise TypeError(f"pipe: {name} returned {shortened(results)}; {advice}") from None
    yield from iterator


@op(per_sample=True, resumable=True, one_for_one=True)
def with_length(samples: Iterable[Any], length: int) -> Iterator[Any]:
    """Yield the samples unchanged; ``len()`` of the stream is *length*, regardless of their number.

    Use it for code that needs the length of a dataset, such as torch's DataLoader, if filters or missing indexes leave
    it unknown. A ShardLoader counts its batches itself.

    >>> list(with_length("ab", 3))
    ['a', 'b']
    """
    whole_number("length", length, 0)
    return iter(samples)


@op(resumable=True, leaves_out="discarded", gathers="size", instead="batch_size= and collate_fn= make the batches")
def batched(
    samples: Iterable[Any], size: int, *, collate: Callable[[list[Any]], Any] = collate, partial: bool = True
) -> Iterator[Any]:
    """Collate every *size* samples into one batch; the last may be smaller, or is left out with ``partial=False``.

    By default dicts and tuples are collated field by field: see ``tarshards.stream.collate``.

    >>> list(batched([(1, "a"), (2, "b"), (3, "c")], 2))
    [(array([1, 2]), ['a', 'b']), (array([3]), ['c'])]
    """
    size = whole_number("size", size, 1)
    check_function(collate, "batched")
    return _batched(samples, size, collate, flag("partial", partial))


def _batched(samples: Iterable[Any], size: int, collate: Callable[[list[Any]], Any], partial: bool) -> Iterator[Any]:
    iterator = iter(samples)
    while batch := list(islice(iterator, size)):
        if len(batch) == size or partial:
            yield collate(batch)


@op(instead="flatten the batch in collate_fn=")
def flatten(samples: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """Yield the elements of every sample.

    >>> list(flatten(["ab", "c"]))
    ['a', 'b', 'c']
    """
    for elements in samples:
        yield from elements


@op(context=("on_error",), instead="join the batches of a batch in collate_fn=")
def unbatched(samples: Iterable[Any], *, on_error: ErrorPolicy = None) -> Iterator[Any]:
    """Yield the samples of every batch: the inverse of ``batched``.

    A batch is a dict or tuple of lists, arrays and tensors, with one row per sample; or one array or tensor; or a list
    of samples. A list that contains arrays or tensors counts as a tuple, since torch's DataLoader turns tuples into
    lists. Rows of arrays and tensors share the batch's memory.

    A batch whose fields differ in length, or that has a field of another type, raises SampleError; or *on_error*, a
    function or "skip", receives the error and the batch is left out.

    >>> list(unbatched([{"x": [1, 2], "y": ["a", "b"]}]))
    [{'x': 1, 'y': 'a'}, {'x': 2, 'y': 'b'}]
    >>> list(unbatched(batched("abc", 2)))
    ['a', 'b', 'c']
    """
    return _unbatched(samples, error_handler(on_error))


def _unbatched(batches: Iterable[Any], on_error: OnError | None) -> Iterator[Any]:
    for parts in _each(batches, unbatch, on_error):
        yield from parts


@op(instead="map() cuts windows out of one sample; shards without indexes give consecutive samples")
def sliding(samples: Iterable[Any], size: int, *, step: int = 1, partial: bool = False) -> Iterator[list[Any]]:
    """Yield lists of *size* consecutive samples, each beginning *step* samples after the previous one.

    With a *step* above *size*, samples are skipped between windows. Samples at the end that do not fill a window are
    left out; with *partial* they form one more, shorter window, so that with a *step* up to *size* every sample is in a
    window. Windows cross the boundaries of shards, but not of workers.

    >>> list(sliding("abcde", 2, step=2)), list(sliding("abcde", 2, step=2, partial=True))
    ([['a', 'b'], ['c', 'd']], [['a', 'b'], ['c', 'd'], ['e']])
    """
    size, step = whole_number("size", size, 1), whole_number("step", step, 1)
    return _sliding(samples, size, step, flag("partial", partial))


def _sliding(samples: Iterable[Any], size: int, step: int, partial: bool) -> Iterator[list[Any]]:
    iterator = iter(samples)
    window = list(islice(iterator, size))
    while len(window) == size:
        yield list(window)
        kept, skipped = window[step:], max(0, step - size)
        if len(list(islice(iterator, skipped))) < skipped:
            return
        new = list(islice(iterator, size - len(kept)))
        if not new:
            return
        window = kept + new
    if partial and window:
        yield window


@op(
    one_for_one=True,
    context=("epoch",),
    instead="ShardDataset(shuffle=True) permutes all samples, pool= of them at once",
)
def shuffle(
    samples: Iterable[Any], size: int, *, initial: int | None = None, seed: int = 0, epoch: int = 0
) -> Iterator[Any]:
    """Yield the samples in random order from a buffer of *size* samples; *seed* and *epoch* determine the order.

    The first sample is yielded when the buffer holds *initial* (by default 100, or *size* if that is less); with each
    sample the buffer grows by one, up to *size*. Only with ``initial=size`` are the first samples as well mixed as
    later ones.

    >>> sorted(shuffle(range(5), 3)) == list(range(5))
    True
    """
    size = whole_number("size", size, 1)
    least = 100 if initial is None else whole_number("initial", initial, 1)
    return _shuffle(samples, size, min(least, size), random.Random(f"{whole_number('seed', seed)}/{epoch}"))


def _shuffle(samples: Iterable[Any], size: int, initial: int, rng: random.Random) -> Iterator[Any]:
    buffer: list[Any] = []
    drawn = rng.random
    iterator = iter(samples)
    for sample in iterator:
        buffer.append(sample)
        if len(buffer) < initial:
            continue
        if len(buffer) < size:
            buffer.extend(islice(iterator, 1))
        index = int(drawn() * len(buffer))
        buffer[index], buffer[-1] = buffer[-1], buffer[index]
        yield buffer.pop()
    rng.shuffle(buffer)
    yield from buffer


@op(leaves_out="discarded", instead="leave the loop over the loader early; load_state_dict resumes it there")
def take(samples: Iterable[Any], count: int | None) -> Iterator[Any]:
    """Yield the first *count* samples (None: all).

    >>> list(take("abcd", 2))
    ['a', 'b']
    """
    return islice(samples, None if count is None else whole_number("count", count, 0))


@op(leaves_out="discarded", instead="load_state_dict resumes in the middle of an epoch")
def skip(samples: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield all but the first *count* samples.

    >>> list(skip("abcd", 2))
    ['c', 'd']
    """
    return islice(samples, whole_number("count", count, 0), None)


@op(instead="iterate over the loader again: each iteration is the next epoch")
def repeat(samples: Iterable[Any], times: int | None = None) -> Iterator[Any]:
    """Yield the samples *times* times, or forever if it is None.

    In a stream, every pass has its own order: pass p of epoch e has the order that epoch e x *times* + p has without
    ``repeat``, where *times* counts as 2**64 for a stream that repeats forever.

    >>> list(repeat("ab", 2))
    ['a', 'b', 'a', 'b']
    """
    return _repeat(samples, None if times is None else whole_number("times", times, 0))


def _repeat(samples: Iterable[Any], times: int | None) -> Iterator[Any]:
    for _ in count_from() if times is None else range(times):
        empty = True
        for sample in samples:
            empty = False
            yield sample
        if empty:
            return


@op(one_for_one=True, instead="enumerate the loader, or write a number into each sample")
def enumerate(samples: Iterable[Any], *, start: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield pairs of a number, counted from *start*, and a sample.

    >>> list(enumerate("ab"))
    [(0, 'a'), (1, 'b')]
    """
    return builtins.enumerate(samples, whole_number("start", start))


@op(per_sample=True, one_for_one=True, reads_ahead=True, context=("on_error",))
def async_map(
    samples: Iterable[Any],
    function: Callable[[Any], Any],
    *,
    workers: int = 4,
    executor: Executor | None = None,
    ordered: bool = True,
    on_error: ErrorPolicy = None,
) -> Iterator[Any]:
    """Map *function* in *workers* threads, or in *executor*, a ``concurrent.futures.Executor``, in order if *ordered*.

    An ``async def`` function runs on an event loop in its own thread, *workers* coroutines at once; each iteration, and
    in a ``ShardLoader`` each batch, has its own loop. At most 2 x *workers* samples are in flight. Closing the iterator
    cancels coroutines, and calls that have not begun. Failures are as in ``map``.

    >>> list(async_map([3, 1, 2], str, workers=2))
    ['3', '1', '2']
    """
    workers = whole_number("workers", workers, 1)
    if not callable(function):
        raise TypeError(f"async_map takes a function, not {shortened(function)}")
    if isasyncgenfunction(function):
        raise TypeError(f"async_map awaits one result a sample; {shortened(function)} is an async generator")
    from tarshards.parallel.calls import check_executor, check_sent

    if executor is not None:
        check_sent(function, check_executor(executor), "async_map")
    if executor is not None and is_coroutine_function(function):
        raise TypeError("an async function runs on an event loop of its own; leave out executor=")
    return _async_map(samples, function, workers, executor, ordered, _handler(on_error))


def _async_map(
    samples: Iterable[Any],
    function: Callable[[Any], Any],
    workers: int,
    executor: Executor | None,
    ordered: bool,
    handle: OnError,
) -> Iterator[Any]:
    from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

    from tarshards.parallel.calls import EventLoop, settled_map

    with ExitStack() as stack:
        if is_coroutine_function(function):
            executor = stack.enter_context(EventLoop(workers))
        else:
            function = partial(_call, function)
            executor = executor or stack.enter_context(ThreadPoolExecutor(workers, "tarshards-map"))
        outcomes: Any = settled_map(function, samples, executor=executor, window=2 * workers, ordered=ordered)
        for sample, result, error in stack.enter_context(closing(outcomes)):
            if error is None:
                yield result
            elif isinstance(error, Exception) and not isinstance(error, BrokenExecutor):
                handle(_op_error(error, sample))
            else:
                raise error


def _call(function: Callable[[Any], Any], sample: Any) -> Any:
    result = function(sample)
    if iscoroutine(result):  # from a function that is not itself async
        result.close()
        raise TypeError(f"{shortened(function)} returned a coroutine; give async_map the async function itself")
    return result


@op(resumable=True, one_for_one=True, instead="tqdm(loader) shows the progress")
def progress(
    samples: Iterable[Any], *, total: int | None = None, description: str | None = None, unit: str = "samples"
) -> Iterator[Any]:
    """Yield the samples unchanged and show a progress bar on stderr, if that is a terminal.

    *total* is the number of samples, if known; *unit* is what the bar calls them.
    """
    if not sys.stderr.isatty():  # importing the bar takes longer than many runs
        yield from samples
        return
    from tqdm import tqdm

    with tqdm(samples, total=total, desc=description, unit=f" {unit}") as bar:
        yield from bar


class Rate(NamedTuple):
    """A report of ``monitor``: counts and *seconds* since the start, and rates over the last interval.

    *traffic* is this process's traffic with web servers and object stores since the start.
    """

    samples: int
    bytes: int
    seconds: float
    samples_per_second: float
    bytes_per_second: float
    traffic: Traffic

    def metrics(self) -> dict[str, float]:
        """Return all numbers by name, for experiment trackers such as wandb and mlflow.

        >>> from tarshards.storage.traffic import Traffic
        >>> Rate(10, 2000, 0.5, 20.0, 4000.0, Traffic(requests=3)).metrics()["traffic/requests"]
        3
        """
        numbers: dict[str, float] = {name: getattr(self, name) for name in self._fields if name != "traffic"}
        return numbers | {f"traffic/{name}": number for name, number in vars(self.traffic).items()}


def _print_rate(rate: Rate) -> None:
    """Print a line about *rate* on stderr.

    >>> from tarshards.storage.traffic import Traffic
    >>> _print_rate(Rate(10, 2000, 0.5, 20.0, 4000.0, Traffic()))
    """
    sizes = f"{rate.samples_per_second:,.0f} samples/s, {rate.bytes_per_second / 1e6:,.1f} MB/s"
    sys.stderr.write(f"{rate.samples:,} samples in {rate.seconds:,.1f} s; {sizes}\n")


@op(resumable=True, one_for_one=True, instead="the loader has a monitor")
def monitor(
    samples: Iterable[Any], callback: Callable[[Rate], Any] = _print_rate, *, interval: float = 1.0
) -> Iterator[Any]:
    """Yield the samples unchanged; call *callback* with a ``Rate`` every *interval* seconds, and at the end.

    Its bytes are those of the fields. By default the rates are printed on stderr.
    ``monitor(lambda rate: wandb.log(rate.metrics()))`` sends them to Weights & Biases, and
    ``monitor(lambda rate: mlflow.log_metrics(rate.metrics(), step=rate.samples))`` to MLflow.
    """
    check_function(callback, "monitor")
    if not isinstance(interval, int | float) or not interval >= 0:
        raise ValueError(f"interval must be a number of seconds, not {shortened(interval)}")
    return _monitor(samples, callback, interval)


def _monitor(samples: Iterable[Any], callback: Callable[[Rate], Any], interval: float) -> Iterator[Any]:
    from tarshards.storage.traffic import so_far  # loads concurrent.futures, which takes longer than starting a tool

    begun = last = time.perf_counter()
    before = so_far()
    number = size = last_number = last_size = 0
    for sample in samples:
        yield sample
        number += 1
        size += _size(sample)
        now = time.perf_counter()
        if now - last >= interval:
            callback(
                _rate(number, size, now - begun, number - last_number, size - last_size, now - last, so_far() - before)
            )
            last, last_number, last_size = now, number, size
    now = time.perf_counter()
    callback(_rate(number, size, now - begun, number - last_number, size - last_size, now - last, so_far() - before))


def _rate(
    samples: int, size: int, seconds: float, new_samples: int, new_bytes: int, interval: float, traffic: Traffic
) -> Rate:
    interval = max(interval, 1e-9)
    return Rate(samples, size, seconds, new_samples / interval, new_bytes / interval, traffic)


def _size(value: Any) -> int:
    """Return the size of *value* in bytes: the length of a string, the buffer of an array, the sum over a container."""
    if isinstance(value, dict):
        return sum(_size(field) for name, field in value.items() if not is_reserved(str(name)))
    if isinstance(value, (tuple, list)):
        return sum(builtins.map(_size, value))
    return len(value) if isinstance(value, (bytes, str)) else getattr(value, "nbytes", 0)


@op(one_for_one=True, instead="map() can set __key__ from what a sample contains")
def rekey(samples: Iterable[Sample], template: str) -> Iterator[Sample]:
    """Give every sample a new key by *template*, from ``index`` (counted from 0), ``key`` and ``shard``.

    Raises ValueError for a template that is malformed or contains other names.

    >>> samples = [{"__key__": "b", "cls": 1}, {"__key__": "a", "cls": 2}]
    >>> [sample["__key__"] for sample in rekey(samples, "{index:03d}-{key}")]
    ['000-b', '001-a']
    """
    if not isinstance(template, str):
        raise TypeError(f"a template is a str, not {shortened(template)}")
    filled = Template(template, {"index": 0, "key": "", "shard": ""}).fill
    return (
        {**sample, "__key__": filled({"index": index, "key": sample["__key__"], "shard": shard_of(sample)})}
        for index, sample in zip(count_from(), samples)
    )


@op(per_sample=True, resumable=True, one_for_one=True)
def fields(samples: Iterable[Sample]) -> Iterator[dict[str, Any]]:
    """Leave ``__key__``, ``__url__`` and the like out of every sample, for code that takes all ``values()`` as data.

    >>> list(fields([{"__key__": "a", "__url__": "x.tar", "image": 1, "label": 2}]))
    [{'image': 1, 'label': 2}]
    """
    return ({name: value for name, value in sample.items() if not is_reserved(name)} for sample in samples)


@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def shrink_images(
    samples: Iterable[Sample],
    field: str,
    *,
    max_resolution: int | None = None,
    jpeg_quality: int = 90,
    proportion: float = 1.0,
    seed: int = 0,
    on_error: ErrorPolicy = None,
) -> Iterator[Sample]:
    """Resize the image *field* and encode it as JPEG or raw pixels, for shards to train on.

    An image whose longer side has more than *max_resolution* pixels is resized to that, antialiased. It becomes a JPEG
    of *jpeg_quality* with probability *proportion*, by *seed* and key, and otherwise raw pixels (``ppm``), which are
    read without decoding. A JPEG that is small enough and stays a JPEG is not encoded again. The extension of the field
    becomes ``jpg`` or ``ppm``; the rest of its name stays: read it as ``"image:jpg;ppm"``. *field* may have
    alternatives, ``"png;jpg"``. Failures are as in ``map``.

    >>> list(shrink_images([{"__key__": "a", "ppm": b"P6 2 1 255 abcabc"}], "ppm", max_resolution=1, proportion=0))
    [{'__key__': 'a', 'ppm': b'P6\\n1 1\\n255\\nabc'}]
    """
    from tarshards.samples.codecs.shrinking import Shrinking

    shrinking = Shrinking(check_name(field).split(";"), max_resolution, jpeg_quality, proportion, seed)
    return map(samples, shrinking, on_error=on_error)


@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def add_source(samples: Iterable[Sample], *, on_error: ErrorPolicy = None) -> Iterator[Sample]:
    """Add the URL of its shard to every sample, as the field ``source``.

    It is a str; ``map_fields({"source": str.encode})`` turns it into bytes, which writers require. A sample that has a
    field of this name raises SampleError, as in ``keep_fields``.

    >>> list(add_source([{"__key__": "a", "__url__": "x.tar"}]))
    [{'__key__': 'a', '__url__': 'x.tar', 'source': 'x.tar'}]
    """
    return _each(samples, _add_source, error_handler(on_error))


def _add_source(sample: Sample) -> Sample:
    if "source" in sample:
        raise SampleError("two fields would get the name source", field="source").at(sample)
    return {**sample, "source": sample["__url__"]}
