"""Easy mistakes: each raises an error of one line that names the argument and says what to do."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from with_torch import DataLoader, ShardDataset, ShardLoader, torch

import tarshards
from tarshards import Ledger, ShardWriter, Stream, TarWriter, World, read_samples

pytestmark = pytest.mark.docs

NAMES = {name: getattr(tarshards, name) for name in tarshards.__all__} | {
    "DataLoader": DataLoader,
    "Path": Path,
    "ShardDataset": ShardDataset,
    "ShardLoader": ShardLoader,
    "np": np,
    "torch": torch,
}
HERE = {**os.environ, "PYTHONPATH": str(Path(tarshards.__file__).parents[1])}
ODD = [{"__key__": "a", "x": np.zeros(3)}, {"__key__": "b", "x": np.zeros(4)}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with shards: indexed ones, ones without indexes, and one whose arrays differ in shape."""
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder / "train-%04d.tar", max_samples=10) as writer:
        for i in range(40):
            writer.write({"__key__": f"{i:06d}", "png": np.full((8, 8, 3), i, np.uint8), "cls": i % 10})
    with ShardWriter(folder / "plain-%04d.tar", max_samples=10, index=False) as writer:
        for i in range(20):
            writer.write({"__key__": f"{i:06d}", "txt": "text", "cls": i})
    with ShardWriter(folder / "odd-%04d.tar") as writer:
        for i in range(4):
            writer.write({"__key__": f"{i:06d}", "npy": np.zeros((2 + i % 2, 3))})
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def mistakes(*cases):
    return pytest.mark.parametrize(("code", "kind", "words"), [pytest.param(*case, id=case[0]) for case in cases])


def check(code, kind, words):
    with pytest.raises(kind, match=words) as caught:
        eval(code, {**NAMES, "ODD": ODD})
    assert "\n" not in str(caught.value)


@mistakes(
    (
        'read_samples("train-0000.tar", on_error="ignore")',
        ValueError,
        r'must be "raise", "skip", .*\'ignore\'',
    ),
    ('read_samples("train-0000.tar", on_error=3)', ValueError, r'"raise", "skip", a Ledger, or a function .*, not 3'),
    ('Stream.from_shards("plain-0000.tar", on_error="stop")', ValueError, '"raise", "skip", .*, not \'stop\''),
    ('ShardDataset("plain-0000.tar", on_error="stop")', ValueError, '"raise", "skip", .*, not \'stop\''),
    ('Stream([1]).map(str, on_error="stop")', ValueError, '"raise", "skip", .*, not \'stop\''),
    ('Stream([1]).decode(on_error="stop")', ValueError, '"raise", "skip", .*, not \'stop\''),
    ('map_shards(str, "plain-0000.tar", "o.tar", on_error="stop")', ValueError, '"raise", "skip", .*, not \'stop\''),
    ('mix({"a": ShardDataset("train-0000.tar")}, on_error="stop")', ValueError, '"raise", "skip", .*, not \'stop\''),
    ('Ledger(max_errors="10")', ValueError, r"max_errors must be a number from 0 to float\(\"inf\"\), not '10'"),
    ("Ledger(max_errors=None)", ValueError, "max_errors must be a number .* not None"),
    ("Ledger(max_errors=-1)", ValueError, "max_errors must be a number from 0 .* not -1"),
)
def test_error_policies(here, code, kind, words):
    check(code, kind, words)


@mistakes(
    ('Stream.from_shards("train-0000.tar", seed="1")', TypeError, "seed must be a whole number, not '1'"),
    ('Stream.from_shards("plain-0000.tar", seed=1.5)', TypeError, r"seed must be a whole number, not 1\.5"),
    ('ShardDataset("train-0000.tar", seed=None)', TypeError, "seed must be a whole number, not None"),
    ('ShardDataset("train-0000.tar", seed=True)', TypeError, "seed must be a whole number, not True"),
    ('Stream.from_shards("train-0000.tar", shuffle="yes")', TypeError, "shuffle must be True or False, not 'yes'"),
    ('ShardDataset("train-0000.tar", shuffle=1000)', TypeError, "shuffle must be True or False, not 1000; pool= is"),
    ('ShardDataset("train-0000.tar", pool="100")', TypeError, "pool must be a whole number, not '100'"),
    ('ShardDataset("train-0000.tar", pool=1e3)', TypeError, r"pool must be a whole number, not 1000\.0"),
    ('ShardDataset("train-0000.tar", pool=0)', ValueError, "pool must be at least 1, not 0"),
    ('ShardDataset("train-0000.tar", world=(0, 2))', TypeError, r"world must be a World, such as .*, not \(0, 2\)"),
    ('Stream.from_shards("train-0000.tar", world=2)', TypeError, "world must be a World, such as .*, not 2"),
    ('World("0", "2")', TypeError, "rank must be a whole number, not '0'"),
    ('Stream.from_shards("pipe:cat a.tar", allow_pipe="no")', TypeError, "allow_pipe must be True or False, not 'no'"),
    ('read_samples("plain-0000.tar", allow_pipe="no")', TypeError, "allow_pipe must be True or False, not 'no'"),
    ('read_samples("plain-0000.tar", concatenated="no")', TypeError, "concatenated must be True or False, not 'no'"),
    ('Stream.from_shards("plain-0000.tar", split="/")', ValueError, "split is .first., .last. or a function, not '/'"),
    ('Stream.from_shards("train-0000.tar", fields=3)', TypeError, "fields are names, .* not 3"),
    ('Stream.from_shards("train-0000.tar", fields={"cls": 1})', TypeError, "fields are names, .* not {'cls': 1}"),
    ('IndexedShards("train-0000.tar", fields=["cls", 3])', TypeError, "the name of a field is a str, .* not 3"),
    ('Stream.from_shards("train-0000.tar", fields="")', ValueError, "names no field; None reads all"),
    ('Stream.from_shards("train-0000.tar").set_epoch("1")', TypeError, "epoch must be a whole number, not '1'"),
    ('ShardDataset("train-0000.tar").set_epoch("1")', TypeError, "epoch must be a whole number, not '1'"),
    ('ShardDataset("train-0000.tar").set_epoch(-1)', ValueError, "epoch must be at least 0, not -1"),
    ('ShardDataset("train-0000.tar").set_epoch(None)', TypeError, "epoch must be a whole number, not None"),
)
def test_options_of_datasets(here, code, kind, words):
    check(code, kind, words)


