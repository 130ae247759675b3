"""``import tarshards`` and the tools load little, and all public names exist."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import load_kernel, warnings_of
from with_torch import needs_torch

import tarshards
from tarshards import TarWriter, build_index

BIN = Path(__file__).parents[1] / "bin"
HEAVY = {"torch", "numpy", "PIL", "fsspec", "msgpack", "backports", "tqdm", "click"}


def imported_by(code: str) -> set[str]:
    command = [sys.executable, "-X", "importtime", "-c", code]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {line.split("|")[-1].strip().split(".")[0] for line in report.splitlines()}


def test_import_loads_nothing_heavy():
    assert not imported_by("import tarshards") & HEAVY


def test_windows_is_told_what_to_use_instead():
    code = "import sys; sys.platform = 'win32'; import tarshards"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ImportError: tarshards does not run on Windows; use WSL 2"


def test_reading_local_shards_loads_nothing_heavy(make_shards):
    code = f"import tarshards; list(tarshards.read_samples({make_shards(1)!r}))"
    assert not imported_by(code) & HEAVY


#: A finder that hides packages, as where they are not installed.
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
OPTIONAL = ["torch", "nvidia", "s3fs", "gcsfs", "aiohttp", "cbor2", "rich", "rich_pixels", "yaml", "dask"]
OPTIONAL += ["distributed", "kubernetes", "ray", "pyspark", "daft"]


def run_without(hidden: list[str], code: str) -> subprocess.CompletedProcess[str]:
    program = HIDE.format(hidden=hidden) + "from tarshards import *\n" + code
    return subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=300)


def test_everything_else_works_without_the_extras(make_shards):
    code = f"""
