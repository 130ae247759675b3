"""The examples in the README and on the tour run, and the lists of the pages are complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import warnings_of
from with_torch import needs_torch

import tarshards

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
README, TOUR, FRONT = ROOT / "README.md", ROOT / "docs/tour.md", ROOT / "docs/index.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def run_shell(page: Path, folder: Path, path: str) -> list[str]:
    """Run the one block of shell of a page in a folder, and return the lines that it prints."""
    (script,) = blocks(page, "bash")
    command = ["bash", "-eu", "-c", script]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


#: What README and the first page of the site show, in this order.
FIRST = [
    r"^tarshards stores datasets in plain tar files",
    r"^!\[.*\]\(\S*images/charts/crop-256\.svg\)\n!\[.*\]\(\S*images/charts/read-2k\.svg\)\n",
    r"^```\npip install tarshards +#.*\npip install 'tarshards\[torch\]' +#.*\n```\n",
    r"^```python\n",
    r"\n\[!\[.*\]\(\S*view/images\.png\)\]",
    r"^```\nmake demo +#.*\nmake test +#.*\n```\n",
    r"images/pipeline-narrow\.svg",
]


@pytest.mark.parametrize("page", [README, FRONT], ids=["readme", "site"])
def test_the_first_pages_show_in_order_what_it_is_and_how_to_begin(page):
    text = page.read_text()
    assert len(text.splitlines()) <= 140
    places = [re.search(pattern, text, re.MULTILINE) for pattern in FIRST]
    assert all(places)
    assert places == sorted(places, key=lambda found: found.start())
    assert text[: places[-2].end()].count("\n") <= 60, "the commands of a clone are near the top"


def test_the_first_pages_have_the_same_program_and_the_same_commands():
    told = [re.findall(r"```\w*\n.*?```", page.read_text(), re.DOTALL)[:3] for page in (README, FRONT)]
    assert told[0] == told[1]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/install.md", "docs/start.md"])
def test_there_is_one_way_to_install(page):
    text = (ROOT / page).read_text()
    commands = {line.partition(" #")[0].strip() for line in re.findall(r"^pip install .*", text, re.MULTILINE)}
    assert commands - {"pip install tarshards"} >= {"pip install 'tarshards[torch]'"}
    others = {line for line in commands if not re.match(r"pip install '?tarshards(\[torch\]'|$)", line)}
    assert not others or page == "docs/install.md"
    if page != "docs/index.md":
        assert "https://pytorch.org/get-started/locally/" in text


def test_the_program_of_the_first_page_closes_its_ledger(tmp_path):
    """It needs no torch."""
    program = "import sys\nsys.modules['torch'] = None\n" + blocks(FRONT, "python")[0]
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")
    assert done.stdout.startswith("epoch 0: 8000 planned = 8000 delivered\n")


@needs_torch
def test_training_in_the_readme(tmp_path, python_with_torch):
    (tmp_path / "train.py").write_text("".join(blocks(README, "python")))
    done = subprocess.run([python_with_torch, "-W", "error", "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")
    assert done.stdout.startswith("epoch 0: 8000 planned = 8000 delivered\n")
    assert f"\n{8000 - 4096} samples were left\n" in done.stdout
    assert "\nepoch 0: 8000 planned = 4096 before + 3904 delivered\n" in done.stdout


def test_the_shell_in_the_readme(tmp_path, path_with_tools):
    printed = run_shell(README, tmp_path, path_with_tools)
    assert printed[0] == './001\tcls:4=1\ttxt:9="text 001\\n"'
    assert printed[3] == "__key__\tcls\tsize"
    assert len([*tmp_path.glob("copy-*.tar.gz")]) == 4


@needs_torch
def test_reading_is_three_lines(make_shards):
    (three_lines, _) = blocks(TOUR, "python")
    body = "".join(f"    {line}\n" for line in three_lines.splitlines())
    body = body.replace('"train-{000..146}.tar"', repr(make_shards(2)))
    space = {name: getattr(tarshards, name) for name in tarshards.__all__}
    exec(f"def read():\n{body}", space)
    assert [sample["cls"] for sample in space["read"]()] == [b"0", b"1", b"2", b"3", b"4", b"5"]


@needs_torch
def test_one_screen_of_python(tmp_path, python_with_torch):
    program = tmp_path / "screen.py"
    program.write_text(blocks(TOUR, "python")[1])
    done = subprocess.run([python_with_torch, "-W", "error", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")
    first, second = re.findall(r"epoch 0: 8000 planned = (.*) delivered", done.stdout)
    assert (first, second) == ("1408", "1408 before + 6592")
    assert "quarantined      0" in done.stdout


@needs_torch
def test_the_page_on_training(tmp_path, python_with_torch):
    page = (ROOT / "docs" / "training.md").read_text()
    program = tmp_path / "training.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    command = [python_with_torch, "-W", "error", "-W", "ignore:This DataLoader will create", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")


def test_one_screen_of_shell(tmp_path, path_with_tools):
    assert run_shell(TOUR, tmp_path, path_with_tools)[0] == './001\tcls:4=1\ttxt:9="text 001\\n"'


def tables(head: str) -> list[list[str]]:
    """The rows of the table whose head begins with *head*, each a list of its cells."""
    text = (ROOT / "docs/fields.md").read_text()
    (body,) = re.findall(rf"^\| {re.escape(head)}.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body.splitlines()]


def test_every_op_is_in_the_list():
    listed = re.search(r"`Stream` and `ShardDataset`: `([a-z_\s]+)`", (ROOT / "docs/training.md").read_text())[
        1
    ].split()
    methods = {name for name in vars(tarshards.ops) if hasattr(tarshards.Stream, name) and not name.startswith("_")}
    assert sorted(listed) == sorted(methods)


def test_the_table_of_extensions_is_the_registry():
    """Of a new interpreter, since other tests register extensions."""
    program = """if True:
        import json
        from tarshards.samples.codecs import registry

        def names(functions):
            return {extension: function.__name__ for extension, function in functions.items()}

        tables = map(names, (registry.DECODERS, registry.UNSAFE_DECODERS, registry.ENCODERS))
        specs = {extension: family.spec for extension, family in registry.FAMILY_OF_EXTENSION.items()}
        print(json.dumps([*tables, specs]))
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    safe, unsafe, encoders, specs = json.loads(done.stdout)
    rows = {frozenset(row[0].strip("`").split()): row[1] for row in tables("extensions")}
    assert sorted(extension for row in rows for extension in row) == sorted({*safe, *unsafe, *encoders, *specs})
    spoken = {"imagespec": "imagespec", '"audio"': "audiospec", '"video"': "videospec"}  # decoded where a spec asks
    for row, given in rows.items():
        assert row <= {*encoders} or not row & {*encoders}
        assert ("allow_unsafe" in given) == bool(row & {*unsafe})
        asked = {specs.get(extension) for extension in row}
        assert {word: word in given for word in spoken} == {word: spec in asked for word, spec in spoken.items()}
        assert len(asked) == 1
        for functions in (safe, unsafe, encoders) if asked == {None} else ():
            assert len({functions.get(extension) for extension in row}) == 1, "one codec a row"


def test_the_table_of_imagespecs_is_that_of_the_decoder():
    from tarshards.samples.codecs.image import IMAGESPECS

    listed = {}
    for pixels, *cells in tables("pixels"):
        for container, cell in zip(("numpy", "torch", "pil"), cells):
            element = None if container == "pil" else pixels.split(",")[0]
            listed |= dict.fromkeys(cell.strip("`").split(), (container, element))
    assert listed == {name: (container, element) for name, (container, element, _) in IMAGESPECS.items()}
    assert IMAGESPECS["pil"] == IMAGESPECS["pilrgb"]
    assert IMAGESPECS["torch"] == IMAGESPECS["torchrgb"]
