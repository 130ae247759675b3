"""Augmentations: their laws, loops over single images as oracles, and unchanged input batches."""

import threading
from functools import partial

import numpy as np
import pytest
from forked import in_child, run_in_threads
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from with_torch import ShardDataset, torch

from tarshards import ArrayLoader, readers
from tarshards.loaders.arrays.augment import cutout, flip, mixup, module, normalize, replace_label, to_chw, translate

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]))
IMAGES = st.one_of(hnp.arrays(np.uint8, SHAPES), hnp.arrays(np.float32, SHAPES, elements=st.floats(-4, 4, width=32)))
SEEDS = st.integers(0, 1000)


def apply(transform, images, seed=0, **options):
    return transform({"jpg": images}, np.random.default_rng(seed), field="jpg", **options)["jpg"]


@given(IMAGES, SEEDS)
def test_flipped_twice_is_as_before(images, seed):
    once = apply(flip, images, seed, probability=1)
    np.testing.assert_array_equal(once, images[:, :, ::-1])
    np.testing.assert_array_equal(apply(flip, once, seed, probability=1), images)
    np.testing.assert_array_equal(apply(flip, images, seed, probability=0), images)


def test_as_many_as_the_probability_says_are_flipped():
    images = np.arange(2)[None, None, :, None].repeat(4000, axis=0)
    assert 700 < apply(flip, images, probability=0.2)[:, 0, 0, 0].sum() < 900


@given(IMAGES, SEEDS, st.data())
def test_cutout_fills_one_square_of_each_image(images, seed, data):
    size = data.draw(st.integers(1, min(images.shape[1:3])))
    images[images == 77] = 0
    cut = apply(cutout, images, seed, size=size, fill=77)
    assert cut.dtype == images.dtype
    for before, after in zip(images, cut):
        rows, columns = np.nonzero((before != after).all(axis=2))
        assert len(rows) == size * size
        assert np.ptp(rows) == np.ptp(columns) == size - 1
        assert (after[rows, columns] == 77).all()


def test_cutout_reaches_every_place_and_takes_a_colour():
    cut = apply(cutout, np.zeros((500, 4, 4, 3), np.uint8), size=2, fill=(1, 2, 3))
    assert (cut.any(axis=0)).all()
    assert np.unique(cut.reshape(-1, 3), axis=0).tolist() == [[0, 0, 0], [1, 2, 3]]
    for size in 0, 5:
        with pytest.raises(ValueError, match=f"a square of {size} pixels in images of 4 x 6"):
            apply(cutout, np.zeros((1, 4, 6, 3)), size=size)


@given(IMAGES, SEEDS, st.integers(0, 4))
def test_translate_is_one_of_the_shifts(images, seed, most):
    moved = apply(translate, images, seed, most=most, fill=9)
    _, height, width, channels = images.shape
    for before, after in zip(images, moved):
        padded = np.full((height + 2 * most, width + 2 * most, channels), 9, images.dtype)
        padded[most : most + height, most : most + width] = before
        shifts = range(2 * most + 1)
        assert any((padded[y : y + height, x : x + width] == after).all() for y in shifts for x in shifts)


def test_translate_reaches_every_shift():
    image = np.arange(1, 26).reshape(1, 5, 5, 1)
    moved = apply(translate, image.repeat(300, axis=0), most=1)
    assert len(np.unique(moved.reshape(300, -1), axis=0)) == 9


@given(IMAGES, SEEDS, st.floats(0.1, 10))
def test_mixup_mixes_images_and_labels_in_one_share(images, seed, alpha):
    count = len(images)
    labels = np.arange(count)
    batch = {"jpg": images, "cls": labels}
    mixed = mixup(batch, np.random.default_rng(seed), field="jpg", label="cls", classes=7, alpha=alpha)
    shares = mixed["cls"]
    assert shares.shape == (count, 7)
    assert shares.dtype == mixed["jpg"].dtype == np.float32
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)
    # The labels name the samples, so they tell which images are mixed.
    wanted = np.tensordot(shares[:, :count], images.astype(np.float64), 1)
    np.testing.assert_allclose(mixed["jpg"], wanted, atol=1e-3)


