"""Write samples to shards and their indexes, atomically: a file with its final name is complete."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EEXIST
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from tarshards.errors import EncodeError, OpenError, SampleError, flag, shortened, visible, whole_number
from tarshards.samples.batch import PackedSamples, SampleBatch
from tarshards.samples.grouping import encode_sample, fields_of, unpacked
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import Reject, reject_or_raise
from tarshards.samples.member_file import MemberFile
from tarshards.samples.seen_keys import SeenKeys
from tarshards.storage.claims import Claims
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard, manifest_url
from tarshards.storage.opening import open_shard
from tarshards.storage.streams import PIECE, FileRange, passed_on
from tarshards.stream.other_names import explains
from tarshards.tar.read import CUT, END, LARGE, RECORD, end_of, pack_members, plain_rows

if TYPE_CHECKING:
    from tarshards.index.members import Members
    from tarshards.index.sidecar import Index

DUPLICATE_KEY = "this key is already in the shard"
MOST_SAMPLES, MOST_BYTES = 100_000, 3 * 10**9  # the default limits of a shard in ShardWriter
SHARD_BYTES = 10**9  # the default size of a shard where whole datasets are written


class _Writer:
    """The context manager of both writers: an exception discards the unfinished shard."""

    def close(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class TarWriter(_Writer):
    """Write samples to one shard: a path, any writable URL, ``-`` for stdout, or a file object.

    Time, owner and mode are fixed and fields are sorted, so the same samples give the same bytes. The shard appears
    under its name when ``close`` succeeds, and the index of an earlier shard is removed. After ``abort``, or an
    exception in the ``with`` block, there is no shard. If the writer is never closed, there is none either, and a
    RuntimeWarning is issued. With *sync*, a local shard is flushed to the disk before it appears, so that a power loss
    leaves no incomplete shard under its name; ``sync=False`` is faster, for data that can be made again. With *sha256*,
    an uncompressed shard is hashed as it is written: after ``close``, the attribute ``sha256`` is the checksum in
    hexadecimal digits, else None.

    After ``abort``, stdout ends with a header without data, which all readers report as truncated. A file object is
    anything with a ``write`` that takes bytes. It is written sequentially and left open; after ``abort`` its content
    has no end of archive. Raises TypeError for any other target.
    """

    @explains
    def __init__(
        self,
        target: str | os.PathLike[str] | Location | BinaryIO,
        *,
        allow_pipe: bool = False,
        sync: bool = True,
        sha256: bool = False,
    ):
        self.target: str | None = None  # the URL
        self.sha256: str | None = None
        self.is_compressed: bool = False
        self._stream: Any
        if _is_file(target):
            self._stream = passed_on(target)
        else:
            self._location = Location.of(target, allow_pipe=allow_pipe, sync=sync)  # type: ignore[arg-type]
            self.target = self._location.url
            self.is_compressed = self._location.compression() is not None
            self._stream = open_shard(self._location, "wb")
        self._digest: Any = None
        if flag("sha256", sha256) and not self.is_compressed:
            import hashlib

            self._digest = hashlib.sha256()
        self.samples: int = 0
        self.end: int = 0  # bytes of the members written, before compression
        self.index: Index | None = None  # after ``close``, the index if one was written
        self._members: Members | None = None  # of the index
        self._keys = SeenKeys()  # the keys written, with the shards that they were read from

    def add_index(self) -> None:
        """Write the index, too, when the shard is closed, unless it is compressed or a stream.

        Call this before the first sample is written.
        """
        if self.target is not None and not self.is_compressed and not self._location.is_stream:
            from tarshards.index.members import Members

            self._members = Members()

    def write(self, sample: Sample) -> None:
        """Append one sample.

        Raises SampleError for a duplicate key or one that would not read back, and EncodeError for a value that does
        not encode; no part of such a sample is written.
        """
        fields, values = encode_sample(sample, in_pieces=True)
        key = sample["__key__"]
        self.write_members(key, fields, values, pack_members(key, fields, values), sample.get("__url__"))

    def write_members(
        self, key: str, fields: tuple[str, ...], values: list[bytes], packed: list[bytes], shard: str | None = None
    ) -> None:
        """Append the members of one sample, *packed* by ``pack_members``; *shard* is the one that it was read from.

        Raises SampleError for a duplicate key.
        """
        members = self._members
        if members is not None and fields not in members.numbers:
            members.check_room(key, fields, str(self.target))
        if key in self._keys:
            raise SampleError(_duplicate(self._keys.shard_of(key), shard), url=self._stream.name, key=key)
        self._keys.add(key, None if shard is None else sys.intern(shard))  # samples of a shard share one string
        size = sum(map(len, packed))
        self._send(packed if size >= LARGE or len(packed) == 1 else [b"".join(packed)])
        if members is not None:
            members.add_written(key, fields, values, packed, self.end)
        self.end += size
        self.samples += 1

    def write_packed(self, keys: list[str], packed: list[bytes]) -> None:
        """Append samples with these *keys*; *packed* has the members of each sample as one bytes object.

        Raises SampleError for a duplicate key.
        """
        for key in keys:
            if key in self._keys:
                raise SampleError(DUPLICATE_KEY, url=self._stream.name, key=key)
            self._keys.add(key, None)
        self._append(packed if sum(map(len, packed)) >= LARGE * len(packed) else [b"".join(packed)], len(keys))

    def _append(self, parts: list[Any], samples: int) -> None:
        """Append *samples* samples; each of *parts* has the members of one or more whole samples."""
        self._send(parts)
        if self._members is not None:
            self._members.add_packed(parts, self.end)
        self.end += sum(map(len, parts))
        self.samples += samples

    def write_packed_samples(self, packed: PackedSamples) -> Iterator[Sample]:
        """Append many samples at once; if a key is a duplicate, yield all samples instead, for ``write``."""
        if self._keys.isdisjoint(packed.keys):
            self._keys.update(packed.keys, sys.intern(packed.url))
            self._append([packed.members], len(packed.keys))
        else:
            yield from unpacked(packed)

    def write_batch(self, batch: SampleBatch) -> Iterator[Sample]:
        """Append the samples of *batch*, which are of one shard; yield, in order, those that need ``write`` instead.

        These are samples that need more than a plain header because of a name or size, samples with an invalid key, and
        samples with a field that is new to the index of the shard; and all samples if a key is a duplicate.
        """
        members = self._members
        keys, columns = batch.keys, sorted(batch.columns.items())
        is_plain = fields_of(tuple(field for field, _ in columns))[1]
        if len(set(keys)) < len(keys) or not self._keys.isdisjoint(keys):
            is_plain = False
        shard = sys.intern(batch.names[0])
        row = 0
        while row < len(keys):
            stop = len(keys)
            numbers = [0] * len(columns)
            if not is_plain:
                stop = row
            elif members is not None:
                unknown = [payloads.next_row(row) for field, payloads in columns if field not in members.fields]
                stop = min([stop, *(first for first in unknown if first >= 0)])
                numbers = [members.fields.get(field, 0) for field, _ in columns]
            end, offset = row, self.end
            if row < stop:
                plain = [
                    (field, number, payloads.addresses, payloads.sizes)
                    for (field, payloads), number in zip(columns, numbers)
                ]
                end, packed, arrays = plain_rows(keys, plain, row, stop, LARGE, PIECE, offset, self.samples)
            if end == row:
                yield batch.sample(row)
                row += 1
                continue
            written = keys[row:end]
            self._keys.update(written, shard)
            self._send([packed])
            self.end += len(packed)
            self.samples += end - row
            if members is not None:
                members.add_rows(written, arrays, packed, offset)
            row = end

    @property
    def size(self) -> int:
        """The bytes of the finished archive, before compression."""
        return self.end + len(end_of(self.end))

    @property
    def is_closed(self) -> bool:
        """Whether the archive is finished or, after an error, discarded."""
        return bool(self._stream.closed)

    def close(self) -> None:
        """Finish the archive and rename it to its final name; further calls do nothing."""
        if not self._stream.closed:
            self._send([end_of(self.end)])
            self._stream.close()
            self.sha256 = None if self._digest is None else self._digest.hexdigest()
            if self._members is not None and self.target is not None:
                self.index = self._members.index(self.end, self.size, self.target)
                self.index.save(self._location)

    def _send(self, parts: Iterable[bytes | FileRange | MemberFile]) -> None:
        rest = iter(parts)
        try:
            for part in rest:
                if type(part) is FileRange:
                    self._stream.copy(part)
                    for piece in () if self._digest is None else part.pieces():
                        self._digest.update(piece)
                    continue
                for data in part.pieces() if type(part) is MemberFile else (part,):
                    self._stream.write(data)
                    if self._digest is not None:
                        self._digest.update(data)
        except OSError:
            self._stream.abort()  # part of a sample may have been written
            raise
        except BaseException:
            self._abort(rest)
            raise

    def abort(self) -> None:
        """Discard the archive; if that is impossible, end it so that every reader reports it as truncated."""
        self._abort(())

    def _abort(self, rest: Iterable[bytes | FileRange | MemberFile]) -> None:
        """Discard the archive; if that is impossible, write the *rest* of the current sample, then the end."""
        whole = (part.pieces() if isinstance(part, FileRange | MemberFile) else (part,) for part in rest)
        self._stream.end(chain(chain.from_iterable(whole), [CUT]))
        self._stream.abort()


def _duplicate(first: str | None, second: str | None) -> str:
    """Return the message for a key that was read from the shard *first*, and again from the shard *second*."""
    if first is None or second is None:
        return DUPLICATE_KEY
    which = f"{first} has it twice" if first == second else f"it comes from {first}, and again from {second}"
    return f"{DUPLICATE_KEY}: {which}"


def _is_file(target: Any) -> bool:
    if not hasattr(target, "write") or (isinstance(target, os.PathLike) and not hasattr(target, "closed")):
        return False  # fsspec's files are also PathLike, and py.path's paths have a write method
    if hasattr(target, "encoding"):
        raise TypeError(f"a shard is written to a file that is open for bytes, not text: {shortened(target)}")
    return True


class ShardWriter(_Writer):
    """Write samples to numbered shards, starting a new one when *max_samples* or *max_bytes* would be exceeded.

    *pattern* contains the shard number as ``{shard:06d}`` or ``%06d``. Both limits hold, even if only one is given: by
    default 100,000 samples and 3 GB (3 x 10**9 bytes); None is no limit. *max_bytes* is the size of the finished file
    before compression, a multiple of 10,240; only a single larger sample exceeds it. Shards are never empty: without
    samples, none is written. ``shards`` lists the finished shards, which remain if a later one is aborted. Shards of an
    earlier run beyond the last one are not removed, but ``close`` logs a warning that names them.

    With *index*, every uncompressed shard gets a sidecar ``<shard>.index`` when it is finished. ``close`` writes the
    manifest of all shards with their sample counts and sizes, named after the pattern: ``train-{shard:06d}.tar`` gives
    ``train.shards.json``. After an error, no manifest is written. With *start* above 0, a shard that exists is not
    replaced: OpenError is raised when it would begin. The manifest then keeps its entries, and adds shards below
    *start* that have an index. Entries that writers of other shards add in the meantime stay. Pipes get neither indexes
    nor a manifest. *sync* is as in ``TarWriter``, and also applies to indexes and the manifest. With *sha256*,
    uncompressed shards are hashed as they are written, and the manifest has their checksums.

    A local shard belongs to the writer that begins it until the writer is closed or aborted, or its process ends. Until
    then, another writer that would replace it raises OpenError, which names the process. Concurrent writers need
    different patterns, or different *start*. On servers and object stores, two writers of a shard at the same time are
    not detected.

    *values* replaces other names in the pattern. *open_writer* opens each shard by name, instead of ``TarWriter``, and
    must claim it; *on_finish* is called with the name and the writer of each finished shard.
    """

    @explains
    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        max_samples: int | None = MOST_SAMPLES,
        max_bytes: int | None = MOST_BYTES,
        start: int = 0,
        index: bool = True,
        allow_pipe: bool = False,
        sync: bool = True,
        sha256: bool = False,
        values: Mapping[str, str] | None = None,
        open_writer: Callable[[str], TarWriter] | None = None,
        on_finish: Callable[[str, TarWriter], Any] | None = None,
    ):
        self._location = Location.of(pattern, sync=sync)
        self.pattern: str = self._location.url
        if not is_pattern(self.pattern):
            raise ValueError(f"{self._location.name}: the pattern needs a shard number, {{shard:06d}} or %06d")
        self._location.compression()  # raises UrlError for a name of another format
        self.max_samples: int | None = None if max_samples is None else whole_number("max_samples", max_samples, 1)
        self.max_bytes: int | None = None if max_bytes is None else whole_number("max_bytes", max_bytes, 1)
        self._most = None if self.max_bytes is None else most_of_members(self.max_bytes)
        self._values = values or {}
        self._claims = Claims()
        self._start = self._number = whole_number("start", start, 0)
        open_tar = partial(open_claimed, allow_pipe=allow_pipe, sync=sync, sha256=sha256, replace=not self._start)
        self._open_writer = open_writer or partial(open_tar, self._claims)
        self._sha256 = sha256
        self._on_finish = on_finish
        self.shards: list[str] = []
        self.samples: int = 0
        self._writer: TarWriter | None = None
        self._is_open = True
        self._index = flag("index", index) and not self._location.is_stream
        self._entries: dict[str, Shard] = {}

    def write(self, sample: Sample) -> None:
        """Append one sample; raise the errors of ``TarWriter.write``, and ValueError after ``close``."""
        fields, values = encode_sample(sample, in_pieces=True)
        key = sample["__key__"]
        packed = pack_members(key, fields, values)
        if self._writer is not None and self._is_full(self._writer, packed):
            self._finish_shard()
        if (writer := self._writer) is None:
            if not self._is_open:
                raise ValueError(f"{self._location.name}: closed, so nothing more can be written")
            writer = self._writer = self._begin_shard()
        try:
            writer.write_members(key, fields, values, packed, sample.get("__url__"))
        except BaseException:
            if writer.is_closed:
                self.abort()
            raise
        self.samples += 1

    def _is_full(self, writer: TarWriter, packed: list[bytes]) -> bool:
        if self.max_samples is not None and writer.samples >= self.max_samples:
            return True
        return self._most is not None and writer.end + sum(map(len, packed)) > self._most

    def _name(self) -> str:
        return shard_name(self.pattern, self._number, self._values)

    def _begin_shard(self) -> TarWriter:
        writer = self._open_writer(self._name())
        if self._index:
            writer.add_index()
        return writer

    def _finish_shard(self) -> None:
        if self._writer is None:
            return
        if self._index and not self.shards and not self._start:
            from tarshards.index.manifests import remove_manifest

            remove_manifest(self._manifest())  # it lists shards that are being replaced
        try:
            self._writer.close()
        except BaseException:
            self.abort()
            raise
        name, writer, self._writer = self._name(), self._writer, None
        if writer.index is not None:
            shard = writer.index.shard(name)
        else:
            shard = Shard(name, writer.samples, None if writer.is_compressed else writer.size)
        self._entries[name] = shard._replace(sha256=writer.sha256)
        self.shards.append(name)
        self._number += 1
        if self._on_finish is not None:
            self._on_finish(name, writer)

    def _write_manifest(self) -> None:
        """Write the manifest; keep the entries of an earlier run, and those that writers of other shards added."""
        from tarshards.index.manifests import earlier_shards, natural_order, write_manifest

        url = self._manifest()
        location = Location.of(url)
        with location.folder_lock():
            if self._start or location.is_local:
                below = (shard_name(self.pattern, number, self._values) for number in range(self._start - 1, -1, -1))
                for shard in earlier_shards(url, below):
                    if shard.url not in self._entries:
                        self._entries[shard.url] = self._with_sha256(shard)
            shards = sorted(self._entries.values(), key=lambda shard: natural_order(shard.url))
            write_manifest(self._location.at(url), shards)
        self._entries = {}

    def _with_sha256(self, shard: Shard) -> Shard:
        """Return a shard of an earlier run, with its checksum if ``sha256`` is set; compute it if none is stored."""
        location = Location.of(shard.url)
        if not self._sha256 or shard.sha256 is not None or location.compression() is not None:
            return shard
        return shard._replace(sha256=location.sha256())

    def _manifest(self) -> str:
        return manifest_url(_fill(self.pattern, lambda width: "\0", self._values))

    def close(self) -> None:
        """Finish the last shard, write the manifest, and warn of shards beyond the last; further calls do nothing."""
        with self._claims:
            self._finish_shard()
            if self._is_open:
                name_leftovers(self.pattern, self._number, self._values)
                self._is_open = False
            if self._index and self._entries:
                self._write_manifest()

    def abort(self) -> None:
        """Discard the unfinished shard, and write no manifest."""
        self._is_open = False
        self._entries = {}
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        self._claims.release()


def open_claimed(claims: Claims, name: str, *, replace: bool = True, **options: Any) -> TarWriter:
    """Claim the shard *name* and open it; raise OpenError if another writer has claimed it.

    Without *replace*, raise OpenError, too, if it exists.
    """
    claims.take(name)
    if not replace and (location := Location.of(name)).is_taken():
        reason = "the shard exists, and a writer with start= replaces none: remove it, or begin at another number"
        raise OpenError(reason, url=location.name, errno=EEXIST)
    return TarWriter(name, **options)


def most_of_members(max_bytes: int) -> int:
    """Return how many bytes of members fit into an archive of *max_bytes*, which ends with its last whole record."""
    return max(0, max_bytes // RECORD * RECORD - len(END))


def is_pattern(outputs: Any) -> bool:
    """Return whether *outputs* is a name that contains the number of the shard."""
    return isinstance(outputs, str | os.PathLike) and shard_name(outputs, 0) != shard_name(outputs, 1)


def name_leftovers(pattern: Any, number: int, values: Mapping[str, str] | None = None) -> None:
    """Log a warning if there are shards of *pattern* from *number* on, left by an earlier run that wrote more."""
    if not is_pattern(pattern) or Location.of(pattern).is_stream:
        return
    left: list[str] = []
    with suppress(OpenError):  # the server does not list files
        while (location := Location.of(shard_name(pattern, number + len(left), values))).exists():
            left.append(location.name)
    if left:
        import logging

        names = left[0] if len(left) == 1 else f"{left[0]} to {left[-1]}"
        reason = "left by an earlier run, beyond the last shard that is written now; remove what is not of this dataset"
        logging.getLogger("tarshards").warning("%s: %s", visible(names), reason)


def write_samples(
    samples: Iterable[Sample | PackedSamples],
    target: str | os.PathLike[str] | Location | BinaryIO,
    *,
    allow_pipe: bool = False,
    sync: bool = True,
    reject: Reject | None = None,
) -> int:
    """Write *samples* to one shard, as ``TarWriter`` does, and return the number written.

    If a sample cannot be written, such as one with a duplicate key, SampleError or EncodeError is raised; or *reject*
    is called with the sample and the error, and the sample is left out.
    """
    if isinstance(samples, Mapping):
        raise TypeError(f"write_samples takes samples, such as a list of dicts, not one dict {shortened(samples)}")
    with TarWriter(target, allow_pipe=allow_pipe, sync=sync) as writer:
        _write_each(writer, samples, reject)
    return writer.samples


def write_shard(
    samples: Iterable[Sample | SampleBatch],
    target: Location,
    *,
    reject: Reject | None = None,
) -> tuple[int, int]:
    """Write *samples* to a shard, as ``write_samples`` does, and write its index.

    Returns the number of samples and the size of the shard in bytes, before compression. Creates the folder of a local
    shard if it is missing.
    """
    target.make_folder()
    with TarWriter(target) as writer:
        writer.add_index()
        _write_each(writer, samples, reject)
    return writer.samples, writer.size


def made_shard(url: str, samples: int, size: int) -> Shard:
    """Return the manifest entry of a shard that ``write_shard`` wrote; a compressed shard has no index."""
    is_indexed = Location.of(url).compression() is None
    return Shard(url, samples, size if is_indexed else None, indexed=is_indexed)


def enter_shards(made: Iterable[tuple[str, int, int]], outputs: Any, targets: Sequence[Location]) -> None:
    """Enter shards that ``write_shard`` *made* in their manifests: the URL, samples and size of each.

    Warns of shards of *outputs*, a pattern, beyond the *targets* of this run, which an earlier one has left.
    """
    from tarshards.index.manifests import add_to_manifests

    add_to_manifests([made_shard(*each) for each in made], targets[0])
    name_leftovers(outputs, len(targets))


def _write_each(
    writer: TarWriter,
    samples: Iterable[Sample | SampleBatch | PackedSamples],
    reject: Reject | None,
) -> None:
    for each in samples:
        left: Iterable[Any] = (each,)
        if type(each) is SampleBatch:
            left = writer.write_batch(each)
        elif type(each) is PackedSamples:
            left = writer.write_packed_samples(each)
        for sample in left:
            try:
                writer.write(sample)
            except (SampleError, EncodeError) as error:
                reject_or_raise(reject, sample, error)


def shard_name(pattern: str | os.PathLike[str] | Location, shard: int, values: Mapping[str, str] | None = None) -> str:
    """Fill the shard number and the names in *values* into *pattern*; other names stay unchanged.

    >>> shard_name("a-{shard:03d}.tar", 7), shard_name("a-%06d.tar", 7), shard_name("{x}-%d.tar", 7, {"x": "%d"})
    ('a-007.tar', 'a-000007.tar', '%d-7.tar')
    """
    return _fill(Location.of(pattern).url, lambda width: format(shard, f"{width}d"), values)


def _fill(pattern: str, number: Callable[[str], str], values: Mapping[str, str] | None) -> str:
    """Fill the names in *values*, and ``number(width)`` as the shard number, into *pattern*."""

    def fill(match: re.Match[str]) -> str:
        variable, width, percent_width = match.groups()
        if variable is None:
            return number(percent_width)
        if variable == "shard":
            return number(width or "")
        return match[0] if width is not None else (values or {}).get(variable, match[0])

    return re.sub(r"\{([^{}:]+)(?::(0?\d*)d?)?\}|%(0?\d*)d", fill, pattern)
