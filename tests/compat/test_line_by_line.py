"""The tables "Line by line" of docs/migrating.md: each row runs, what it prints on the left and what is ours beside it.

A test names the rows that it runs by their left column; the last test compares these with the page.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.utils.data as tud
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import tarshards
from tarshards import (
    ArrayLoader,
    Catalog,
    IndexedShards,
    ShardDataset,
    ShardWriter,
    Stream,
    augment,
    open_url,
    read_rows,
    read_samples,
    readers,
    write_dataset,
    write_msgpack,
)
from tarshards.formats.importing import row_to_sample
from tarshards.webdataset import WebDataset
from tarshards.webdataset.writer import TarWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

PAGE = Path(__file__).parents[2] / "docs/migrating.md"
RUN: set[str] = set()  # the left columns of the rows that a test runs
COUNT = 40


def rows() -> list[tuple[str, str]]:
    """Return the columns of all rows."""
    part = PAGE.read_text().split("## Line by line\n")[1]
    found = [re.split(r" (?<!\\)\| ", row[2:-2]) for row in re.findall(r"^\| .* \|$", part, re.MULTILINE)]
    return [(left, right) for left, right in found if left != "line"]


def runs(*left: str) -> Callable[[Any], Any]:
    """Say which rows a test runs: those whose left columns contain one of these words."""
    for words in left:
        (found,) = [row for row, _ in rows() if words in row]
        RUN.add(found)
    return lambda test: test


def code(words: str, column: int = 1) -> list[str]:
    """Return the pieces of code in a column of the row whose left column contains *words*."""
    (found,) = [row for row in rows() if words in row[0]]
    return [piece.replace(r"\|", "|") for piece in re.findall(r"`([^`]+)`", found[column])]


def equal(left: Any, right: Any) -> bool:
    """Return whether two values are the same, down to the type and contents of arrays."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)
    return bool(np.array_equal(np.asarray(left), np.asarray(right))) if hasattr(left, "shape") else left == right


