"""Count the outcome of each sample, and audit the counts over workers and ranks."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, SupportsFloat

from tarshards.errors import AuditError, SampleError, TarshardsError, check_function, shortened, visible
from tarshards.parallel.forks import PerProcess
from tarshards.samples.keys import USUAL, KeyRule, Sample, dots_in_key, have_dots_in_key, split_name
from tarshards.storage.streams import temporary

#: Handles an error: returns to continue, or raises.
OnError = Callable[[Exception], Any]

#: Takes a sample that is left out, and the reason.
Reject = Callable[[Sample, TarshardsError], Any]

#: The values of ``on_error=``: None and "raise" raise the first error, "skip" logs each error and continues.
ErrorPolicy = OnError | Literal["raise", "skip"] | None


def error_handler(on_error: ErrorPolicy) -> OnError | None:
    """Return the function for ``on_error=``, None to raise; raise ValueError for anything else.

    >>> error_handler("raise"), error_handler(print)
    (None, <built-in function print>)
    """
    if on_error is None or isinstance(on_error, Ledger):
        return on_error
    if isinstance(on_error, str) and on_error in ("raise", "skip"):
        return log_error if on_error == "skip" else None
    if not callable(on_error):
        words = f'"raise", "skip", a Ledger, or a function of the error, not {shortened(on_error)}'
        raise ValueError(f"on_error must be {words}")
    check_function(on_error, "on_error=")
    return on_error


def reject_or_raise(reject: Reject | None, sample: Sample, error: TarshardsError) -> None:
    """Pass *sample* and *error* to *reject*; if it is None, raise the error."""
    if reject is None:
        raise error
    reject(sample, error)


def log_error(error: Exception) -> None:
    """Log a warning that an error's sample or shard is left out."""
    import logging

    logging.getLogger("tarshards").warning("left out: %s", visible(str(error)))


#: The outcomes of the samples of a pass, as they are printed.
OUTCOMES = ("before", "delivered", "filtered", "failed", "quarantined", "dropped", "in flight", "not taken")


class PassOf(NamedTuple):
    """A pass over an *epoch*, or over its rest after *before* samples, on *rank* of *ranks*.

    A pass over samples, which counts the samples before it in each worker, has a *before* of 1 if it is over a rest.
    """

    epoch: int
    before: int
    rank: int
    ranks: int


class Quarantined(NamedTuple):
    """A shard, sample or field left out for an error; *key*, *field* and *offset* (bytes) are None if unknown."""

    shard: str | None
    key: str | None
    field: str | None
    offset: int | None
    reason: str


