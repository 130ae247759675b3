"""Shard expressions to lists of URLs; pure but for `@file` and globs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from glob import glob
from urllib.parse import quote, unquote

from tarshards.errors import OpenError, UrlError

#: A shard expression, or any nesting of them.
Spec = str | os.PathLike[str] | Iterable["Spec"]

# The address in http://[::1]:8000/a.tar holds no separator.
_SEPARATOR = re.compile(r"::(?![^\[\]]*\])")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_MAGIC = re.compile(r"[*?[]")


def expand_urls(spec: Spec) -> list[str]:
    r"""Return the URLs that *spec* names, in the order written, duplicates kept.

    >>> expand_urls("data-{08..10}.tar::http://host/{a,b}.tar")
    ['data-08.tar', 'data-09.tar', 'data-10.tar', 'http://host/a.tar', 'http://host/b.tar']

    - `{000..012}`, `{a,b}`: braces as in bash, also inside `pipe:` commands; `\{` is a brace as such,
      and in a spec that has braces `\\` is a backslash.
    - `one::two`: several specs. A `pipe:` command runs to the end of its string, `::` included: put it last,
      or give a list of specs.
    - `@file`: the specs in a text file, one a line; blank lines and lines that start with `#` do not count.
    - `*`, `?`, `[..]`: the local files that match, sorted; a file of exactly that name comes first.
    - `~`: the home directory.

    An expression that is malformed or names nothing is a UrlError.
    """
    urls = list(_expand(spec, ()))
    if not urls:
        raise UrlError("the shard expression is empty", url=spec if isinstance(spec, str) else None)
    return urls


def _expand(spec: Spec, lists: tuple[str, ...]) -> Iterator[str]:
    """Yield the URLs of *spec*, found inside the list files *lists*."""
    if isinstance(spec, bytes) or not isinstance(spec, str | os.PathLike | Iterable):
        raise TypeError(f"a shard expression is a str, a path or an iterable of them, not {type(spec).__name__}")
    if not isinstance(spec, str | os.PathLike):
        for each in spec:
            yield from _expand(each, lists)
        return
    for part in _split(os.fspath(spec)):
        for url in _braces(part):
            if url.startswith("@"):
                yield from _read_list(url[1:], lists)
            else:
                yield from _match(url)


def _split(spec: str) -> Iterator[str]:
    """Yield the parts of *spec* between `::`.

    >>> list(_split("a.tar::pipe:ssh host 'std::cat'"))
    ['a.tar', "pipe:ssh host 'std::cat'"]
    """
    start = 0
    for separator in _SEPARATOR.finditer(spec):
        if spec.startswith("pipe:", start):
            break
        yield spec[start : separator.start()]
        start = separator.end()
    yield spec[start:]


def _braces(part: str) -> Iterator[str]:
    # Only braces give the backslash a meaning, so that a list of plain names expands to itself.
    if "{" not in part and "}" not in part:
        return iter([part])
    from braceexpand import braceexpand

    try:
        return iter(braceexpand(part))
    except ValueError as exc:
        raise UrlError("unbalanced braces", url=part) from exc


def _read_list(path: str, lists: tuple[str, ...]) -> Iterator[str]:
    path = os.path.expanduser(path)
    real = os.path.realpath(path)
    if real in lists:
        raise UrlError("a list file that contains itself", url=f"@{path}")
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.strip() for line in file]
    except OSError as exc:
        raise OpenError(exc.strerror or str(exc), url=f"@{path}") from exc
    except UnicodeDecodeError as exc:
        raise UrlError("a list file is UTF-8 text, one spec a line", url=f"@{path}") from exc
    for line in lines:
        if line and not line.startswith("#"):
            yield from _expand(line, (*lists, real))


def _match(url: str) -> Iterator[str]:
    """Yield the local files that match *url*, or *url* itself where it is no pattern."""
    if not url:
        raise UrlError("an empty name in a shard expression")
    prefix = next((prefix for prefix in ("file://", "file:") if url.startswith(prefix)), "")
    if not prefix and _SCHEME.match(url):
        return iter([url])
    name = os.path.expanduser(url.removeprefix(prefix))
    encoded = prefix == "file://"
    path = unquote(name) if encoded else name
    if not _MAGIC.search(name) or os.path.lexists(path):
        return iter([prefix + name])
    matches = sorted(glob(path))
    if not matches:
        raise UrlError("no file matches", url=url)
    return (prefix + (quote(match) if encoded else match) for match in matches)
