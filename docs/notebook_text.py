"""Notebooks as Markdown: their text and code, and the outputs that they were saved with."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

IMAGES = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}


def read(path: Path, linked: Callable[[str], str]) -> tuple[str, dict[str, bytes]]:
    """Return a notebook's text, in which *linked* changes that of Markdown, and its images, by the names of files."""
    images: dict[str, bytes] = {}
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join(_parts(cells, path.stem, linked, images)) + "\n", images


def _parts(
    cells: list[dict[str, Any]], stem: str, linked: Callable[[str], str], images: dict[str, bytes]
) -> Iterator[str]:
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield linked(source)
        elif source:
            yield _fenced(source, "bash" if re.match("[!%]", source) else "python")
        for output in cell.get("outputs", ()):
            if text := "".join(output.get("text", ())):
                yield _fenced(text.replace("\r\n", "\n").rstrip("\n"), "text")
            elif "data" in output:
                yield _shown({kind: "".join(data) for kind, data in output["data"].items()}, stem, images)


def _shown(data: dict[str, str], stem: str, images: dict[str, bytes]) -> str:
    """Return an output in its best form; of several images the smallest."""
    kinds = sorted(IMAGES.keys() & data.keys(), key=lambda kind: len(data[kind]))
    if not kinds:
        return data.get("text/markdown") or _fenced(data["text/plain"], "text")
    kind, name = kinds[0], f"{stem}-{len(images) + 1}.{IMAGES[kinds[0]]}"
    images[name] = data[kind].encode() if kind == "image/svg+xml" else base64.b64decode(data[kind])
    return f"![What the cell above shows]({name})"


def _fenced(text: str, language: str) -> str:
    ticks = "`" * max(3, 1 + max((len(found) for found in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"
