"""``tarshards chaos``: a loader reads shards during faults, and must deliver each sample once or report why not.

A round is a *world*: a loader, the storage of its shards, ranks and workers, a fault (*nemesis*), stops and resumes.
All are drawn from the seed and the round's number, so these two repeat a round. The user's shards are only read: the
beginnings of some are copied, and only copies are damaged or served with faults. After each round, the samples that the
ranks delivered are compared with the plan: every sample must come once, at its position, with its bytes, unless an
error or the ledger names it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards import __version__
from tarshards.parallel.forks import cached_property
from tarshards.storage.location import Location
from tarshards.testing.chains import LoaderFault
from tarshards.testing.runs import MASTER, free_port

if TYPE_CHECKING:
    from tarshards.testing.chaos_shards import ShardCopies

CHOSEN = 4  # shards taken from those given
WHOLE = 1 << 28  # shards of at most this many bytes are read whole
LIMIT = 60.0  # seconds without a sample from any rank, after which they are taken to hang
AFTER_ERROR = 5.0  # the same, once a rank has ended with an error
LEGS = 8
BLOCK = 4  # samples per block of the plan, so that small sets have many blocks
BAD = ("silent", "hung", "died", "audit")
RESTARTED = ("kill a rank", "kill a worker", "stop a worker")  # an error caused by these restarts training
PLANNED = ("planned", "arrays", "torch")
ELASTIC = ("arrays", "torch")  # one state serves all ranks, and other numbers of ranks and workers


Known = Sequence[dict[str, str]]  # for each version, what a user's loader delivers: texts by key


@dataclass(frozen=True)
class RoundWorld:
    """A round: *reader* is one of ours, or ``module:function``; *source* says where its shards are stored."""

    seed: int
    number: int
    reader: str
    source: str  # "copy", "http", or "storage": the user's own
    nemesis: str
    shuffle: bool
    batch: int
    goes_on: bool  # whether on_error= is a ledger

    @property
    def rng(self) -> random.Random:
        return random.Random(f"chaos/{self.seed}/{self.number}/legs")


@dataclass
class RoundOutcome:
    """The outcome of a round: *exact*, *reported* (by an error or the ledger) or one of BAD, with counts."""

    outcome: str = "exact"
    lost: int = 0
    repeated: int = 0
    wrong: int = 0
    misplaced: int = 0
    words: str = ""
    legs: list[str] = field(default_factory=list)


class Nemesis(NamedTuple):
    """A fault: *arm* changes the jobs of a leg, or the files that it reads. *exact*: no sample may be missing."""

    arm: Callable[[Round], None]
    fault: str  # one of FAULTS, or empty for no fault
    sources: tuple[str, ...] = ("copy", "http", "storage")
    readers: tuple[str, ...] = ()  # empty for all readers; "user" stands for the user's loader
    exact: bool = False
    versions: tuple[int, ...] = (0,)  # the versions of the shards that may be delivered


NEMESES: dict[str, Nemesis] = {}
FAULTS = ("processes", "network", "shards", "machine")


def nemesis(name: str, fault: str, **options: Any) -> Callable[[Callable[[Round], None]], Callable[[Round], None]]:
    """Register a fault."""

    def register(arm: Callable[[Round], None]) -> Callable[[Round], None]:
        NEMESES[name] = Nemesis(arm, fault, **options)
        return arm

    return register


def draw(
    seed: int, number: int, readers: Sequence[str], storage: Sequence[str], faults: Sequence[str] = FAULTS
) -> RoundWorld:
    """Return the world of a round; the readers in *storage* may read the user's own shards.

    Each reader meets every nemesis once before any of them repeats; the order is the same for all readers.
    """
    rng = random.Random(f"chaos/{seed}/{number}")
    turn, which = divmod(number, len(readers))
    reader = readers[which]
    kind = "user" if ":" in reader else reader
    left_out = {"storage": reader not in storage, "http": "network" not in faults}
    fit = {
        name: sources
        for name, each in NEMESES.items()
        if (not each.readers or kind in each.readers)
        and each.fault in ("", *faults)
        and (sources := [source for source in each.sources if not left_out.get(source)])
    }
    lap, turn = divmod(turn, len(fit))
    order = sorted(NEMESES)
    random.Random(f"chaos/{seed}/lap {lap}").shuffle(order)
    name = [name for name in order if name in fit][turn]
    source = rng.choice(fit[name])
    return RoundWorld(seed, number, reader, source, name, rng.random() < 0.7, rng.randrange(1, 8), rng.random() < 0.5)


class Round:
    """One round, run in *folder*; nemeses change *jobs*, *files* (a copy of the shards) and the *site*."""

    def __init__(self, world: RoundWorld, copies: ShardCopies, urls: list[str], folder: Path, known: Known = ()):
        self.world = world
        self.copies = copies
        self.urls = urls
        self.folder = folder
        self.rng: Any = world.rng
        self.known = known
        self.jobs: list[dict[str, Any]] = []
        self.others: list[dict[str, Any]] = []  # jobs of other users of the cache
        self.site: Any = None
        self.files: Path = folder / "files"
        self.is_armed: bool = False

    def run(self) -> RoundOutcome:
        """Run the legs until the epoch is over, or a rank reports an error that the nemesis explains."""
        from tarshards.testing.faulty_server import serving
        from tarshards.testing.unreliable_site import UnreliableSite

        self.folder.mkdir()
        shutil.copytree(self.copies.folder / "0", self.files)
        with ExitStack() as stack:
            if self.world.source == "http":
                self.site = UnreliableSite(files=self.copies.versions, seed=self.rng.randrange(1 << 30))
                stack.enter_context(serving(self.site))
            return self._run()

    def _run(self) -> RoundOutcome:
        outcome, counted, lost, state, start = RoundOutcome(), list[DeliveredSample](), list[Any](), None, 0
        ranks, workers = self.rng.randrange(1, 4), self.rng.randrange(3)
        armed = self.rng.randrange(2)
        for leg in range(LEGS):
            if leg and self.world.reader in ELASTIC:
                ranks, workers = self.rng.randrange(1, 4), self.rng.randrange(3)
            stop = self.rng.choice([None, self.rng.randrange(1, 12)]) if leg < LEGS - 2 else None
            port = free_port()
            self.jobs = [self._job(leg, rank, ranks, workers, stop, state, port) for rank in range(ranks)]
            self.others = []
            if arms := not self.is_armed and (leg == armed or stop is None):
                self.is_armed = True
                NEMESES[self.world.nemesis].arm(self)
            results = list(map(RankResult.of, self.jobs)) if run_jobs(self.jobs, self.others) else []
            outcome.legs.append(f"{ranks} ranks, {workers} workers, stop at {stop}: {' | '.join(map(str, results))}")
            if not results:
                stacks = [path.read_text(errors="replace") for path in sorted(self.folder.glob("*.stderr"))]
                outcome.outcome, outcome.words = "hung", f"no sample for {LIMIT:.0f} seconds\n{''.join(stacks)}"
                return outcome
            for name in ("audit", "died"):
                for words in filter(None, (result.fault(name, self) for result in results)):
                    outcome.outcome, outcome.words = name, words
                    return outcome
            errors = [result.error for result in results if result.error]
            lost += [entry for result in results for entry in result.lost]
            is_over = all(result.is_read for result in results)
            if is_over or (errors and not (arms and self.world.nemesis in RESTARTED)):
                for rank, result in enumerate(results):
                    counted += result.samples(rank, ranks, start, None)
                break
            common = set.intersection(*(set(result.saved) for result in results))
            if common:
                step = max(common)
                for rank, result in enumerate(results):
                    counted += result.samples(rank, ranks, start, step)
                states = [f"{job['output']}.{step}" for job in self.jobs]
                state, start = states, len(counted)
                if self.world.reader in ELASTIC and not _are_equal(states):
                    outcome.outcome, outcome.words = "silent", "the states of the ranks differ"
                    return outcome
            found = {*(sample.key for sample in counted), *(key for _, key in lost)}
            if len(counted) >= len(self.expected) or found.issuperset(self.expected):  # the state is of the next epoch
                errors = []
                break
        else:
            outcome.outcome, outcome.words = "hung", f"not over after {LEGS} legs"
            return outcome
        return self._judge(outcome, counted, errors, lost)

    def _job(
        self, leg: int, rank: int, ranks: int, workers: int, stop: int | None, state: Any, port: int
    ) -> dict[str, Any]:
        world = self.world
        cache = self.folder / "cache"
        cache.mkdir(exist_ok=True)
        names: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        names |= {"MASTER_ADDR": MASTER, "MASTER_PORT": port}
        return {
            "reader": world.reader,
            "urls": self._urls(),
            "output": str(self.folder / f"leg-{leg}-rank-{rank}"),
            "environment": {name: str(value) for name, value in names.items()},
            "state": None if state is None else state[0 if world.reader in ELASTIC else rank],
            "shuffle": world.shuffle,
            "seed": world.number,
            "batch": world.batch,
            "block": BLOCK,
            "workers": workers if world.reader != "arrays" else 1 + workers,
            "fields": self.copies.fields,
            "goes_on": world.goes_on,
            "cache": str(cache) if world.source == "http" and "cache" in world.nemesis else None,
            "every": 3,
            "stop": stop,
            "at": {},
            "machine": {},
            "pace": 0.002,
            "is_ended": False,
        }

    def _urls(self) -> list[str]:
        if self.world.source == "storage":
            return self.urls
        folder = self.site.url if self.world.source == "http" else str(self.files)
        return [f"{folder}/{name}" for name in self.copies.names]

    @cached_property
    def expected(self) -> list[str]:
        """The keys in the planned order; in any order if the reader has no plan."""
        if self.world.reader in PLANNED:
            from tarshards.stream.stream import Stream

            names = [str(self.copies.folder / "0" / name) for name in self.copies.names]
            names = self.urls if self.world.source == "storage" else names
            options: dict[str, Any] = {
                "index": True,
                "shuffle": self.world.shuffle,
                "seed": self.world.number,
                "block": BLOCK,
            }
            return [sample["__key__"] for sample in Stream.from_shards(names, **options)]
        return [key for samples in self._truth(0).values() for key in samples]

    def _truth(self, version: int) -> dict[str, dict[str, dict[str, str]]]:
        """Return the samples by shard and key, as tarfile reads them."""
        return self.copies.whole if self.world.source == "storage" else self.copies.truth[version]

    def _shard_of(self, key: str) -> str:
        return next(name for name, samples in self._truth(0).items() if key in samples)

    def _judge(
        self, outcome: RoundOutcome, counted: list[DeliveredSample], errors: list[str], lost: list[Any]
    ) -> RoundOutcome:
        """Compare the *counted* samples with the plan, except those that *errors* or ledgers (*lost*) name."""
        counts = Counter(sample.key for sample in counted)
        missing = Counter(self.expected)
        missing.subtract(counts)
        shards, keys = {shard for shard, _ in lost}, {key for _, key in lost}
        unnamed = [
            key
            for key, count in missing.items()
            if count > 0 and not errors and key not in keys and self._shard_of(key) not in shards
        ]
        outcome.lost = len(unnamed)
        outcome.repeated = sum(-count for count in missing.values() if count < 0)
        outcome.wrong = sum(not self._is_right(sample) for sample in counted)
        if self.world.reader in PLANNED and not lost and not errors:
            outcome.misplaced = sum(
                sample.position >= len(self.expected) or self.expected[sample.position] != sample.key
                for sample in counted
            )
        if outcome.lost + outcome.repeated + outcome.wrong + outcome.misplaced:
            outcome.outcome = "silent"
            outcome.words = " ".join([*errors, *unnamed[:3]])
        elif errors or +missing:
            outcome.outcome = "reported"
            outcome.words = errors[0] if errors else f"{len(+missing)} samples in the ledger"
        return outcome

    def _is_right(self, sample: DeliveredSample) -> bool:
        """Whether a sample has the fields that tarfile, or the user's loader without faults, reads from one version."""
        versions = NEMESES[self.world.nemesis].versions
        if ":" in self.world.reader:
            is_known = self.known and sample.key in self.known[0]
            return not is_known or any(self.known[version].get(sample.key) == sample.text for version in versions)
        for version in versions:
            for samples in self._truth(version).values():
                fields = samples.get(sample.key)
                if fields is None:
                    continue
                if self.world.reader == "arrays":
                    fields = {name: fields[name] for name in self.copies.fields}
                if fields == sample.fields:
                    return True
        return False


