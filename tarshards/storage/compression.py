"""Compressions: detected by the first bytes when reading, chosen by the suffix when writing."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from tarshards.errors import OpenError
from tarshards.storage.remote import check_ratio
from tarshards.storage.streams import BUFFER, PIECE, InputStream, OutputStream, failure, read_some

HEAD = 13  # bytes that identify a compression

# Bytes of one member, field, record or line that are held in memory, whatever they are decompressed from. Beyond that,
# they may be so many times the compressed bytes. Honest data exceeds one of both: archives of small members shrink
# 500-fold, and masks 1,000-fold.
MAX_HELD = 1 << 28
MAX_RATIO: float = 200

# The most memory that a file can make us allocate; `zstd -d` and `xz -d -M256MiB` have the same limits.
_ZSTD_WINDOW = 1 << 27
_PIXZ = bytes.fromhex("a64c322ed614aedb")
_PIXZ_NAME = 1 << 16  # bytes of a name in pixz's index
_XZ_MEMORY = 1 << 28
_TOO_LARGE = {  # messages of zstd and lzma for larger windows: the limit, and what to do
    "Frame requires too much memory": f"{_ZSTD_WINDOW >> 20} MiB (--long=27); 'pipe:zstd -dc --long=31 FILE'",
    "Memory usage limit": f"{_XZ_MEMORY >> 20} MiB; 'pipe:xz -dc FILE'",
}


class Decompressor(Protocol):
    """A decoder of one compressed member, with the interface of bz2's and lzma's."""

    @property
    def needs_input(self) -> bool: ...
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def bomb(plain: int, packed: int, max_ratio: float | None = None) -> str | None:
    """Return why *plain* bytes that come out of *packed* bytes may not be held in memory; None if they may.

    *max_ratio* is by default that of ``accept_ratio``, or else MAX_RATIO.

    >>> bomb(1 << 28, 10), bomb(1 << 29, 1 << 22)
    (None, None)
    >>> print(bomb(1 << 29, 1 << 21))
    more than 256 MiB, and more than 200 times the compressed size, would be held in memory (max_ratio=, --max-ratio)
    """
    max_ratio = _accepted if max_ratio is None else max_ratio
    if plain <= MAX_HELD or plain <= max_ratio * packed:
        return None
    ratio = f"{max_ratio:g} times the compressed size"
    return f"more than {MAX_HELD >> 20} MiB, and more than {ratio}, would be held in memory (max_ratio=, --max-ratio)"


_accepted = MAX_RATIO


def accept_ratio(max_ratio: float) -> None:
    """Accept this ratio in all that this process decompresses without another one: for programs.

    A program also decodes fields, and reads files other than shards, which no options for reading reach.
    """
    global _accepted
    check_ratio(max_ratio)
    _accepted = max_ratio


def bomb_in(stream: Any, held: int, max_ratio: float | None = None) -> str | None:
    """Return why *held* bytes, which come out of *stream* together, may not be held in memory; None if they may."""
    if held <= MAX_HELD or not isinstance(stream, Decompressed):
        return None
    return bomb(held, stream.packed, stream.max_ratio if max_ratio is None else max_ratio)


def read_held(stream: Any, size: int = sys.maxsize) -> bytes:
    """Read the next *size* bytes, fewer only at the end; raise OpenError if they are a decompression bomb."""
    parts, held = [], 0
    while held < size and (data := stream.read(min(size - held, PIECE))):
        parts.append(data)
        held += len(data)
        if reason := bomb_in(stream, held):
            raise OpenError(reason, url=stream.name)
    return b"".join(parts)


def is_pixz_index(pieces: Iterable[bytes]) -> bool:
    """Return whether *pieces* are the index of members that pixz appends to a tar, and nothing else.

    Format: pixz's write.c: the magic, then for each member its name, a zero byte and its offset in 8 bytes; the last
    name is empty, and its offset is that of the index.
    """
    is_begun = is_done = False
    rest = b""
    for piece in pieces:
        rest += piece
        if not is_begun and len(rest) >= len(_PIXZ):
            if not rest.startswith(_PIXZ):
                return False
            is_begun, rest = True, rest[len(_PIXZ) :]
        at = 0
        while is_begun and not is_done and (end := rest.find(b"\0", at)) >= 0 and len(rest) - end > 8:
            is_done, at = end == at, end + 9
        rest = rest[at:]
        if len(rest) > (0 if is_done else _PIXZ_NAME):
            return False
    return is_done and not rest


def without_pixz_index(size: int, read: Callable[[int, int], bytes]) -> int:
    """Return how many of the *size* bytes of a file are before the index that pixz appended; *size* if there is none.

    *read* takes an offset and a size.
    """
    start = int.from_bytes(read(size - 8, 8), "little") if size > 16 else size
    pieces = (read(offset, min(BUFFER, size - offset)) for offset in range(start, size, BUFFER))
    return start if start < size and is_pixz_index(pieces) else size


def gunzip(data: bytes, max_ratio: float | None = None) -> bytes:
    """Decompress gzip data of any number of members; raise ValueError for damaged data and decompression bombs."""
    if find_compression(data) != "gzip":
        raise ValueError("not gzip data")
    import zlib

    whole = zlib.decompressobj(31)  # the usual case: one undamaged member
    with suppress(zlib.error):
        plain = whole.decompress(data, MAX_HELD // 4)
        if whole.eof and not whole.unused_data:
            return plain
    stream = Decompressed(io.BytesIO(data), "gzip", "", max_ratio, len(data))
    try:
        return stream.readall()
    except OpenError as error:
        raise ValueError(error.reason) from error


def decompressed(stream: io.RawIOBase, url: str, max_ratio: float | None = None) -> io.RawIOBase:
    """Return a stream of the decompressed bytes of *stream*, or of its own bytes if it is not compressed."""
    try:
        head = b""
        while len(head) < HEAD and (data := read_some(stream, HEAD - len(head))):
            head += data
        size = os.fstat(stream.fileno()).st_size if isinstance(stream, io.FileIO) else 0  # 0 for a pipe
        if stream.seekable():
            stream.seek(-len(head), os.SEEK_CUR)
        else:
            stream = Prefixed(head, stream, url)
    except BaseException as exc:
        stream.close()
        if isinstance(exc, OSError) and not isinstance(exc, OpenError):
            raise failure(exc, url) from exc
        raise
    compression = find_compression(head)
    return stream if compression is None else Decompressed(stream, compression, url, max_ratio, size)


class Prefixed(InputStream):
    """A stream of *head*, which was read before, and the rest of *stream*."""

    def __init__(self, head: bytes, stream: io.RawIOBase, name: str):
        self.name = name
        self._head, self._stream = head, stream

    def read_some(self, size: int) -> bytes:
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        return read_some(self._stream, size)

    def close(self) -> None:
        self._stream.close()
        super().close()


class Decompressed(InputStream):
    """The data of all the members of a compressed stream, each checked to its end.

    *size* is the compressed size, or 0 if it is unknown or not to be trusted. What is passed through may expand by any
    ratio: whoever holds bytes that belong together asks ``bomb_in``, as ``read_held`` does.
    """

    def __init__(
        self, stream: io.RawIOBase | io.BytesIO, compression: str, url: str, max_ratio: float | None, size: int = 0
    ):
        self.name = url
        self.max_ratio = max_ratio
        self._stream, self._compression, self._size = stream, compression, size
        self._decoder: Decompressor | None = None
        self._input = self._output = b""
        self._taken = self._position = 0

    @property
    def packed(self) -> int:
        """The compressed size; as long as it is unknown, that of what has been read."""
        return max(self._taken, self._size)

    def readall(self) -> bytes:
        """Return all that is left; raise OpenError for a decompression bomb."""
        return read_held(self)

    def read_some(self, size: int) -> bytes:
        if self._position == len(self._output):
            self._output, self._position = self._more(), 0
        data = self._output[self._position : self._position + size]
        self._position += len(data)
        return data

    def _more(self) -> bytes:
        """Return the next piece of the data, b"" at the end."""
        output = b""
        while not output and (self._decoder is not None or self._next_member()):
            output = self._decompress(self._decoder)  # type: ignore[arg-type]
        return output

    def _decompress(self, decoder: Decompressor) -> bytes:
        data, self._input = self._input, b""
        hungry = decoder.needs_input and not data
        if hungry:
            data = self._take()
        try:
            output = decoder.decompress(data, PIECE)
        except MemoryError:
            raise
        except Exception as exc:
            reason = f"bad {self._compression} data: {exc}"
            for said, limit in _TOO_LARGE.items():
                if said in str(exc):
                    reason = f"{self._compression} data that need a window beyond the limit of {limit} reads it"
            raise self._error(reason) from exc
        if decoder.eof:
            self._input, self._decoder = decoder.unused_data, None
        elif hungry and not data and not output:
            raise self._error(f"truncated {self._compression} data")
        return output

    def _next_member(self) -> bool:
        """Begin the next member; return False at the end of the stream."""
        head = self._input
        while True:
            # Tapes and block devices pad with zeros, which gzip and xz allow for.
            head = head.lstrip(b"\0") if self._compression in ("gzip", "xz") else head
            if len(head) >= HEAD or not (data := self._take()):
                break
            head += data
        self._input = head
        if not head:
            return False
        if find_compression(head) != self._compression:
            raise self._error(f"junk after the {self._compression} data", self._taken - len(head))
        self._decoder = _begin(COMPRESSIONS[self._compression].decoder, self.name)
        return True

    def _take(self) -> bytes:
        try:
            data = read_some(self._stream, BUFFER)
        except OpenError:
            raise
        except OSError as exc:
            raise failure(exc, self.name, self._taken) from exc
        self._taken += len(data)
        return data

    def _error(self, reason: str, offset: int | None = None) -> OpenError:
        return OpenError(reason, url=self.name, offset=self._taken if offset is None else offset)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Gzip:
    def __init__(self) -> None:
        import zlib

        self._object = zlib.decompressobj(31)

    @property
    def needs_input(self) -> bool:
        return not self._object.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._object.eof

    @property
    def unused_data(self) -> bytes:
        return self._object.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._object.decompress(self._object.unconsumed_tail + data, max_length)


def zstd_library() -> Any:
    """Return Python's own module for zstd, which 3.14 brought, or its backport."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _zstd() -> Decompressor:
    zstd = zstd_library()
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW.bit_length() - 1})


