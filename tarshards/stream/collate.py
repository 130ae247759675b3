"""Samples of one form -> one batch of that form, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from numbers import Number
from typing import Any

from tarshards.errors import SampleError, shortened
from tarshards.samples.keys import is_reserved

NUMERIC = "biufc"  # kinds of numpy's dtypes
CURE = "pass a function of your own as collate_fn= (in batched(), as collate=)"


def collate(samples: list[Any]) -> Any:
    """Turn samples of one form into a batch of that form: dicts and tuples field by field.

    Numbers, and arrays of the same shape, become a numpy array with a leading axis for the samples, tensors a tensor;
    anything else becomes a list. Raises SampleError for samples with different fields, and ValueError for numbers or
    arrays mixed with arrays of another shape or with other types; both name the first sample and the one that differs.
    """
    return _collate(samples, _stack)


def collate_ragged(samples: list[Any]) -> Any:
    """Turn samples into a batch like ``collate``, but leave arrays of a field that differ in shape as a list.

    >>> collate_ragged([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}])
    {'x': array([1, 2]), 'y': ['a', 'b']}
    """
    return _collate(samples, _stack_or_list)


def collate_packed(samples: list[Any]) -> dict[str, Any]:
    """Turn dicts into one packed row: the arrays of each field, concatenated along their first axis.

    ``cu_seqlens`` (int32) has the offset of each sample in the row, and the end of the last; ``position_ids`` (int64)
    has the position of each element in its sample. Other fields become lists. Raises SampleError for samples without
    arrays or with different fields, and for a sample whose arrays differ in length.

    >>> import numpy as np
    >>> row = collate_packed([{"ids": np.array([5, 6, 7])}, {"ids": np.array([8, 9])}])
    >>> row["ids"], row["cu_seqlens"], row["position_ids"]
    (array([5, 6, 7, 8, 9]), array([0, 3, 5], dtype=int32), array([0, 1, 2, 0, 1]))
    """
    import numpy as np

    first = samples[0]
    for sample in samples:
        if not isinstance(sample, dict) or sample.keys() != first.keys():
            raise _other_form(sample, samples)
    fields = [name for name in first if _is_array(first[name])]
    if not fields:
        raise SampleError("packing= takes samples with arrays, whose first axis is packed").at(first)
    offsets = np.zeros(len(samples) + 1, np.int64)
    for number, sample in enumerate(samples):
        sizes = {len(sample[name]) for name in fields}
        if len(sizes) > 1:
            reason = f"the arrays {', '.join(fields)} of a packed sample differ in length"
            raise SampleError(reason).at(sample)
        offsets[number + 1] = offsets[number] + sizes.pop()
    row = {name: [sample[name] for sample in samples] for name in first}
    row |= {name: np.concatenate([np.asarray(array) for array in row[name]]) for name in fields}
    return row | sequences(offsets)


def cut_arrays(sample: Any, begin: int, size: int, length: int) -> Any:
    """Return *sample* with its arrays cut to the *size* rows from *begin* on; other values stay.

    Raises SampleError unless the arrays have *length* rows; an empty array counts as one row.
    """
    if not isinstance(sample, dict):
        return sample
    fields = [name for name, value in sample.items() if _is_array(value)]
    for name in fields:
        if max(len(sample[name]), 1) != length:
            raise SampleError(not_as_long(len(sample[name]), length), field=name).at(sample)
    return {**sample, **{name: sample[name][begin : begin + size] for name in fields}}


def not_as_long(found: int, given: int) -> str:
    """Return the message for a sample that cannot be split because its length is not the one given to ``pack``."""
    return f'{found} elements, where pack() was given {given}: overlong="split" requires the exact lengths'


def sequences(offsets: Any) -> dict[str, Any]:
    """Return ``cu_seqlens`` (int32) and ``position_ids`` (int64) of a packed row for the *offsets* of its samples.

    *offsets* (int64) also has the end of the last sample. Raises SampleError for a row of 2**31 elements or more.
    """
    import numpy as np

    if offsets[-1] >= 2**31:
        raise SampleError(f"a packed row has at most 2**31 - 1 elements, not {offsets[-1]}")
    begins = np.repeat(offsets[:-1], np.diff(offsets))
    return {"cu_seqlens": offsets.astype(np.int32), "position_ids": np.arange(offsets[-1]) - begins}


def _collate(samples: list[Any], stack: Callable[[list[Any], str, list[Any]], Any]) -> Any:
    first = samples[0]
    if isinstance(first, dict):
        for sample in samples:
            if not isinstance(sample, dict) or sample.keys() != first.keys():
                raise _other_form(sample, samples)
        return {field: stack([sample[field] for sample in samples], field, samples) for field in first}
    if isinstance(first, tuple):
        for sample in samples:
            if not isinstance(sample, tuple) or len(sample) != len(first):
                raise _other_form(sample, samples)
        return tuple(stack(list(values), f"element {i}", samples) for i, values in enumerate(zip(*samples)))
    return stack(samples, "sample", samples)


def unbatch(batch: Any) -> Iterable[Any]:
    """Return the samples of *batch*, which has the form that ``collate`` returns; see ``unbatched``.

    Raises SampleError for a batch whose fields differ in length, and for anything that is not a batch.

    >>> unbatch(([1, 2], ["a", "b"]))
    [(1, 'a'), (2, 'b')]
    """
    if isinstance(batch, dict):
        rows = _rows({f"field {name}": values for name, values in batch.items()})
        return [dict(zip(batch, values)) for values in rows]
    is_tuple = isinstance(batch, tuple) or (isinstance(batch, list) and any(_is_array(part) for part in batch))
    if is_tuple:
        return _rows({f"element {i}": values for i, values in enumerate(batch)})
    if isinstance(batch, list) or _is_array(batch):
        return batch
    raise SampleError(f"not a batch of samples: {shortened(batch)}")


def _rows(columns: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the rows of *columns*; raise SampleError unless they are lists, arrays or tensors of one length."""
    for name, values in columns.items():
        if not isinstance(values, list) and not _is_array(values):
            raise SampleError(f"{name} of a batch is a list, an array or a tensor, not {shortened(values)}")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1:
        words = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "it has none"
        raise SampleError(f"the fields of a batch must have the same length, and here {words}")
    return list(zip(*columns.values()))


