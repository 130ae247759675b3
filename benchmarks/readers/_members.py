"""What readers share that give members, or take files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

RULE = re.compile(r"^((?:.*/|)[^./]+)[.]([^/]*)$", re.DOTALL)


def one_file(expression: str) -> str:
    if "{" in expression:
        raise NotImplementedError("takes the paths of files, no expressions")
    return expression


def grouped(members: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield samples of adjacent members with the same key, by the rule of the convention."""
    sample: dict[str, Any] = {}
    for name, data in members:
        match = RULE.match(name)
        if match is None or any(re.fullmatch("__.*__", part) for part in name.split("/")):
            continue
        key, field = match[1], match[2].lower()
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        if field in sample:
            raise ValueError(f"{name}: a field twice")
        sample["__key__"] = key
        sample[field] = bytes(data)
    if sample:
        yield sample