@mistakes(
    ('Stream("train-0000.tar")', TypeError, r"not made of 'train-0000\.tar' but .*Stream\.from_shards"),
    ('Stream(Path("train-0000.tar"))', TypeError, r"not made of PosixPath.*Stream\.from_shards"),
    ("Stream(None)", TypeError, "not made of None but of an iterable"),
    ("len(Stream([1]))", TypeError, "only planned epochs have a length$"),
    ('len(Stream.from_shards("plain-0000.tar"))', TypeError, "planned epochs have a length; .*`tarindex`"),
    (
        'Stream.from_shards("train-0000.tar")[0]',
        TypeError,
        r"iterated, not indexed: IndexedShards\(urls\)\[n\]",
    ),
    ('ShardDataset("train-0000.tar")[0]', TypeError, r"a ShardDataset is iterated, not indexed: IndexedShards"),
    ('next(iter(DataLoader(Stream.from_shards("train-0000.tar"))))', TypeError, "DataLoader takes a ShardDataset"),
    ("Stream([1]).batched()", TypeError, r"batched\(\) missing 1 required positional argument: 'size'"),
    ("Stream([1]).batched(2, collate_fn=list)", TypeError, r"batched\(\) got an unexpected keyword .* 'collate_fn'"),
    ('Stream([1]).batched("2")', TypeError, "size must be a whole number, not '2'"),
    ("Stream([1]).batched(2.0)", TypeError, r"size must be a whole number, not 2\.0"),
    ("Stream([1]).batched(True)", TypeError, "size must be a whole number, not True"),
    ("Stream([1]).batched(0)", ValueError, "size must be at least 1, not 0"),
    ('Stream([1]).batched(2, collate="list")', TypeError, "batched takes a function, not 'list'"),
    ('Stream([1]).batched(2, partial="no")', TypeError, "partial must be True or False, not 'no'"),
    ('Stream([1]).shuffle("1000")', TypeError, "size must be a whole number, not '1000'"),
    ("Stream([1]).shuffle(1e3)", TypeError, r"size must be a whole number, not 1000\.0"),
    ("Stream([1]).shuffle(9, initial=0)", ValueError, "initial must be at least 1, not 0"),
    ("Stream([1]).shuffle(9, seed=None)", TypeError, "seed must be a whole number, not None"),
    ('Stream([1]).take("3")', TypeError, "count must be a whole number, not '3'"),
    ("Stream([1]).take(-1)", ValueError, "count must be at least 0, not -1"),
    ("Stream([1]).skip(-1)", ValueError, "count must be at least 0, not -1"),
    ("Stream([1]).skip(None)", TypeError, "count must be a whole number, not None"),
    ('Stream([1]).repeat("2")', TypeError, "times must be a whole number, not '2'"),
    ("Stream([1]).repeat(-2)", ValueError, "times must be at least 0, not -2"),
    ('Stream([1]).enumerate(start="1")', TypeError, "start must be a whole number, not '1'"),
    ('Stream([1]).map("x")', TypeError, "map takes a function, not 'x'"),
    ('Stream([{}]).map({"cls": int})', TypeError, "map takes a function, not {'cls'"),
    ('Stream([1]).filter("cls")', TypeError, "filter takes a function, not 'cls'"),
    ('Stream([1]).async_map("x")', TypeError, "async_map takes a function, not 'x'"),
    ('Stream([1]).async_map(str, workers="4")', TypeError, "workers must be a whole number, not '4'"),
    ("Stream([1]).monitor(3)", TypeError, "monitor takes a function, not 3"),
    ('Stream([1]).monitor(print, interval="1")', ValueError, "interval must be a number of seconds, not '1'"),
    ("Stream([1]).rekey(3)", TypeError, "a template is a str, not 3"),
    ("Stream([1]).map_fields(int)", TypeError, "map_fields takes a dict {field: function}, not <class 'int'>"),
    ('Stream([1]).map_fields({"cls": "int"})', TypeError, "map_fields takes a function, not 'int'"),
    ('Stream([1]).to_tuple(["png", "cls"])', TypeError, r"a field is a str, such as .*, not \['png', 'cls'\]"),
    ("Stream([1]).to_tuple()", ValueError, "no field is named"),
    ("Stream([1]).keep_fields(3)", TypeError, "a field is a str, .* not 3"),
    ('Stream([1]).rename_fields("png")', TypeError, "rename_fields takes a dict .*, not 'png'"),
    ('Stream([1]).rename_fields({"image": 3})', TypeError, "a field is a str, .* not 3"),
    ('Stream([1]).select_fields({"image": "png"})', TypeError, "a field is a str, .* not {'image': 'png'}"),
    ('Stream([1]).decode({"png": "RGB8"})', ValueError, "unknown imagespec 'RGB8'; known: .* did you mean 'rgb8'"),
    ('Stream([1]).decode({"png": 3})', TypeError, "png= is a function of bytes, or an imagespec, .*, not 3"),
    ("Stream([1]).decode({3: str})", TypeError, "the name of a field is a str, .* not 3"),
    ("Stream([1]).decode(png=None)", TypeError, "png= is a function of bytes, or an imagespec, .*, not None"),
    ("Stream([1]).decode(allow_unsave=True)", TypeError, "allow_unsave= is a function .* did you mean 'allow_unsafe'"),
    ('Stream([1]).decode("rgb", "pil")', ValueError, "one imagespec for all images, not 'rgb' and 'pil'"),
    ("Stream([1]).decode(only=3)", TypeError, "only= takes names of fields, in one string or a list, not 3"),
    ('Stream([1]).decode(only="")', ValueError, "no field is named"),
    ("Stream([1]).decode(True)", TypeError, 'a str such as "rgb8", not True'),
    ('Stream([1]).decode("RGB8")', ValueError, "unknown imagespec 'RGB8'; known: .* did you mean 'rgb8'"),
    ('Stream([1]).decode("rgb", allow_unsafe="no")', TypeError, "allow_unsafe must be True or False, not 'no'"),
)
def test_streams_and_ops(here, code, kind, words):
    check(code, kind, words)