def names_of_the_page() -> dict[str, Any]:
    """Return what the lines of the page use without importing it."""
    ours = {name: getattr(tarshards, name) for name in tarshards.__all__}
    return ours | {"WebDataset": WebDataset, "TarWriter": TarWriter, "DataLoader": DataLoader, "tud": tud}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with shards of images and classes, indexed, as one is in the slides."""
    monkeypatch.chdir(tmp_path)
    with ShardWriter("imagenet_train-{shard:04d}.tar", max_samples=COUNT // 4) as writer:
        for i in range(COUNT):
            writer.write({"__key__": f"{i:04d}", "jpg": np.full((40, 30, 3), i, np.uint8), "cls": i})
    return tmp_path


URL = "imagenet_train-{0000..0003}.tar"


# WebDataset's slides


@runs("`Dataset`, `IterableDataset`", "`print(WebDataset.__base__)`", "`from webdataset import WebDataset`")
def test_classes(here, capsys):
    assert issubclass(ShardDataset, IterableDataset)
    assert len(IndexedShards(URL)) == len(ShardDataset(URL)) == COUNT
    mnist = IndexedShards(URL).decode("rgb8").to_tuple("jpg", "cls")
    loader = eval(
        code("`Dataset`", 0)[2].replace("num_workers=8", "num_workers=2"), {**names_of_the_page(), "mnist": mnist}
    )
    assert sorted(cls for _, classes in loader for cls in classes.tolist()) == list(range(COUNT))
    names: dict[str, Any] = {}
    exec(code("`from webdataset import WebDataset`")[0], names)
    exec(code("WebDataset.__base__", 0)[0], names)
    assert "class" in capsys.readouterr().out
    assert names["WebDataset"] is WebDataset


@runs('`WebDataset(url, extensions="jpg cls")`', "`for image, cls in imagenet:`", '`decoder="torch"`, `decoder="pil"`')
def test_decoded_pairs_are_those_of_ours(here):
    for pixels, spec in (("torch", "torchrgb"), ("pil", "pil"), (None, None)):
        assert f'decoder="{pixels}"' in code('`decoder="torch"`', 0) or pixels is None
        imagenet = WebDataset(URL, extensions="jpg cls", decoder=pixels)
        ours = ShardDataset(URL) if spec is None else ShardDataset(URL).decode(spec)
        found = [(image, cls) for image, cls in imagenet]
        assert equal(found, list(ours.to_tuple("jpg", "cls")))
        assert len(found) == COUNT
    printed, ours = (
        code('`WebDataset(url, extensions="jpg cls")`', 0)[0],
        code('`WebDataset(url, extensions="jpg cls")`')[0],
    )
    url = URL
    names = {**names_of_the_page(), "url": url}
    assert equal([cls for _, cls in eval(printed, names)], [int(cls) for _, cls in eval(ours, names)])


@runs("`imagenet[0]`")
def test_a_stream_has_no_items(here):
    with pytest.raises((TypeError, NotImplementedError)):
        WebDataset(URL)[0]
    urls = URL
    assert equal(eval(code("`imagenet[0]`")[0], {**names_of_the_page(), "urls": urls}), next(iter(read_samples(URL))))


@runs("`transforms=[augment, lambda x: x-1]`", "`shuffle=100`")
def test_transforms_and_shuffle(here):
    def augment(image):
        return np.asarray(image).mean()

    options = eval(f"dict({code('`transforms=', 0)[0]})", {"augment": augment})
    imagenet = WebDataset(URL, extensions="jpg cls", decoder="pil", **options)
    names = {
        "dataset": ShardDataset(URL).decode("pil").to_tuple("jpg", "cls"),
        "augment": augment,
        "f": lambda x: x - 1,
    }
    assert equal(list(imagenet), list(eval(f"dataset{code('`transforms=')[0]}", names)))
    left = [cls for _, cls in WebDataset(URL, extensions="jpg cls", decoder="pil", **eval("dict(shuffle=100)"))]
    right = [cls for (cls,) in ShardDataset(URL, **eval(f"dict({code('`shuffle=100`')[0]})")).decode().to_tuple("cls")]
    assert sorted(left) == sorted(right) == list(range(COUNT))
    assert left != list(range(COUNT)) != right


@runs("imagenet_train-{0000..0147}.tgz", "`DataLoader(imagenet, batch_size=16, num_workers=8)`")
def test_a_loader_of_braces_of_compressed_shards(here):
    for shard in here.glob("*.tar"):
        subprocess.run(["gzip", "-k", "-S", ".gz", shard.name], check=True)
        Path(f"{shard.name}.gz").rename(shard.with_suffix(".tgz").name)
    imagenet = WebDataset(URL.replace(".tar", ".tgz"), extensions="jpg cls", decoder="torch")
    dataset = ShardDataset(URL).decode("torchrgb").to_tuple("jpg", "cls")
    names = {**names_of_the_page(), "imagenet": imagenet, "dataset": dataset}
    lines = [code("`DataLoader(imagenet", column)[0].replace("=8", "=2") for column in (0, 1)]
    found = [sorted(cls for _, classes in eval(line, names) for cls in classes.tolist()) for line in lines]
    assert found == [list(range(COUNT))] * 2


@runs(
    "`unset GZIP; curl -s URL",
    "`gsutil cat gs://",
    "`tar tvf small.tar",
    "`tar2tsv -f cls small.tar`",
    "`tar -cf - --sort=name",
    "`tarshow -c 2 small.tar`",
    "`tarproc -p 5 -c 'ls;",
    "`kujob -s",
)
def test_the_command_lines(here, path_with_tools):
    """tests/cli/test_slides.py has what they print."""
    programs = here / "programs"
    (here / "mdata/imagenet-raw/train").mkdir(parents=True)
    programs.mkdir()
    for name, text in {
        "gsutil": "exec cat imagenet_train-0000.tar.gz",
        "curl": "exec cat imagenet_train-0000.tar.gz",
        "gm": "exit 0",
        "run-ocr": "exit 0",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{path_with_tools}"}

    def shell(line: str) -> str:
        line = line.replace("/mdata", f"{here}/mdata")
        done = subprocess.run(["bash", "-euc", line], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shell("gzip -k imagenet_train-0000.tar; tar xf imagenet_train-0001.tar -C mdata/imagenet-raw/train")
    lines = [
        code(words, 0)[0] for words in ("`unset GZIP", "`gsutil cat", "`tar tvf", "`tar2tsv", "`tar -cf", "`tarshow")
    ]
    listed, _, count, table, _, shown = map(shell, lines)
    assert (listed.count("\n"), count.strip()) == (5, "10")
    assert table.splitlines()[:2] == ["__key__\tcls", "0000\t0"]
    assert list(here.glob("imagenet_train-000000.tar"))
    assert shown.count("0001") == 1
    shell(code("`tarproc -p 5", 0)[0])
    assert len(list(read_samples("out.tar"))) == 10
    job = shell(code("`kujob -s", 0)[0].replace("kujob", "kujob --image x --dry-run"))
    assert "completions: 1000" in job


def process_sample(sample):
    return {"__key__": sample["__key__"], "png": sample["jpg"].resize((16, 16)), "cls": str(sample["cls"])}


def process_pickled(sample):
    return process_sample(pickle.loads(pickle.dumps(sample)))


def process_bytes(sample):
    return {**sample, "cls": b"%d" % (int(sample["cls"]) + 1)}


@runs(
    "`from webdataset.writer import TarWriter`",
    '`for sample in WebDataset("small.tar", decoder="pil"):`',
    "`pool.imap_unordered(process_sample",
    '`with TarWriter("out2.tar") as sink:`',
    "`distributed_map_unordered(process_shard, shards)`",
)
def test_map_reduce(here):
    Path("imagenet_train-0000.tar").rename("small.tar")
    names = names_of_the_page() | {"process_sample": process_sample}
    exec(code("`from webdataset.writer", 1)[0], names)
    loop = code("`for sample in WebDataset(", 0)[0]
    for _, sink, write, close in [code("`from webdataset.writer", 0)]:
        write = write.replace("sample", "process_sample(sample)")
        exec(f"{sink}\n{loop}\n    {write}\n{close}", names)
    written = list(read_samples("out2.tar"))
    assert [sample["cls"] for sample in written] == [b"%d" % i for i in range(COUNT // 4)]
    with ThreadPool(2) as pool:  # Pool() forks, which may hang in a process that has run other tests' threads
        mapped = eval(code("`pool.imap", 0)[0], {**names, "pool": pool, "process_sample": process_pickled})
        exec(
            f"{code('`with TarWriter', 0)[0]}\n    for sample in mapped: sink.write(sample)",
            {**names, "mapped": mapped},
        )
    assert sorted(sample["__key__"] for sample in read_samples("out2.tar")) == [sample["__key__"] for sample in written]
    ours = Stream.from_shards("small.tar", index=False).decode("pil").async_map(process_sample, workers=2)
    assert equal([sample["cls"] for sample in ours], [sample["cls"].decode() for sample in written])
    inputs, outputs = "imagenet_train-{0001..0003}.tar", "mapped-{shard:04d}.tar"
    line = (
        code("`distributed_map_unordered")[0]
        .replace("process_sample", "process_bytes")
        .replace("executor=", "executor=None")
    )
    exec(line, {**names, "inputs": inputs, "outputs": outputs, "process_bytes": process_bytes})
    found = sorted(int(sample["cls"]) for sample in read_samples("mapped-*.tar"))
    assert found == list(range(COUNT // 4 + 1, COUNT + 1))


# Squirrel's slides and its tutorial


@runs(
    "`from squirrel.iterstream import IterableSource`", "`.shuffle(1000)`, `.filter(f)`", "`for data in it:`, `assert"
)
def test_streams():
    names: dict[str, Any] = {}
    exec("; ".join(code("`from squirrel.iterstream import IterableSource`")[:1]), names)
    source = eval(code("`from squirrel.iterstream import IterableSource`")[1], names)
    for line in code("`.shuffle(1000)`", 0):
        found = list(eval(f"source{line}", {"source": source, "f": lambda number: number % 3}))
        assert len(found) == {".filter(f)": 1333, ".batched(100)": 20}.get(line, 2000)
    it = source.shuffle(1000).filter(lambda number: number >= 0).map(str).batched(100)
    loop, check = code("`for data in it:`", 0)
    exec(f"{loop}\n    {check}", {"it": it})
    assert sorted(int(text) for data in it for text in data) == list(range(2000))


@pytest.mark.interop
@runs("`.async_map(lambda x: x**2, max_workers=100)`", "`.dask_map()`, `.loop()`")
def test_parallel_streams(capsys):
    numbers = Stream(range(20))
    (mapped,) = code("`.async_map(lambda")
    assert list(eval(f"numbers{mapped}", {"numbers": numbers})) == [n**2 for n in range(20)]
    with pytest.raises(TypeError, match="workers"):
        eval(f"numbers{code('`.async_map(lambda', 0)[0]}", {"numbers": numbers})
    dask_map, repeat, monitor = code("`.dask_map()`")
    pytest.importorskip("dask")
    assert list(eval(f"numbers{dask_map}", {"numbers": numbers, "f": lambda x: x + 1})) == list(range(1, 21))
    assert list(islice(eval(f"numbers{repeat}", {"numbers": numbers}), 45)) == [*range(20), *range(20), *range(5)]
    assert list(eval(f"numbers{monitor}", {"numbers": numbers})) == list(range(20))


@runs(
    "`from squirrel.iterstream.base import Composable`",
    "`from squirrel.driver.driver import Driver",
    "`MessagepackDriver`, `ZarrDriver`",
    "`FileDriver`",
    "`HubDriver(url).get_iter()`",
    "`it = MessagepackDriver(url).get_iter().to_torch_iterable()`",
    "`loader = tud.DataLoader(it)`",
    "`class MyIterableDataset",
    "`print(next(iter(it_hf)))`",
    "`TorchvisionDriver(",
    "`HuggingfaceDriver(",
    "`pip install squirrel-core",
)
def test_drivers(here, capsys, monkeypatch):
    stored = [{"n": i, "text": f"row {i}"} for i in range(12)]
    write_msgpack(stored[:6], "store/0.gz"), write_msgpack(stored[6:], "store/1.gz")
    Path("a.csv").write_text("n,text\n" + "".join(f"{row['n']},{row['text']}\n" for row in stored))
    Path("a.jsonl").write_text("".join(f'{{"n": {row["n"]}, "text": "{row["text"]}"}}\n' for row in stored))
    assert all(hasattr(Stream, name) for name in ("map", "filter", "compose", "batched"))
    for url, options in (("store", {"format": "msgpack"}), ("a.csv", {}), ("a.jsonl", {})):
        assert sorted(read_rows(url, **options).fields(), key=lambda row: row["n"]) == stored
    with eval(code("`FileDriver`")[0], {"open_url": open_url, "url": "a.csv"}) as file:
        assert file.readline() == b"n,text\n"
    url = "store"
    names = {**names_of_the_page(), "url": url}
    exec(code("`it = MessagepackDriver(url)")[0], names)
    loader, loop = code("`loader = tud.DataLoader(it)`", 0)
    exec(f"{loader}\nfound = []\n{loop}\n    found.append(item)", names)
    assert sorted(int(item["n"]) for item in names["found"]) == list(range(12))
    base, made = code("`class MyIterableDataset", 0)
    exec(f"{base}:\n    def __iter__(self):\n        return iter(read_rows(url, format='msgpack'))\n", names)
    ds = names["MyIterableDataset"]()
    assert len(list(eval(made, {**names, "ds": ds}))) == 12
    exec(code("`print(next(iter(it_hf)))`", 0)[0], {"it_hf": read_rows("a.csv")})
    assert "row 0" in capsys.readouterr().out

    class Images:  # stands for torchvision.datasets.CIFAR10, which downloads
        def __init__(self, root, download):
            self.root = root

        def __iter__(self):
            return iter([(0, 1)])

    class Torchvision:
        class datasets:
            CIFAR10 = Images

    line = code("`TorchvisionDriver(")[0]
    assert list(eval(line, {"Stream": Stream, "torchvision": Torchvision, "root": "."})) == [(0, 1)]
    write_dataset([{"__key__": "a", "n": 1}, {"__key__": "b", "n": 2}], "hub-{shard:d}.tar", to_sample=row_to_sample)
    assert len(list(read_samples("hub-0.tar"))) == 2


@pytest.mark.interop
@runs("`create_sq_ds_from_hf(")
def test_a_dataset_of_hugging_face(here):
    datasets = pytest.importorskip("datasets")
    folder = datasets.Dataset.from_list([{"image": f"{i}", "label": i} for i in range(6)])
    folder.save_to_disk("cifar10")
    line = code("`HuggingfaceDriver(")[0].replace(
        '"cifar10", format="huggingface", split="train"', '"cifar10", format="huggingface"'
    )
    assert [row["label"] for row in eval(line, {"read_rows": read_rows})] == list(range(6))
    made = tarshards.import_dataset("cifar10", "imagenette-%06d.tar", format="huggingface")
    assert made
    assert len(list(read_samples("imagenette-*.tar"))) == 6


@runs(
    "`from squirrel.catalog import Catalog, Source`",
    "`Source(driver_name=MessagepackDriver.name",
    "`cat = Catalog()`",
    "the printed `catalog.yaml`",
)
def test_catalogs(here):
    names: dict[str, Any] = {}
    exec(code("`from squirrel.catalog import Catalog, Source`")[0], names)
    made, save = code("`cat = Catalog()`")
    catalog = eval(made, names)
    line = code("`Source(driver_name")[0].replace(", card=", "")
    eval(line, {"catalog": catalog, "urls": "imagenet_train.shards.json"})
    eval(save, {"catalog": catalog})
    assert sorted(int(sample["cls"]) for sample in Catalog.load("catalog.yaml").stream("cifar10")) == list(range(COUNT))
    write_msgpack([{"n": 1}, {"n": 2}], "store/0.gz")
    Path("catalog.yaml").write_text(
        "!YamlCatalog\nversion: 0.16.0\nsources:\n- !YamlSource\n  identifier: train\n  driver_name: messagepack\n"
        "  driver_kwargs:\n    url: store\n  version: 1\n"
    )
    (line,) = code("the printed `catalog.yaml`")
    assert [row["n"] for row in eval(line, names)] == [1, 2]


def store(count: int = 6) -> list[dict[str, Any]]:
    """Write rows of an image and a label as Squirrel's msgpack shards; return them."""
    stored = [{"image": np.full((4, 4, 3), i, np.uint8), "label": np.int64(i)} for i in range(count)]
    write_msgpack(stored, "store/0.gz")
    return stored


