"""Split the name of a member into key and field at the first dot of its base name, as WebDataset does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tarshards.errors import SampleError

#: ``__key__``, ``__url__``, and one entry for each field.
Sample = dict[str, Any]

#: How a member's name splits into key and field; None for a name without a key.
KeyRule = Callable[[str], tuple[str, str] | None]

# Why members do not form a sample.
DUPLICATE_FIELD, NOT_ADJACENT = "duplicate field", "members of this key are not adjacent"
INCOMPLETE = "incomplete"  # a member of the sample has no content; what follows says why


def split_name(name: str) -> tuple[str, str] | None:
    """Split the name of a member into its key and its field in lower case; return None for a name without a key.

    Names without a dot, hidden files, and names with a component of the form ``__x__`` have no key.

    >>> split_name("a/b.c/d.seg.JPG")
    ('a/b.c/d', 'seg.jpg')
    >>> split_name("a/README"), split_name(".hidden"), split_name("__meta__/a.json")
    (None, None, None)
    """
    folder, slash, base = name.rpartition("/") if "/" in name else ("", "", name)
    stem, dot, field = base.partition(".")
    if not stem or not dot or ("__" in name and is_reserved(name)):
        return None
    return folder + slash + stem if slash else stem, field.lower()


def is_reserved(name: str) -> bool:
    """Say whether a component of *name* has the form ``__x__``.

    >>> is_reserved("a/__key__"), is_reserved("a__b__")
    (True, False)
    """
    return any(part.startswith("__") and part.endswith("__") for part in name.split("/"))


def join_name(key: str, field: str) -> str:
    """Return the member name of *key* and *field*; raise SampleError if it would not read back as the same two.

    >>> join_name("a/b", "jpg")
    'a/b.jpg'
    >>> join_name("a.b", "txt")
    Traceback (most recent call last):
    tarshards.errors.SampleError: a.b.txt: the name 'a.b.txt' would read back as key 'a', field 'b.txt'
    """
    name = f"{key}.{field}"
    back = split_name(name)
    if back != (key, field) or "\0" in name:
        what = "be skipped" if back is None else f"read back as key {back[0]!r}, field {back[1]!r}"
        what = "break at its NUL byte" if "\0" in name else what
        raise SampleError(f"the name {name!r} would {what}", key=key, field=field)
    return name
