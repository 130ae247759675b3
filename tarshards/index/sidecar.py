"""The sidecar file ``<shard>.index``: one msgpack map, described in docs/index-format.md."""

from __future__ import annotations

import os
import resource
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import ENOENT
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args
from zlib import crc32

from tarshards.errors import OpenError, SampleError, ShardIndexError, TarshardsError
from tarshards.index._sidecars_py import BEGINNING, SidecarHead, parse_head
from tarshards.index.member_table import IS_COMPILED, MemberTable, layout
from tarshards.samples.fields import FieldNames, find_field
from tarshards.samples.keys import Split
from tarshards.storage.beside import FORMAT, INDEX
from tarshards.storage.compression import HEAD, find_compression
from tarshards.storage.location import Location, are_local, paths_of
from tarshards.storage.manifest import Shard, Shards
from tarshards.storage.ranges import LocalRanges, MappedPart, Ranges
from tarshards.storage.remote import Remote, default
from tarshards.storage.streams import is_missing, is_refused, read_at_most
from tarshards.tar.elsewhere import Step
from tarshards.tar.read import BLOCK, padding

try:
    from tarshards.index._sidecars import are_listed, read_heads
except ImportError:
    from tarshards.index._sidecars_py import are_listed, read_heads

if TYPE_CHECKING:
    import numpy as np

VERSION, WITH_FAULTS = 1, 2  # the second, which earlier readers refuse, where samples or members are not plain
CHECKSUM = b"\xa8checksum\xce"  # the last key of the map; the 4-byte value covers everything before itself
NEEDED = {"format", "version", "shard", "keys", "fields", "sample", "field", "offset", "size"}
UNREAD = {"keys", "sample", "field", "offset", "size", "crc32", "checksum"}  # what is not read when an index is loaded
FORMATS = {"sample": "<I", "field": "<H", "offset": "<Q", "size": "<Q", "crc32": "<I"}  # the type of each array
MAX_BYTES = 1 << 30  # of a sidecar: 26 bytes a member, and the keys
EACH = 1 << 10  # bytes that an index takes besides its sidecar, about
TOO_LONG = f"more than {MAX_BYTES:,} bytes, the limit for such a file"
MAPPED = 1 << 12  # bytes of a sidecar that is mapped rather than copied: a page
FEW = 64  # local shards after which it is asked whether threads would read them sooner
MANY = 1 << 10  # local shards that threads read until that is asked again
PROBED = 1 << 12  # shards, spread evenly over the list, whose sidecars are looked for first
COUNTS = ("samples", "size")  # of a shard
SPLITS: tuple[Split, ...] = get_args(Split)
MISSING = "no index found; create one with `tarindex`"
DAMAGED = "damaged: truncated, or wrong checksum"
REBUILD = "rebuild it with `tarindex`"
DIGEST = 16  # bytes
Hold = Callable[[Callable[[], bytes]], "bytes | MappedPart"]
OTHER = "other keys or members than the manifest describes; write both again with `tarindex`"
NO_DIGEST = "written by an earlier version, without a digest; renew it with `tarindex`"


def _array(name: str) -> cached_property[np.ndarray]:
    """Return a property that gives an array of an index as numpy's, which is imported only then."""

    def view(index: Index) -> np.ndarray:
        import numpy as np

        return np.frombuffer(index.arrays[name], FORMATS[name])

    return cached_property(view)


class Fault(NamedTuple):
    """Why members do not form a sample; *offset*, of a header, and *field* are those of the first error."""

    reason: str
    offset: int
    field: str | None


