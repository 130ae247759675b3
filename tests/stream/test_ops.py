"""Every op does what its docstring says."""

from __future__ import annotations

import asyncio
import builtins
import gc
import gzip
import io
import pickle
import re
import subprocess
import sys
import time
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leftovers import Leftovers
from PIL import Image
from with_torch import ShardDataset, ShardLoader, needs_torch, torch

from tarshards import Ledger, Stream, readers
from tarshards.errors import DecodeError, OpError, SampleError
from tarshards.stream import ops
from tarshards.stream.collate import collate

SAMPLE = {"__key__": "k", "__url__": "u.tar", "jpg": 1, "cls": 2}


def test_map_raises_the_functions_own_error_with_the_place():
    with pytest.raises(ZeroDivisionError) as caught:
        list(ops.map([SAMPLE], lambda sample: 1 / 0))
    assert caught.value.__notes__ == ["u.tar: k: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("op", [ops.map, ops.filter])
def test_on_error_leaves_the_sample_out(op):
    ledger = Ledger(max_errors=1)
    samples = [{"__key__": str(i), "x": i} for i in range(3)]
    left = list(op(samples, lambda sample: {"x": 1 / (sample["x"] - 1)}, on_error=ledger))
    assert len(left) == 2
    assert [entry.key for entry in ledger.quarantined] == ["1"]
    assert "ZeroDivisionError" in ledger.quarantined[0].reason


def test_on_error_gets_the_cause():
    seen: list[Exception] = []
    list(ops.map([SAMPLE], lambda sample: 1 / 0, on_error=seen.append))
    assert isinstance(seen[0], OpError)
    assert isinstance(seen[0].__cause__, ZeroDivisionError)


def test_errors_of_the_consumer_are_not_the_ops():
    def consume():
        for _ in ops.map([SAMPLE], dict, on_error=lambda error: None):
            raise KeyError

    with pytest.raises(KeyError):
        consume()


def test_no_op_edits_the_callers_sample():
    sample = dict(SAMPLE)
    for stream in (
        ops.map_fields([sample], {"jpg": str}),
        ops.keep_fields([sample], "cls"),
        ops.rename_fields([sample], {"image": "jpg"}),
        ops.decode([{**sample, "cls": b"7"}]),
    ):
        list(stream)
    assert sample == SAMPLE


def test_keep_fields():
    assert list(ops.keep_fields([SAMPLE], "png;jpg")) == [{"__key__": "k", "__url__": "u.tar", "jpg": 1}]
    assert list(ops.keep_fields([SAMPLE], "cls jpg")) == list(ops.keep_fields([SAMPLE], "cls", "jpg"))
    with pytest.raises(SampleError, match=r"u.tar: k: no field png or gif; the sample has jpg, cls"):
        list(ops.keep_fields([SAMPLE], "png;gif"))


def test_rename_fields():
    assert list(ops.rename_fields([SAMPLE], {"cls": "jpg", "jpg": "cls"})) == [
        {"__key__": "k", "__url__": "u.tar", "cls": 1, "jpg": 2}
    ]
    with pytest.raises(SampleError, match="two fields would get the name "):
        list(ops.rename_fields([SAMPLE], {"cls": "jpg"}))
    with pytest.raises(SampleError, match="no field png"):
        list(ops.rename_fields([SAMPLE], {"image": "png"}))


def test_to_tuple():
    assert list(ops.to_tuple([SAMPLE], "png;jpg cls __key__")) == [(1, 2, "k")]
    with pytest.raises(SampleError, match="no field seg"):
        list(ops.to_tuple([SAMPLE], "seg"))


def test_map_fields_names_a_missing_field():
    with pytest.raises(SampleError, match="no field seg"):
        list(ops.map_fields([SAMPLE], {"seg": str}))


def test_decode_names_the_place():
    sample = {"__key__": "k", "__url__": "u.tar", "cls": b"seven"}
    with pytest.raises(DecodeError) as caught:
        list(ops.decode([sample]))
    assert str(caught.value).startswith("u.tar: k.cls: ")
    ledger = Ledger(max_errors=1)
    assert list(ops.decode([sample, {**sample, "cls": b"7"}], on_error=ledger)) == [{**sample, "cls": 7}]
    assert ledger.quarantined[0][:3] == ("u.tar", "k", "cls")


FIELDS = {"seg.png": b"s", "left.seg.png": b"l", "png": b"p", "cls": b"7", "txt": b"t", "json.gz": gzip.compress(b"[]")}


def decoded(*decoders, **options) -> dict:
    (sample,) = ops.decode([{"__key__": "k", "__url__": "u.tar", **FIELDS}], *decoders, **options)
    return {field: value for field, value in sample.items() if not field.startswith("__")}


def tagged(name: str):
    return lambda data: (name, data)


BUILT_IN = {"seg.png": b"s", "left.seg.png": b"l", "png": b"p", "cls": 7, "txt": "t", "json.gz": []}


def test_decode_by_field():
    assert decoded() == BUILT_IN
    assert decoded(cls=float, json=len) == {**BUILT_IN, "cls": 7.0, "json.gz": 2}
    by_name = decoded({"seg.png": tagged("seg")}, png=tagged("png"), **{"left.seg.png": tagged("left")})
    assert {field: value[0] for field, value in by_name.items() if field.endswith("png")} == {
        "seg.png": "seg",
        "left.seg.png": "left",
        "png": "png",
    }
    alternatives = decoded({"JPG;Png": tagged("image"), "json.gz": tagged("packed")})
    assert alternatives["png"] == ("image", b"p")
    assert alternatives["json.gz"] == ("packed", FIELDS["json.gz"])
    assert decoded(cls=lambda data: None)["cls"] is None, "its result is the value, whatever it is"
    assert decoded(images=None, samples=tagged("samples"), self=tagged("self")) == BUILT_IN


def test_decode_by_handlers():
    seen = []

    def first(field, data):
        seen.append(field)
        return data * 2 if field.endswith("png") else None

    def second(field, data):
        return "second" if field in ("png", "txt") else None

    assert decoded(first, second, cls=float) == {
        "seg.png": b"ss",
        "left.seg.png": b"ll",
        "png": b"pp",
        "cls": 7.0,
        "txt": "second",
        "json.gz": [],
    }
    assert seen == ["seg.png", "left.seg.png", "png", "txt", "json.gz"], "a function for a field comes first"


@pytest.mark.parametrize(
    ("only", "expected"),
    [("cls txt", {"cls", "txt"}), (["png"], {"seg.png", "left.seg.png", "png"}), ("SEG.PNG;json", {"seg", "json.gz"})],
)
def test_decode_only_some_fields(only, expected):
    found = decoded(lambda field, data: field, only=only)
    if "seg" in expected:
        expected = {"seg.png", "left.seg.png", "json.gz"}
    assert found == {field: field if field in expected else data for field, data in FIELDS.items()}


def test_decode_leaves_what_is_no_bytes_as_it_is():
    assert list(ops.decode([{"__key__": b"k", "cls": 7, "txt": None}], cls=tagged("cls"), txt=tagged("txt"))) == [
        {"__key__": b"k", "cls": 7, "txt": None}
    ]


def red() -> bytes:
    """A PNG of 2 x 3 red pixels."""
    image = io.BytesIO()
    Image.new("RGB", (2, 3), (255, 0, 0)).save(image, "PNG")
    return image.getvalue()


def test_an_imagespec_for_one_field():
    sample = {"png": red(), "seg.png": red(), "cover": red()}
    (found,) = ops.decode([sample], "rgb8", {"seg.png": "l8"}, cover="pil")
    assert (found["png"].shape, found["seg.png"].shape, found["cover"].size) == ((3, 2, 3), (3, 2), (2, 3))


@needs_torch
def test_images_as_tensors_of_floats():
    (found,) = ops.decode([{"png": red()}], "torch", only="png")
    assert found["png"].dtype == torch.float32
    assert found["png"].shape == (3, 3, 2)
    assert found["png"].flatten(1).tolist() == [[1.0] * 6, [0.0] * 6, [0.0] * 6]


def fail(data):
    return 1 / 0


@pytest.mark.parametrize(
    "arguments", [{"cls": fail}, {"images": lambda field, data: fail(data)}, {"images": {"cls": fail}}]
)
def test_a_decoder_that_fails_names_the_place(arguments):
    sample = {"__key__": "k", "__url__": "u.tar", "cls": b"7"}
    with pytest.raises(DecodeError, match=r"^u\.tar: k\.cls: ZeroDivisionError: division by zero$") as caught:
        list(ops.decode([sample], **arguments))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    seen: list[Exception] = []
    assert list(ops.decode([sample], on_error=seen.append, **arguments)) == []
    assert isinstance(seen[0].__cause__, ZeroDivisionError)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, data):
        return float(data)


