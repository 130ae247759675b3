"""The registry of codecs by extension: of users and built in, and of families that decode as a word asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from tarshards.errors import did_you_mean, shortened

DECODERS: dict[str, Callable[[bytes], Any]] = {}
UNSAFE_DECODERS: dict[str, Callable[[bytes], Any]] = {}
ENCODERS: dict[str, Callable[[Any], bytes]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])
Measure = Callable[[str, bytes], Any]


class SpecFamily(NamedTuple):
    """Words that choose among the forms of some values, such as the imagespecs.

    Fields with these *extensions* stay bytes unless ``decode`` gets one of the *words*: then ``decode(data, word)`` is
    their value, with those options of ``decode`` that *flags* name as keywords. Each word stands for a form, which only
    ``decode`` understands. The *measures* of a field, by the names
    that columns have for them, are functions of its name and its bytes. *spec* and *values* stand in messages.
    """

    spec: str
    values: str
    words: Mapping[str, Any]
    extensions: frozenset[str]
    decode: Callable[..., Any]
    flags: tuple[str, ...] = ()
    measures: Mapping[str, Measure] = MappingProxyType({})

    def has(self, field: str) -> bool:
        """Return whether a field has one of the extensions."""
        return field.rpartition(".")[2] in self.extensions

    def check(self, word: Any) -> str:
        """Return *word*; raise TypeError or ValueError unless it is one of the family."""
        if isinstance(word, str) and word in self.words:
            return word
        if not isinstance(word, str):
            wanted = f'an {self.spec} for all {self.values} is a str such as "rgb8", not {shortened(word)}'
            advice = "the other fields need none, and decode({field: function}) decodes one by itself"
            raise TypeError(f"{wanted}; {advice}")
        raise ValueError(f"unknown {self.spec} {word!r}; known: {' '.join(self.words)}{did_you_mean(word, self.words)}")

    def add(self) -> None:
        """Register the family."""
        FAMILY_OF_WORD.update(dict.fromkeys(self.words, self))
        FAMILY_OF_EXTENSION.update(dict.fromkeys(self.extensions, self))
        MEASURES.update(self.measures)


FAMILY_OF_WORD: dict[str, SpecFamily] = {}
FAMILY_OF_EXTENSION: dict[str, SpecFamily] = {}
MEASURES: dict[str, Measure] = {}


@lru_cache
def decoder_of(word: str, **flags: bool) -> Callable[[bytes], Any]:
    """Return the function of bytes that decodes as *word* says, with those of the *flags* that its family has."""
    family = FAMILY_OF_WORD[word]
    return partial(family.decode, **{family.spec: word}, **{name: flags[name] for name in family.flags})


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


def require(module: str, *, extra: str) -> Any:
    """Import *module*; if its package is missing, raise ModuleNotFoundError that names the *extra* to install.

    Where several extras have builds of the package, *extra* is all of them: "dali dali13".
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != module.partition(".")[0]:
            raise  # a dependency of the module
        cure = " or ".join(f"pip install 'tarshards[{each}]'" for each in extra.split())
        if extra == "torch":
            cure += "; for CPUs only, first install its CPU build: pytorch.org/get-started"
        raise ModuleNotFoundError(f"{module} is missing: {cure}", name=exc.name) from exc


def _check(extensions: tuple[str, ...]) -> None:
    for extension in extensions or ("",):
        if not isinstance(extension, str):
            raise TypeError(f'an extension is a str, as in @decoder("png"), not {extension!r}')
        if not extension or extension != extension.lower() or "." in extension or extension == "gz":
            raise ValueError(f"{extension!r} is not an extension: use lower case, no dot, and not gz (built in)")