@dataclass
class Tally:
    """The counts of one process. Each sample of the source is counted once, as one of these:

    - *delivered*: it came out of the ops; ahead of a first op that makes several samples of one (``flatten``), it went
      in; for ``batched``, it is in a batch that came out
    - *filtered*: a ``filter`` left it out; counted by filter
    - *failed*: it was read, and then an op or a decoder failed on it, and on_error let the epoch continue
    - quarantined: it could not be read; *quarantined_samples* counts these
    - *dropped*: it was left out unread, at the epoch's tail; or *discarded*: read, and left out by ``skip`` or with the
      last batch, when that is left out
    - *in_flight*: it was read but not delivered when the epoch was left: in a shuffle buffer, or prefetched

    *samples* were read, so *delivered* is *samples* minus filtered, failed, discarded and in_flight; *streamed* of them
    were read outside of planned epochs. *planned* is the number of samples in planned passes: planned = delivered +
    filtered + failed + quarantined + dropped + discarded; *repeated*, delivered again to fill the tail, count
    separately, as do the samples of the epochs *before* the states from which passes began. *read* counts by shard the
    planned samples that were read, quarantined or dropped, without repeats. *epochs* counts the epochs started, by
    dataset and order, and *parts* those started in the middle. *joined* counts the archives after the first in
    concatenated shards. *unpaired* samples of joined shards belong to no sample of the dataset. *failures* says why
    samples failed, and *quarantined* why shards and samples were not read. *passes* has the sums of each planned pass.
    """

    shards: int = 0
    broken_off: int = 0
    members: int = 0
    samples: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    discarded: int = 0
    in_flight: int = 0
    joined: int = 0
    unpaired: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    quarantined: list[Quarantined] = field(default_factory=list)
    failures: list[Quarantined] = field(default_factory=list)
    planned: int = 0
    before: int = 0
    quarantined_samples: int = 0
    dropped: int = 0
    repeated: int = 0
    parts: int = 0
    streamed: int = 0
    read: Counter[str] = field(default_factory=Counter)
    epochs: Counter[str] = field(default_factory=Counter)
    passes: dict[PassOf, Counter[str]] = field(default_factory=dict)

    @property
    def delivered(self) -> int:
        """The samples that came out of the ops."""
        return self.samples - self.filtered.total() - self.failed - self.discarded - self.in_flight

    def add(self, other: Tally) -> None:
        """Add the counts of *other*."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif name == "passes":
                for this, sums in value.items():
                    self.passes.setdefault(this, Counter()).update(sums)
            else:
                setattr(self, name, getattr(self, name) + value)

    def within(self, this: PassOf) -> Tally:
        """Return these counts as those of a pass."""
        sums = {
            "planned": self.planned + self.before,
            "repeated": self.repeated,
            "before": self.before,
            "delivered": self.delivered,
            "filtered": self.filtered.total(),
            "failed": self.failed,
            "quarantined": self.quarantined_samples,
            "dropped": self.dropped + self.discarded,
            "in flight": self.in_flight,
            "not taken": self.planned - self.read.total(),
            "left early": self.broken_off,
        }
        return replace(self, passes={this: Counter(sums)})


@dataclass
class _Counts:
    """The counts of a ledger in one process, and the number of errors it was called with there."""

    tally: Tally = field(default_factory=Tally)
    errors: int = 0


class Ledger:
    """Counts the outcome of each sample: delivered, filtered, failed, quarantined or dropped; see ``Tally``.

    A ledger can be passed as ``on_error=``: called with an error, it records shard, key, field, offset and reason, and
    raises the error once there are more than *max_errors* in this process. Each recorded error is also passed to
    *on_error*. Samples count as delivered when they come out of the ops. If an epoch or the reading of a shard was left
    early, the counts are ``unaudited``: they cover the samples read so far.

    Copies of a shared ledger in worker processes report their counts to the original.

    Printed, it has the sum of this rank's share of each planned epoch: planned = before + delivered + filtered
    + failed + quarantined + dropped, where *before* are the samples before the state from which a run resumed.

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

    has_warned_of_dots = False  # whether a warning about a sample merged by dots in keys was logged

    def __init__(self, *, max_errors: float = 0, on_error: OnError | None = None):
        if not isinstance(max_errors, SupportsFloat) or not float(max_errors) >= 0:
            raise ValueError(f'max_errors must be a number from 0 to float("inf"), not {max_errors!r}')
        self.max_errors = max_errors
        self.on_error: OnError | None = error_handler(on_error)
        self._counts = PerProcess(_Counts)
        self._mailbox: _Mailbox | None = None
        self._datasets: dict[str, tuple[Sequence[str], Iterable[int]]] = {}

    @classmethod
    def of(cls, on_error: ErrorPolicy) -> Ledger:
        """Return *on_error* if it is a ledger, else a new ledger that passes errors to its function."""
        handler = error_handler(on_error)
        if isinstance(handler, Ledger):
            return handler
        return cls() if handler is None else cls(max_errors=float("inf"), on_error=handler)

    def __call__(self, error: Exception) -> None:
        self._record(error, self._mine().quarantined)

    def fail(self, error: Exception) -> None:
        """Record, like a call, the error of a sample that was read; the caller counts the sample as failed."""
        self._record(error, self._mine().failures)

    def _record(self, error: Exception, entries: list[Quarantined]) -> None:
        origin: list[Any] = [getattr(error, name, None) for name in ("url", "key", "field", "offset")]
        reason = getattr(error, "reason", None) or f"{type(error).__name__}: {error}"
        if cost := getattr(error, "cost", ""):
            reason += f"; {cost}"
        entries.append(Quarantined._make([*origin, reason]))
        counts = self._counts()
        counts.errors += 1
        if self.on_error is not None:
            self.on_error(error)
        if counts.errors > self.max_errors:
            raise error

    def count(self, **counts: int) -> None:
        """Add to the counts, named as in ``Tally``."""
        tally = vars(self._mine())
        for name, value in counts.items():
            tally[name] += value

    def add(self, tally: Tally) -> None:
        """Add the counts of *tally*."""
        self._mine().add(tally)

    def know(self, dataset: str, shards: Sequence[str], counts: Iterable[int]) -> None:
        """Register the number of samples of each shard of *dataset*."""
        self._datasets[dataset] = (shards, counts)

    def skip(self, reason: str) -> None:
        """Count a member that does not belong to a sample."""
        self._mine().skipped[reason] += 1

    def leave_out(self, name: str, count: int = 1) -> None:
        """Count a sample, or *count* samples, that the filter *name* leaves out."""
        self._mine().filtered[name] += count

    def merge(self, other: Ledger) -> None:
        """Add the counts of *other*, which may come from another process or machine."""
        self._mine().add(other._total())
        self._datasets |= other._datasets

    def clear(self) -> None:
        """Set all counts to zero."""
        self._total()
        self._counts.renew()

    @property
    def shards(self) -> int:
        """Number of shards read to their end."""
        return self._total().shards

    @property
    def members(self) -> int:
        """Number of members that became fields of delivered samples."""
        return self._total().members

    @property
    def samples(self) -> int:
        """Number of samples delivered, after the ops."""
        return self._total().delivered

    @property
    def filtered(self) -> dict[str, int]:
        """Number of samples that filters left out, by filter."""
        return dict(self._total().filtered)

    @property
    def failed(self) -> int:
        """Number of samples left out because an op or a decoder failed on them."""
        return self._total().failed

    @property
    def joined(self) -> int:
        """Number of archives that follow another one in their shard, and were read as one with it."""
        return self._total().joined

    @property
    def unpaired(self) -> int:
        """The number of samples that only joined shards have, beyond those of the dataset."""
        return self._total().unpaired

    @property
    def skipped(self) -> dict[str, int]:
        """Number of members that do not belong to a sample, by reason."""
        return dict(self._total().skipped)

    @property
    def quarantined(self) -> list[Quarantined]:
        """The shards, samples and fields left out because of errors: not read, or failed."""
        tally = self._total()
        return tally.quarantined + tally.failures

    @property
    def unaudited(self) -> bool:
        """Whether an epoch or the reading of a shard was left early, so that the counts cover only a part of it."""
        tally = self._total()
        return tally.broken_off > 0 or tally.in_flight != 0

    def check(self, group: Any = None, *, timeout: float = 300.0) -> None:
        """Raise AuditError unless all samples of the planned epochs are accounted for.

        The sum must close: planned = delivered + filtered + failed + quarantined + dropped, without repeats; if
        complete epochs were read, each shard must have been read once per epoch. For an epoch that was left early, the
        samples read so far must sum up. The check covers this rank and its workers, or with a ``torch.distributed``
        *group* all its ranks, all of which must call this method; with gloo, a rank that does not call it within
        *timeout* seconds is an error.
        """
        self._verify([self._total()] if group is None else _gather(self._total(), group, timeout), group is not None)

    def audit(self, tallies: list[Tally], all_ranks: bool = False) -> None:
        """Raise AuditError unless *tallies*, of one rank's workers or of *all_ranks*, cover all samples of an epoch.

        Logs a warning if filters have left none of them.
        """
        total = self._verify(tallies, all_ranks)
        if total.in_flight and not total.broken_off:
            raise AuditError(f"{total.in_flight} samples came out of the ops in a worker and did not arrive")
        if not total.broken_off:
            warn_of_nothing(total)

    def _verify(self, tallies: list[Tally], all_ranks: bool) -> Tally:
        total = Tally()
        for tally in tallies:
            total.add(tally)
        taken = total.read.total() + total.repeated
        counted = total.samples - total.streamed + total.quarantined_samples + total.dropped
        if total.planned and not total.shards and taken != counted:
            raise AuditError(f"{taken} samples taken, {counted} read, quarantined or dropped")
        if total.delivered < 0:
            out = total.samples - total.delivered
            raise AuditError(f"{total.samples} samples read, and {out} filtered, failed, dropped or in flight")
        if total.broken_off or total.in_flight:
            return total  # see the property `unaudited`
        for rank, tally in enumerate(tallies if all_ranks else ()):
            if tally.epochs != tallies[0].epochs:
                raise AuditError(
                    f"rank {rank} has read other epochs than rank 0, or with another seed, state or dataset: "
                    f"{_first(tally.read)}, and rank 0 {_first(tallies[0].read)}"
                )
        ranks = len(tallies) if all_ranks else 1
        if total.read.total() != total.planned:
            raise AuditError(
                f"{total.planned} samples planned, {total.read.total()} delivered, filtered, failed, quarantined or "
                "dropped" + self._differences(total, ranks)
            )
        if not total.parts and (all_ranks or total.planned == self._indexed(total, 1).total()):
            differences = self._differences(total, ranks)
            if differences:
                raise AuditError("not every sample was read once per epoch" + differences)
        return total

    def _indexed(self, total: Tally, ranks: int) -> Counter[str]:
        """Return the number of samples in the epochs of *total*, by shard."""
        indexed: Counter[str] = Counter()
        for order, epochs in total.epochs.items():
            shards, counts = self._datasets.get(order.partition(" ")[0], ((), ()))
            for shard, samples in zip(shards, counts):
                indexed[shard] += int(samples) * epochs // ranks
        return indexed

    def _differences(self, total: Tally, ranks: int) -> str:
        """Return the names of the first few shards with too many or too few samples read."""
        indexed = self._indexed(total, ranks)
        names = [name for name in indexed | total.read if indexed[name] != total.read[name]]
        words = [f"{name} ({total.read[name]} of {indexed[name]})" for name in names[:5]]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return f": {', '.join(words)}{more}" if names else ""

    def __str__(self) -> str:
        tally = self._total()
        broken_off = f" ({tally.broken_off} broken off: unaudited)" if tally.broken_off else ""
        is_planned = tally.planned and not tally.streamed
        in_flight = f", {tally.in_flight} in flight" if tally.in_flight else ""
        left_out = [] if not tally.filtered else [_line("filtered", tally.filtered.total(), "samples", tally.filtered)]
        if tally.failed or tally.failures:
            left_out.append(_line("failed", tally.failed, "samples"))
            left_out += [f"  {_describe(entry)}" for entry in tally.failures]
        if is_planned:
            lines = _equations(tally.passes)
        elif tally.planned:
            not_taken = tally.planned - tally.read.total()
            left = f", {not_taken} not taken" if not_taken else ""
            lines = [_line("planned", tally.planned, "samples") + left + broken_off]
        else:
            lines = [_line("shards", tally.shards) + broken_off]
        if tally.planned and tally.streamed:
            lines.append(_line("streamed", tally.streamed, "samples"))
        if tally.joined:
            lines.append(_line("joined", tally.joined, "archives to the first of their shard"))
        lines.append(_line("members", tally.members))
        if not tally.planned and tally.delivered < tally.samples:
            lines.append(_line("read", tally.samples, "samples"))
        lines += [_line("delivered", tally.delivered, "samples") + in_flight, *left_out]
        if tally.planned:
            dropped = tally.dropped + tally.discarded
            lines.append(_line("dropped", dropped, "samples") + f", {tally.repeated} repeated")
        elif tally.discarded:
            lines.append(_line("dropped", tally.discarded, "samples"))
        if tally.skipped or not tally.planned:
            lines.append(_line("skipped", tally.skipped.total(), "members", tally.skipped))
        if tally.unpaired:
            lines.append(_line("unpaired", tally.unpaired, "samples of joined shards"))
        lines.append(_line("quarantined", tally.quarantined_samples if is_planned else len(tally.quarantined)))
        return "\n".join(lines + [f"  {_describe(entry)}" for entry in tally.quarantined])

    def share(self) -> None:
        """Let copies of this ledger in other processes of this machine report to it."""
        if self._mailbox is None:
            self._mailbox = _Mailbox()

    def report(self) -> None:
        """In a copy of a shared ledger, send the counts to the original and reset them; elsewhere, do nothing."""
        if self._mailbox is not None and self._mailbox.post(self._mine()):
            self._counts().tally = Tally()

    def _mine(self) -> Tally:
        """Return the tally of this process; a forked copy starts a new one."""
        return self._counts().tally

    def _total(self) -> Tally:
        tally = self._mine()
        if self._mailbox is not None:
            for report in self._mailbox.collect():
                tally.add(report)
        return tally

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": _Counts(self._total(), self._counts().errors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _counts=PerProcess(_Counts))
        if self._mailbox is not None and self._mailbox.owner != os.getpid():
            return  # a copy in another process, which begins at zero and reports to the original
        self._mailbox = None  # a copy that returned to the owner's process, which already has its counts
        vars(self._counts()).update(vars(state["_counts"]))


