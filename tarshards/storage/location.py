"""A URL or path, parsed once: what it names, how it is printed, and how its bytes are reached."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from errno import ENOENT
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from tarshards.errors import OpenError, UrlError, shortened
from tarshards.parallel.forks import cached_property
from tarshards.storage.compression import OTHER_SUFFIXES, SUFFIXES
from tarshards.storage.locks import locked
from tarshards.storage.redaction import (
    redacted,
    secrets_in,
    secrets_of,
    without_credentials,
    without_signature,
    without_userinfo,
    without_values,
)
from tarshards.storage.remote import Remote, default_remote
from tarshards.storage.streams import COMPRESSING, encoded, errno_of, is_answer, is_missing, read_at_most, words

if TYPE_CHECKING:
    from tarshards.storage.ranges import Ranges

#: The module that opens each scheme, imported at first use; "" is a plain path. fsspec knows further schemes.
FAMILIES = {
    "": "local",
    "file": "local",
    "-": "stdio",
    "pipe": "pipe",
    "http": "http",
    "https": "http",
    "s3": "fsspec_",
    "s3a": "fsspec_",
    "gs": "fsspec_",
    "gcs": "fsspec_",
}

#: Schemes of fsspec that read from another URL, which follows in a chain: caches and archives, such as
#: `simplecache::s3://bucket/a.tar` or `zip://a.tar::http://host/all.zip`.
CHAINED = ("blockcache", "cached", "dir", "filecache", "libarchive", "simplecache", "tar", "zip")

# Schemes of local files, including those of fsspec.
_LOCAL = ("", "file", "local", "asynclocal")

MOST_READ = 1 << 30  # bytes of a file that is read whole, such as a plan or an index

T = TypeVar("T")

#: Separates specs, and the links of a chain; not the groups of an address, as in http://[::1]:8000/a.tar.
SEPARATOR = re.compile(r"::(?![^\[\]]{0,255}\])")

# Patterns that local names do not need: compiled at first use.
_SCHEME = r"([A-Za-z][A-Za-z0-9+.-]*):"
_HOST = r"\w+://(\[[^\]/?#]*\]|[^\[\]/?#:@]*)(:\d*)?([/?#]|$)"


class Location:
    """An immutable URL or path, parsed on demand and only once; no other code in the package parses URLs.

    Locations of equal URLs are equal. A location prints as its `name`, so that no message shows credentials. Locations
    derived from it have its *remote* and *sync*.
    """

    url: str  #: as it was given
    allow_pipe: bool = False  #: whether it may run its command, if it is `pipe:command`
    sync: bool = True  #: whether closing a local file that was written waits until it is on the disk
    index_dir: str | None = None  #: the folder of its index, and of all else that is derived from it, if it is a shard

    def __init__(
        self,
        url: str,
        remote: Remote | None = None,
        *,
        allow_pipe: bool = False,
        sync: bool = True,
        index_dir: str | None = None,
    ):
        self.__dict__["url"] = url
        if remote is not None:
            self.__dict__["remote"] = remote
        if allow_pipe:
            self.__dict__["allow_pipe"] = True
        if not sync:
            self.__dict__["sync"] = False
        if index_dir is not None:
            self.__dict__["index_dir"] = index_dir

    @classmethod
    def of(
        cls,
        url: str | os.PathLike[str] | Location,
        remote: Remote | None = None,
        *,
        allow_pipe: bool = False,
        sync: bool = True,
    ) -> Location:
        """Return the location of a URL or path, or a Location with the options added.

        A *remote* replaces that of the Location; *allow_pipe* and ``sync=False`` hold if passed, or if the Location has
        them. Raises TypeError for anything else.
        """
        if isinstance(url, Location):
            if (
                (remote is None or remote == url.remote)
                and (url.allow_pipe or not allow_pipe)
                and (sync or not url.sync)
            ):
                return url
            marks = {"allow_pipe": allow_pipe or url.allow_pipe, "sync": sync and url.sync}
            return cls(url.url, remote or url._passed, index_dir=url.index_dir, **marks)
        if isinstance(url, str | os.PathLike) and isinstance(text := os.fspath(url), str):
            return cls(text, remote, allow_pipe=allow_pipe, sync=sync)
        raise TypeError(f"a URL is a str or a path, not {type(url).__name__}: {redacted(shortened(url))}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a Location is immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"Location({self.name!r})"

    def __str__(self) -> str:
        return self.name

    @cached_property
    def remote(self) -> Remote:
        """How to read it, if it is remote."""
        return default_remote()

    @property
    def _passed(self) -> Remote | None:
        """*remote*, None if it was not passed: the variables of thousands of local shards need not be looked up."""
        return self.__dict__.get("remote")

    @property
    def max_ratio(self) -> float | None:
        """That of *remote*."""
        return None if self._passed is None else self._passed.max_ratio

    # What the URL says.

    @cached_property
    def scheme(self) -> str:
        """The scheme in lower case: "" for a plain path, "-" for stdin and stdout.

        >>> [Location(url).scheme for url in ("d/a.tar", "HTTP://host/a.tar", "-", "12:30.tar")]
        ['', 'http', '-', '']
        """
        if ":" not in self.url:
            return "-" if self.url == "-" else ""
        match = re.match(_SCHEME, self.url)
        return match[1].lower() if match else ""

    @cached_property
    def family(self) -> str:
        """The module that opens the scheme; UrlError if the scheme is unknown, unless a local file has this name."""
        if self.scheme in FAMILIES:
            return FAMILIES[self.scheme]
        import fsspec

        known = {*FAMILIES, *fsspec.available_protocols(), *fsspec.registry} - {""}
        if self.scheme in known:
            return "fsspec_"
        if os.path.lexists(self.url):
            return "local"
        from difflib import get_close_matches

        close = get_close_matches(self.scheme, known, n=1, cutoff=0.5)
        hint = f", did you mean {close[0]!r}?" if close else "."
        if re.match(r"\w:[\\/]", self.url):
            hint = "; paths of Windows are not supported."
        elif "//" not in self.url and ("." in self.scheme or not close):
            hint = "; names are separated by `::`, and ./NAME is a file with a colon in its name."
        raise UrlError(f"unknown scheme {self.scheme!r}{hint} Known: {' '.join(sorted(known))}", url=self.name)

    @cached_property
    def links(self) -> list[str]:
        """The parts of a chain of fsspec, each reading what the next one names; else just the URL.

        >>> Location("zip://a.tar::simplecache::s3://bucket/all.zip").links
        ['zip://a.tar', 'simplecache', 's3://bucket/all.zip']
        """
        return SEPARATOR.split(self.url) if self.scheme in CHAINED else [self.url]

    @cached_property
    def _around(self) -> tuple[str, Location, str]:
        """The URL in three parts: before the link that names the file, that link, and after it."""
        number = next((i for i, link in enumerate(self.links) if link not in CHAINED), 0)
        before = "".join(f"{link}::" for link in self.links[:number])
        after = "".join(f"::{link}" for link in self.links[number + 1 :])
        return before, self.at(self.links[number]) if before or after else self, after

    @property
    def _is_plain(self) -> bool:
        """Whether it is a path without a scheme: a quick test, made first since there may be thousands of shards."""
        return ":" not in self.url and self.url != "-"

    @property
    def is_local(self) -> bool:
        """Whether it names a file of this machine."""
        return self._is_plain or self.family == "local"

    @property
    def is_stream(self) -> bool:
        """Whether it can be read only once, sequentially, and has no sidecars: `-` and `pipe:`."""
        return not self._is_plain and FAMILIES.get(self.scheme) in ("stdio", "pipe")

    @property
    def is_remote(self) -> bool:
        """Whether it names a file of a server or store."""
        return not self._is_plain and not self.is_stream and not self.is_local

    @cached_property
    def path(self) -> str | None:
        """The local path, or None; only `file://` URLs are percent-encoded.

        >>> [Location(url).path for url in ("a%20b.tar", "file:a%20b.tar", "file:///a%20b.tar", "s3://bucket/b.tar")]
        ['a%20b.tar', 'a%20b.tar', '/a b.tar', None]
        """
        if self._is_plain:
            return self.url
        if not self.is_local:
            return None
        if self._file_prefix != "file://":
            return self.url[len(self._file_prefix) :]
        host, slash, path = self.url[7:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise UrlError("a file:// URL has three slashes before its path; file:a.tar is relative", url=self.name)
        from urllib.parse import unquote

        return unquote(slash + path)

    @property
    def name(self) -> str:
        """The URL as messages show it, without credentials: no user, no password, no values of the query.

        >>> Location("http://me:secret@host/a.tar?expires=60&signature=abc").name
        'http://host/a.tar?expires=...&signature=...'
        """
        return self.url if self._is_plain and "@" not in self.url else self._name

    @cached_property
    def _name(self) -> str:
        url = self.url
        if len(self.links) > 1:
            return "::".join(Location(link).name for link in self.links)
        if "@" in url:
            url = without_userinfo(url)
            if FAMILIES.get(self.scheme) == "http" and not re.match(_HOST, url):
                return f"{self.scheme}://..."  # what is malformed may be the password
        if "?" not in url or self.scheme in ("", "file", "-"):
            return url
        if self.scheme == "pipe":
            return redacted(url)
        path, mark, query = url.partition("?")
        return path + mark + without_values(query)

    @property
    def recorded(self) -> str:
        """The URL as manifests, markers and reports record it: without credentials, which a reader has to add.

        >>> Location("http://me:secret@host/get.tar?f=a&signature=abc").recorded
        'http://host/get.tar?f=a'
        """
        if self._is_plain or self.scheme in ("", "file", "-"):
            return self.url
        if self.scheme == "pipe":
            return redacted(self.url)
        return "::".join(map(without_credentials, self.links))

    def redacted(self, text: str, others: Iterable[Location] = ()) -> str:
        """Return *text* without the credentials of URLs in it, nor those of this location and *others* in any form."""
        return redacted(text, self._secrets.union(*(other._secrets for other in others)))

    @cached_property
    def _secrets(self) -> set[str]:
        found = secrets_of(self.url) if "@" in self.url or "?" in self.url else set()
        return found | secrets_in(self.remote.storage_options) if self.remote.storage_options else found

    def words(self, exc: BaseException) -> str:
        """Return the message of *exc* without credentials."""
        return self.redacted(words(exc))

    def safe(self, exc: BaseException) -> BaseException:
        """Return *exc*, or, if it or a cause shows credentials, an OSError with its errno and redacted message."""
        from traceback import TracebackException

        text = "".join(TracebackException.from_exception(exc, limit=0).format())
        if self.redacted(text) == text:
            return exc
        said = f"{type(exc).__name__}: {self.words(exc)}"
        stand_in = OSError(said)
        stand_in.errno = errno_of(exc)
        return stand_in.with_traceback(exc.__traceback__)

    @property
    def identity(self) -> str:
        """The last part of the name, up to any `?`: the same wherever the file is. Digests in states depend on it."""
        return (self if self._is_plain else self._around[1]).name.partition("?")[0].rpartition("/")[2]

    @cached_property
    def _parts(self) -> tuple[str, str, str]:
        if self._is_plain:
            folder, slash, base = self.url.rpartition("/")
            return folder + slash, base, ""
        before, named, after = self._around
        if named is not self:
            folder, base, query = named._parts
            return before + folder, base, query + after
        end = re.search(r"[?#]", self.url) if FAMILIES.get(self.scheme) == "http" else None
        path, query = (self.url[: end.start()], self.url[end.start() :]) if end else (self.url, "")
        split = path.rfind("/") + 1 or (len(self.scheme) + 1 if self.scheme not in ("", "-") else 0)
        return path[:split], path[split:], query

    @property
    def folder(self) -> str:
        """The URL up to the base: `folder + base + query` is the URL."""
        return self._parts[0]

    @property
    def base(self) -> str:
        """The last part of the path, as the URL writes it."""
        return self._parts[1]

    @property
    def stem(self) -> str:
        """The base without the suffix of a compression and ``.tar``.

        >>> [Location(url).stem for url in ("d/a.tar.zst", "a.tgz", "http://host/a.tar?token=x", "a.jsonl.gz")]
        ['a', 'a', 'a', 'a.jsonl']
        """
        stem, _, suffix = self.base.rpartition(".")
        return (stem if f".{suffix}".lower() in SUFFIXES else self.base).removesuffix(".tar")

    def compression(self) -> str | None:
        """Return the compression that the suffix names, if any; ``-`` and ``pipe:`` have none.

        Raises UrlError for the suffix of another format, which a tar must not have.

        >>> Location("https://host/a.tar.gz?token=x").compression(), Location("a.tar").compression()
        ('gzip', None)
        """
        suffix = "" if self.is_stream else os.path.splitext(self.base)[1]
        compression = None if suffix == ".taZ" else SUFFIXES.get(suffix.lower())  # compress, while .taz is gzip
        if compression is None and OTHER_SUFFIXES.match(suffix):
            known = " ".join(SUFFIXES)
            raise UrlError(f"the suffix {suffix} is not supported; those that compress are {known}", url=self.name)
        return compression

    @property
    def query(self) -> str:
        """The URL after the base: the query of an http URL, with its question mark, or the rest of a chain.

        It may hold credentials: never show it.
        """
        return self._parts[2]

    @property
    def _file_prefix(self) -> str:
        if self.scheme != "file":
            return ""
        return "file://" if self.url.startswith("//", 5) else "file:"

    # Locations derived from it.

    @property
    def described(self) -> Location:
        """The location beside which its index and other derived files lie: itself, or one in the `index_dir`.

        Below the `index_dir` it has the path of its folder, so that shards of the same name do not collide. The path of
        a URL begins with its scheme and host, and ends with a digest of its query.

        >>> urls = "/d/a.tar", "http://host/d/a.tar?token=x", "s3://b/a.tar"
        >>> [Location(url, index_dir="/i").described.url for url in urls]
        ['/i/d/a.tar', '/i/http/host/d/a.tar', '/i/s3/b/a.tar']
        """
        folder = self.index_dir
        if folder is None or self.is_stream:
            return self
        if self.path is not None:
            inner, base = os.path.realpath(os.path.dirname(self.path)), os.path.basename(self.path)
        else:
            scheme, _, rest = without_userinfo(self.folder).removesuffix("/").partition("://")
            # No part may lead out of the folder, nor vanish when the path is resolved.
            parts = [
                scheme,
                *(part.replace(".", "%2E") if part in ("", ".", "..") else part for part in rest.split("/")),
            ]
            if query := without_signature(without_userinfo(self.query).removeprefix("?")):
                from hashlib import blake2b

                parts.append(blake2b(query.encode(errors="surrogateescape"), digest_size=8).hexdigest())
            inner, base = "/".join(part or "%" for part in parts), self.base
        return self.at(f"{folder.rstrip('/')}/{inner.strip('/')}/{base}")

    def at(self, url: str) -> Location:
        """Return the location of another file, with the *remote* and *sync* of this one."""
        return Location(url, self._passed, sync=self.sync)

    def with_base(self, base: str) -> Location:
        """Return the location of *base* in the same folder, with the same query."""
        return self.at(self.folder + base + self.query)

    def sibling(self, suffix: str) -> Location:
        """Return the location whose name has *suffix* added; raise OpenError for a stream.

        >>> Location("data/a.tar").sibling(".index").url, Location("https://host/a.tar?token=x").sibling(".index").url
        ('data/a.tar.index', 'https://host/a.tar.index?token=x')
        """
        if self._is_plain:
            return self.at(self.url + suffix)
        if self.is_stream:
            raise OpenError(f"a stream has no {suffix} file beside it", url=self.name)
        return self.with_base(self.base + suffix)

    def beside(self, name: str) -> Location:
        """Return the location of *name*, a path relative to the folder of this one.

        >>> Location("d/a.json").beside("b 1.tar").url, Location("http://h/d/a.json?key").beside("b 1.tar").url
        ('d/b 1.tar', 'http://h/d/b%201.tar?key')
        """
        return self.at(self.all_beside([name])[0])

    def all_beside(self, names: list[str]) -> list[str]:
        """Return the URL of ``beside(name)`` for each of *names*."""
        if not self._is_plain and (FAMILIES.get(self._around[1].scheme) == "http" or self._file_prefix == "file://"):
            from urllib.parse import quote

            names = list(map(quote, names))
        folder, query = self.folder, self.query
        if folder and not _have_none(names, "./"):
            names = [name.removeprefix("./") for name in names]
        return [folder + name + query for name in names] if query else [folder + name for name in names]

    def resolve(self, name: str) -> Location:
        """Return the location of *name* in this file, a manifest or catalog: beside it, or a whole path or URL.

        Raises UrlError for a name that data, often someone else's, may not contain: a command, or a local file in a
        remote one.
        """
        if ":" not in name and not os.path.isabs(name) and name != "-":
            return self.beside(name)
        shard = self.at(name)
        is_whole = os.path.isabs(name) or bool(shard.scheme)
        links = [Location(link) for link in shard.links if link not in CHAINED] if is_whole else []
        if any(link.is_stream or (link.scheme in _LOCAL and self.is_remote) for link in links):
            kind = "manifest" if self.base.endswith(".json") else "catalog"
            raise UrlError(f"a {kind} may not name {shard.name!r}", url=self.name)
        return shard if is_whole else self.beside(name)

    def relative(self, other: Location) -> str:
        """Return the name for which `beside` returns *other*, or else its path, or its URL without credentials.

        >>> Location("d/a.json").relative(Location("e/b.tar")), Location("a.json").relative(Location("http://h/b.tar"))
        ('../e/b.tar', 'http://h/b.tar')
        """
        if self.family != other.family:
            return other.recorded
        if self.path is not None and other.path is not None:
            name = os.path.relpath(other.path, os.path.dirname(self.path) or ".")
            if name.startswith("../") and os.path.isabs(other.path):
                return other.path
        elif not other.url.startswith(self.folder) or other.query != self.query:
            return other.recorded
        else:
            name = (other.folder + other.base)[len(self.folder) :]
            if self._around[1].family == "http":
                from urllib.parse import unquote

                name = unquote(name)
        return f"./{name}" if re.match("[^/]*:", name) else name

    def absolute(self) -> Location:
        """Return a local path as an absolute one, any other location as it is."""
        return self if self.path is None or self.scheme else self.at(os.path.abspath(self.path))

    def expanduser(self) -> Location:
        """Return the location with a leading `~` of its path replaced by the home directory."""
        if "~" not in self.url or self.scheme not in ("", "file"):
            return self
        prefix = self.url[: len(self._file_prefix)]
        try:
            return self.at(prefix + os.path.expanduser(self.url[len(prefix) :]))
        except ValueError as error:
            raise UrlError(str(error), url=self.name) from error

    def glob(self) -> list[str]:
        """Return the sorted URLs of the files that match a path with `*`, `[..]` or, locally, `?`; else its own URL.

        A name that exists is not a pattern, except on a web server. Raises UrlError for a web server that does not list
        files by WebDAV.
        """
        if not any(mark in self.url for mark in "*?["):
            return [self.url]
        if self.scheme not in ("", "file"):
            named = self._around[1]
            if self.is_stream or not any(mark in named.folder + named.base for mark in "*["):
                return [self.url]
            if FAMILIES.get(named.scheme) != "http":
                return self._transport.glob(self)
            if "*" not in named.folder + named.base:
                return [self.url]  # brackets of an IPv6 address, or literal ones
            before, _, after = self._around
            return [before + found + after for found in named._transport.glob(named)]
        path = self.path
        if path is None or os.path.lexists(path):
            return [self.url]
        matches = sorted(_matches(path))
        if self.scheme == "":  # a file may be named like a URL
            return [f"./{name}" if (":" in name or name == "-") and Location(name).scheme else name for name in matches]
        from urllib.parse import quote

        prefix = self.url[: len(self._file_prefix)]
        return [prefix + (quote(match) if prefix.endswith("/") else match) for match in matches]

    # Access to the bytes.

    def opened_by(self, opener: Callable[[], Any]) -> Location:
        """Return this location; ``open`` then calls *opener*, which returns a stream that is already being fetched."""
        location = Location(
            self.url, self._passed, allow_pipe=self.allow_pipe, sync=self.sync, index_dir=self.index_dir
        )
        location.__dict__["_opener"] = opener
        return location

    def address(self) -> Any:
        """Return its ``Address`` on a web server, or None if it has none; raise OpenError or UrlError."""
        return self._transport.address(self)

    @property
    def _transport(self) -> Transport:
        return _transport_of("local" if self._is_plain else self.family)

    def open(self, mode: str = "rb", *, compressed: bool = False) -> BinaryIO:
        """Open it for reading ("rb") or writing ("wb") bytes; `open_url` describes the options.

        Raises OpenError if a server sends a Content-Encoding, unless that is a compression and the caller undoes it:
        the bytes may be *compressed*.
        """
        if mode not in ("rb", "wb"):
            raise ValueError(f'mode is "rb" or "wb", not {mode!r}')
        if mode == "rb" and (opener := self.__dict__.get("_opener")) is not None:
            stream = opener()
        else:
            stream = self._transport.open(self, mode)
        encoding = getattr(stream, "encoding", "")
        if encoding and not (compressed and encoding.lower() in COMPRESSING):
            stream.close()
            raise encoded(encoding, self.name)
        return cast(BinaryIO, stream)

    def read(self, limit: int = MOST_READ) -> bytes:
        """Return all its bytes; raise OpenError if there are more than *limit*, and stop reading there."""
        data: bytes = self.check_length(self._transport.read(self, limit + 1), limit)
        return data

    def hold(self, limit: int, allocate: Callable[[int], Any] = bytearray) -> Any:
        """Return the bytes as ``read`` does, in a buffer from ``allocate(size)`` if their number is known beforehand.

        Returns a ``MappedBlock`` instead if a cache has them on its disk.
        """
        return self.check_length(self._transport.hold(self, limit + 1, allocate), limit)

    def check_length(self, data: Any, limit: int) -> Any:
        """Return *data*; raise OpenError if it has more than *limit* bytes."""
        if len(data) > limit:
            raise OpenError(f"more than {limit:,} bytes, the limit for such a file", url=self.name)
        return data

    def sha256(self) -> str:
        """Return the SHA-256 of its stored bytes, in hexadecimal digits."""
        from hashlib import sha256

        digest = sha256()
        with self.open() as stream:
            while data := stream.read(1 << 20):
                digest.update(data)
        return digest.hexdigest()

    def ranges(self, size: int | None = None) -> Ranges:
        """Open it for random access; passing its *size*, if known, saves a request to a server.

        A local file is mapped. Reading raises OpenError beyond the new end of a local file that has shrunk, and for a
        remote file that has changed, provided that its server sends an ETag or a time. Raises OpenError for streams and
        for servers without ranges.
        """
        return self._transport.ranges(self, size)

    def exists(self) -> bool:
        """Return whether it exists; raise OpenError if that cannot be determined."""
        return self._transport.exists(self)

    def check_there(self) -> None:
        """Raise OpenError if it is missing, unless it is a stream: a better error than that of a file beside it."""
        if not (self.is_stream or self.exists()):
            raise OpenError(os.strerror(ENOENT), url=self.name, errno=ENOENT)

    def is_taken(self) -> bool:
        """Return whether writing would replace a file, as far as a server shows its files.

        Raises OpenError if a server cannot be reached.
        """
        if self.is_stream:
            return False
        if self.path is not None:
            return os.path.isfile(self.path)
        try:
            return self.exists()
        except OpenError as error:
            if is_answer(error):
                return False
            raise

    def size(self) -> int | None:
        """Return its size in bytes, None for a stream or if a server does not say; raise OpenError if it is missing."""
        return self._transport.size(self)

    def version(self) -> list[Any]:
        """Return values that change when it is written to, none for a stream; raise OpenError if it is missing.

        They are its size with its time or its ETag; a folder has a digest of the sizes and times of its files.
        """
        return self._transport.version(self)

    def remove(self) -> None:
        """Remove it, if it exists; raise OpenError if that fails, or its scheme cannot remove."""
        self._transport.remove(self)

    @property
    def can_rename(self) -> bool:
        """Whether it can be renamed: not if it is a stream or on a web server."""
        return type(self._transport).rename is not Transport.rename

    def rename(self, target: Location, *, replace: bool = True) -> None:
        """Rename it to *target* on the same file system or in the same store, and replace a file of that name.

        Without *replace*, raise OpenError with the errno EEXIST if there is such a file, also if another writer has
        renamed one to it just now. A local file is renamed in one step; a store copies an object, and then removes it.
        Raises OpenError.
        """
        self._transport.rename(self, target, replace)

    def make_folder(self) -> None:
        """Create the folder of a local file, and those above it; stores need none."""
        self._transport.make_folder(self)

    def folder_lock(self) -> AbstractContextManager[None]:
        """Return the lock of the folder of a local file, held while its entries are read and written; else no lock."""
        folder = None if self.path is None else os.path.dirname(os.path.abspath(self.path))
        return locked(folder) if folder is not None and os.access(folder, os.R_OK) else nullcontext()


@cache
def _transport_of(family: str) -> Transport:
    transport: Transport = import_module(f"tarshards.storage.{family}").TRANSPORT
    return transport


class Transport:
    """Reads and writes a family of schemes; each module in `FAMILIES` has one, its `TRANSPORT`."""

    def open(self, location: Location, mode: str) -> Any:
        """Return a stream; see `streams`."""
        raise NotImplementedError

    def read(self, location: Location, most: int) -> bytes:
        """Return the bytes of a file, no more than *most*."""
        with self.open(location, "rb") as stream:
            return read_at_most(stream, most, 1 << 24)

    def hold(self, location: Location, most: int, allocate: Callable[[int], Any] = bytearray) -> Any:
        """Return what ``read`` does; see `Location.hold`."""
        return self.read(location, most)

    def address(self, location: Location) -> Any:
        return None

    def ranges(self, location: Location, size: int | None = None) -> Ranges:
        raise OpenError("a stream, which has no random access", url=location.name)

    def glob(self, location: Location) -> list[str]:
        """Return the sorted URLs of the files that match a pattern, or else the URL of *location*."""
        return [location.url]

    def make_folder(self, location: Location) -> None:
        """Create the folder of a file."""

    def exists(self, location: Location) -> bool:
        try:
            self.probe(location)
        except OpenError as error:
            if is_missing(error):
                return False
            raise
        return True

    def probe(self, location: Location) -> None:
        """Raise OpenError unless it can be read."""
        with location.open() as stream:
            stream.read(1)

    def size(self, location: Location) -> int | None:
        return None

    def version(self, location: Location) -> list[Any]:
        return []

    def remove(self, location: Location) -> None:
        raise OpenError("a stream, which cannot be removed", url=location.name)

    def rename(self, location: Location, target: Location, replace: bool) -> None:
        raise OpenError("a stream, which cannot be renamed", url=location.name)


def _matches(pattern: str) -> list[str]:
    """Return the paths that match *pattern*, as ``glob`` does, but faster in a folder of many files."""
    from fnmatch import filter as matching
    from glob import glob, has_magic

    folder, base = os.path.split(pattern)
    if has_magic(folder) or not has_magic(base):
        return glob(pattern)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return []
    if not base.startswith("."):
        names = [name for name in names if not name.startswith(".")]
    begin, _, end = base.partition("*")
    if has_magic(begin + end):
        names = matching(names, base)
    else:
        least = len(begin + end)
        names = [name for name in names if name.startswith(begin) and name.endswith(end) and len(name) >= least]
    folder = os.path.join(folder, "")
    return [folder + name for name in names]


def names_of(urls: list[str]) -> list[str]:
    """Return the names of *urls*, without credentials.

    >>> names_of(["a.tar", "http://me:secret@host/a.tar"])
    ['a.tar', 'http://host/a.tar']
    """
    if _have_none(urls, "@", "?"):  # every credential stands before an @ or after a ?
        return urls
    return [url if "@" not in url and "?" not in url else Location(url).name for url in urls]


def identities_of(urls: list[str]) -> list[str]:
    """Return the identities of *urls*; see ``Location.identity``."""
    if _have_none(urls, "@", "?", "::"):
        return [url.rpartition("/")[2] for url in urls]
    return [Location(url).identity for url in urls]


def are_local(urls: list[str]) -> bool:
    """Return whether all *urls* name files of this machine."""
    return (_have_none(urls, ":") and "-" not in urls) or all(Location(url).is_local for url in urls)


def are_remote(urls: list[str]) -> bool:
    """Return whether all *urls* have schemes of servers or stores."""
    return all(Location(url).is_remote for url in {url.partition(":")[0]: url for url in urls}.values())


def paths_of(urls: list[str]) -> list[str]:
    """Return the paths of *urls*, which are local."""
    return urls if _have_none(urls, ":") else [str(Location(url).path) for url in urls]


def _have_none(urls: list[str], *marks: str) -> bool:
    text = "".join(urls)
    return not any(mark[0] in text and mark in text for mark in marks)  # a search for one character is fastest


def look_up(function: Callable[[Location], T], urls: Iterable[str | Location]) -> Iterator[T]:
    """Yield ``function(location)`` for every URL, in their order.

    Threads look up remote ones.
    """
    locations = [Location.of(url) for url in urls]
    if all(location.is_local for location in locations):
        yield from map(function, locations)
        return
    from tarshards.parallel.calls import bounded_map
    from tarshards.storage.wire import LOOKERS, looking_threads

    yield from bounded_map(function, locations, executor=looking_threads(), window=2 * LOOKERS)
