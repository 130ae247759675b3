"""Samples in one HTML file: thumbnails of images, and the first bytes of other fields."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from typing import Any

from tarshards.samples.codecs.image import IMAGES
from tarshards.samples.keys import Sample, is_reserved
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard
from tarshards.view.media_types import has_media
from tarshards.view.page_text import dumped, whole_page
from tarshards.view.pictures import thumbnail

HEAD = 4096  # bytes of a field


def write_contact_sheet(samples: Iterable[Sample], target: str | Location, *, title: str) -> int:
    """Write *samples* to *target*, a path or URL, as one HTML page; return their number.

    The page has thumbnails of images and the first bytes of other fields. It runs only its own script, and loads
    nothing else. The file appears under its name when it is complete.
    """
    count = 0
    begin, end = whole_page(title, {"transport": "embedded", "name": title})
    with open_shard(target, "wb") as file:
        file.write(f'{begin[:-1]}, "samples": [\n'.encode())
        for sample in samples:
            row = {"number": count, "key": sample["__key__"], "shard": sample.get("__url__", "")}
            row["fields"] = [_field(name, data) for name, data in sample.items() if not is_reserved(name)]
            file.write(f"{',' * (count > 0)}{dumped(row)}\n".encode())
            count += 1
        file.write(f"]}}{end}".encode())
    return count


def _field(name: str, data: bytes) -> dict[str, Any]:
    field: dict[str, Any] = {"name": name, "size": len(data)}
    if IMAGES.has(name):
        try:
            kind, small = thumbnail(name, data)
        except Exception as error:
            field["error"] = str(getattr(error, "reason", error))
        else:
            field["picture"] = f"data:{kind};base64,{b64encode(small).decode()}"
    elif not has_media(name):
        field["head"] = b64encode(data[:HEAD]).decode()
    return field