def warn_of_nothing(tally: Tally) -> None:
    """Log a warning if filters have left none of the samples that were read."""
    if tally.samples and tally.filtered and not tally.delivered and not tally.in_flight:
        import logging

        filters = ", ".join(f"{name} left out {count}" for name, count in sorted(tally.filtered.items()))
        log = logging.getLogger("tarshards")
        log.warning("no sample of this epoch was delivered: of %d read, %s", tally.samples, filters)


def _line(name: str, count: int, unit: str = "", parts: Counter[str] | None = None) -> str:
    """Return one line of a ledger.

    >>> _line("skipped", 3, "members", Counter({"directory": 1, "no extension": 2}))
    'skipped          3 members: 1 directory, 2 no extension'
    """
    words = ", ".join(f"{number} {part}" for part, number in sorted(parts.items())) if parts else ""
    return f"{name:<11} {count:>6}" + (unit and f" {unit}") + (words and f": {words}")


def _equations(passes: dict[PassOf, Counter[str]]) -> list[str]:
    """Return the sums of *passes*: a line for each, and for each run of whole epochs.

    >>> whole = Counter(planned=10, delivered=8, filtered=2)
    >>> rest = Counter({"planned": 10, "before": 6, "delivered": 2, "not taken": 2, "left early": 1})
    >>> for line in _equations({PassOf(0, 0, 0, 1): whole, PassOf(1, 0, 0, 1): whole, PassOf(2, 6, 0, 1): rest}):
    ...     print(line)
    epochs 0 to 1: 20 planned = 16 delivered + 4 filtered
    epoch 2: 10 planned = 6 before + 2 delivered + 2 not taken (left early: unaudited)
    """
    runs: list[tuple[PassOf, PassOf, Counter[str]]] = []  # the first and last pass, and the sums
    following = None  # the pass that would continue the last run
    for this, found in sorted(passes.items(), key=lambda item: (item[0].rank, item[0])):
        is_whole = not (found["before"] or found["left early"] or found["in flight"])
        if is_whole and this == following:
            first, _, sums = runs.pop()
            runs.append((first, this, sums + found))
        else:
            runs.append((this, this, found))
        following = this._replace(epoch=this.epoch + 1) if is_whole else None
    lines = []
    for first, last, sums in runs:
        name = f"epoch {last.epoch}" if first == last else f"epochs {first.epoch} to {last.epoch}"
        name += f", rank {first.rank} of {first.ranks}" if first.ranks > 1 else ""
        planned, outcomes = [
            " + ".join(f"{sums[word]} {word}" for word in words if sums[word]) or "0"
            for words in (("planned", "repeated"), OUTCOMES)
        ]
        lines.append(f"{name}: {planned} = {outcomes}" + " (left early: unaudited)" * bool(sums["left early"]))
    return lines