def _bzip2() -> Decompressor:
    import bz2

    return bz2.BZ2Decompressor()


def _xz() -> Decompressor:
    import lzma

    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)


def _lzma() -> Decompressor:
    import lzma

    return lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_XZ_MEMORY)


class _Lz4:
    def __init__(self) -> None:
        from lz4.frame import LZ4FrameDecompressor

        self._object = LZ4FrameDecompressor()
        self.decompress = self._object.decompress

    @property
    def needs_input(self) -> bool:
        return bool(self._object.needs_input)

    @property
    def eof(self) -> bool:
        return bool(self._object.eof)

    @property
    def unused_data(self) -> bytes:
        return self._object.unused_data or b""


class _Lz4Encoder:
    def __init__(self) -> None:
        from lz4.frame import LZ4FrameCompressor

        self._object = LZ4FrameCompressor(content_checksum=True)
        self._header = self._object.begin()

    def compress(self, data: Any) -> bytes:
        header, self._header = self._header, b""
        return header + self._object.compress(data)

    def flush(self) -> bytes:
        return self._header + self._object.flush()


def _encode_gzip() -> Any:
    import zlib

    return zlib.compressobj(wbits=31)


def _encode_bzip2() -> Any:
    import bz2

    return bz2.BZ2Compressor()


