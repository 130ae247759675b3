"""Samples as one HTML file: embedded pictures, escaped text, no scripts, no external resources."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from html import escape
from io import BytesIO

from tarshards.errors import visible
from tarshards.samples.codecs import decode_field
from tarshards.samples.keys import Sample
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url
from tarshards.verbs.show import fields_of, is_image, on_white, preview

THUMBNAIL = 240  # pixels
TINY = 48  # pictures up to this size are enlarged, with square pixels

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 1.5rem; font: 14px/1.4 system-ui, sans-serif; color: #222; background: #f4f4f2; }}
h1 {{ font-size: 1.2rem; overflow-wrap: anywhere; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1rem; }}
article {{ padding: .75rem; background: #fff; border: 1px solid #ddd; border-radius: 6px; overflow-wrap: anywhere; }}
h2 {{ margin: 0 0 .5rem; font-size: 1rem; }}
img {{ display: block; max-width: 100%; margin: 0 auto .5rem; }}
img.tiny {{ width: 60%; image-rendering: pixelated; }}
p {{ margin: .35rem 0 0; }}
b {{ font-weight: 600; }}
small {{ color: #777; }}
</style>
</head>
<body>
<h1>{title}</h1>
<main>
"""


def write_contact_sheet(samples: Iterable[Sample], target: str | Location, *, title: str) -> int:
    """Write *samples* to *target*, a path or URL, as a page of pictures and texts; return their number.

    Images are scaled down, other fields are shown as previews. The file appears under its name once it is complete.
    """
    count = 0
    with open_url(target, "wb") as file:
        file.write(HEAD.format(title=_text(title)).encode())
        for sample in samples:
            file.write("".join(_card(sample)).encode())
            count += 1
        file.write(f"</main>\n<p><small>{count} samples</small></p>\n</body>\n</html>\n".encode())
    return count


def _card(sample: Sample) -> Iterator[str]:
    yield f"<article>\n<h2>{_text(sample['__key__'])}</h2>\n"
    for field, data in fields_of(sample):
        if is_image(field):
            yield _picture(field, data)
    for field, data in fields_of(sample):
        seen = escape(preview(field, data, limit=300))
        yield f"<p><b>{_text(field)}</b> {seen} <small>{len(data)} B</small></p>\n"
    yield "</article>\n"


def _picture(field: str, data: bytes) -> str:
    try:
        picture = on_white(decode_field(field, data, images="pilrgba"))
    except Exception as error:
        return f"<p><b>{_text(field)}</b> {_text(str(getattr(error, 'reason', error)))}</p>\n"
    tiny = max(picture.size) <= TINY
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    kind = "png" if tiny else "jpeg"
    file = BytesIO()
    picture.save(file, kind)
    source = f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"
    return f'<img src="{source}" alt="{_text(field)}"{" class=tiny" if tiny else ""}>\n'


def _text(text: str) -> str:
    return escape(visible(text))
