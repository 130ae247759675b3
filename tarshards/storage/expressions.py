"""Expand shard expressions to lists of URLs; only `@file`, globs, manifests and catalogs read files or servers."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from itertools import islice, product, starmap
from operator import add, attrgetter
from typing import Any

from tarshards import kernels
from tarshards.errors import UrlError, shortened, visible
from tarshards.storage.derived import COLUMNS, INDEX
from tarshards.storage.location import CHAINED, FAMILIES, SEPARATOR, Location
from tarshards.storage.manifest import MAX_BYTES, SUFFIX, ArchiveEnd, Shard, Shards, check_end, parse_manifest
from tarshards.storage.redaction import redacted
from tarshards.storage.remote import Remote
from tarshards.storage.streams import InheritedFile, failure

#: A shard expression, a shard, or any nesting of them.
Spec = str | os.PathLike[str] | Shard | Iterable["Spec"]

#: The module that expands an entry of a file, such as `catalog.yaml#imagenet@2`, by the suffix of the file: its
#: `expand(file, entry)` returns the shards. It belongs to a higher layer, so it is imported by name, at first use.
EXPANDERS = {".yaml": "tarshards.formats.catalog", ".yml": "tarshards.formats.catalog"}

MOST_SHARDS = 3_000_000  # of an expression: as many as a manifest of MAX_BYTES can name
TOO_MANY = f"an expression names at most {MOST_SHARDS:,} shards"
_RANGE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.-?(\d+))?")
_NUMBERS = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
# Marks that only expressions have, not plain URLs, in names between NULs. Before each stands one rare character of it:
# searching for that first is faster.
_MARKS = (
    *zip("{}*?[#~", "{}*?[#~"),
    (":", "::"),
    ("@", "\0@"),
    ("j", ".json\0"),
    ("(", ".."),
    ("<", ".."),
    ("P", "_OP_"),
)
# Ranges as other tools write them: NeMo takes all these pairs for braces. Braces within a glob's class give a class for
# each number: of its digits.
_OTHER_RANGES = re.compile(
    r"(?:\[|\(|<|_OP_)(?P<inner>-?\w{1,20}\.\.-?\w{1,20}?(?:\.\.-?\d{1,20})?)(?:\]|\)|>|_CL_)"
    r"|\[[!^]?(?P<class>\{[^\[\]{},]{0,40}\.\.[^\[\]{},]{0,40}\})\]"
)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # braceexpand's order
_ENDLESS = 10**18
_SHOWN = 500  # characters of an expression that an error shows
_TOGETHER = 1 << 12  # expressions of a list that are expanded together
DEEPEST = 32  # braces in each other: braceexpand reads the text again for each

# Schemes whose URLs never name local files. Not so `pipe`: a shell's `*` may expand to a file of such a name.
_NEVER_FILES = FAMILIES.keys() - {"pipe"}
LONGEST_NAME = 255  # bytes of a part of a path, on all file systems of Linux
_LONGEST_PATH = 4096  # bytes of a path
# The number of a shard in its name without suffixes, such as `train-003`, `train-00003-of-00010` or `003.b`.
_NUMBERED = re.compile(r"(.*?)(\d+)(-of-\d+|\D*)")
# Endings of derived files, which globs leave out.
_BESIDE = (INDEX, COLUMNS, ".idx", SUFFIX[1:])


def expand_urls(spec: Spec) -> list[str]:
    r"""Return the URLs that *spec* names, in the order written, duplicates kept.

    >>> expand_urls("data-{08..10}.tar::http://host/{a,b}.tar")
    ['data-08.tar', 'data-09.tar', 'data-10.tar', 'http://host/a.tar', 'http://host/b.tar']

    - `{000..012}`, `{a,b}`: braces as in bash, also inside `pipe:` commands; `\{` is a literal brace,
      and in a spec with braces `\\` is a backslash.
    - `one::two`: several specs. A `pipe:` command runs to the end of its string, `::` included: put it last,
      or give a list of specs. A chain of fsspec is one spec: `simplecache::http://host/a.tar`, `zip://a.tar::all.zip`;
      the links after its caches and archives belong to it. A local file of exactly that name takes precedence, even if
      the name contains `::` or braces; URLs write `::` as `%3A%3A`.
    - `@file`: the specs in a text file, `@-` in stdin, one on each line; blank lines and lines that start with `#` are
      ignored. They may not name commands (`pipe:`). If there are NUL characters (`find -print0`), they end names, which
      are taken as they are.
    - `*`, `?`, `[abc]`: the local files that match, sorted, except indexes and manifests; a file of exactly that
      name takes precedence. `*` and `[abc]` also list an object store (`s3://bucket/x-*.tar`), and `*` the folders of
      a web server that supports WebDAV's PROPFIND (`http://host/dir/x-*.tar`). A warning names the shards that are
      missing in a run of numbers. Ranges in other brackets, such as NeMo's `[0..3]` and `_OP_0..3_CL_`, are errors.
    - `~`: the home directory.
    - `train.shards.json`, or any local or remote name that ends in `.json`: the shards of that manifest; its
      names are relative to it.
    - `catalog.yaml#imagenet@2/train`: the shards of an entry of a catalog; see ``tarshards.formats.catalog``.

    Raises UrlError for an expression that is malformed, names nothing, or names more than 3,000,000 shards.
    """
    return find_shards(spec).urls


def find_shards(
    spec: Spec,
    remote: Remote | None = None,
    *,
    concatenated: bool = False,
    allow_pipe: bool = False,
    end: ArchiveEnd = "required",
    index_dir: str | os.PathLike[str] | None = None,
) -> Shards:
    """Return the shards that *spec* names, as ``expand_urls`` does, with their entries in manifests.

    All shards get the properties that are given: *remote*, with which manifests and folders are read, too,
    *concatenated* or *allow_pipe*, another *end* than "required", and *index_dir*. Only *spec* itself may name a
    command; raises UrlError if a list, manifest or catalog does.

    >>> find_shards("a-{0..1}.tar").urls
    ['a-0.tar', 'a-1.tar']
    """
    check_end(end)
    kernels.warn_if_missing()  # here since all who read begin with a shard expression
    shards = _joined_shards(_expand(spec, (), remote, {}), spec)
    if not shards:
        raise UrlError("the shard expression is empty", url=spec_name(spec) or None)
    folder = None if index_dir is None else os.path.expanduser(os.fspath(index_dir))
    marks = {
        "concatenated": concatenated,
        "allow_pipe": allow_pipe,
        "end": end,
        "remote": remote,
        "index_dir": folder,
    }
    asked = {name: [mark] * len(shards) for name, mark in marks.items() if mark != Shard._field_defaults[name]}
    return shards.replace(**asked)


def _joined_shards(parts: Iterable[Shards], spec: Spec) -> Shards:
    """Return the shards of all *parts* of *spec*; raise UrlError for more than MOST_SHARDS."""
    found, count = [], 0
    for part in parts:
        found.append(part)
        count += len(part)
        if count > MOST_SHARDS:
            raise UrlError(TOO_MANY, url=spec_name(spec))
    return Shards.joined(found) if found else Shards([])


def spec_name(spec: Spec, name: Callable[[Location], str] = attrgetter("name")) -> str:
    """Return a shard expression as messages show it, without credentials, or with another *name* of each location.

    >>> spec_name("a-{0..9}.tar::http://me:secret@host/b.tar?key=1"), spec_name(["a.tar", "b.tar"])
    ('a-{0..9}.tar::http://host/b.tar?key=...', 'a.tar, b.tar')
    """
    if isinstance(spec, str | os.PathLike):
        return "::".join(name(Location(part)) for part in _split(os.fspath(spec)))
    if isinstance(spec, Shard):
        return name(Location(spec.url))
    return ", ".join(spec_name(each, name) for each in spec)


def _expand(spec: Spec, lists: tuple[str, ...], remote: Remote | None, known: dict[str, Shards]) -> Iterator[Shards]:
    """Yield the shards of *spec* in batches; *lists* are the list files that lead to it.

    *known* has the shards of the lists, manifests and patterns that were read: each is read once, however often it is
    named.
    """
    is_file = hasattr(spec, "read") and not isinstance(spec, os.PathLike)  # an open file is iterable, too, line by line
    if is_file or isinstance(spec, bytes | Mapping) or not isinstance(spec, str | os.PathLike | Iterable):
        given = f"{type(spec).__name__}: {redacted(shortened(spec))}"
        if is_file:
            given = f"{type(spec).__name__}, an open file: group_members(read_members(file)) reads one"
        raise TypeError(f"a shard expression is a str, a path or an iterable of them, not {given}")
    if isinstance(spec, Shards):
        yield spec
    elif isinstance(spec, Shard):
        yield Shards.of([spec])
    elif not isinstance(spec, str | os.PathLike):
        rest: Iterator[Any] = iter(spec)
        while some := list(islice(rest, _TOGETHER)):
            if all(type(each) is str for each in some) and _are_urls(some):
                yield Shards(some)
            elif all(isinstance(each, Shard) for each in some):
                yield Shards.of(some)
            else:
                for each in some:
                    yield from _expand(each, lists, remote, known)
    else:
        for part in _split(os.fspath(spec)):
            is_there = "{" in part and os.path.lexists(os.path.expanduser(part))
            names = [part] if is_there else list(expand_braces(part, Location(f"@{lists[-1]}") if lists else None))
            if _are_urls(names):
                yield Shards(names)
            else:
                for name in names:
                    yield from _named(name, lists, remote, known)


def _named(url: str, lists: tuple[str, ...], remote: Remote | None, known: dict[str, Shards]) -> Iterator[Shards]:
    """Yield the shards of an expression without braces."""
    if url in known:
        yield known[url]
    elif url.startswith("@") and not lists:
        yield from _read_list(url[1:], lists, remote, known)
    elif url.startswith("@"):
        known[url] = _joined_shards(_read_list(url[1:], lists, remote, known), url)
        yield known[url]
    elif not url:
        raise UrlError("an empty name in a shard expression")
    elif (entry := _split_entry(location := Location.of(url, remote).expanduser())) is not None:
        module, file, name = entry
        known[url] = import_module(module).expand(file, name)
        yield known[url]
    else:
        yield _shards_of(location, known)


def _are_urls(names: list[str]) -> bool:
    """Return whether all *names* are plain URLs of shards, which need no expansion: the usual case of long lists.

    >>> _are_urls(["d/a.tar", "http://host/b.tar"]), _are_urls(["d/*.tar"]), _are_urls(["a.shards.json"])
    (True, False, False)
    """
    text = "\0" + "\0".join(names) + "\0"
    if "" in names or text.count("\0") != len(names) + 1:
        return False
    if any(rare in text and mark in text for rare, mark in _MARKS):
        return False
    return ":" not in text or all("://" in name or ":" not in name for name in names)


def shards_in(file: Location, specs: Iterable[str]) -> Shards:
    """Return the shards that expressions in the text of *file* name, relative to it.

    Such a text is data, often someone else's. Raises UrlError if it names a command, stdin, a list, an entry of a file,
    or, in a remote file, a local one; and for more than MOST_SHARDS.
    """
    return _joined_shards(_named_in(file, specs), file.url)


def _named_in(file: Location, specs: Iterable[str]) -> Iterator[Shards]:
    known: dict[str, Shards] = {}
    for names in (list(expand_braces(part, file)) for spec in specs for part in _split(spec, file)):
        if _are_urls(names) and _are_urls(urls := _resolved(file, names)):
            yield Shards(urls)
            continue
        for name in names:
            location = Location.of(name, file.remote)
            if not name or name.startswith("@") or _split_entry(location) is not None:
                raise UrlError(f"a catalog names shards and manifests, not {location.name!r}", url=file.name)
            yield _shards_of(file.resolve(name), known)


def _split_entry(location: Location) -> tuple[str, Location, str] | None:
    """Return the module that expands an entry of a file, the file and the entry; None for other names.

    >>> _split_entry(Location("d/sets.yaml#a@2/train")), _split_entry(Location("d/a#2.tar"))
    (('tarshards.formats.catalog', Location('d/sets.yaml'), 'a@2/train'), None)
    """
    if "#" not in location.url or location.is_stream or (location.path and os.path.lexists(location.path)):
        return None
    before, _, entry = location.url.rpartition("#")
    file = Location(before, location.remote)
    module = next((module for ending, module in EXPANDERS.items() if file.base.endswith(ending)), None)
    return None if module is None else (module, file, entry)


def _split(spec: str, file: Location | None = None) -> Iterator[str]:
    """Yield the parts of *spec* between `::`; a chain of fsspec is one part, and so is the name of an existing file.

    Names are relative to *file*, or else to the current folder.

    >>> list(_split("a.tar::simplecache::http://host/b.tar::pipe:ssh host 'std::cat'"))
    ['a.tar', 'simplecache::http://host/b.tar', "pipe:ssh host 'std::cat'"]
    """
    parts = list(_parts(spec))
    folder = "" if file is None else None if file.path is None else os.path.dirname(file.path)
    begin = 0
    while begin < len(parts):
        end = begin + 1
        if folder is not None and end < len(parts):
            end = _end_of_name(parts, begin, folder)
        name = "::".join(parts[begin:end])
        is_file = end > begin + 1 or (
            folder is not None and "::" in name and os.path.lexists(os.path.join(folder, name))
        )
        yield f"./{name}" if is_file and Location(name).scheme else name
        begin = end


def _end_of_name(parts: list[str], begin: int, folder: str) -> int:
    """Return the end of the longest run of *parts*, from *begin*, that names a file in *folder* if joined by `::`."""
    from glob import escape, has_magic, iglob

    found = begin + 1
    length, depth = len(parts[begin]), _depth_of(parts[begin])
    for end in range(begin + 2, len(parts) + 1):
        length += 2 + len(parts[end - 1])
        depth += _depth_of(parts[end - 1])
        if depth < 0 or length > _LONGEST_PATH:
            break
        if depth:  # the rest of the braces may be in the next part
            continue
        try:
            name = os.path.expanduser(next(expand_braces("::".join(parts[begin:end]))))
        except UrlError:
            break
        if name.startswith(("@", "pipe:")) or "://" in name:
            break
        path = os.path.join(folder, name)
        if os.path.lexists(path) or (has_magic(name) and any(iglob(os.path.join(escape(folder), name)))):
            found = end
        elif has_magic(name) or max(map(len, name.split("/"))) > LONGEST_NAME:
            break
        if "::" in (inner := os.path.dirname(path)) and not os.path.lexists(inner):
            break
    return found


def _depth_of(part: str) -> int:
    """Return the number of braces that *part* opens, less those that it closes."""
    marks = re.sub(r"\\.", "", part, flags=re.DOTALL) if "\\" in part else part
    return marks.count("{") - marks.count("}")


def _parts(spec: str) -> Iterator[str]:
    start = link = 0
    for separator in SEPARATOR.finditer(spec):
        if spec.startswith("pipe:", start):
            break
        scheme = spec[link : separator.start()].partition("://")[0]
        link = separator.end()
        if scheme not in CHAINED:
            yield spec[start : separator.start()]
            start = link
    yield spec[start:]


def expand_braces(part: str, file: Location | None = None) -> Iterator[str]:
    """Yield the names that *part* expands to; errors name *file*, if *part* is from one."""
    other = _OTHER_RANGES.search(part) if ".." in part else None
    # Without braces a backslash is an ordinary character, so that a list of plain names expands to itself.
    if "{" not in part and "}" not in part and other is None:
        return iter([part])

    def fault(reason: str) -> UrlError:
        where = Location(part).name
        if file is not None:
            return UrlError(f"{shortened(where)}: {reason}", url=file.name)
        return UrlError(reason, url=where if len(where) <= _SHOWN else f"{where[:_SHOWN]}...")

    if other is not None and not Location(part).is_stream and not _is_there(_to_slash(part, other.end()), file):
        ours = other["class"] or f"{{{other['inner']}}}"
        raise fault(f"{other[0]} is not a range here; write {ours}")
    count, depth = _count(part)
    if depth > DEEPEST:
        raise fault("braces are nested too deeply")
    if count > MOST_SHARDS:
        raise fault(f"{count:,} names{' or more' * (count == _ENDLESS)}; {TOO_MANY}")
    if count * len(part) > MAX_BYTES:
        raise fault(f"names of more than {MAX_BYTES:,} characters together")
    if (names := _ranges(part)) is not None:
        return names
    from braceexpand import braceexpand

    try:
        return iter(braceexpand(part))
    except ValueError as exc:
        raise fault("unbalanced braces") from Location(part).safe(exc)


def _to_slash(path: str, offset: int) -> str:
    """Return the beginning of *path* up to the first slash after *offset*."""
    return path[: f"{path}/".index("/", offset)]


def _is_there(name: str, file: Location | None) -> bool:
    """Return whether a local file or folder has exactly this name, relative to *file* or the current folder."""
    location = (Location(name) if file is None else file.resolve(name)).expanduser()
    return location.path is not None and os.path.lexists(location.path)


def _ranges(part: str) -> Iterator[str] | None:
    """Return an iterator of the expanded names if all braces of *part* are ranges of equally long numbers; else None.

    >>> list(_ranges("a-{08..10}.tar")), list(_ranges("{8..9}{0..1}")), _ranges("a-{8..10}.tar")
    (['a-08.tar', 'a-09.tar', 'a-10.tar'], ['80', '81', '90', '91'], None)
    """
    begin, *ranges = _NUMBERS.split(part)
    if re.search(r"[{}\\]", begin + "".join(ranges[2::3])):
        return None
    numbers: list[Iterator[str]] = []
    for first, last, text in zip(*[iter(ranges)] * 3):
        if len(first) != len(last) or first > last:
            return None
        numbers.append(_numbered("" if numbers else begin, first, last, text))
    return (numbers[0] if len(numbers) == 1 else map("".join, product(*numbers))) if numbers else None


def _numbered(before: str, first: str, last: str, after: str) -> Iterator[str]:
    """Yield the numbers from *first* to *last*, which are equally long, each between *before* and *after*.

    >>> list(_numbered("a", "08", "10", "b")), len([*_numbered("", "00998", "03001", "")])
    (['a08b', 'a09b', 'a10b'], 2004)
    """
    begin, count = int(first), int(last) - int(first) + 1
    if len(first) < 4 or count < 1000:
        form = f"{before.replace('%', '%%')}%0{len(first)}d{after.replace('%', '%%')}"
        return map(form.__mod__, range(begin, begin + count))
    # Joining two halves of a name takes a fifth of the time of formatting its number.
    heads = [f"{before}{number:0{len(first) - 3}d}" for number in range(begin // 1000, int(last) // 1000 + 1)]
    tails = [f"{number:03d}{after}" for number in range(1000)]
    return islice(starmap(add, product(heads, tails)), begin % 1000, begin % 1000 + count)


def _count(part: str) -> tuple[int, int]:
    """Return how many names *part* expands to, at most 10^18, and how deep its braces are, before they are expanded.

    >>> _count("a-{0..9}{b,c{d..f}}.tar"), _count("{00..99999999}")
    ((40, 2), (100000000, 1))
    """
    deepest = 0
    opened = [(0, 0, 1)]  # for each open brace: the offset of its text, and the names before and after its last comma
    for mark in re.finditer(r"\\.|[{},]", part, re.DOTALL):
        begin, others, names = opened[-1]
        if mark[0] == "{":
            opened.append((mark.end(), 0, 1))
            deepest = max(deepest, len(opened) - 1)
        elif mark[0] == "," and len(opened) > 1:
            opened[-1] = begin, others + names, 1
        elif mark[0] == "}" and len(opened) > 1:
            del opened[-1]
            size = _count_range(part, begin, mark.start()) or others + names
            begin, others, names = opened[-1]
            opened[-1] = begin, others, min(names * size, _ENDLESS)
    count = 1
    for _, others, names in opened:  # more than one if they are unbalanced
        count = min(count * (others + names), _ENDLESS)
    return count, deepest


def _count_range(part: str, start: int, stop: int) -> int | None:
    """Return how many numbers or letters the range from *start* to *stop* has, such as `0..9`; None for other text."""
    match = _RANGE.fullmatch(part, start, stop)
    if match is None:
        return None
    first, last, letter, end, step = match.groups()
    try:
        width = int(first) - int(last) if first else _LETTERS.index(letter) - _LETTERS.index(end)
        return min(abs(width) // (int(step or 1) or 1) + 1, _ENDLESS)
    except ValueError:  # numbers of thousands of digits
        return _ENDLESS


def _read_list(path: str, lists: tuple[str, ...], remote: Remote | None, known: dict[str, Shards]) -> Iterator[Shards]:
    try:
        path = os.path.expanduser(path)
        real = path if path == "-" else os.path.realpath(path)
        raw = InheritedFile(0, closefd=False) if path == "-" else io.FileIO(path)
        with io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8-sig", newline="") as file:
            text = file.read(MAX_BYTES + 1)
            names = [name for name in text.split("\0") if name] if "\0" in text else []
            lines = [] if names else [line.strip() for line in re.split("\r\n?|\n", text)]
    except UnicodeDecodeError as exc:
        raise UrlError("a list file is UTF-8 text with one expression a line", url=f"@{path}") from exc
    except (OSError, ValueError) as exc:
        raise failure(exc, f"@{path}") from exc
    if len(text) > MAX_BYTES:
        raise UrlError(f"more than {MAX_BYTES:,} characters, the limit for such a file", url=f"@{path}")
    if real in lists:
        raise UrlError("a list file that contains itself", url=f"@{path}")
    if lines[:1] and lines[0].startswith("{") and "shardlist" in "".join(lines):
        raise UrlError("a manifest, not a list: name it without the @, by a name that ends in .json", url=f"@{path}")
    named = (line for line in lines if line and not line.startswith("#"))
    listed = _expand(named, (*lists, real), remote, known)
    for shards in [Shards(names)] if names else listed:
        if "pipe:" in "".join(shards.urls).lower():  # perhaps inside a name
            command = next((url for url in shards.urls if url[:5].lower() == "pipe:"), None)
            if command is not None:  # a list is data, often someone else's
                raise UrlError(f"a list file may not name a command: {Location(command).name}", url=f"@{path}")
        yield shards


def _shards_of(location: Location, known: dict[str, Shards]) -> Shards:
    """Return the shards of a manifest, the files that match a pattern, or *location* as a shard.

    *known* has those of the manifests and patterns that were read before.
    """
    if location.url in known:
        return known[location.url]
    found = location.glob()
    if location.base.endswith(".json") and found == [location.url] and not location.is_stream:
        shards = parse_manifest(location.read(MAX_BYTES), location.name)
        known[location.url] = shards.replace(url=_resolved(location, shards.urls))
        return known[location.url]
    urls = [
        _plain(url) if ":" in url else url
        for url in found
        if not (Location(url).base if ":" in url else url).endswith(_BESIDE) or url == location.url
    ]
    if not urls:
        folder = str(location.path).rpartition("/")[0]
        gone = f": there is no folder {folder}" if folder and not (os.path.isdir(folder) or "*" in folder) else ""
        raise UrlError(f"no file matches{gone}", url=location.name)
    if urls == [location.url]:
        return Shards(urls)
    if missing := _missing_numbers(list(map(Location, urls))):
        _warn_of_gaps(location.name, len(urls), missing)
    known[location.url] = Shards(urls)
    return known[location.url]


def _missing_numbers(files: list[Location]) -> str:
    """Return the missing ones, as text, of the runs of numbers that the names of *files* have; "" if none is missing.

    Names are a run if they differ in one number only, and if at least half of its numbers, and three, are there.

    >>> _missing_numbers(list(map(Location, ["a-0.tar", "a-1.tar", "a-3.tar", "b-7.tar", "y2019.tar", "y2024.tar"])))
    'a-2.tar'
    """
    runs: dict[tuple[str, str, int], list[int]] = {}
    files = [file for file in files if len(file.base) <= LONGEST_NAME] or [Location("")]
    first_name, last_name = (_NUMBERED.fullmatch(file.stem) for file in (files[0], files[-1]))
    if first_name and last_name and int(last_name[2]) - int(first_name[2]) == len(files) - 1:
        return ""  # the usual case, also of very many shards
    for file in files:
        if match := _NUMBERED.fullmatch(file.stem):
            before, number, after = match.groups()
            width = len(number) if number.startswith("0") and len(number) > 1 else 0
            runs.setdefault((before, after + file.base[len(match[0]) :], width), []).append(int(number))
    gaps: list[str] = []
    count = 0
    for (before, after, width), numbers in _joined(runs).items():
        found = {*numbers}
        first, last = min(found), max(found)
        absent = last - first + 1 - len(found)
        if not 0 < absent <= len(found) or len(found) < 3:
            continue
        count += absent
        rest = islice((number for number in range(first, last) if number not in found), 5 - len(gaps))
        gaps += [f"{before}{number:0{width}d}{after}" for number in rest]
    return ", ".join(gaps) + f" and {count - len(gaps)} more" * (count > len(gaps))


def _joined(runs: dict[tuple[str, str, int], list[int]]) -> dict[tuple[str, str, int], list[int]]:
    """Join the numbers with and without zeros before them, of one width: `098` to `100`."""
    for (before, after, width), numbers in list(runs.items()):
        if width:
            wide = [number for number in runs.get((before, after, 0), ()) if len(str(number)) == width]
            numbers += wide
            if wide:
                runs[before, after, 0] = [number for number in runs[before, after, 0] if len(str(number)) != width]
    return {run: numbers for run, numbers in runs.items() if numbers}


@lru_cache(64)  # a warning once
def _warn_of_gaps(pattern: str, count: int, missing: str) -> None:
    import logging

    words = f"{pattern} matches {count} shards, and not {missing}; braces name all of a run: {{000..012}}"
    logging.getLogger("tarshards").warning("%s", visible(words))


def _plain(url: str) -> str:
    """Return the URL of a shard, with `./` before a local file that is named like a URL, such as `a:b.tar`.

    The names of its sidecars then begin in the same way.
    """
    if ":" not in url or "://" in url or Location(url).scheme in _NEVER_FILES or not os.path.lexists(url):
        return url
    return f"./{url}"


def _resolved(manifest: Location, names: list[str]) -> list[str]:
    """Return the URLs of *names* in *manifest*, as ``Location.resolve`` does."""
    text = "\0" + "\0".join(names)
    if ":" in text or "\0/" in text or "-" in names:
        return [manifest.resolve(name).url for name in names]
    return manifest.all_beside(names)


def common_name(urls: list[str]) -> str:
    """Return the common prefix of *urls*, without digits and separators at its end.

    >>> common_name(["d/out-000.tar", "d/out-001.tar"]), common_name(["d/a.tar", "d/b.tar"]), common_name(["x.tar"])
    ('d/out', 'd/', 'x')
    """
    if not urls:
        raise UrlError("an empty list of shards has no name")
    if len(urls) == 1:
        return urls[0].partition(".tar")[0]
    low, high = min(urls), max(urls)
    length = next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))
    prefix = low[:length]
    folder, slash, base = prefix.rpartition("/")
    return folder + slash + base.rstrip("0123456789-_.")