def _first(read: Counter[str]) -> str:
    """Describe how much was read of the first shard."""
    name = min(read, default=None)
    return "nothing" if name is None else f"{read[name]} samples of {name}"


def _describe(entry: Quarantined) -> str:
    name = entry.key if entry.field is None else f"{entry.key}.{entry.field}"
    offset = None if entry.offset is None else f"offset {entry.offset}"
    return visible(": ".join(part for part in (entry.shard, offset, name, entry.reason) if part is not None))


class _Mailbox:
    """A file to which other processes append their tallies as lines of JSON; removed when its owner exits."""

    def __init__(self) -> None:
        import tempfile
        from multiprocessing.util import Finalize

        with temporary():
            descriptor, self.path = tempfile.mkstemp(prefix="tarshards-ledger-")
        os.close(descriptor)
        self.owner, self.position = os.getpid(), 0
        Finalize(self, _remove, (self.path,), exitpriority=0)  # multiprocessing's children run no atexit functions

    def post(self, tally: Tally) -> bool:
        """Append *tally*, unless this is the owner's process or the mailbox is not on this machine."""
        if os.getpid() == self.owner:
            return False
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return False
        with temporary(), open(descriptor, "ab", buffering=0) as file:
            passes = [[this, sums] for this, sums in tally.passes.items()]
            file.write(json.dumps(vars(tally) | {"passes": passes}).encode() + b"\n")
        return True

    def collect(self) -> list[Tally]:
        """Return the tallies appended since the last call."""
        if os.getpid() != self.owner:
            return []
        with open(self.path, "rb") as file:
            file.seek(self.position)
            lines = [line for line in file if line.endswith(b"\n")]
        self.position += sum(map(len, lines))
        return [_read_tally(json.loads(line)) for line in lines]