def test_any_callable_decodes():
    assert decoded(cls=Unhashable())["cls"] == 7.0
    assert decoded(cls=partial(int, base=8))["cls"] == 7


def decode_copies(*decoders, count, **options) -> None:
    """Decode *count* samples with the fields jpg and cls."""
    list(ops.decode([{"jpg": b"", "cls": b"1"}] * count, *decoders, **options))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"jgp": fail}, "jgp; they have cls, jpg; did you mean 'jpg'?"),
        ({"images": {"png;jgp": fail}}, "png or jgp; they have cls, jpg; did you mean 'jpg'?"),
        ({"only": "cls kls"}, "kls; they have cls, jpg; did you mean 'cls'?"),
        ({"only": ["caption.txt"]}, "caption.txt; they have cls, jpg"),
    ],
)
def test_a_name_that_no_field_has_is_told_once(caplog, arguments, words):
    decode_copies(count=99, **arguments)
    assert not caplog.records
    decode_copies(count=1, **arguments)  # as a loader does with each batch
    decode_copies(count=200, **arguments)
    expected = f"decode: none of the first 100 samples has a field {words}"
    assert [record.getMessage() for record in caplog.records] == [expected]


@pytest.mark.parametrize("index", [True, False])
def test_a_name_that_no_field_has_is_told_where_a_small_dataset_ends(make_shards, caplog, index):
    stream = Stream.from_shards(make_shards(2, index=True), index=index).decode(lambda field, data: None, jsn=len)
    count = len(list(stream))
    told = f"decode: none of the first {count} samples has a field jsn; they have "
    assert [record.getMessage().startswith(told) for record in caplog.records] == [True]
    assert list(stream.take(1))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("second", [{"jpg": str}, {"only": "jpg"}, {"images": {"png;jpg": str}}])