def test_mixed_labels_can_be_mixed_again():
    rng = np.random.default_rng(0)
    mix = partial(mixup, field="jpg", label="cls", classes=3)
    batch = mix(mix({"jpg": np.zeros((4, 1, 1, 1)), "cls": np.array([0, 1, 2, 0])}, rng), rng)
    np.testing.assert_allclose(batch["cls"].sum(axis=1), 1, rtol=1e-5)
    with pytest.raises(ValueError, match="labels from 0 to 3 in 3 classes"):
        mix({"jpg": np.zeros((2, 1, 1, 1)), "cls": np.array([0, 3])}, rng)


@given(IMAGES)
def test_normalize_is_the_formula(images):
    channels = images.shape[3]
    mean, std = np.arange(channels) + 0.5, np.arange(channels) + 2.0
    wanted = (images.astype(np.float64) - mean) / std
    normal = apply(normalize, images, mean=mean, std=std)
    assert normal.dtype == np.float32
    np.testing.assert_allclose(normal, wanted, rtol=1e-5, atol=1e-5)
    assert apply(normalize, images, mean=0, std=1, dtype="float16").dtype == np.float16


@given(IMAGES)
def test_to_chw_moves_the_channels(images):
    moved = apply(to_chw, images)
    assert moved.flags.c_contiguous
    np.testing.assert_array_equal(moved, np.moveaxis(images, 3, 1))


def test_replace_label_goes_by_key():
    batch = {"__key__": ["a", "b", "c"], "cls": np.array([1, 2, 3])}
    new = replace_label(batch, np.random.default_rng(0), field="cls", labels={"c": 9, "a": 8, "z": 7})
    assert new["cls"].tolist() == [8, 2, 9]


