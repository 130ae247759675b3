"""Readers in the workers of a ShardLoader: the batches of an ArrayLoader, after any ops and by any workers."""

from __future__ import annotations

import io
import re
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from shared_memory import is_lent

from tarshards import ArrayLoader, Ledger, ShardDataset, ShardLoader, ShardWriter, Stream, mix, pack, readers
from tarshards.errors import DecodeError, SampleError
from tarshards.loaders.arrays.augment import cutout
from tarshards.loaders.torch import handover
from tarshards.loaders.torch.handover import Arenas
from tarshards.samples.payloads import address_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),
]

SAMPLES, SIZE = 120, 16


def jpg(seed: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((48, 40)).save(file, "JPEG")
    return file.getvalue()


def sample(number: int, **fields) -> dict:
    row = np.full(3, number, np.float32)
    text = b"x" * (number % 7 + 1)
    return {"__key__": f"{number:04d}", "jpg": jpg(number), "x.npy": row, "cls": number, "bin": text} | fields


def write(folder, samples, *, index=True) -> str:
    with ShardWriter(str(folder / "set-%d.tar"), max_samples=SAMPLES // 4, index=index) as writer:
        for one in samples:
            writer.write(one)
    return str(folder / f"set-{{0..{len(writer.shards) - 1}}}.tar")


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("fields"), map(sample, range(SAMPLES)))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> str:
    """Sample 7 has no image, 20 and 21 have something else as one, and 33 has no class."""
    samples = [sample(number) for number in range(SAMPLES)]
    del samples[7]["jpg"], samples[33]["cls"]
    samples[20]["jpg"] = samples[21]["jpg"] = b"no image"
    return write(tmp_path_factory.mktemp("faulty"), samples)


def fields() -> dict:
    image = readers.image(24, crop="random_resized", flip=0.5, layout="CHW")
    numbers = {"x.npy": readers.array(), "label:cls": readers.integer(), "number:cls": int}
    return {"image:png;jpg": image, **numbers, "bin": readers.ragged(), "rows:x.npy": readers.ragged()}


IMAGES = {"jpg": readers.image(24, crop="random_resized", flip=0.5), "cls": readers.integer()}
SHUFFLED = {"shuffle": True, "seed": 5}


def arrays(urls, *, given=None, options=None, **dataset) -> ArrayLoader:
    stream = Stream.from_shards(urls, **SHUFFLED | dataset)
    return ArrayLoader(stream, SIZE, fields=given or fields(), threads=1, **(options or {}))


def loader(urls, workers=0, *, given=None, options=None, size=SIZE, **dataset) -> ShardLoader:
    data = ShardDataset(urls, **SHUFFLED | dataset)
    return ShardLoader(data, size, fields=given or fields(), num_workers=workers, **(options or {}))


def plain(value):
    """The values of a column as lists, of tensors and arrays alike."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    return [str(value.dtype).removeprefix("torch."), value.tolist()] if hasattr(value, "dtype") else list(value)


def frozen(batches) -> list:
    return [{name: plain(value) for name, value in batch.items()} for batch in batches]


def by_key(batches, field="jpg") -> dict:
    return {key: np.asarray(row).tobytes() for batch in batches for key, row in zip(batch["__key__"], batch[field])}


def blanked(batch, rng) -> dict:
    return cutout(batch, rng, field="jpg", size=5)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_those_of_an_array_loader(urls, workers):
    theirs, ours = arrays(urls), loader(urls, workers)
    for _ in range(2):
        assert frozen(theirs) == frozen(ours)
    batch = next(iter(ours))
    assert batch["image"].shape == (SIZE, 3, 24, 24)
    assert batch["image"].dtype == torch.uint8
    assert batch["label"].dtype == batch["number"].dtype == torch.int64
    assert batch["x.npy"][:, 0].long().tolist() == batch["label"].tolist()
    ours.ledger.check()


@pytest.mark.usefixtures("quick_spawn")
def test_workers_may_be_spawned(urls):
    options = {"multiprocessing_context": "spawn", "transforms": [blanked]}
    ours = loader(urls, 1, given=IMAGES, options=options)
    assert frozen(arrays(urls, given=IMAGES, options={"transforms": [blanked]})) == frozen(ours)


@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_draw_as_those_of_an_array_loader(urls, workers):
    options = {"transforms": [blanked], "drop_last": True}
    assert frozen(arrays(urls, given=IMAGES, options=options)) == frozen(
        loader(urls, workers, given=IMAGES, options=options)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_may_return_a_tuple(urls, workers):
    options = {"transforms": [lambda batch, rng: (batch["jpg"], batch["cls"])]}
    images, labels = next(iter(loader(urls, workers, given=IMAGES, options=options)))
    assert images.shape == (SIZE, 24, 24, 3)
    assert len(labels) == SIZE
    assert isinstance(labels, torch.Tensor)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_shards_without_indexes(urls, workers):
    options = {"index": False, "shuffle": False}
    theirs, ours = list(arrays(urls, **options)), list(loader(urls, workers, **options))
    if workers < 2:
        assert frozen(theirs) == frozen(ours)
    else:
        assert by_key(theirs, "image") == by_key(ours, "image")


def test_a_state_resumes_with_other_workers_and_batches(urls):
    whole = by_key(loader(urls, given=IMAGES))
    first = loader(urls, 2, given=IMAGES)
    begun = by_key(islice(first, 3))
    second = loader(urls, 1, given=IMAGES, size=7)
    second.load_state_dict(first.state_dict())
    rest = by_key(second)
    assert len(begun) == 3 * SIZE
    assert begun.keys().isdisjoint(rest)
    assert begun | rest == whole
    assert by_key(second) != whole  # another epoch


def odd(one) -> bool:
    return int(one["cls"]) % 2 == 1


def with_square(one) -> dict:
    return {**one, "square": int(one["cls"]) ** 2, "pair": np.full(2, int(one["cls"])), "word": one["__key__"]}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("index", [True, False])
def test_ops_come_before_and_change_no_draw(urls, workers, index):
    dataset = ShardDataset(urls, shuffle=index, seed=5, index=index).filter(odd).map(with_square)
    given = IMAGES | {"square": int, "pair": np.asarray, "word": str}
    batches = list(ShardLoader(dataset, SIZE, fields=given, num_workers=workers))
    images = by_key(batches)
    expected = by_key(arrays(urls, given=IMAGES, index=index, shuffle=index))
    assert images == {key: expected[key] for key in expected if int(key) % 2}
    for batch in batches:
        assert batch["square"].tolist() == [number**2 for number in batch["cls"].tolist()]
        assert batch["pair"].tolist() == [[number] * 2 for number in batch["cls"].tolist()]
        assert batch["word"] == list(batch["__key__"])
    assert dataset.ledger.filtered["filter(odd)"] == SAMPLES // 2
    dataset.ledger.check()


def test_a_batch_without_samples_has_empty_arrays(urls):
    batches = list(ShardLoader(ShardDataset(urls).filter(lambda one: int(one["cls"]) >= SIZE), SIZE, fields=fields()))
    assert [len(batch["__key__"]) for batch in batches] == [0, *[SIZE] * 6, 8]
    assert batches[0]["image"].shape == (0, 3, 24, 24)


def test_a_reader_takes_no_value_that_an_op_made(urls):
    dataset = ShardDataset(urls).decode("rgb8")
    with pytest.raises(TypeError, match=r"readers take bytes, and an op has made .* of the field jpg of sample 0000"):
        list(ShardLoader(dataset, SIZE, fields=IMAGES))
    for index in True, False:
        with pytest.raises(TypeError, match="dicts with __key__"):
            list(ShardLoader(ShardDataset(urls, index=index).map(tuple), SIZE, fields=IMAGES))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("index", [True, False])
def test_an_error_names_shard_key_and_field(faulty, workers, index):
    dataset = {"shuffle": False, "index": index}
    with pytest.raises((SampleError, DecodeError), match=r"set-0.tar: 0007: no field jpg; the sample has"):
        list(loader(faulty, workers, given=IMAGES, **dataset))
    given = {"photo:jpg": lambda data: Image.open(io.BytesIO(data)).size}
    ours = loader(faulty, workers, given=given, **dataset, on_error=Ledger(max_errors=1))
    with pytest.raises(DecodeError, match=r"set-0.tar: 002[01].photo: cannot identify"):
        list(ours)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("index", [True, False])
def test_failures_are_left_out_and_counted(faulty, workers, index):
    dataset = {"shuffle": index, "index": index}
    theirs, ours = (
        make(faulty, given=IMAGES, **dataset, on_error=Ledger(max_errors=9))
        for make in (arrays, partial(loader, workers=workers))
    )
    expected, found = list(theirs), list(ours)
    if index or workers < 2:
        assert frozen(expected) == frozen(found)
    assert by_key(expected) == by_key(found)
    assert len(by_key(found)) == SAMPLES - 4
    assert ours.ledger.failed == theirs.ledger.failed == 4
    assert sorted(ours.ledger.quarantined) == sorted(theirs.ledger.quarantined)
    assert ours.ledger.samples == SAMPLES - 4
    ours.ledger.check()


@pytest.mark.parametrize("workers", [0, 2])
def test_filling_replaces_what_fails(faulty, workers, caplog):
    theirs, ours = (
        make(faulty, given=IMAGES, options={"fill": True}, on_error=Ledger(max_errors=99))
        for make in (arrays, partial(loader, workers=workers))
    )
    assert frozen(theirs) == frozen(ours)
    counts = [re.findall(r"^(?!members)\w.*", str(each.ledger), re.M) for each in (theirs, ours)]
    assert counts[0] == counts[1]
    assert "pickled" not in caplog.text
    ours.ledger.check()


def test_filling_replaces_what_is_filtered_or_fails(faulty):
    epochs = []
    for workers in 0, 2:
        dataset = ShardDataset(faulty, **SHUFFLED, on_error=Ledger(max_errors=99)).filter(lambda one: "cls" in one)
        dataset = dataset.filter(lambda one: int(one["cls"]) % 5)
        ours = ShardLoader(dataset, SIZE, fields=IMAGES, fill=True, num_workers=workers)
        epochs.append(frozen(ours))
        assert [len(batch["__key__"]) for batch in epochs[-1]] == [SIZE] * 7 + [8]
        assert not {"0007", "0020", "0021", "0033"} & {key for batch in epochs[-1] for key in batch["__key__"]}
        dataset.ledger.check()
    assert epochs[0] == epochs[1]


def test_filling_gives_up_with_words(faulty):
    dataset = ShardDataset(faulty, on_error=Ledger(max_errors=9999)).filter(odd)
    broken = {"cls": lambda data: 1 // 0}
    with pytest.raises(SampleError, match=r"was left out, .* \(filter\(odd\) left out \d+, \d+ failed\)"):
        list(ShardLoader(dataset.filter(lambda one: "cls" in one), SIZE, fields=broken, fill=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_readers_learn_from_the_first_sample_of_the_dataset(tmp_path, workers):
    """Whichever sample comes first: that all other arrays differ from the first one is the same for any workers."""
    samples = (sample(number, **{"x.npy": np.zeros(2 if number % 3 else 1)}) for number in range(SAMPLES))
    urls, given = write(tmp_path, samples), {"x.npy": readers.array(), "cls": readers.integer()}
    theirs, ours = (
        make(urls, given=given, on_error=Ledger(max_errors=SAMPLES))
        for make in (arrays, partial(loader, workers=workers))
    )
    assert not ours.passes.maker.assembler.is_open
    assert frozen(theirs) == frozen(ours)
    assert ours.ledger.samples == SAMPLES // 3
    assert loader(urls, given=IMAGES).passes.maker.assembler.is_open, "others are opened without a sample"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fill", [False, True])
def test_samples_that_fail_are_counted_alike_with_and_without_ops(faulty, workers, fill):
    """Without ops fields are found in mapped shards, and with them in samples that were read."""
    came = []
    for ops in [], [dict]:
        dataset = ShardDataset(faulty, **SHUFFLED, on_error=Ledger(max_errors=SAMPLES))
        for op in ops:
            dataset = dataset.map(op)
        loading = ShardLoader(dataset, SIZE, fields=IMAGES, num_workers=workers, fill=fill)
        batches = frozen(loading)
        assert (loading.passes.maker.mapped is None) == bool(ops)
        words = sorted(line for line in str(loading.ledger).split("\n") if not line.startswith("members"))
        came.append((batches, words))
        assert ops or loading.ledger.members == 2 * sum(len(batch["__key__"]) for batch in batches), "of these fields"
    assert came[0] == came[1]
    assert {"0007", "0020", "0021", "0033"} == set(re.findall(r": (00\d\d)", " ".join(came[0][1])))


@pytest.mark.parametrize("workers", [0, 2])
def test_lazy_and_selected_fields(urls, workers):
    expected = frozen(arrays(urls, given=IMAGES))
    ours = loader(urls, workers, given=IMAGES, fields="jpg cls", lazy="jpg")
    assert frozen(ours) == expected
    with pytest.raises(SampleError, match="no field jpg; the sample has cls"):
        list(loader(urls, workers, given=IMAGES, fields="cls"))
    with pytest.raises(TypeError, match="a dict of readers is for fields= of a loader"):
        ShardDataset(urls, fields=IMAGES)


def test_packed_rows(urls):
    lengths = [number % 7 + 1 for number in range(SAMPLES)]
    given, options = {"bin": readers.ragged()}, {"packing": pack(lengths, 16)}
    theirs = frozen(arrays(urls, given=given, options=options))
    for workers in 0, 2:
        assert frozen(loader(urls, workers, given=given, options=options)) == theirs


def test_mixtures(urls):
    def mixed(kind):
        datasets = {name: kind(urls, shuffle=True, seed=seed) for name, seed in (("a", 1), ("b", 2))}
        return mix(datasets, weights={"a": 1, "b": 2}, seed=3)

    theirs = frozen(ArrayLoader(mixed(Stream.from_shards), SIZE, fields=fields()))
    for workers in 0, 2:
        assert frozen(ShardLoader(mixed(ShardDataset), SIZE, fields=fields(), num_workers=workers)) == theirs


def test_mixtures_with_ops(urls):
    datasets = {"a": ShardDataset(urls, **SHUFFLED).filter(odd), "b": ShardDataset(urls, **SHUFFLED).map(with_square)}
    epochs = [frozen(ShardLoader(mix(datasets), SIZE, fields=IMAGES, num_workers=workers)) for workers in (0, 2)]
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize("options", [{"reuse": True}, {"persistent_workers": True}, {"steps": 5}])
def test_options_of_the_hand_over(urls, options):
    expected = [frozen(islice(arrays(urls, given=IMAGES), 5)), None]
    ours = loader(urls, 2, given=IMAGES, options=options)
    for _ in range(2):
        epoch = [frozen([batch])[0] for batch in islice(ours, 5)]
        assert expected.pop(0) in (epoch, None)


def test_what_a_transform_keeps_is_not_written_to(urls):
    """An arena is taken again only when nothing refers to its arrays: each batch has what a few before it had."""
    kept: list = []

    def keeping(batch, rng):
        kept.append(batch["jpg"])
        return {**batch, "before": kept[max(0, len(kept) - 5)].copy()}

    def copying(batch, rng):
        kept.append(batch["jpg"].copy())
        return {**batch, "before": kept[max(0, len(kept) - 5)]}

    epochs = []
    for transform in keeping, copying:
        kept.clear()
        epochs.append(frozen(loader(urls, 1, given=IMAGES, options={"transforms": [transform]})))
    assert epochs[0] == epochs[1]


@pytest.mark.forks
def test_what_a_transform_keeps_is_not_lent(urls, monkeypatch):
    """Else the loop, which may write to its batch, would change it: only every second one is kept here."""
    kept: list = []

    def keeping(batch, rng):
        kept.append(batch["jpg"] if len(kept) % 2 else None)
        before = kept[max(0, len(kept) - 4)]
        return {**batch, "before": np.zeros(1) if before is None else before.copy()}

    monkeypatch.setattr(handover, "LITTLE", 0)
    epochs = []
    for is_written in False, True:
        epoch, lent = [], []
        for batch in loader(urls, 1, given=IMAGES, options={"transforms": [keeping]}):
            epoch += frozen([batch])
            lent.append(is_lent(batch["jpg"]))
            if is_written:
                batch["jpg"][:] = 0
        epochs.append(epoch)
        assert lent == [number % 2 == 0 for number in range(len(lent))]
    assert epochs[0] == epochs[1]


def test_arrays_are_written_where_they_are_handed_over():
    arenas = Arenas(1, 2)
    arenas.begin(0)
    for number in range(8):
        first, second = arenas.empty(0, (4, 3), np.dtype("f4")), arenas.empty(0, (0, 2), np.dtype("u1"))
        first[:] = number
        batch = {"x": first, "part": first[1:3], "y": second, "z": np.arange(5), "t": torch.from_numpy(first)}
        address = first.__array_interface__["data"][0]
        handed = arenas.put(0, [batch])
        arena = arenas._own[handed.arena]
        assert arena.begins == [0]
        assert address_of(arena.memory) == address
        del arena, first, second, batch
        (taken,) = arenas.take(handed)
        assert taken["x"].tolist() == taken["t"].tolist() == [[number] * 3] * 4
        assert taken["part"].tolist() == [[number] * 3] * 2
        assert taken["y"].shape == (0, 2)
        assert taken["z"].tolist() == list(range(5))
    held = [arenas.empty(0, (2,), np.dtype("i8"))]
    for _ in range(8):  # what is not sent, or referred to, is no arena for others; at last arrays lie elsewhere
        arenas.begin(0)
        held.append(arenas.empty(0, (2,), np.dtype("i8")))
    for number, array in enumerate(held):
        array[:] = number
    assert [array.tolist() for array in held] == [[number] * 2 for number in range(9)]


def test_an_arena_grows_under_its_arrays():
    arenas = Arenas(1, 1)
    arenas.begin(0)
    parts = [arenas.empty(0, (1 << shift,), np.dtype("u1")) for shift in range(10, 20)]
    for number, part in enumerate(parts):
        part[:] = number
    (taken,) = arenas.take(arenas.put(0, [parts]))
    assert [(len(part), set(part.tolist())) for part in taken] == [(1 << i + 10, {i}) for i in range(10)]


def test_what_cannot_be_combined_is_refused(urls):
    dataset = ShardDataset(urls)
    unindexed = ShardDataset(urls, index=False)
    for refused, words in (
        (partial(ShardLoader, dataset, 4, fields=IMAGES, collate_fn=list), "fields= makes the batches instead of coll"),
        (partial(ShardLoader, dataset, 4, transforms=[blanked]), "transforms= requires fields="),
        (partial(ShardLoader, dataset.to_tuple("jpg"), 4, fields=IMAGES), "to_tuple is not for a ShardLoader: fields="),
        (partial(ShardLoader, dataset.batched(2), 4, fields=IMAGES), "batched is not for a ShardLoader"),
        (partial(ShardLoader, unindexed, 4, fields=IMAGES, fill=True), "fill= requires indexed shards"),
        (partial(ShardLoader, dataset, 4, fields=["jpg"]), "fields= takes a dict"),
        (partial(ShardLoader, dataset, 4, fields={"jpg": readers.image}), "write readers.image()"),
        (
            partial(ShardLoader, dataset.async_map(dict, ordered=False), 4, fields=IMAGES),
            "fields= needs to know which sample",
        ),
    ):
        with pytest.raises(TypeError, match=words.replace("(", r"\(").replace(")", r"\)")):
            refused()
    with pytest.raises(ValueError, match="names no field"):
        ShardLoader(dataset, 4, fields={})


def test_a_loader_is_made_again_of_its_attributes(urls):
    first = loader(urls, given=IMAGES, options={"transforms": iter([blanked])})
    again = ShardLoader(first.dataset, batch_size=None, num_workers=1)
    epoch = frozen(first)
    again.set_epoch(0)
    assert frozen(again) == epoch
