"""Show samples as text and pictures: listings with previews, pictures in a terminal, and a summary."""

from __future__ import annotations

import json
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from time import monotonic
from typing import Any

from tarshards.errors import visible
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.basic import INTEGERS, TEXTS
from tarshards.samples.codecs.image import IMAGES, open_image
from tarshards.samples.codecs.registry import DECODERS, FAMILY_OF_EXTENSION, UNSAFE_DECODERS, require
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.seen_keys import SeenKeys
from tarshards.verbs.contents import Contents, FieldSizes, align

OBJECTS = frozenset(["json", "jsn", "mp", "msg", "msgpack", "cbor"])
ARRAYS = frozenset(["npy", "npz", "ten", "tb", "tenbin"])
BINARIES = frozenset(["bin", "gz", "pdf"])  # no text, whatever their bytes are
PREVIEWED = OBJECTS | ARRAYS | {*TEXTS, *INTEGERS}  # these decode without running code and without torch

LEAST = 6  # columns of a terminal below which no cell is cut
PICTURE = 48  # the most columns, and half-rows, of a picture in a terminal
SMALLEST = 24  # pixels, up to which the longer side of a small picture is enlarged


def list_sample(sample: Sample) -> str:
    r"""Return a line with the key, then every field with its size in bytes and its preview, separated by tabs.

    >>> list_sample({"__key__": "a", "cls": b"7", "raw": b"\xff", "size": b"670\n", "txt": b"seven\n"})
    'a\tcls:1=7\traw:1\tsize:4="670\\n"\ttxt:6="seven\\n"'
    """
    columns = [visible(sample["__key__"])]
    for field, data in sample.items():
        if (name := _listed(field)) is not None:
            seen = preview(field, data)
            columns.append(f"{name}:{len(data)}={seen}" if seen else f"{name}:{len(data)}")
    return "\t".join(columns)


@lru_cache(1024)
def _listed(field: str) -> str | None:
    return None if is_reserved(field) else visible(field)


def fields_of(sample: Sample) -> Iterator[tuple[str, bytes]]:
    """Yield the fields of *sample* with their bytes, without ``__key__`` and other reserved names."""
    return ((field, data) for field, data in sample.items() if not is_reserved(field))


def preview(field: str, data: bytes, *, limit: int = 60) -> str:
    """Return one printable line: up to *limit* characters of the value, an array's dtype and shape, or an image's size.

    Returns an empty string for a field without a preview, and ``<reason>`` for one that does not decode. A field that
    no codec decodes has a preview if it is text.

    >>> preview("json", b'{"boxes": [1, 2]}'), preview("cls", b"x"), preview("raw", b"x"), preview("raw", b"\\0")
    ('{"boxes": [1, 2]}', "<b'x' is not a decimal integer>", '"x"', '')
    """
    try:
        if IMAGES.has(field):
            return _image_size(data)
        if _is_previewed(field):
            return visible(_describe(decode_field(field, data), limit))
        if has_no_codec(field) and (text := _text_of(data, limit)):
            return visible(_describe(text, limit))
    except Exception as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        return visible(f"<{_shorten(reason, limit)}>")
    return ""


@lru_cache(1024)
def _is_previewed(field: str) -> bool:
    return field.removesuffix(".gz").rpartition(".")[2] in PREVIEWED


@lru_cache(1024)
def has_no_codec(field: str) -> bool:
    """Return whether nothing is known of the bytes of *field*.

    >>> has_no_codec("size"), has_no_codec("x.png"), has_no_codec("cls")
    (True, False, False)
    """
    extension = field.rpartition(".")[2]
    return not any(extension in each for each in (DECODERS, UNSAFE_DECODERS, FAMILY_OF_EXTENSION, BINARIES))


def _text_of(data: bytes, limit: int) -> str:
    """Return the beginning of *data*, more than *limit* characters of it if there are as many, "" if it is no text."""
    head = bytes(data[: 4 * limit + 8])
    text = head.decode(errors="ignore")  # a character may be cut
    if len(head) - len(text.encode()) > (3 if len(head) < len(data) else 0):
        return ""
    return text if all(character.isprintable() or character in "\t\n\r" for character in text) else ""


def _image_size(data: bytes) -> str:
    from PIL import UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large images, but only the header is read
        try:
            with open_image(data) as header:
                return f"{header.width}x{header.height} {header.mode}"
        except UnidentifiedImageError as error:
            raise ValueError("not an image") from error


