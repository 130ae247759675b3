"""Decoding the fields of samples: by a function for a field, by handlers, or by the extension."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from tarshards.errors import DecodeError, check_function, did_you_mean, flag, shortened, visible
from tarshards.samples.codecs import ByExtension
from tarshards.samples.codecs.image import IMAGES
from tarshards.samples.codecs.registry import FAMILY_OF_WORD, decoder_of
from tarshards.samples.fields import check_name, split_fields
from tarshards.samples.keys import is_reserved
from tarshards.storage.compression import gunzip
from tarshards.storage.remote import check_ratio

PATIENCE = 100  # samples without a named field before a warning
MOST_CHOICES = 10_000  # names of fields remembered

#: Decodes the bytes of a field.
Function = Callable[[bytes], Any]
#: Decodes a field by its name and its bytes, or returns None to leave it to the next handler.
Handler = Callable[[str, bytes], Any]


class FieldChoice(NamedTuple):
    """How to decode the fields with a name: not at all unless *is_wanted*; by *function*, if there is one.

    With *is_packed*, the data is decompressed by gzip before the function gets them.
    """

    is_wanted: bool
    function: Function | None
    is_packed: bool


class Decoding:
    """Decodes fields by *functions*, then by *handlers*, then *by_extension*; with *only*, others stay unchanged.

    *functions* and *only* have alternatives of names as keys. A name matches fields with that name or ending in it
    after a dot; the longest of several applies.
    """

    def __init__(
        self,
        functions: Iterable[tuple[tuple[str, ...], Function]],
        handlers: tuple[Handler, ...],
        only: tuple[tuple[str, ...], ...] | None,
        by_extension: ByExtension,
    ):
        self.functions: dict[str, Function] = {name: function for names, function in functions for name in names}
        self.handlers = handlers
        self.only: set[str] | None = None if only is None else {name for names in only for name in names}
        self.by_extension = by_extension
        self.unseen: list[tuple[str, ...]] = [names for names, _ in functions] + list(only or ())
        self.samples: int = 0
        self._fields: set[str] = set()  # of the samples, while names are unseen
        self._choices: dict[str, FieldChoice] = {}

    def __call__(self, field: str, data: bytes) -> Any:
        """Return the value of a *field*; raise DecodeError with the field."""
        choice = self._choices.get(field) or self._choose(field)
        if not choice.is_wanted:
            return data
        try:
            if choice.function is not None:
                return choice.function(gunzip(data, self.by_extension.max_ratio) if choice.is_packed else data)
            for handler in self.handlers:
                if (value := handler(field, data)) is not None:
                    return value
        except Exception as error:
            reason = DecodeError.because(error).reason
            raise DecodeError(f"{type(error).__name__}: {reason}", field=field) from error
        return self.by_extension.decode(field, data)

    def _choose(self, field: str) -> FieldChoice:
        """Return how to decode the fields with a name."""
        whole = _endings(field)
        inner = _endings(field[:-3]) if field.lower().endswith(".gz") else []
        names = whole + inner
        self.unseen = [group for group in self.unseen if not {*group} & {*names}]
        name = next((name for name in names if name in self.functions), None)
        is_wanted = self.only is None or not self.only.isdisjoint(names)
        if len(self._choices) >= MOST_CHOICES:
            self._choices.clear()
        function = None if name is None else self.functions[name]
        choice = FieldChoice(is_wanted, function, name in inner and name not in whole)
        self._choices[field] = choice
        return choice

    def watched(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Yield *samples*, to be decoded next; after PATIENCE of them, log a warning of names that matched no field."""
        for sample in samples:
            yield sample
            self.samples += 1
            if self.unseen:
                self._fields.update(field for field in sample if not is_reserved(field))
                if self.samples >= PATIENCE:
                    self.warn()

    def expect(self, fields: Iterable[str]) -> None:
        """Log the warning before the first sample: *fields* are those of the first shard."""
        for field in fields:
            self._choose(field)
        self._fields.update(fields)
        self._warn("no sample of the first shard")

    def warn(self) -> None:
        """Log a warning of the names that matched no field of the samples, if there are any names and samples."""
        self._warn(f"none of the first {self.samples} samples")

    def _warn(self, samples: str) -> None:
        import logging

        known = sorted(self._fields)
        for names in self.unseen if known else ():
            decoded = [field for field in known if not {*names}.isdisjoint(_endings(field))]
            hint = next(filter(None, (did_you_mean(name, known) for name in names)), "")
            words = f"{samples} has a field {' or '.join(names)}; they have {', '.join(known)}{hint}"
            if decoded:
                words = f"{' and '.join(decoded)} is not bytes and stays unchanged; one decode() takes all functions"
            logging.getLogger("tarshards").warning("%s", visible(f"decode: {words}"))
        if known:
            self.unseen = []


