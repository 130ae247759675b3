"""The sidecar file ``<shard>.index``: one msgpack map, described in docs/index-format.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from hashlib import blake2b
from mmap import PAGESIZE
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, get_args
from zlib import crc32

from tarshards import kernels
from tarshards.errors import OpenError, SampleError, ShardIndexError
from tarshards.parallel.forks import cached_property
from tarshards.samples.fields import find_field
from tarshards.samples.keys import Split, with_remedy
from tarshards.storage.compression import HEAD, find_compression
from tarshards.storage.derived import FORMAT, INDEX
from tarshards.storage.location import MOST_READ, Location
from tarshards.storage.manifest import Shard
from tarshards.storage.ranges import LocalRanges, Ranges
from tarshards.storage.streams import is_missing
from tarshards.tar.elsewhere import Step
from tarshards.tar.read import BLOCK, padding

if TYPE_CHECKING:
    import numpy as np

    from tarshards.samples.resync.walking import Gap
    from tarshards.storage.opening import PlainFile

VERSION, WITH_FAULTS = 1, 2  # earlier readers refuse the second, for shards with faults, links or sparse members
PAGES = b"\xa5pages"
CHECKSUM = b"\xa8checksum\xce"  # the last key of the map; the 4-byte value covers everything before itself
AT = b"\xa2at\x92\xcf"  # the key before: 8 bytes have the offset of the value of "pages", then 0xce and 4 its CRC-32
TAIL = len(AT) + 8 + 5 + len(CHECKSUM) + 4  # bytes from there to the end
PAGE = 1 << 12  # bytes of an index with a checksum of their own
PAGED = 1 << 16  # bytes of an index from which on it has such checksums; a shorter one is read at once
NEEDED = {"format", "version", "shard", "keys", "fields", "sample", "field", "offset", "size"}
UNREAD = {"keys", "sample", "field", "offset", "size", "crc32", "pages", "at", "checksum"}  # loading does not read them
FORMATS = {"sample": "<I", "field": "<H", "offset": "<Q", "size": "<Q", "crc32": "<I"}  # the type of each array
EACH = 1 << 10  # approximate bytes of an index besides its sidecar
TOO_LONG = f"more than {MOST_READ:,} bytes, the limit for such a file"
MISSING = "no index found; create one with `tarindex`"
DAMAGED = "damaged: truncated, or wrong checksum"
REBUILD = "rebuild it with `tarindex`"
DIGEST = 16  # bytes of a digest
Hold = Callable[[Callable[[Callable[[int], Any]], Any]], bytes | memoryview]  # see `SharedBytes.hold`
OTHER = "other keys or members than the manifest describes; write both again with `tarindex`"
NO_DIGEST = "written by an earlier version, without a digest; renew it with `tarindex`"


def _array(name: str) -> cached_property[np.ndarray]:
    """Return a property for an array of an index as a numpy array; numpy is imported only at its use."""

    def view(index: Index) -> np.ndarray:
        import numpy as np

        return np.frombuffer(index.arrays[name], FORMATS[name])

    return cached_property(view)


def _reading(read: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of an index raise ShardIndexError where the sidecar has become shorter, or a page is damaged."""

    @wraps(read)
    def reading(index: Index, *args: Any) -> Any:
        try:
            return read(index, *args)
        except OSError as error:
            raise index.unreadable(error) from error

    return reading


class Fault(NamedTuple):
    """Why members do not form a sample; *offset*, of a header, and *field* are those of the first error."""

    reason: str
    offset: int
    field: str | None


