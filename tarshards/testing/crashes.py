"""Record a write, enumerate every state in which a crash can leave its files, recreate each, and read it.

The method is ALICE's (Pillai et al., OSDI 2014). The system calls of the write are recorded. A killed process leaves
the files after some of these calls; the last call may have written only a part of its bytes. A power loss may also undo
changes that no fsync has made durable: a file's bytes need an fsync of the file, its name an fsync of the folder; lost
bytes may read as zeros. ``check_writer`` builds all these states, with one or two changes lost, and reads each: an
output must be whole, as it was before, absent, or an error, but never incomplete without an error.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from tarshards.testing.system_calls import Change, Tree, read_tree, record, replay, write_tree

TORN = 6  # sizes to try, at most, for a write that a killed process carried out in part
ABSENT = "absent"

Writer = Callable[[Path], Any] | Sequence[str]
Reader = Callable[[Path], Mapping[str, Any]]


class CrashState(NamedTuple):
    """The files after a crash; *words* name the changes that were made, and those lost."""

    tree: Tree
    words: str
    is_killed: bool  # no change is lost: a process was killed, but not the system
    is_complete: bool  # all changes were made, though some may be lost: the write had returned


@dataclass
class Crashes:
    """The result of ``check_writer``: the *changes* of the write, and how its outputs were found in each of *states*.

    *faults* are lines, each with the state that shows it: an output that is neither whole nor absent nor an error, an
    earlier output that is gone, and an output that is missing although the write had returned.
    """

    changes: list[Change]
    states: int = 0
    found: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.found.items()))
        return "\n".join(
            [f"{len(self.changes)} changes, {self.states} states, {len(self.faults)} faults: {counts}", *self.faults]
        )


def check_writer(
    write: Writer,
    read: Reader,
    folder: str | os.PathLike[str],
    *,
    lost: int = 2,
    lasts: bool = True,
    derived: str = "",
    again: str = "",
) -> Crashes:
    """Read the outputs of a write with *read* in every state in which a crash can leave *folder*; return the result.

    *write* is a command, run in *folder*, or a function at the top of a module, called with the folder in a new
    process. *folder* contains the files from before the write. *read* is called with copies of the folder, and returns
    outputs by name: values that can be compared, or an exception for an output that cannot be read.

    Up to *lost* changes are lost at a time. With *lasts*, no crash after the write has returned may lose its outputs.
    *derived* is a regular expression for outputs that can be recreated, such as indexes: these may be gone. *again* is
    a regular expression for files: the function is called again in each state that a killed process leaves, and must
    leave the same files, with the same bytes in those that match. Needs strace; raises ValueError if nothing can be
    read even without a crash.
    """
    before = read_tree(folder)
    changes = record(_command(write, folder), folder)
    after = read_tree(folder)
    result, judged = Crashes(changes), _Judge(read, lasts, derived)
    copies = Path(f"{os.path.realpath(folder)}.crashes")
    copies.mkdir()
    judged.old, judged.new = _found(read, before, copies / "old"), _found(read, after, copies / "new")
    errors = [value for value in judged.new.values() if isinstance(value, Exception)]
    if len(errors) == len(judged.new):
        raise ValueError(f"without a crash nothing can be read either: {errors[:1]}")
    for state in crash_states(before, changes, lost):
        copy = copies / f"{result.states}"
        write_tree(state.tree, copy)
        result.states += 1
        result.faults += [f"{fault}: {state.words}" for fault in judged.faults(copy, state, result.found)]
        if again and state.is_killed and callable(write):
            result.faults += [f"written again, {fault}: {state.words}" for fault in _again(write, copy, after, again)]
        _remove(copy)
    _remove(copies)
    return result


def _command(write: Writer, folder: str | os.PathLike[str]) -> list[str]:
    if not callable(write):
        return list(write)
    module, name = write.__module__, write.__qualname__
    if getattr(import_module(module), name, None) is not write:
        raise ValueError(f"{name} is not a function at the top of a module that can be imported")
    program = "import sys, importlib, pathlib; sys.path[:] = sys.argv[4:]; "
    program += "getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(pathlib.Path(sys.argv[3]))"
    return [sys.executable, "-c", program, module, name, os.path.realpath(folder), *sys.path]


def _found(read: Reader, tree: Tree, copy: Path) -> dict[str, Any]:
    """Return the outputs in *tree*, the state without a crash."""
    write_tree(tree, copy)
    found = dict(read(copy))
    _remove(copy)
    return found


def _again(write: Callable[[Path], Any], copy: Path, after: Tree, same: str) -> Iterator[str]:
    """Write again, and yield what differs from *after*; only files that match *same* must have the same bytes."""
    try:
        write(copy)
    except Exception as error:
        yield f"it fails with {type(error).__name__}: {error}"
    else:
        left = read_tree(copy)
        for name in sorted({*left, *after}):
            if (name in left) != (name in after) or (re.search(same, name) and left[name] != after[name]):
                yield f"{name} differs"


def _remove(folder: Path) -> None:
    from shutil import rmtree

    rmtree(folder)


@dataclass
class _Judge:
    """Compares the outputs after a crash with the *old* ones, from before the write, and the *new* ones."""

    read: Reader
    lasts: bool
    derived: str
    old: dict[str, Any] = field(default_factory=dict)
    new: dict[str, Any] = field(default_factory=dict)

    def faults(self, copy: Path, state: CrashState, counts: Counter[str]) -> Iterator[str]:
        """Yield a line for each fault of the outputs in *copy*, and count their conditions."""
        try:
            found = self.read(copy)
        except Exception as error:
            yield f"the reader fails with {type(error).__name__}: {error}"
            return
        for name in sorted({*self.old, *self.new, *found}):
            value = found.get(name, ABSENT)
            old, new = self.old.get(name, ABSENT), self.new.get(name, ABSENT)
            if isinstance(value, Exception):
                counts["an error"] += 1
            elif value == ABSENT and ABSENT not in (old, new) and not (self.derived and re.search(self.derived, name)):
                counts["gone"] += 1
                yield f"{name} is gone"
            elif value == ABSENT:
                counts[ABSENT] += 1
            elif value in (old, new):
                counts["whole" if value == new else "as before"] += 1
            else:
                counts["half"] += 1
                yield f"{name} is half"
            if self.lasts and state.is_complete and value != new and not isinstance(new, Exception):
                yield f"{name} has not lasted"


def crash_states(before: Tree, changes: Sequence[Change], lost: int = 2) -> Iterator[CrashState]:
    """Yield the states after each number of *changes*, and with up to *lost* of these missing; each tree once."""
    known: set[tuple[bytes, bool]] = set()
    for count in range(len(changes) + 1):
        for came, words, missing in _variants(changes[:count], lost):
            tree = replay(before, came)
            mark = _digest(tree), count == len(changes)
            if mark not in known:
                known.add(mark)
                yield CrashState(tree, f"after {count} of {len(changes)} changes{words}", not missing, mark[1])


def _variants(came: Sequence[Change], lost: int) -> Iterator[tuple[list[Change], str, int]]:
    """Yield the changes that remain of those that *came*, a text that names the missing ones, and their number."""
    yield [*came], f", the last: {came[-1]}" if came else "", 0
    if came and came[-1].kind == "write":
        for size in _torn(len(came[-1].data)):
            torn = replace(came[-1], data=came[-1].data[:size])
            yield [*came[:-1], torn], f", of the last {size} bytes of {len(came[-1].data)}: {came[-1]}", 0
    losable = list(_losable(came))
    for number in range(1, lost + 1):
        for numbers in combinations(losable, number):
            for zeros in product(*((False, True) if came[at].kind == "write" else (False,) for at in numbers)):
                left: list[Change] = [*came]
                for at, is_zeros in reversed(list(zip(numbers, zeros))):
                    left[at : at + 1] = [_zeroed(came[at])] if is_zeros else []
                words = " and ".join(
                    f"{at + 1}: {came[at]}{' (zeros)' if is_zeros else ''}" for at, is_zeros in zip(numbers, zeros)
                )
                yield left, f", without {words}", number


def _torn(size: int) -> Iterator[int]:
    """Yield sizes for a write that was carried out in part: all but the last byte, and some whole blocks."""
    blocks = size // 512
    if size > 1:
        yield size - 1
    yield from sorted({512 * (blocks * part // TORN) for part in range(1, TORN)} - {0, size})


def _zeroed(change: Change) -> Change:
    return replace(change, data=bytes(len(change.data)))


def _losable(came: Sequence[Change]) -> Iterator[int]:
    """Yield the numbers of the changes that no sync has made durable, by the guarantees of POSIX."""
    files: set[int] = set()
    folders: set[str] = set()
    is_all = False
    found = []
    for at, change in reversed(list(enumerate(came))):
        if change.kind == "sync":
            if change.file is not None:
                files.add(change.file)
            elif change.name:
                folders.add(change.name)
            else:
                is_all = True
        elif change.kind in ("write", "resize"):
            if not is_all and change.file not in files:
                found.append(at)
        elif not is_all and (os.path.dirname(change.target or change.name) or ".") not in folders:
            found.append(at)
    yield from reversed(found)


def _digest(tree: Tree) -> bytes:
    digest = blake2b(digest_size=16)
    for name, content in tree.items():
        digest.update(f"{len(name)} {name} {-1 if content is None else len(content)} ".encode(errors="surrogateescape"))
        digest.update(content or b"")
    return digest.digest()