class DeliveredSample(NamedTuple):
    """A sample that a rank delivered; its position in the epoch follows from the rank and the step."""

    key: str
    fields: dict[str, str]
    position: int

    @property
    def text(self) -> str:
        """The digests of all fields as one text."""
        return json.dumps(self.fields, sort_keys=True)


@dataclass
class RankResult:
    """What one rank recorded before it ended."""

    job: dict[str, Any]
    steps: list[list[Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    is_read: bool = False
    has_ended: bool = False
    error: str = ""
    audit: str = ""
    lost: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, job: dict[str, Any]) -> RankResult:
        result = cls(job)
        path = Path(job["output"])
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
            message = json.loads(line)
            if "samples" in message:
                result.steps.append(message["samples"])
            if "saved" in message:
                result.saved.append(message["saved"])
            result.is_read |= "read" in message
            result.has_ended |= not {"ended", "error", "audit"}.isdisjoint(message)
            result.error, result.audit = message.get("error", result.error), message.get("audit", result.audit)
            result.lost = message.get("lost", result.lost)  # the message lists all so far
        return result

    def samples(self, rank: int, ranks: int, start: int, stop: int | None) -> Iterator[DeliveredSample]:
        """Yield the samples of the steps up to *stop*; the leg began at position *start*."""
        keys = (sample for step in self.steps[:stop] for sample in step)
        for number, (key, fields) in enumerate(keys):
            yield DeliveredSample(key, fields, start + rank + number * ranks)

    def fault(self, name: str, round: Round) -> str:
        """Return the text of a failed audit (*name* "audit"), or of an end that the nemesis does not explain."""
        if name == "audit":
            return self.audit
        is_killed = "kill a rank" in round.world.nemesis
        if self.has_ended or is_killed or self.job["is_ended"]:
            return ""
        last = Path(f"{self.job['output']}.stderr").read_text(errors="replace").strip().split("\n")[-1]
        return f"a rank has ended after {len(self.steps)} steps without an error, with these words: {last}"

    def __str__(self) -> str:
        return f"{len(self.steps)} steps{', read' if self.is_read else ''} {self.error}".strip()


def _are_equal(states: list[str]) -> bool:
    import pickle

    return all(pickle.loads(Path(path).read_bytes()) == pickle.loads(Path(states[0]).read_bytes()) for path in states)


def run_jobs(jobs: list[dict[str, Any]], others: Sequence[dict[str, Any]] = ()) -> bool:
    """Run a process for each rank's job and for each of the *others*; wake processes that have stopped.

    If a rank is killed, the others are ended too, as launchers do. If a rank ends with an error, the others are ended
    when they deliver no more samples, and their jobs record that. Return False if all hang.
    """
    from tarshards.testing.chaos_rank import STOPPED, run

    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=run, args=(job,)) for job in (*jobs, *others)]
    ranks = processes[: len(jobs)]
    for process in processes:
        process.start()
    last, limit, delivered = time.monotonic(), LIMIT, 0
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < last + limit:
            next(process for process in processes if process.is_alive()).join(STOPPED)
            if any(process.exitcode == -signal.SIGKILL for process in ranks):
                return True
            for process in processes:
                if process.is_alive():
                    _wake(process.pid or 0)
            size = sum(os.path.getsize(job["output"]) for job in (*jobs, *others) if os.path.exists(job["output"]))
            if size > delivered:
                last, delivered = time.monotonic(), size
            if any(process.exitcode for process in ranks):
                limit = AFTER_ERROR
        hung = [process for process in processes if process.is_alive()]
        if hung and limit == AFTER_ERROR:
            for job, process in zip(jobs, ranks):
                job["is_ended"] = process.is_alive()
            return True
        for process in hung:
            os.killpg(process.pid or 0, signal.SIGUSR1)
        time.sleep(STOPPED if hung else 0)  # while they write their stacks
        return not hung
    finally:
        for process in processes:
            try:
                os.killpg(process.pid or 0, signal.SIGKILL)  # its workers too
            except ProcessLookupError:
                process.kill()
            process.join()
            process.close()


