"""Dataset manifests: wids JSON version 1, the shards of a dataset with their samples and bytes.

Format: webdataset's wids, "wids_specs.py"; ``{"wids_version": 1, "shardlist": [{"url", "nsamples", "filesize"}]}``.
Entries of ours, which others ignore: ``"concatenated": true`` says that a shard may consist of several archives, and
``"indexed": true`` that its index lies beside it. ``"sha256"`` is the checksum of the file, and ``"digest"`` that of
its keys and members, as its index has it, in hexadecimal digits.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from tarshards.errors import UrlError
from tarshards.storage.compression import TAR_ENDING
from tarshards.storage.location import Location

SUFFIX = ".shards.json"
DESCRIPTION = ("nsamples", "filesize", "concatenated", "indexed", "sha256", "digest")  # what an entry says of its shard
MARKS = ("concatenated", "indexed")  # those that are true or false
MAX_BYTES = 1 << 28  # of a manifest: about 150 bytes a shard
_HEX = frozenset("0123456789abcdef")
_DIGITS = {"sha256": 64, "digest": 32}  # how many hexadecimal digits each has
MOST = {"nsamples": (1 << 32) - 1, "filesize": (1 << 53) - 1}  # of a shard: plans and sums hold as much


class Shard(NamedTuple):
    """The URL of a shard, and its samples and bytes where a manifest gives them.

    *concatenated* says that it may consist of several archives, *indexed* that its index lies beside it; *sha256* is
    the checksum of the file, and *digest* that of its keys and members, as its index has it, in hexadecimal digits.
    *split* is the rule that its reader wants for the names of members, "first" or "last", and no manifest has it; None:
    "first", or that of the index.
    """

    url: str
    samples: int | None = None
    size: int | None = None
    concatenated: bool = False
    indexed: bool = False
    sha256: str | None = None
    digest: str | None = None
    split: str | None = None

    @classmethod
    def of(cls, shard: Shard | str) -> Shard:
        """Return a shard or its URL as a shard."""
        return cls(shard) if isinstance(shard, str) else shard


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
    """Return the URL of the manifest of the series of shards to which *url* belongs.

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
    return location.with_base(re.sub(r"\d+(?=\D*$)", "\0", stem) + location.base[len(stem) :]).url


def parse_manifest(text: bytes | str, url: str) -> list[Shard]:
    """Return the shards that the manifest *text* names, their URLs as written; raise UrlError if it is none.

    >>> parse_manifest('{"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 7}]}', "x.shards.json")
    [Shard(url='a.tar', samples=7, size=None, concatenated=False, indexed=False, sha256=None, digest=None, split=None)]
    """
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
    shards = [_parse_entry(entry, place, url) for place, entry in enumerate(entries)]
    if len({shard.url for shard in shards}) < len(shards):
        raise UrlError("a manifest that names a shard twice", url=url)
    return shards


def dump_manifest(shards: Iterable[Shard]) -> str:
    """Return the text of the manifest of *shards*, one a line."""
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
    """Return the manifest *text* with nothing but the names of the shards *urls*; None if it has no more of them.

    Everything else is kept.

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
    """Return the text of a manifest, one entry a line after the rest."""
    import json

    return f'{json.dumps(head)[:-1]}, "shardlist": [' + ",".join(f"\n{json.dumps(each)}" for each in entries) + "\n]}\n"


def _parse_entry(entry: Any, place: int, url: str) -> Shard:
    if not isinstance(entry, dict) or not isinstance(name := entry.get("url"), str) or not name:
        raise UrlError(f"entry {place} of the manifest has no url", url=url)
    samples, size = entry.get("nsamples"), entry.get("filesize")
    for word, number in (("nsamples", samples), ("filesize", size)):
        if number is not None and (type(number) is not int or not 0 <= number <= MOST[word]):
            raise UrlError(f"{Location(name).name} has {word} {number!r} in the manifest", url=url)
    for word in MARKS:
        if type(mark := entry.get(word, False)) is not bool:
            raise UrlError(f"{Location(name).name} has {word} {mark!r} in the manifest", url=url)
    for word, digits in _DIGITS.items():
        value = entry.get(word)
        if value is not None and not (isinstance(value, str) and len(value) == digits and set(value) <= _HEX):
            raise UrlError(
                f"{Location(name).name} has {word} {value!r} in the manifest, not {digits} hex digits", url=url
            )
    marks = [entry.get(word, False) for word in MARKS]
    return Shard(name, samples, size, *marks, *map(entry.get, _DIGITS))
