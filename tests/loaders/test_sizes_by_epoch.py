"""Images of another size in later epochs of one loader, tensors of reader functions, and modules as transforms."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from soak import some
from with_torch import ShardDataset, ShardLoader, torch

from tarshards import ArrayLoader, ShardWriter, Stream, World, augment, readers

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SIZES = {0: 16, 1: 24, 3: (32, 20)}
SHAPES = [(16, 16), (24, 24), (24, 24), (32, 20), (32, 20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    with ShardWriter(folder / "i-%02d.tar", max_samples=20) as writer:
        for i in range(60):
            pixels = rng.integers(0, 256, (48, 40, 3), dtype=np.uint8)
            writer.write({"__key__": f"{i:03d}", "jpg": pixels, "x.npy": pixels, "cls": i})
    return folder


@pytest.fixture(params=["jpg", "x.npy"])
def field(request):
    return request.param


def fields_of(field, size=SIZES):
    return {f"image:{field}": readers.image(size, crop="random_resized", flip=0.5)}


def in_threads(urls, fields, **options):
    return ArrayLoader(Stream.from_shards(urls, shuffle=True, **options), 16, fields=fields, threads=2)


def in_processes(urls, fields, **options):
    return ShardLoader(ShardDataset(urls, shuffle=True, **options), 16, fields=fields, num_workers=2)


def persistent(urls, fields, **options):
    dataset = ShardDataset(urls, shuffle=True, **options)
    return ShardLoader(dataset, 16, fields=fields, num_workers=1, persistent_workers=True)


def here(urls, fields, **options):
    return ShardLoader(ShardDataset(urls, shuffle=True, **options), 16, fields=fields)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("index", "make"), some([*product([True, False], [in_threads, here, in_processes, persistent])], 3)
)
def test_sizes_follow_the_epoch_in_one_loader(folder, field, make, index):
    urls = str(folder / "i-*.tar")
    loader = make(urls, fields_of(field), index=index)
    for epoch, shape in enumerate(SHAPES):
        batches = [np.asarray(batch["image"]).copy() for batch in loader]
        assert {batch.shape[1:3] for batch in batches} == {shape}
        assert sum(map(len, batches)) == 60
        if epoch in (1, 3) and index:
            fresh = make(urls, fields_of(field, shape), index=index)
            fresh.set_epoch(epoch)
            assert all(map(np.array_equal, batches, (np.asarray(batch["image"]) for batch in fresh)))
    loader.set_epoch(0)
    assert next(iter(loader))["image"].shape[1:3] == (16, 16)


@pytest.mark.parametrize("make", [in_threads, here])
def test_a_resumed_run_and_all_ranks_have_the_size_of_the_epoch(folder, make):
    urls = str(folder / "i-*.tar")
    loader = make(urls, fields_of("jpg"))
    loader.set_epoch(3)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    for rank in range(2):
        resumed = make(urls, fields_of("jpg"), world=World(rank, 2))
        resumed.load_state_dict(state)
        assert {batch["image"].shape[1:3] for batch in resumed} == {(32, 20)}


@pytest.mark.parametrize("sizes", [{1: 16}, {}, {0: None}, {0: 16, -1: 8}])
def test_sizes_must_begin_with_epoch_0(sizes):
    with pytest.raises(ValueError, match="size="):
        readers.image(sizes)


@pytest.mark.parametrize("make", [in_threads, here, in_processes])
def test_tensors_of_a_reader_function_stack_like_arrays(folder, make):
    def tokenize(data):
        return torch.full((77,), int(data))

    batch = next(iter(make(str(folder / "i-*.tar"), {"cls": tokenize})))
    assert batch["cls"].shape == (16, 77)
    assert isinstance(batch["cls"], np.ndarray if make is in_threads else torch.Tensor)


def test_tensors_that_are_no_arrays_stay_a_list(folder):
    fields = {"cls": lambda data: torch.zeros(2, dtype=torch.bfloat16)}
    assert isinstance(next(iter(in_threads(str(folder / "i-*.tar"), fields)))["cls"], list)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_module_is_a_transform(folder, workers):
    noise = torch.nn.Sequential(torch.nn.AvgPool2d(2), torch.nn.Dropout(0.5))
    fields = {"jpg": readers.image(32, dtype="float32", layout="CHW")}
    transforms = [partial(augment.module, field="jpg", module=noise)]
    dataset = ShardDataset(str(folder / "i-*.tar"), shuffle=True, seed=1)
    loader = ShardLoader(dataset, 16, fields=fields, transforms=transforms, num_workers=workers)
    batches = [batch["jpg"].clone() for batch in loader]
    assert batches[0].shape == (16, 3, 16, 16)
    assert 0.3 < (batches[0] == 0).float().mean() < 0.7
    threads = Stream.from_shards(str(folder / "i-*.tar"), shuffle=True, seed=1)
    arrays = ArrayLoader(threads, 16, fields=fields, transforms=transforms, threads=3)
    assert all(np.array_equal(ours.numpy(), batch["jpg"]) for ours, batch in zip(batches, arrays))


def test_a_bare_module_is_an_error_that_says_how(folder):
    dataset = Stream.from_shards(str(folder / "i-*.tar"))
    with pytest.raises(TypeError, match=r"partial\(augment\.module, field="):
        ArrayLoader(dataset, 4, fields={"cls": readers.integer()}, transforms=[torch.nn.Identity()])


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("make", [in_threads, here, in_processes])
def test_sizes_follow_the_epochs_of_two_live_passes(folder, make, index):
    urls = str(folder / "i-*.tar")
    loader = make(urls, fields_of("jpg"), index=index)
    for one, other in zip(loader, loader):
        assert (one["image"].shape[1:3], other["image"].shape[1:3]) == ((16, 16), (24, 24))