def _wake(process: int) -> None:
    try:
        if Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("T"):
            os.kill(process, signal.SIGCONT)
    except (FileNotFoundError, ProcessLookupError):
        pass


# Faults of processes.


@nemesis("nothing", "", exact=True)
def nothing(round: Round) -> None:
    """Every sample must be delivered."""


def _at_a_step(job: dict[str, Any], round: Round, *action: Any) -> None:
    job["at"].setdefault(str(round.rng.randrange(1, 8)), []).append(action)


@nemesis("kill a rank", "processes", exact=True)
def kill_a_rank(round: Round) -> None:
    """Training is restarted from the last state that all ranks have saved."""
    _at_a_step(round.rng.choice(round.jobs), round, "kill")


@nemesis("stop a rank", "processes", exact=True)
def stop_a_rank(round: Round) -> None:
    _at_a_step(round.rng.choice(round.jobs), round, "stop")


@nemesis("kill a worker", "processes", readers=("torch", "user"), exact=True)
def kill_a_worker(round: Round) -> None:
    _at_a_step(round.rng.choice(round.jobs), round, "kill worker", round.world.number)


@nemesis("stop a worker", "processes", readers=("torch", "user"), exact=True)
def stop_a_worker(round: Round) -> None:
    _at_a_step(round.rng.choice(round.jobs), round, "stop worker", round.world.number)