def _describe(value: Any, limit: int) -> str:
    if type(value) is int:
        return _shorten(str(value), limit)
    if isinstance(value, str):
        return _encode(value[:limit]) + ("…" if len(value) > limit else "")
    if hasattr(value, "dtype"):
        return _brief(value)
    try:
        text = _encode(value)
    except (TypeError, ValueError):  # keys that JSON does not allow
        text = repr(value)
    return _shorten(text, limit)


def _brief(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"{value.dtype} {'x'.join(map(str, value.shape)) or 'scalar'}"
    return f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)


_encode = json.JSONEncoder(ensure_ascii=False, default=_brief).encode  # json.dumps makes an encoder for each value


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def draw_pictures(sample: Sample, *, columns: int = PICTURE) -> Iterator[Any]:
    """Yield each image of *sample* as colour blocks for rich, at most *columns* wide.

    For an image that does not decode, yields the reason instead, as text.
    """
    pixels = require("rich_pixels", extra="show").Pixels
    for field, data in fields_of(sample):
        if IMAGES.has(field):
            try:
                picture = decode_field(field, data, "pilrgba")
            except Exception as error:
                yield visible(f"{field}: {getattr(error, 'reason', error)}")
            else:
                yield pixels.from_image(_fit(_on_white(picture), columns))


