"""What type checkers know of our names, and editors show under the pointer; the documents' Python passes mypy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tarshards.samples.codecs.image import IMAGESPECS, Imagespec

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
START = """
from collections.abc import Iterable
from typing import Any
from tarshards import ArrayLoader, IndexedShards, Ledger, ShardDataset, ShardLoader, ShardWriter, Stream, ops, readers

stream, dataset, indexed = Stream.from_shards("x.tar"), ShardDataset("x.tar", shuffle=True), IndexedShards("x.tar")
samples: Iterable[dict[str, Any]] = ()
names = ["jpg", "cls"]
arrays = {"jpg": readers.image(224), "cls": readers.integer()}
loader, on_gpu = ArrayLoader(stream, 2, fields=arrays), ArrayLoader(stream, 2, fields=arrays, device="cuda")
mixed = ArrayLoader(stream, 2, fields={"jpg": readers.image(224), "txt": readers.text()})
by_size = ArrayLoader(stream, 2, fields={"jpg": readers.image()})
changed = ArrayLoader(stream, 2, fields=arrays, transforms=[])
"""
ARRAY = "ndarray[tuple[Any, ...], dtype[Any]]"
REVEALED = {
    "next(iter(stream))": "dict[str, Any]",
    "next(iter(Stream(range(3))))": "int",
    "stream.map(str, drop_none=True).batched(3).take(2)": "Stream[Any]",
    'stream.decode("rgb8", cls=int, on_error="skip").filter(bool)': "Stream[dict[str, Any]]",
    'stream.decode("rgb8", cls=int, on_error="skip").to_tuple("jpg", "cls")': "Stream[Any]",
    "stream.state_dict()": "dict[str, Any]",
    "stream.ledger": "Ledger",
    'ops.to_tuple(samples, "jpg")': "Iterator[tuple[Any]]",
    'ops.to_tuple(samples, "jpg", "cls")': "Iterator[tuple[Any, Any]]",
    'ops.to_tuple(samples, "jpg", "cls", "txt", on_error="skip")': "Iterator[tuple[Any, Any, Any]]",
    "ops.to_tuple(samples, *names)": "Iterator[tuple[Any, ...]]",
    'ops.decode(samples, "rgb8")': "Iterator[dict[str, Any]]",
    "dataset.decode().shuffle(9)": "ShardDataset[dict[str, Any]]",
    'dataset.to_tuple("jpg", "cls")': "ShardDataset[Any]",
    "indexed[0]": "dict[str, Any]",
    'indexed.decode()["key"]': "dict[str, Any]",
    "indexed[2:]": "IndexedShards[dict[str, Any]]",
    "indexed.map(len)[0]": "Any",
    "[each for each in loader][0]": f"FieldsBatch[{ARRAY}]",
    '[each for each in loader][0]["jpg"]': ARRAY,
    '[each for each in loader][0]["__key__"]': "list[str]",
    '[each for each in mixed][0]["txt"]': "Any",
    '[each for each in by_size][0]["jpg"]': "Any",
    "[each for each in changed][0]": "dict[str, Any]",
    "ShardLoader(dataset, 4).state_dict()": "dict[str, Any]",
    "readers.integer().make(3)": ARRAY,
    'ShardWriter("x").write': "(sample: dict[str, Any])",
    "Ledger().samples": "int",
    "Ledger().filtered": "dict[str, int]",
}
#: What is known only where torch is, which our settings of mypy skip; pyright runs in `make types`.
REVEALED_WITH_TORCH = {
    "DataLoader(dataset, 4)": "DataLoader[dict[str, Any]]",
    "next(iter(ShardLoader(dataset, 4)))": "dict[str, Any]",
    "next(iter(ShardLoader(dataset.map(str), 4)))": "Any",
    "next(iter(ShardLoader(dataset, 4, collate_fn=len)))": "int",
    "next(iter(ShardLoader(dataset, 4, fields=arrays, num_workers=2)))": "FieldsBatch[Tensor]",
    'next(iter(ShardLoader(dataset, 4, fields=arrays, pin_memory=True)))["jpg"]': "Tensor",
    '[each for each in on_gpu][0]["jpg"]': "Tensor",
    'next(iter(RemoteLoader("module:function", "tcp://host:1")))': "Any",
    'next(iter(dali.dali_loader("x.tar", len)))': "dict[str, Any]",
}
REFUSED = {
    "stream.map(str, drop=True)": "call-arg",
    "stream.batched()": "call-arg",
    'stream.take("2")': "arg-type",
    'a, b = next(ops.to_tuple(samples, "jpg"))': "misc",
    "ArrayLoader(stream, 2)": "call-overload",
    'ShardDataset("x.tar", tail="none")': "arg-type",
    'ShardLoader(dataset, 4, pin_memory="yes")': "call-overload",
    "ShardLoader(dataset, 4, pin_memry=True)": "call-overload",
    'readers.image(crop="center")': "call-overload",
}


def write_documents(folder: Path) -> None:
    """Write the Python of the README and of the guides, whose blocks follow each other."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))):
        blocks = python_of(page)
        saved = {found[1]: block for block in blocks if (found := re.match(r"# (\w+)\.py\n", block))}
        saved["page"] = "".join(block for block in blocks if block not in saved.values())
        for name, text in saved.items():  # the programs of a page do not import each other
            (folder / f"{page.stem.replace('-', '_')}_{name}.py").write_text(text)


