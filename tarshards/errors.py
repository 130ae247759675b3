"""The error tree; every error says where in the data it happened.

TarshardsError
├── OpenError        (OSError) a URL that cannot be opened, or fails while it is read or written
├── UrlError         (ValueError) an invalid shard expression or URL
├── TarError         (ValueError) bytes that are not a complete, valid tar archive
├── SampleError      (ValueError) members that do not form samples, or samples that do not form members
├── OpError          (ValueError) a user's function that failed on a sample
├── DecodeError      (ValueError) a field whose bytes do not decode
├── EncodeError      (ValueError) a field whose value does not encode
├── WorldError       (ValueError) ranks, workers and shards that do not match
├── ShardIndexError  (ValueError) an index that is missing, stale or damaged
├── StateError       (ValueError) a state from another dataset, version or kind of run
└── AuditError       (ValueError) samples that were neither delivered nor accounted for

Each is also the Python error in brackets, so ``except OSError`` catches every failure of a URL. Bad arguments raise
Python's own TypeError and ValueError; the functions at the end check them.
"""

from __future__ import annotations

import copyreg
import operator
import re
import sys
from collections.abc import Iterable
from typing import Any, Self


class TarshardsError(Exception):
    """Base of all errors; *url*, *offset* (bytes), *key* and *field* are None if unknown.

    *cost* tells a ledger what is left out if reading continues after the error.

    >>> str(TarshardsError("bad checksum", url="a.tar", offset=512))
    'a.tar: offset 512: bad checksum'
    """

    cost = ""

    def __init__(
        self,
        reason: str,
        *,
        url: str | None = None,
        offset: int | None = None,
        key: str | None = None,
        field: str | None = None,
    ):
        self.reason = reason
        self.url = url
        self.offset = offset
        self.key = key
        self.field = field
        name = ".".join(part for part in (key, field) if part is not None) or None
        origin = [url, None if offset is None else f"offset {offset}", name]
        super().__init__(": ".join([part for part in origin if part is not None] + [reason]))
        if _is_in_worker():
            self.__class__ = _class_of(self)

    @classmethod
    def because(cls, cause: Exception, field: str | None = None) -> Self:
        """Return an error with the message of its *cause*, in one line."""
        error = cls(str(cause).strip().partition("\n")[0][:300] or type(cause).__name__, field=field)
        error.__cause__ = cause
        return error

    def at(self, sample: Any) -> Self:
        """Return this error with the shard and key of *sample*, without any if that is no dict, and with its field."""
        origin = sample if isinstance(sample, dict) else {}
        return type(self)(self.reason, url=origin.get("__url__"), key=origin.get("__key__"), field=self.field)

    def __reduce__(self) -> Any:
        return _rebuild, (_kind_of(self), self.args), vars(self)


def _rebuild(kind: type[TarshardsError], arguments: tuple[Any, ...]) -> TarshardsError:
    """Return an error with only its text; the pickle sets the rest, notes included, as attributes."""
    error = kind.__new__(kind)
    error.args = arguments
    return error


# A worker of torch's DataLoader does not send the error but its class, and the traceback as text; the loader then calls
# # the class with the text. So in a worker each error gets its own class, and the pickle of that class contains the
# error.


class _ClassOfOne(type):
    """The class of a single error; *error* is the pickle of that error."""

    error: tuple[Any, ...]


def _is_in_worker() -> bool:
    info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    return info is not None and info() is not None


def _kind_of(error: TarshardsError) -> Any:
    """Return the class of *error* that others can import."""
    kind = type(error)
    return kind.__base__ if isinstance(kind, _ClassOfOne) else kind


def _class_of(error: TarshardsError) -> Any:
    """Return a class for only *error*, which looks like its real class; attributes set later are included."""
    kind = _kind_of(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "error": error.__reduce__()}
    return _ClassOfOne(kind.__name__, (kind,), names)


def _pickle_class(kind: _ClassOfOne) -> Any:
    import pickle

    build, arguments, state = kind.error
    try:
        pickle.dumps(state)
    except Exception:  # a user's attribute cannot be pickled, and the DataLoader would wait for it forever
        state = {name: value for name, value in state.items() if isinstance(value, str | int | None)}
    return _Arrived, (build, arguments, state)


copyreg.pickle(_ClassOfOne, _pickle_class)


class _Arrived:
    """The class of an error when a DataLoader raises it again: called with the text, it returns the error."""

    def __init__(self, build: Any, arguments: tuple[Any, ...], state: dict[str, Any]):
        self.__name__ = arguments[0].__name__
        self._error = build(*arguments)
        self._error.__setstate__(state)

    def __call__(self, text: str) -> TarshardsError:
        error: TarshardsError = self._error
        error.__cause__ = RemoteTraceback(text)
        return error


