"""webdataset and ``tarshards.webdataset`` side by side, over the same samples, shards, workers and values."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from range_server import serving
from torch.utils.data import DataLoader

import tarshards.webdataset as ours
from tarshards import TarWriter

theirs = pytest.importorskip("webdataset")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # in its RandomMix
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # webdataset leaves files open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ARRAY = np.arange(6, dtype=np.uint8).reshape(2, 3)
PIXELS = np.random.default_rng(0).integers(0, 256, (8, 9, 4), dtype=np.uint8)


def plain(value):
    """Return a value in a form that compares, with its type."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name not in ("__url__", "__local_path__")}
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(each) for each in value]
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes()
    return type(value).__name__, value


def both(function):
    """Return the results of *function* with webdataset and with ours; "an error" if it raises."""
    results = []
    for module in (theirs, ours):
        try:
            results.append([plain(each) for each in function(module)])
        except Exception:
            results.append("an error")
    return results


SAMPLE = {"__key__": "k", "jpg": b"1", "seg.png": b"2", "a.cls": b"3", "txt": b"t"}
NUMBERS = {"__key__": "k", "a": 1, "b": None}


@pytest.mark.parametrize(
    ("stage", "samples"),
    [
        *[
            (lambda m, patterns=patterns, options=options: m.extract_keys(*patterns, **options), [SAMPLE])
            for patterns in (("*.jpg",), ("jpg", "*.cls"), ("*.png;*.jpg",), ("*.jpg", "*"), ("*.no",), ("__key__",))
            for options in ({}, {"duplicate_is_error": False}, {"ignore_missing": True})
        ],
        *[
            (lambda m, names=names, options=options: m.rename_keys(*names, must_match=False, **options), [fields])
            for fields in ({"jpg": 1, "a.png": 2, "x/B.PNG": 3}, {"png": 1})
            for options in ({"keep_unselected": True}, {"duplicate_is_error": False}, {"i": "*g"}, {"x": "*"})
            for names in ((), (("p", "*.png"),), (("p", "*"), ("q", "*png")))
        ],
        *[
            (lambda m, fields=fields, options=options: m.to_tuple(*fields, **options), [NUMBERS])
            for fields in (("a", "b"), ("a b",), ("q;a",), (["q", "a"],), ("a", "q"), ("__key__",), ())
            for options in ({}, {"missing_is_error": False}, {"none_is_error": False})
        ],
        *[
            (lambda m, options=options: m.rename(**options), [NUMBERS])
            for options in ({"x": "a"}, {"x": "q;a"}, {"x": "a", "keep": False}, {"b": "a", "a": "b"}, {"x": "q"})
        ],
        (lambda m: m.map_dict(a=str), [NUMBERS]),
        (lambda m: m.map_tuple(str, None), [(1, 2), [3, 4]]),
        (lambda m: m.map_tuple(str), [(1, 2)]),
        (lambda m: m.map(lambda sample: {"x": 1}), [NUMBERS]),
        (lambda m: m.map(lambda sample: None), [NUMBERS]),
        (lambda m: m.associate({"k": {"z": 1}}), [NUMBERS]),
        (lambda m: m.select(lambda value: value % 2), range(9)),
        *[(lambda m, args=args: m.slice(*args), range(9)) for args in ((2,), (1, 4), (1, None), (1, 7, 2), (0,))],
        *[
            (lambda m, f=f: m.xdecode(("*.jpg", f), ("a.*", len_of), must_decode=False), [{"a.jpg": b"1", "jpg": b""}])
            for f in (lambda stream: "f", False)
        ],
        (lambda m: m.xdecode(n=lambda value: value + 1), [{"n": 1}]),
        (lambda m: m.shuffle(0), range(5)),
    ],
)  # fmt: skip
def test_stages_yield_the_same(stage, samples):
    expected, result = both(
        lambda m: stage(m)(iter([dict(each) if isinstance(each, dict) else each for each in samples]))
    )
    assert result == expected


def len_of(stream):
    return len(stream.read())