@runs(
    "`from squirrel.driver.msgpack import MessagepackDriver`",
    "`sq_it = MessagepackDriver(URL).get_iter()`",
    "`sq_it.take(num_viz_imgs)",
    "`[np.array(v, dtype=np.float32)",
    "`[cp.array(v, dtype=cp.float32)",
    "`for k, v in item.items(): batch[k].append(v)`",
    "`get_iter().batched(BATCH_SIZE, collation_fn)`",
    "`get_iter().map(pre_proc_torchvision)`",
    "`.batched(BATCH_SIZE, default_collate)`",
)
def test_the_tutorial(here):
    stored = store()
    names: dict[str, Any] = {"URL": "store", "np": np, "num_viz_imgs": 4, "access_img": lambda item: item["image"]}
    exec("\n".join(code("`from squirrel.driver.msgpack")[:1]), names)
    exec(code("`sq_it =")[0], names)
    shown = eval(code("`sq_it.take(", 0)[0], names)
    assert equal(shown, [row["image"] for row in stored[:4]])
    for words, module in (("`[np.array(v", "np"), ("`[cp.array(v", "cp")):
        names["pre_proc_for_dali"] = eval(f"lambda item: {code(words, 0)[0]}", {"np": np, "cp": np})
        mapped = eval(code("`[np.array(v")[1].replace("...", "URL, format='msgpack'"), names)
        assert equal(list(mapped), [[np.array(v, dtype=np.float32) for v in row.values()] for row in stored]), module

    def collation_fn(items):
        batch: dict[str, list[Any]] = {"image": [], "label": []}
        for item in items:
            exec(code("`for k, v in item.items()", 0)[0], {"item": item, "batch": batch})
        return {name: np.stack(values) for name, values in batch.items()}

    rows = read_rows("store", format="msgpack")
    batches = list(
        eval(f"rows{code('`get_iter().batched(')[0]}", {"rows": rows, "BATCH_SIZE": 3, "collation_fn": collation_fn})
    )
    assert equal(batches[1]["label"], np.arange(3, 6))
    for line in code("`get_iter().map(pre_proc_torchvision)`", 0):
        line = line.replace("get_iter()", "")
        name = line[5:-1]
        assert len(list(eval(f"rows.fields(){line}", {"rows": rows, name: lambda item: item["label"]}))) == 6
    (line,) = code("`.batched(BATCH_SIZE, default_collate)`")
    collated = list(eval(f"rows.fields(){line}", {"rows": rows, "BATCH_SIZE": 6, "default_collate": default_collate}))
    assert collated[0]["image"].shape == (6, 4, 4, 3)


