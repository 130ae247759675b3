"""A cache of blocks of remote files on a local disk, shared by all processes of a host: `Remote(cache_dir=)`.

A block is a range of one version of a remote file. One thread of one process downloads it; other threads and processes
that need it wait. If the downloader dies, one of them takes over. A process that has waited for the timeout of requests
also downloads the block, since the downloader may be stopped. The folder contains::

    ab/cdef....block   a pinned block, which stays; its name is a hash of its key, in 256 subfolders
    spool/abcdef.block a spooled block, removed after its last use, or with the process that stored it
    parts/abcdef       a block that is being downloaded, locked (flock) by the thread that downloads it
    owners/PID-RANDOM  an empty file for each process that uses the folder, locked while the process lives
    tarshards-cache    the counts: bytes on the disk, in all and for each process; locked while they change

The file of a block is a header, zeros up to a multiple of 64 bytes, and the data. The header is little-endian: MAGIC,
the CRC-32 of the data (4 bytes), the length of header and zeros (4), the length of the key (4), the name of the owner
if the block is spooled (28, padded with zeros), and the key. The key is a JSON list: URL, validator, size of the file,
offset, length, and a digest of whatever else distinguishes files of a URL: the query without its signature, the
endpoint of a store, and a login. The digest of an index, which is one block, covers its first KiB too. The URL has no
query and no userinfo, so that neither names nor files hold credentials.

**Which blocks stay.** The first blocks are pinned until the budget is full; they are never replaced. Every epoch reads
each block once, in a new order, so a block that has just been read is not needed again soon. With a cache of a quarter
of the data, LRU downloads 0.98 of the blocks again in every epoch, this policy 0.78, and no policy less than 0.75. A
shuffled epoch reads from several blocks in turn; `reserve` keeps space for this working set, and spooled blocks use it.
In a simulation with a pool of 10 % of the data and a cache of 25 %, an epoch downloads every block 0.87 times with this
space, and 6.7 times without.

**After a crash.** Nothing is flushed to the disk: an incomplete file fails its CRC, and its block is downloaded again.
The counts are marked while they change; a process that finds the mark recounts the files. The next process that
opens the folder removes the parts, spooled blocks and counts of dead processes. Files are only deleted if their name
and header are as above.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import islice
from time import monotonic, sleep, time_ns
from typing import Any, NamedTuple
from zlib import crc32

from tarshards.errors import OpenError, visible
from tarshards.parallel.forks import PerProcess, renew_in_children
from tarshards.storage import traffic
from tarshards.storage.locks import PAUSE, lock, pauses, release, sweep
from tarshards.storage.ranges import Mapping
from tarshards.storage.redaction import without_userinfo
from tarshards.storage.remote import LEAST_CACHE, Remote
from tarshards.storage.streams import check_written, failure, words
from tarshards.storage.wire import Call, Steps, load_soon, loading, loading_threads, pausing

log: logging.Logger = logging.getLogger("tarshards")

VERSION = 2  # the version of the keys
MAGIC = b"tarshards block1"
HEADER = struct.Struct("<16sIII28s")
ALIGNED = 64  # the data begins at a multiple of this many bytes, which is faster to copy
BATCH = 256  # files that a purge removes under one lock; meanwhile, other processes cannot store blocks
PAGE = 4096  # bytes: a file takes a multiple of them on the disk
SHARE = 0.9  # the fraction of the free space to use if no budget is given
TICK = 20_000_000  # nanoseconds: two writes further apart than this give a file different times
SHORT_TIMEOUT = 0.1  # seconds to wait for a lock after the wait for another lock timed out ...
SHORT_PERIOD = 10  # ... for this multiple of the timeout
MOST_VERIFIED = 1 << 18  # blocks known to be whole, at 70 bytes of memory each; after more, all are checked again

BLOCK_NAME = re.compile(r"[0-9a-f]{30}\.block")
SPOOL_NAME = re.compile(r"[0-9a-f]{32}\.block")
PART_NAME = re.compile(r"[0-9a-f]{32}")
OWNER_NAME = re.compile(r"\d+-[0-9a-f]{8}")
SUBFOLDERS = [f"{number:02x}" for number in range(256)]
COUNTS = "tarshards-cache"
SPOOL, PARTS, OWNERS = "spool", "parts", "owners"
KINDS = ("pinned", "spool")  # blocks that stay, and blocks that are removed after their last use
KNOWN = {COUNTS, SPOOL, PARTS, OWNERS, *SUBFOLDERS, "lost+found"}


class Block(NamedTuple):
    """The name of a block: *length* bytes at *offset* of a file of *size* bytes.

    *url* has no query and no userinfo; *validator* is the ETag of the file's version, or else its Last-Modified.
    *digest* distinguishes the files of one *url*; it is ``Address.digest``.
    """

    url: str
    validator: str
    size: int
    offset: int
    length: int
    digest: str = ""

    @property
    def key(self) -> bytes:
        return json.dumps(list(self), separators=(",", ":")).encode()


class MappedBlock:
    """A block on the disk, whose data begins at *start* of *mapping*; it *stays* in the cache, or is spooled.

    Bytes copied from it are valid if the mapping ``is_current`` after the copy.
    """

    def __init__(self, path: str, start: int, stays: bool):
        self.mapping = Mapping(path)
        self.start = start
        self.stays = stays

    def __len__(self) -> int:
        return len(self.mapping) - self.start

    def read(self, offset: int, size: int) -> bytes:
        """Return *size* bytes at *offset*."""
        return self.mapping.read(self.start + offset, size)

    @property
    def buffer(self) -> memoryview:
        """All the bytes, for kernels only."""
        return memoryview(self.mapping)[self.start :]  # type: ignore[arg-type]


def name_of(key: bytes) -> str:
    """Return the name of the block with this key, 32 hexadecimal digits."""
    return blake2b(key, digest_size=16).hexdigest()


def start_of(key: bytes) -> int:
    """Return the offset of the data in the file of the block with this key."""
    return -(-(HEADER.size + len(key)) // ALIGNED) * ALIGNED


def header_of(key: bytes, checksum: int, owner: str) -> bytes:
    """Return the bytes before the data in the file of a block."""
    length = start_of(key)
    header = HEADER.pack(MAGIC, checksum, length, len(key), owner.encode()) + key
    return header.ljust(length, b"\0")


def taken(size: int) -> int:
    """Return the bytes that a file of *size* bytes takes on the disk."""
    return -(-size // PAGE) * PAGE


class Stored(NamedTuple):
    """The file of a block; *block* is None if its header is damaged or of another version."""

    path: str
    kind: str  # "pinned" or "spool"
    status: os.stat_result
    block: Block | None
    owner: str

    @property
    def bytes(self) -> int:
        """Its size on the disk."""
        return taken(self.status.st_size)


FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # of files that are locked


class CacheFolder:
    """The files of a cache and the counts of their bytes; *foreign* are files in it that do not belong to a cache."""

    def __init__(self, path: str, timeout: float = 30.0):
        self.path = path
        self.timeout = timeout
        self.foreign: set[str] = set()
        self._is_short_until = 0.0  # until this monotonic time, a wait for a lock is limited to SHORT_TIMEOUT

    @classmethod
    def existing(cls, path: str) -> CacheFolder:
        """Return the cache in the folder *path*; raise OpenError if there is none."""
        folder = cls(path)
        folder.read_counts()
        return folder

    def lock(self, path: str) -> int:
        """Open and lock a file, and create it if it is missing; raise TimeoutError as ``patience`` says."""
        check = self.patience()

        def wait() -> None:
            check()
            sleep(PAUSE)

        return lock(path, FLAGS, wait)

    def patience(self) -> Callable[[], None]:
        """Return a function to call before each further attempt to lock a file.

        It raises TimeoutError if another process, which may be stopped, holds the lock for longer than *timeout*. For a
        while after that, waits for further locks are short.
        """
        begun = monotonic()
        is_short = begun < self._is_short_until
        end = begun + (min(SHORT_TIMEOUT, self.timeout) if is_short else self.timeout)

        def check() -> None:
            if monotonic() < end:
                return
            if not is_short:
                self._is_short_until = monotonic() + SHORT_PERIOD * self.timeout
            reason = f"locked for {self.timeout:g} s by another process, which may be stopped"
            raise TimeoutError(errno.ETIMEDOUT, reason, self.path)

        return check

    def block_path(self, name: str, kind: str) -> str:
        """Return the path of the file of a block, whether it exists or not."""
        return f"{self.path}/{name[:2]}/{name[2:]}.block" if kind == "pinned" else f"{self.path}/{SPOOL}/{name}.block"

    # The counts: the bytes of pinned and of spooled blocks, parts included, and for each process the bytes of its parts
    # and those it has reserved. The file begins with a space, and with a "!" while it is being changed.

    BEGIN = b'{"tarshards cache":'

    def read_counts(self) -> dict[str, Any]:
        """Return the counts without locking them; raise OpenError if there are none."""
        path = f"{self.path}/{COUNTS}"
        try:
            with open(path, "rb") as file:
                raw = file.read()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise OpenError("no cache in this folder", url=self.path, errno=errno.ENOENT) from error
        except OSError as error:
            raise failure(error, path) from error
        return self._parsed(raw)[0]

    def _parsed(self, raw: bytes) -> tuple[dict[str, Any], bool]:
        """Return the counts, and whether they are complete."""
        raw = raw if raw[1:].strip(b"\0") else raw[:1]  # a power loss may leave zeros, even after the mark
        if raw[1 : 1 + len(self.BEGIN)] != self.BEGIN[: max(0, len(raw) - 1)]:
            raise OpenError("not a file of a cache; use another folder", url=f"{self.path}/{COUNTS}")
        try:
            return json.loads(raw[1:]), raw[:1] == b" "
        except ValueError:
            empty = {"pinned": 0, "spool": 0, "budget": 0, "boot": "", "owners": {}}
            return {"tarshards cache": VERSION, **empty}, False

    @contextmanager
    def counts(self) -> Iterator[dict[str, Any]]:
        """Lock the counts for a with-block that changes them and the files.

        If the with-block does not complete, the next one first recounts the files.
        """
        descriptor = self.lock(f"{self.path}/{COUNTS}")
        try:
            raw = os.pread(descriptor, 1 << 24, 0)
            counts, is_complete = self._parsed(raw)
            os.pwrite(descriptor, b"!", 0)
            if not is_complete:
                self.count(counts)
            if counts["tarshards cache"] != VERSION:
                self._remove_earlier(counts)
            yield counts
            text = json.dumps(counts, separators=(",", ":")).encode()
            os.pwrite(descriptor, b" " + text.ljust(len(raw) - 1), 0)
        finally:
            release(descriptor)

    def count(self, counts: dict[str, Any]) -> None:
        """Recount the bytes of blocks from their files; bytes of parts are taken from the processes' counts."""
        for kind in KINDS:
            files = sum(taken(entry.stat(follow_symlinks=False).st_size) for entry, found in self._files(kind))
            counts[kind] = files + sum(owner[kind] for owner in counts["owners"].values())

    def _remove_earlier(self, counts: dict[str, Any]) -> None:
        """Remove blocks of an earlier version, whose keys have a different form."""
        for stored in self.entries():
            if stored.block is None:
                self.unlink(counts, stored.path, stored.kind, stored.status)
        counts["tarshards cache"] = VERSION

    # The files.

    def _files(self, *kinds: str) -> Iterator[tuple[os.DirEntry[str], str]]:
        """Yield the files with names of blocks, and their kinds."""
        for kind in kinds:
            pattern, folders = (BLOCK_NAME, SUBFOLDERS) if kind == "pinned" else (SPOOL_NAME, [SPOOL])
            for folder in folders:
                with suppress(FileNotFoundError, NotADirectoryError), os.scandir(f"{self.path}/{folder}") as entries:
                    for entry in entries:
                        if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                            yield entry, kind
                        else:
                            self.foreign.add(entry.path)

    def entries(self, *kinds: str) -> Iterator[Stored]:
        """Yield the blocks in the folder, of both kinds by default, as their headers describe them."""
        for entry, kind in self._files(*(kinds or KINDS)):
            try:
                stored = self._entry(entry.path, kind)
            except FileNotFoundError:
                continue
            if stored is None:
                self.foreign.add(entry.path)
            else:
                yield stored
        with os.scandir(self.path) as entries:
            self.foreign |= {entry.path for entry in entries if entry.name not in KNOWN}

    def _entry(self, path: str, kind: str) -> Stored | None:
        """Return the block in a file; None for a file that does not belong to a cache."""
        with open(path, "rb", opener=_read_only) as file:
            raw = file.read(PAGE)
            status = os.fstat(file.fileno())
            magic, _, start, length, owner = HEADER.unpack(raw[: HEADER.size].ljust(HEADER.size, b"\0"))
            if len(raw) < start <= status.st_size:
                raw += file.read(start - len(raw))
        key = raw[HEADER.size : HEADER.size + length]
        is_named = path[len(self.path) :].replace("/", "").endswith(f"{name_of(key)}.block")
        # A damaged file of ours may have lost its magic, or everything after it.
        if not is_named and magic != MAGIC and not MAGIC.startswith(raw):
            return None
        parts = json.loads(key) if is_named else []
        block = Block(*parts) if len(parts) == len(Block._fields) else None
        return Stored(path, kind, status, block, owner.rstrip(b"\0").decode("ascii", "replace"))

    def purge(self, pattern: str | None = None) -> tuple[int, int]:
        """Remove the blocks of URLs that match the glob *pattern* (None: all); return their number and bytes."""
        removed = size = 0
        with self.counts() as counts:
            self.sweep(counts)
        wanted = (
            each for each in self.entries() if pattern is None or (each.block and fnmatchcase(each.block.url, pattern))
        )
        while batch := list(islice(wanted, BATCH)):
            with self.counts() as counts:
                for stored in batch:
                    if self.unlink(counts, stored.path, stored.kind, stored.status):
                        removed, size = removed + 1, size + stored.bytes
        return removed, size

    def verify(self) -> Iterator[tuple[Stored, bool]]:
        """Yield each block and whether it is whole; remove those that are not, and recount at the end."""
        with self.counts():  # removes the blocks of an earlier version
            pass
        for stored in self.entries():
            is_whole = self._is_whole(stored)
            if not is_whole:
                with self.counts() as counts:
                    self.unlink(counts, stored.path, stored.kind, stored.status)
            yield stored, is_whole
        with self.counts() as counts:
            self.count(counts)

    def _is_whole(self, stored: Stored) -> bool:
        """Return whether a file has the right header and checksum; True if it is gone."""
        if stored.block is None:
            return False
        try:
            with open(stored.path, "rb", opener=_read_only) as file:
                raw = file.read()
        except FileNotFoundError:
            return True
        _, checksum, *_ = HEADER.unpack_from(raw.ljust(HEADER.size, b"\0"))
        header = header_of(stored.block.key, checksum, stored.owner)
        data = memoryview(raw)[len(header) :]
        return raw.startswith(header) and len(data) == stored.block.length and crc32(data) == checksum

    def unlink(
        self, counts: dict[str, Any], path: str, kind: str, status: os.stat_result, size: int | None = None
    ) -> bool:
        """Remove a file if it still has this *status*; return whether it was removed.

        *size* is the size that was counted, if the file has been damaged since.
        """
        try:
            if _state(os.lstat(path)) != _state(status):
                return False
            os.unlink(path)
        except FileNotFoundError:
            return False
        counts[kind] = max(0, counts[kind] - taken(status.st_size if size is None else size))
        return True

    def sweep(self, counts: dict[str, Any]) -> None:
        """Remove the parts, spooled blocks and counts of dead processes."""
        owners = counts["owners"]
        dead = [name for name in {*owners, *self._names(OWNERS, OWNER_NAME)} if not self._is_alive(name)]
        for name in dead:
            parts = owners.pop(name, {})
            for kind in KINDS:
                counts[kind] = max(0, counts[kind] - parts.get(kind, 0))
        for name in self._names(PARTS, PART_NAME):
            self._sweep(f"{self.path}/{PARTS}/{name}")
        for stored in self.entries("spool") if dead else ():
            if stored.owner not in owners:
                self.unlink(counts, stored.path, stored.kind, stored.status)
        if not owners and (boot := _boot()) != counts["boot"]:  # a power loss may have emptied files
            self.count(counts)
            counts["boot"] = boot

    def _names(self, folder: str, pattern: re.Pattern[str]) -> list[str]:
        try:
            names = os.listdir(f"{self.path}/{folder}")
        except FileNotFoundError:
            return []
        self.foreign |= {f"{self.path}/{folder}/{name}" for name in names if not pattern.fullmatch(name)}
        return [name for name in names if pattern.fullmatch(name)]

    def _is_alive(self, name: str) -> bool:
        return not self._sweep(f"{self.path}/{OWNERS}/{name}")

    def _sweep(self, path: str) -> bool:
        """Remove the file at *path* if it belongs to a cache; return False if a process holds its lock."""

        def is_ours(descriptor: int) -> bool:
            has_magic = MAGIC.startswith(os.pread(descriptor, len(MAGIC), 0))  # or an empty file
            if not has_magic:
                self.foreign.add(path)
            return has_magic

        return sweep(path, is_ours)

    def trim(self, counts: dict[str, Any], most: int) -> None:
        """Remove pinned blocks, the least recently used first, until they take at most *most* bytes."""
        if counts["pinned"] <= most:
            return
        found = [(entry.stat(follow_symlinks=False), entry.path) for entry, _ in self._files("pinned")]
        for status, path in sorted(found, key=lambda each: each[0].st_atime_ns):
            with suppress(FileNotFoundError):
                if self._entry(path, "pinned") is not None:
                    self.unlink(counts, path, "pinned", status)
            if counts["pinned"] <= most:
                return


