"""From shards to samples, in one stage or in the three that projects recombine; URLs as streams (``gopen``)."""

from __future__ import annotations

import re
import shlex
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np

from tarshards.epoch.loop import Part
from tarshards.epoch.world import World
from tarshards.errors import OpenError, SampleError, TarError, TarshardsError, UrlError
from tarshards.samples.grouping import group_members, read_shard
from tarshards.samples.keys import Sample, split_name
from tarshards.samples.ledger import Ledger
from tarshards.storage.ahead import opened_ahead
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shards
from tarshards.storage.opening import open_shard
from tarshards.storage.remote import Remote
from tarshards.stream.following import Count
from tarshards.stream.indexed_shards import IndexedShards
from tarshards.tar.read import Member, read_members
from tarshards.webdataset import filters, handlers
from tarshards.webdataset.handlers import Asking, Handler, reraise_exception, stoppable

Names = Callable[[str], Any] | None
TOGETHER = 16  # remote shards fetched ahead of the current one
DAMAGE = re.compile("bad|truncated|junk")  # beginnings of the reasons for data that does not decompress
SKIP_META = r"__[^/]*__($|/)"

# Names of webdataset's metadata begin and end so; they are skipped.
meta_prefix = meta_suffix = "__"


def gopen_pipe(url: str, mode: str = "rb", bufsize: int = 8192) -> Any:
    """Open *url*, a path or any URL of tarshards, for reading ("rb") or writing ("wb"); commands are allowed."""
    return _checked(url).open(mode, compressed=True)


#: Functions by scheme, ``f(url, mode, bufsize, **options)``, which return a stream; a program may put its own here.
gopen_schemes: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("__default__", "pipe", "http", "https", "ais", "sftp", "ftps", "scp", "gs", "htgs", "hf"), gopen_pipe
)


def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
    """Open *url* like ``gopen_pipe``, unless ``gopen_schemes`` has another function for its scheme."""
    opener = _own_opener(_checked(url))
    return gopen_pipe(url, mode) if opener is None else opener(url, mode, bufsize, **options)


def _own_opener(location: Location) -> Callable[..., Any] | None:
    """Return the function of ``gopen_schemes`` for a location, None if it is ours."""
    other = gopen_pipe if location.scheme in ("", "-", "file") else gopen_schemes["__default__"]
    opener = gopen_schemes.get(location.scheme, other)
    return None if opener is gopen_pipe else opener


def Pipe(
    command: str | list[str],
    *,
    mode: str = "rb",
    timeout: float = 0,
    ignore_errors: bool = False,
    ignore_status: Iterable[int] = (),
    shell: bool = False,
    bufsize: int = 8192,
) -> Any:
    """Open the output of a command, or with *mode* "wb" its input; *ignore_status* has exit statuses that are no error.

    A str is a command of the shell, a list a program and its arguments. *timeout*, *shell*, *bufsize* have no effect.
    """
    line = command if isinstance(command, str) else shlex.join(command)
    if ignore_errors or ignore_status:
        statuses = "*" if ignore_errors else "|".join(map(str, ignore_status))
        line = f"( {line}\n) || {{ s=$?; case $s in {statuses}) ;; *) exit $s;; esac; }}"
    return gopen_pipe(f"pipe:{line}", f"{mode[:1]}b")


# The package's attribute ``gopen`` was the module before it was the function.
vars(gopen).update(gopen=gopen, gopen_schemes=gopen_schemes, gopen_pipe=gopen_pipe, Pipe=Pipe)


def rewrite_url(url: str) -> str:
    """Return *url*: variables such as GOPEN_REWRITE are not read."""
    return url


def _checked(url: str, remote: Remote | None = None) -> Location:
    """Return the location of *url*; raise ValueError for a local file or a command if ``enforce_security`` is set."""
    location = Location.of(url, remote, allow_pipe=True)
    if handlers.enforce_security and location.scheme == "pipe":
        raise ValueError("gopen_pipe: unsafe_gopen is False, cannot open pipe URLs")
    if handlers.enforce_security and location.is_local:
        raise ValueError("gopen: unsafe_gopen is False, cannot open local files")
    return location


class ReadError(TarError, tarfile.ReadError):
    """A damaged or truncated shard, with the name of tarfile's error."""


def as_read_error(error: Exception) -> Exception:
    """Return an *error* of damaged data as a ReadError, any other unchanged."""
    is_damage = isinstance(error, TarError) or (isinstance(error, OpenError) and DAMAGE.match(error.reason))
    if not is_damage or not isinstance(error, TarshardsError):
        return error
    damage = ReadError(error.reason, url=error.url, offset=error.offset, key=error.key, field=error.field)
    damage.cost, damage.__cause__ = error.cost, error
    return damage


class Reached:
    """The position in reading shards: *skip* samples are skipped first, then *taken* were read."""

    def __init__(self, skip: int = 0):
        self.skip = skip
        self.has_errors = False
        self._before, self._in_shard = 0, int

    @property
    def taken(self) -> int:
        return self._before + self._in_shard()

    def enter(self, in_shard: Any) -> None:
        """Begin another shard: *in_shard* returns the number of its samples taken so far."""
        self._before, self._in_shard = self.taken, in_shard


