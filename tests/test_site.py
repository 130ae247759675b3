"""The documentation site: what `make docs` stages, checks and adds; the pages of errors."""

from __future__ import annotations

import ast
import base64
import json
import re
import sys
from email.message import Message
from pathlib import Path

import pytest

import tarshards
from tarshards.cli.advice import PAGES, anchor, headings, place_of

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
import build_site  # noqa: E402
import error_messages  # noqa: E402
import notebook_text  # noqa: E402
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
        ("language", ("text", "tokens", "documents", "FlexAttention", "FlashAttention", "cu_seqlens", "torchtitan")),
        ("robots", ("Robotics", "LeRobot", "delta_timestamps", "action chunks", "Episodes", "Statistics")),
        ("medicine", ("DICOM", "NIfTI", "nibabel", "pydicom", "olumes", "atches", ".nii.gz", ".dcm", ".npy")),
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


def test_notebooks_are_pages_with_the_outputs_that_they_were_saved_with(staged):
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = (staged / f"notebooks/{path.stem}.md").read_text()
        cells = json.loads(path.read_text())["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        shown = re.findall(r"^!\[[^\]]*\]\((\S+)\)$", text, re.MULTILINE)
        assert len(shown) == sum(
            not notebook_text.IMAGES.keys().isdisjoint(output.get("data", ())) for output in outputs
        )
        for name in shown:
            data = (staged / "notebooks" / name).read_bytes()
            assert data.startswith((b"\x89PNG", b"\xff\xd8")), name
        assert sum(map(len, ((staged / "notebooks" / name).read_bytes() for name in shown))) < 300_000
        for output in outputs:
            assert "".join(output.get("text", ())).replace("\r\n", "\n").rstrip("\n") in text
        assert len(text) < 80_000


def test_cells_of_a_notebook(tmp_path):
    def image(data: bytes) -> str:
        return base64.b64encode(data).decode()

    outputs = [
        {"output_type": "stream", "text": ["a\r\n", "```\n"]},
        {"output_type": "display_data", "data": {"image/png": image(b"longer"), "image/jpeg": image(b"jpg")}},
        {"output_type": "execute_result", "data": {"text/plain": ["7"]}},
        {"output_type": "display_data", "data": {"text/markdown": "| a |", "text/plain": "x"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "!tarcat a.tar", "outputs": []},
        {"cell_type": "code", "source": ["1 +\n", "6"], "outputs": outputs},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    text, images = notebook_text.read(tmp_path / "a.ipynb", str.upper)
    parts = ["# TITLE\nTEXT", "```bash\n!tarcat a.tar\n```", "```python\n1 +\n6\n```", "````text\na\n```\n````"]
    parts += ["![What the cell above shows](a-1.jpg)", "```text\n7\n```", "| a |"]
    assert text == "\n\n".join(parts) + "\n"
    assert images == {"a-1.jpg": b"jpg"}


def test_the_site_leads_to_the_addresses_in_the_metadata_and_to_none_without(monkeypatch):
    told = Message()
    told["Version"] = "1.2"
    monkeypatch.setattr(build_site, "metadata", lambda name: told)
    assert build_site.addresses() == {"DOCS_NAME": "tarshards 1.2"}
    told["Home-page"] = "https://github.com/owner/name"
    told["Project-URL"] = "Documentation, https://owner.github.io/name/"
    assert build_site.addresses() == {
        "DOCS_NAME": "tarshards 1.2",
        "DOCS_REPOSITORY": "https://github.com/owner/name",
        "DOCS_SITE": "https://owner.github.io/name/",
    }
    used = re.findall(r"!ENV \[?(\w+)", (ROOT / "mkdocs.yml").read_text())
    assert sorted(used) == sorted(build_site.addresses())


@pytest.mark.parametrize("address", [None, "https://owner.github.io/name/"])
def test_wrong_addresses_of_pages_and_of_the_sitemap_are_found(tmp_path, address):
    other = "https://elsewhere/" if address else "https://owner.github.io/name/"

    def write(address: str | None, listed: str | None) -> None:
        canonical = f'<link rel="canonical" href="{address}a/">' if address else ""
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a/index.html").write_text(f"<head>{canonical}</head>")
        (tmp_path / "sitemap.xml").unlink(missing_ok=True)
        if listed is not None:
            (tmp_path / "sitemap.xml").write_text(f"<urlset>{listed}</urlset>")

    right = f"<loc>{address}a/</loc>" if address else None
    write(address, right)
    build_site.check_addresses(tmp_path, address)
    for wrong in (other, right), (address, "<loc>https://elsewhere/</loc>"), (address, "" if address is None else None):
        write(*wrong)
        with pytest.raises(build_site.SiteError, match="addresses that are wrong"):
            build_site.check_addresses(tmp_path, address)


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
