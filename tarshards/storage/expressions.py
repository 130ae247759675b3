"""Shard expressions to lists of URLs; pure but for `@file`, globs and manifests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from tarshards.errors import OpenError, UrlError
from tarshards.storage.manifest import SUFFIX, Shard, parse_manifest
from tarshards.storage.streams import SCHEME, public

#: A shard expression, or any nesting of them.
Spec = str | os.PathLike[str] | Iterable["Spec"]

# The address in http://[::1]:8000/a.tar holds no separator.
_SEPARATOR = re.compile(r"::(?![^\[\]]*\])")
_MAGIC = re.compile(r"[*?[]")
# What stands beside shards and is none: no glob means it.
_BESIDE = (".index", ".idx", SUFFIX.lstrip("."))


def expand_urls(spec: Spec) -> list[str]:
    r"""Return the URLs that *spec* names, in the order written, duplicates kept.

    >>> expand_urls("data-{08..10}.tar::http://host/{a,b}.tar")
    ['data-08.tar', 'data-09.tar', 'data-10.tar', 'http://host/a.tar', 'http://host/b.tar']

    - `{000..012}`, `{a,b}`: braces as in bash, also inside `pipe:` commands; `\{` is a brace as such,
      and in a spec that has braces `\\` is a backslash.
    - `one::two`: several specs. A `pipe:` command runs to the end of its string, `::` included: put it last,
      or give a list of specs.
    - `@file`: the specs in a text file, one a line; blank lines and lines that start with `#` do not count.
    - `*`, `?`, `[..]`: the local files that match, sorted, but indexes and manifests; a file of exactly that name
      comes first.
    - `~`: the home directory.
    - `train.shards.json`, or any local or remote name in `.json`: the shards of that manifest, its relative names
      beside it.

    An expression that is malformed or names nothing is a UrlError.
    """
    return [shard.url for shard in expand_shards(spec)]


def expand_shards(spec: Spec) -> list[Shard]:
    """Return the shards that *spec* names as ``expand_urls`` does, with what manifests say of their samples and bytes.

    >>> expand_shards("a-{0..1}.tar")
    [Shard(url='a-0.tar', samples=None, size=None), Shard(url='a-1.tar', samples=None, size=None)]
    """
    shards = list(_expand(spec, ()))
    if not shards:
        raise UrlError("the shard expression is empty", url=spec if isinstance(spec, str) else None)
    return shards


def _expand(spec: Spec, lists: tuple[str, ...]) -> Iterator[Shard]:
    """Yield the shards of *spec*, found inside the list files *lists*."""
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
            elif _is_manifest(url):
                yield from _read_manifest(url)
            else:
                yield from map(Shard, _match(url))


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


def _read_list(path: str, lists: tuple[str, ...]) -> Iterator[Shard]:
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


def _is_manifest(url: str) -> bool:
    path = url.partition("?")[0] if _is_web(url) else url
    if not path.endswith(".json") or url.startswith("pipe:"):
        return False
    return bool(SCHEME.match(url)) or not _MAGIC.search(path) or os.path.lexists(path)


def _is_web(url: str) -> bool:
    return url.lower().startswith(("http:", "https:"))


def _read_manifest(url: str) -> Iterator[Shard]:
    """Yield the shards of the manifest *url*."""
    from tarshards.storage.opening import open_url

    remote = SCHEME.match(url) and not url.lower().startswith("file:")
    if not remote:
        url = os.path.expanduser(url)
    with open_url(url) as stream:
        text = b"".join(iter(lambda: stream.read(1 << 20), b""))
    for shard in parse_manifest(text, public(url)):
        yield shard._replace(url=_beside(url, shard.url, remote=bool(remote)))


def _beside(manifest: str, name: str, *, remote: bool) -> str:
    """Return the URL of the shard that *manifest* calls *name*.

    >>> _beside("data/a.shards.json", "b.tar", remote=False), _beside("http://h/d/a.json?key", "b.tar", remote=True)
    ('data/b.tar', 'http://h/d/b.tar?key')
    """
    local = name.startswith("/") or name.lower().startswith("file:")
    if name == "-" or name.lower().startswith("pipe:") or (remote and local):
        # A manifest is data, often another's: it may neither run commands nor look into our files.
        raise UrlError(f"a manifest may not name {name!r}", url=public(manifest))
    if local or SCHEME.match(name):
        return name
    path, mark, query = manifest.partition("?") if _is_web(manifest) else (manifest, "", "")
    folder, slash, _ = path.rpartition("/")
    if not slash:
        folder = path[: 5 if path.lower().startswith("file:") else 0]
    if path.lower().startswith(("file://", "http:", "https:")):
        from urllib.parse import quote

        name = quote(name)
    return folder + slash + name + mark + query


def _match(url: str) -> Iterator[str]:
    """Yield the local files that match *url*, or *url* itself where it is no pattern."""
    if not url:
        raise UrlError("an empty name in a shard expression")
    prefix = next((prefix for prefix in ("file://", "file:") if url.startswith(prefix)), "")
    if not prefix and SCHEME.match(url):
        return iter([url])
    name = path = os.path.expanduser(url.removeprefix(prefix))
    encoded = prefix == "file://"
    if encoded:
        from urllib.parse import quote, unquote

        path = unquote(name)
    if not _MAGIC.search(name) or os.path.lexists(path):
        return iter([prefix + name])
    from glob import glob

    matches = sorted(match for match in glob(path) if not match.endswith(_BESIDE))
    if not matches:
        raise UrlError("no file matches", url=url)
    return (prefix + (quote(match) if encoded else match) for match in matches)
