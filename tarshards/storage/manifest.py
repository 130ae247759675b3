"""Dataset manifests: wids JSON version 1, the shards of a dataset with their samples and bytes.

Format: webdataset's wids, "wids_specs.py"; ``{"wids_version": 1, "shardlist": [{"url", "nsamples", "filesize"}]}``.
Entries of ours, which others ignore: ``"concatenated": true`` says that a shard may consist of several archives, and
``"indexed": true`` that its index lies beside it. ``"sha256"`` is the checksum of the file, in hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tarshards.errors import UrlError
from tarshards.storage.location import Location

SUFFIX = ".shards.json"
DESCRIPTION = ("nsamples", "filesize", "concatenated", "indexed", "sha256")  # what an entry says of its shard
MARKS = ("concatenated", "indexed")  # those that are true or false
MAX_BYTES = 1 << 28  # of a manifest: about 100 bytes a shard
_HEX = frozenset("0123456789abcdef")
MOST = {"nsamples": (1 << 32) - 1, "filesize": (1 << 53) - 1}  # of a shard: plans and sums hold as much


class Shard(NamedTuple):
    """The URL of a shard, and its samples and bytes where a manifest gives them.

    *concatenated* says that it may consist of several archives, *indexed* that its index lies beside it; *sha256* is
    the checksum of the file, in hexadecimal digits.
    """

    url: str
    samples: int | None = None
    size: int | None = None
    concatenated: bool = False
    indexed: bool = False
    sha256: str | None = None

    @classmethod
    def of(cls, shard: Shard | str) -> Shard:
        """Return a shard or its URL as a shard."""
        return cls(shard) if isinstance(shard, str) else shard


def parse_manifest(text: bytes | str, url: str) -> list[Shard]:
    """Return the shards that the manifest *text* names, their URLs as written; raise UrlError if it is none.

    >>> parse_manifest('{"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 7}]}', "x.shards.json")
    [Shard(url='a.tar', samples=7, size=None, concatenated=False, indexed=False, sha256=None)]
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
        if shard.sha256 is not None:
            entry["sha256"] = shard.sha256
        entries.append(entry)
    return _dump({"__kind__": "wids-shard-index-v1", "wids_version": 1}, entries)


def without_counts(text: bytes, is_replaced: Callable[[str], bool]) -> str | None:
    """Return the manifest *text* with nothing but the names of shards that *is_replaced* says; None if it has no more.

    Everything else is kept. A file that is not a manifest has no shards.

    >>> text = b'{"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 7}, {"url": "b.tar", "nsamples": 5}]}'
    >>> print(without_counts(text, lambda url: url == "a.tar"), end="")
    {"wids_version": 1, "shardlist": [
    {"url": "a.tar"},
    {"url": "b.tar", "nsamples": 5}
    ]}
    """
    import json

    try:
        shards = parse_manifest(text, "")
    except UrlError:
        return None
    found = json.loads(text)
    stale = [place for place, shard in enumerate(shards) if shard != Shard(shard.url) and is_replaced(shard.url)]
    if not stale:
        return None
    entries = found.pop("shardlist")
    for place in stale:
        entries[place] = {name: value for name, value in entries[place].items() if name not in DESCRIPTION}
    return _dump(found, entries)


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
    sha256 = entry.get("sha256")
    if sha256 is not None and not (isinstance(sha256, str) and len(sha256) == 64 and set(sha256) <= _HEX):
        raise UrlError(f"{Location(name).name} has sha256 {sha256!r} in the manifest, not 64 hex digits", url=url)
    return Shard(name, samples, size, entry.get("concatenated", False), entry.get("indexed", False), sha256)