def _encode_xz() -> Any:
    import lzma

    return lzma.LZMACompressor()


def _encode_lzma() -> Any:
    import lzma

    return lzma.LZMACompressor(lzma.FORMAT_ALONE)


def _encode_zstd() -> Any:
    zstd = zstd_library()
    return zstd.ZstdCompressor(options={zstd.CompressionParameter.checksum_flag: 1})


class Compression(NamedTuple):
    """A compression: *magic* is a pattern of its first bytes, *suffixes* are the suffixes of file names, in one str."""

    magic: bytes
    suffixes: str
    decoder: Callable[[], Decompressor]
    encoder: Callable[[], Any]


# The header of lzma, which has no magic: the properties lc, lp and pb as one number, the window size, which programs
# choose as a power of two or one and a half times that, and the size of the data, all ones if unknown (lzma-file-format
# of xz, 1.1). Names in a tar have no zero byte before others.
_LZMA = b"[%s]\0(?:%s)(?:\xff{8}|.{4}[\0-\x3f]\0{3})" % (
    b"".join(b"\\x%02x" % ((pb * 5 + lp) * 9 + lc) for pb in range(5) for lp in range(5) for lc in range(5 - lp)),
    b"|".join(re.escape((size << power).to_bytes(4, "little")[1:]) for power in range(11, 31) for size in (2, 3)),
)

