"""What type checkers, and editors by them, know of our names; the documents' Python passes mypy."""

from __future__ import annotations

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
from tarshards import ArrayLoader, IndexedShards, ShardDataset, ShardLoader, Stream, World, ops, readers

stream, dataset = Stream.from_shards("x.tar"), ShardDataset("x.tar", shuffle=True)
samples: Iterable[dict[str, Any]] = ()
names = ["jpg", "cls"]
"""
REVEALED = {
    "stream.map(str, drop_none=True).batched(3).take(2)": "Stream",
    'stream.decode("rgb8", cls=int, on_error="skip").to_tuple("jpg", "cls")': "Stream",
    "stream.state_dict()": "dict[str, Any]",
    "stream.ledger": "Ledger",
    'ops.to_tuple(samples, "jpg")': "Iterator[tuple[Any]]",
    'ops.to_tuple(samples, "jpg", "cls")': "Iterator[tuple[Any, Any]]",
    'ops.to_tuple(samples, "jpg", "cls", "txt", on_error="skip")': "Iterator[tuple[Any, Any, Any]]",
    "ops.to_tuple(samples, *names)": "Iterator[tuple[Any, ...]]",
    'ops.decode(samples, "rgb8")': "Iterator[dict[str, Any]]",
    'next(iter(ArrayLoader(stream, 2, fields={"cls": readers.integer()})))': "dict[str, Any]",
    "dataset.decode().shuffle(9)": "ShardDataset",
    "ShardLoader(dataset, 4).state_dict()": "dict[str, Any]",
}
REFUSED = {
    "stream.map(str, drop=True)": "call-arg",
    "stream.batched()": "call-arg",
    'stream.take("2")': "arg-type",
    'a, b = next(ops.to_tuple(samples, "jpg"))': "misc",
    "ArrayLoader(stream, 2)": "call-arg",
    'ShardDataset("x.tar", tail="none")': "arg-type",
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
    assert {line: qualified.get(line) for line in revealed} == expected
    assert {line: found.get(line, "[").rpartition("[")[2].rstrip("]") for line in REFUSED} == REFUSED


def test_the_imagespecs_that_editors_offer_are_those_that_there_are():
    assert list(IMAGESPECS) == list(get_args(Imagespec))