def test_a_second_decode_of_a_field_is_told(caplog, second):
    list(ops.decode(ops.decode([{"__key__": "a", "jpg": b"", "cls": b"1"}] * 100, jpg=len), **second))
    words = "decode: jpg is not bytes and stays unchanged; one decode() takes all functions"
    assert [record.getMessage() for record in caplog.records] == [words]


def test_names_that_fields_have_are_no_warning(caplog):
    decode_copies({"seg.png;jpg": len}, count=200, cls=float, only="png;jpg cls")
    assert not caplog.records


def test_batches():
    batches = list(ops.batched([{"__key__": str(i), "x": i, "a": np.full(2, i)} for i in range(5)], 2))
    assert [batch["__key__"] for batch in batches] == [["0", "1"], ["2", "3"], ["4"]]
    assert batches[0]["x"].tolist() == [0, 1]
    assert batches[1]["a"].shape == (2, 2)
    assert len(list(ops.batched(range(5), 2, partial=False))) == 2
    assert list(ops.batched(range(4), 2, collate=sum)) == [1, 5]
    assert list(ops.batched([], 2)) == []
    with pytest.raises(ValueError, match="at least 1"):
        ops.batched([], 0)


def test_collate_kinds():
    assert collate([1.5, 2]).dtype == np.float64
    assert collate([True, False]).dtype == np.bool_
    assert collate(["a", "b"]) == ["a", "b"]
    assert collate([b"a", None]) == [b"a", None]
    tensors = collate([(torch.zeros(2), "a"), (torch.ones(2), "b")])
    assert isinstance(tensors[0], torch.Tensor)
    assert tensors[0].shape == (2, 2)


def test_collate_refuses_what_makes_no_batch():
    with pytest.raises(
        ValueError, match=r"a: .* of shape \(2,\) in sample 0 and .*\(3,\) in sample 1 cannot be batched"
    ):
        collate([{"a": np.zeros(2)}, {"a": np.zeros(3)}])
    with pytest.raises(ValueError, match="NoneType"):
        collate([{"a": np.zeros(2)}, {"a": None}])
    with pytest.raises(SampleError, match=r"^u: k: sample 0 has .* a, and sample k has the fields a, b, which"):
        collate([{"a": 1}, {"a": 1, "b": 2, "__key__": "k", "__url__": "u"}])


