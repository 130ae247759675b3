"""Dataset manifests: wids JSON version 1, the shards of a dataset with their numbers of samples and bytes.

Format: webdataset's wids, "wids_specs.py"; ``{"wids_version": 1, "shardlist": [{"url", "nsamples", "filesize"}]}``.
Entries of ours, which others ignore: ``"concatenated": true`` says that a shard may consist of several archives, and
``"indexed": true`` that its index is beside it. ``"sha256"`` is the checksum of the file, and ``"digest"`` a digest of
its keys and members, which its index has too; both are in hexadecimal digits.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args, overload

from tarshards.errors import UrlError
from tarshards.parallel.forks import cached_property
from tarshards.storage.compression import TAR_ENDING
from tarshards.storage.location import Location, are_local
from tarshards.storage.remote import Remote

SUFFIX = ".shards.json"
DESCRIPTION = ("nsamples", "filesize", "concatenated", "indexed", "sha256", "digest")  # the names in an entry
MARKS = ("concatenated", "indexed")  # the names whose values are true or false
MAX_BYTES = 1 << 28  # of a manifest: about 150 bytes a shard
_COUNTS = {"nsamples": "samples", "filesize": "size"}  # names that ``Shard`` spells differently
_HEX = b"0123456789abcdef"
_DIGITS = {"sha256": 64, "digest": 32}  # the number of hexadecimal digits of each
MOST = {"nsamples": (1 << 32) - 1, "filesize": (1 << 53) - 1}  # of a shard: what fits into plans and sums


#: Whether zeros must end an archive, or it may also end after any member.
ArchiveEnd: TypeAlias = Literal["required", "optional"]


def check_end(end: str) -> None:
    """Raise ValueError unless *end* is a word of ``ArchiveEnd``."""
    if end not in get_args(ArchiveEnd):
        raise ValueError(f'end is "required" or "optional", not {end!r}')


class Shard(NamedTuple):
    """A shard: its URL, its numbers of samples and bytes if a manifest has them, and how to read it.

    A *concatenated* shard may consist of several archives; an *indexed* one has its index beside it. *sha256* is the
    checksum of the file, and *digest* a digest of its keys and members, which its index has too, both in hexadecimal
    digits. Manifests do not have the last seven: *split*, "first" or "last", is the rule for the names of members
    (None: the rule of the index, or else "first"); with *allow_pipe*, ``pipe:command`` may run its command; with
    *keep_headers*, data carries the headers of its member, so that these can be written unchanged; *end* says whether
    the shard may lack the zeros that end an archive; without *adjacent*, members of a key that are not adjacent are
    several samples, which the caller joins; *remote* has the options for reading it; *index_dir* is the folder of its
    index, and of all else that is derived from it, if that is not beside it.
    """

    url: str
    samples: int | None = None
    size: int | None = None
    concatenated: bool = False
    indexed: bool = False
    sha256: str | None = None
    digest: str | None = None
    split: str | None = None
    allow_pipe: bool = False
    keep_headers: bool = False
    end: ArchiveEnd = "required"
    adjacent: bool = True
    remote: Remote | None = None
    index_dir: str | None = None

    @classmethod
    def of(cls, shard: Shard | str | Location) -> Shard:
        """Return a shard, or its URL or location as a shard."""
        if isinstance(shard, Location):
            return cls(shard.url, allow_pipe=shard.allow_pipe, remote=shard.remote, index_dir=shard.index_dir)
        return cls(shard) if isinstance(shard, str) else shard

    def location(self) -> Location:
        """Return its location."""
        return Location(self.url, self.remote, allow_pipe=self.allow_pipe, index_dir=self.index_dir)


class Shards(Sequence[Shard]):
    """Shards as columns, which stay as they are: no object for each shard, and one value where all have the same.

    *common* has the values of the fields that *columns* lack; its URL says nothing.

    >>> shards = Shards(["a.tar", "b.tar"], samples=[7, None])
    >>> shards[0].samples, shards.column("size"), len(shards)
    (7, [None, None], 2)
    """

    common: Shard = Shard("")  # which those lack that earlier releases have pickled

    def __init__(self, urls: list[str], common: Shard | None = None, /, **columns: list[Any]):
        same = {name: column[0] for name, column in columns.items() if column and column == column[:1] * len(column)}
        self.urls: list[str] = urls
        self.common: Shard = (common or Shard(""))._replace(**same)
        self._columns = {name: column for name, column in columns.items() if name not in same}

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> Shards:
        """Return *shards* as columns."""
        urls, *columns = zip(*shards) if (shards := list(shards)) else [[]] * len(Shard._fields)
        return cls(list(urls), **{name: list(column) for name, column in zip(Shard._fields[1:], columns)})

    @classmethod
    def joined(cls, parts: Sequence[Shards]) -> Shards:
        """Return the shards of all *parts*, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        values = zip(Shard._fields, zip(*(part.common for part in parts)))
        differ = {name for name, of_parts in values if any(value != of_parts[0] for value in of_parts)}
        differ = differ.union(*(part._columns for part in parts))
        columns = {name: [*chain.from_iterable(part.column(name) for part in parts)] for name in ("url", *differ)}
        return cls(columns.pop("url"), parts[0].common, **columns)

    @cached_property
    def is_local(self) -> bool:
        """Whether all are files of this machine."""
        return are_local(self.urls)

    def locations(self) -> list[Location]:
        """Return the locations of all shards."""
        return [shard.location() for shard in self]

    def column(self, name: str) -> list[Any]:
        """Return the field *name* of every ``Shard``."""
        if name == "url":
            return self.urls
        return self._columns.get(name) or [getattr(self.common, name)] * len(self)

    @property
    def uncounted(self) -> Sequence[int]:
        """The numbers of the shards without a count of samples or bytes."""
        counts = [self._columns.get(name, getattr(self.common, name)) for name in ("samples", "size")]
        if None in counts:
            return range(len(self))
        if not any(isinstance(column, list) and None in column for column in counts):
            return []
        pairs = zip(self.column("samples"), self.column("size"))
        return [number for number, pair in enumerate(pairs) if None in pair]

    def replace(self, **columns: list[Any]) -> Shards:
        """Return these shards with *columns* replaced."""
        urls = columns.pop("url", self.urls)
        return Shards(urls, self.common, **{**self._columns, **columns})

    def split_by(self, rule: str | None) -> Shards:
        """Return these shards; those that have no rule for the names of members get this one."""
        return self.replace(split=[split or rule for split in self.column("split")])

    def take(self, numbers: Sequence[int]) -> Shards:
        """Return the shards with these *numbers*, in the given order."""
        columns = {name: [column[number] for number in numbers] for name, column in self._columns.items()}
        return Shards([self.urls[number] for number in numbers], self.common, **columns)

    def __len__(self) -> int:
        return len(self.urls)

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> Shards: ...
    def __getitem__(self, at: int | slice) -> Shard | Shards:
        if isinstance(at, slice):
            numbers = range(len(self))
            return self if numbers[at] == numbers else self.take(numbers[at])
        return self.common._replace(url=self.urls[at], **{name: column[at] for name, column in self._columns.items()})

    def __iter__(self) -> Iterator[Shard]:
        named = (self._columns.get(name) or repeat(getattr(self.common, name)) for name in Shard._fields[1:])
        return map(Shard, self.urls, *named)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Shards | list) else NotImplemented

    __hash__: ClassVar[None]  # type: ignore[assignment]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector in a block that makes many objects and keeps few.

    The many new objects would make it traverse all objects of the process, including torch's.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def manifest_url(pattern: str) -> str:
    r"""Return the URL of the manifest for the shards *pattern*, which has a NUL in place of each number.

    >>> [manifest_url(pattern) for pattern in ("d/train-\0.tar", "\0.tar.gz", "http://h/\0/a_\0-x.tar?key", "a.tar")]
    ['d/train.shards.json', 'shards.json', 'http://h/a-x.shards.json?key', 'a.shards.json']
    """
    location = Location.of(pattern)
    before, *after = (location.folder + location.base).split("\0")
    first = Location(before)
    *parts, last = [first.base, *after]
    words = [part.replace("/", "-").strip("-_. ") for part in (*parts, TAR_ENDING.sub("", last))]
    return first.folder + ("-".join(filter(None, words)) + SUFFIX).lstrip(".") + location.query