def _endings(field: str) -> list[str]:
    """Return the names that match a field, the longest first.

    >>> _endings("left.seg.PNG")
    ['left.seg.png', 'seg.png', 'png']
    """
    parts = field.lower().split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def decoding_of(
    images: Any = None,
    *others: Any,
    only: Any = None,
    exif_transpose: bool = False,
    rotate: bool = True,
    allow_unsafe: bool = False,
    max_ratio: float | None = None,
    on_error: Any = None,
    **by_field: Any,
) -> Callable[[str, bytes], Any]:
    """Return the Decoding for the arguments of the op ``decode``; the same object for the same arguments.

    Raises TypeError or ValueError for an invalid argument.
    """
    allow_unsafe = flag("allow_unsafe", allow_unsafe)
    exif_transpose, rotate = flag("exif_transpose", exif_transpose), flag("rotate", rotate)
    if max_ratio is not None:
        check_ratio(max_ratio)
    words: dict[str, str] = {}
    handlers, named = [], []
    for decoder in (images, *others):
        if isinstance(decoder, Mapping):
            named += [(tuple(check_name(names).lower().split(";")), value) for names, value in decoder.items()]
        elif callable(decoder):
            check_function(decoder, "decode")
            handlers.append(decoder)
        elif decoder is not None:
            family = FAMILY_OF_WORD.get(decoder, IMAGES) if isinstance(decoder, str) else IMAGES
            if family.spec in words:
                given = f"{words[family.spec]!r} and {shortened(decoder)}"
                raise ValueError(f"decode takes one {family.spec} for all {family.values}, not {given}")
            words[family.spec] = family.check(decoder)
    if "handler" in by_field:
        raise TypeError("decode has no handler=: on_error= takes a function of the error; {'handler': f} names a field")
    named += [((name.lower(),), value) for name, value in by_field.items()]
    functions = tuple((names, _function(";".join(names), value, exif_transpose, rotate)) for names, value in named)
    by_extension = ByExtension(tuple(words.values()), exif_transpose, rotate, allow_unsafe, max_ratio)
    if not functions and not handlers and only is None:
        return by_extension.decode
    arguments = functions, tuple(handlers), None if only is None else _names(only), by_extension
    try:
        hash(arguments)
    except TypeError:  # a function may be an unhashable object
        return Decoding(*arguments)
    return _decoding(*arguments)


@lru_cache(16)  # a loader runs the op on each batch, and all batches share the names seen
def _decoding(*arguments: Any) -> Decoding:
    return Decoding(*arguments)


def _names(only: Any) -> tuple[tuple[str, ...], ...]:
    if isinstance(only, Mapping | bytes) or not isinstance(only, Iterable):
        raise TypeError(f"only= takes names of fields, in one string or a list, not {shortened(only)}")
    words = split_fields((only,) if isinstance(only, str) else tuple(only))
    return tuple(tuple(map(str.lower, names)) for names in words)


def _function(field: str, value: Any, exif_transpose: bool, rotate: bool) -> Function:
    """Return the function that decodes a *field*; also for an imagespec, audiospec or videospec."""
    if isinstance(value, str):
        if value not in FAMILY_OF_WORD:
            IMAGES.check(value)
        return decoder_of(value, exif_transpose=exif_transpose, rotate=rotate)
    if callable(value):
        check_function(value, "decode")
        return value
    hint = did_you_mean(field, ["images", "only", "exif_transpose", "rotate", "allow_unsafe", "max_ratio", "on_error"])
    raise TypeError(f"{field}= is a function of bytes, or an imagespec, for that field, not {shortened(value)}{hint}")
