"""Every tool has help, a documentation page, an entry point and an entry in the changelog."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest
from PIL import Image

from tarshards import __version__
from tarshards.index import members
from tarshards.kernels import _tar_py
from tarshards.samples import conditions
from tarshards.storage import compression, expressions, location, manifest, ranges
from tarshards.tar import elsewhere, read

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
TOOLS = sorted(path.name for path in (ROOT / "bin").iterdir())


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_has_help_and_a_page(tool, path_with_tools):
    page = (ROOT / "docs/tools" / f"{tool}.md").read_text()
    if tool == "tarscat":  # another name of tarcat
        assert "[tarcat](tarcat.md)" in page
        page += (ROOT / "docs/tools/tarcat.md").read_text()
    environment = {**os.environ, "PATH": path_with_tools}
    told = subprocess.run([tool, "--help"], capture_output=True, text=True, check=True, env=environment).stdout
    assert told.startswith(f"Usage: {tool} ")
    for option in set(re.findall(r"--[a-z0-9-]+", told)) - {"--color", "--help", "--version"}:
        assert option in page, f"docs/tools/{tool}.md does not tell of {option}"
    assert "xit" in page, "the page tells the exit codes"


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_is_in_the_index_the_changes_and_the_setup(tool):
    assert tool in (ROOT / "docs/tools/index.md").read_text()
    assert f"`{tool}`" in (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^\s+{tool} = tarshards\.cli\.", (ROOT / "setup.cfg").read_text(), re.MULTILINE)


def test_pages_count_and_name_all_tools():
    for page in "README.md", "docs/index.md", "docs/install.md":
        told = set(re.findall(r"the (\S+) tools\b", (ROOT / page).read_text()))
        assert told == {str(len(TOOLS) - 1)}, "all but the command that runs them"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "tarshards").rglob("*.md"))]
SKILLS = [ROOT / "skills/tarshards/SKILL.md"]
#: In code, `tarshards.a.b`: not a path, URL, file or option.
DOTTED = re.compile(r"(?<![\w./~*-])tarshards(?!\.md\b)(?:\.[A-Za-z_]\w*)+(?!\.|[\w/-]|\*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_with_dots_exist(page):
    for name in set(DOTTED.findall(page.read_text())) - {"tarshards.lock"}:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if "pip install" not in str(error):  # a package is missing
                resolve_name(name)


def test_the_page_on_architecture_describes_each_package():
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", text[text.index("## Packages") :], re.MULTILINE)
    folder = ROOT / "tarshards"
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert sorted(rows) == sorted(packages | modules)


def test_the_layers_of_the_page_on_invariants_are_all_packages():
    text = (ROOT / "docs/invariants.md").read_text()
    (table,) = re.findall(r"^\| layer .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.split("|")[2:4] for row in table.splitlines()]
    folder = ROOT / "tarshards"
    packages = [path.parent.name for path in folder.glob("*/__init__.py")]
    modules = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(names for names, _ in rows))) == sorted(packages + modules)
    for names, files in rows:
        opened = re.findall(r"`tarshards/(\S+)`", files)
        assert opened
        assert all((folder / path).is_file() and re.split(r"[/.]", path)[0] in names for path in opened)


@pytest.mark.parametrize(
    ("page", "title", "mark", "count"),
    [("docs/invariants.md", "The ten laws", r"^\d+\. ", 10), ("README.md", "What it promises", r"^- \*\*", 5)],
)
def test_each_law_and_promise_names_tests_that_exist(page, title, mark, count):
    (section,) = re.findall(rf"^## {title}\n(.*?)^## ", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    laws = re.split(mark, section, flags=re.MULTILINE)[1:]
    assert len(laws) == count
    for law in laws:
        tests = re.findall(r"`(tests/\S+\.py)::(\w+)`", law)
        assert tests, law
        for path, name in tests:
            assert f"\ndef {name}(" in (ROOT / path).read_text(), (path, name)


def test_the_limits_are_those_of_the_code():
    page = (ROOT / "docs/limits.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+)(?: (\w+))?[^|]*\|", page[page.index("## Limits on") :], re.MULTILINE)
    units = {"GiB": 1 << 30, "MiB": 1 << 20}
    told = {name.partition(",")[0]: int(number.replace(",", "")) * units.get(unit, 1) for name, number, unit in rows}
    assert [*told.values()] == [
        read.MEMBER_LIMIT,
        compression.MAX_HELD,
        compression.MAX_RATIO,
        Image.MAX_IMAGE_PIXELS,
        _tar_py.MAX_EXTENDED,
        elsewhere.MOST_LINKS,
        elsewhere.MOST_NAMES,
        read.MAX_END,
        expressions.MOST_SHARDS,
        expressions.DEEPEST,
        members.MAX_FIELDS,
        location.MOST_READ,
        manifest.MAX_BYTES,
        ranges.MOST_MAPPED,
        conditions.MAX_LENGTH,
    ]


def test_entries_of_the_changelog_are_short_and_releases_dated():
    text = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert titles[0] == "Unreleased"
    dates = [re.fullmatch(r"\d+\.\d+\.\d+ \((\d{4}-\d\d-\d\d)\)", title)[1] for title in titles[1:]]
    assert dates == sorted(dates, reverse=True)
    entries = re.split(r"^- ", text[text.index("## Unreleased") :], flags=re.MULTILINE)[1:]
    for entry in entries:
        lines = entry.partition("\n#")[0].strip().splitlines()
        assert len(lines) <= 2, entry
        assert all(len(line) <= 120 for line in ("- " + entry).splitlines()), entry


def test_the_version_is_the_latest_release_everywhere():
    release, date = re.search(r"^## ([\d.]+) \((.*)\)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert release == __version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {release}\ndate-released: {date}\n" in citation
    assert f"`tarcat (tarshards) {release}`" in (ROOT / "docs/tools/index.md").read_text()
    assert f"tarshards-{release}-" in (ROOT / "docs/install.md").read_text()


def starts_workers(node: ast.AST) -> bool:
    """Whether worker processes are started by what runs when a module with these statements is imported."""
    if isinstance(node, ast.FunctionDef | ast.Lambda) or (isinstance(node, ast.If) and "__main__" in ast.dump(node)):
        return False
    has_workers = isinstance(node, ast.keyword) and node.arg == "num_workers"
    return (has_workers and ast.dump(node.value) != ast.dump(ast.Constant(0))) or any(
        map(starts_workers, ast.iter_child_nodes(node))
    )


def test_programs_with_workers_can_be_imported_by_them():
    """As workers do that are not forked: on macOS, and since Python 3.14."""
    programs = {str(path): path.read_text() for path in (ROOT / "examples").glob("*.py")}
    pages = [ROOT / "README.md", ROOT / "docs/tour.md", *(ROOT / "docs/guides").glob("*.md"), *SKILLS]
    for page in pages:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        whole = [block for block in blocks if block.startswith("# ") or page.parent.name != "guides"]
        programs |= {f"{page} {number}": block for number, block in enumerate(whole) if "yield from" not in block}
    told = [name for name, text in programs.items() if "num_workers" in text]
    assert len(told) > 8
    assert [name for name in told if starts_workers(ast.parse(programs[name]))] == []
