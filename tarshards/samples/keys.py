"""Split the name of a member into key and field: at the first dot of its base name, as WebDataset does, or the last."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, TypeAlias

from tarshards.errors import SampleError, shortened

#: ``__key__``, ``__url__``, and one entry for each field.
Sample = dict[str, Any]

#: The entries of a sample besides its fields; a member with such a field is a fault of its sample.
NO_FIELDS = frozenset(("__key__", "__url__"))

#: Splits a member's name into key and field; returns None for a name without a key.
KeyRule = Callable[[str], tuple[str, str] | None]

#: The named rules: names are split at the first dot of their base name, or at the last.
Split: TypeAlias = Literal["first", "last"]

USUAL = 64  # members of a sample; more than these may have been merged by dots in their keys
DOTS = 'are there dots in the keys? `--split last` (split="last") splits names at their last dot'

# Why members do not form a sample.
DUPLICATE_FIELD = "duplicate field"
NOT_ADJACENT = "members of this key are not adjacent"
REGROUP = "`tarsort --regroup` groups them, or pack with `tar --sort=name`"
INCOMPLETE = "incomplete"  # a member of the sample has no content; the reason follows


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


def split_last(name: str) -> tuple[str, str] | None:
    """Split the name of a member like ``split_name``, but at the last dot of its base name.

    >>> split_last("a/img_0.000001.JPG"), split_last(".hidden.jpg")
    (('a/img_0.000001', 'jpg'), None)
    """
    if split_name(name) is None:
        return None
    key, _, field = name.rpartition(".")
    return key, field.lower()


_RULES: dict[str, KeyRule] = {"first": split_name, "last": split_last}


def key_rule(split: Any) -> KeyRule:
    """Return the rule for *split*, a name or a function; raise TypeError or ValueError for anything else."""
    if isinstance(split, str):
        if split not in _RULES:
            raise ValueError(f'split is "first", "last" or a function, not {split!r}')
        return _RULES[split]
    if not callable(split):
        words = f'split must be "first", "last" or a function of a member\'s name, not {shortened(split)}'
        raise TypeError(words)
    return split


def split_of(rule: KeyRule) -> Split | None:
    """Return the name of a rule; None for a user's own."""
    return "first" if rule is split_name else "last" if rule is split_last else None


def have_dots_in_key(fields: Collection[str]) -> bool:
    """Return whether so many *fields* of a sample begin with numbers that dots in keys must have merged samples.

    >>> have_dots_in_key([f"{number:06d}.jpg" for number in range(100)]), have_dots_in_key(["jpg", "1.txt"])
    (True, False)
    """
    return len(fields) > USUAL and 2 * sum(field.partition(".")[0].isdigit() for field in fields) > len(fields)


def dots_in_key(number: int, field: str) -> str:
    """Return the message about a sample with *number* fields, such as *field*, and the remedy."""
    return f"{number} fields, such as {field}: {DOTS}"


def is_reserved(name: str) -> bool:
    """Return whether a component of *name* has the form ``__x__``.

    >>> is_reserved("a/__key__"), is_reserved("a__b__")
    (True, False)
    """
    return "__" in name and any(part.startswith("__") and part.endswith("__") for part in name.split("/"))


def why_skipped(name: str, kind: str | None = None) -> str:
    """Return why a member belongs to no sample: its *kind*, such as a directory, or else its name.

    >>> why_skipped("README"), why_skipped("__a__/b.txt"), why_skipped("a/", "directory")
    ('no extension', 'reserved name', 'directory')
    """
    return kind or ("reserved name" if is_reserved(name) else "no extension")


def no_partner(key: str, where: str) -> str:
    """Return the message that *where* has no sample with *key*.

    >>> no_partner("a", "y.tar"), no_partner("./a", "y.tar")[:50]
    ('no sample of this key in y.tar', 'no sample of this key in y.tar; this key begins wi')
    """
    hint = "; this key begins with ./, as `tar -c .` writes names: keys with and without it differ"
    return f"no sample of this key in {where}{hint if key.startswith('./') else ''}"


def why_refused(field: str | None, missing: object = None) -> str:
    """Return why a sample is at fault: its first faulty member has this *field*, or None if its key occurred before.

    *missing* says why this member has no content; if it is None, the field is a duplicate.

    >>> why_refused(None), why_refused("jpg"), why_refused("jpg", "a link to nothing")
    ('members of this key are not adjacent', 'duplicate field', 'incomplete: a link to nothing')
    """
    if field is None:
        return NOT_ADJACENT
    return DUPLICATE_FIELD if missing is None else f"{INCOMPLETE}: {missing}"


def with_remedy(reason: str) -> str:
    """Return the *reason* of ``why_refused``, and what to do about it if a tool cures it; indexes have it without."""
    return f"{NOT_ADJACENT}; {REGROUP}" if reason == NOT_ADJACENT else reason


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