def series_url(url: str) -> str:
    """Return the URL of the manifest of the series that the shard *url* belongs to.

    >>> series_url("d/a-003.tar")
    'd/a.shards.json'
    """
    return manifest_url(_without_number(url))


def _without_number(url: str) -> str:
    r"""Return *url* with a NUL in place of the last number in its name.

    >>> _without_number("d7/a1-002.tar")
    'd7/a1-\x00.tar'
    """
    location = Location.of(url)
    stem = TAR_ENDING.sub("", location.base)
    return location.with_base(re.sub(r"(?<!\d)\d+(?=\D*$)", "\0", stem) + location.base[len(stem) :]).url


def parse_manifest(text: bytes | str, url: str) -> Shards:
    """Return the shards in the text of a manifest, with their URLs as written; raise UrlError for any other text.

    >>> shards = parse_manifest('{"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 7}]}', "x.shards.json")
    >>> shards[0].url, shards[0].samples
    ('a.tar', 7)
    """
    with collector_paused():
        return _parse(text, url)


def _parse(text: bytes | str, url: str) -> Shards:
    import json

    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UrlError(f"a manifest that is not JSON: {error}; a list of names is read as @FILE", url=url) from error
    if not isinstance(found, dict) or not isinstance(entries := found.get("shardlist"), list):
        raise UrlError("not a manifest of shards: it has no shardlist", url=url)
    if (version := found.get("wids_version")) != 1:
        raise UrlError(f"a manifest of wids_version {version!r}; only version 1 is supported", url=url)
    if found.get("datasets"):
        raise UrlError("a manifest of other datasets; name their manifests instead", url=url)
    columns = _columns_of([entry for entry in entries if isinstance(entry, dict)])
    names = columns.pop("url", [])
    if len(names) < len(entries) or not _are_right(names, columns):
        for at, entry in enumerate(entries):
            _check_entry(entry, at, url)
    if len(set(names)) < len(entries):
        raise UrlError("a manifest that names a shard twice", url=url)
    return Shards(names, **{_COUNTS.get(word, word): column for word, column in columns.items()})


