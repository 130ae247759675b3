"""Iterator -> iterator: one short generator function each; ``Stream`` offers every one as a method.

``@op`` declares what else is true of each: see ``Traits``.
"""

from __future__ import annotations

import builtins
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from inspect import isasyncgenfunction, iscoroutine
from itertools import count as count_from
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.errors import DecodeError, OpError, SampleError, TarshardsError, flag, shortened, whole_number
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.image import check_imagespec
from tarshards.samples.conditions import Template, shard_of
from tarshards.samples.fields import (
    check_mapping,
    check_name,
    parse_selection,
    pick_field,
    place,
    select,
    split_fields,
)
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.ledger import ErrorPolicy, OnError, error_handler
from tarshards.storage import traffic
from tarshards.storage.traffic import Traffic
from tarshards.stream.collate import collate
from tarshards.stream.op import op

if TYPE_CHECKING:
    from concurrent.futures import Executor


@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def map(samples: Iterable[Any], function: Callable[[Any], Any], *, on_error: ErrorPolicy = None) -> Iterator[Any]:
    """Yield ``function(sample)`` of every sample.

    A failure is raised as it is, with a note of the sample's place; or *on_error*, a function or "skip", is given an
    OpError and the sample is left out.

    >>> list(map([1, 2], str))
    ['1', '2']
    """
    _check_function(function, "map")
    return _map(samples, function, _handler(on_error))


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
    _check_function(predicate, "filter")
    pairs = map(samples, lambda sample: (sample, predicate(sample)), on_error=on_error)
    return (sample for sample, wanted in pairs if wanted)


@op(per_sample=True, resumable=True, one_for_one=True, context=("on_error",))
def map_fields(
    samples: Iterable[Sample], functions: Mapping[str, Callable[[Any], Any]], *, on_error: ErrorPolicy = None
) -> Iterator[Sample]:
    """Replace each field that *functions* names by its function's result; failures as in ``map``.

    >>> list(map_fields([{"x": 1, "y": 2}], {"x": str}))
    [{'x': '1', 'y': 2}]
    """
    for function in check_mapping(functions, "map_fields", "{field: function}").values():
        _check_function(function, "map_fields")
    return map(samples, partial(_map_fields, functions), on_error=on_error)


def _map_fields(functions: Mapping[str, Callable[[Any], Any]], sample: Sample) -> Sample:
    names = [(pick_field(sample, [field]), function) for field, function in functions.items()]
    return {**sample, **{name: function(sample[name]) for name, function in names}}


@op(per_sample=True, resumable=True, one_for_one=True)
def keep_fields(samples: Iterable[Sample], *fields: str) -> Iterator[Sample]:
    """Keep the given fields, and ``__key__`` and its like; ``"jpg;png"`` is the first of them that a sample has.

    Raises SampleError where a sample has none of them.

    >>> list(keep_fields([{"__key__": "a", "jpg": 1, "cls": 2}], "jpg;png"))
    [{'__key__': 'a', 'jpg': 1}]
    """
    return _keep_fields(samples, split_fields(fields))


def _keep_fields(samples: Iterable[Sample], names: list[list[str]]) -> Iterator[Sample]:
    for sample in samples:
        kept = {field: value for field, value in sample.items() if is_reserved(field)}
        for alternatives in names:
            field = pick_field(sample, alternatives)
            kept[field] = sample[field]
        yield kept


@op(per_sample=True, resumable=True, one_for_one=True)
def rename_fields(samples: Iterable[Sample], names: Mapping[str, str]) -> Iterator[Sample]:
    """Rename fields by ``{new: old}``, where old may be alternatives like ``"jpg;png"``; others stay.

    Raises SampleError where a sample has none of the alternatives, or has the new field already.

    >>> list(rename_fields([{"jpg": 1, "cls": 2}], {"image": "jpg;png"}))
    [{'image': 1, 'cls': 2}]
    """
    pairs = check_mapping(names, "rename_fields", '{"new": "old"}').items()
    return _rename_fields(samples, {check_name(new): check_name(old).split(";") for new, old in pairs})


def _rename_fields(samples: Iterable[Sample], alternatives: dict[str, list[str]]) -> Iterator[Sample]:
    for sample in samples:
        new_of = {pick_field(sample, old): new for new, old in alternatives.items()}
        renamed = {new_of.get(field, field): value for field, value in sample.items()}
        if len(renamed) < len(sample):
            raise SampleError("two fields would get one name", **place(sample))
        yield renamed


@op(per_sample=True, resumable=True, one_for_one=True)
def select_fields(samples: Iterable[Sample], spec: str) -> Iterator[Sample]:
    """Keep and rename fields by *spec*: ``new:old1;old2`` renames, ``jpg;png`` keeps one, ``*`` keeps the others.

    ``__key__`` and its like stay. Raises SampleError where a sample has none of the alternatives, or two of one name.

    >>> list(select_fields([{"__key__": "a", "jpg": 1, "cls": 2, "txt": 3}], "image:png;jpg txt"))
    [{'__key__': 'a', 'image': 1, 'txt': 3}]
    """
    terms = parse_selection(spec)
    return (select(sample, terms) for sample in samples)