def python_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_type_checkers_know_the_results_and_find_no_fault_in_the_documents(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy")
    documents = tmp_path / "documents"
    documents.mkdir()
    write_documents(documents)
    revealed = [f"reveal_type({expression})" for expression in REVEALED]
    lines = [*START.splitlines(), *revealed, *REFUSED]
    (documents / "types.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(documents)]
    environment = os.environ | {"MYPYPATH": str(tmp_path)}
    # In the root, where `make lint` has filled mypy's cache.
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.stderr
    found: dict[str, str] = {}
    others = []
    for line in done.stdout.splitlines():
        path, number, said = line.split(":", 2)
        if Path(path).name == "types.py":
            found.setdefault(lines[int(number) - 1], said)
        else:
            others.append(line)
    assert not others
    qualified = {line: re.sub(r"[\w.]+\.(?=\w)", "", said) for line, said in found.items()}
    expected = {
        f"reveal_type({expression})": f' note: Revealed type is "{kind}"' for expression, kind in REVEALED.items()
    }
    expected = {line: said.replace('"(sample', '"def (sample') for line, said in expected.items()}
    assert {line: qualified.get(line) for line in revealed} == expected
    assert {line: found.get(line, "[").rpartition("[")[2].rstrip("]") for line in REFUSED} == REFUSED


@pytest.mark.interop
def test_pyright_knows_what_editors_show(tmp_path):
    pytest.importorskip("pyright", reason="needs pyright")
    pytest.importorskip("torch")
    known = REVEALED | REVEALED_WITH_TORCH
    more = "from torch.utils.data import DataLoader\nfrom tarshards import RemoteLoader, dali"
    lines = [*START.splitlines(), *more.splitlines(), *(f"reveal_type({each})" for each in known), *REFUSED]
    (tmp_path / "shown.py").write_text("\n".join(lines) + "\n")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "shown.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {
        lines[each["range"]["start"]["line"]]: (each["severity"], each["message"])
        for each in json.loads(done.stdout)["generalDiagnostics"]
    }
    shown = {each: found.pop(f"reveal_type({each})", ("", ""))[1].partition('" is "')[2].rstrip('"') for each in known}
    shown = {each: said.removesuffix(" -> None") for each, said in shown.items()}
    assert shown == known
    assert {line: severity for line, (severity, _) in found.items()} == dict.fromkeys(REFUSED, "error")


def test_the_imagespecs_that_editors_offer_are_those_that_there_are():
    assert list(IMAGESPECS) == list(get_args(Imagespec))
