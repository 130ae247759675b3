"""One registry from the last part of a field to its decoder and encoder; users extend it with the same decorators."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

DECODERS: dict[str, Callable[[bytes], Any]] = {}
UNSAFE_DECODERS: dict[str, Callable[[bytes], Any]] = {}
ENCODERS: dict[str, Callable[[Any], bytes]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def decoder(*extensions: str, unsafe: bool = False) -> Callable[[Function], Function]:
    """Register ``f(data: bytes) -> value`` for the fields that end in one of *extensions*; the last one counts.

    An *unsafe* decoder can run code from the data, so it runs only where ``allow_unsafe=True`` is passed.

    >>> @decoder("celsius")
    ... def decode_celsius(data):
    ...     return float(data)
    >>> DECODERS.pop("celsius")(b"21.5")
    21.5
    """

    def register(function: Function) -> Function:
        for extension in _checked(extensions):
            if not unsafe:  # or a built-in unsafe one would still come before it
                UNSAFE_DECODERS.pop(extension, None)
            (UNSAFE_DECODERS if unsafe else DECODERS)[extension] = function
        return function

    return register


def encoder(*extensions: str) -> Callable[[Function], Function]:
    """Register ``f(value) -> bytes`` for the fields that end in one of *extensions*; the last one counts."""

    def register(function: Function) -> Function:
        ENCODERS.update(dict.fromkeys(_checked(extensions), function))
        return function

    return register


def require(module: str, *, extra: str) -> Any:
    """Import *module*, or name the extra that brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(f"{module} is missing: pip install 'tarshards[{extra}]'", name=module) from exc


def _checked(extensions: tuple[str, ...]) -> tuple[str, ...]:
    for extension in extensions or ("",):
        if not isinstance(extension, str):
            raise TypeError(f"an extension is a str, not {type(extension).__name__}")
        if not extension or extension != extension.lower() or "." in extension or extension == "gz":
            raise ValueError(
                f"{extension!r} is not an extension: write it in lower case, without a dot; gz is built in"
            )
    return extensions
