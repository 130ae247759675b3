"""The lines of webdataset's slides of 2019, as printed, with one import changed."""

from __future__ import annotations

import pickle
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest

pytest.importorskip("torch")

from torch.utils.data import DataLoader

from tarshards import ShardWriter, read_samples
from tarshards.webdataset import WebDataset
from tarshards.webdataset.writer import TarWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ShardWriter("imagenet_train-%04d.tar", max_samples=25, index=False) as writer:
        for i in range(100):
            writer.write({"__key__": f"{i:04d}", "jpg": np.full((40, 30, 3), i, np.uint8), "cls": i})
    return "imagenet_train-{0000..0003}.tar"


def process_sample(sample):
    return {"__key__": sample["__key__"], "png": sample["jpg"].resize((256, 256)), "cls": str(sample["cls"])}


def process_pickled(sample):
    return process_sample(pickle.loads(pickle.dumps(sample)))


def test_extensions_decode_to_numpy(url):
    imagenet = WebDataset(url, extensions="jpg cls")
    image, cls = next(iter(imagenet))
    assert (image.shape, image.dtype, cls) == ((40, 30, 3), np.float32, 0)


def test_decoders(url):
    image, cls = next(iter(WebDataset(url, extensions="jpg cls", decoder="torch")))
    assert (tuple(image.shape), image.min().item() >= 0, image.max().item() <= 1) == ((3, 40, 30), True, True)
    image, cls = next(iter(WebDataset(url, extensions="jpg cls", decoder=None)))
    assert (type(image), cls) == (bytes, b"0")
    assert next(iter(WebDataset(url, extensions="jpg;png cls", decoder="l8")))[0].shape == (40, 30)
    assert next(iter(WebDataset(url)))["cls"] == b"0"
    assert next(iter(WebDataset(url, decoder="pil")))["jpg"].size == (30, 40)


def test_transforms_and_shuffle(url):
    transforms = [lambda image: np.asarray(image).mean(), lambda x: x - 1]
    imagenet = WebDataset(url, shuffle=100, extensions="jpg cls", decoder="pil", transforms=transforms)
    pairs = list(imagenet)
    assert sorted(cls for _, cls in pairs) == list(range(-1, 99))
    assert [cls for _, cls in pairs] != list(range(-1, 99))
    assert all(abs(mean - cls - 1) < 1 for mean, cls in pairs)
    assert next(iter(WebDataset(url, extensions="jpg cls", decoder="pil", transforms=[None, str])))[1] == "0"
    with pytest.raises(ValueError, match="transforms= are functions of the elements that extensions= names"):
        WebDataset(url, transforms=transforms)


def test_a_data_loader(url):
    imagenet = WebDataset(url, extensions="jpg cls", decoder="torch", transforms=[lambda x: x, lambda x: x - 1])
    loader = DataLoader(imagenet, batch_size=16, num_workers=2)
    images, classes = next(iter(loader))
    assert (images.size(), classes.size()) == ((16, 3, 40, 30), (16,))


def test_map_reduce(url):
    sink = TarWriter("out2.tar")
    for sample in WebDataset("imagenet_train-0000.tar", decoder="pil"):
        sink.write(process_sample(sample))
    sink.close()
    assert [sample["cls"] for sample in read_samples("out2.tar")] == [b"%d" % i for i in range(25)]

    def process_shard(input_shard, output_shard):
        processed = pool.imap_unordered(process_pickled, WebDataset(input_shard, decoder="pil"))
        with TarWriter(output_shard) as sink:
            for sample in processed:
                sink.write(sample)

    with ThreadPool(2) as pool:  # Pool() forks, which may hang in a process that has run other tests' threads
        processed = pool.imap_unordered(process_pickled, WebDataset("imagenet_train-0000.tar", decoder="pil"))
        with TarWriter("out3.tar") as sink:
            for sample in processed:
                sink.write(sample)
        process_shard("imagenet_train-0001.tar", "rescaled-0001.tar")
    assert sorted(int(sample["cls"]) for sample in read_samples("out3.tar")) == list(range(25))
    assert sorted(int(sample["cls"]) for sample in read_samples("rescaled-0001.tar")) == list(range(25, 50))