#: The compressions by name. The first member of a plain tar may be called BZh9.jpg or `]`. So the pattern of bzip2
#: includes the magic of its first block, and the pattern of lzma a part of the window size.
COMPRESSIONS = {
    "gzip": Compression(rb"\x1f\x8b", ".gz .tgz .taz", _Gzip, _encode_gzip),
    "bzip2": Compression(
        rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90|.{0,5}\Z)", ".bz2 .bz .tbz2 .tbz .tb2 .tz2", _bzip2, _encode_bzip2
    ),
    "xz": Compression(rb"\xfd7zXZ\0", ".xz .txz", _xz, _encode_xz),
    "lzma": Compression(rb"\]\0\0(?:[^\0]|\0[^\0])|" + _LZMA, ".lzma .tlz", _lzma, _encode_lzma),
    "zstd": Compression(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", ".zst .zstd .tzst", _zstd, _encode_zstd),
    "lz4": Compression(rb"\x04\x22\x4d\x18", ".lz4 .tlz4", _Lz4, _Lz4Encoder),
}
#: The compression of each suffix; suffixes that begin with .t mean a compressed tar.
SUFFIXES = {suffix: name for name, known in COMPRESSIONS.items() for suffix in known.suffixes.split()}

#: The suffixes of a tar, which may be compressed.
TAR_ENDING = re.compile(
    rf"\.(tar|{'|'.join(suffix[1:] for suffix in SUFFIXES if suffix.startswith('.t'))})(\.\w+)?$", re.IGNORECASE
)

#: The beginnings of suffixes that a tar must not have: those of other compressions, archives and tables, and what looks
#: like a compression, such as `.gzip` and `.gz-000`.
OTHER_SUFFIXES = re.compile(
    r"\.(?:t?(?:gz|bz|xz|lz|zst|zip|7z)|(?:t?a?z|tzo|brotli|br|sz|snappy|zz|zlib|deflate|lrz|rar)(?![a-z])"
    r"|(?:parquet|arrow|tfrecord|npz|h5)(?![a-z]))",
    re.IGNORECASE,
)


def find_compression(head: bytes) -> str | None:
    r"""Return the name of the compression of a stream that begins with *head*, if any.

    >>> find_compression(b"\x1f\x8b\x08\0"), find_compression(b"BZh9.jpg\0\0")
    ('gzip', None)
    """
    return next((name for name, known in COMPRESSIONS.items() if re.match(known.magic, head, re.DOTALL)), None)


def _begin(make: Callable[[], Any], url: str) -> Any:
    """Return a new decoder or encoder for *url*; raise OpenError if it needs an extra that is not installed."""
    try:
        return make()
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in COMPRESSIONS:
            raise
        raise OpenError(f"{package} is missing: pip install 'tarshards[{package}]'", url=url) from error


def compressed(stream: OutputStream, compression: str | None) -> OutputStream:
    """Return an OutputStream that compresses into *stream*, or, for no *compression*, *stream* itself."""
    if compression is None:
        return stream
    try:
        encoder = _begin(COMPRESSIONS[compression].encoder, stream.name)
    except BaseException:
        stream.abort()
        raise

    def write(data: Any) -> None:
        stream.write(encoder.compress(data))

    def commit() -> None:
        stream.write(encoder.flush())
        stream.close()

    return OutputStream(stream.name, write, commit=commit, discard=stream.abort)