import tarshards
names = set(tarshards._MODULE_OF) | set(tarshards._NAMESPACES)
missing = {{"ShardDataset", "ShardLoader", "torch_iterable", "dali", "webdataset"}}
assert names - set(tarshards.__all__) == missing == names - set(dir(tarshards))
help(tarshards)
stream = Stream.from_shards({make_shards(2, index=True)!r}).decode().batched(2)
assert sum(len(batch["cls"]) for batch in stream) == 6
loader = ArrayLoader(Stream.from_shards({make_shards(2, index=True)!r}), 4, fields={{"cls": readers.integer()}})
assert sum(len(batch["cls"]) for batch in loader) == 6
"""
    done = run_without(OPTIONAL, code)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")


NEEDS = [
    ("import tarshards; tarshards.ShardDataset", "torch"),
    ("from tarshards import ShardLoader", "torch"),
    ("import tarshards.loaders.torch.shard_loader", "torch"),
    ("import tarshards.webdataset", "torch"),
    (
        "next(iter(ArrayLoader(Stream.from_shards(URLS), 2, fields={'cls': readers.integer()}, device='cpu')))",
        "torch",
    ),
    ("list(Stream([{'ppm': b'P5 1 1 255 x'}]).decode('torchl8'))", "torch"),
    ("list(Stream([{'pth': b''}]).decode(allow_unsafe=True))", "torch"),
    ("write_samples([{'__key__': 'a', 'pth': 1}], '/dev/null')", "torch"),
    ("from tarshards import dali", "dali dali13"),
    ("from tarshards.dali import dali_loader", "dali dali13"),
    ("import tarshards.dali", "dali dali13"),
    ("list(Stream([{'cbor': b''}]).decode())", "cbor"),
    ("list(read_samples('s3://bucket/a.tar'))", "s3"),
    ("list(read_samples('gs://bucket/a.tar'))", "gcs"),
    ("list(read_samples('simplecache::http://host/a.tar'))", "http"),
    ("list(Stream([1]).dask_map(str))", "dask"),
    ("from tarshards.verbs.mix import read_sources; read_sources('mix.yaml')", "yaml"),
    ("import tarshards.engines.ray", "ray"),
    ("import tarshards.engines.spark", "spark"),
    ("import tarshards.engines.daft", "daft"),
    ("from tarshards.cli.demo import demo; demo.main([], standalone_mode=False)", "demo"),
    ("from tarshards.run.jobs.kubernetes import _import; _import('kubernetes')", "kubernetes"),
]
#: Runs each line in a fork, and prints the last line of its error.
EACH = """
import json, os, traceback
for code in json.loads({codes!r}):
    if os.fork() == 0:
        try:
            exec(code)
        except Exception as error:
            print("".join(traceback.format_exception_only(error)).splitlines()[-1], flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[str]:
    """What the code says that needs extras."""
    url = str(tmp_path_factory.mktemp("shard") / "a.tar")
    with TarWriter(url) as writer:
        writer.write({"__key__": "a", "cls": 1})
    build_index(url).save(url)
    done = run_without(OPTIONAL, f"URLS = {url!r}\n" + EACH.format(codes=json.dumps([code for code, _ in NEEDS])))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(NEEDS), done.stdout
    return done.stdout.splitlines()


@pytest.mark.parametrize("number", range(len(NEEDS)), ids=[code for code, _ in NEEDS])
def test_what_needs_an_extra_names_it(errors, number):
    told, _, more = errors[number].partition("; for CPUs only, ")
    assert told.endswith(" or ".join(f"pip install 'tarshards[{extra}]'" for extra in NEEDS[number][1].split()))
    assert bool(more) == (NEEDS[number][1] == "torch")


def test_the_names_for_type_checkers_are_those_there_are():
    tree = ast.parse(Path(tarshards.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    found = {each.name: node.module for node in block.body for each in node.names if each.asname == each.name}
    spaces = {name: f"tarshards.{path}".rpartition(".")[0] for name, path in tarshards._NAMESPACES.items()}
    assert found == {name: f"tarshards.{module}" for name, module in tarshards._MODULE_OF.items()} | spaces


def test_the_documentation_names_all():
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    section = page.partition("## The public names\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert sorted(named) == sorted({*tarshards._MODULE_OF, *tarshards._NAMESPACES})


def test_a_misspelt_name_brings_a_suggestion():
    done = subprocess.run([sys.executable, "-c", "import tarshards; tarshards.Streem"], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("has no attribute 'Streem'. Did you mean: 'Stream'?")


@needs_torch
def test_public_names():
    assert set(tarshards.__all__) == {*tarshards._MODULE_OF, *tarshards._NAMESPACES} - {"dali", "webdataset"}
    for name in tarshards.__all__:
        assert getattr(tarshards, name).__doc__, f"{name} has a docstring"
    assert set(tarshards.__all__) <= set(dir(tarshards))


#: A name of each namespace that is not a package in this folder.
DOTTED = {"augment": "mixup", "dali": "dali_loader", "ops": "batched", "readers": "integer"}


def test_every_namespace_imports_with_a_dot():
    there = {path.name for path in Path(tarshards.__file__).parent.iterdir()}
    assert set(tarshards._NAMESPACES) == {*DOTTED} | {*tarshards._NAMESPACES} & there


@pytest.mark.parametrize(
    "code",
    [
        "from tarshards.{name} import {member} as found",
        "import tarshards.{name}; found = tarshards.{name}.{member}",
        "import tarshards.{name} as module; found = module.{member}",
        "from importlib import import_module; found = import_module('tarshards.{name}').{member}",
        "from tarshards.{name} import *; found = {member}",
        "import tarshards; tarshards.{name}; from tarshards.{name} import {member} as found",
    ],
)
def test_names_import_with_dots_as_the_documentation_writes_them(code):
    program = ""
    for name in {*DOTTED} - {"dali"}:
        check = f"found is tarshards.{name}.{DOTTED[name]} and sys.modules['tarshards.{name}'] is tarshards.{name}"
        spec = f"tarshards.{name}.__spec__.name == 'tarshards.{tarshards._NAMESPACES[name]}'"
        program += f"{code.format(name=name, member=DOTTED[name])}\nimport sys, tarshards\nassert {check} and {spec}\n"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=300)


def test_a_name_with_a_dot_that_is_none():
    with pytest.raises(ModuleNotFoundError, match="No module named 'tarshards\\.nonsense'"):
        importlib.import_module("tarshards.nonsense")
    with pytest.raises(ModuleNotFoundError, match="No module named 'tarshards\\.index\\.readers'"):
        importlib.import_module("tarshards.index.readers")


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tarshards.nonsense


def test_native_parser_is_the_one_in_use():
    load_kernel("tarshards.kernels._tar")
    from tarshards.tar import read as tar

    assert tar.scan.__module__ == "tarshards.kernels._tar"


@pytest.mark.parametrize("tool", sorted(path.name for path in BIN.iterdir()))
def test_help_loads_nothing_heavy_and_needs_no_installation(tool, tmp_path, path_with_tools):
    command = [sys.executable, "-X", "importtime", str(BIN / tool), "--help"]
    report = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert report.stdout.startswith(f"Usage: {tool} ")
    environment = {**os.environ, "PATH": path_with_tools}
    forked = subprocess.run([tool, "--help"], capture_output=True, text=True, check=True, env=environment)
    assert forked.stdout == report.stdout
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in report.stderr.splitlines()}
    assert not loaded & (HEAVY - {"click"})


#: What no tool needs to copy local shards; each takes as long to load as many samples to copy.
SLOW = {"concurrent.futures", "hashlib", "logging", "pickle", "socket", "tarfile"}


def test_copying_local_shards_loads_nothing_slow(make_shards):
    command = [sys.executable, "-X", "importtime", str(BIN / "tarcat"), make_shards(1)]
    report = subprocess.run(command, capture_output=True, check=True)
    loaded = {line.split("|")[-1].strip() for line in report.stderr.decode().splitlines()}
    assert "tarshards.samples.grouping" in loaded
    assert not loaded & (SLOW | HEAVY - {"click"})