@pytest.mark.interop
@runs(
    "`fn.external_source(source=it",
    "`pipeline(it=it, batch_size=",
    "`for pipes_out in dali_it:`",
)
def test_the_tutorial_in_dali(here):
    """tests/loaders/dali and notebooks/dali.ipynb do so on a GPU, too."""
    dali = pytest.importorskip("nvidia.dali")
    from nvidia.dali import fn, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    stored = store()
    (source,) = code("`fn.external_source(", 0)
    made, build, iterate = code("`pipeline(it=it", 0)
    loop, take = code("`for pipes_out in dali_it:`", 0)
    it = (
        read_rows("store", format="msgpack").fields().map(lambda item: [np.array(v, np.float32) for v in item.values()])
    )
    names: dict[str, Any] = {"fn": fn, "types": types, "it": it, "device": "cpu", "already_batched": False}

    @dali.pipeline_def
    def pipeline(it):
        image, label = eval(source, {**names, "it": it})
        return image, label

    names |= {"pipeline": pipeline, "DALIGenericIterator": DALIGenericIterator, "img_key": "i", "label_key": "l"}
    names["pipe"] = eval(
        made.replace("batch_size=...", "batch_size=3")
        .replace("num_threads=...", "num_threads=1")
        .replace("device_id=device_id", "device_id=None")
        .replace("device_id=...", "device_id=None"),
        names,
    )
    eval(build, names)
    names |= {"dali_it": eval(iterate, names), "found": []}
    exec(f"{loop}\n    {take}\n    found.append(item)", names)
    assert equal([int(label) for item in names["found"] for label in item["l"]], [int(row["label"]) for row in stored])


