"""What was delivered, skipped and quarantined, and why: the account that every reading keeps."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Quarantined(NamedTuple):
    """A shard, sample or field left out; *key*, *field* and *offset* (bytes) are None where unknown."""

    shard: str | None
    key: str | None
    field: str | None
    offset: int | None
    reason: str


@dataclass
class Tally:
    """The counts of one process."""

    shards: int = 0
    broken_off: int = 0
    members: int = 0
    samples: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    quarantined: list[Quarantined] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the counts of *other*."""
        self.shards += other.shards
        self.broken_off += other.broken_off
        self.members += other.members
        self.samples += other.samples
        self.skipped += other.skipped
        self.quarantined += other.quarantined


class Ledger:
    """Counts of shards, members and samples: delivered, skipped (with the reason), quarantined.

    A ledger is an ``on_error=``: called with an error it records shard, key, field, offset and reason, and raises the
    error again when there were more than *max_errors* in this process. Each recorded error is also shown to *on_error*.
    Samples are counted where they leave their shard, before the user's ops. Shards whose reading was broken off make
    the account ``unaudited``.

    Copies of a shared ledger in worker processes report to the one they were copied from.

    >>> ledger = Ledger(max_errors=1)
    >>> ledger(ValueError("odd"))
    >>> print(ledger)
    shards           0
    members          0
    delivered        0 samples
    skipped          0 members
    quarantined      1
      ValueError: odd
    """

    def __init__(self, *, max_errors: float = 0, on_error: Callable[[Exception], Any] | None = None):
        self.max_errors = max_errors
        self.on_error = on_error
        self._errors = 0
        self._tally = Tally()
        self._pid = os.getpid()
        self._mailbox: _Mailbox | None = None

    @classmethod
    def of(cls, on_error: Callable[[Exception], Any] | None) -> Ledger:
        """Return *on_error* if it is a ledger, else a new one that lets it decide what to raise."""
        if isinstance(on_error, Ledger):
            return on_error
        return cls() if on_error is None else cls(max_errors=float("inf"), on_error=on_error)

    def __call__(self, error: Exception) -> None:
        place: list[Any] = [getattr(error, name, None) for name in ("url", "key", "field", "offset")]
        reason = getattr(error, "reason", None) or f"{type(error).__name__}: {error}"
        self._mine().quarantined.append(Quarantined._make([*place, reason]))
        self._errors += 1
        if self.on_error is not None:
            self.on_error(error)
        if self._errors > self.max_errors:
            raise error

    def count(self, *, shards: int = 0, broken_off: int = 0, members: int = 0, samples: int = 0) -> None:
        """Add to the counts."""
        self._mine().add(Tally(shards, broken_off, members, samples))

    def skip(self, reason: str) -> None:
        """Count a member that is no part of a sample."""
        self._mine().skipped[reason] += 1

    def merge(self, other: Ledger) -> None:
        """Add the counts of *other*, which may come from another process or machine."""
        self._mine().add(other._total())

    def clear(self) -> None:
        """Set all counts to zero."""
        self._total()
        self._tally, self._errors = Tally(), 0

    @property
    def shards(self) -> int:
        """Shards read to their end."""
        return self._total().shards

    @property
    def members(self) -> int:
        """Members that became fields of delivered samples."""
        return self._total().members

    @property
    def samples(self) -> int:
        """Samples delivered."""
        return self._total().samples

    @property
    def skipped(self) -> dict[str, int]:
        """How many members are no part of a sample, by the reason."""
        return dict(self._total().skipped)

    @property
    def quarantined(self) -> list[Quarantined]:
        """What was left out because of an error."""
        return list(self._total().quarantined)

    @property
    def unaudited(self) -> bool:
        """Whether the reading of a shard was broken off, so that the counts cover a part of it."""
        return self._total().broken_off > 0

    def __str__(self) -> str:
        tally = self._total()
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.skipped.items()))
        broken_off = f" ({tally.broken_off} broken off: unaudited)" if tally.broken_off else ""
        return "\n".join(
            [
                f"shards      {tally.shards:>6}{broken_off}",
                f"members     {tally.members:>6}",
                f"delivered   {tally.samples:>6} samples",
                f"skipped     {tally.skipped.total():>6} members{reasons and ': ' + reasons}",
                f"quarantined {len(tally.quarantined):>6}",
            ]
            + [f"  {_describe(entry)}" for entry in tally.quarantined]
        )

    def share(self) -> None:
        """Let copies of this ledger in other processes of this machine report to it."""
        if self._mailbox is None:
            self._mailbox = _Mailbox()

    def report(self) -> None:
        """In a copy of a shared ledger: send the counts home and begin anew. Elsewhere: nothing."""
        tally = self._mine()
        if self._mailbox is not None and self._mailbox.post(tally):
            self._tally = Tally()

    def _mine(self) -> Tally:
        """This process's tally: a forked copy leaves its parent's counts to the parent."""
        if self._pid != os.getpid():
            self._pid, self._tally, self._errors = os.getpid(), Tally(), 0
        return self._tally

    def _total(self) -> Tally:
        tally = self._mine()
        if self._mailbox is not None:
            for report in self._mailbox.collect():
                tally.add(report)
        return tally

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tally": self._total()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pid=os.getpid())
        if self._mailbox is not None:
            if self._mailbox.owner == self._pid:
                self._mailbox = None  # a copy come home: what it had to report it reported
            else:
                self._tally, self._errors = Tally(), 0  # a copy sent out


def _describe(entry: Quarantined) -> str:
    name = entry.key if entry.field is None else f"{entry.key}.{entry.field}"
    offset = None if entry.offset is None else f"offset {entry.offset}"
    return ": ".join(part for part in (entry.shard, offset, name, entry.reason) if part is not None)


class _Mailbox:
    """A file to which other processes append their tallies, one JSON line each; removed with its owner."""

    def __init__(self) -> None:
        import tempfile
        from multiprocessing.util import Finalize

        descriptor, self.path = tempfile.mkstemp(prefix="tarshards-ledger-")
        os.close(descriptor)
        self.owner, self.position = os.getpid(), 0
        Finalize(self, _remove, (self.path,), exitpriority=0)  # multiprocessing's children run no atexit

    def post(self, tally: Tally) -> bool:
        """Append *tally*, unless this is the owner's process or the mailbox is not on this machine."""
        if os.getpid() == self.owner:
            return False
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return False
        with open(descriptor, "ab", buffering=0) as file:
            file.write(json.dumps(vars(tally)).encode() + b"\n")
        return True

    def collect(self) -> list[Tally]:
        """Return what has come since the last time."""
        if os.getpid() != self.owner:
            return []
        with open(self.path, "rb") as file:
            file.seek(self.position)
            lines = [line for line in file if line.endswith(b"\n")]
        self.position += sum(map(len, lines))
        return [_read_tally(json.loads(line)) for line in lines]


def _read_tally(fields: dict[str, Any]) -> Tally:
    quarantined = [Quarantined(*entry) for entry in fields.pop("quarantined")]
    return Tally(**{**fields, "skipped": Counter(fields["skipped"])}, quarantined=quarantined)


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)