@given(st.integers(0, 60), st.integers(1, 20), st.none() | st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_shuffle_is_a_permutation_of_its_seed_and_epoch(count, size, initial, seed, epoch):
    once = list(ops.shuffle(range(count), size, initial=initial, seed=seed, epoch=epoch))
    assert sorted(once) == list(range(count))
    assert once == list(ops.shuffle(range(count), size, initial=initial, seed=seed, epoch=epoch))


def test_shuffle_differs_by_seed_and_epoch():
    orders = {tuple(ops.shuffle(range(50), 50, seed=s, epoch=e)) for s in range(5) for e in range(5)}
    assert len(orders) == 25


def test_shuffle_is_uniform_within_its_buffer():
    firsts = [next(ops.shuffle(range(4), 4, seed=seed)) for seed in range(4000)]
    assert all(900 < firsts.count(i) < 1100 for i in range(4))


def test_shuffle_starts_at_initial_and_grows():
    taken: list[int] = []

    def source():
        for i in range(100):
            taken.append(i)
            yield i

    shuffled = ops.shuffle(source(), 50, initial=10)
    next(shuffled)
    assert len(taken) <= 11
    for _ in range(60):
        next(shuffled)
    assert len(taken) == 100


@pytest.mark.parametrize(("size", "held"), [(1000, 100), (100, 100), (7, 7)])
def test_shuffle_begins_with_a_hundred(size, held):
    taken: list[int] = []
    shuffled = ops.shuffle((taken.append(i) or i for i in range(2000)), size)
    first = next(shuffled)
    assert held <= len(taken) <= held + 1
    assert sorted([first, *shuffled]) == list(range(2000))


def test_sliding_counts_its_windows():
    assert list(ops.sliding("abcd", 2)) == [["a", "b"], ["b", "c"], ["c", "d"]]
    assert list(ops.sliding("abcdefg", 2, step=3)) == [["a", "b"], ["d", "e"]]
    assert list(ops.sliding("abcdefg", 2, step=3, partial=True)) == [["a", "b"], ["d", "e"], ["g"]]
    assert list(ops.sliding("ab", 3)) == []
    assert list(ops.sliding("ab", 3, partial=True)) == [["a", "b"]]
    assert list(ops.sliding("abc", 2, partial=True)) == [["a", "b"], ["b", "c"]]


@given(st.integers(0, 30), st.integers(1, 8), st.integers(1, 8))
def test_sliding_cuts_every_window_once(count, size, step):
    items = list(range(count))
    full = [items[i : i + size] for i in range(0, count - size + 1, step)]
    assert list(ops.sliding(items, size, step=step)) == full
    windows = list(ops.sliding(items, size, step=step, partial=True))
    assert windows[: len(full)] == full
    assert len(windows) <= len(full) + 1
    assert windows == [items[i * step : i * step + size] for i in range(len(windows))]
    if step <= size:
        assert {item for window in windows for item in window} == set(items)


@pytest.mark.interop
@given(st.integers(0, 30), st.integers(1, 8))
def test_sliding_is_that_of_toolz(count, size):
    toolz = pytest.importorskip("toolz")
    assert list(map(tuple, ops.sliding(range(count), size))) == list(toolz.sliding_window(size, range(count)))


def test_windows_do_not_share_their_list():
    windows = []
    for window in ops.sliding("abc", 2):
        windows.append(list(window))
        window.clear()
    assert windows == [["a", "b"], ["b", "c"]]


VALUES = st.integers(-5, 5) | st.text(max_size=3) | st.binary(max_size=3) | st.none()


@given(st.data(), st.integers(1, 9), st.integers(0, 25))
def test_unbatched_undoes_batched(data, size, count):
    """For dicts, tuples and single values, whose columns are arrays or lists."""
    columns = data.draw(st.lists(st.sampled_from(["int", "float", "text", "list", "array"]), min_size=1, max_size=3))
    makers = {
        "int": lambda i: i,
        "float": lambda i: i / 2,
        "text": str,
        "list": lambda i: [i] * i,
        "array": lambda i: np.array([i, i + 1]),
    }
    form = data.draw(st.sampled_from(["dict", "tuple", "value"]))
    rows = [[makers[column](i) for column in columns] for i in range(count)]
    if form == "dict":
        samples = [{"__key__": str(i), **{f"{n}.x": v for n, v in enumerate(row)}} for i, row in enumerate(rows)]
    else:
        samples = [tuple(row) if form == "tuple" else row[0] for row in rows]
    back = list(ops.unbatched(ops.batched(samples, size)))
    np.testing.assert_equal(back, samples)
    assert form == "value" or list(map(type, back)) == list(map(type, samples))


def test_unbatched_takes_tensors_and_what_a_dataloader_returns():
    samples = [(torch.full((2,), i), i, f"{i}") for i in range(5)]
    (batch,) = Stream(samples).batched(5).collect()
    loader = torch.utils.data.DataLoader([batch], batch_size=None)
    for batches in [batch], loader:  # the loader makes a list of a tuple
        back = list(ops.unbatched(batches))
        assert [type(sample) for sample in back] == [tuple] * 5
        assert [(pair.tolist(), int(number), text) for pair, number, text in back] == [
            ([i, i], i, str(i)) for i in range(5)
        ]
    assert [int(row) for row in ops.unbatched([torch.arange(3)])] == [0, 1, 2]
    assert list(ops.unbatched([[]])) == []  # an empty batch of a ShardLoader


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": [1, 2], "y": np.zeros(3)}, "the same length, and here field x has 2, field y has 3"),
        (([1, 2], [3]), "the same length, and here element 0 has 2, element 1 has 1"),
        ({"x": [1], "y": "a"}, "field y of a batch is a list, an array or a tensor, not 'a'"),
        ({"x": [1], "y": (1,)}, r"field y of a batch is a list, .* not \(1,\)"),
        ({"x": np.float64(1)}, "field x of a batch is a list, an array or a tensor, not"),
        ({}, "the same length, and here it has none"),
        (np.float64(1), "not a batch of samples"),
        ("ab", "not a batch of samples: 'ab'"),
        (None, "not a batch of samples: None"),
    ],
)
def test_unbatched_refuses_what_is_no_batch(batch, words):
    with pytest.raises(SampleError, match=words) as caught:
        list(ops.unbatched([batch]))
    assert "\n" not in str(caught.value)
    seen: list[Exception] = []
    assert list(ops.unbatched([[1], batch, [2]], on_error=seen.append)) == [1, 2]
    assert [type(error) for error in seen] == [SampleError]


