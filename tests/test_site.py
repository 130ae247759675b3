"""The documentation site: what `make docs` stages, checks and adds; the pages of errors."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import tarshards
from tarshards.cli.advice import PAGES, anchor, headings, place_of

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
import build_site  # noqa: E402
import error_messages  # noqa: E402
from tool_lines import command_of  # noqa: E402

pytestmark = pytest.mark.docs


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


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("speech", ("NeMo", "lhotse", "Shar", "Kaldi", "wav.scp", "wenet", "LibriSpeech", "Common Voice")),
    ],
)
def test_the_words_of_a_field_are_in_the_headings_of_its_guide(staged, page, words):
    """Where searching finds them first."""
    headings = " ".join(re.findall("^#+ (.*)", (staged / f"guides/{page}.md").read_text(), re.MULTILINE))
    assert not [word for word in words if word not in headings]


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
    assert linked("| `a \\| b` |\n```\n`a \\| b`\n```\n") == "| `a | b` |\n```\n`a \\| b`\n```\n"
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


# The pages of errors

TROUBLES = {path.stem: path.read_text() for path in sorted(PAGES.glob("*.md"))}
NAMES = [kind.__name__ for kind in error_messages.KINDS]


def test_the_index_has_each_page_and_each_class():
    assert set(re.findall(r"^\| \[.+\]\((\w+)\.md\) \|", TROUBLES["index"], re.MULTILINE)) == {*TROUBLES} - {"index"}
    assert re.findall(r"^\| `(\w+Error)` \|", TROUBLES["index"], re.MULTILINE) == NAMES[1:]


@pytest.mark.parametrize("page", sorted({*TROUBLES} - {"index"}))
def test_below_messages_are_their_classes_a_short_cause_and_a_cure(page):
    title, *entries = re.split(r"\n\n(?=###)", TROUBLES[page].strip())
    assert "###" not in title
    assert re.search(r"`\w+Error`", title) is None
    for entry in entries:
        form = r"(?:### `[^`]+`\n)+\n((?:`\w+Error`(?:, )?)+): (.+\.)\n\n\*\*Cure:\*\* .+\."
        found = re.fullmatch(form, entry, re.DOTALL)
        assert found, entry
        assert {*re.findall(r"\w+", found[1])} <= {*NAMES}
        assert len(found[2].split()) <= 20, entry
    anchors = [anchor(message) for there, _, message in headings() if there == page]
    assert len(set(anchors)) == len(anchors) == TROUBLES[page].count("\n### ")


@pytest.mark.parametrize("span", sorted(set(re.findall(r"`((?:tar\w+|kujob) [^`]+)`", "".join(TROUBLES.values())))))
def test_each_command_on_the_pages_exists(span):
    tool, *words = span.split()
    program = command_of(tool)
    verbs = getattr(program, "verbs", {})
    assert not verbs or words[0] in verbs or words[0].startswith("-")
    known = {name for each in (program, *verbs.values()) for option in each.params for name in option.opts}
    assert {word for word in words if re.match("-+[a-z]", word)} <= known


def lacking(kinds: list[str], found: dict[str, str]) -> dict[str, str]:
    """Return which of the messages *found* lead to no heading as errors of *kinds*."""
    classes = [kind for kind in error_messages.KINDS if kind.__name__ in kinds]
    return {text: place for text, place in found.items() if not any(place_of(kind(text)) for kind in classes)}


@pytest.mark.parametrize("kind", NAMES)
def test_each_message_of_the_code_has_a_heading(kind):
    assert lacking([kind], error_messages.messages()[kind]) == {}


def test_so_have_the_messages_of_errors_that_become_ours():
    assert [lacking(kinds, found) for kinds, found in error_messages.wrapped()] == [{}] * len(error_messages.wrapped())


def test_each_message_on_the_pages_is_one_of_the_code():
    """Messages of Python, Pillow and the operating system apart."""
    foreign = {"No such file or directory", "KeyError: 'jpg'", "Truncated File Read", "'utf-8' codec can't decode byte"}
    foreign |= {"in position", "EOF: reading magic string, expected 8 bytes got"}
    literals = set()
    for path in (ROOT / "tarshards").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.add(node.value)
    found = [*error_messages.messages().values(), *(texts for _, texts in error_messages.wrapped())]
    literals |= {text for texts in found for text in texts}
    code = "\n".join(literals)
    for _, _, message in headings():
        assert re.search(r"[a-z]{3}", message), message
        for part in message.split("…"):
            if part.strip(" ;:,.") not in foreign:
                assert part.strip() in code, message