@op(per_sample=True, resumable=True, one_for_one=True)
def to_tuple(samples: Iterable[Sample], *fields: str) -> Iterator[tuple[Any, ...]]:
    """Yield the given fields as a tuple; ``"jpg;png"`` is the first of them that a sample has.

    Raises SampleError where a sample has none of them.

    >>> list(to_tuple([{"jpg": 1, "cls": 2}], "jpg;png", "cls"))
    [(1, 2)]
    """
    return _to_tuple(samples, split_fields(fields))


def _to_tuple(samples: Iterable[Sample], names: list[list[str]]) -> Iterator[tuple[Any, ...]]:
    for sample in samples:
        yield tuple([sample[pick_field(sample, alternatives)] for alternatives in names])


def _op_error(error: Exception, sample: Any) -> OpError:
    here = place(sample)
    has_place = isinstance(error, TarshardsError) and {"url": error.url, "key": error.key} == here
    said = error.reason if has_place else error  # type: ignore[attr-defined]
    failure = OpError(f"{type(error).__name__}: {said}", **here)
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
    images: str | None = None,
    *,
    allow_unsafe: bool = False,
    on_error: ErrorPolicy = None,
) -> Iterator[Sample]:
    """Decode every field by the last part of its name; images by the imagespec *images*, or not at all.

    A field that does not decode raises DecodeError; or that is given to *on_error* (or "skip") and the sample is left
    out.
    ``allow_unsafe`` lets pickle and full torch.load run.

    >>> list(decode([{"cls": b"7", "txt": b"seven"}]))
    [{'cls': 7, 'txt': 'seven'}]
    """
    options = {"images": check_imagespec(images), "allow_unsafe": flag("allow_unsafe", allow_unsafe)}
    return _decode(samples, error_handler(on_error), options)


def _decode(samples: Iterable[Sample], on_error: OnError | None, options: dict[str, Any]) -> Iterator[Sample]:
    for sample in samples:
        field = ""
        decoded = {}
        try:
            for field, value in sample.items():
                if isinstance(value, bytes) and not is_reserved(field):
                    value = decode_field(field, value, **options)
                decoded[field] = value
        except DecodeError as error:
            failure = DecodeError(error.reason, **place(sample), field=field)
            if on_error is None:
                raise failure from error
            failure.__cause__ = error
            on_error(failure)
            continue
        yield decoded


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
    _check_function(collate, "batched")
    return _batched(samples, size, collate, flag("partial", partial))


def _batched(samples: Iterable[Any], size: int, collate: Callable[[list[Any]], Any], partial: bool) -> Iterator[Any]:
    iterator = iter(samples)
    while batch := list(islice(iterator, size)):
        if len(batch) == size or partial:
            yield collate(batch)


