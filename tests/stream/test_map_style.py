"""``IndexedShards`` as a map-style dataset: ops, lists of numbers, masks, and the programs that take such datasets."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from with_torch import DataLoader, Subset, needs_torch, torch

from tarshards import IndexedShards, ShardWriter
from tarshards.errors import DecodeError, OpError, SampleError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder / "s-%02d.tar", max_samples=5) as writer:
        for i in range(12):
            pixels = np.full((8, 8, 3), i, np.uint8)
            writer.write({"__key__": f"{i:03d}", "png": pixels, "cls": i % 3, "json": {"number": i}})
    return str(folder / "s.shards.json")


@pytest.fixture
def samples(urls):
    return IndexedShards(urls)


def classes(dataset) -> list[int]:
    return [int(sample["__key__"]) for sample in dataset]


def with_double(sample):
    return {**sample, "double": 2 * sample["json"]["number"]}


@needs_torch
def test_samples_are_decoded_mapped_and_made_tuples(samples):
    decoded = samples.decode("rgb8").map(with_double)
    assert (decoded[5]["double"], decoded[-1]["double"], decoded["003"]["double"]) == (10, 22, 6)
    assert [number for number, _ in decoded.to_tuple("double", "cls")] == [2 * i for i in range(12)]
    pairs = samples.decode("torchrgb").to_tuple("png;jpg", "cls").map_tuple(lambda image: image.mean(), None)
    assert (pairs[4][0].item(), pairs[4][1]) == (pytest.approx(4 / 255), 1)
    renamed = samples.rename_fields({"label": "cls"}).keep_fields("label").map_fields({"label": int}).add_source()
    assert sorted(renamed[7]) == ["__key__", "__url__", "label", "source"]
    assert renamed.select_fields("number:label")[7]["number"] == 1
    assert samples[0]["cls"] == b"0"  # the sequence itself is unchanged


def test_parts_are_named_by_slices_lists_arrays_and_masks(samples):
    numbers = np.arange(12)
    for index in (
        slice(2, 9, 3),
        [1, -1, 5, 5],
        [],
        np.array([3, -12]),
        numbers % 2 == 0,
        [False, True] * 6,
        torch.tensor([4, 2]),
        torch.arange(12) > 9,
        range(3, 0, -1),
    ):
        expected = (
            numbers[np.asarray(index, np.int64 if not len(index) else None)]
            if not isinstance(index, slice)
            else numbers[index]
        )
        part = samples[index]
        assert classes(part) == expected.tolist()
        assert (len(part), part.keys) == (len(expected), [f"{i:03d}" for i in expected])
        assert [int(part[i]["__key__"]) for i in range(len(part))] == expected.tolist()
        assert len(expected) == 0 or classes(part.__getitems__([0, -1])) == [expected[0], expected[-1]]


def test_parts_of_parts_keep_numbers_keys_and_ops(samples):
    part = samples.map_fields({"cls": int})[[8, 3, 3, 10]][1:]
    assert [sample["cls"] for sample in part] == [0, 0, 1]
    assert (part.find("003"), part.places("003"), part.locate(["010", "008"]).tolist()) == (0, [0, 1], [2, -1])
    assert part["010"]["cls"] == 1
    with pytest.raises(SampleError, match="2 samples have this key"):
        part["003"]
    with pytest.raises(KeyError):
        part["008"]
    assert part[[False, False, True]].keys == ["010"]


def test_columns_of_a_part(tmp_path):
    with ShardWriter(tmp_path / "s-%02d.tar", max_samples=4) as writer:
        for i in range(10):
            writer.write({"__key__": f"{i}", "npy": np.full(2, i)})
    samples = IndexedShards(str(tmp_path / "s.shards.json"))
    column = samples[[7, 1, -1]].column("npy")
    assert column.shape == (3, 2)
    assert (column[0].tolist(), column[[2, 1]][:, 0].tolist()) == ([7, 7], [9, 1])
    assert np.asarray(samples[samples.column("npy")[:][:, 0] > 6].column("npy"))[:, 0].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("index", "kind", "words"),
    [
        (12, IndexError, "no sample 12 of 12"),
        (-13, IndexError, "no sample -13 of 12"),
        ([0, 12], IndexError, "no sample 12 of 12"),
        ([-13], IndexError, "no sample -13 of 12"),
        ([True] * 11, IndexError, "a mask of 11 for 12 samples"),
        (np.zeros((2, 2), int), TypeError, "one axis"),
        ([0.5], TypeError, "by a number, a key, a slice, or a list or array of numbers or of True and False"),
        (1.0, TypeError, "by a number, a key"),
        ((1, 2), TypeError, "by a number, a key"),
        (["001", "002"], TypeError, r"locate\(keys\) gives the numbers of keys"),
    ],
)
def test_a_wrong_index_says_what_is_right(samples, index, kind, words):
    with pytest.raises(kind, match=words):
        samples[index]


def test_a_number_must_have_its_sample(samples):
    for op, words in (
        (lambda: samples.filter(bool), r"map-style IndexedShards has no filter: .*\[mask\]"),
        (lambda: samples.shuffle(10), "map-style IndexedShards has no shuffle: .*DataLoader"),
        (lambda: samples.batched(10), "map-style IndexedShards has no batched: .*DataLoader"),
        (lambda: samples.repeat(2), "map-style IndexedShards has no repeat"),
    ):
        with pytest.raises(AttributeError, match=words):
            op()
    with pytest.raises(TypeError, match=r"drop_none=.* leaves samples out, which have numbers here"):
        samples.map(str, drop_none=True)
    with pytest.raises(TypeError, match=r"on_error=.* leaves samples out, which have numbers here"):
        samples.decode(on_error="skip")
    assert not hasattr(samples, "anything_else")


def test_errors_name_the_sample(samples):
    def fail(sample):
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd") as caught:
        samples.map(fail)[3]
    assert "003" in caught.value.__notes__[0]
    with pytest.raises(DecodeError, match=r"003\.png: ValueError: odd"):
        samples.decode(png=fail)[3]
    with pytest.raises(SampleError, match="003: no field"):
        samples.to_tuple("jpg")[[3]][0]
    assert OpError  # is what on_error would get


def test_random_functions_draw_by_the_given_epoch(samples):
    def draw(sample, rng):
        return rng.random()

    assert samples.map(draw, rng=True)[4] == samples.map(draw, rng=True)[[1, 4]][1]
    assert samples.map(draw, rng=True, epoch=1)[4] != samples.map(draw, rng=True)[4]


def test_copies_keep_their_ops(samples):
    copied = pickle.loads(pickle.dumps(samples.decode("rgb8").map(with_double)[[3, 4]]))
    assert [sample["double"] for sample in copied] == [6, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_it(samples, workers):
    dataset = samples.decode("torchrgb").to_tuple("png", "cls")
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=workers)
    batches = list(loader)
    assert [images.shape for images, _ in batches] == [(4, 3, 8, 8)] * 3
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == sorted([0, 1, 2] * 4)
    some = DataLoader(Subset(dataset, [3, 11]), 2, num_workers=workers)
    assert next(iter(some))[0][:, 0, 0, 0].mul(255).round().tolist() == [3, 11]


@pytest.mark.interop
def test_a_trainer_trains_and_evaluates_on_it(samples, tmp_path):
    transformers = pytest.importorskip("transformers")

    class Model(torch.nn.Module):
        """A linear model with the interface of transformers'."""

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(192, 3)

        def forward(self, pixel_values, labels):
            logits = self.linear(pixel_values.flatten(1))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    dataset = samples.decode("torchrgb").rename_fields({"pixel_values": "png", "labels": "cls"})
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(Model(), options, train_dataset=dataset, eval_dataset=dataset[-3:])
    assert trainer.train().global_step == 4
    assert trainer.predict(dataset[-3:]).label_ids.tolist() == [0, 1, 2]
    assert trainer.evaluate()["eval_loss"] > 0