def _read_tally(fields: dict[str, Any]) -> Tally:
    counters = {name: Counter(value) for name, value in fields.items() if isinstance(value, dict)}
    entries = {name: [Quarantined(*entry) for entry in fields[name]] for name in ("quarantined", "failures")}
    passes = {PassOf(*this): Counter(sums) for this, sums in fields["passes"]}
    return Tally(**fields | counters | entries | {"passes": passes})


def _gather(tally: Tally, group: Any, timeout: float) -> list[Tally]:
    """Return the tallies of all ranks of a ``torch.distributed`` group."""
    from datetime import timedelta

    distributed = sys.modules["torch.distributed"]
    if distributed.get_backend(group) == "gloo":
        try:
            distributed.monitored_barrier(group, timeout=timedelta(seconds=timeout))
        except RuntimeError as exc:
            raise AuditError(f"not all ranks arrived within {timeout:g} s: {str(exc).splitlines()[0]}") from exc
    tallies: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(tallies, tally, group=group)
    return tallies


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)


def tell_of_dots(samples: list[Sample], url: str, split: KeyRule, ledger: Ledger | None) -> None:
    """Log a warning of the first of *samples* that was merged by dots in keys, once per *ledger*."""
    if split is not split_name or (ledger is not None and ledger.has_warned_of_dots):
        return
    for sample in samples:
        fields = [field for field in sample if field[:2] != "__"] if len(sample) > USUAL else []
        if have_dots_in_key(fields):
            import logging

            if ledger is not None:
                ledger.has_warned_of_dots = True
            reason = visible(f"{url}: {sample['__key__']}: {dots_in_key(len(fields), fields[0])}")
            logging.getLogger("tarshards").warning(reason)
            return


def wrong_number(samples: int, expected: int, url: str) -> SampleError:
    """Return the error for a shard whose number of samples differs from its manifest."""
    reason = f"{samples} samples, but {expected} in the manifest; check the shard with `tarcheck`, or run `tarindex`"
    return SampleError(reason, url=url)