def _other_user(round: Round, action: str) -> None:
    other = {**round.jobs[0], "output": str(round.folder / "other"), "stop": None, "at": {}, "state": None}
    other["environment"] = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    _at_a_step(other, round, action)
    round.others.append(other)


@nemesis("kill another user of the cache", "processes", sources=("http",), readers=("stream", *PLANNED), exact=True)
def kill_another_user(round: Round) -> None:
    _other_user(round, "kill")


@nemesis("stop another user of the cache", "processes", sources=("http",), readers=("stream", *PLANNED), exact=True)
def stop_another_user(round: Round) -> None:
    _other_user(round, "stop")


# Faults of the network.


@nemesis("failing answers", "network", sources=("http",), exact=True)
def failing_answers(round: Round) -> None:
    """Resets, short and slow answers, 429 and 503, redirects: faults that a retry overcomes."""
    from tarshards.testing.unreliable_site import PASSING

    round.site.rate, round.site.kinds = round.rng.choice([0.05, 0.2, 0.5]), PASSING


@nemesis("wrong answers", "network", sources=("http",), versions=(0, 1, 2))
def wrong_answers(round: Round) -> None:
    """Wrong ranges, lengths, ETags, encodings and pages, and changing files."""
    from tarshards.testing.unreliable_site import PASSING, WRONG

    round.site.rate, round.site.kinds = round.rng.choice([0.05, 0.2, 0.5]), PASSING + WRONG