@mistakes(
    (
        'list(Stream.from_shards("train-0000.tar", fields="clss"))',
        ValueError,
        "a field clss; .* mean 'cls'",
    ),
    ('list(Stream.from_shards("train-0000.tar").to_tuple("pngs"))', ValueError, "has cls, png; did you mean 'png'"),
    (
        'list(Stream.from_shards("train-0000.tar").to_tuple("jpg"))',
        ValueError,
        "no field jpg; the sample has cls, png;",
    ),
    (
        'list(Stream.from_shards("train-0000.tar").map_fields({"clss": int}))',
        tarshards.OpError,
        r"^train-0000\.tar: 000000: SampleError: no field clss; the sample has cls, png; did you mean 'cls'\?$",
    ),
)
def test_fields_that_are_missing(here, code, kind, words):
    with pytest.raises(tarshards.TarshardsError, match=words):
        eval(code, NAMES)


@mistakes(
    ("list(Stream(ODD).batched(2))", ValueError, r"^x: .*\(3,\) in sample a and .*\(4,\) in sample b .*collate_fn="),
    ('list(Stream([{"x": 1}, {"x": "a"}]).batched(2))', ValueError, "x: a number in sample 0 and str in sample 1"),
    (
        'list(Stream([{"x": 1}, {"x": None}]).batched(2))',
        ValueError,
        "a number in sample 0 and NoneType in sample 1",
    ),
    ('list(Stream([{"x": 1}, {"x": [1, 2]}]).batched(2))', ValueError, "x: a number in sample 0 and list in sample 1"),
    ("list(Stream([np.zeros(3), torch.zeros(4)]).batched(2))", ValueError, r"ndarray of .*Tensor of shape \(4,\)"),
    ("list(Stream([torch.zeros(3), np.zeros(3)]).batched(2))", ValueError, "Tensor of .*ndarray of"),
)
def test_batches_of_different_values(code, kind, words):
    check(code, kind, words)


@mistakes(
    ("list(Stream([(1, 2), (1,)]).batched(2))", None, "sample 0 has 2 elements, and sample 1 has 1 elements"),
    ('list(Stream([{"x": 1}, (1, 2)]).batched(2))', None, "sample 0 has the fields x, and sample 1 has 2 elements"),
    (
        'list(Stream([{"__key__": "a", "x": 1}, {"__key__": "b"}]).batched(2))',
        None,
        r"^b: sample a has .* x, .*\(none\)",
    ),
)
def test_batches_of_different_samples(code, kind, words):
    with pytest.raises(tarshards.SampleError, match=words):
        eval(code, NAMES)


