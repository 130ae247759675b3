"""The changes that a command makes to the files of a folder, in order, from its system calls recorded by strace.

``record`` runs the command, and verifies that its result replays to the files that the command left, byte for byte.
strace does not show writes through a mapping, and symbolic links are not recorded; both raise an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Tree = dict[str, bytes | None]  # the files below a folder by name; None: a folder

CREATING = ("clone", "clone3", "fork", "vfork")  # a process or thread
CALLS = (
    *("open", "openat", "creat", "close", "dup", "dup2", "dup3", "fcntl", "lseek", "chdir", "fchdir"),
    *("write", "writev", "pwrite64", "pwritev", "pwritev2", "ftruncate", "truncate", "fallocate"),
    *("copy_file_range", "sendfile", "fsync", "fdatasync", "sync", "syncfs"),
    *("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir"),
    *CREATING,
)
LINE = re.compile(r"(?P<process>\d+) +(?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+|\?)")
RESUMED = re.compile(r"(?P<process>\d+) +<\.\.\. \w+ resumed>(?P<rest>.*)")
UNFINISHED = re.compile(r"(?P<process>\d+) +(?P<begun>\w+\(.*?),? ?<unfinished \.\.\.>$")
TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(frozen=True)
class Change:
    """One change: *name* and *target* are paths below the folder, *file* is the number of a file.

    Files that existed before are numbered in the order of their names, then new ones as they are created. A rename
    keeps the number. Folders have no number; a *sync* without a name covers all files.
    """

    kind: Literal["create", "write", "resize", "link", "unlink", "rename", "mkdir", "rmdir", "sync"]
    name: str = ""
    file: int | None = None
    target: str = ""
    offset: int = 0
    data: bytes = b""
    size: int = 0

    def __str__(self) -> str:
        if self.kind == "write":
            return f"write {len(self.data)} bytes at {self.offset} of {self.name}"
        if self.kind == "resize":
            return f"resize {self.name} to {self.size}"
        return " ".join([self.kind, self.name or "everything", *([f"to {self.target}"] if self.target else [])])


def read_tree(folder: str | os.PathLike[str]) -> Tree:
    """Return the files and folders below *folder*."""
    tree: Tree = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            raise ValueError(f"{path}: symbolic links are not recorded")
        tree[name] = None if path.is_dir() else path.read_bytes()
    return tree


def write_tree(tree: Mapping[str, bytes | None], folder: str | os.PathLike[str]) -> None:
    """Create *folder* with these files and folders."""
    Path(folder).mkdir()
    for name, content in sorted(tree.items()):
        path = Path(folder, name)
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)


def replay(before: Mapping[str, bytes | None], changes: Iterable[Change]) -> Tree:
    """Return the files after applying these changes to *before*; files in folders that do not exist are left out.

    >>> replay({"a": b"old"}, [Change("write", "a", 0, data=b"new!"), Change("rename", "a", 0, target="b")])
    {'b': b'new!'}
    """
    files = {name: number for number, (name, _) in enumerate(files_of(before))}
    folders = {name for name, content in before.items() if content is None}
    contents = _contents(before, changes := list(changes))
    for change in changes:
        if change.kind not in ("write", "resize", "sync"):
            rename(files, folders, change)
    kept: Tree = {name: None for name in folders if _is_in(name, folders)}
    kept |= {name: bytes(contents.get(number, b"")) for name, number in files.items() if _is_in(name, folders)}
    return dict(sorted(kept.items()))


def _contents(before: Mapping[str, bytes | None], changes: Iterable[Change]) -> dict[int, bytearray]:
    """Return the bytes of the files by number."""
    contents = {number: bytearray(content) for number, (_, content) in enumerate(files_of(before))}
    for change in changes:
        if change.kind in ("write", "resize"):
            assert change.file is not None
            content = contents.setdefault(change.file, bytearray())
            end = change.size if change.kind == "resize" else change.offset + len(change.data)
            if len(content) < end:
                content.extend(bytes(end - len(content)))
            if change.kind == "resize":
                del content[end:]
            else:
                content[change.offset : end] = change.data
    return contents


def files_of(tree: Mapping[str, bytes | None]) -> list[tuple[str, bytes]]:
    """Return the files of a tree in the order of their numbers."""
    return sorted((name, content) for name, content in tree.items() if content is not None)


def rename(files: dict[str, int], folders: set[str], change: Change) -> None:
    """Apply a *change* of names to *files*, numbers by name, and to *folders*."""
    if change.kind == "mkdir":
        folders.add(change.name)
    elif change.kind == "rmdir":
        folders.discard(change.name)
    elif change.kind == "unlink":
        files.pop(change.name, None)
    elif change.kind == "create":
        assert change.file is not None
        files[change.name] = change.file
    elif change.kind == "link":
        assert change.file is not None
        files[change.target] = change.file
    elif change.kind == "rename" and change.file is not None:  # even if the change that gave it its name is lost
        files.pop(change.name, None)
        files[change.target] = change.file
    elif change.kind == "rename":
        below = f"{change.name}/"
        for name in [name for name in files if name.startswith(below)]:
            files[f"{change.target}/{name.removeprefix(below)}"] = files.pop(name)
        for name in [name for name in folders if f"{name}/".startswith(below)]:
            folders.discard(name)
            folders.add(f"{change.target}{name[len(change.name) :]}")


def _is_in(name: str, folders: set[str]) -> bool:
    return all(str(parent) in folders for parent in list(Path(name).parents)[:-1])


def record(command: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str]) -> list[Change]:
    """Run *command* in *folder*; return the changes of the files in it.

    Consecutive writes to a file are joined. Raises FileNotFoundError without strace, CalledProcessError if the command
    fails, and ValueError if the changes do not reproduce the files that it left.
    """
    if shutil.which("strace") is None:
        raise FileNotFoundError("strace is not installed; on Debian: apt-get install strace")
    root = os.path.realpath(folder)
    before = read_tree(root)
    with tempfile.TemporaryDirectory(prefix="tarshards-") as scratch:
        log = os.path.join(scratch, "calls")
        traced = ",".join(f"?{call}" for call in CALLS)
        strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-v", "-xx", "-s", "1000000000"]  # stops at these calls only
        strace += ["-e", f"trace={traced}", "-e", "signal=none"]
        subprocess.run([*strace, "-o", log, *command], cwd=root, check=True)
        recording = _Recording(root, before)
        with open(log, errors="replace") as lines:
            recording.read(lines)
    changes = joined(recording.changes)
    if replay(before, changes) != read_tree(root):
        raise ValueError(f"{folder}: the system calls of {command[0]} that were recorded do not give its files")
    return changes


def joined(changes: Iterable[Change]) -> list[Change]:
    """Return *changes* with consecutive writes to a file joined."""
    found: list[Change] = []
    for change in changes:
        last = found[-1] if found else None
        is_next = last is not None and (last.kind, last.file) == ("write", change.file) and change.kind == "write"
        if last is not None and is_next and last.offset + len(last.data) == change.offset:
            found[-1] = Change("write", last.name, last.file, offset=last.offset, data=last.data + change.data)
        else:
            found.append(change)
    return found


@dataclass
class _Open:
    """An open file or folder; duplicated and inherited descriptors share it and its *offset*."""

    path: str
    file: int | None
    offset: int = 0
    appends: bool = False


@dataclass
class _Traced:
    """The descriptors and the working directory of a process; its threads share them."""

    folder: str
    opened: dict[int, _Open] = field(default_factory=dict)


class _Recording:
    """The changes of the files below *root*, from the lines of strace."""

    def __init__(self, root: str, before: Tree):
        self.root, self.changes, self._before = root, list[Change](), before
        self._files = {name: number for number, (name, _) in enumerate(files_of(before))}
        self._folders = {name for name, content in before.items() if content is None}
        self._sizes = {number: len(content) for number, (_, content) in enumerate(files_of(before))}
        self._processes: dict[str, _Traced] = {}
        self._births: dict[str, tuple[str, str]] = {}  # of each child: the process that created it, and how

    def read(self, lines: Iterable[str]) -> None:
        """Process the lines of a log."""
        calls = list(_completed(lines))
        self._births = {result: (process, how) for process, call, how, result in calls if call in CREATING}
        for process, call, arguments, result in calls:
            if result != "?" and int(result) >= 0:
                self._take(self._process(process), call, arguments, int(result))

    def _process(self, number: str) -> _Traced:
        if number not in self._processes:
            if number in self._births:  # a child may run before the call that created it has returned
                parent, how = self._births[number]
                self._born(self._process(parent), how, number)
            else:
                self._processes[number] = _Traced(self.root)
        return self._processes[number]

    def _born(self, parent: _Traced, arguments: str, number: str) -> None:
        if "CLONE_FILES" not in arguments:
            parent = _Traced(parent.folder, dict(parent.opened))
        self._processes.setdefault(number, parent)

    def _take(self, process: _Traced, call: str, arguments: str, result: int) -> None:
        texts = [bytes.fromhex(text.replace("\\x", "")) for text in TEXT.findall(arguments)]
        plain = TEXT.sub('""', arguments)
        numbers = [int(text) if text.isdecimal() else None for text in plain.split(", ")]
        opened = process.opened.get(numbers[0]) if numbers[0] is not None else None
        if call in CREATING:
            self._born(process, arguments, str(result))
        elif call in ("open", "openat", "creat"):
            self._open(process, self._path(process, call, plain, texts[0]), call, plain, result)
        elif call in ("dup", "dup2", "dup3") or (call == "fcntl" and "F_DUPFD" in arguments):
            process.opened.pop(result, None)
            if opened is not None:
                process.opened[result] = opened
        elif call == "close":
            process.opened.pop(numbers[0] or 0, None)
        elif call == "chdir":
            process.folder = os.path.join(process.folder, os.fsdecode(texts[0]))
        elif call == "fchdir" and opened is not None:
            process.folder = opened.path
        elif call == "lseek" and opened is not None:
            opened.offset = result
        elif call in ("fsync", "fdatasync", "sync", "syncfs"):
            self._sync(call, opened)
        elif call in ("copy_file_range", "sendfile"):
            target, source = (numbers[2], numbers[0]) if call == "copy_file_range" else (numbers[0], numbers[1])
            self._copy(process, target, source, plain, result)
        elif call.startswith(("write", "pwrite")) and opened is not None:
            self._write(opened, b"".join(texts)[:result], _offset(call, plain) if call.startswith("p") else None)
        elif call in ("ftruncate", "fallocate") and opened is not None:
            self._resize(opened, call, plain, [number for number in numbers if number is not None])
        elif call == "truncate":
            path = self._path(process, call, plain, texts[0])
            if (name := self._name(path)) is not None:
                self._resize(_Open(path, self._files[name]), "ftruncate", plain, [0, numbers[1] or 0])
        elif texts:
            self._rename(process, call, plain, texts)

    def _path(self, process: _Traced, call: str, plain: str, name: bytes, argument: int = 0) -> str:
        """Return the path of *name*, which may be relative to the folder given by this *argument*."""
        folder = process.folder
        if call.endswith(("at", "at2")):
            number = plain.split(", ")[argument]
            if number.isdecimal():
                opened = process.opened.get(int(number))
                folder = "/" if opened is None else opened.path  # a folder outside of the root
        return os.path.normpath(os.path.join(folder, os.fsdecode(name)))

    def _name(self, path: str) -> str | None:
        """Return a path relative to the root: "." for the root itself, None for a path outside it."""
        if path == self.root:
            return "."
        return path[len(self.root) + 1 :] if path.startswith(f"{self.root}/") else None

    def _open(self, process: _Traced, path: str, call: str, plain: str, descriptor: int) -> None:
        process.opened.pop(descriptor, None)
        name = self._name(path)
        if name is None:
            process.opened[descriptor] = _Open(path, None)
            return
        opened = _Open(path, self._files.get(name), appends="O_APPEND" in plain)
        process.opened[descriptor] = opened
        if opened.file is None and (call == "creat" or "O_CREAT" in plain):
            opened.file = len(self._sizes)
            self._sizes[opened.file] = 0
            self._change(Change("create", name, opened.file))
        elif opened.file is not None and (call == "creat" or "O_TRUNC" in plain) and self._sizes[opened.file]:
            self._resize(opened, "ftruncate", "", [descriptor, 0])

    def _change(self, change: Change) -> None:
        rename(self._files, self._folders, change)
        self.changes.append(change)

    def _now(self, opened: _Open) -> str:
        """Return the current name of an open file, or if it has none, the name by which it was opened."""
        names = (name for name, file in self._files.items() if file == opened.file)
        return next(names, self._name(opened.path) or "")

    def _write(self, opened: _Open, data: bytes, offset: int | None = None) -> None:
        if opened.file is None or not data:
            return
        size = self._sizes[opened.file]
        begin = (size if opened.appends else opened.offset) if offset is None else offset
        self.changes.append(Change("write", self._now(opened), opened.file, offset=begin, data=data))
        self._sizes[opened.file] = max(size, begin + len(data))
        if offset is None:
            opened.offset = begin + len(data)

    def _resize(self, opened: _Open, call: str, plain: str, numbers: list[int]) -> None:
        if opened.file is None:
            return
        size = numbers[-1]
        if call == "fallocate":  # this number of bytes, starting at the offset
            size = max(self._sizes[opened.file], sum(numbers[-2:]))
            if "KEEP_SIZE" in plain:
                return
        self.changes.append(Change("resize", self._now(opened), opened.file, size=size))
        self._sizes[opened.file] = size

    def _sync(self, call: str, opened: _Open | None) -> None:
        if call in ("sync", "syncfs"):
            self.changes.append(Change("sync"))
        elif opened is not None and opened.file is not None:
            self.changes.append(Change("sync", self._now(opened), opened.file))
        elif opened is not None and (name := self._name(opened.path)) is not None:
            self.changes.append(Change("sync", name))

    def _copy(self, process: _Traced, target: int | None, source: int | None, plain: str, count: int) -> None:
        """Record a copy by the system from one file to another; a source outside the root must still exist."""
        opened, origin = process.opened.get(target or 0), process.opened.get(source or 0)
        if opened is None or opened.file is None or origin is None or not count:
            return
        given = re.search(r"\[(\d+)(?: => \d+)?\]", plain)
        offset = int(given[1]) if given else origin.offset
        if origin.file is not None:
            data = bytes(_contents(self._before, self.changes).get(origin.file, b"")[offset : offset + count])
        else:
            with open(origin.path, "rb") as file:
                file.seek(offset)
                data = file.read(count)
        self._write(opened, data)
        if given is None:
            origin.offset += count

    def _rename(self, process: _Traced, call: str, plain: str, texts: list[bytes]) -> None:
        name = self._name(self._path(process, call, plain, texts[0]))
        kind = call.removesuffix("2").removesuffix("at")
        if kind == "unlink" and "AT_REMOVEDIR" in plain:
            kind = "rmdir"
        target = self._name(self._path(process, call, plain, texts[1], 2)) if len(texts) > 1 else None
        actions: dict[str, Callable[[str], Change]] = {
            "mkdir": lambda name: Change("mkdir", name),
            "rmdir": lambda name: Change("rmdir", name),
            "unlink": lambda name: Change("unlink", name, self._files.get(name)),
            "rename": lambda name: Change("rename", name, self._files.get(name), target or ""),
            "link": lambda name: Change("link", name, self._files.get(name), target or ""),
        }
        if name is not None and kind in actions and (kind not in ("rename", "link") or target is not None):
            self._change(actions[kind](name))


def _completed(lines: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the process, name, arguments and result of each call in a log, in the order in which they returned."""
    begun: dict[str, str] = {}  # unfinished calls by process
    for line in lines:
        if unfinished := UNFINISHED.match(line):
            begun[unfinished["process"]] = unfinished["begun"]
            continue
        if resumed := RESUMED.match(line):
            process = resumed["process"]
            line = f"{process} {begun.pop(process)}{resumed['rest']}"
        if found := LINE.match(line):
            yield found["process"], found["call"], found["arguments"], found["result"]


def _offset(call: str, plain: str) -> int:
    """Return the offset of a positioned write."""
    arguments = plain.split(", ")
    return int(arguments[-2] if call == "pwritev2" else arguments[-1])