def _is_array(value: Any) -> bool:
    """Return whether *value* is an array or a tensor with rows."""
    return len(getattr(value, "shape", ())) > 0


def _other_form(sample: Any, samples: list[Any]) -> SampleError:
    """Return the error for a *sample* whose fields, or number of elements, differ from the first's."""
    number = next(i for i, each in enumerate(samples) if each is sample)
    here, first = (f"{_name(samples[i], i)} has {_words(samples[i])}" for i in (number, 0))
    return SampleError(f"{first}, and {here}, which cannot be batched; {CURE}").at(sample)


def _words(sample: Any) -> str:
    if isinstance(sample, dict):
        return f"the fields {', '.join(name for name in sample if not is_reserved(name)) or '(none)'}"
    return f"{len(sample)} elements" if isinstance(sample, tuple) else f"type {type(sample).__name__}"


def _name(sample: Any, number: int) -> str:
    """Return the name of a batch's sample in messages: its key, or its number in the batch."""
    key = sample.get("__key__") if isinstance(sample, dict) else None
    return f"sample {number}" if key is None else f"sample {key}"


def _stack(values: list[Any], field: str, samples: list[Any]) -> Any:
    """Return the *values* of one field as the field of a batch; *samples* are those that have them, for messages."""
    import numpy as np

    first = values[0]
    if isinstance(first, (bool, int, float, complex, np.number, np.bool_)):
        with suppress(ValueError):  # rows that differ in length
            array = np.array(values)
            if array.ndim == 1 and (array.dtype.kind in NUMERIC or all(isinstance(value, Number) for value in values)):
                return array
        raise _misfit(values, field, samples)
    if not hasattr(first, "shape"):
        return values
    if any(getattr(value, "shape", None) != first.shape for value in values):
        raise _misfit(values, field, samples)
    if isinstance(first, np.ndarray):
        return np.stack(values)
    if not all(type(value) is type(first) for value in values):
        raise _misfit(values, field, samples)
    return sys.modules["torch"].stack(values)


def _stack_or_list(values: list[Any], field: str, samples: list[Any]) -> Any:
    """Return the *values* of one field as the field of a batch; arrays that differ in shape stay a list."""
    kind, shape = type(values[0]), getattr(values[0], "shape", ())
    is_array = shape != () and all(type(value) is kind for value in values)
    if is_array and any(value.shape != shape for value in values):
        return values
    return _stack(values, field, samples)


def _misfit(values: list[Any], field: str, samples: list[Any]) -> ValueError:
    """Return the error for the first of *values* whose kind differs from that of values[0]."""
    kinds = [_kind(value) for value in values]
    number = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)
    here, first = (f"{kinds[i]} in {_name(samples[i], i)}" for i in (number, 0))
    return ValueError(f"{field}: {first} and {here} cannot be batched; give them one type and shape, or {CURE}")


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", ())
    name = type(value).__name__
    if isinstance(value, Number) or name == "bool_":
        return "a number"
    return f"{name} of shape {tuple(shape)}" if hasattr(value, "shape") else name
