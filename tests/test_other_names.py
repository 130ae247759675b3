"""Names that other libraries use raise an error that says ours."""

from __future__ import annotations

import re
import subprocess
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
from with_torch import ShardDataset, ShardLoader, needs_torch

import tarshards
from tarshards import (
    ArrayLoader,
    IndexedShards,
    ShardWriter,
    Stream,
    TarWriter,
    build_columns,
    map_shards,
    readers,
    write_dataset,
)
from tarshards.stream.other_names import CLASSES, METHODS, OPTIONS

pytestmark = pytest.mark.docs


@pytest.fixture
def urls(make_shards):
    return make_shards(2, index=True)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda d: d.with_epoch(10), r"no with_epoch: ShardLoader\(\.\.\., steps=n\)"),
        (lambda d: d.rename(image="jpg"), r"no rename: rename_fields\("),
        (lambda d: d.map_dict(jpg=str), r"no map_dict: map_fields\("),
        (lambda d: d.slice(10), r"no slice: take\(n\)"),
        (lambda d: d.listed(10), r"no listed: batched\("),
        (lambda d: d.to_torch_iterable(), r"no to_torch_iterable: torch_iterable\("),
        (lambda d: d.to(str), r"no to: pipe\("),
        (lambda d: d.tqdm(), r"no tqdm: progress\(\)"),
        (lambda d: d.numba_map(str), r"no numba_map: map_fields\("),
        (lambda d: d.extract_keys("*.jpg"), r"no extract_keys: to_tuple\("),
        (lambda d: d.associate({}), r"no associate: map\(f\)"),
        (lambda d: d.rsample(0.5), r"no rsample: map\(f, rng=True, drop_none=True\)"),
        (lambda d: d.no_such_thing(), r"no no_such_thing$"),
    ],
)
@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset])
def test_methods(urls, kind, use, words):
    with pytest.raises(AttributeError, match=words):
        use(kind(urls))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"shardshuffle": 100}, "'shardshuffle': here it is shuffle=True"),
        ({"resampled": True}, "'resampled': here it is resample=True"),
        ({"handler": print}, "'handler': here it is on_error="),
        ({"nodesplitter": print}, "'nodesplitter': here it is nothing: each rank reads its own part"),
        ({"extensions": "jpg cls"}, r"'extensions': here it is \.to_tuple\('jpg', 'cls'\)"),
        ({"decoder": "pil"}, r"'decoder': here it is \.decode"),
        ({"transforms": []}, r"'transforms': here it is \.map_tuple"),
        ({"shufle": True}, "'shufle'"),
    ],
)
@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset])
def test_options_of_datasets(urls, kind, option, words):
    with pytest.raises(TypeError, match=words):
        kind(urls, **option)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda d: d.map(str, handler=print), "'handler': here it is on_error="),
        (lambda d: d.decode(handler=print), "handler.* on_error="),
        (lambda d: d.shuffle(bufsize=10), r"'bufsize': here it is shuffle\(size\)"),
        (lambda d: d.batched(4, collation_fn=list), "'collation_fn': here it is collate="),
        (lambda d: ShardLoader(d, 4, batch_sizes=[4]), "batch_sizes.*batch_size"),
        (lambda d: ShardLoader(d, 4, handler=print), "handler.*on_error="),
        (lambda d: ArrayLoader(d, 4, fields={"cls": readers.integer()}, batch_sizes=[4]), "batch_sizes.*batch_size"),
        (lambda d: ShardWriter("x-%d.tar", maxcount=10), "'maxcount': here it is max_samples="),
        (lambda d: ShardWriter("x-%d.tar", maxsize=10), "'maxsize': here it is max_bytes="),
        (lambda d: ShardWriter("x-%d.tar", start_shard=1), "'start_shard': here it is start="),
        (lambda d: ShardWriter("x-%d.tar", post=print), "'post': here it is on_finish="),
        (lambda d: ShardWriter("x-%d.tar", encoder=False), "'encoder': here it is nothing: fields are encoded by"),
        (lambda d: TarWriter("x.tar", user="me"), "'user': here it is nothing: it is fixed"),
        (
            lambda d: TarWriter("x.tar", compress="gz"),
            r"'compress': here it is the name of the shard, such as a\.tar\.gz",
        ),
        (lambda d: d.batched(batchsize=4), r"'batchsize': here it is batched\(size\)"),
        (lambda d: d.to_tuple("cls", missing_is_error=False), "'missing_is_error': here it is on_error='skip'"),
        (lambda d: d.sliding(window_size=4), r"'window_size': here it is sliding\(size\)"),
        (lambda d: d.sliding(4, stride=2), "'stride': here it is step="),
        (lambda d: d.map(callback=str), r"'callback': here it is map\(f\)"),
        (lambda d: IndexedShards(d.source.shards.urls, cache_dir="x"), r"'cache_dir': here it is remote=Remote\("),
    ],
)
def test_options_of_ops_loaders_and_writers(urls, use, words):
    with pytest.raises(TypeError, match=words):
        use(ShardDataset(urls))