class RemoteTraceback(Exception):
    """The traceback of an error in its original process, as text: the cause of the unpickled error."""


class OpenError(TarshardsError, OSError):
    """A URL that cannot be opened, or fails while it is read or written.

    *errno* is that of the underlying OSError, or ENOENT if a server reports a missing file; None if unknown.

    >>> error = OpenError("no answer", url="http://host/a.tar")
    >>> error.filename, error.strerror, error.errno
    ('http://host/a.tar', 'no answer', None)
    """

    # OSError changes the text of an error that sets its own attributes with these names.
    errno: int | None = None

    def __init__(self, reason: str, *, errno: int | None = None, **origin: Any):
        super().__init__(reason, **origin)
        self.errno = errno

    @property
    def filename(self) -> str | None:
        """The URL, under OSError's name."""
        return self.url

    @property
    def strerror(self) -> str:  # type: ignore[override]
        """The reason, under OSError's name."""
        return self.reason


class UrlError(TarshardsError, ValueError):
    """An invalid shard expression or URL."""


class TarError(TarshardsError, ValueError):
    """Bytes that are not a complete, valid tar archive."""


class SampleError(TarshardsError, ValueError):
    """Members that do not form samples, or samples that do not form members."""


class OpError(TarshardsError, ValueError):
    """A user's function that failed on a sample; its own exception is the cause."""


class DecodeError(TarshardsError, ValueError):
    """A field whose bytes do not decode."""


class EncodeError(TarshardsError, ValueError):
    """A field whose value does not encode."""


class WorldError(TarshardsError, ValueError):
    """Ranks, workers and shards that do not match."""


class ShardIndexError(TarshardsError, ValueError):
    """An index that is missing, stale or damaged."""


class StateError(TarshardsError, ValueError):
    """A state from another dataset, version or kind of run."""


class AuditError(TarshardsError, ValueError):
    """Samples that were neither delivered nor accounted for."""


# Checks of arguments, used where they enter the package.


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return the argument *name* as an int: any integer, also numpy's, but not a bool.

    Raises TypeError for anything else, and ValueError for less than *least*.

    >>> whole_number("batch_size", "64")
    Traceback (most recent call last):
    TypeError: batch_size must be a whole number, not '64'
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, not {shortened(value)}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number


def flag(name: str, value: Any, advice: str = "") -> bool:
    """Return the argument *name* as a bool; raise TypeError, which ends in *advice*, unless it is True or False.

    >>> flag("allow_pipe", "no")
    Traceback (most recent call last):
    TypeError: allow_pipe must be True or False, not 'no'
    """
    is_flag = value in (True, False) if isinstance(value, int) else type(value).__name__ in ("bool", "bool_")
    if not is_flag:
        raise TypeError(f"{name} must be True or False, not {shortened(value)}{advice}")
    return bool(value)


def visible(text: str) -> str:
    r"""Escape control characters, line breaks, and bytes that are not UTF-8, in untrusted names.

    >>> visible("tab\there \x1b[31m"), visible("latin\udce9")
    ('tab\\there \\x1b[31m', 'latin\\xe9')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1].replace("\\udc", "\\x") for c in text)


def shortened(value: Any) -> str:
    """Return the form of an argument in messages: its repr, without addresses, in one line of at most 100 characters.

    >>> shortened("64"), len(shortened("64" * 99)), shortened(object())
    ("'64'", 100, '<object object>')
    """
    text = re.sub(" at 0x[0-9a-f]+>", ">", " ".join(repr(value).split()))
    return text if len(text) <= 100 else f"{text[:97]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question for the closest of *known* to *name*, ignoring case; "" if none is close.

    >>> did_you_mean("PNG", ["cls", "png"]), did_you_mean("txt", ["cls", "png"])
    ("; did you mean 'png'?", '')
    """
    from difflib import get_close_matches

    names = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def is_coroutine_function(function: Any) -> bool:
    """Return whether *function* returns a coroutine: an ``async def``, an object with one, or a partial of either.

    >>> is_coroutine_function(str)
    False
    """
    from functools import partial
    from inspect import iscoroutinefunction

    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or (callable(function) and iscoroutinefunction(type(function).__call__))


def check_function(function: Any, caller: str) -> None:
    """Raise TypeError, which names *caller*, unless *function* is a function whose result need not be awaited."""
    if not callable(function):
        raise TypeError(f"{caller} takes a function, not {shortened(function)}")
    if is_coroutine_function(function):
        raise TypeError(f"{caller} does not await the async function {shortened(function)}; use async_map()")