def dump_manifest(shards: Iterable[Shard]) -> str:
    """Return the text of a manifest of *shards*, one on each line."""
    entries = []
    for shard in shards:
        entry: dict[str, Any] = {"url": shard.url}
        if shard.samples is not None:
            entry["nsamples"] = shard.samples
        if shard.size is not None:
            entry["filesize"] = shard.size
        for word in MARKS:
            if getattr(shard, word):
                entry[word] = True
        for word in _DIGITS:
            if getattr(shard, word) is not None:
                entry[word] = getattr(shard, word)
        entries.append(entry)
    return _dump({"__kind__": "wids-shard-index-v1", "wids_version": 1}, entries)


def without_counts(text: bytes, urls: Container[str]) -> str | None:
    """Return the manifest *text* without the counts of the shards *urls*; None if it has no such counts.

    >>> text = b'{"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 7}, {"url": "b.tar", "nsamples": 5}]}'
    >>> print(without_counts(text, ["a.tar"]), end="")
    {"wids_version": 1, "shardlist": [
    {"url": "a.tar"},
    {"url": "b.tar", "nsamples": 5}
    ]}
    """
    import json

    found = json.loads(text)
    entries = found.pop("shardlist")
    bare = [
        {name: value for name, value in entry.items() if name not in DESCRIPTION} if entry["url"] in urls else entry
        for entry in entries
    ]
    return None if bare == entries else _dump(found, bare)


def _dump(head: dict[str, Any], entries: list[dict[str, Any]]) -> str:
    """Return the text of a manifest: *head*, and then one entry on each line."""
    import json

    return f'{json.dumps(head)[:-1]}, "shardlist": [' + ",".join(f"\n{json.dumps(each)}" for each in entries) + "\n]}\n"


def _columns_of(entries: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the *entries* of a manifest as columns, by name; names that no entry has may be left out."""
    words = ("url", *DESCRIPTION)
    first = entries[0].keys() if entries else {}.keys()
    if sum(map(len, entries)) == len(first) * len(entries):  # probably all have the same names
        with suppress(KeyError):
            columns = {word: [*map(itemgetter(word), entries)] for word in first}
            return {word: columns[word] for word in words if word in first}
    return {word: [entry.get(word, False if word in MARKS else None) for entry in entries] for word in words}


def _are_right(names: list[Any], columns: dict[str, list[Any]]) -> bool:
    """Return whether ``_check_entry`` accepts all entries; checking columns is faster."""
    for word in MOST.keys() & columns.keys():
        numbers = _given(columns[word])
        if set(map(type, numbers)) - {int} or (numbers and not 0 <= min(numbers) <= max(numbers) <= MOST[word]):
            return False
    if any(set(map(type, columns[word])) - {bool} for word in columns.keys() & MARKS):
        return False
    try:
        "".join(names)
        for word in _DIGITS.keys() & columns.keys():
            values = _given(columns[word])
            text = "".join(values).encode(errors="replace")
            if set(map(len, values)) - {_DIGITS[word]} or text.translate(None, _HEX):
                return False
    except TypeError:
        return False
    return all(names)


def _given(column: list[Any]) -> list[Any]:
    return [value for value in column if value is not None] if None in column else column


def _check_entry(entry: Any, at: int, url: str) -> None:
    """Raise UrlError, which names the manifest *url*, if an entry is wrong."""
    if not isinstance(entry, dict) or not isinstance(name := entry.get("url"), str) or not name:
        raise UrlError(f"entry {at} of the manifest has no url", url=url)
    for word, most in MOST.items():
        number = entry.get(word)
        if number is not None and (type(number) is not int or not 0 <= number <= most):
            raise UrlError(f"{Location(name).name} has {word} {number!r} in the manifest", url=url)
    for word in MARKS:
        if type(mark := entry.get(word, False)) is not bool:
            raise UrlError(f"{Location(name).name} has {word} {mark!r} in the manifest", url=url)
    for word, digits in _DIGITS.items():
        value = entry.get(word)
        if value is not None and not (isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value)):
            raise UrlError(
                f"{Location(name).name} has {word} {value!r} in the manifest, not {digits} hex digits", url=url
            )
