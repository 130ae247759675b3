"""Group members into samples (dicts with ``__key__``, ``__url__`` and one entry per field), and split samples again."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from io import BytesIO, FileIO
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args
from weakref import WeakSet

from tarshards.errors import (
    EncodeError,
    OpenError,
    SampleError,
    TarError,
    TarshardsError,
    UrlError,
    flag,
    shortened,
)
from tarshards.samples.batch import PackedSamples
from tarshards.samples.fields import FieldNames, lazy_fields
from tarshards.samples.keys import (
    USUAL,
    KeyRule,
    Sample,
    Split,
    is_reserved,
    join_name,
    key_rule,
    split_last,
    split_name,
    why_refused,
    why_skipped,
    with_remedy,
)
from tarshards.samples.ledger import ErrorPolicy, Ledger, error_handler, tell_of_dots, wrong_number
from tarshards.samples.member_file import LazyMembers, MemberFile
from tarshards.storage.compression import Decompressed
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import ArchiveEnd, Shard, Shards, check_end
from tarshards.storage.opening import open_shard
from tarshards.storage.remote import Remote, with_options
from tarshards.storage.streams import FileRange, failure
from tarshards.tar.read import (
    LARGE,
    Grouper,
    KeptBytes,
    Member,
    Reached,
    Taker,
    read_archive,
    read_members,
    scan_whole,
    with_headers,
)

if TYPE_CHECKING:
    from tarshards.kernels._tar_py import Event, ScannedMember
    from tarshards.storage.ranges import Ranges

T = TypeVar("T")

#: The reaction to damage: end the shard, or continue at the next valid header.
OnDamage: TypeAlias = Literal["end", "resync"]

#: What is copied without being read: large fields, or also whole samples.
Copies: TypeAlias = Literal["fields", "samples"]


def read_samples(
    urls: Any,
    *,
    on_error: ErrorPolicy = None,
    on_damage: OnDamage = "end",
    allow_pipe: bool = False,
    split: KeyRule | Split = split_name,
    end: ArchiveEnd = "required",
    concatenated: bool = False,
    lazy: str | Iterable[str] | None = None,
    remote: Remote | None = None,
    max_ratio: float | None = None,
) -> Iterator[Sample]:
    """Yield the samples of all shards named by *urls*, a shard expression or a list of them.

    The options are those of ``Opening``. The first error is raised, or passed to *on_error*; if that returns (or
    *on_error* is "skip"), reading continues: with the next sample if the error concerns one sample, else with the next
    shard, or after the damage if *on_damage* is "resync".
    """
    names = lazy_fields(lazy)
    remote = with_options(remote, max_ratio=max_ratio)
    check_reading(on_error, on_damage, end, names)
    marks: Any = {"concatenated": flag("concatenated", concatenated), "allow_pipe": flag("allow_pipe", allow_pipe)}
    options: Any = {"ledger": Ledger.of(on_error), "on_damage": on_damage, "split": key_rule(split), "lazy": names}

    def read_all() -> Generator[Sample, None, None]:
        for shard, location in located(find_shards(urls, remote, **marks, end=end), ahead=names is None):
            yield from read_shard(shard, location=location, **options)

    return closed_at_exit(read_all())


def closed_at_exit(samples: Generator[T, None, None]) -> Generator[T, None, None]:
    """Return *samples*; if they are still open when the program exits, close them while modules still work."""
    _unfinished.add(samples)
    return samples


_unfinished: WeakSet[Generator[Any, None, None]] = WeakSet()


@atexit.register
def _close_unfinished() -> None:
    for samples in list(_unfinished):
        with suppress(ValueError):  # another thread is running it
            samples.close()


def located(shards: Sequence[Shard], processes: int = 1, *, ahead: bool = True) -> Iterable[tuple[Shard, Location]]:
    """Return each shard with the location where ``read_shard`` is to read it; remote shards are fetched *ahead*.

    The memory for that is shared by *processes* processes on this host.
    """
    urls = shards.urls if isinstance(shards, Shards) else [shard.url for shard in shards]
    locations = (shard.location() for shard in shards)
    if ahead and any(":" in url and _is_remote(Location(url)) for url in urls):
        from tarshards.storage.ahead import opened_ahead

        return zip(shards, opened_ahead(list(locations), processes))
    return zip(shards, locations)


def _is_remote(location: Location) -> bool:
    try:
        return location.is_remote
    except UrlError:  # raised again when it is opened
        return False


def check_reading(on_error: ErrorPolicy, on_damage: str, end: str, lazy: FieldNames | None = None) -> None:
    """Raise ValueError for "resync" without *on_error*, or with *lazy* fields, and for words that are unknown."""
    if on_damage not in get_args(OnDamage):
        raise ValueError(f'on_damage is "end" or "resync", not {on_damage!r}')
    if error_handler(on_error) is None and on_damage == "resync":
        raise ValueError('on_damage="resync" needs an on_error= for the gaps, such as Ledger(max_errors=100)')
    if on_damage == "resync" and lazy is not None:
        raise ValueError('on_damage="resync" reads whole fields: pass it without lazy=')
    check_end(end)


def read_shard(
    shard: Shard | str,
    *,
    ledger: Ledger,
    on_damage: OnDamage = "end",
    split: KeyRule = split_name,
    location: Location | None = None,
    lazy: FieldNames | None = None,
    copies: Copies | None = None,
) -> Iterator[Any]:
    """Yield the samples of one shard; *ledger* receives errors, and raises them or ends the sample or shard.

    It is read at its URL, or at *location*. Each field in *lazy* is a ``MemberFile``; a compressed shard or a pipe then
    raises OpenError, and a shard whose samples lack the field SampleError. *copies* says what the caller only writes,
    before it takes the next sample: large "fields" of plain local files are then not read, but ``FileRange``s, and
    whole "samples" also come as PackedSamples. The other options are those of ``Opening``. The properties of *shard*
    apply: it may be concatenated, or lack zeros at its end, its names may be split by another rule, and a wrong number
    of samples is an error (if *split* is the default).
    """
    shard = Shard.of(shard)
    location = location or shard.location()
    if split is split_name and shard.split == "last":
        split = split_last
    expected = shard.samples if split is split_name else None
    if on_damage == "resync":
        from tarshards.samples.resync.reading import read_resyncing

        yield from read_resyncing(shard, location, ledger=ledger, split=split, expected=expected)
        return
    name = location.name
    files = None if lazy is None else LazyMembers(location, lazy, split)
    packs = copies == "samples" and not shard.keep_headers
    grouping_of = _KeepingGrouping if shard.keep_headers else _Grouping
    refused = False  # whether the ledger raised the error of a sample, which is not one of the shard

    def quarantine(error: SampleError) -> None:
        nonlocal refused
        refused = True
        ledger(error)
        refused = False

    try:
        with (
            open_shard(location) if files is None else files.open() as stream,
            grouping_of(name, ledger, split, quarantine, expected, packs, not shard.adjacent) as grouping,
        ):
            samples: Iterator[Any] = read_archive(
                stream,
                grouping,
                end=shard.end,
                concatenated=shard.concatenated,
                max_ratio=location.max_ratio,
                unread=_unread_ranges(stream, name) if copies else None if files is None else files.unread,
                read_back=_read_back(stream, location),
            )
            yield from samples if files is None else files.over(samples)
            yield from grouping.end() if files is None else files.over(grouping.end())
        ledger.count(shards=1)
        if files is not None:
            files.check()
    except (TarshardsError, OSError) as error:
        if refused:
            raise
        if isinstance(error, TarError):
            error.cost += _cost(error, location, is_plain=not isinstance(stream, Decompressed))
        ledger(error if isinstance(error, TarshardsError) else _open_error(error, name))
    finally:
        ledger.report()


def unpacked(packed: PackedSamples) -> Iterator[Sample]:
    """Yield the samples that were packed."""
    return group_members(read_members(BytesIO(packed.members), end="optional"), url=packed.url)


def _unread_ranges(stream: Any, url: str) -> Callable[[str, int, int], FileRange] | None:
    """Return a function that returns the range of a member by name, offset and size; None if not a file."""
    if not isinstance(stream, FileIO) or not stream.seekable():
        return None
    descriptor, begin = stream.fileno(), stream.tell()  # stdin may begin anywhere
    return lambda _, offset, size: FileRange(descriptor, url, begin + offset, size)


def _read_back(stream: Any, location: Location) -> Callable[[int, int], bytes] | None:
    """Return a function that reads a remote shard, whose stream cannot seek back, for its links; None if not needed."""
    if isinstance(stream, Decompressed) or not _is_remote(location) or stream.seekable():
        return None

    @cache
    def ranges() -> Ranges:
        return location.ranges()

    return lambda offset, size: ranges().read_up_to(offset, size)


def _cost(error: TarError, location: Location, *, is_plain: bool) -> str:
    """Describe the unread part of a damaged shard, as far as known, and the tool that saves its samples."""
    if location.is_stream:
        return ""
    unread = ""
    if is_plain and error.offset is not None and location.path is not None and os.path.isfile(location.path):
        size = os.path.getsize(location.path)
        if error.offset < size:
            unread = f"{size - error.offset} of {size} bytes not read; "
    return f"{unread}`tarcheck --repair OUT` saves the whole samples"


def _open_error(cause: OSError, url: str) -> OpenError:
    error = failure(cause, url)
    error.__cause__ = cause
    return error


def group_members(
    members: Iterable[Member],
    *,
    url: str = "",
    ledger: Ledger | None = None,
    split: KeyRule = split_name,
    on_error: Callable[[SampleError], Any] | None = None,
    expected: int | None = None,
) -> Iterator[Sample]:
    """Yield one dict for each run of adjacent members with the same key, as *split* determines it.

    Members without a key are skipped and counted by *ledger*. Raises SampleError for a duplicate field or one named
    ``__key__`` or ``__url__``, and for a key that occurs again after another key. With *on_error*, the sample of these
    adjacent members is left out and its first error passed to it. Raises SampleError at the end if the number of
    samples, with those left out, is not the *expected* one.

    >>> members = [Member("a.jpg", b"1", 0), Member("a.cls", b"2", 1024)]
    >>> list(group_members(members, url="x.tar"))
    [{'__key__': 'a', '__url__': 'x.tar', 'jpg': b'1', 'cls': b'2'}]
    """
    with _Grouping(url, ledger, split, on_error, expected) as grouping:
        yield from grouping.each(iter(members))
        yield from grouping.end()


class _Grouping(Taker[Sample]):
    """Groups the members of a shard as in ``group_members``; counts the shard at the end of its with-block."""

    def __init__(
        self,
        url: str,
        ledger: Ledger | None,
        split: KeyRule,
        on_error: Callable[[SampleError], Any] | None,
        expected: int | None,
        packs: bool = False,
        splits: bool = False,
    ):
        super().__init__(url, ledger)
        self.grouper = Grouper(url, split, split is split_name, packs, splits)
        self._packs, self._splits = packs, splits
        self._on_error, self._expected = on_error, expected
        self._split = split
        self._delivered = self._refused = self._fields = 0  # parts after the first are not counted as delivered
        self._missing: dict[int, str] = {}  # reasons for missing content, by the members' offsets

    def __enter__(self) -> _Grouping:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        samples = self._delivered
        if isinstance(error, TarError) and self._expected is not None:
            missing = self._expected - samples - self._refused
            error.cost = f"{missing} of {self._expected} samples lost; "
        if self.ledger is not None:
            broken_off = int(kind is GeneratorExit)
            self.ledger.count(broken_off=broken_off, samples=samples, streamed=samples, members=self._fields)

    def take(self, buffer: bytes, position: int, zeros: int, base: int) -> tuple[Iterable[Sample], Reached]:
        """Return the samples completed by the members in a buffer; see ``read_archive``."""
        found: Any = self.grouper.read(buffer, position, zeros, self.limit, base)
        samples, events, *reached = found
        if self._packs:
            for number, each in enumerate(samples):
                if isinstance(each, tuple):
                    keys, begin, end, fields = each
                    self._delivered += len(keys) - 1  # ``deliver`` takes them for one sample of one field
                    self._fields += fields - 1
                    samples[number] = PackedSamples(keys, memoryview(buffer)[begin:end], self.url)
        return self.deliver(samples, events), tuple(reached)

    def each(self, members: Iterator[Member]) -> Iterator[Sample]:
        """Yield the samples completed by *members*."""
        while (found := self.grouper.next(members)) is not None:
            yield from self.deliver(*found)

    def add(self, name: str, data: bytes | None, offset: int, headers: bytes) -> Iterable[Sample]:
        """Return the samples completed by a member."""
        found = self.grouper.next(iter([(name, data, offset)]))
        return () if found is None else self.deliver(*found)

    def refuse(self, name: str, reason: str, offset: int) -> Iterable[Sample]:
        """Return the samples completed before a member without content, which is a fault of its sample."""
        self._missing[offset] = reason
        return self.add(name, None, offset, b"")

    def complete(self) -> Iterable[Sample]:
        """Return the last sample, if there is one that is not left out."""
        return self.deliver(self.grouper.end())

    def end(self) -> Iterator[Sample]:
        """Yield the last sample; raise SampleError if the number of samples is not as expected."""
        yield from self.complete()
        found = self._delivered + self._refused
        if self._expected is not None and found != self._expected:
            raise wrong_number(found, self._expected, self.url)

    def deliver(self, samples: list[Sample], events: Sequence[Event] = ()) -> Iterable[Sample]:
        """Return the samples; in between, count skipped members and refuse faulty samples."""
        if len(samples) > 1 or events:
            return self._deliver(samples, events)
        if not samples:
            return ()
        self._delivered += 1
        fields = len(samples[0]) - 2
        self._fields += fields
        if fields > USUAL:
            tell_of_dots(samples, self.url, self._split, self.ledger)
        return samples

    def _deliver(self, samples: list[Sample], events: Sequence[Event]) -> Iterator[Sample]:
        rest = iter(samples)
        taken = 0
        fields = _fields_in(samples)  # counted before a consumer can change the samples
        self._fields += fields
        if samples and (len(samples[0]) > USUAL or fields != len(samples) * (len(samples[0]) - 2)):
            tell_of_dots(samples, self.url, self._split, self.ledger)  # some have another number of fields
        try:
            for before, kind, name, field, offset in events:
                yield from islice(rest, before - taken)
                taken = before
                if kind is None and field is None and self._splits:
                    self._delivered -= 1
                elif kind is None:
                    reason = with_remedy(why_refused(field, self._missing.get(offset)))
                    refuse(SampleError(reason, url=self.url, offset=offset, key=name, field=field), self._on_error)
                    self._refused += 1
                elif self.ledger is not None:
                    self.ledger.skip(why_skipped(name, kind))
            yield from rest
        finally:
            left = list(rest)  # the consumer has stopped, or an error is raised
            self._delivered += len(samples) - len(left)
            self._fields -= _fields_in(left)


class _KeepingGrouping(_Grouping):
    """Groups members whose data carries their headers."""

    def take(self, buffer: bytes, position: int, zeros: int, base: int) -> tuple[Iterable[Sample], Reached]:
        members, reached = scan_whole(buffer, position, zeros, self.limit)
        return self.each(self._members(buffer, members, base)), reached

    def _members(self, buffer: bytes, members: list[ScannedMember], base: int) -> Iterator[Member]:
        """Yield those of *members* that are files; count each of the others when it is reached."""
        for name, header, start, end, kind in members:
            if not kind:
                yield Member(name, with_headers(buffer[start:end], buffer[header:start]), base + header)
            elif self.ledger is not None:
                self.ledger.skip(kind)

    def add(self, name: str, data: bytes | None, offset: int, headers: bytes) -> Iterable[Sample]:
        return super().add(name, None if data is None else with_headers(data, headers), offset, headers)


def _fields_in(samples: list[Sample]) -> int:
    return sum(map(len, samples)) - 2 * len(samples)


def refuse(error: SampleError, on_error: Callable[[SampleError], Any] | None) -> None:
    """Raise the error of a sample, or pass it to *on_error*, which lets reading continue without that sample."""
    if on_error is None:
        raise error
    on_error(error)


def encode_sample(sample: Sample, *, in_pieces: bool = False) -> tuple[tuple[str, ...], list[bytes]]:
    """Return the fields of a sample, sorted, and the bytes of each; names like ``__url__`` are not fields.

    A ``FileRange`` stands for its bytes, as does a large ``MemberFile`` with *in_pieces*; other files are read.

    Raises SampleError for a sample without a key or fields and for a name that would not read back, and EncodeError for
    a value that does not encode.

    >>> encode_sample({"__key__": "a", "txt": "hello", "cls": 7})
    (('cls', 'txt'), [b'7', b'hello'])
    """
    try:
        key = sample.get("__key__")
    except AttributeError:
        raise SampleError(f"a sample is a dict of __key__ and fields, not {shortened(sample)}") from None
    if not isinstance(key, str) or not key:
        raise SampleError(f"a sample needs a __key__ that is a str, not {shortened(key)}", url=sample.get("__url__"))
    fields, are_plain = fields_of(tuple(sample))
    if not fields:
        raise SampleError("a sample without fields cannot be written", key=key)
    # Other names always read back, so join_name() need not check each of them.
    if not are_plain or "." in key or "__" in key or "\0" in key or key[-1] == "/":
        for field in fields:
            join_name(key, field)
    values = []
    for field in fields:
        value = sample[field]
        if type(value) is MemberFile:
            if value.closed:
                raise EncodeError("a MemberFile that is closed cannot be written", key=key, field=field)
            if not in_pieces or value.size < LARGE:
                value = bytes(value)
        elif type(value) is not bytes and type(value) is not FileRange and type(value) is not KeptBytes:
            try:
                value = _encode_field()(field, value)
            except EncodeError as error:
                raise EncodeError(error.reason, key=key, field=field) from error
        values.append(value)
    return fields, values


@cache
def _encode_field() -> Callable[[str, Any], bytes]:
    """Return the function of the codecs, which a program that only copies need not load."""
    from tarshards.samples.codecs import encode_field

    return encode_field


@lru_cache(1024)
def fields_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """Return the fields among *names*, sorted, and whether all of them read back after any key without dots."""
    for name in names:
        if not isinstance(name, str):
            raise SampleError(f"the name of a field is a str, not {shortened(name)}")
    fields = tuple(sorted(name for name in names if not is_reserved(name)))
    return fields, all(split_name(f"k.{field}") == ("k", field) and "\0" not in field for field in fields)