# Faults of shards, in copies of them.


def _victim(round: Round) -> Path:
    return round.files / round.rng.choice(round.copies.names)


@nemesis("a truncated shard", "shards", sources=("copy",))
def truncated(round: Round) -> None:
    path = _victim(round)
    os.truncate(path, round.rng.randrange(1, path.stat().st_size - 1024))


@nemesis("zeros over some members of a shard", "shards", sources=("copy",))
def zeros(round: Round) -> None:
    path = _victim(round)
    headers = [*round.copies.headers(path.name)]
    begin = round.rng.randrange(len(headers) - 1)
    end = round.rng.randrange(begin + 1, len(headers))
    data = bytearray(path.read_bytes())
    data[headers[begin] : headers[end]] = bytes(headers[end] - headers[begin])
    path.write_bytes(data)


@nemesis("a flipped bit in a header", "shards", sources=("copy",))
def flipped_bit(round: Round) -> None:
    path = _victim(round)
    data = bytearray(path.read_bytes())
    header = round.rng.choice([*round.copies.headers(path.name)])
    data[header + round.rng.choice([0, 124, 130, 150, 156])] ^= 1  # name, size, checksum, type
    path.write_bytes(data)


@nemesis("a stale index", "shards", sources=("copy",), versions=(0, 1, 2))
def stale_index(round: Round) -> None:
    path = _victim(round)
    path.write_bytes(round.copies.content(path.name, round.rng.choice([1, 2])))