VALUES = [
    (1, 2), (1.0, 2), (True, False), ("a", "b"), (b"a", b"b"), (None, None), (np.int64(1), np.int64(2)),
    (np.float64(1), np.float64(2)), (np.float32(1), np.float32(2)), (1j, 2j), (ARRAY, ARRAY), (ARRAY, ARRAY[:1]),
    (torch.ones(2), torch.ones(2)), (torch.ones(2), torch.ones(3)), (torch.tensor(1), torch.tensor(2)), ([1], [2]),
    ({"a": 1}, {"a": 2}), ((1, 2), (3, 4)), (2**70, 1), (np.array("a"), np.array("b")),
]  # fmt: skip


@pytest.mark.parametrize("values", VALUES, ids=[f"{type(each[0]).__name__}-{i}" for i, each in enumerate(VALUES)])
@pytest.mark.parametrize("form", [lambda v: {"__key__": "k", "x": v}, lambda v: (v, 1), lambda v: [1, v]])
def test_batches_are_the_same(values, form):
    for options in [(True, True), (True, False), (False, True), (False, False)]:
        samples = [form(value) for value in values]
        expected, result = both(lambda m, args=(samples, *options): [m.filters.default_collation_fn(*args)])
        assert result == expected
    for stage in (lambda m: m.batched(2), lambda m: m.batched(1, partial=False), lambda m: m.batched(2, None)):
        expected, result = both(lambda m, stage=stage: stage(m)(iter([form(value) for value in (*values, values[0])])))
        assert result == expected


@pytest.mark.parametrize(
    "batch",
    [
        ([1, 2], ["a", "b"]), [[1, 2], ["a", "b"]], [ARRAY, ["a", "b"]], (torch.ones(2, 3), ARRAY), ([1, 2], [1]),
        {"x": [1, 2], "y": ARRAY}, {"x": [1, 2], "y": [1]}, {"x": (1, 2), "y": (3, 4)}, ((1, 2), (3, 4)),
        [(1, 2), (3, 4)], [[1, 2]], (), [1, 2], [{"a": 1}], 5,
    ],
)  # fmt: skip
def test_batches_come_apart_into_the_same_samples(batch):
    expected, result = both(lambda m: m.unbatched()(iter([batch])))
    assert result == expected
    expected, result = both(lambda m: m.filters.unlisted()(iter([batch])))
    assert result == expected


def saved(array, kind, **options):
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("spec", sorted(theirs.autodecode.imagespecs))
def test_images_are_decoded_the_same(spec):
    for channels in (PIXELS[..., 0], PIXELS[..., :3], PIXELS):
        for kind in ("png", "tiff", "webp"):
            data = saved(channels, kind, **{"lossless": True} if kind == "webp" else {})
            expected, result = both(
                lambda m, kind=kind, data=data: m.decode(spec)(iter([{"__key__": "k", kind: data}]))
            )
            assert result == expected


def test_fields_are_decoded_the_same():
    npy, npz, pth = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(npy, ARRAY)
    np.savez(npz, a=ARRAY)
    torch.save({"a": torch.ones(2)}, pth)
    fields = {
        "npy": npy.getvalue(),
        "npz": npz.getvalue(),
        "pth": pth.getvalue(),
        "json": b'{"a": [1, NaN]}',
        "cls": b"7\n",
    }
    fields |= {"mp": b"\x81\xa1a\x92\x01\x02", "txt": "hé".encode(), "ten": bytes(theirs.tenbin.encode_buffer([ARRAY]))}
    fields |= {"txt.gz": gzip.compress(b"hi"), "a.cls": b"3", "html": b"<a>", "wav": b"RIFF", "xyz": b"", "id": b"3"}
    for name, value in fields.items():
        for options in ({}, {"only": "cls txt"}, {"post": []}):
            sample = {"__key__": "k", name: value}
            expected, result = both(lambda m, sample=sample, options=options: m.decode(**options)(iter([sample])))
            assert str(result) == str(expected)  # NaN does not equal itself