FIELDS = '{"cls": readers.integer()}'
TRAIN = 'ShardDataset("train-{0000..0003}.tar")'


@mistakes(
    (f'ShardLoader({TRAIN}, batch_size="64")', TypeError, "batch_size must be a whole number, not '64'"),
    (f"ShardLoader({TRAIN}, batch_size=64.0)", TypeError, r"batch_size must be a whole number, not 64\.0"),
    (f"ShardLoader({TRAIN}, batch_size=True)", TypeError, "batch_size must be a whole number, not True"),
    (f"ShardLoader({TRAIN}, batch_size=None)", TypeError, "batch_size must be a whole number, not None"),
    (f"ShardLoader({TRAIN}, batch_size=-1)", ValueError, "batch_size must be at least 1, not -1"),
    (f'ShardLoader({TRAIN}, 4, num_workers="4")', TypeError, "num_workers must be a whole number, not '4'"),
    (f"ShardLoader({TRAIN}, 4, num_workers=-1)", ValueError, "num_workers must be at least 0, not -1"),
    (f"ShardLoader({TRAIN}, 4, workers=2)", TypeError, "no option workers; did you mean 'num_workers'"),
    (f'ShardLoader({TRAIN}, 4, collate_fn="x")', TypeError, "ShardLoader takes a function, not 'x'"),
    (f"ShardLoader({TRAIN}, 4, collate_fn=None)", TypeError, "ShardLoader takes a function, not None"),
    (f'ShardLoader({TRAIN}, 4).set_epoch("1")', TypeError, "epoch must be a whole number, not '1'"),
    (f"ShardLoader({TRAIN}, 4)[0]", TypeError, "a ShardLoader is iterated, not indexed"),
    ('ShardLoader("train-0000.tar", 4)', TypeError, r"a ShardLoader takes a ShardDataset, .*not 'train-0000\.tar'"),
    ('ShardLoader(Stream.from_shards("train-0000.tar"), 4)', TypeError, "takes a ShardDataset, .*not <.*Stream"),
    ('ShardLoader(IndexedShards("train-0000.tar"), 4)', TypeError, "takes a ShardDataset, .*not IndexedShards"),
    (f'ArrayLoader({TRAIN}, "64", fields={FIELDS})', TypeError, "batch_size must be a whole number, not '64'"),
    (
        f'ArrayLoader("train-0000.tar", 64, fields={FIELDS})',
        TypeError,
        "takes a ShardDataset or a Stream, .*not 'train-",
    ),
    (f"ArrayLoader(IndexedShards('train-0000.tar'), 64, fields={FIELDS})", TypeError, "a ShardDataset or a Stream"),
    (f'ArrayLoader({TRAIN}, 64, fields="cls")', TypeError, r"fields= takes a dict .*readers\.integer\(\)}, not 'cls'"),
    (f'ArrayLoader({TRAIN}, 64, fields=["cls"])', TypeError, r"fields= takes a dict .*, not \['cls'\]"),
    (f'ArrayLoader({TRAIN}, 64, fields={{"cls": "int"}})', TypeError, r"'int'; readers\.integer\(\), .* make readers"),
    (f'ArrayLoader({TRAIN}, 64, fields={{"cls": readers.integer}})', TypeError, r"write readers\.integer\(\)"),
    (f'ArrayLoader({TRAIN}, 64, fields={FIELDS}, threads="2")', TypeError, "threads must be a whole number, not '2'"),
    (f"ArrayLoader({TRAIN}, 64, fields={FIELDS}, threads=1.5)", TypeError, r"threads must be a whole number, not 1\.5"),
    (f'ArrayLoader({TRAIN}, 64, fields={FIELDS}, prefetch="2")', TypeError, "prefetch must be a whole number, not '2'"),
    (f'ArrayLoader({TRAIN}, 64, fields={FIELDS}, reuse="no")', TypeError, "reuse must be True or False, not 'no'"),
    (
        f"ArrayLoader({TRAIN}, 64, fields={FIELDS}, transforms=print)",
        TypeError,
        "transforms= takes a list of functions",
    ),
    (
        f'ArrayLoader({TRAIN}, 64, fields={FIELDS}, transforms=["x"])',
        TypeError,
        "transforms= takes a function, not 'x'",
    ),
    (
        f"next(iter(DataLoader(ArrayLoader({TRAIN}, 4, fields={FIELDS}))))",
        TypeError,
        "makes its batches without a DataL",
    ),
    (f"next(iter(DataLoader(ShardLoader({TRAIN}, 4))))", TypeError, "a ShardLoader is iterated, not indexed"),
    ('readers.image("8")', TypeError, "size must be a whole number, not '8'"),
    ("readers.image((8, 8, 3))", ValueError, r"size=\(8, 8, 3\) must be one number or a pair, height and width"),
    ('readers.decoded({"png": "rgb8"})', TypeError, "an imagespec for all images is a str"),
    ('IndexedShards("odd-0000.tar").column(3)', TypeError, "the name of a field is a str, .* not 3"),
)
def test_loaders(here, code, kind, words):
    check(code, kind, words)


