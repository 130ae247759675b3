"""The documentation site: what `make docs` stages, checks and adds; the page of errors."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import tarshards
from tarshards import errors

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
import build_site  # noqa: E402
import error_messages  # noqa: E402

TROUBLES = (ROOT / "docs/troubleshooting.md").read_text()


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> Path:
    """All pages, as they are staged."""
    folder = tmp_path_factory.mktemp("staged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_site, "STAGED", folder)
        build_site.stage()
    return folder


def entries(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in entries(each)]


def test_the_navigation_has_each_page_once(staged):
    pages = sorted(str(path.relative_to(staged)) for path in staged.rglob("*.md"))
    assert sorted(entries(build_site.setting("nav"))) == pages


def test_the_reference_shows_each_public_name_once(staged):
    shown = [
        name for page in staged.glob("reference/*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    ]
    public = {build_site.path_of(name) for name in (*tarshards._MODULE_OF, *tarshards._NAMESPACES)}
    assert len(shown) == len(set(shown))
    assert public <= set(shown)


def test_each_tool_has_its_manual(staged):
    for tool in (ROOT / "bin").iterdir():
        page = (staged / f"tools/{tool.name}.md").read_text()
        assert f"\n## Manual\n\n`man {tool.name}`" in page
        assert f"\nUsage: {tool.name} " in page
    assert "\nUsage: tarjob status " in (staged / "tools/tarjob.md").read_text()


def test_links(tmp_path, monkeypatch):
    page = ROOT / "docs/guides/images.md"

    def linked(text: str) -> str:
        monkeypatch.setattr(build_site, "STAGED", tmp_path)
        return build_site.linked(text, page, "guides/images.md")

    assert (
        linked("[a](../training.md#batches), [b](https://host/)") == "[a](../training.md#batches), [b](https://host/)"
    )
    assert linked("[a](../../README.md)") == "[a](../index.md)"
    assert linked("[`Makefile`](../../Makefile) [x](images.md)") == "`Makefile` [x](images.md)"
    assert linked("`[a](b)` [1 2] \n```\n[a](b) [1]\n```\n") == "`[a](b)` \\[1 2] \n```\n[a](b) [1]\n```\n"
    assert linked("![a](../view/text.png)") == "![a](../view/text.png)"
    assert linked('<img src="../view/text.png">') == '<img src="../../view/text.png">'
    assert (tmp_path / "view/text.png").exists()
    with pytest.raises(build_site.SiteError, match=r"docs/guides/images\.md: no such file: nothing\.md"):
        linked("[a](nothing.md)")


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ('<a href="b/">b</a> <a href="b/#there">c</a> <a href="https://host/">d</a> <img src="data:x">', []),
        ('<a href="c/">c</a>', ["index.html: c/"]),
        ('<a href="b/#here">c</a>', ["index.html: b/#here"]),
        ('<a href="#here">c</a>', ["index.html: #here"]),
        ('<script src="https://host/a.js"></script>', ["index.html: https://host/a.js"]),
        ('<link rel="stylesheet" href="a.css">', ["index.html: a.css"]),
        ('<a href="/b/">c</a>', ["index.html: /b/"]),
    ],
)
def test_a_link_to_nothing_is_found(tmp_path, body, wrong):
    (tmp_path / "index.html").write_text(body)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/index.html").write_text('<h1 id="there">b</h1>')
    if not wrong:
        build_site.check(tmp_path)
    else:
        with pytest.raises(build_site.SiteError) as caught:
            build_site.check(tmp_path)
        assert str(caught.value).splitlines()[1:] == wrong


def test_text_of_each_page_is_beside_it_and_listed(staged, tmp_path, monkeypatch):
    monkeypatch.setattr(build_site, "STAGED", staged)
    build_site.add_text(tmp_path)
    listed = (tmp_path / "llms.txt").read_text()
    assert listed.startswith("# tarshards\n\n> ")
    links = re.findall(r"^- \[[^\]]+\]\((\S+)\): \S", listed, re.MULTILINE)
    assert sorted(links) == sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md"))
    assert (tmp_path / "training.md").read_text() == (staged / "training.md").read_text()
    for name in "ShardDataset", "Stream", "IndexedShards", "World":
        assert f"\n## {name}\n\n```python\n" in (tmp_path / "reference/read.md").read_text()
    assert "\n### take\n\n```python\n@op(" in (tmp_path / "reference/mix-and-change.md").read_text()
    assert "\n### check_resume\n" in (tmp_path / "reference/testing.md").read_text()


# The page of errors


def sections() -> dict[str, str]:
    return dict(re.findall(r"^## (\w+Error)\n(.*?)(?=^## )", TROUBLES, re.DOTALL | re.MULTILINE))


def test_each_error_of_the_tree_has_its_section_in_its_order():
    names = [kind.__name__ for kind in error_messages.KINDS if kind is not errors.TarshardsError]
    assert list(sections()) == names
    for name, text in sections().items():
        assert re.findall(r"^\| `[^|]+ \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE), name


def test_each_message_on_the_page_is_one_of_the_code():
    """Messages of Python, Pillow and the operating system apart."""
    foreign = {"No such file or directory", "KeyError: 'jpg'", "Truncated File Read", "'utf-8' codec can't decode byte"}
    foreign |= {"in position", "EOF: reading magic string, expected 8 bytes got"}
    literals = set()
    for path in (ROOT / "tarshards").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                literals.add(error_messages.text_of(node))
    code = "\n".join(literals)
    for name, text in sections().items():
        for cell in re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE):
            for message in re.findall(r"`([^`]+)`", cell):
                for part in re.split("…", message):
                    if part.strip(" ;:,.") not in foreign:
                        assert part.strip() in code, f"{name}: {message}"


def test_the_list_of_messages_has_those_of_the_code(staged):
    page = (staged / "troubleshooting.md").read_text()
    found = error_messages.messages()
    assert len(found["TarError"]) >= 8
    for kind, messages in found.items():
        assert f'"{kind}: {len(messages)} messages"' in page
        for message in messages:
            assert f"`` {message} ``" in page
