"""JSON Patch (RFC 6902) with the operations add, remove, replace and test, at the places of JSON Pointer (RFC 6901)."""

from __future__ import annotations

import copy
import re
from typing import Any

OPERATIONS = ("add", "remove", "replace", "test")


def apply_patch(document: Any, operations: list[dict[str, Any]]) -> Any:
    """Return a copy of *document* with the operations applied; raise ValueError if one cannot be applied.

    >>> apply_patch({"a": [1, 3]}, [{"op": "add", "path": "/a/1", "value": 2}])
    {'a': [1, 2, 3]}
    """
    document = copy.deepcopy(document)
    for number, operation in enumerate(operations, start=1):
        try:
            document = _apply(document, operation)
        except (LookupError, TypeError, ValueError) as error:
            what = f"{operation.get('op')} {operation.get('path')}"
            reason = f"there is no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"operation {number} of the patch, {what}: {reason}") from error
    return document


def _apply(document: Any, operation: dict[str, Any]) -> Any:
    name, root = operation["op"], {"": document}  # the whole document has a parent, too
    if name not in OPERATIONS:
        raise ValueError(f"the operations are {', '.join(OPERATIONS)}")
    *parents, last = ["", *_tokens(operation["path"])]
    parent: Any = root
    for token in parents:
        parent = parent[_key(parent, token)]
    if name == "add":
        value = copy.deepcopy(operation["value"])
        if isinstance(parent, list):
            index = len(parent) if last == "-" else _key(parent, last)
            if index > len(parent):
                raise IndexError(f"the list has {len(parent)} items")
            parent.insert(index, value)
        else:
            parent[_key(parent, last)] = value
        return root[""]
    key = _key(parent, last)
    found = parent[key]
    if name == "test" and found != operation["value"]:
        raise ValueError(f"the value is {found!r}")
    if name == "replace":
        parent[key] = copy.deepcopy(operation["value"])
    if name == "remove":
        del parent[key]
    return root[""]


def _tokens(pointer: str) -> list[str]:
    """Split a JSON Pointer.

    >>> _tokens("/metadata/labels/example.com~1team")
    ['metadata', 'labels', 'example.com/team']
    """
    if pointer and not pointer.startswith("/"):
        raise ValueError("a path starts with /")
    return [token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:]]


def _key(parent: Any, token: str) -> Any:
    """Return *token* as a key of *parent*, an object or a list."""
    if isinstance(parent, dict):
        return token
    if not isinstance(parent, list):
        raise KeyError(token)
    if not re.fullmatch(r"0|[1-9]\d*", token):
        raise ValueError(f"{token!r} is not an index of a list")
    return int(token)