@mistakes(
    (
        f'next(iter(ArrayLoader({TRAIN}, 9, fields={{"clss": readers.integer()}})))',
        None,
        "no field clss; .* mean 'cls'",
    ),
    (f'next(iter(ArrayLoader({TRAIN}, 9, fields={{"pngs": readers.image()}})))', None, "sample has cls, png; .* 'png'"),
    (
        'next(iter(ArrayLoader(Stream.from_shards("plain-0000.tar"), 9, fields={"text": readers.text()})))',
        None,
        "no field text; the sample has cls, txt; did you mean 'txt'",
    ),
    ('IndexedShards("odd-0000.tar").column("npys")', None, "no field npys; the sample has npy; did you mean 'npy'"),
)
def test_fields_that_loaders_miss(here, code, kind, words):
    with pytest.raises(tarshards.SampleError, match=words):
        eval(code, NAMES)


@mistakes(
    (
        "list(read_samples({'a': 1}))",
        TypeError,
        "a shard expression is a str, a path or an iterable of them, not dict: {'a': 1}",
    ),
    ("expand_urls(b'a.tar')", TypeError, r"a shard expression is a str, a path .*, not bytes: b'a\.tar'"),
    ("expand_urls([None])", TypeError, "a shard expression is a str, a path .*, not NoneType: None"),
    ("expand_urls({'http://me:secret@host/a.tar': 1})", TypeError, r"not dict: {'http://host/a\.tar': 1}"),
    ("Stream('http://me:secret@host/a.tar')", TypeError, r"not made of 'http://host/a\.tar'"),
    ("open_url('s3://')", ValueError, "^s3://: .* s3://BUCKET/NAME"),
    ("open_url('s3://a.tar')", ValueError, r"^s3://a\.tar: .* s3://BUCKET/NAME"),
    ("open_url('gs:///a.tar')", ValueError, r"^gs:///a\.tar: .* gs://BUCKET/NAME"),
    ("open_url('http:/host/a.tar')", ValueError, r"^http:/host/a\.tar: an http URL is http://host:port/path"),
    ("open_url('https:///a.tar')", ValueError, r"^https:///a\.tar: an http URL is"),
    ("open_url('C:\\\\data\\\\a.tar')", ValueError, r"C:\\data\\a\.tar: .*'c'; paths of Windows are not supported"),
    ("open_url('a-0.tar:a-1.tar')", ValueError, r"'a-0\.tar'; names are separated by `::`, and \./NAME"),
    (
        "read_members('plain-0000.tar').__next__()",
        TypeError,
        r"takes a stream of bytes, such as open_shard\(url\), not str",
    ),
    ("decoder(print)", TypeError, r'an extension is a str, as in @decoder\("png"\), not <built-in'),
    ("EpochPlan([3], seed='1', epoch=0)", TypeError, "seed must be a whole number, not '1'"),
    ("EpochPlan([3], seed=0, epoch=0, ranks=2.0)", TypeError, r"ranks must be a whole number, not 2\.0"),
)
def test_shard_expressions(here, code, kind, words):
    check(code, kind, words)


@mistakes(
    ("open_shard('.')", OSError, r"^\.: Is a directory; name the shards in it, as '\./\*\.tar'$"),
    (
        "open_shard('train-{0000-0003}.tar')",
        OSError,
        r"No such file or directory; a range .* is written as {000\.\.146}$",
    ),
    ("open_shard('train-%04d.tar')", OSError, r"No such file or directory; a range .* is written as {000\.\.146}$"),
    ("open_shard('a.tar b.tar')", OSError, "No such file or directory; several names are given as a list, or .* `::`$"),
    ("open_shard('a.tar,b.tar')", OSError, "No such file or directory; several names are given as a list, or .* `::`$"),
    ("open_shard(' a.tar')", OSError, "No such file or directory; the name begins or ends with white space$"),
    ("open_shard('none/a.tar', 'wb')", OSError, "No such file or directory; make the folder none first$"),
    ("open_shard('none.tar')", OSError, "No such file or directory$"),
)
def test_names_that_are_not_there(here, code, kind, words):
    check(code, kind, words)