@pytest.fixture
def urls(make_shards):
    return make_shards(20, 7)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    "make",
    [
        *[
            lambda m, urls, seed=seed: m.DataPipeline(
                m.SimpleShardList(urls, seed=seed), m.split_by_worker, m.tarfile_to_samples()
            )
            for seed in (None, True, 0, 7)
        ],
        *[
            lambda m, urls, options=options: m.WebDataset(urls, **options)
            for options in (
                {"shardshuffle": False}, {"shardshuffle": 5, "seed": 3}, {"shardshuffle": 5, "detshuffle": True},
                {"shardshuffle": False, "workersplitter": None},
            )
        ],
        lambda m, urls: m.DataPipeline(
            m.SimpleShardList(urls), m.detshuffle(50, seed=1), m.split_by_worker, m.tarfile_to_samples()
        ),
        lambda m, urls: m.DataPipeline(
            m.SimpleShardList(urls), m.shuffle(50, rng=random.Random(4)), m.split_by_worker, m.tarfile_to_samples()
        ),
        lambda m, urls: m.DataPipeline(m.ResampledShards(urls, nshards=10), m.tarfile_to_samples()),
        lambda m, urls: m.WebDataset(urls, resampled=True, shardshuffle=False).slice(50),
        lambda m, urls: m.WebDataset(urls, shardshuffle=False).with_epoch(30),
        lambda m, urls: m.WebDataset(urls, shardshuffle=False).with_epoch(200),
        lambda m, urls: m.WebDataset(urls, shardshuffle=False).repeat(2),
        lambda m, urls: m.WebDataset(urls, shardshuffle=False).repeat(nbatches=9),
        lambda m, urls: stated(m.WebDataset(urls, shardshuffle=False)),
        lambda m, urls: m.RoundRobin([m.WebDataset(urls, shardshuffle=False) for _ in "ab"], longest=True),
        lambda m, urls: m.RandomMix([m.WebDataset(urls, shardshuffle=False) for _ in "ab"], [1, 0], longest=True),
    ],
)  # fmt: skip
def test_as_many_samples_come_as_often(urls, workers, make):
    counts = []
    for module in (theirs, ours):
        loader = DataLoader(make(module, urls), batch_size=None, num_workers=workers)
        counts.append([Counter(sample["__key__"] for sample in loader) for _ in range(2)])
    is_random = [len(set(map(frozenset, map(Counter.items, each)))) > 1 for each in counts]
    assert [[epoch.total() for epoch in each] for each in counts] == [[epoch.total() for epoch in counts[0]]] * 2
    if not any(is_random):
        assert counts[0] == counts[1]


def stated(dataset):
    """Return a dataset whose epoch is set by a statement."""
    dataset.with_epoch(30)
    return dataset


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_depends_on_a_seed_alone_is_the_same_in_every_run(urls, workers):
    for module in (theirs, ours):
        runs = []
        for _ in range(2):
            shards = module.ResampledShards(urls, nshards=10, deterministic=True, seed=3)
            samples = module.DataPipeline(shards, module.tarfile_to_samples())
            loader = module.WebLoader(samples, batch_size=None, num_workers=workers)
            runs.append([sample["__key__"] for sample in loader])
        assert runs[0] == runs[1]


def test_batches_come_apart_behind_a_loader(urls):
    """torch's DataLoader makes a list of a tuple."""
    for fields in (("__key__", "txt"), ("cls", "__key__")):
        samples = []
        for module in (theirs, ours):
            dataset = module.WebDataset(urls, shardshuffle=False).to_tuple(*fields).batched(4)
            loader = (
                module.WebLoader(dataset, batch_size=None, num_workers=1).unbatched().shuffle(10).batched(3).unbatched()
            )
            samples.append(sorted(loader))
        assert samples[0] == samples[1]
        assert len(samples[0]) == 140


def test_mixed_weights_draw_the_same_shares():
    for probs in (None, [3, 1], np.array([0.5, 0.5])):
        shares = []
        for module in (theirs, ours):
            mixed = module.RandomMix([[1] * 5000, [2] * 5000], probs)
            shares.append(Counter(islice(mixed, 4000))[1] / 4000)
        assert abs(shares[0] - shares[1]) < 0.06


def written(module, folder: Path, sample, **options):
    path = folder / f"{module.__name__}.tar"
    writer = module.TarWriter(str(path), **options)
    writer.write(dict(sample))
    writer.close()
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