@op(instead="flatten the batch in collate_fn=")
def flatten(samples: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """Yield the elements of every element.

    >>> list(flatten(["ab", "c"]))
    ['a', 'b', 'c']
    """
    for elements in samples:
        yield from elements


@op(
    one_for_one=True,
    context=("epoch",),
    instead="ShardDataset(shuffle=True) permutes all samples, pool= of them at once",
)
def shuffle(
    samples: Iterable[Any], size: int, *, initial: int | None = None, seed: int = 0, epoch: int = 0
) -> Iterator[Any]:
    """Yield the samples in random order out of a buffer of *size*, the same for the same *seed* and *epoch*.

    With *initial* the first sample comes when the buffer holds that many; it then grows to *size*.

    >>> sorted(shuffle(range(5), 3)) == list(range(5))
    True
    """
    size = whole_number("size", size, 1)
    least = size if initial is None else min(whole_number("initial", initial, 1), size)
    return _shuffle(samples, size, least, random.Random(f"{whole_number('seed', seed)}/{epoch}"))


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
        place = int(drawn() * len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
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
    """Yield the samples *times* times over, or for ever.

    In a stream every pass has an order of its own: pass p of epoch e has that of epoch e x *times* + p without
    ``repeat``, where *times* counts as 2**64 for a stream that repeats for ever.

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
    """Yield pairs of a count and a sample.

    >>> list(enumerate("ab"))
    [(0, 'a'), (1, 'b')]
    """
    return builtins.enumerate(samples, whole_number("start", start))


def _check_function(function: Any, caller: str) -> None:
    from tarshards.parallel import check_function  # which loads concurrent.futures: longer than a tool takes to start

    check_function(function, caller)


@op(per_sample=True, one_for_one=True, context=("on_error",))
def async_map(
    samples: Iterable[Any],
    function: Callable[[Any], Any],
    *,
    workers: int = 4,
    executor: Executor | None = None,
    ordered: bool = True,
    on_error: ErrorPolicy = None,
) -> Iterator[Any]:
    """Map *function* by *workers* threads, or by any ``concurrent.futures.Executor``, in order unless told otherwise.

    An ``async def`` runs on an event loop in a thread of its own, *workers* coroutines at once; each iteration, and in
    a ``ShardLoader`` each batch, has its own loop. At most 2 x *workers* samples are under way. Breaking off cancels
    what has not begun, and coroutines. Failures are as in ``map``.

    >>> list(async_map([3, 1, 2], str, workers=2))
    ['3', '1', '2']
    """
    workers = whole_number("workers", workers, 1)
    if not callable(function):
        raise TypeError(f"async_map takes a function, not {shortened(function)}")
    if isasyncgenfunction(function):
        raise TypeError(f"async_map awaits one result a sample; {function!r} is an async generator")
    from tarshards.parallel import check_executor, is_coroutine_function

    if executor is not None:
        check_executor(executor)
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

    from tarshards.parallel import EventLoop, is_coroutine_function, settled_map

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
    if iscoroutine(result):  # of a function that is not async itself
        result.close()
        raise TypeError(f"{function!r} returned a coroutine; give async_map the async function itself")
    return result


@op(resumable=True, one_for_one=True, instead="tqdm(loader) shows the progress")
def progress(
    samples: Iterable[Any], *, total: int | None = None, description: str | None = None, unit: str = "samples"
) -> Iterator[Any]:
    """Show a progress bar on stderr, if that is a terminal; *total* is how many samples, or other units, there are."""
    if not sys.stderr.isatty():  # to import the bar takes longer than many a run
        yield from samples
        return
    from tqdm import tqdm

    with tqdm(samples, total=total, desc=description, unit=f" {unit}") as bar:
        yield from bar


class Rate(NamedTuple):
    """What ``monitor`` reports: counts since the start, *seconds* since then, rates over the last interval.

    *traffic* is that of this process with web servers and stores since the start.
    """

    samples: int
    bytes: int
    seconds: float
    samples_per_second: float
    bytes_per_second: float
    traffic: Traffic


@op(resumable=True, one_for_one=True, instead="the loader has a monitor")
def monitor(samples: Iterable[Any], callback: Callable[[Rate], Any], *, interval: float = 1.0) -> Iterator[Any]:
    """Call *callback* with a ``Rate`` every *interval* seconds, and at the end; bytes are those of the fields."""
    _check_function(callback, "monitor")
    if not isinstance(interval, int | float) or not interval >= 0:
        raise ValueError(f"interval must be a number of seconds, not {shortened(interval)}")
    return _monitor(samples, callback, interval)


def _monitor(samples: Iterable[Any], callback: Callable[[Rate], Any], interval: float) -> Iterator[Any]:
    begun = last = time.perf_counter()
    before = traffic.so_far()
    number = size = last_number = last_size = 0
    for sample in samples:
        yield sample
        number += 1
        size += _size(sample)
        now = time.perf_counter()
        if now - last >= interval:
            callback(_rate(number, size, now - begun, number - last_number, size - last_size, now - last, before))
            last, last_number, last_size = now, number, size
    now = time.perf_counter()
    callback(_rate(number, size, now - begun, number - last_number, size - last_size, now - last, before))


def _rate(
    samples: int, size: int, seconds: float, new_samples: int, new_bytes: int, interval: float, before: Traffic
) -> Rate:
    interval = max(interval, 1e-9)
    return Rate(samples, size, seconds, new_samples / interval, new_bytes / interval, traffic.so_far() - before)


def _size(value: Any) -> int:
    """The bytes that *value* holds: of strings their length, of arrays their buffer, of containers their values'."""
    if isinstance(value, dict):
        return sum(_size(field) for name, field in value.items() if not is_reserved(str(name)))
    if isinstance(value, (tuple, list)):
        return sum(builtins.map(_size, value))
    return len(value) if isinstance(value, (bytes, str)) else getattr(value, "nbytes", 0)


@op(one_for_one=True, instead="map() can set __key__ from what a sample contains")
def rekey(samples: Iterable[Sample], template: str) -> Iterator[Sample]:
    """Give every sample the key that *template* makes of ``index`` (counted from 0), ``key`` and ``shard``.

    Raises ValueError for a template that is malformed or has other names.

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
def add_source(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Add the URL of its shard to every sample, as the field ``source``; raise SampleError where there is one.

    >>> list(add_source([{"__key__": "a", "__url__": "x.tar"}]))
    [{'__key__': 'a', '__url__': 'x.tar', 'source': 'x.tar'}]
    """
    for sample in samples:
        if "source" in sample:
            raise SampleError("there is a field of this name already", **place(sample), field="source")
        yield {**sample, "source": sample["__url__"]}