@pytest.mark.interop
def test_squirrel_itself_gives_the_same(here, squirrel):
    from squirrel.driver import MessagepackDriver
    from squirrel.iterstream import IterableSource

    theirs, ours = ({"source": make(range(2000)), "f": lambda number: number % 2} for make in (IterableSource, Stream))
    for line in (".filter(f)", ".map(f)", ".batched(100)", ".filter(f).map(f).batched(100)"):
        left, right = ([np.asarray(item).tolist() for item in eval(f"source{line}", names)] for names in (theirs, ours))
        assert left == right, line
    assert sorted(theirs["source"].shuffle(1000)) == sorted(ours["source"].shuffle(1000))
    stored = store()
    left, right = MessagepackDriver("store").get_iter().collect(), list(read_rows("store", format="msgpack").fields())
    assert equal(left, right)
    assert equal(right, stored)
    assert (
        len(
            list(
                eval(
                    code("`it = MessagepackDriver(url)", 0)[0].removeprefix("it = "),
                    {"MessagepackDriver": MessagepackDriver, "url": "store"},
                )
            )
        )
        == 6
    )


# The notebook on FFCV


class OttoDataset(Dataset):
    """As in the notebook, with fewer rows."""

    def __init__(self):
        self.x = np.arange(COUNT * 93, dtype=np.float32).reshape(COUNT, 93)

    def __getitem__(self, index):
        return self.x[index], index % 9

    def __len__(self):
        return COUNT