@nemesis("a damaged index", "shards", sources=("copy",), readers=PLANNED)
def damaged_index(round: Round) -> None:
    path = _victim(round).with_suffix(".tar.index")
    data = bytearray(path.read_bytes())
    if round.rng.random() < 0.5:
        del data[round.rng.randrange(len(data)) :]
    for _ in range(min(len(data), round.rng.randrange(1, 4))):
        data[round.rng.randrange(len(data))] ^= 1 << round.rng.randrange(8)
    path.write_bytes(data)


@nemesis("a missing shard", "shards", sources=("copy",))
def missing_shard(round: Round) -> None:
    _victim(round).unlink()


@nemesis("a shard that is replaced meanwhile", "shards", sources=("copy",), versions=(0, 1, 2))
def replaced_meanwhile(round: Round) -> None:
    path = _victim(round)
    other = round.folder / "other.tar"
    other.write_bytes(round.copies.content(path.name, round.rng.choice([1, 2])))
    _at_a_step(round.jobs[0], round, "replace", str(other), str(path))


@nemesis("a shard that is truncated meanwhile", "shards", sources=("copy",))
def truncated_meanwhile(round: Round) -> None:
    path = _victim(round)
    _at_a_step(round.jobs[0], round, "truncate", str(path), round.rng.randrange(path.stat().st_size - 1024))


@nemesis("a shard that is removed meanwhile", "shards", sources=("copy",))
def removed_meanwhile(round: Round) -> None:
    _at_a_step(round.jobs[0], round, "remove", str(_victim(round)))


# Faults of the machine.


def _on_all(round: Round, name: str, value: Any) -> None:
    for job in round.jobs:
        job["machine"][name] = value


@nemesis("few open files", "machine")
def few_open_files(round: Round) -> None:
    _on_all(round, "files", round.rng.randrange(12))


@nemesis("a full disk for the cache", "machine", sources=("http",), readers=("stream", *PLANNED), exact=True)
def full_disk(round: Round) -> None:
    _on_all(round, "disk", round.jobs[0]["cache"])


@nemesis("a read-only cache", "machine", sources=("http",), readers=("stream", *PLANNED), exact=True)
def read_only(round: Round) -> None:
    _on_all(round, "read-only", round.jobs[0]["cache"])


@nemesis("a clock that jumps", "machine", exact=True)
def jumping_clock(round: Round) -> None:
    _on_all(round, "clock", round.rng.choice([-1, 1]) * 10 ** round.rng.randrange(9))


@nemesis("a small /dev/shm", "machine", readers=("torch", "user"))
def small_shm(round: Round) -> None:
    _on_all(round, "shm", 1 << round.rng.randrange(13, 20))


# The suite and its report.