def _read_only(path: str, flags: int) -> int:
    """Open a file without changing its access time, if that is allowed."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # the file belongs to another user
        return os.open(path, flags)


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _state(status: os.stat_result) -> tuple[int, int, int]:
    """Return a value that changes when a file is replaced or written to.

    It includes the size, because truncating a file changes the size before the time.
    """
    return status.st_ino, status.st_mtime_ns, status.st_size


def _version(name: str, status: os.stat_result) -> int:
    return hash((name, _state(status)))


class _Flight:
    """A download of this process, for which others wait; *data* stays None if it fails."""

    def __init__(self) -> None:
        self.done: Future[None] = Future()
        self.data: memoryview | None = None


class _Download(NamedTuple):
    """A block that is being downloaded: its *file*, which is locked, and the *size* that is counted for it."""

    file: int
    path: str
    name: str
    key: bytes
    size: int
    kind: str


class BlockCache:
    """A cache folder, as this process uses it; `of` returns one object for all threads.

    *refused* counts the bytes that this process has fetched but not stored, because of the budget.
    """

    def __init__(self, path: str, budget: int | None, timeout: float = 30.0):
        """Open the folder *path*, and create it if it is missing; *budget* None means nine tenths of the free space.

        *timeout* is the time to wait for another process, in seconds.

        Raises OpenError if the folder cannot be created. If nothing can be stored in it, because it is read-only or
        full or has no locks, a warning says so, and only the blocks in it are used.
        """
        self.folder: CacheFolder = CacheFolder(path, timeout)
        self._given_budget = budget
        self.budget: int = budget or 0
        self.renew()
        renew_in_children(self)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise failure(error, path) from error
        self._is_storing()

    @classmethod
    def of(cls, remote: Remote) -> BlockCache | None:
        """Return the cache in ``remote.cache_dir``, if any: a process has one object for each folder and budget."""
        if remote.cache_dir is None:
            return None
        key = os.path.realpath(remote.cache_dir), remote.cache_bytes, remote.timeout
        with _registering():
            if key not in _caches:
                _caches[key] = cls(*key)
            return _caches[key]

    def fill(self, block: Block, fetch: Callable[[], Steps[Any]]) -> Steps[memoryview]:
        """Return *block* from the disk, or as the steps of *fetch* do; then store it if the budget allows.

        If a block is not stored, one of the works and processes that need it makes its *fetch*. An exception of *fetch*
        passes through, and the next work or process tries. Raises OpenError if *fetch* returns a different number of
        bytes.
        """
        if not block.validator or without_userinfo(block.url) != block.url or re.match("https?:[^?]*[?]", block.url):
            raise ValueError("a block has a validator, and a URL without query and userinfo")
        while True:
            data = yield from loading(self._read, block)
            if data is not None:
                traffic.count("cache_hits")
                return data
            with self._mutex:
                flight = self._flights.get(block)
                if is_first := flight is None:
                    flight = self._flights[block] = _Flight()
            if is_first:
                try:
                    flight.data = yield from self._download(block, fetch)
                finally:
                    with self._mutex:
                        self._flights.pop(block, None)
                    flight.done.set_result(None)
            else:
                yield flight.done
            if flight.data is not None:
                return flight.data

    def fill_mapped(self, block: Block, fetch: Callable[[], Steps[Any]]) -> Steps[memoryview | MappedBlock]:
        """Return a block as ``fill`` does, but map it if it is stored, so that it uses no memory of the process."""
        if (mapped := (yield from loading(self._map, block))) is not None:
            traffic.count("cache_hits")
            return mapped
        data = yield from self.fill(block, fetch)  # compares the checksum of a stored block, so that it can be mapped
        return (yield from loading(self._map, block)) or data

    def drop(self, block: Block) -> None:
        """Remove *block* if it is spooled: it will not be needed again soon."""
        path = self.folder.block_path(name_of(block.key), "spool")
        with suppress(OSError):
            status = os.lstat(path)
            with self.folder.counts() as counts:
                self.folder.unlink(counts, path, "spool", status)

    def capacity(self) -> int:
        """Return the budget in bytes; 0 if blocks cannot be stored."""
        return self.budget if self._is_storing() else 0

    def is_empty(self) -> bool:
        """Return whether no blocks are stored in it."""
        try:
            counts = self.folder.read_counts()
        except OpenError:
            return True
        return not counts["pinned"] + counts["spool"]

    def reserve(self, size: int) -> int:
        """Reserve up to *size* bytes for spooled blocks of this process; return the number of reserved bytes.

        The reservation replaces an earlier one of the process, and ends with the process. Pinned blocks are removed to
        make space, the least recently used first. Processes that share blocks should each reserve a part.
        """
        if not self._is_storing():
            return 0
        try:
            with self.folder.counts() as counts:
                mine = self._mine(counts)
                mine["reserved"] = 0
                free = max(0, self.budget - self._reserved(counts))
                mine["reserved"] = min(size, free)
                self.folder.trim(counts, free - mine["reserved"])
                return int(mine["reserved"])
        except OSError as error:
            self._stop(error)
            return 0

    # Opening and ending.

    def renew(self) -> None:
        """Initialize the state of this process; a forked process has none of its parent's downloading threads."""
        self._mutex = threading.Lock()
        self._flights: dict[Block, _Flight] = {}
        self._owner: tuple[str, int] | None = None  # the name and the lock's descriptor
        self._stores, self._has_warned_of_waiting = True, False
        self.refused: int = 0
        self._verified: set[int] = set()

    def _is_storing(self) -> bool:
        """Return whether blocks can be stored; the first call registers this process as an owner."""
        with self._mutex:
            if self._stores and self._owner is None:
                try:
                    self._enter()
                except OpenError:
                    raise
                except OSError as error:
                    self._stop(error)
            return self._stores and self._owner is not None

    def _enter(self) -> None:
        folder = self.folder
        for name in (SPOOL, PARTS, OWNERS):
            os.makedirs(f"{folder.path}/{name}", exist_ok=True)
        with folder.counts() as counts:
            folder.sweep(counts)
            name = f"{os.getpid()}-{os.urandom(4).hex()}"
            descriptor = lock(f"{folder.path}/{OWNERS}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                if self._given_budget is None:
                    disk = os.statvfs(folder.path)
                    held = counts["pinned"] + counts["spool"]
                    self.budget = int(SHARE * (disk.f_bavail * disk.f_frsize + held))
                    if self.budget < LEAST_CACHE:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except BaseException:
                release(descriptor)
                raise
            self._owner = name, descriptor
            self._mine(counts)
            counts["budget"] = self.budget
            folder.trim(counts, max(0, self.budget - self._reserved(counts)))
            if len(counts["owners"]) == 1:
                with os.scandir(folder.path) as entries:
                    folder.foreign |= {entry.path for entry in entries if entry.name not in KNOWN}
                if foreign := sorted(folder.foreign):
                    also = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
                    log.warning("%s%s: not of the cache in this folder, so left as it is", visible(foreign[0]), also)

    def leave(self) -> None:
        """Unregister this process, at its end."""
        self._stores = False
        if self._owner is not None:
            release(self._owner[1])
            self._owner = None
            with suppress(OSError), self.folder.counts() as counts:
                self.folder.sweep(counts)

    def _stop(self, error: OSError) -> None:
        """Warn of *error* and stop storing blocks, except after a TimeoutError, which concerns only one lock."""
        if isinstance(error, TimeoutError):
            if not self._has_warned_of_waiting:
                self._has_warned_of_waiting = True
                reason = words(error)
                log.warning("%s: %s; blocks that it holds are fetched here too", visible(self.folder.path), reason)
        elif self._stores:
            self._stores = False
            path, reason = visible(self.folder.path), words(error)
            log.warning("%s: %s; blocks that are not in this cache are read without storing them", path, reason)

    def _mine(self, counts: dict[str, Any]) -> dict[str, int]:
        assert self._owner is not None
        mine: dict[str, int] = counts["owners"].setdefault(self._owner[0], {"pinned": 0, "spool": 0, "reserved": 0})
        return mine

    def _reserved(self, counts: dict[str, Any]) -> int:
        return sum(owner["reserved"] for owner in counts["owners"].values())

    # Reading.

    def _map(self, block: Block) -> MappedBlock | None:
        """Map a stored block if this process has already compared its checksum."""
        key = block.key
        name, start = name_of(key), start_of(key)
        for kind in KINDS:
            path = self.folder.block_path(name, kind)
            with suppress(OSError):
                if _version(name, os.lstat(path)) in self._verified:
                    mapped = MappedBlock(path, start, kind == "pinned")
                    is_right = len(mapped.mapping) == start + block.length and mapped.mapping.is_current()
                    if mapped.mapping.unmapped:
                        return None  # read into memory, as kernels take members from there
                    if is_right and _version(name, os.lstat(path)) in self._verified:
                        return mapped
        return None

    def _read(self, block: Block) -> memoryview | None:
        """Return the data of a stored block; remove a damaged one."""
        key = block.key
        name = name_of(key)
        for kind in KINDS:
            data = self._read_file(self.folder.block_path(name, kind), kind, name, key, block.length)
            if data is not None:
                return data
        return None

    def _read_file(self, path: str, kind: str, name: str, key: bytes, length: int) -> memoryview | None:
        start = start_of(key)
        raw = b""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                before = after = os.fstat(descriptor)
                if before.st_size == start + length:
                    with suppress(OSError):  # a bad sector: the block counts as damaged
                        raw = os.pread(descriptor, before.st_size, 0)
                    after = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        data = memoryview(raw)[start:]
        if len(data) == length and raw.startswith(MAGIC) and raw.startswith(key, HEADER.size):
            # Replacing a file changes its inode; writing to it at least a tick later changes its time.
            if _version(name, after) in self._verified:
                return data
            if HEADER.unpack_from(raw)[1:4] == (crc32(data), start, len(key)):
                if before.st_mtime_ns < time_ns() - TICK:
                    self._verify(_version(name, before))
                return data
        self._remove_damaged(path, kind, before, key, start + length)
        return None

    def _verify(self, version: int) -> None:
        """Remember that a file is whole."""
        if len(self._verified) >= MOST_VERIFIED:
            self._verified.clear()
        self._verified.add(version)

    def _remove_damaged(self, path: str, kind: str, status: os.stat_result, key: bytes, size: int) -> None:
        """Remove a damaged file, and log a warning."""
        with suppress(OSError), self.folder.counts() as counts:
            if self.folder.unlink(counts, path, kind, status, size):
                log.warning("%s: a damaged block of %s is fetched again", visible(path), visible(json.loads(key)[0]))

    # Downloading and storing.

    def _download(self, block: Block, fetch: Callable[[], Steps[Any]]) -> Steps[memoryview]:
        """Fetch a block that was not stored, unless another process has stored it in the meantime."""
        begun = yield from self._begun_part(block)
        if isinstance(begun, memoryview):
            return begun
        if begun is None:  # without the lock: others need not wait, as the block is not stored
            return _fetched(block, (yield from fetch()))
        try:
            data = _fetched(block, (yield from fetch()))
        except GeneratorExit:
            load_soon(self._end_part, begun, None)
            raise
        except BaseException:
            yield from loading(self._end_part, begun, None)
            raise
        yield from loading(self._end_part, begun, data)
        return data

    def _begun_part(self, block: Block) -> Steps[memoryview | _Download | None]:
        """Return what ``_begin_part`` does.

        While another process downloads the block, the steps wait, and no thread: the few threads are needed to store
        what this process has downloaded, for which the other process may wait.
        """
        check, rests = self.folder.patience(), pauses()
        while True:
            call = Call(self._begin_part, (block, check), loading_threads)
            try:
                yield call
            except GeneratorExit:  # the call may still be made
                call.future.add_done_callback(self._abandon)
                raise
            with suppress(BlockingIOError):
                return call.future.result()
            yield from pausing(next(rests))

    def _begin_part(self, block: Block, check: Callable[[], None]) -> memoryview | _Download | None:
        """Return a locked part for a block, its data if another process has stored it, None if it cannot be stored.

        Raises BlockingIOError if another process downloads it, and *check* finds that it may do so.
        """
        if not self._is_storing():
            return None
        key = block.key
        name = name_of(key)
        path = f"{self.folder.path}/{PARTS}/{name}"
        try:
            file = lock(path, FLAGS)  # the file may be left from a dead process
        except BlockingIOError:
            try:
                check()
            except TimeoutError as error:
                self._stop(error)
                return None
            raise
        except OSError as error:
            self._stop(error)
            return None
        size, kind = taken(len(header_of(key, 0, "")) + block.length), None
        try:
            stored = self._read(block)
            if stored is None:
                kind = self._allot(size)
        finally:
            if kind is None:
                with suppress(OSError):
                    os.unlink(path)
                release(file)
        return stored if kind is None else _Download(file, path, name, key, size, kind)

    def _end_part(self, part: _Download, data: memoryview | None) -> None:
        """Store the data of a part, if there is any, and unlock it."""
        is_stored = False
        try:
            is_stored = data is not None and self._store(part, data)
        finally:
            if not is_stored:
                self._give_back(part.size, part.kind)
                with suppress(OSError):
                    os.unlink(part.path)
            release(part.file)

    def _abandon(self, begun: Future[Any]) -> None:
        """Unlock a part whose download was dropped before it began."""
        if not begun.cancelled() and begun.exception() is None and isinstance(part := begun.result(), _Download):
            self._end_part(part, None)

    def _allot(self, size: int) -> str | None:
        """Count *size* bytes for a part and return its kind, or None if it does not fit into the budget."""
        try:
            with self.folder.counts() as counts:
                kind = None
                if counts["pinned"] + counts["spool"] + size <= self.budget:
                    is_pinned = counts["pinned"] + size <= self.budget - self._reserved(counts)
                    kind = "pinned" if is_pinned else "spool"
                if kind is not None:
                    counts[kind] += size
                    self._mine(counts)[kind] += size
                else:
                    self.refused += size
                return kind
        except OSError as error:
            self._stop(error)
            return None

    def _give_back(self, size: int, kind: str) -> None:
        try:
            with self.folder.counts() as counts:
                self._settle(counts, kind, size)
                counts[kind] -= size
        except OSError as error:
            self._stop(error)

    def _settle(self, counts: dict[str, Any], kind: str, size: int) -> None:
        """Subtract *size* bytes from the count of this process's parts."""
        mine = self._mine(counts)
        known = min(size, mine[kind])  # less if the counts have been removed in the meantime
        mine[kind] -= known
        counts[kind] += size - known

    def _store(self, part: _Download, data: memoryview) -> bool:
        """Write a block into its *part* and give it its final name; return whether that succeeded."""
        assert self._owner is not None
        file, path, name, key, _, kind = part
        header = header_of(key, crc32(data), self._owner[0] if kind == "spool" else "")
        size = len(header) + len(data)
        target = self.folder.block_path(name, kind)
        try:
            os.ftruncate(file, 0)  # a dead process may have written to it
            written = os.writev(file, [header, data])
            while written < size:
                rest = memoryview(header)[written:] if written < len(header) else data[written - len(header) :]
                written += os.write(file, rest)
            # Any later write changes this time, so the file can be marked as verified at once.
            before = time_ns() - TICK
            os.utime(file, ns=(before, before))
            check_written(file)
            status = os.fstat(file)
            with self.folder.counts() as counts:
                if os.path.lexists(target):  # damaged, and could not be removed
                    counts[kind] = max(0, counts[kind] - taken(size))
                try:
                    os.rename(path, target)
                except FileNotFoundError:
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    os.rename(path, target)
                self._settle(counts, kind, taken(size))
        except OSError as error:
            self._stop(error)
            return False
        self._verify(_version(name, status))
        return True


def _fetched(block: Block, found: Any) -> memoryview:
    data = memoryview(found).cast("B")
    if len(data) != block.length:
        raise OpenError(f"read {len(data)} bytes instead of {block.length}", url=block.url, offset=block.offset)
    return data


_caches: dict[tuple[str, int | None, float], BlockCache] = {}
_registering = PerProcess(threading.Lock)


@atexit.register
def _leave_all() -> None:
    for cache in _caches.values():
        cache.leave()