def test_map_tuple():
    assert list(ops.map_tuple([(1, 2, 3), [4, 5, 6]], str, None)) == [("1", 2, 3), ("4", 5, 6)]
    with pytest.raises(SampleError, match="2 functions for a tuple, and this is 1 elements"):
        list(ops.map_tuple([(1,)], str, str))
    with pytest.raises(SampleError, match="2 functions for a tuple, and this is dict"):
        list(ops.map_tuple([SAMPLE], str, str))
    with pytest.raises(ValueError, match="one function for each element"):
        ops.map_tuple([])
    with pytest.raises(TypeError, match="map_tuple takes a function, not 3"):
        ops.map_tuple([], 3)


def test_map_tuple_names_the_element():
    with pytest.raises(ZeroDivisionError) as caught:
        list(ops.map_tuple([(1, 0)], None, lambda number: 1 / number))
    assert caught.value.__notes__ == ["element 1: ZeroDivisionError: division by zero"]
    ledger = Ledger(max_errors=1)
    assert list(ops.map_tuple([(1, 0), (1, 2)], None, lambda number: 1 / number, on_error=ledger)) == [(1, 0.5)]
    assert ledger.quarantined[0].reason == "element 1: ZeroDivisionError: division by zero"


def test_map_drops_none_only_when_told():
    assert list(ops.map([1, 2, 3], {1: 0, 3: 5}.get)) == [0, None, 5]
    assert list(ops.map([1, 2, 3], {1: 0, 3: 5}.get, drop_none=True)) == [0, 5]
    with pytest.raises(TypeError, match="drop_none must be True or False, not 'yes'"):
        ops.map([], str, drop_none="yes")


def _pairs(samples, gap="", *, on_error=None, epoch=None, function=None, samples_=None):
    for sample in samples:
        yield sample, next(samples, None), gap, on_error, epoch, function


def test_a_pipe_gets_an_iterator_and_its_own_arguments():
    """Also those that streams give to their own ops, and those that have the names of our parameters."""
    handler = object()
    piped = Stream(["a", "b", "c"]).pipe(_pairs, "-", on_error=handler, epoch=7, function="f")
    assert piped.collect() == [("a", "b", "-", handler, 7, "f"), ("c", None, "-", handler, 7, "f")]
    assert Stream([1]).pipe(lambda taken, **options: [options], self=1, samples=2).collect() == [
        {"self": 1, "samples": 2}
    ]