@runs(
    "`class OttoDataset`",
    "`from ffcv.writer import DatasetWriter`",
    "`DatasetWriter('my_easy_data.beton'",
    "`from ffcv.loader import Loader, OrderOption`",
    "`Loader('my_easy_data.beton'",
    "`DataLoader(dataset, batch_size=1024",
    "`for i, b in enumerate(tqdm(ffcv_loader)):`",
    "`x = x.cuda()`",
    "`order=OrderOption.QUASI_RANDOM`",
    "`Squeeze()`, `View(...)`",
)
def test_the_tables_of_the_notebook(here):
    dataset = OttoDataset()
    names: dict[str, Any] = {"dataset": dataset}
    exec(code("`from ffcv.writer")[0], names)
    exec(code("`from ffcv.loader")[0], names)
    assert len(eval(code("`class OttoDataset`", 0)[-1], names)) == 2
    names["f"] = lambda row: {"__key__": f"{int(row[0][0]):06d}", "x.npy": row[0], "y.cls": row[1]}
    eval(code("`DatasetWriter('my_easy_data.beton'")[0], names)
    loader = eval(code("`Loader('my_easy_data.beton'")[0].replace("1024", "16"), names)
    line = (
        code("`DataLoader(dataset, batch_size=1024", 0)[0]
        .replace("1024", "16")
        .replace("pin_memory=True", "pin_memory=False")
    )
    theirs = list(eval(line, {"DataLoader": DataLoader, "dataset": dataset}))
    taken = []
    for _, b in enumerate(loader):
        exec(code("`for i, b in enumerate(")[0], {"b": b, "taken": taken, **(found := {"b": b})}, found)
        taken.append((found["x"], found["y"]))
    assert equal([(x.numpy(), y.numpy()) for x, y in theirs], [(np.asarray(x), np.asarray(y)) for x, y in taken])
    assert taken[0][1].ndim == 1  # nothing to squeeze, and no flatten()
    options = code("`order=OrderOption.QUASI_RANDOM`")[0].replace("pool=n", "pool=8")
    mixed = eval(f"ShardDataset('otto-*.tar', {options})", names)
    found = [int(sample["y.cls"]) for sample in mixed]
    assert sorted(found) == sorted(y for _, y in dataset) != found


