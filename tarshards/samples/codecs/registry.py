"""The registry of decoders and encoders by extension; built-in codecs and users register with the same decorators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from tarshards.errors import did_you_mean

DECODERS: dict[str, Callable[[bytes], Any]] = {}
UNSAFE_DECODERS: dict[str, Callable[[bytes], Any]] = {}
ENCODERS: dict[str, Callable[[Any], bytes]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def decoder(*extensions: str, unsafe: bool = False) -> Callable[[Function], Function]:
    """Register ``f(data: bytes) -> value`` for fields with one of *extensions*, replacing an earlier decoder.

    An *unsafe* decoder can run code from the data; it runs only if ``allow_unsafe=True`` is passed.

    >>> @decoder("celsius")
    ... def decode_celsius(data):
    ...     return float(data)
    >>> DECODERS.pop("celsius")(b"21.5")
    21.5
    """

    _check(extensions)

    def register(function: Function) -> Function:
        for extension in extensions:
            if not unsafe:  # otherwise a built-in unsafe decoder would still take precedence
                UNSAFE_DECODERS.pop(extension, None)
            (UNSAFE_DECODERS if unsafe else DECODERS)[extension] = function
        return function

    return register


def encoder(*extensions: str) -> Callable[[Function], Function]:
    """Register ``f(value) -> bytes`` for fields with one of *extensions*, replacing an earlier encoder."""

    _check(extensions)

    def register(function: Function) -> Function:
        ENCODERS.update(dict.fromkeys(extensions, function))
        return function

    return register


def check_spec(kind: str, spec: Any, known: Sequence[str]) -> None:
    """Raise ValueError, which names the *kind*, unless *spec* is one of the *known* specs."""
    if spec not in known:
        raise ValueError(f"unknown {kind} {spec!r}; known: {' '.join(known)}{did_you_mean(spec, known)}")


def require(module: str, *, extra: str) -> Any:
    """Import *module*; if its package is missing, raise ModuleNotFoundError that names the *extra* to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != module.partition(".")[0]:
            raise  # a dependency of the module
        raise ModuleNotFoundError(f"{module} is missing: pip install 'tarshards[{extra}]'", name=exc.name) from exc


def _check(extensions: tuple[str, ...]) -> None:
    for extension in extensions or ("",):
        if not isinstance(extension, str):
            raise TypeError(f'an extension is a str, as in @decoder("png"), not {extension!r}')
        if not extension or extension != extension.lower() or "." in extension or extension == "gz":
            raise ValueError(f"{extension!r} is not an extension: use lower case, no dot, and not gz (built in)")