class TarSamples(filters.FilterFunction):
    """The stage that reads the samples of shards: local ones with an index through that, others from end to end.

    *remote* has the options for remote shards. With *empty_check*, no samples raise ValueError.
    """

    def __init__(
        self,
        handler: Handler | None = reraise_exception,
        select_files: Names = None,
        rename_files: Names = None,
        remote: Remote | None = None,
        empty_check: bool = False,
    ):
        super().__init__(_read_samples, handler=handler, select_files=select_files, rename_files=rename_files)
        self.handler: Any = handler or reraise_exception
        self.remote = remote
        self.empty_check = empty_check
        self.split: Any = (
            split_name if select_files is rename_files is None else partial(_name, select_files, rename_files)
        )

    @stoppable
    def read(self, shards: Iterable[Any], ledger: Ledger, reached: Reached) -> Iterator[Sample]:
        """Yield the samples of *shards*, which are URLs or dicts with one, counted in *ledger* and *reached*."""
        is_resumed = reached.skip > 0
        with closing(_located(shards, self.remote)) as located:
            for location in located:
                yield from self._read(location, ledger, reached)
        if self.empty_check and not (is_resumed or reached.taken or reached.has_errors):
            advice = "there are fewer shards than workers, or they are empty; empty_check=False allows that"
            raise SampleError(f"no samples in this worker: {advice}")

    def _read(self, location: Location, ledger: Ledger, reached: Reached) -> Iterator[Sample]:
        own = Ledger(max_errors=float("inf"), on_error=lambda error: Asking(self.handler)(as_read_error(error)))
        samples: Iterator[Sample] = iter(())
        try:
            samples = self._samples(location, own, reached)
            yield from samples
        finally:
            del samples  # closes the reader, so that its counts are complete
            reached.has_errors |= bool(own.quarantined)
            ledger.merge(own)
            ledger.report()

    def _samples(self, location: Location, ledger: Ledger, reached: Reached) -> Iterator[Sample]:
        if self.split is split_name and _family(location) == "local" and is_indexed(location):
            return _read_indexed(location, ledger, reached)
        samples = read_shard(location.url, ledger=ledger, split=self.split, location=location)
        reached.skip -= sum(1 for _ in islice(samples, reached.skip))
        count = Count()
        reached.enter(count.__int__)
        return count.over(samples)


def is_indexed(location: Location) -> bool:
    """Return whether a shard has an index beside it, as far as a server shows it."""
    try:
        return not location.is_stream and location.sibling(".index").exists()
    except OpenError:
        return False


def _name(select: Names, rename: Names, name: str) -> tuple[str, str] | None:
    """Split the name of a member, renamed, into key and field; None for one that is not selected."""
    name = rename(name) if rename else name
    return split_name(name) if select is None or select(name) else None


def _read_indexed(location: Location, ledger: Ledger, reached: Reached) -> Iterator[Sample]:
    try:
        shards = IndexedShards(Shards([location.url], split=["first"]))  # as webdataset splits names
        shards.shards.use(0)  # a stale index is one error, not one for each sample
    except TarshardsError as error:
        ledger(error)
        return
    numbers = np.arange(reached.skip, len(shards))
    part = Part(None, numbers, np.zeros_like(numbers), numbers)  # type: ignore[arg-type]
    reached.skip = max(0, reached.skip - len(shards))
    reached.enter(lambda: part.taken)
    ledger.count(broken_off=1)
    try:
        yield from part.read(shards, ledger)
    finally:
        ledger.count(samples=part.taken - part.quarantined, members=part.members)
    ledger.count(broken_off=-1, shards=1)
    try:
        shards.verify()
    except OpenError as error:  # the shard was modified
        ledger(error)


def _located(shards: Iterable[Any], remote: Remote | None) -> Generator[Location, None, None]:
    """Yield the locations of *shards*; remote ones are fetched ahead, a few at a time."""
    iterator = iter({"url": shard} if isinstance(shard, str) else shard for shard in shards)
    for shard in iterator:
        together = [shard, *islice(iterator, TOGETHER - 1 if _is_remote(_location(shard, remote)) else 0)]
        locations: Any = [_location(each, remote) for each in together]
        if all(map(_is_remote, locations)):
            locations = opened_ahead(locations, World.detect().processes)
        yield from locations


def _is_remote(location: Location) -> bool:
    return _family(location) not in ("local", "pipe", "stdio", "")


def _family(location: Location) -> str:
    """Return the kind of a location; None for a user's own or an unknown scheme."""
    with suppress(UrlError):  # raised again when it is opened
        return location.family if _own_opener(location) is None else ""
    return ""


def _location(shard: dict[str, Any], remote: Remote | None) -> Location:
    location = _checked(shard["url"], remote)
    return location if _own_opener(location) is None else location.opened_by(lambda *_, **__: gopen(location.url))