def test_a_pipe_runs_when_it_is_iterated_each_time_anew():
    calls = []

    def count(samples):
        calls.append(1)
        return map(str, samples)

    stream = Stream(range(3)).pipe(count)
    iterator = iter(stream)
    assert not calls
    assert next(iterator) == "0"
    assert len(calls) == 1
    assert stream.collect() == stream.collect() == ["0", "1", "2"]


def test_leaving_a_pipe_closes_its_generator():
    closed = []

    def slow(samples):
        try:
            yield from samples
        finally:
            closed.append(True)

    iterator = iter(Stream(range(3)).pipe(slow))
    next(iterator)
    iterator.close()
    assert closed == [True]


@pytest.mark.parametrize(("result", "shown"), [(None, "None"), (3, "3")])
def test_a_pipe_without_a_result_names_its_function(result, shown):
    def forgetful(samples):
        return result

    with pytest.raises(TypeError, match=rf"^pipe: .*forgetful returned {shown}; a function in a pipe yields") as caught:
        Stream([1]).pipe(forgetful).collect()
    assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="pipe takes a function, not 3"):
        Stream([1]).pipe(3)


def test_errors_in_a_pipe_are_its_own():
    def broken(samples):
        yield next(samples)
        iter(None)

    with pytest.raises(TypeError, match="'NoneType' object is not iterable"):
        Stream([1]).pipe(broken).collect()


def test_take_and_skip():
    assert list(ops.take("abc", 0)) == []
    assert list(ops.take("abc", None)) == ["a", "b", "c"]
    assert list(ops.skip("abc", 5)) == []


def test_repeat_ends_on_nothing():
    assert list(ops.repeat([])) == []
    assert list(ops.take(ops.repeat([1, 2]), 5)) == [1, 2, 1, 2, 1]


def test_enumerate_and_flatten():
    assert list(ops.enumerate("ab", start=3)) == [(3, "a"), (4, "b")]
    assert list(ops.flatten([[1], [], [2, 3]])) == [1, 2, 3]


def _slow_square(x: int) -> int:
    time.sleep(0.02 if x % 3 == 0 else 0)
    return x * x


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor, ProcessPoolExecutor])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_async_map_keeps_order(executor):
    expected = [x * x for x in range(20)]
    if executor is None:
        assert list(ops.async_map(range(20), _slow_square, workers=3)) == expected
        assert sorted(ops.async_map(range(20), _slow_square, workers=3, ordered=False)) == expected
    else:
        with executor(2) as pool:
            assert list(ops.async_map(range(20), _slow_square, executor=pool)) == expected
            assert sorted(ops.async_map(range(20), _slow_square, executor=pool, ordered=False)) == expected


def test_async_map_is_bounded():
    taken: list[int] = []

    def source():
        for i in range(1000):
            taken.append(i)
            yield i

    results = ops.async_map(source(), lambda x: x, workers=4)
    next(results)
    assert len(taken) <= 8
    results.close()
    assert len(taken) <= 8


def test_async_map_leaves_no_thread_behind():
    before = Leftovers()
    results = ops.async_map(range(1000), lambda x: x, workers=4)
    next(results)
    assert before.threads()
    results.close()
    assert not before.threads()