class Index:
    """Where every member of one shard lies.

    The arrays have one entry per member, in the order of the shard: ``sample`` is the number of its sample, from 0;
    ``field`` a position in ``fields``; ``offset`` and ``size`` those of its data, in bytes; ``crc32`` the checksum of
    its data, or None where the index has no checksums.

    ``fingerprint`` is the CRC-32 of two blocks: the 512 bytes before the data of the first member and those before the
    data of the last. These are the members' own headers; extended headers (pax, GNU long names) come before them and
    are not covered. It is 0 for a shard without members.

    ``archives`` is the number of archives that the shard consists of: more than one if it is concatenated.

    ``split`` is the rule by which the names of members were split into keys and fields, "first" or "last".

    ``end`` is the offset of the zeros that end the last archive; None in indexes that do not say it.

    ``faults`` are the samples at fault, by number: those with a duplicate field, those whose key occurred before, and
    those with a member that has no content. They are numbered and counted like others, but cannot be read.

    ``elsewhere`` are the links and sparse members, by number, with the steps to their content. For a link ``size`` is
    0, for a sparse member that of the pieces which are stored at ``offset``.

    ``digest`` identifies keys and members: what is derived from the shard is compared by it. It is that of the sidecar
    which was written last or read; None where an earlier version wrote it.
    """

    digest: bytes | None = None
    faults: Mapping[int, Fault] = MappingProxyType({})  # one object for all shards without any
    elsewhere: Mapping[int, list[Step]] = MappingProxyType({})
    _sidecar: bytes | Any = None  # the sidecar, mapped or in memory, if it was loaded
    sample, field, offset, size = _array("sample"), _array("field"), _array("offset"), _array("size")
    split: str = "first"
    url: str | None = None  # the sidecar's, if it was read, for messages

    def __init__(
        self,
        shard_size: int,
        fingerprint: int,
        keys: list[str],
        fields: list[str],
        arrays: dict[str, bytes],
        archives: int = 1,
        faults: dict[int, Fault] | None = None,
        end: int | None = None,
        elsewhere: dict[int, list[Step]] | None = None,
    ):
        self.shard_size, self.fingerprint, self.keys, self.fields = shard_size, fingerprint, keys, fields
        self.arrays = arrays
        self.archives, self.faults, self.elsewhere = archives, faults or {}, elsewhere or {}
        self.end = end

    def __len__(self) -> int:
        return len(self.table) if self._sidecar is not None else len(self.keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.pack() == other.pack()

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def table(self) -> MemberTable:
        """The members in the sidecar, which is read as it is."""
        packed = self.pack()
        fields = tuple(field.encode("utf-8", "surrogateescape") for field in self.fields)
        return MemberTable(packed, layout(packed), fields, self.shard_size, -1 if self.end is None else self.end)

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the samples; of an index that was loaded a copy, for who needs all."""
        return list(self._copied("keys")["keys"])

    @cached_property
    def arrays(self) -> dict[str, bytes]:
        """The arrays as the file holds them; of an index that was loaded copies, for who needs all."""
        return self._copied(*FORMATS)

    def _copied(self, *names: str) -> dict[str, Any]:
        """Return copies of some values of the map in the sidecar."""
        import msgpack

        packed = self._sidecar if isinstance(self._sidecar, bytes) else self._sidecar.read(0, len(self._sidecar))
        ranges = layout(packed)
        found = {name: packed[slice(*ranges[name])] for name in names if name in ranges}
        if "keys" in found:
            found["keys"] = msgpack.unpackb(found["keys"], unicode_errors="surrogateescape")
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes, about; those of a mapped sidecar are not its own."""
        return EACH + (len(self._sidecar) if isinstance(self._sidecar, bytes) else 0)

    @property
    def members(self) -> int:
        """The number of members."""
        return self.table.members

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        return self.table.key(sample) if self._sidecar is not None else self.keys[sample]

    def data_range(self, member: int) -> tuple[int, int]:
        """Return the offset and the size of a member's data in the shard."""
        _, _, offset, size = self.table.entry(member)
        return offset, size

    def named(self, member: int) -> tuple[str, str]:
        """Return the key and the field of a member."""
        sample, field, _, _ = self.table.entry(member)
        return self.key(sample), self.fields[field]

    def firsts(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of the first member of each sample, and of that after the last: how many there are."""
        import numpy as np

        samples = np.ascontiguousarray(samples, np.int64)
        out = np.empty(len(samples), np.int64)
        self.table.read_firsts(samples, out)
        return out

    def entries(self, members: np.ndarray) -> np.ndarray:
        """Return the sample, field, offset and size of each member: int64, a row each."""
        import numpy as np

        members = np.ascontiguousarray(members, np.int64)
        out = np.empty((len(members), 4), np.int64)
        self.table.read_entries(members, out)
        return out

    @cached_property
    def crc32(self) -> np.ndarray | None:
        import numpy as np

        return np.frombuffer(self.arrays["crc32"], FORMATS["crc32"]) if "crc32" in self.arrays else None

    @cached_property
    def first(self) -> np.ndarray:
        """The number of each sample's first member, then the number of members: sample i has first[i]:first[i + 1]."""
        import numpy as np

        first = np.zeros(len(self) + 1, np.int64)
        first[1:-1] = np.flatnonzero(self.sample[1:] != self.sample[:-1]) + 1
        first[-1] = len(self.sample)
        return first

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each sample by its key; a key that occurs again stands for the first."""
        return dict(zip(reversed(self.keys), reversed(range(len(self)))))

    def fault(self, sample: int, url: str) -> SampleError:
        """Return the error of a sample at fault; *url* names the shard."""
        reason, offset, field = self.faults[sample]
        return SampleError(reason, url=url, offset=offset, key=self.key(sample), field=field)

    def content_size(self, member: int) -> int:
        """Return the bytes of a member's content."""
        steps = self.elsewhere.get(member)
        return steps[-1].size if steps else self.data_range(member)[1]

    def not_plain(self, member: int, url: str) -> ShardIndexError:
        """Return the error of a link or sparse member for those who need its bytes in the shard, which is *url*."""
        reason = "a link or a sparse member, whose content is not after its header; copy the shard with `tarcat -o`"
        key, field = self.named(member)
        return ShardIndexError(reason, url=url, offset=self.data_range(member)[0] - BLOCK, key=key, field=field)

    def fields_of(self, sample: int) -> list[str]:
        """Return the fields of a sample."""
        return [self.fields[self.table.entry(member)[1]] for member in range(*self.table.span(sample))]

    def members_of(self, field: str) -> np.ndarray:
        """Return the numbers of the members that are of *field*, in the order of the shard; not of samples at fault."""
        import numpy as np

        name = find_field(self.fields, [field])
        members = np.flatnonzero(self.field == (-1 if name is None else self.fields.index(name)))
        return members[~np.isin(self.sample[members], list(self.faults))] if self.faults else members

    def known_digest(self, url: str | Location) -> bytes:
        """Return the digest of the shard *url*; raise ShardIndexError where its sidecar has none."""
        if self.digest is None:
            raise ShardIndexError(NO_DIGEST, url=index_location(url).name)
        return self.digest

    def shard(self, url: str, *, indexed: bool = True) -> Shard:
        """Return what a manifest says of the shard, which is *url*; *indexed* if this index lies beside it."""
        digest = None if self.digest is None else self.digest.hex()
        return Shard(url, len(self), self.shard_size, self.archives > 1, indexed, digest=digest)

    def pack(self) -> bytes:
        """Return the bytes of the sidecar file."""
        import msgpack

        shard: dict[str, Any] = {"size": self.shard_size, "fingerprint": self.fingerprint}
        if self.archives > 1:
            shard["archives"] = self.archives
        if self.split != "first":
            shard["split"] = self.split
        if self.end is not None:
            shard["end"] = self.end
        arrays = {name: self.arrays[name] for name in FORMATS if name != "crc32"}
        described = {"keys": self.keys, "fields": self.fields, **arrays}
        checksums = {"crc32": self.arrays["crc32"]} if "crc32" in self.arrays else {}
        marks: dict[str, Any] = {}
        if self.faults:
            marks["faults"] = [[sample, *fault] for sample, fault in self.faults.items()]
        if self.elsewhere:
            marks["elsewhere"] = [[member, *steps] for member, steps in self.elsewhere.items()]
        members, marked = _pack(described), _pack(marks)
        self.digest = shard["digest"] = blake2b(members + marked if marks else members, digest_size=DIGEST).digest()
        head = {"format": FORMAT, "version": WITH_FAULTS if marks else VERSION, "shard": shard}
        begin = msgpack.Packer().pack_map_header(len(head) + len(described) + len(checksums) + len(marks) + 1)
        parts = [begin, _pack(head), members, _pack(checksums), marked, CHECKSUM]
        checksum = 0
        for part in parts:
            checksum = crc32(part, checksum)
        return b"".join([*parts, checksum.to_bytes(4, "big")])

    @classmethod
    def unpack(cls, packed: bytes, *, url: str | None = None) -> Index:
        """Return the index in *packed*; raise ShardIndexError, which names *url*, where there is none."""
        import msgpack

        covered = memoryview(packed)[:-4]
        if covered[-len(CHECKSUM) :] != CHECKSUM or crc32(covered) != int.from_bytes(packed[-4:], "big"):
            raise ShardIndexError(_what_is_wrong(packed), url=url)
        try:
            ranges = layout(packed)
            if missing := NEEDED - ranges.keys():
                raise ValueError(f"no {min(missing)}")
            found = {name: packed[slice(*ranges[name])] for name in ranges.keys() - UNREAD}
            fields, encoded = _read_fields(found.pop("fields"))
            small = {name: msgpack.unpackb(value, unicode_errors="surrogateescape") for name, value in found.items()}
            if small["format"] != FORMAT or small["version"] not in (VERSION, WITH_FAULTS):
                raise ShardIndexError(_what_is_wrong(packed), url=url)
            shard = small["shard"]
            index = cls.__new__(cls)
            index.shard_size, index.fingerprint, index.fields = shard["size"], shard["fingerprint"], fields
            index.archives, index.end = shard.get("archives", 1), shard.get("end")
            index.digest, index.split = shard.get("digest"), shard.get("split", "first")
            index.url = url
            if "faults" in small:
                index.faults = {sample: Fault(*fault) for sample, *fault in small["faults"]}
            if "elsewhere" in small:
                index.elsewhere = {member: [Step(*step) for step in steps] for member, *steps in small["elsewhere"]}
            index._sidecar = packed
            problem = _inconsistency(index, ranges)
            if problem is None:
                end = -1 if index.end is None else index.end
                index.table = MemberTable(packed, ranges, encoded, index.shard_size, end)
                problem = _wrong_mark(index)
        except ShardIndexError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if problem:
            raise ShardIndexError(f"damaged: {problem}", url=url)
        return index

    def rest_on(self, mapping: Any) -> None:
        """Use a *mapping* of the sidecar, which processes share, instead of the bytes that were read."""
        self.table.rest_on(mapping.buffer if isinstance(mapping, MappedPart) else mapping)
        self._sidecar = mapping

    @classmethod
    def load(
        cls, shard_url: str | Location, *, check: bool = True, copied: int = MAPPED, hold: Hold | None = None
    ) -> Index:
        """Read the sidecar of *shard_url* and, with *check*, compare it with the shard.

        *hold* returns its bytes from where processes share them, or by what it is given.

        Raises ShardIndexError with the reason MISSING where there is no sidecar, and with other reasons where it is
        damaged, stale, or of an unknown version. A local sidecar of more than *copied* bytes is mapped.
        """
        location = index_location(shard_url)
        mapping: Any = None
        try:
            if IS_COMPILED and location.path is not None:
                own = LocalRanges(location.path, location.name, copied)
                packed, mapping = own.read(0, own.size), own.mapping
                if len(packed) > MAX_BYTES:
                    raise OpenError(TOO_LONG, url=location.name)
            else:
                held = location.hold(MAX_BYTES) if hold is None else hold(lambda: location.read(MAX_BYTES))
                packed, mapping = (held, None) if isinstance(held, bytes) else (held.read(0, len(held)), held)
        except OpenError as error:
            if is_missing(error):
                raise ShardIndexError(MISSING, url=location.name) from error
            raise
        index = cls.unpack(packed, url=location.name)
        if IS_COMPILED and mapping is not None and len(packed) > copied:
            index.rest_on(mapping)
        if check:
            with Location.of(shard_url).ranges() as ranges:
                index.check(ranges)
        return index

    def difference(self, other: Index) -> str | None:
        """Describe the first difference between the members and those of *other*, an index of the shard as it is now.

        None means that there is none. Checksums are compared where both have them, fingerprints are not.
        """
        common = [name for name in FORMATS if name in self.arrays and name in other.arrays]
        if (self.keys, self.fields) == (other.keys, other.fields) and all(
            self.arrays[name] == other.arrays[name] for name in common
        ):
            return self._other_mark(other)
        columns = [name for name in common if name not in ("sample", "field")]
        for sample, (key, other_key) in enumerate(zip(self.keys, other.keys)):
            mine, theirs = self._members(sample, columns), other._members(sample, columns)
            if (key, mine) != (other_key, theirs):
                field = next((field for field in mine if mine[field] != theirs.get(field)), None)
                return f"{key if field is None else f'{key}.{field}'} has changed since the shard was indexed"
        if len(self) == len(other):
            return self._other_mark(other)  # otherwise only the numbers of the fields differ
        return f"the shard has {len(other)} samples, but had {len(self)} when it was indexed"

    def _other_mark(self, other: Index) -> str | None:
        """Describe the first difference between faults, or the contents of links and sparse members."""
        faults = sorted(self.faults.items() ^ other.faults.items())
        steps = [
            member
            for member in {*self.elsewhere, *other.elsewhere}
            if self.elsewhere.get(member) != other.elsewhere.get(member)
        ]
        samples = [sample for sample, _ in faults] + [int(self.sample[member]) for member in steps]
        return f"{self.keys[min(samples)]} has changed since the shard was indexed" if samples else None

    def _members(self, sample: int, columns: list[str]) -> dict[str, list[int]]:
        """Return *columns* of the members of a sample by their fields."""
        members = range(self.first[sample], self.first[sample + 1])
        return {
            self.fields[self.field[member]]: [int(getattr(self, column)[member]) for column in columns]
            for member in members
        }

    def save(self, shard_url: str | Location, *, sync: bool = True) -> None:
        """Write the sidecar of *shard_url*, whole or not at all, and with *sync* to the disk."""
        location = index_location(Location.of(shard_url, sync=sync))
        location.make_folder()
        with location.open("wb") as stream:
            stream.write(self.pack())

    def check_split(self, split: str | None) -> None:
        """Raise ShardIndexError unless names were split as *split* says; None says nothing."""
        if split not in (None, self.split):
            own = f'read the shard with `--split {self.split}` (split="{self.split}")'
            reason = f"made with `tarindex --split {self.split}`; {own}, or index it with `tarindex --split {split}`"
            raise ShardIndexError(reason, url=self.url)

    def check(self, ranges: Ranges) -> None:
        """Raise ShardIndexError unless *ranges* reads the shard that was indexed."""
        self.check_size(ranges.size)
        ends = (
            [self.data_range(member)[0].to_bytes(8, "little") for member in (0, self.members - 1)]
            if self.members
            else []
        )
        if fingerprint(ranges, b"".join(ends)) != self.fingerprint:
            reason = f"stale: the shard's headers have changed since it was indexed; {REBUILD}"
            raise ShardIndexError(reason, url=self.url)
        if (end := self.archive_end) is not None:
            self.check_end(ranges.read(end, min(BLOCK, ranges.size - end)))

    @property
    def archive_end(self) -> int | None:
        """The offset of the block that is zeros as long as nothing was appended to the shard; None if not known."""
        if self.end is not None or not self.members:
            return self.end
        end = sum(self.data_range(self.members - 1))
        return end + padding(end)

    def check_end(self, block: bytes) -> None:
        """Raise ShardIndexError unless *block*, the one at ``archive_end``, is zeros."""
        if block.count(0) < len(block):
            raise ShardIndexError(f"stale: members were appended since the shard was indexed; {REBUILD}", url=self.url)

    def check_size(self, size: int) -> None:
        """Raise ShardIndexError unless the shard that was indexed had *size* bytes."""
        if size != self.shard_size:
            reason = f"stale: the shard has {size} bytes, but had {self.shard_size} when it was indexed"
            raise ShardIndexError(f"{reason}; {REBUILD}", url=self.url)


def _pack(entries: dict[str, Any]) -> bytes:
    """Return the bytes of entries of the map."""
    import msgpack

    packer = msgpack.Packer(unicode_errors="surrogateescape", autoreset=False)
    for name, value in entries.items():
        packer.pack(name)
        packer.pack(value)
    packed: bytes = packer.bytes()
    return packed


def fingerprint(ranges: Ranges, offset: bytes) -> int:
    """Return the fingerprint of a shard; *offset* is the array of the offsets of its members' data, as bytes."""
    value = 0
    for start in [offset[:8], offset[-8:]] if offset else []:
        value = crc32(ranges.read(int.from_bytes(start, "little") - BLOCK, BLOCK), value)
    return value


def refuse_compressed(ranges: Ranges, location: Location) -> None:
    """Raise ShardIndexError if the shard in *ranges* is compressed, so that its members have no offsets."""
    if compression := find_compression(ranges.read(0, min(HEAD, ranges.size))):
        name = location.name
        plain = os.path.splitext(name)[0].removesuffix(".tar") + ".tar"
        reason = f"compressed ({compression}), so it has no random access"
        raise ShardIndexError(f"{reason}; decompress it with `tarcat {name} -o {plain}`", url=name)


def index_location(shard_url: str | Location) -> Location:
    """Return the location of a shard's sidecar, beside it or in an *index_dir*; raise ShardIndexError for a stream."""
    location = Location.of(shard_url)
    if location.is_stream:
        raise ShardIndexError("streams have no index", url=location.name)
    return location.described.sibling(INDEX)


def check_there(url: str | Location) -> None:
    """Raise OpenError if the shard *url* is missing, which then says more than that it has no index."""
    location = Location.of(url)
    if not (location.is_stream or location.exists()):
        raise OpenError(os.strerror(ENOENT), url=location.name, errno=ENOENT)


def has_index(urls: Sequence[str | Location], remote: Remote | None = None) -> list[bool]:
    """Return for each shard whether it has a sidecar: a folder of many is listed, remote ones are asked for at once."""
    names = [url.url if isinstance(url, Location) else url for url in urls]
    if not are_local(names):
        return list(for_each_shard(_has_index, [Location.of(url, remote) for url in urls]))
    paths = paths_of(names)
    there = [False] * len(paths)
    for shards, numbers in _by_folder(paths).items():
        folder = _index_folder(shards, remote)
        bases = [paths[number][len(shards) :] + INDEX for number in numbers]
        listed = _listed(folder, bases) if len(bases) > FEW else None
        for number, is_there in zip(numbers, listed or (os.path.exists(folder + base) for base in bases)):
            there[number] = bool(is_there)
    return there


def _by_folder(paths: list[str]) -> dict[str, Sequence[int]]:
    """Return the numbers of *paths* by their folders, which end in a slash."""
    folder = paths[0][: paths[0].rfind("/") + 1] if paths else ""
    text = "\0" + "\0".join(paths)
    if text.count("/") == folder.count("/") * len(paths) and text.count("\0" + folder) == len(paths):
        return {folder: range(len(paths))}  # which is quick to find out, even with many thousands
    folders: dict[str, Any] = {}
    for number, path in enumerate(paths):
        folders.setdefault(path[: path.rfind("/") + 1], []).append(number)
    return folders


def _listed(folder: str, bases: list[str]) -> bytes | None:
    """Return for each of the names *bases* in *folder* whether it is listed; None where a listing does not tell."""
    try:
        found = are_listed(os.fsencode(folder or "."), os.fsencode("\0".join(bases)))
    except (OSError, UnicodeEncodeError):
        return None
    first = found.find(0)
    if len(found) != len(bases) or (first >= 0 and os.path.exists(folder + bases[first])):
        return None  # a name has a NUL, or has another form in the listing, as in upper case
    return found


def _has_index(location: Location) -> bool:
    try:
        return not location.is_stream and index_location(location).exists()
    except OpenError as error:
        if location.is_remote and is_refused(error):
            return False  # a store refuses names that it does not show, or that are not signed
        raise


def _index_folder(folder: str, remote: Remote | None) -> str:
    """Return the folder, with its slash, of the sidecars of local shards in *folder*."""
    if (remote or default()).index_dir is None:
        return folder
    return os.path.join(os.path.dirname(str(index_location(Location(f"{folder}x", remote)).path)), "")


def with_counts(shards: Shards, remote: Remote | None, *fields: FieldNames | None) -> tuple[Shards, list[int]]:
    """Return *shards* with the samples and bytes that their indexes say where no manifest does, and those without one.

    The latter are numbers. Only the beginnings of indexes are read, and the sizes of local shards: they are compared
    with the shards when these are opened, but for those without samples, which nobody opens. Where none of PROBED
    shards, spread evenly, has an index, others are not looked for, as if they had none. Raises ShardIndexError for an
    index that is damaged, made by another rule for names than its shard is read by, or of a shard of another size, and
    OpenError for a local shard that is missing; SampleError if the first of these shards lacks one of *fields*.
    """
    if not (numbers := shards.uncounted):
        return shards, []
    urls = shards.urls if len(numbers) == len(shards) else [shards.urls[number] for number in numbers]
    heads = [array("q", bytes(8 * len(urls))) for _ in range(3)]
    step = -(-len(urls) // PROBED)
    for begin in range(step):
        found = _read_heads(urls[begin::step], remote)
        for which, values in enumerate(heads):
            values[begin::step] = found[which::3]
        if begin == 0 and max(found) < 0:
            return shards, list(numbers)
    counts, sizes, are_last = heads
    if min(counts) < 0:
        return shards, [number for number, count in zip(numbers, counts) if count < 0]
    if any(fields):
        first = Location.of(urls[0], remote)
        known = Index.load(first, check=False).fields
        for names in filter(None, fields):
            names.check(known, first.name)
    splits = shards.column("split")
    if 0 in counts or any(splits):
        for number, url, count, is_last in zip(numbers, urls, counts, are_last):
            if count == 0 or splits[number] == SPLITS[not is_last]:
                location = Location.of(url, remote)
                Index.load(location).check_split(splits[number])
    columns = {}
    for name, said in zip(COUNTS, (counts, sizes)):
        columns[name] = said.tolist()
        if len(said) < len(shards):
            columns[name] = shards.column(name).copy()
            for number, value in zip(numbers, said):
                columns[name][number] = value
    return shards.replace(**columns), []


def _read_heads(urls: list[str], remote: Remote | None) -> array[int]:
    """Return what ``read_heads`` does of the shards *urls*; raise ShardIndexError where an index is wrong."""
    if not are_local(urls):
        heads = for_each_shard(_find_head, [Location.of(url, remote) for url in urls])
        return array("q", chain.from_iterable(heads))
    found = array("q")
    for some in for_some_shards(lambda some: _read_some([*some], remote), urls):
        found += some
    return found


def _read_some(urls: list[str], remote: Remote | None) -> array[int]:
    paths = paths_of(urls)
    folders = _by_folder(paths)
    found = array("q") if len(folders) == 1 else array("q", [-1, -1, -1] * len(urls))
    for folder, numbers in folders.items():
        given = folder, _index_folder(folder, remote), "\0".join([paths[number] for number in numbers])
        with suppress(ValueError):  # of names that cannot be
            heads = array("q", read_heads(*map(os.fsencode, given)))
            if len(folders) == 1:
                found = heads
            elif len(heads) == 3 * len(numbers):
                for i, number in enumerate(numbers):
                    found[3 * number : 3 * number + 3] = heads[3 * i : 3 * i + 3]
    if len(found) != 3 * len(urls):
        found = array("q", [-1, -1, -1] * len(urls))
    if min(found) < 0:
        for i, url in enumerate(urls):
            if found[3 * i] < 0:
                found[3 * i : 3 * i + 3] = array("q", _find_head(Location.of(url, remote)))
    return found


def _find_head(location: Location) -> tuple[int, int, int]:
    """Return what ``read_heads`` does of one shard; raise ShardIndexError or OpenError where something is wrong."""
    try:
        if location.is_stream:
            return -1, -1, -1
        head = read_head(location)
        if location.is_local and head.size != location.size():
            Index.load(location)
    except ShardIndexError as error:
        if error.reason != MISSING:
            raise
        return -1, -1, -1
    except OpenError as error:
        if not (location.is_remote and is_refused(error)):
            raise
        return -1, -1, -1
    return head.samples, head.size, int(head.split == "last")


def has_ranges(url: str | Location) -> bool:
    """Return whether parts of a shard can be read, as through an index; False for a server that sends whole files only.

    Other errors are for who reads it.
    """
    location = Location.of(url)
    if not location.is_remote:
        return True
    from tarshards.storage.transfer import NO_RANGES

    try:
        location.ranges().close()
    except OpenError as error:
        return error.reason != NO_RANGES
    return True


def read_head(shard_url: str | Location) -> SidecarHead:
    """Return what the beginning of a shard's sidecar says; raise ShardIndexError where it is missing or damaged."""
    location = index_location(shard_url)
    try:
        data = _read_beginning(location)
    except OpenError as error:
        if is_missing(error):
            raise ShardIndexError(MISSING, url=location.name) from error
        raise
    try:
        return parse_head(data)
    except (ValueError, TypeError, KeyError) as error:
        wrong = _what_is_wrong(data)
        reason = f"damaged: {type(error).__name__}: {error}" if wrong == DAMAGED else wrong
        raise ShardIndexError(reason, url=location.name) from error


def _read_beginning(location: Location) -> bytes:
    if location.is_remote:
        from tarshards.storage.transfer import NO_RANGES

        try:
            with location.ranges() as ranges:
                return ranges.read_up_to(0, BEGINNING)
        except OpenError as error:
            if error.reason != NO_RANGES:
                raise
    with location.open() as stream:
        return read_at_most(stream, BEGINNING, BEGINNING)


def check_described(shard: Shard, location: Location) -> None:
    """Raise ShardIndexError if the index of *shard*, at *location*, is of another one than its manifest describes.

    A shard without index passes.
    """
    if shard.digest is None:
        return
    try:
        digest = read_head(location).digest
    except ShardIndexError as error:
        if error.reason == MISSING:
            return
        raise
    except OpenError as error:
        if location.is_remote and is_refused(error):
            return
        raise
    if digest is not None and digest.hex() != shard.digest:
        raise ShardIndexError(OTHER, url=index_location(location).name)


def count_samples(shard_url: str) -> int | None:
    """Return the number of samples that the index of a local shard names, or None where there is none of this shard.

    Only the head of the sidecar is read, and only the shard's size is compared: good enough for a progress bar.
    """
    shard = Location.of(shard_url)
    if not shard.is_local or shard.is_stream:
        return None
    try:
        head = read_head(shard)
        return head.samples if head.size == shard.size() else None
    except TarshardsError:
        return None


def for_each_shard(function: Callable[[Any], Any], urls: Sequence[str | Location]) -> Iterator[Any]:
    """Yield *function* of each URL, in order; threads call it for several at once where that has to wait."""
    return chain.from_iterable(for_some_shards(lambda some: list(map(function, some)), urls))


def for_some_shards(function: Callable[[Sequence[Any]], Any], urls: Sequence[str | Location]) -> Iterator[Any]:
    """Yield *function* of some of the URLs after the other, in order; threads call it for each where that has to wait.

    What is in memory or on a quick disk takes less time without threads, which wait for each other.
    """
    is_local = are_local([url.url if isinstance(url, Location) else url for url in urls])
    begin, is_quick = 0, is_local
    while begin < len(urls):
        if is_quick:
            before = _waits()
            found = function(urls[begin : begin + FEW])
            is_quick = _waits() - before < FEW
            yield found
            begin += FEW
            continue
        from tarshards.parallel import bounded_map
        from tarshards.storage.connections import fetching_threads

        end = begin + MANY if is_local else len(urls)
        connections = Location.of(urls[begin]).remote.connections
        each = [[url] for url in urls[begin:end]]
        yield from bounded_map(function, each, executor=fetching_threads(connections), window=2 * connections)
        begin, is_quick = end, is_local


def _waits() -> int:
    """Return how often this thread has waited so far, for a disk or another thread."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def _what_is_wrong(packed: bytes) -> str:
    """Return why *packed*, whose checksum or version is wrong, cannot be read."""
    import msgpack

    unpacker = msgpack.Unpacker(max_buffer_size=0, unicode_errors="surrogateescape")
    unpacker.feed(packed)
    try:
        unpacker.read_map_header()
        is_ours = (unpacker.unpack(), unpacker.unpack()) == ("format", FORMAT)
        version = unpacker.unpack() == "version" and unpacker.unpack()
    except Exception:
        is_ours, version = False, 0
    if not is_ours:
        return "not an index of tarshards" if packed else "not an index: the file is empty"
    if version not in (VERSION, WITH_FAULTS):
        supported = f"only versions {VERSION} and {WITH_FAULTS}"
        return f"index version {version!r} is not supported, {supported}; create a new index with `tarindex`"
    return DAMAGED


@lru_cache(256)
def _read_fields(packed: bytes) -> tuple[list[str], tuple[bytes, ...]]:
    """Return fields as text and as bytes: the same objects for all shards that have the same ones."""
    import msgpack

    fields = msgpack.unpackb(packed, unicode_errors="surrogateescape")
    if not (isinstance(fields, list) and all(isinstance(field, str) for field in fields)):
        raise ValueError("fields that are not a list of strings")
    return fields, tuple(field.encode("utf-8", "surrogateescape") for field in fields)


def _inconsistency(index: Index, ranges: dict[str, tuple[int, int]]) -> str | None:
    """Return what is impossible in the head of *index*, None if nothing is."""
    if index.digest is not None and not (type(index.digest) is bytes and len(index.digest) == DIGEST):
        return "a digest that is none"
    if index.split not in get_args(Split):
        return "an unknown rule for names"
    if type(index.archives) is not int or index.archives < 1:
        return "a number of archives that is none"
    if type(index.shard_size) is not int or not 0 <= index.shard_size < 1 << 60:
        return "a size that is not a number of bytes"
    if "crc32" in ranges and int.__sub__(*ranges["crc32"]) != int.__sub__(*ranges["sample"]):
        return "arrays of different lengths"
    if index.end is not None and not (isinstance(index.end, int) and 0 <= index.end <= index.shard_size):
        return "an end of the archive that is beyond the shard's end"
    return None


def _wrong_mark(index: Index) -> str | None:
    """Return what is impossible in the samples at fault, and the links and sparse members, of *index*."""
    if not all(_is_fault(sample, fault, len(index)) for sample, fault in index.faults.items()):
        return "a fault without a sample, reason or offset"
    if not all(_are_steps(member, steps, index) for member, steps in index.elsewhere.items()):
        return "a link or sparse member without the steps to its content"
    return None


def _are_steps(member: Any, steps: list[Any], index: Index) -> bool:
    """Return whether *steps* are those to the content of a member."""
    if not (isinstance(member, int) and 0 <= member < index.members and steps):
        return False
    for header, name, link, size in steps:
        if not (type(header) is type(size) is int and 0 <= header < index.shard_size and size >= 0):
            return False
        if not (isinstance(name, str) and isinstance(link, (str, type(None)))):
            return False
    return [step.link is None for step in steps] == [False] * (len(steps) - 1) + [True]


def _is_fault(sample: Any, fault: Any, samples: int) -> bool:
    reason, offset, field = fault
    has_offset = isinstance(offset, int) and isinstance(field, (str, type(None)))
    return isinstance(sample, int) and 0 <= sample < samples and isinstance(reason, str) and has_offset