@pytest.mark.parametrize("kind", ["ShardLoader", "ArrayLoader"])
def test_methods_of_loaders(urls, kind):
    dataset = ShardDataset(urls)
    fields = {"cls": readers.integer()}
    loader = ShardLoader(dataset, 2) if kind == "ShardLoader" else ArrayLoader(dataset, 2, fields=fields)
    for name, words in {
        "with_epoch": r"with_epoch: ShardLoader\(\.\.\., steps=n\)",
        "listed": "listed: batched",
        "unbatched": r"unbatched: ops come before the loader, as ShardDataset\(urls\)\.unbatched\(\.\.\.\)$",
        "_shuffled": "_shuffled$",
    }.items():
        with pytest.raises(AttributeError, match=f"^a {kind} has no {words}"):
            getattr(loader, name)
        assert not hasattr(loader, name)


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name):
    words = re.escape(f"here it is {CLASSES[name]}")
    with pytest.raises(AttributeError, match=f"^module 'tarshards' has no attribute '{name}': {words}"):
        getattr(tarshards, name)
    assert not hasattr(tarshards, name)
    for code in (f"from tarshards import {name}", f"import tarshards.{name}"):
        with pytest.raises(ImportError, match=f"^tarshards has no {name}: {words}"):
            exec(code)


def test_a_catalog_without_a_file():
    with pytest.raises(TypeError, match=r'a Catalog has a file: Catalog\("catalog.yaml"\)'):
        tarshards.Catalog()


@pytest.mark.interop
@needs_torch
def test_all_methods_of_webdataset_have_a_hint():
    theirs = pytest.importorskip("webdataset")
    names = {
        name for kind in (theirs.WebDataset, theirs.WebLoader) for name in vars(kind) | vars(theirs.FluidInterface)
    }
    names -= {"create_url_iterator", "update_cache_info"}  # webdataset's own
    assert not {name for name in names if name[0] != "_" and not hasattr(ShardDataset, name)} - METHODS.keys()


@pytest.mark.interop
def test_all_methods_of_squirrel_have_a_hint(squirrel):
    from squirrel.iterstream import Composable

    assert {name for name in dir(Composable) if name[0] != "_" and not hasattr(Stream, name)} <= METHODS.keys()


def test_nothing_of_ours_is_in_the_tables():
    assert not [name for name in CLASSES if name in dir(tarshards)]
    assert not [name for name in METHODS if hasattr(Stream(()), name)]
    assert OPTIONS.keys() >= {"shardshuffle", "resampled", "handler", "nodesplitter", "extensions", "batch_sizes"}


@needs_torch
def test_import_star_leaves_the_name_webdataset_alone(python_with_torch):
    code = "webdataset = 'theirs'\nfrom tarshards import *\nassert webdataset == 'theirs'"
    subprocess.run([python_with_torch, "-c", code], check=True, timeout=60)
    assert "webdataset" in dir(tarshards)


class TestFunctionsThatCannotBeSent:
    def test_map_shards_names_it_before_anything_begins(self, urls, tmp_path):
        before = threading.active_count()
        words = (
            r"map_shards: the function <lambda> \(.*test_other_names\.py, line \d+\) cannot be sent to another process"
        )
        for executor in (None, ProcessPoolExecutor(1, get_context("spawn"))):
            with pytest.raises(TypeError, match=words) as caught:
                map_shards(lambda samples: samples, urls, str(tmp_path / "out-{shard:03d}.tar"), executor=executor)
            assert ".tar" not in str(caught.value)
        assert (threading.active_count(), list(tmp_path.glob("out*"))) == (before, [])

    def test_threads_take_it(self, urls, tmp_path):
        with ThreadPoolExecutor(2) as threads:
            reports = map_shards(lambda s: s, urls, str(tmp_path / "out-{shard:03d}.tar"), executor=threads)
        assert [report.samples_out for report in reports] == [3, 3]

    def test_others_name_it_too(self, urls, tmp_path):
        with ProcessPoolExecutor(1, get_context("spawn")) as processes:
            for name, use in {
                "to_sample=": lambda f: write_dataset([1], tmp_path / "w-%d.tar", to_sample=f, executor=processes),
                "select": lambda f: Stream.from_shards(urls).select(f, executor=processes),
                "async_map": lambda f: Stream(range(3)).async_map(f, executor=processes).collect(),
                "build_columns": lambda f: build_columns(urls, {"a": f}, executor=processes),
            }.items():
                with pytest.raises(TypeError, match=f"{name}.*<lambda> .* cannot be sent to another process"):
                    use(lambda sample: sample)


@pytest.mark.parametrize("loader", [ShardLoader, ArrayLoader])
def test_a_name_in_place_of_a_required_argument(urls, loader):
    with pytest.raises(TypeError, match="'batch_sizes': here it is batch_size="):
        loader(ShardDataset(urls), batch_sizes=4)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'batch_size'$"):
        loader(ShardDataset(urls))