def stream_of(shard: dict[str, Any], remote: Remote | None) -> Any:
    """Return the stream of a shard, with the options *remote*."""
    return _location(shard, remote).open("rb", compressed=True)


def _read_samples(shards: Iterable[Any], handler: Handler = reraise_exception, **options: Any) -> Iterator[Sample]:
    """Yield the samples of *shards*: ``tarfile_to_samples()`` as a stage."""
    return TarSamples(handler, **options).read(shards, Ledger(max_errors=float("inf")), Reached())


tarfile_samples, tarfile_to_samples = _read_samples, TarSamples


# Stages that projects recombine.


def base_plus_ext(path: str) -> tuple[str | None, str | None]:
    """Split the name of a member at the first dot of its base name; return (None, None) without a dot."""
    if "." not in path[path.rfind("/") + 1 :]:  # the expression would look for it again after each slash
        return None, None
    match = re.match(r"((?:.*/|)[^.]+)[.]([^/]*)$", path)
    return (match[1], match[2]) if match else (None, None)


def valid_sample(sample: Any) -> bool:
    """Return whether *sample* is a dict that is not empty and not marked as bad."""
    return isinstance(sample, dict) and len(sample) > 0 and not sample.get("__bad__", False)


def url_opener(data: Iterable[Any], handler: Handler = reraise_exception, **options: Any) -> Iterator[dict[str, Any]]:
    """Add to every dict with a ``url`` the ``stream`` that reads it."""
    return filters.map.run(data, lambda shard: {**shard, "stream": gopen(shard["url"], **options)}, handler)


@stoppable
def tar_file_iterator(
    fileobj: Any,
    skip_meta: str | None = SKIP_META,
    handler: Handler = reraise_exception,
    select_files: Names = None,
    rename_files: Names = None,
) -> Iterator[dict[str, Any]]:
    """Yield the members of an archive as dicts of ``fname``, ``data`` and ``offset``, but those that match *skip_meta*.

    Members of a sample are yielded once all are read.
    """
    name = getattr(fileobj, "name", None)
    yield from _files(
        fileobj, name if isinstance(name, str) else "stream", skip_meta, handler, select_files, rename_files
    )


def _files(
    fileobj: Any, url: str, skip_meta: str | None, handler: Handler, select_files: Names, rename_files: Names
) -> Iterator[dict[str, Any]]:
    try:
        with open_shard(Location(url).opened_by(lambda: fileobj)) as stream:
            for _, members in groupby(read_members(stream, url=url), _key):
                for name, value, offset in list(members):  # read first, so that no half sample is delivered
                    is_meta = "/" not in name and name.startswith(meta_prefix) and name.endswith(meta_suffix)
                    if is_meta or (skip_meta is not None and re.match(skip_meta, name)):
                        continue
                    name = rename_files(name) if rename_files else name
                    if select_files is None or select_files(name):
                        yield {"fname": name, "data": value, "offset": offset}
    except Exception as error:
        Asking(handler)(as_read_error(error))


@stoppable
def tar_file_expander(
    data: Iterable[Any],
    handler: Handler = reraise_exception,
    select_files: Names = None,
    rename_files: Names = None,
    eof_value: Any = None,
) -> Iterator[dict[str, Any]]:
    """Yield every member of the archives in ``stream`` like ``tar_file_iterator``, with ``__url__``.

    Members of one archive have the same ``archive``, a number; *eof_value*, if any, is yielded after each archive.
    """
    for number, source in enumerate(data):
        url = Location.of(source["url"]).name
        for file in _files(source["stream"], url, SKIP_META, handler, select_files, rename_files):
            yield {**file, "archive": number, "__url__": url}
        if eof_value is not None:
            yield eof_value


@stoppable
def group_by_keys(
    data: Any, keys: Any = base_plus_ext, lcase: bool = True, suffixes: Any = None, handler: Handler = reraise_exception
) -> Iterator[Sample]:
    """Group the members of ``tar_file_expander`` into samples; an empty dict also ends an archive, as in webdataset."""
    split = partial(_split, keys, lcase)
    for (_, url), files in groupby(data, _archive):
        if url is None:
            continue
        members = (Member(file["fname"], file["data"], file.get("offset", 0)) for file in files)
        for sample in group_members(members, url=url, split=split, on_error=Asking(handler)):
            if suffixes is not None:
                sample = {name: value for name, value in sample.items() if name in suffixes or name[:2] == "__"}
            if len(sample) > 2:
                yield sample


def _key(member: Member) -> str | None:
    return (split_name(member.name) or (None,))[0]


def _archive(file: dict[str, Any]) -> list[Any]:
    return [file.get(name) for name in ("archive", "__url__")]


def _split(keys: Callable[[str], Any], lcase: bool, name: str) -> tuple[str, str] | None:
    key, field = keys(name)
    if key is None or split_name(name) is None:
        return None
    return key, field.lower() if lcase else field