def test_a_store_that_needs_arguments_says_how_to_give_them(monkeypatch):
    import fsspec

    class Drive(fsspec.AbstractFileSystem):
        protocol = "drive"

        def __init__(self, base_url, token):
            super().__init__()

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "drive", Drive)
    with pytest.raises(
        OSError, match=r"^drive://a: drive needs base_url and token; .* FSSPEC_DRIVE_BASE_URL"
    ) as caught:
        tarshards.open_url("drive://a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\n<!DOCTYPE html>\n<title>Log in</title>", "an HTML page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML"),
        (b"PK\3\4", r"a zip file \('pipe:bsdtar -cf - @FILE' reads it\)"),
        (b"\x89PNG\r\n", "an image"),
        (b'{"wids_version": 1}', r"JSON \(the name of a manifest ends in .json; `tarimport` takes JSON lines\)"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n",
            r"a Git LFS pointer \(`git lfs pull` fetches the file\)",
        ),
        (b"/annex/objects/MD5E-s3--abc.tar\n", r"a git-annex pointer \(`git annex get` fetches the file\)"),
        (b"outs:\n- md5: 0123\n  path: a.tar\n", r"a DVC pointer \(`dvc pull` fetches the file\)"),
        (b"PAR1\x15\x04", r"a Parquet file \(`tarimport` makes shards of it\)"),
        (b"\x89LZO\0\r\n", r"an lzop file \('pipe:bsdtar -cf - @FILE' reads it\)"),
        (b"set-000.tar\nset-001.tar\n", "a list of names, to be read as @FILE"),
    ],
)
@pytest.mark.parametrize("size", [0, 600])
def test_what_is_no_archive_is_told(tmp_path, head, kind, size):
    path = tmp_path / "a.tar"
    path.write_bytes(head.ljust(size))
    for read in (read_samples, lambda url: read_samples(url, on_damage="resync", on_error=Ledger())):
        with pytest.raises(tarshards.TarError, match=rf"a\.tar: offset 0: {kind}, not a tar archive"):
            list(read(path))


@mistakes(
    ('ShardWriter("o-%d.tar.br")', tarshards.UrlError, r"^o-%d\.tar\.br: the suffix \.br is not supported; .* \.tgz"),
    ('TarWriter("o.tar.Z")', tarshards.UrlError, r"^o\.tar\.Z: the suffix \.Z is not supported"),
    ('reshard("train-0000.tar", "o-%d.zip")', tarshards.UrlError, r"^o-%d\.zip: the suffix \.zip is not"),
    ('map_shards(iter, "train-0000.tar", "o-%d.7z")', tarshards.UrlError, r"^o-0\.7z: the suffix \.7z is not"),
    ('import_dataset("missing.csv", "o-%d.parquet")', tarshards.UrlError, r"^o-%d\.parquet: the suffix \.parquet"),
    ('write_dataset([{"x": 1}], "o-%d.lz")', tarshards.UrlError, r"^o-%d\.lz: the suffix \.lz is not"),
)
def test_names_of_formats_that_are_not_written(here, code, kind, words):
    before = sorted(os.listdir())
    check(code, kind, words)
    assert sorted(os.listdir()) == before


def test_a_manifest_is_no_list_and_a_list_no_manifest(here, tmp_path):
    (tmp_path / "list").write_bytes(Path("train.shards.json").read_bytes())
    with pytest.raises(tarshards.UrlError, match="a manifest, not a list: name it without the @"):
        tarshards.expand_urls(f"@{tmp_path}/list")
    (tmp_path / "list.json").write_text("train-0000.tar\n")
    with pytest.raises(tarshards.UrlError, match=r"not JSON.*; a list of names is read as @FILE"):
        tarshards.expand_urls(tmp_path / "list.json")