@runs(
    "`dir(ffcv.fields)`",
    "`DatasetWriter('cifar.beton'",
    "`CenterCropRGBImageDecoder((32, 32), 2/3)`",
    "`IntDecoder()`",
    "`ToTensor()`, `ToDevice(",
    "`ToTorchImage()`, `Convert(...)`",
    "`RandomResizedCrop`",
    "`x = (x / 255)`",
)
def test_the_images_of_the_notebook(here):
    pictures = [(np.random.default_rng(i).integers(0, 256, (48, 48, 3), np.uint8), i % 10) for i in range(COUNT)]
    words = code("`dir(ffcv.fields)`")[0].removeprefix("readers.").split()
    assert all(callable(getattr(readers, word)) for word in words)
    (_, fields) = code("`DatasetWriter('cifar.beton'")

    def f(pair):
        return {"__key__": f"{crc32(pair[0])}", **eval(fields, {"image": pair[0], "label": pair[1]})}

    eval(code("`DatasetWriter('cifar.beton'")[0], {"write_dataset": write_dataset, "dataset": pictures, "f": f})
    names = {"readers": readers, "size": 24}
    center = eval(code("`CenterCropRGBImageDecoder")[0], names)
    label = eval(code("`IntDecoder()`")[0], names)
    options = {"layout": "CHW", "dtype": "float32"}
    assert [word.split("=")[0] for word in code("`ToTorchImage()`")[:2]] == list(options)
    scaled = eval(code("`x = (x / 255)`")[0], names)
    resized = eval(code("`RandomResizedCrop`")[0], names)
    device = eval(f"dict({code('`ToTensor()`')[0]})") | {"device": "cpu"}
    data = ShardDataset("cifar-*.tar")

    def batches(reader, **more):
        fields = {"image:image.png": reader, "label:label.cls": label}
        return list(ArrayLoader(data, 16, fields=fields, **more))

    first = batches(center)[0]
    assert (first["image"].shape, first["label"].tolist()) == ((16, 32, 32, 3), [i % 10 for i in range(16)])
    assert batches(readers.image(32, layout="CHW"))[0]["image"].shape == (16, 3, 32, 32)
    plain, floats = (
        batches(readers.image(32, crop="center"), **device),
        batches(readers.image(32, crop="center", dtype="float32"), **device),
    )
    assert isinstance(plain[0]["image"], torch.Tensor)
    x = plain[0]["image"]
    exec(code("`x = (x / 255)`", 0)[0], {}, found := {"x": x})
    assert torch.allclose(found["x"], floats[0]["image"], atol=1e-6)
    assert batches(scaled)[0]["image"].dtype == np.float32
    assert batches(resized)[0]["image"].shape == (16, 24, 24, 3)


@runs("`Cutout RandomHorizontalFlip", "`ModuleWrapper`, `Poison`")
def test_the_transforms_of_the_notebook(here):
    words = code("`Cutout RandomHorizontalFlip")[0].removeprefix("augment.").split()
    assert all(callable(getattr(augment, word)) for word in words)
    fields = {"image:jpg": readers.image(16), "label:cls": readers.integer()}

    def poison(batch, rng):
        return {**batch, "image": batch["image"] * 0}

    module = partial(augment.module, field="image", module=torch.nn.Identity())
    loader = ArrayLoader(ShardDataset(URL), 8, fields=fields, device="cpu", transforms=[poison])
    assert all(not batch["image"].any() for batch in loader)
    assert module.func is augment.module


def test_every_row_of_the_page_runs():
    assert [left for left, _ in rows() if left not in RUN] == []