TRANSFORMS = {
    "flip": partial(flip, field="jpg"),
    "cutout": partial(cutout, field="jpg", size=2),
    "translate": partial(translate, field="jpg", most=2),
    "mixup": partial(mixup, field="jpg", label="cls", classes=5),
    "normalize": partial(normalize, field="jpg", mean=1, std=2),
    "to_chw": partial(to_chw, field="jpg"),
    "replace_label": partial(replace_label, field="cls", labels={"a": 3}),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_new_batch_by_the_seed_alone_and_the_old_one_as_it_was(name):
    rng = np.random.default_rng(3)
    images, labels = rng.integers(0, 256, (4, 6, 5, 3), dtype=np.uint8), np.arange(4)
    for array in images, labels:
        array.flags.writeable = False
    batch = {"jpg": images, "cls": labels, "__key__": ["a", "b", "c", "d"], "txt": ["w", "x", "y", "z"]}
    before = dict(batch)
    one, two = (TRANSFORMS[name](batch, np.random.default_rng(7)) for _ in range(2))
    assert batch.keys() == before.keys() == one.keys()
    assert all(batch[field] is before[field] for field in batch)
    assert one["txt"] is batch["txt"]
    for field in "jpg", "cls":
        np.testing.assert_array_equal(one[field], two[field])
    changed = one["cls" if name == "replace_label" else "jpg"]
    assert changed.flags.writeable
    assert not any(np.shares_memory(changed, array) for array in (images, labels))


@pytest.mark.parametrize("images", [np.zeros((2, 3, 4)), [np.zeros((3, 4, 3))]], ids=["grey", "ragged"])
def test_what_is_no_batch_of_images_is_refused(images):
    with pytest.raises(ValueError, match="jpg: images of shape"):
        apply(flip, images)


def test_a_module_of_torch_is_given_the_field():
    batch = {"jpg": np.zeros((4, 3, 8, 8), np.float32), "cls": np.arange(4)}
    made = module(batch, np.random.default_rng(0), field="jpg", module=torch.nn.Upsample(scale_factor=2))
    assert made["jpg"].shape == (4, 3, 16, 16)
    assert made["cls"] is batch["cls"]


def random_numbers(images):
    """Draw in all ways: by operators that take a generator, by ones that take none, and into a tensor."""
    dropped = torch.nn.functional.dropout(torch.ones(3, 9), 0.5, True)
    drawn = torch.rand(1) + torch.randn_like(images) + torch.empty(1).uniform_() + torch.randperm(3)[0]
    return images + drawn + dropped.sum()


def test_a_module_draws_what_torch_draws_by_the_seed_and_leaves_its_generator():
    batch, before = {"jpg": np.zeros((4, 3, 8, 8), np.float32)}, torch.get_rng_state()
    made = [module(batch, np.random.default_rng(seed), field="jpg", module=random_numbers)["jpg"] for seed in (1, 2, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.default_rng(1).integers(1 << 62)))
        expected = random_numbers(torch.zeros(4, 3, 8, 8)).numpy()
    assert np.array_equal(made[0], expected)
    assert np.array_equal(made[2], expected)
    assert not np.array_equal(made[1], expected)


def test_a_module_may_bring_its_own_generator_or_draw_elsewhere():
    def drawing(images):
        assert torch.rand(2, device="meta").shape == torch.empty(2, device="meta").uniform_().shape
        return images + torch.rand(1, generator=torch.Generator().manual_seed(3))

    made = module({"jpg": np.zeros(2, np.float32)}, np.random.default_rng(0), field="jpg", module=drawing)
    assert made["jpg"].tolist() == drawing(torch.zeros(2)).tolist()


def test_threads_call_a_module_at_once():
    """Each has random numbers by its own seed, and values that are stored in the module; parameters are shared."""
    meet = threading.Barrier(2, timeout=60)

    class Storing(torch.nn.Linear):
        def forward(self, images):
            self.drawn = torch.rand(2)
            meet.wait()
            assert self.weight is weight
            return images + self.drawn

    storing = Storing(1, 1)
    weight, batch = storing.weight, {"jpg": np.zeros(2, np.float32)}
    apply_it = partial(module, batch, field="jpg", module=storing)
    made = run_in_threads(*(partial(apply_it, np.random.default_rng(seed)) for seed in (1, 2)))
    alone = [
        module(batch, np.random.default_rng(seed), field="jpg", module=lambda x: x + torch.rand(2)) for seed in (1, 2)
    ]
    assert [each["jpg"].tolist() for each in made] == [each["jpg"].tolist() for each in alone]
    assert not hasattr(storing, "drawn")
    assert made[0]["jpg"].tolist() != made[1]["jpg"].tolist()


@pytest.mark.parametrize("threads", [0, 3])
def test_a_module_that_changes_between_passes_is_used_as_it_is_then(make_shards, threads):
    class Adding(torch.nn.Module):
        def forward(self, values):
            return values + self.number

    adding, dataset = Adding(), ShardDataset(make_shards(1, 6, index=True))
    transforms = [partial(module, field="cls", module=adding)]
    loading = ArrayLoader(dataset, 2, fields={"cls": readers.integer()}, threads=threads, transforms=transforms)
    for number in 100, 500:
        adding.number = number
        assert [value - number for batch in loading for value in batch["cls"].tolist()] == list(range(6))


@pytest.mark.forks
def test_a_process_that_is_forked_while_a_thread_applies_a_module_applies_its_own():
    begun, go = threading.Event(), threading.Event()

    def wait(images):
        begun.set()
        go.wait()
        return images

    batch = {"jpg": np.zeros((4, 3, 8, 8), np.float32)}
    rng = np.random.default_rng(0)
    thread = threading.Thread(target=module, args=(batch, rng), kwargs={"field": "jpg", "module": wait})
    thread.start()
    assert begun.wait(60)
    try:
        assert in_child(lambda: module(batch, rng, field="jpg", module=torch.relu)["jpg"].shape == (4, 3, 8, 8)) == 0
    finally:
        go.set()
        thread.join()