def _on_white(picture: Any) -> Any:
    """Return a PIL image in RGBA as RGB, on a white background."""
    from PIL import Image

    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def _fit(picture: Any, columns: int) -> Any:
    """Shrink *picture* to the columns and half-rows of a terminal, or enlarge a tiny one by an integer factor."""
    from PIL import Image

    scale = min(columns / picture.width, PICTURE / picture.height)
    if scale < 1:
        size = [max(1, round(length * scale)) for length in picture.size]
        return picture.resize(size, Image.Resampling.LANCZOS)
    factor = max(1, min(int(scale), SMALLEST // max(picture.size)))
    return picture.resize([length * factor for length in picture.size], Image.Resampling.NEAREST)


def tabulate(
    samples: Iterable[Sample],
    *,
    width: int | None = None,
    lines: int = 20,
    mark: Callable[[str, str], str] = lambda text, _: text,
) -> Iterator[str]:
    """Yield the lines of a table: a header, then for each sample its key and the cells of its fields.

    Up to *lines* samples, or those of a second, get columns of common widths, which never become narrower later. With a
    *width*, in columns of a terminal, the widest cells are cut so that a line fits, fields for which there is no place
    are left out, and every *lines* lines the header comes again. *mark* changes the "heading", and each "key".

    >>> for line in tabulate([{"__key__": "a", "cls": b"7", "txt": b"a dog on a skateboard"}], width=28):
    ...     print(line)
    __key__  cls  txt
    a        7    "a dog on a…
    """
    needed: dict[str, int] = {}
    shown: list[str] = []  # the columns of the last header
    since = 0  # lines since then
    for rows in _screens(samples, lines):
        for row in rows:
            for name, text in row.items():
                needed[name] = max(needed.get(name) or _width(name), _width(text))
        widths = needed if width is None else narrowed(needed, width)
        for row in rows:
            if [*widths] != shown or (width is not None and since >= lines):
                shown, since = [*widths], 0
                yield mark("  ".join(_cut(name, widths[name]) for name in shown).rstrip(), "heading")
            key, *cells = (_cut(row.get(name, ""), widths[name]) for name in shown)
            yield "  ".join([mark(key, "key"), *cells]).rstrip()
            since += 1


def _screens(samples: Iterable[Sample], lines: int) -> Iterator[list[dict[str, str]]]:
    """Yield the cells of *samples*, by field: of *lines* samples, or of those that come within a second."""
    rows: list[dict[str, str]] = []
    begun = monotonic()
    for sample in samples:
        cells = {visible(field): cell(field, data) for field, data in fields_of(sample)}
        rows.append({"__key__": visible(sample["__key__"]), **cells})
        if len(rows) >= lines or monotonic() - begun > 1:
            yield rows
            rows, begun = [], monotonic()
    yield rows


def cell(field: str, data: bytes) -> str:
    r"""Return what a table shows of a field: the preview of a value, else its size, after the preview if there is one.

    >>> cell("cls", b"7"), cell("raw", bytes(2000)), cell("jpg", b"x")
    ('7', '2.0 kB', '<not an image> 1 B')
    """
    seen = preview(field, data)
    if seen and _is_value(field):
        return seen
    return f"{seen} {_brief_size(len(data))}".lstrip()


@lru_cache(1024)
def _is_value(field: str) -> bool:
    """Return whether the preview of *field* is the value itself, or its beginning."""
    return has_no_codec(field) or field.removesuffix(".gz").rpartition(".")[2] in OBJECTS | {*TEXTS, *INTEGERS}


def _brief_size(size: int) -> str:
    """Return a size in bytes, briefly.

    >>> _brief_size(999), _brief_size(9_900), _brief_size(123_456_789)
    ('999 B', '9.9 kB', '123 MB')
    """
    number: float = size
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5 or unit == "GB":
            break
        number /= 1000
    return f"{number:.{int(number < 9.95 and unit != 'B')}f} {unit}"


def narrowed(widths: dict[str, int], width: int) -> dict[str, int]:
    """Return *widths* of columns, two spaces apart, that fit into *width*.

    The widest fields are cut first; then the last ones are left out, and a column says how many. The first column, the
    key, takes up to half of it.

    >>> narrowed({"__key__": 8, "cls": 3, "txt": 60}, 40), narrowed({"__key__": 8, "a": 60, "b": 60, "c": 60}, 28)
    ({'__key__': 8, 'cls': 3, 'txt': 25}, {'__key__': 8, 'a': 6, 'b': 6, '+1': 2})
    """
    key, *fields = widths
    widths = {**widths, key: min(widths[key], width // 2)}
    left_out = 0
    while fields and sum(widths.values()) + 2 * len(fields) + 4 * (left_out > 0) > width:
        widest = max(fields, key=widths.__getitem__)
        if widths[widest] > LEAST:
            widths[widest] -= 1
        else:
            del widths[fields.pop()]
            left_out += 1
    return widths | ({f"+{left_out}": 2} if left_out else {})


def _width(text: str) -> int:
    """Return how many columns of a terminal *text* takes.

    >>> _width("abc"), _width("日本"), _width("e\u0301")
    (3, 4, 1)
    """
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


def _cut(text: str, width: int) -> str:
    """Return *text* in *width* columns: filled with spaces, or cut, after a word if one ends in its second half.

    >>> _cut("a dog on a skateboard", 14), _cut("skateboard", 6), _cut("日本", 3), _cut("a", 3)
    ('a dog on a…   ', 'skate…', '日…', 'a  ')
    """
    if (rest := width - _width(text)) >= 0:
        return text + " " * rest
    taken = list(accumulate(map(_width, text)))
    head = text[: bisect_right(taken, width - 1)]
    if text[len(head)] != " " and (end := head.rfind(" ")) * 2 >= len(head):
        head = head[:end]
    head = f"{head.rstrip()}…"
    return head + " " * (width - _width(head))


class Summary(Contents):
    """A summary of many samples: their number, the sizes of their fields, and duplicate keys."""

    def __init__(self) -> None:
        super().__init__()
        self.duplicates: Counter[str] = Counter()  # for each repeated key, its samples after the first
        self._keys = SeenKeys()

    def add(self, sample: Sample) -> None:
        """Count one sample."""
        self.samples += 1
        key = sample["__key__"]
        if key in self._keys:
            self.duplicates[key] += 1
        else:
            self._keys.add(key)
        for field, data in fields_of(sample):
            if field not in self.fields:
                self.fields[field] = FieldSizes()
            self.fields[field].add(len(data))

    def __str__(self) -> str:
        r"""Return the counts, the table of fields and the histogram of their sizes.

        >>> summary = Summary()
        >>> summary.add({"__key__": "a", "txt": b"hello"})
        >>> print(summary)
        samples     1
        bytes       5
        duplicates  0
        <BLANKLINE>
        field  samples  missing  bytes  mean
        txt          1        0      5   5.0
        <BLANKLINE>
        field  from  to  samples
        txt       4   7        1  ########################################
        """
        size = sum(sizes.bytes for sizes in self.fields.values())
        head = [f"samples     {self.samples}", f"bytes       {size}", self._describe_duplicates()]
        return "\n".join([*head, "", *self.table("bytes", "mean"), "", *self._bars()] if self.fields else head)

    def _bars(self) -> list[str]:
        rows, marks = [("field", "from", "to", "samples")], [""]
        most = max(max(sizes.histogram.values()) for sizes in self.fields.values())
        for field, sizes in sorted(self.fields.items()):
            for power, count in sorted(sizes.histogram.items()):
                rows.append((visible(field), str(1 << power >> 1), str((1 << power) - 1), str(count)))
                marks.append("#" * -(-40 * count // most))
        return [f"{row}  {mark}".rstrip() for row, mark in zip(align(rows), marks)]

    def _describe_duplicates(self) -> str:
        some = ", ".join(f"{visible(key)} ({again + 1} times)" for key, again in self.duplicates.most_common(5))
        more = ", …" if len(self.duplicates) > 5 else ""
        return f"duplicates  {len(self.duplicates)}{some and ': ' + some}{more}"