class Index:
    """The offsets and sizes of all members of one shard.

    The arrays have one entry per member, in the order of the shard: ``sample`` is the number of its sample, from 0;
    ``field`` a position in ``fields``; ``offset`` and ``size`` those of its data, in bytes; ``crc32`` the checksum of
    its data, or None if the index has no checksums.

    ``fingerprint`` is the CRC-32 of two blocks: the 512 bytes before the data of the first member and those before the
    data of the last. These are the members' own headers; extended headers (pax, GNU long names) come before them and
    are not covered. It is 0 for a shard without members.

    ``archives`` is the number of archives that the shard consists of: more than one if it is concatenated.

    ``split`` is the rule by which the names of members were split into keys and fields, "first" or "last".

    ``end`` is the offset of the zeros that end the last archive; None in indexes without it.

    ``faults`` are the samples at fault, by number: those with a duplicate field, those whose key occurred before, and
    those with a member that has no content. They are numbered and counted like others, but cannot be read.

    ``elsewhere`` are the links and sparse members, by number, with the steps to their content. For a link ``size`` is
    0, for a sparse member that of the pieces which are stored at ``offset``.

    ``gaps`` are the bytes of a damaged shard that are not valid members. Only an index made past damage has them; files
    do not.

    ``digest`` identifies keys and members; files derived from the shard are compared by it. It is that of the sidecar
    that was last written or read; None if an earlier version wrote it.
    """

    digest: bytes | None = None
    faults: Mapping[int, Fault] = MappingProxyType({})  # one object for all shards without any
    elsewhere: Mapping[int, list[Step]] = MappingProxyType({})
    gaps: Sequence[Gap] = ()
    _sidecar: Any = None  # the sidecar if it was loaded: its bytes, a memoryview of shared memory, or a mapping
    sample: Final = _array("sample")
    field: Final = _array("field")
    offset: Final = _array("offset")
    size: Final = _array("size")
    split: str = "first"
    url: str | None = None  # the sidecar's, if it was read, for messages
    _is_whole = True  # whether all of the sidecar was checked; else each of its pages is, at the first use

    def __init__(
        self,
        shard_size: int,
        fingerprint: int,
        keys: list[str],
        fields: list[str],
        arrays: dict[str, bytes],
        archives: int = 1,
        end: int | None = None,
    ):
        self.shard_size = shard_size
        self.fingerprint = fingerprint
        self.keys = keys
        self.fields = fields
        self.arrays = arrays
        self.archives = archives
        self.end = end

    def __len__(self) -> int:
        return len(self.table) if self._sidecar is not None else len(self.keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.pack() == other.pack()

    __hash__: ClassVar[None]  # type: ignore[assignment]

    @cached_property
    def table(self) -> kernels.headers.MemberTable:
        """The members in the sidecar, which is read as it is."""
        packed = self.pack()
        return self._table(packed, kernels.headers.layout(packed))

    def _table(
        self, packed: Any, ranges: dict[str, Any], fields: Any = None, *pages: Any
    ) -> kernels.headers.MemberTable:
        if fields is None:
            fields = tuple(field.encode("utf-8", "surrogateescape") for field in self.fields)
        end = -1 if self.end is None else self.end
        return kernels.headers.MemberTable(packed, ranges, fields, self.shard_size, end, *pages)

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the samples; a copy if the index was loaded, for callers that need all keys."""
        return list(self._copied("keys")["keys"])

    @cached_property
    def arrays(self) -> dict[str, bytes]:
        """The arrays in the form of the file; copies if the index was loaded, for callers that need all of them."""
        return self._copied(*FORMATS)

    def _copied(self, *names: str) -> dict[str, Any]:
        """Return copies of some values of the map in the sidecar."""
        import msgpack

        if not self._is_whole:
            self._sidecar.scatter(False)
        packed = _in_memory(self._sidecar)
        if not self._is_whole:
            self.unpack(packed, url=self.url)
            self._is_whole = True
        ranges = kernels.headers.layout(packed)
        found = {name: bytes(packed[slice(*ranges[name])]) for name in names if name in ranges}
        if "keys" in found:
            found["keys"] = msgpack.unpackb(found["keys"], unicode_errors="surrogateescape")
        return found

    @property
    def nbytes(self) -> int:
        """The approximate bytes of memory that it takes, without a mapped sidecar."""
        return EACH + (len(self._sidecar) if isinstance(self._sidecar, (bytes, bytearray)) else 0)

    @property
    def members(self) -> int:
        """The number of members."""
        return self.table.members

    def unreadable(self, error: OSError) -> ShardIndexError:
        """Return the error of an index if a part of it that is needed cannot be read."""
        return ShardIndexError(f"{error.strerror or error}; {REBUILD}", url=self.url)

    @_reading
    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        return self.table.key(sample) if self._sidecar is not None else self.keys[sample]

    @_reading
    def span(self, sample: int) -> tuple[int, int]:
        """Return the number of a sample's first member, and the one after its last."""
        return self.table.span(sample)

    @_reading
    def entry(self, member: int) -> tuple[int, int, int, int]:
        """Return the sample, field, offset and size of a member."""
        return self.table.entry(member)

    def data_range(self, member: int) -> tuple[int, int]:
        """Return the offset and the size of a member's data in the shard."""
        _, _, offset, size = self.entry(member)
        return offset, size

    def named(self, member: int) -> tuple[str, str]:
        """Return the key and the field of a member."""
        sample, field, _, _ = self.entry(member)
        return self.key(sample), self.fields[field]

    def look_up(self, sample: int) -> tuple[str, int]:
        """Return the key of a sample and the offset of its first member's data; read all that is needed to read it."""
        begin, end = self.span(sample)
        offsets = [self.data_range(member)[0] for member in range(max(0, begin - 1), end)]  # and the header before
        return self.key(sample), offsets[min(begin, 1)]

    @_reading
    def firsts(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of the first member of each sample; after the last sample, the number of members."""
        import numpy as np

        samples = np.ascontiguousarray(samples, np.int64)
        out = np.empty(len(samples), np.int64)
        self.table.read_firsts(samples, out)
        return out

    @_reading
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
        return SampleError(with_remedy(reason), url=url, offset=offset, key=self.key(sample), field=field)

    def content_size(self, member: int) -> int:
        """Return the bytes of a member's content."""
        steps = self.elsewhere.get(member)
        return steps[-1].size if steps else self.data_range(member)[1]

    def not_plain(self, member: int, url: str) -> ShardIndexError:
        """Return the error for a link or sparse member of the shard *url*, whose bytes a caller needs in the shard."""
        reason = "a link or a sparse member, whose content is not after its header; copy the shard with `tarcat -o`"
        key, field = self.named(member)
        return ShardIndexError(reason, url=url, offset=self.data_range(member)[0] - BLOCK, key=key, field=field)

    def fields_of(self, sample: int) -> list[str]:
        """Return the fields of a sample."""
        return [self.fields[self.entry(member)[1]] for member in range(*self.span(sample))]

    def members_of(self, field: str) -> np.ndarray:
        """Return the numbers of the members that are of *field*, in the order of the shard; not of samples at fault."""
        import numpy as np

        name = find_field(self.fields, [field])
        members = np.flatnonzero(self.field == (-1 if name is None else self.fields.index(name)))
        return members[~np.isin(self.sample[members], list(self.faults))] if self.faults else members

    def known_digest(self, url: str | Location) -> bytes:
        """Return the digest of the shard *url*; raise ShardIndexError if its sidecar has none."""
        if self.digest is None:
            raise ShardIndexError(NO_DIGEST, url=index_location(url).name)
        return self.digest

    def shard(self, shard: Shard | str, *, indexed: bool = True) -> Shard:
        """Return *shard* as a manifest has it; *indexed* says that this index is beside it."""
        return Shard.of(shard)._replace(
            samples=len(self),
            size=self.shard_size,
            concatenated=self.archives > 1,
            indexed=indexed,
            sha256=None,
            digest=None if self.digest is None else self.digest.hex(),
        )

    def pack(self) -> bytes:
        """Return the bytes of the sidecar file."""
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
        parts = [_pack(head), members, _pack(checksums), marked]
        count = len(head) + len(described) + len(checksums) + len(marks)
        if sum(map(len, parts)) > PAGED:
            parts.append(self._pack_pages(b"".join(parts), count))
            count += 2
        parts = [_map_header(count + 1), *parts, CHECKSUM]
        checksum = 0
        for part in parts:
            checksum = crc32(part, checksum)
        return b"".join([*parts, checksum.to_bytes(4, "big")])

    def _pack_pages(self, entries: bytes, count: int) -> bytes:
        """Return the entries "pages" and "at" after *count* other *entries*."""
        import msgpack

        ranges = kernels.headers.layout(_map_header(count) + entries)
        each, marks = self._table(_map_header(count) + entries, ranges).pages
        covered = memoryview(_map_header(count + 3) + entries + PAGES)
        sums = b"".join(crc32(covered[i : i + PAGE]).to_bytes(4, "little") for i in range(0, len(covered), PAGE))
        value = msgpack.packb({"entries": ranges, "each": each, "marks": marks, "crc32": sums})
        return PAGES + value + AT + len(covered).to_bytes(8, "big") + b"\xce" + crc32(value).to_bytes(4, "big")

    @classmethod
    def unpack(cls, packed: Any, *, url: str | None = None, pages: Pages | None = None) -> Index:
        """Return the index in *packed*, bytes; raise ShardIndexError, which names *url*, if there is none.

        With *pages* it is a mapping, whose pages are checked when they are first used.
        """
        import msgpack

        if pages is None:
            covered = memoryview(packed)[:-4]
            if covered[-len(CHECKSUM) :] != CHECKSUM or crc32(covered) != int.from_bytes(packed[-4:], "big"):
                raise ShardIndexError(what_is_wrong(packed), url=url)
        try:
            ranges = kernels.headers.layout(packed) if pages is None else pages.entries
            if missing := NEEDED - ranges.keys():
                raise ValueError(f"no {min(missing)}")
            read = pages.read if pages is not None else lambda begin, end: bytes(packed[begin:end])
            found = {name: read(*ranges[name]) for name in ranges if name not in UNREAD}
            fields, encoded = _read_fields(found.pop("fields"))
            small = {name: msgpack.unpackb(value, unicode_errors="surrogateescape") for name, value in found.items()}
            if small["format"] != FORMAT or small["version"] not in (VERSION, WITH_FAULTS):
                raise ShardIndexError(what_is_wrong(_in_memory(packed)), url=url)
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
                index.table = index._table(packed, ranges, encoded, *([] if pages is None else [pages.of_keys()]))
                problem = _wrong_mark(index)
            if problem is None and pages is not None:
                index._is_whole = False
                index.rest_on(packed)
        except ShardIndexError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if problem:
            raise ShardIndexError(f"damaged: {problem}", url=url)
        return index

    def rest_on(self, mapping: Any) -> None:
        """Use a *mapping* of the sidecar, or a ``MappedBlock``, instead of the bytes that were read."""
        self.table.rest_on(getattr(mapping, "buffer", mapping))
        self._sidecar = mapping

    @classmethod
    def load(
        cls,
        shard_url: str | Location,
        *,
        check: bool = True,
        whole: bool = True,
        copied: int = PAGESIZE,
        hold: Hold | None = None,
    ) -> Index:
        """Read the sidecar of *shard_url* and, with *check*, compare it with the shard.

        *hold* returns its bytes from shared memory, or reads them by the function that it gets. Unless *whole* is set,
        a local sidecar is read, and checked, where it is used, if it has checksums of its pages.

        Raises ShardIndexError with the reason MISSING if there is no sidecar, and with other reasons where it is
        damaged, stale, or of an unknown version. A local sidecar of more than *copied* bytes is mapped.
        """
        location = index_location(shard_url)
        packed: Any
        held: Any
        pages = None
        try:
            if kernels.IS_COMPILED and location.path is not None:
                own = LocalRanges(location.path, location.name, copied)
                if own.size > MOST_READ:
                    raise OpenError(TOO_LONG, url=location.name)
                pages = None if whole else Pages.of(own)
                packed = own.read(0, own.size) if pages is None else own.mapping
                held = packed if own.mapping.unmapped else own.mapping
            elif hold is None:
                packed = _in_memory(held := location.hold(MOST_READ))
            else:
                packed = _in_memory(held := hold(lambda allocate: location.hold(MOST_READ, allocate)))
        except OpenError as error:
            if is_missing(error):
                raise ShardIndexError(MISSING, url=location.name) from error
            raise
        index = cls.unpack(packed, url=location.name, pages=pages)
        if kernels.IS_COMPILED and packed is not held and len(packed) > copied:
            index.rest_on(held)
        if check:
            with Location.of(shard_url).ranges() as ranges:
                index.check(ranges)
        return index

    def difference(self, other: Index) -> str | None:
        """Describe the first difference between the members and those of *other*, an index of the shard as it is now.

        None means that there is none. Checksums are compared if both have them; fingerprints are not compared.
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

    def save(self, shard_url: str | Location) -> None:
        """Write the sidecar of *shard_url*, whole or not at all; raise ShardIndexError if the shard is damaged."""
        location = index_location(shard_url)
        if self.gaps:
            raise ShardIndexError(
                "the index of a damaged shard is not saved; repair it with `tarcheck --repair`", url=location.name
            )
        location.make_folder()
        with location.open("wb") as stream:
            stream.write(self.pack())

    def check_split(self, split: str | None) -> None:
        """Raise ShardIndexError unless names were split at the *split* dot (None: any)."""
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
        """The offset of the block that is zeros unless something was appended to the shard; None if not known."""
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


class Pages:
    """The checksums of the pages of a mapped sidecar, whose *entries* are read, and checked, where they are used.

    The other arguments are what the sidecar says: *each*, the number of members of every sample, 0 if it varies;
    *marks*, the offsets of each 64th key from the first; *crc32*, the checksums of the pages, which *end* there.
    """

    def __init__(
        self, sidecar: LocalRanges, end: int, entries: dict[str, Any], each: int, marks: bytes, crc32: bytes
    ) -> None:
        self.entries: dict[str, tuple[int, int]] = {
            name: (begin, stop) for name, (begin, stop) in entries.items() if 0 <= begin <= stop <= end
        }
        self._sidecar, self._end, self._each, self._marks, self._sums = sidecar, end, each, marks, crc32
        self._first, self._held = 0, b""  # the pages that were read last

    @classmethod
    def of(cls, sidecar: LocalRanges) -> Pages | None:
        """Return the pages of a sidecar; None if it has none or they are damaged, so that it is to be checked whole.

        The system then reads no others with the pages that are used.
        """
        import msgpack

        value_end = sidecar.size - TAIL
        if value_end < PAGED or sidecar.mapping.unmapped:
            return None
        sidecar.scatter(True)
        tail = sidecar.read(value_end, TAIL)
        end, known = (int.from_bytes(tail[at : at + size], "big") for at, size in ((len(AT), 8), (len(AT) + 9, 4)))
        if tail.startswith(AT) and end <= value_end and crc32(value := sidecar.read(end, value_end - end)) == known:
            with suppress(ValueError, TypeError):
                return cls(sidecar, end, **msgpack.unpackb(value))
        sidecar.scatter(False)
        return None

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from *begin* to *end*; raise ShardIndexError if their pages have other checksums."""
        if not self._first <= begin <= end <= self._first + len(self._held):
            first = begin - begin % PAGE
            held = self._sidecar.read(first, min(end + -end % PAGE, self._end) - first)
            for at in range(0, len(held), PAGE):
                known = self._sums[(first + at) // PAGE * 4 :][:4]
                if crc32(held[at : at + PAGE]).to_bytes(4, "little") != known:
                    raise ShardIndexError(DAMAGED, url=self._sidecar.name)
            self._first, self._held = first, held
        return self._held[begin - self._first : end - self._first]

    def of_keys(self) -> tuple[int, int, int, int, bytes, bytes]:
        """Return what ``MemberTable`` takes: the number of samples, where the first key begins, and the rest."""
        import msgpack

        begin, end = self.entries["keys"]
        unpacker = msgpack.Unpacker()
        unpacker.feed(self.read(begin, min(begin + 5, end)))
        samples = unpacker.read_array_header()
        return samples, begin + unpacker.tell(), self._each, self._end, self._marks, self._sums


def _map_header(entries: int) -> bytes:
    """Return the beginning of the map, one byte."""
    return bytes([0x80 | entries])


def _pack(entries: dict[str, Any]) -> bytes:
    """Return the bytes of entries of the map."""
    import msgpack

    packer = msgpack.Packer(unicode_errors="surrogateescape", autoreset=False)
    for name, value in entries.items():
        packer.pack(name)
        packer.pack(value)
    packed: bytes = packer.bytes()
    return packed


def fingerprint(ranges: Ranges | PlainFile, offset: bytes) -> int:
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


def _in_memory(sidecar: Any) -> Any:
    """Return the bytes of a sidecar; those of a file, which may shrink at any time, are copied."""
    return sidecar if isinstance(sidecar, (bytes, bytearray, memoryview)) else sidecar.read(0, len(sidecar))


def what_is_wrong(packed: bytes | memoryview) -> str:
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
        return "an invalid digest"
    if index.split not in get_args(Split):
        return "an unknown rule for names"
    if type(index.archives) is not int or index.archives < 1:
        return "an invalid number of archives"
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