IMAGES = PIXELS[..., :3], PIXELS[..., :3] / np.float32(255), PIXELS[..., 0], Image.fromarray(PIXELS[..., :3])
WRITTEN = [
    *[(field, value) for field in ("cls", "id") for value in (5, 1.5, True, np.int64(3), "seven")],
    *[(field, value) for field in ("json", "mp") for value in ("5", {"é": [1, None], "b": (1, 2)}, 5, True, None)],
    *[(field, "hé") for field in ("txt", "html", "json", "mp", "npy", "npz", "pth", "ten", "jpg", "cls", "xyz")],
    *[(field, b"\xff") for field in ("txt", "json", "npy", "xyz")],
    *[(field, image) for field in ("png", "tiff") for image in IMAGES],
    ("json", {"a": float("nan"), 1: 2}), ("npy", ARRAY), ("ten", [ARRAY]), ("ten", ARRAY), ("pickle", {"a": 1}),
    ("json", {1, 2}), ("txt", 5), ("xyz", 5), ("ppm", IMAGES[0]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRITTEN)
def test_fields_are_written_the_same(tmp_path, field, value):
    for name in (field, f"a.{field}"):
        expected, result = both(lambda m, name=name: [written(m, tmp_path, {"__key__": "k", name: value, "_n": "x"})])
        assert result == expected
    packed = []
    for module in (theirs, ours):
        try:
            packed.append(gzip.decompress(*written(module, tmp_path, {"__key__": "k", f"{field}.gz": value}).values()))
        except Exception:
            packed.append("an error")
    assert packed[0] == packed[1]


@pytest.mark.parametrize("encoder", [True, False, None, {"txt": str.encode}, lambda sample: sample])
def test_encoders_are_taken_the_same(tmp_path, encoder):
    for sample in ({"txt": b"a", "_note": "b"}, {"txt": "a"}):
        if (encoder in (True, {"txt": str.encode})) or sample["txt"] == b"a":  # a function may leave the rest to ours
            expected, result = both(
                lambda m, sample=sample: [written(m, tmp_path, {"__key__": "k", **sample}, encoder=encoder)]
            )
            assert result == expected


@pytest.mark.parametrize("options", [{}, {"maxcount": 3}, {"start_shard": 4, "maxcount": 5}])
def test_shards_are_cut_the_same(tmp_path, options):
    names = []
    for module in (theirs, ours):
        folder = tmp_path / module.__name__
        folder.mkdir()
        told = []
        with module.ShardWriter(f"{folder}/s-%03d.tar", verbose=0, post=told.append, **options) as writer:
            for number in range(10):
                writer.write({"__key__": f"k{number}", "txt": "x"})
        files = []
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as archive:
                files.append(archive.getnames())
        names.append(([Path(name).name for name in told], files))
    assert names[0] == names[1]


def test_shards_are_cached_as_often(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        with TarWriter(tmp_path / folder / "train.tar", sync=False) as writer:
            writer.write({"__key__": folder, "txt": folder})
    with serving(tmp_path) as site:
        for module, expected in ((theirs, ["a", "a"]), (ours, ["a", "b"])):  # the one difference: names are told apart
            cache = tmp_path / module.__name__
            cache.mkdir()
            urls = [f"{site.url}/{folder}/train.tar" for folder in "ab"]
            datasets = [module.WebDataset([url], shardshuffle=False, cache_dir=str(cache)) for url in urls]
            assert [sample["__key__"] for dataset in datasets for sample in dataset] == expected
            site.clear()
            assert [sample["__key__"] for dataset in datasets for sample in dataset] == expected
            assert site.bytes == (0 if module is theirs else 2), "ours asks for the versions of the files"
            none = module.WebDataset(urls[:1], shardshuffle=False, cache_dir=str(cache), cache_size=0)
            assert len(list(none)) == 1
            assert site.asked("train.tar")


@pytest.mark.parametrize(
    "name", ["a", ".h", "__m__", "__x__.json", "x.JPG", "a.b.c", "./a.txt", "__q__/z.txt", "a.", "é.txt"]
)
def test_names_are_split_the_same(tmp_path, name):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for each in ("k.q", name):
            archive.addfile(tarfile.TarInfo(each))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, result = both(lambda m: m.WebDataset(str(path), shardshuffle=False))
    assert result == expected