def test_async_map_raises_the_first_error():
    results = ops.async_map(range(10), lambda x: 1 // (x - 3), workers=2)
    assert [next(results) for _ in range(3)] == [-1, -1, -1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(ValueError, match="at least 1"):
        ops.async_map([], str, workers=0)


def test_progress_writes_to_a_terminal_only(capsys):
    assert list(ops.progress(range(5), total=5)) == [0, 1, 2, 3, 4]
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_monitor_counts_samples_and_bytes():
    rates = []
    samples = [{"__key__": "k" * 100, "x": b"12345", "y": np.zeros(2), "z": ["ab", (b"c",)]}] * 10
    assert len(list(ops.monitor(samples, rates.append, interval=1e9))) == 10
    assert len(rates) == 1
    assert (rates[0].samples, rates[0].bytes) == (10, 10 * (5 + 16 + 2 + 1))
    list(ops.monitor(samples, rates.append, interval=0))
    assert len(rates) == 12
    assert all(rate.samples_per_second > 0 for rate in rates[:-1])


def test_builtins_are_not_hidden_by_the_ops_own_names():
    assert builtins.map is not ops.map


async def _slow_cube(x: int) -> int:
    await asyncio.sleep(0.02 if x % 3 == 0 else 0)
    return x**3


class Cube:
    async def __call__(self, x: int) -> int:
        return await _slow_cube(x)

    async def method(self, x: int) -> int:
        return await _slow_cube(x)


async def _power(x: int, *, exponent: int) -> int:
    return x**exponent


COROUTINE_FUNCTIONS = {
    "async def": _slow_cube,
    "object": Cube(),
    "method": Cube().method,
    "partial": partial(_power, exponent=3),
    "partial of a partial": partial(partial(_power), exponent=3),
    "partial of an object": partial(Cube()),
}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("function", COROUTINE_FUNCTIONS)
def test_async_map_awaits_coroutines(function, ordered):
    before = Leftovers()
    results = list(ops.async_map(range(20), COROUTINE_FUNCTIONS[function], workers=3, ordered=ordered))
    assert (results if ordered else sorted(results)) == [x**3 for x in range(20)]
    assert not before.threads()


def test_async_map_runs_as_many_coroutines_at_once_as_it_has_workers():
    under_way, most, taken = 0, 0, []

    async def function(x: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return x

    def source():
        for i in range(100):
            taken.append(i)
            yield i

    results = ops.async_map(source(), function, workers=4)
    assert next(results) == 0
    assert len(taken) <= 8
    assert list(results) == list(range(1, 100))
    assert most == 4


def test_leaving_async_map_early_cancels_its_coroutines(caplog):
    begun, ended = [], []

    async def function(x: int) -> int:
        begun.append(x)
        try:
            await asyncio.sleep(100 if x else 0)
        finally:
            await asyncio.sleep(0.01)
            ended.append(x)
        return x

    before = Leftovers()
    for workers in 1, 4:
        results = ops.async_map(range(1000), function, workers=workers)
        assert next(results) == 0
        results.close()
        assert not before.threads()
        assert sorted(begun) == sorted(ended), "what began has cleaned up"
        begun.clear(), ended.clear()
    gc.collect()  # a coroutine that was never awaited would warn, a pending task would log
    assert not caplog.records


@pytest.mark.parametrize("is_async", [True, False])
def test_failures_of_async_map_are_those_of_map(is_async):
    def fail(sample):
        return {**sample, "x": 1 // (sample["x"] - 2)}

    async def fail_later(sample):
        return fail(sample)

    samples = [{"__key__": str(i), "__url__": "u.tar", "x": i} for i in range(6)]
    function = fail_later if is_async else fail
    with pytest.raises(ZeroDivisionError) as caught:
        list(ops.async_map(samples, function))
    assert caught.value.__notes__ == ["u.tar: 2: ZeroDivisionError: integer division or modulo by zero"]
    ledger = Ledger(max_errors=1)
    left = list(ops.async_map(samples, function, on_error=ledger))
    assert left == list(ops.map(samples, fail, on_error=lambda error: None))
    assert [(entry.shard, entry.key) for entry in ledger.quarantined] == [("u.tar", "2")]


def test_async_map_says_what_it_cannot_run():
    async def generator(x):
        yield x

    with ThreadPoolExecutor(1) as pool, pytest.raises(TypeError, match="leave out executor="):
        ops.async_map(range(3), _slow_cube, executor=pool)
    with pytest.raises(TypeError, match="async generator"):
        ops.async_map(range(3), generator)
    with pytest.raises(TypeError, match="returned a coroutine; give async_map the async function itself"):
        list(ops.async_map(range(3), lambda x: _slow_cube(x)))


def test_an_executor_that_cancels_its_calls_does_not_hang():
    with ThreadPoolExecutor(1) as pool:
        results = ops.async_map(range(100), _slow_square, executor=pool)
        next(results)
        pool.shutdown(wait=False, cancel_futures=True)
        with pytest.raises((CancelledError, RuntimeError)):
            list(results)


@pytest.mark.parametrize("function", COROUTINE_FUNCTIONS)
def test_what_does_not_await_refuses_async_functions(make_shards, function):
    shards = make_shards(2)
    function = COROUTINE_FUNCTIONS[function]
    calls = {
        "map": lambda: ops.map([1], function),
        "filter": lambda: ops.filter([1], function),
        "map_fields": lambda: ops.map_fields([{"x": 1}], {"x": function}),
        "batched": lambda: ops.batched([1], 1, collate=function),
        "monitor": lambda: ops.monitor([1], function),
        "decode": lambda: ops.decode([{"x": b""}], x=function),
        "decode ": lambda: ops.decode([{"x": b""}], function),
        "map_tuple": lambda: ops.map_tuple([(1,)], function),
        "pipe": lambda: ops.pipe([1], function),
        "compose": lambda: Stream([1]).compose(function),
        "on_error=": lambda: ops.map([1], str, on_error=function),
        "on_error= ": lambda: ops.async_map([1], str, on_error=function),
        "on_error=  ": lambda: ops.decode([{}], on_error=function),
        "on_error=   ": lambda: Stream.from_shards(shards, on_error=function),
        "on_error=    ": lambda: Ledger(on_error=function),
        "a reader": lambda: readers.using(function),
        "ShardLoader": lambda: ShardLoader(ShardDataset(shards), 2, collate_fn=function),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name.strip()} .*async_map\(\)"):
            list(call())


async def _label(sample):
    await asyncio.sleep(0)
    return {"cls": int(sample["cls"])}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("index", [True, False])
def test_coroutines_run_in_the_workers_of_loaders(make_shards, workers, index):
    dataset = ShardDataset(make_shards(4, index=index)).async_map(_label)
    assert pickle.loads(pickle.dumps(dataset)).collect() == [{"cls": i} for i in range(12)]
    batches = list(ShardLoader(dataset, 2, num_workers=workers))
    assert sorted(int(label) for batch in batches for label in batch["cls"]) == list(range(12))
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
    assert sorted(sample["cls"] for sample in loader) == list(range(12))


def test_an_abandoned_async_map_lets_the_interpreter_exit():
    program = """
import asyncio
from tarshards.stream import ops
async def forever(x):
    await asyncio.sleep(100 if x else 0)
results = ops.async_map(range(100), forever)
next(results)
"""
    run = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


class Tracker:
    """Accepts and refuses the same values as wandb.log and mlflow.log_metrics."""

    def __init__(self):
        self.logged = []

    def log(self, data: dict) -> None:
        assert all(isinstance(name, str) and type(value) in (int, float) for name, value in data.items())
        self.logged.append(data)

    def log_metrics(self, metrics: dict, step: int | None = None) -> None:
        for name, value in metrics.items():
            assert re.fullmatch(r"[\w.\- /]+", name)
            float(value)
        assert type(step) is int
        self.logged.append((step, metrics))


def test_monitor_reports_to_trackers_of_experiments():
    """The one-line recipes of the docstring."""
    samples = [{"__key__": "k", "x": b"12345"}] * 10
    wandb = mlflow = Tracker()
    recipes = re.findall(r"``(monitor\(lambda .*\))``", ops.monitor.__doc__)
    assert len(recipes) == 2
    for recipe in recipes:
        eval(
            f"Stream(samples).{recipe}", {"Stream": Stream, "samples": samples, "wandb": wandb, "mlflow": mlflow}
        ).collect()
    for_wandb, (step, for_mlflow) = wandb.logged
    assert (for_wandb["samples"], for_wandb["bytes"], step) == (10, 50, 10)
    assert for_wandb.keys() == for_mlflow.keys()
    assert {"samples_per_second", "traffic/requests"} <= for_wandb.keys()


def test_fields_leaves_only_data_for_code_that_takes_all_values():
    samples = [{"__key__": "a", "__url__": "x.tar", "image": [1.0, 2.0], "label": 3}]
    stream = Stream(samples).fields().map(lambda item: [np.array(v, dtype=np.float32) for v in item.values()])
    ((image, label),) = stream
    assert (image.tolist(), label.tolist()) == ([1, 2], 3)


def test_monitor_prints_by_default(capfd):
    assert list(Stream([b"ab", b"c"]).monitor()) == [b"ab", b"c"]
    assert capfd.readouterr().err.startswith("2 samples in 0.0 s; ")


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda stream: stream.async_map(str, max_workers=100), "here it is workers="),
        (lambda stream: stream.loop(), r"repeat\(n\)"),
        (lambda stream: stream.batched(2, drop_last_if_not_full=True), "here it is partial=False"),
    ],
)
def test_names_of_squirrel_are_explained(use, words):
    with pytest.raises((TypeError, AttributeError), match=words):
        use(Stream([1]))
