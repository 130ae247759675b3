"""Patterns on web servers: folders are listed by WebDAV's PROPFIND (RFC 4918), which nginx and Apache support."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from fnmatch import translate
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit
from xml.parsers import expat

from tarshards.errors import OpenError, UrlError
from tarshards.storage.connections import Response
from tarshards.storage.location import Location
from tarshards.storage.manifest import MAX_BYTES
from tarshards.storage.redaction import without_userinfo
from tarshards.storage.requests import PASSING, Address, Patience, StatusError, check_body, status_of
from tarshards.storage.servers import Origin
from tarshards.storage.streams import BUFFER
from tarshards.storage.wire import run

QUESTION = b'<?xml version="1.0"?><propfind xmlns="DAV:"><prop><resourcetype/></prop></propfind>'
HEADERS = {"Depth": "1", "Content-Type": "application/xml", "Content-Length": str(len(QUESTION))}

MOST_NAMED = 1 << 20  # bytes of one name or tag, which the parser reads again from its beginning

CURE = "name them by braces, as x-{000..146}.tar, by a list, as @FILE, or by a manifest"


def matching(location: Location) -> Iterator[str]:
    """Yield the URLs that match *location*, an http URL with a `*` in its path, in the order of their names.

    Each part of the path that has a `*` is a pattern, which may have `[..]` too. Raises UrlError for a server that
    lists nothing, OpenError for one that cannot be reached or that lists another folder.
    """
    Address(location)  # raises UrlError for one that is malformed
    scheme, _, path = (location.folder + location.base).partition("://")
    host, *parts = path.split("/")
    for url in _expanded(f"{scheme}://{host}", parts, location):
        yield url + location.query


def _expanded(head: str, parts: list[str], location: Location) -> Iterator[str]:
    """Yield the URLs, without their query, that match *head* and the *parts* after it."""
    number = next((i for i, part in enumerate(parts) if "*" in part), None)
    if number is None:
        yield "/".join([head, *parts])
        return
    folder = "/".join([head, *parts[:number], ""])
    escaped = re.sub("(?i)%(2A|3F|5B)", lambda mark: f"[{unquote(mark[0])}]", parts[number])
    is_match = re.compile(translate(unquote(escaped))).match
    rest = parts[number + 1 :]
    for name, is_folder in sorted(_list(Location(folder + location.query, location.remote), location)):
        is_hidden = name.startswith(".") and not escaped.startswith(".")
        if is_folder == bool(rest) and is_match(name) and not is_hidden:
            yield from _expanded(folder + quote(name, safe="!$&'(),;=@+"), rest, location)


def _list(folder: Location, pattern: Location) -> set[tuple[str, bool]]:
    """Return the names in *folder*, and whether each is a folder."""
    address = Address(folder)

    def ask() -> set[tuple[str, bool]] | str:
        try:
            response = address.request(HEADERS, method="PROPFIND", body=io.BytesIO(QUESTION))
        except StatusError as error:
            if error.code in (401, *PASSING):
                raise
            return status_of(error, folder)
        with response:
            if response.status != 207:
                return f"{response.status} {response.reason}"
            run(check_body(response, folder.name))
            return set(_names(_entries(response, folder), folder))

    found = Patience(address).attempt(ask)
    if isinstance(found, str):
        said = f"it answered PROPFIND with {found}"
        raise UrlError(f"a web server does not list the files that match a pattern ({said}): {CURE}", url=pattern.name)
    return found


def _names(entries: Iterator[tuple[str, bool]], folder: Location) -> Iterator[tuple[str, bool]]:
    """Yield the names of the *entries* of a list, which may be URLs or paths; refuse those of other folders."""
    url = without_userinfo(folder.folder)
    here = [unquote(part) for part in urlsplit(url).path.split("/")[:-1]]
    for href, is_folder in entries:
        try:
            target = urljoin(url, href.strip())
            is_ours = Origin.of(target) == Origin.of(url)
        except ValueError:
            is_ours = False
        path = [unquote(part) for part in urlsplit(target).path.rstrip("/").split("/")] if is_ours else []
        if path[: len(here)] != here:
            raise OpenError(f"the server listed {Location(href).name[:200]}, which is elsewhere", url=folder.name)
        if len(path) == len(here) + 1 and path[-1] not in (".", ".."):
            yield path[-1], is_folder


def _entries(response: Response, folder: Location) -> Iterator[tuple[str, bool]]:
    """Yield the href of every entry of a list, and whether it is a folder, while its XML is read.

    Raises OpenError if the XML has a document type, and with it entities.
    """
    parser = expat.ParserCreate(namespace_separator=" ")
    parents: list[str] = []
    entries: list[tuple[str, bool]] = []

    def start(name: str, _: dict[str, str]) -> None:
        if name == "DAV: response":
            entries.append(("", False))
        elif name == "DAV: collection" and parents[-1:] == ["DAV: resourcetype"] and entries:
            entries[-1] = entries[-1][0], True
        parents.append(name)

    def text(data: str) -> None:
        if parents[-2:] == ["DAV: response", "DAV: href"]:
            name = entries[-1][0] + data
            check(len(name))
            entries[-1] = name, entries[-1][1]

    def check(held: int) -> None:
        if held > MOST_NAMED:
            raise OpenError(f"more than {MOST_NAMED:,} bytes, the limit for a name in a list", url=folder.name)

    def refuse(*_: Any) -> None:
        raise OpenError("the server's list has a document type, which is refused", url=folder.name)

    parser.StartElementHandler, parser.EndElementHandler = start, lambda name: parents.pop()
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text, refuse
    parser.buffer_text, parser.buffer_size = True, BUFFER  # not a call for each reference to a character
    size = 0
    while data := response.read(BUFFER):
        size += len(data)
        if size > MAX_BYTES:
            raise OpenError(f"more than {MAX_BYTES:,} bytes, the limit for a list", url=folder.name)
        try:
            parser.Parse(data, False)
        except expat.ExpatError as error:
            raise OpenError(f"the server's list is not XML: {error}", url=folder.name) from error
        check(size - parser.CurrentByteIndex)
        while len(entries) > 1:  # the last one may be incomplete
            yield entries.pop(0)
    try:
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise ConnectionError("the server's list broke off") from error
    yield from entries
