"""Lines of text: with locations, with escapes that preserve every byte, as keys, and as samples to check."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO, RawIOBase
from itertools import islice
from typing import Any

from tarshards.errors import DecodeError, OpenError, SampleError, TarshardsError, visible
from tarshards.samples.codecs.basic import encoding_of
from tarshards.samples.keys import Sample, is_reserved, join_name
from tarshards.samples.ledger import OnError
from tarshards.samples.seen_keys import SeenKeys
from tarshards.storage.compression import bomb_in
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard
from tarshards.storage.streams import BUFFER, read_some

NAMED = 5  # missing keys that one error names
_ESCAPES = {b"\\": rb"\\", b"\t": rb"\t", b"\n": rb"\n", b"\r": rb"\r"}
_PLAIN = {escaped: plain for plain, escaped in _ESCAPES.items()}


@contextmanager
def open_text(url: str | Location, begin: int = 0, end: int | None = None) -> Iterator[BufferedReader[Any]]:
    """Open a text, decompressed and as UTF-8; with *begin* and *end*, only the part between these bytes.

    The text is in UTF-8, or in the encoding of its byte order mark, which is removed. *begin* and *end* are offsets in
    what is read. Without *end*, the ``raw`` stream is a ``Utf8``.
    """
    size = None if end is None else end - begin
    with open_shard(url) as stream:
        text = Utf8(stream, Location.of(url).name)
        if begin and text.mark is not None and stream.seekable():
            text.start_at(begin)
            begin = 0
        while begin and (skipped := text.read(min(begin, BUFFER))):
            begin -= len(skipped)
        with BufferedReader(text if size is None else _Part(text, size), BUFFER) as lines:
            yield lines


def numbered_lines(url: str | Location) -> Iterator[tuple[str, str]]:
    """Yield ``(location, line)`` for every line of a text, without its newline; a location is like ``a.txt: line 7``.

    Raises DecodeError for a line that is not UTF-8.
    """
    name = Location.of(url).name
    with open_text(url) as lines:
        for number, line in enumerate(lines, 1):
            origin = f"{name}: line {number}"
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise DecodeError("not UTF-8", url=origin) from error
            yield origin, text.removesuffix("\n")


class Utf8(RawIOBase):
    """The bytes of a text in UTF-8, without its byte order mark: *stream*, decoded if the mark says UTF-16 or UTF-32.

    ``mark`` is the size of the mark of a UTF-8 text, 0 without one, and None for another encoding, in which offsets in
    the text are not those in the file. Raises DecodeError, with *name*, for bytes not in that encoding, and OpenError
    for a line that is a decompression bomb.
    """

    def __init__(self, stream: Any, name: str):
        self.stream = stream
        self._name = name
        self._decoder: codecs.IncrementalDecoder | None = None
        self._held = 0  # bytes since the last newline, which are held until the line ends
        self.mark: int | None = 0
        head = b""
        while len(head) < len(codecs.BOM_UTF32) and (more := read_some(stream, len(codecs.BOM_UTF32) - len(head))):
            head += more
        encoding = encoding_of(head)
        if encoding == "utf-8-sig":
            self.mark = len(codecs.BOM_UTF8)
        elif encoding != "utf-8":
            self.mark = None
            self._decoder = codecs.getincrementaldecoder(encoding)()
        self._rest = self._decoded(head)[self.mark or 0 :]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (data := read_some(self.stream, len(buffer))):
            self._held = len(data) - data.rindex(b"\n") if b"\n" in data else self._held + len(data)
            if reason := bomb_in(self.stream, self._held):
                raise OpenError(f"a line without end: {reason}", url=self._name)
            self._rest = self._decoded(data)
        if not self._rest:
            self._decoded(b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def _decoded(self, data: bytes) -> bytes:
        if self._decoder is None:
            return data
        try:
            return self._decoder.decode(data, not data).encode()
        except UnicodeError as error:
            raise DecodeError(f"not in the encoding of its byte order mark: {error}", url=self._name) from error

    def size_in_file(self) -> int | None:
        """Return the size of a UTF-8 text without its mark if it is the content of a local file, else None."""
        is_content = self.mark is not None and isinstance(self.stream, FileIO)
        return os.fstat(self.stream.fileno()).st_size - (self.mark or 0) if is_content else None

    def start_at(self, offset: int) -> None:
        """Begin at an *offset* in a UTF-8 text whose stream can seek."""
        self.stream.seek(offset + (self.mark or 0))
        self._rest = b""

    def close(self) -> None:
        self.stream.close()
        super().close()


class _Part(RawIOBase):
    """The next *size* bytes of a stream."""

    def __init__(self, stream: Any, size: int):
        self._stream, self._left = stream, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


@contextmanager
def located(origin: str) -> Iterator[None]:
    """Prefix errors with *origin*, the location of a line; a ValueError becomes a SampleError."""
    try:
        yield
    except TarshardsError as error:
        raise type(error)(str(error), url=origin) from error
    except ValueError as error:
        raise SampleError(str(error), url=origin) from error


def escape(text: str | bytes) -> str:
    r"""Write *text*, or any bytes, as the text of a cell.

    >>> print(escape(b"a\tb\\\xff\0\n"))
    a\tb\\\xff\x00\n
    """
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    escaped = re.sub(rb"[\x00-\x1f\x7f\\]", lambda match: _ESCAPES.get(match[0]) or rb"\x%02x" % ord(match[0]), data)
    return escaped.decode(errors="backslashreplace")


def escape_bytes(text: str) -> str:
    r"""Write every byte of *text*, in UTF-8, as the escape that ``unescape`` reads: ``\x9b`` as ``\xc2\x9b``."""
    return "".join(f"\\x{byte:02x}" for byte in text.encode(errors="surrogateescape"))


def unescape(text: str) -> bytes:
    r"""Return the bytes that ``escape`` wrote as *text*; raise ValueError for an unknown escape.

    >>> unescape(r"a\tb\\\xff")
    b'a\tb\\\xff'
    """

    def plain(match: re.Match[bytes]) -> bytes:
        if match[0] in _PLAIN:
            return _PLAIN[match[0]]
        if match[1] is None:
            raise ValueError(f"{match[0].decode(errors='replace')} in {text!r} is not an escape")
        return bytes.fromhex(match[1].decode())

    return re.sub(rb"\\(?:x([0-9a-f]{2})|.|$)", plain, text.encode(), flags=re.DOTALL)


def read_keys(url: str | Location) -> Iterator[str]:
    """Yield the keys in the text *url*, one per line, escaped as in a table; blank lines are ignored."""
    for origin, line in numbered_lines(url):
        if line.strip():
            with located(origin):
                key = unescape(line.removesuffix("\r")).decode(errors="surrogateescape")
            yield key


def lacking_keys(lacking: Collection[str], wanted: int) -> SampleError:
    """Return the error that no sample has the *lacking* ones of *wanted* keys; it names the first few, escaped.

    >>> print(lacking_keys(["a", "b"], 7))
    no sample has 2 of 7 keys: a, b
    """
    names = list(map(_spelled, islice(lacking, NAMED)))
    names += ["..."] * (len(lacking) > NAMED)
    return SampleError(f"no sample has {len(lacking)} of {wanted} keys: {', '.join(names)}")


def _spelled(key: str) -> str:
    try:
        return escape(key)
    except UnicodeEncodeError:  # cannot be a key in a tar
        return visible(key)


def checked(samples: Iterable[Sample | TarshardsError], on_error: OnError | None = None) -> Iterator[Sample]:
    """Yield the samples; raise SampleError, with the location, for a duplicate key or one that does not read back.

    These errors, and those that are in place of samples, are passed to *on_error* instead, if it is given.
    """
    seen = SeenKeys()
    for sample in samples:
        try:
            _check(sample, seen)
        except TarshardsError as error:
            if on_error is None:
                raise
            on_error(error)
        else:
            yield sample  # type: ignore[misc]


def _check(sample: Sample | TarshardsError, seen: SeenKeys) -> None:
    if isinstance(sample, TarshardsError):
        raise sample
    origin, key = sample["__url__"], sample["__key__"]
    with located(origin):
        fields = [field for field in sample if not is_reserved(field)]
        if not fields:
            raise SampleError("a sample without fields cannot be written", key=key)
        for field in fields:
            join_name(key, field)
        if key in seen:
            raise SampleError("duplicate key", key=key)
    seen.add(key)