@mistakes(
    ("ShardWriter('a-%d.tar', max_samples='10')", TypeError, "max_samples must be a whole number, not '10'"),
    ("ShardWriter('a-%d.tar', max_samples=1.5)", TypeError, r"max_samples must be a whole number, not 1\.5"),
    ("ShardWriter('a-%d.tar', max_bytes='1')", TypeError, "max_bytes must be a whole number, not '1'"),
    ("ShardWriter('a-%d.tar', max_bytes=0)", ValueError, "max_bytes must be at least 1, not 0"),
    ("ShardWriter('a-%d.tar', start='1')", TypeError, "start must be a whole number, not '1'"),
    ("ShardWriter('a-%d.tar', start=-1)", ValueError, "start must be at least 0, not -1"),
    ("ShardWriter('a-%d.tar', index='no')", TypeError, "index must be True or False, not 'no'"),
    ("ShardWriter('a.tar')", ValueError, r"a\.tar: the pattern needs a shard number, {shard:06d} or %06d"),
    ("write_dataset([], 'a-%d.tar', max_bytes='1')", TypeError, "max_bytes must be a whole number, not '1'"),
    ("write_dataset([], 'a-%d.tar', to_sample='x')", TypeError, "to_sample= takes a function, not 'x'"),
    ("write_dataset([{}], 'a-%d.tar', executor=4)", TypeError, "takes an Executor of concurrent.futures, not 4"),
    ("write_dataset({'txt': 'a'}, 'a-%d.tar')", TypeError, "a dataset is a sequence or .*, not {'txt': 'a'}"),
    ("write_dataset(3, 'a-%d.tar')", TypeError, "a dataset is a sequence or an iterable of samples, .*, not 3"),
    ("write_samples({'__key__': 'a'}, 'a.tar')", TypeError, "such as a list of dicts, not one dict {'__key__': 'a'}"),
    ("write_samples([('a', 'x')], 'a.tar')", ValueError, r"a sample is a dict of __key__ and fields, not \('a', 'x'\)"),
    ("write_samples([{'__key__': 'a', 3: b''}], 'a.tar')", ValueError, "the name of a field is a str, not 3"),
    ("map_shards('x', 'plain-0000.tar', 'o.tar')", TypeError, "map_shards takes a function, not 'x'"),
    ("map_shards(str, 'plain-0000.tar', 'o.tar', executor=3)", TypeError, "takes an Executor .*, not 3"),
    ("Stream([1]).async_map(str, executor=3)", TypeError, "takes an Executor .*, not 3"),
    (
        "reshard('plain-0000.tar', 'o-%d.tar', max_samples='3')",
        TypeError,
        "max_samples must be a whole number, not '3'",
    ),
    ("reshard('plain-0000.tar', 'o-%d.tar', seed='yes')", TypeError, "seed must be a whole number, not 'yes'"),
    ("reshard('plain-0000.tar', 'o-%d.tar', shuffle='no')", TypeError, "shuffle must be True or False, not 'no'"),
    ("mix(['train-0000.tar'])", TypeError, r"mix takes a dict {name: dataset}, not \['train-0000\.tar'\]"),
    ("mix({'a': 'train-0000.tar'})", TypeError, r"mix takes a ShardDataset or a Stream, .*not 'train-0000\.tar'"),
    ("mix({'a': ShardDataset('train-0000.tar')}, weights=[1])", TypeError, r"weights= takes a dict .*not \[1\]"),
    ("mix({'a': ShardDataset('train-0000.tar')}, seed='1')", TypeError, "seed must be a whole number, not '1'"),
)
def test_writers_and_mixtures(here, code, kind, words):
    check(code, kind, words)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_writer_that_has_ended_takes_no_more(tmp_path, end):
    for writer in TarWriter(tmp_path / "a.tar"), ShardWriter(tmp_path / "a-%d.tar"):
        writer.write({"__key__": "a", "txt": "x"})
        getattr(writer, end)()
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(ValueError, match=r"a(-%d)?\.tar: closed, so nothing more can be written"):
            writer.write({"__key__": "b", "txt": "x"})
        writer.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("make", ["TarWriter('a.tar')", "ShardWriter('a-%d.tar')", "open_shard('a.tar.gz', 'wb')"])
def test_a_writer_that_is_never_closed_warns(tmp_path, make):
    use = "" if "open" in make else "writer.write({'__key__': 'a', 'txt': 'x'})"
    program = f"from tarshards import ShardWriter, TarWriter, open_shard\nwriter = {make}\n{use}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=HERE)
    assert "not closed, so what was written is lost; write in a with-block, or call close()" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_stream_is_written_as_a_dataset(here, tmp_path):
    for number, dataset in enumerate([Stream.from_shards("train-0000.tar"), ShardDataset("train-0000.tar")]):
        with ThreadPoolExecutor(1) as executor:
            (name,) = tarshards.write_dataset(dataset, tmp_path / f"{number}-%d.tar", executor=executor)
        assert len(list(read_samples(name))) == 10


STATES = {
    "not a state": ("ShardDataset('train-0000.tar')", "{}", r"not a state from state_dict\(\): {}"),
    "none": ("ShardLoader(ShardDataset('train-0000.tar'), 4)", "None", r"not a state from state_dict\(\): None"),
    "another version": (
        "ShardDataset('train-0000.tar')",
        "{'version': 9}",
        "a state of version 9; only versions 1 to 4 can",
    ),
    "other shards": ("ShardDataset('train-0001.tar')", "ShardDataset('train-0000.tar')", "shards have other names"),
    "another seed": (
        "ShardDataset('train-0000.tar', seed=1)",
        "ShardDataset('train-0000.tar')",
        "was saved with seed=0, and this dataset has seed=1, which gives another order",
    ),
    "another pool and order": (
        "ShardDataset('train-0000.tar', shuffle=True, pool=9)",
        "ShardDataset('train-0000.tar')",
        "was saved with shuffle=False, pool=1105920, and this dataset has shuffle=True, pool=9",
    ),
    "another seed of streamed shards": (
        "ShardLoader(ShardDataset('plain-0000.tar', seed=1), 4)",
        "ShardLoader(ShardDataset('plain-0000.tar'), 4)",
        "was saved with seed=0, and this dataset has seed=1",
    ),
    "with and without indexes": (
        "ShardLoader(ShardDataset('train-0000.tar'), 4)",
        "ShardLoader(ShardDataset('train-0000.tar', index=False), 4)",
        r"read without their indexes \(index=False\)",
    ),
    "without and with indexes": (
        "ShardLoader(ShardDataset('train-0000.tar', index=False), 4)",
        "ShardLoader(ShardDataset('train-0000.tar'), 4)",
        r"or were read through their indexes \(index=True\)",
    ),
    "of a stream": (
        "ShardLoader(ShardDataset('train-0000.tar'), 4)",
        "ShardDataset('train-0000.tar')",
        "the state is of a Stream or ShardDataset, and this is a loader",
    ),
    "of a loader": (
        "ShardDataset('train-0000.tar')",
        "ShardLoader(ShardDataset('train-0000.tar'), 4)",
        "it is of a loader, and this is a stream of samples",
    ),
    "other ops": (
        "Stream.from_shards('train-0000.tar').shuffle(3)",
        "ShardDataset('train-0000.tar')",
        "with other ops",
    ),
}