@dataclass
class Suite:
    """Rounds over the same shards, and their outcomes."""

    urls: list[str]
    seed: int
    readers: list[str]
    storage: list[str] = field(default_factory=list)  # readers that may read the user's own shards
    faults: Sequence[str] = FAULTS
    known: Known = ()
    rounds: list[tuple[RoundWorld, RoundOutcome]] = field(default_factory=list)

    def learn(self, copies: ShardCopies, folder: Path) -> None:
        """Let a user's loader read all versions without faults, the first twice: content that differs is not compared.

        Raises LoaderFault if it does not reach the end of the first version.
        """
        for reader in self.readers:
            if ":" in reader:
                runs = [self._undisturbed(reader, copies, version, folder / f"{version}") for version in (0, 1, 2)]
                if all(runs) and self._undisturbed(reader, copies, 0, folder / "again") == runs[0]:
                    self.known = runs

    def _undisturbed(self, reader: str, copies: ShardCopies, version: int, folder: Path) -> dict[str, str]:
        folder.mkdir(parents=True)
        round = Round(RoundWorld(self.seed, 0, reader, "copy", "nothing", False, 1, False), copies, self.urls, folder)
        round.files = copies.folder / f"{version}"
        job = round._job(0, 0, 1, 0, None, None, free_port())
        run_jobs([job])
        result = RankResult.of(job)
        if version == 0 and not result.is_read:
            raise LoaderFault("raised", f"{reader}, with nothing wrong: {result.error or result.fault('died', round)}")
        return {sample.key: sample.text for sample in result.samples(0, 1, 0, None)}

    def play(self, copies: ShardCopies, number: int, folder: Path) -> RoundOutcome:
        """Run one round in a new *folder*, which is removed."""
        world = draw(self.seed, number, self.readers, self.storage, self.faults)
        try:
            outcome = Round(world, copies, self.urls, folder, self.known).run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.rounds.append((world, outcome))
        return outcome

    @property
    def names(self) -> list[str]:
        """The shards as reports name them, without credentials."""
        return [Location(url).name for url in self.urls]

    @property
    def bad(self) -> list[tuple[RoundWorld, RoundOutcome]]:
        return [played for played in self.rounds if played[1].outcome in BAD]

    def line(self, world: RoundWorld) -> str:
        """Return the command that repeats a round."""
        loader = f" --loader {world.reader}" if ":" in world.reader else ""
        faults = f" --faults {','.join(self.faults)}" if {*self.faults} != {*FAULTS} else ""
        return f"tarshards chaos --seed {world.seed} --round {world.number}{loader}{faults} {' '.join(self.names)}"

    def as_json(self) -> dict[str, Any]:
        """Return all rounds in the types of JSON."""
        rounds = [{**asdict(world), **asdict(outcome), "repeat": self.line(world)} for world, outcome in self.rounds]
        return {"version": __version__, "seed": self.seed, "shards": self.names, "rounds": rounds}

    def as_markdown(self) -> str:
        """Return a table of all readers and nemeses with the outcomes, and each bad round."""
        lines = [
            f"# Chaos, tarshards {__version__}, seed {self.seed}, {time.strftime('%Y-%m-%d')}\n",
            f"{len(self.rounds)} rounds over the beginnings of {', '.join(self.names)}. *exact*: each sample once, at",
            "its position, with its bytes. *reported*: fewer, and an error or the ledger names what is missing.\n",
            "| reader | nemesis | rounds | exact | reported | silent | hung | died | lost | repeated | wrong |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        kinds = sorted({(world.reader, world.nemesis) for world, _ in self.rounds})
        for reader, name in kinds:
            some = [outcome for world, outcome in self.rounds if (world.reader, world.nemesis) == (reader, name)]
            counts = Counter(outcome.outcome for outcome in some)
            cells = [len(some), counts["exact"], counts["reported"], counts["silent"] + counts["audit"], counts["hung"]]
            cells += [
                counts["died"],
                *(sum(getattr(each, of) for each in some) for of in ("lost", "repeated", "wrong")),
            ]
            lines.append(f"| {reader} | {name} | {' | '.join(map(str, cells))} |")
        for world, outcome in self.bad:
            lines += [f"\n## Round {world.number}: {world.nemesis}, {outcome.outcome}\n", f"    {self.line(world)}\n"]
            shown = ", ".join(f"{of} {getattr(outcome, of)}" for of in ("lost", "repeated", "wrong", "misplaced"))
            lines += [f"{shown}. {outcome.words}\n", *(f"- {leg}" for leg in outcome.legs)]
        return "\n".join(lines) + "\n"


def can_read(reader: str, urls: list[str]) -> bool:
    """Whether a reader can read the shards in their storage: they must be small, and indexed for planned epochs."""
    from tarshards.storage.location import Location

    locations = [Location.of(url) for url in urls]
    if any(location.is_stream for location in locations):
        return False
    sizes = [location.size() for location in locations]
    is_small = None not in sizes and sum(size or 0 for size in sizes) <= WHOLE
    return is_small and (reader not in PLANNED or all(location.sibling(".index").exists() for location in locations))


def our_readers() -> list[str]:
    return ["stream", "planned", "arrays", *(["torch"] if find_spec("torch") else [])]


def preload(readers: Sequence[str]) -> None:
    """Import the modules of the ranks once, in the server that forks them."""
    modules = ["__main__", "tarshards.testing.chaos_rank"]
    modules += [reader.partition(":")[0] for reader in readers if ":" in reader]
    modules += ["tarshards.loaders.torch.shard_loader"] * ("torch" in readers)
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
