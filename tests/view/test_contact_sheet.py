"""Contact sheets: pages in one file, whose samples are data and nothing else."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tarshards.errors import TarError, visible
from tarshards.samples.codecs import encode_field
from tarshards.view.contact_sheet import write_contact_sheet
from tarshards.view.page_text import FILES, bundled


class Page(HTMLParser):
    """The elements that a browser would find in a page, and the texts of its scripts and styles."""

    def __init__(self, path):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.title = ""
        self.code: list[str] = []
        self.feed(path.read_text())
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("script", "style") and data.strip():
            self.code.append(data)
        elif self.tags and self.tags[-1] == "title" and data.strip():
            self.title += data

    @property
    def config(self):
        return json.loads(self.code[1])


HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</script></body>",
    "--><b onclick=alert(1)>",
    "<!--<script>",
    "&lt;script&gt;",
    "http://example.com/a.js",
    "\x1b[31m\u202e",
]
PICTURE = encode_field("png", np.zeros((9, 9), "u1"))


@given(st.sampled_from(HOSTILE) | st.text(min_size=1), st.sampled_from(HOSTILE) | st.text())
def test_no_data_break_out_of_a_contact_sheet(tmp_path_factory, hostile, text):
    path = tmp_path_factory.mktemp("sheet") / "a.html"
    harmless = {"__key__": "a", "txt": b"t", "jpg": b"damaged", "x.txt": b"t", "png": PICTURE}
    names = {"__key__": hostile, "txt": text.encode(errors="replace"), "jpg": text.encode(errors="replace")}
    names |= {f"{hostile}.txt": b"t", "png": PICTURE}
    write_contact_sheet([harmless], str(path), title="title")
    expected = Page(path)
    write_contact_sheet([names], str(path), title=hostile)
    page = Page(path)
    assert page.tags == expected.tags
    assert page.attributes == expected.attributes
    assert [page.code[0], page.code[2]] == [expected.code[0], expected.code[2]]
    assert not {"link", "iframe", "a", "object", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("href", "src")]
    (row,) = page.config["samples"]
    assert (row["key"], page.config["name"], page.title) == (hostile, hostile, visible(hostile))
    assert base64.b64decode(row["fields"][0]["head"]).decode() == names["txt"].decode()
    assert all(field["picture"].startswith("data:image/") for field in row["fields"] if "picture" in field)


def test_a_contact_sheet_runs_its_own_script_and_loads_nothing(tmp_path):
    write_contact_sheet([], str(tmp_path / "a.html"), title="none")
    page = Page(tmp_path / "a.html")
    (policy,) = [value for _, value in page.attributes if "default-src" in str(value)]

    def digest(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    style, _, script = page.code
    assert style == FILES["style.css"].read_text()
    assert script == "\n" + bundled("main.js")
    assert policy == (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; img-src data: blob:; "
        "media-src blob:; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "jpeg"), ("RGBA", "jpeg"), ("CMYK", "jpeg"), ("L", "jpeg")])
def test_pictures_are_scaled_down(tmp_path, mode, kind):
    file = io.BytesIO()
    Image.new(mode, (1000, 500)).save(file, "png" if mode == "RGBA" else "jpeg")
    sample = {"__key__": "a", "png": file.getvalue()}
    assert write_contact_sheet([sample], str(tmp_path / "a.html"), title="one") == 1
    (source,) = re.findall(r'"picture": "([^"]*)"', (tmp_path / "a.html").read_text())
    head, data = source.split(",")
    assert head == f"data:image/{kind};base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (240, 120)


def test_the_suffix_of_a_contact_sheet_selects_its_compression(tmp_path):
    sample = {"__key__": "a", "txt": b"a"}
    for name in "a.html", "a.html.gz":
        write_contact_sheet([sample], tmp_path / name, title="a")
    assert gzip.decompress((tmp_path / "a.html.gz").read_bytes()) == (tmp_path / "a.html").read_bytes()


def test_a_contact_sheet_that_breaks_off_leaves_none(tmp_path):
    def samples():
        yield {"__key__": "a", "txt": b"t"}
        raise TarError("damaged")

    with pytest.raises(TarError):
        write_contact_sheet(samples(), str(tmp_path / "a.html"), title="half")
    assert list(tmp_path.iterdir()) == []