@pytest.mark.parametrize(("this", "other", "words"), STATES.values(), ids=STATES)
def test_states_of_something_else(here, this, other, words):
    saved = eval(other, NAMES)
    with pytest.raises(tarshards.StateError, match=words) as caught:
        eval(this, NAMES).load_state_dict(saved.state_dict() if hasattr(saved, "state_dict") else saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"epoch": "1"}, {"taken": "1"}, {"taken": -1}, {"world": 3}, {"order": None}])
def test_states_with_other_values(here, change):
    dataset = ShardDataset("train-0000.tar")
    with pytest.raises(tarshards.StateError, match=next(iter(change))):
        dataset.load_state_dict(dataset.state_dict() | change)


def test_replayed_states_with_other_values(here):
    loader = ShardLoader(ShardDataset("plain-0000.tar"), 4)
    state = loader.state_dict()
    for wrong in state | {"delivered": "3"}, {name: state[name] for name in state if name != "delivered"}:
        with pytest.raises(tarshards.StateError, match="delivered"):
            loader.load_state_dict(wrong)


def _fail_on_three(sample):
    if sample["cls"] == b"3":
        raise ValueError("three")
    return sample


@pytest.mark.parametrize("index", [True, False])
def test_skip_leaves_out_and_says_so(here, caplog, index):
    stream = Stream.from_shards("train-{0000..0001}.tar", index=index, on_error="skip").map(_fail_on_three)
    with caplog.at_level(logging.WARNING, "tarshards"):
        assert len(list(stream)) == 18
    assert (stream.ledger.samples, stream.ledger.failed) == (18, 2)
    assert [record.message for record in caplog.records] == [
        f"left out: train-{i:04d}.tar: {i}00003: ValueError: three".replace(f"{i}00003", f"{10 * i + 3:06d}")
        for i in range(2)
    ]


def test_skip_of_an_op(here, caplog):
    stream = Stream.from_shards("train-0000.tar").map(_fail_on_three, on_error="skip")
    assert len(list(stream)) == 9
    assert stream.ledger.failed == 1
    assert list(Stream([1, "a", 2]).map(int, on_error="skip")) == [1, 2]
    assert len(caplog.records) == 2


def test_raise_overrides_the_ledger_of_the_stream(here):
    stream = Stream.from_shards("train-0000.tar", on_error="skip").map(_fail_on_three, on_error="raise")
    with pytest.raises(ValueError, match="three"):
        list(stream)


def test_skip_of_a_damaged_shard(tmp_path, here, caplog):
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(Path("plain-0000.tar").read_bytes()[:3000])
    assert len(list(read_samples([damaged, "plain-0001.tar"], on_error="skip"))) > 10
    assert "left out" in caplog.text
    with pytest.raises(tarshards.TarError):
        list(read_samples([damaged, "plain-0001.tar"], on_error="raise"))


def test_skip_in_workers(here):
    dataset = ShardDataset("train-{0000..0003}.tar", on_error="skip").map(_fail_on_three)
    assert sum(len(batch["cls"]) for batch in ShardLoader(dataset, 8, num_workers=2)) == 36
    assert dataset.ledger.failed == 4


def test_numpy_integers_are_integers(here):
    stream = Stream.from_shards("train-0000.tar", shuffle=np.True_, seed=np.int64(3), pool=np.int32(9))
    stream.set_epoch(np.int64(2))
    json.dumps(stream.state_dict())
    assert [type(value) for value in stream.state_dict()["order"][:2]] == [int, bool]
    assert len(list(stream.batched(np.int64(4), collate=list))) == 3
    assert list(Stream(range(9)).skip(np.int8(2)).take(np.uint8(3))) == [2, 3, 4]
    json.dumps(ShardDataset("train-0000.tar", world=World(np.int64(0), np.int64(1))).state_dict())
    assert Ledger(max_errors=np.int64(3)).max_errors == 3


@pytest.mark.parametrize("urls", [Path("train-0000.tar"), [Path("train-0000.tar")], (Path("train-0000.tar"),)])
def test_paths_are_shards(here, urls):
    assert len(list(read_samples(urls))) == len(Stream.from_shards(urls)) == len(ShardDataset(urls)) == 10
