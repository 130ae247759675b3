"""Batches as torch tensors: the same numbers, and on the CPU the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tarshards.loaders.tensors import move


def batches():
    for number in range(3):
        rows = np.arange(6, dtype=np.float32).reshape(2, 3) + number
        yield {"x": rows, "big": rows.astype(">i4"), "turned": rows.T, "names": ["a", "b"], "__key__": ["1", "2"]}


def test_on_the_processor_memory_is_shared():
    (array,) = (batch["x"] for batch in [next(batches())])
    (moved,) = move((batch for batch in [{"x": array}]), "cpu")
    array[0, 0] = 7
    assert moved["x"][0, 0] == 7


def test_arrays_become_tensors_and_the_rest_stays():
    for number, batch in enumerate(move(batches(), "cpu")):
        expected = torch.arange(6, dtype=torch.float32).reshape(2, 3) + number
        assert torch.equal(batch["x"], expected)
        assert torch.equal(batch["big"], expected.int())
        assert torch.equal(batch["turned"], expected.T)
        assert (batch["names"], batch["__key__"]) == (["a", "b"], ["1", "2"])


def test_a_ragged_column_is_two_tensors():
    values, offsets = np.arange(5, dtype="u1"), np.array([0, 2, 5])
    (moved,) = move((batch for batch in [{"tokens": (values, offsets)}]), "cpu")
    assert [part.tolist() for part in moved["tokens"]] == [[0, 1, 2, 3, 4], [0, 2, 5]]


def test_strings_and_dates_stay_arrays():
    words = np.array(["a", "b"])
    (moved,) = move((batch for batch in [{"words": words}]), "cpu")
    assert moved["words"] is words


def test_broken_off_the_batches_are_closed():
    source = batches()
    moved = move(source, "cpu")
    next(moved)
    moved.close()
    assert list(source) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_batches_arrive_whole():
    for number, batch in enumerate(move(batches(), "cuda")):
        assert batch["x"].is_cuda
        assert torch.equal(batch["x"].cpu(), torch.arange(6, dtype=torch.float32).reshape(2, 3) + number)
