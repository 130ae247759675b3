"""The truth table: what each peer delivers, loses, repeats and reports when data, network, workers or ranks fail.

Each peer uses its default error handling, and every case runs in a new process. A fault counts only if the same work
on undamaged data delivers everything.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import sets
from environments import Peer, all_peers, is_here, make_all
from fault_cases import LIMIT, VICTIM, Case, Members, Outcome, StopCaseError
from fault_table import STALL, table, verdict
from measure import DATA
from sets import Sample
from wrong_server import serving

RESULTS = DATA / "suite" / "faults.json"
SMALL, LARGE = (50,) * 4, (800,) * 4  # the samples of each shard
EVEN, UNEVEN = (48, 48), (96, 48, 16)  # for two ranks
TAKEN = 20  # batches before a resume
MIDDLE = 75  # the sample in the middle of the shard that is damaged
SMOKE_PEERS, SMOKE_FAULTS = ("tarfile_", "webdataset_", "tarshards_"), ("truncation", "bad header", "interleaved")


def raw(counts: Sequence[int], size: int = 8192) -> list[list[Sample]]:
    """Return shards of samples of random bytes."""
    return cut((sample(i, bin=random.Random(i).randbytes(size)) for i in range(sum(counts))), counts)


@functools.cache
def photos(counts: Sequence[int]) -> list[list[Sample]]:
    """Return shards of samples of photographs, 256 x 256."""
    return cut((sample(i, jpg=fields["jpg"]) for i, fields in enumerate(sets.photos(256, 256)(sum(counts)))), counts)


def samples(case: Case, counts: Sequence[int] = SMALL) -> list[list[Sample]]:
    """Return bytes, for a peer that delivers any; else photographs."""
    return (raw if case.task == "stream" else photos)(counts)


def sample(label: int, **fields: bytes) -> Sample:
    return {"__key__": f"{label:08d}", **fields, "cls": b"%d" % label}


def cut(samples: Iterable[Sample], counts: Sequence[int]) -> list[list[Sample]]:
    every = list(samples)
    return [every[end - count : end] for count, end in zip(counts, accumulate(counts))]


def flipped(content: bytes, start: int, count: int) -> bytes:
    """Return *content* with one bit of *count* bytes flipped."""
    return content[:start] + bytes(byte ^ 1 for byte in content[start : start + count]) + content[start + count :]


# The work without a fault, which shows whether a peer supports it and what it always logs.


def read(case: Case) -> Outcome:
    return case.deliver(case.lay(samples(case)))


def read_compressed(case: Case) -> Outcome:
    return case.deliver(case.lay(samples(case), compressed=True))


def decode(case: Case) -> Outcome:
    return case.deliver(case.lay(photos(SMALL)), "decode", indexed=True)


def fetch(case: Case, wrong: str = "nothing", limit: float = LIMIT) -> Outcome:
    """Read shards over HTTP; *wrong* happens once, in the middle of the second."""
    laid = case.lay(samples(case))
    with serving(case.live, wrong, laid.victim.name) as site:
        urls = [f"{site}/{Path(url).name}" for url in laid.data.urls]
        return case.deliver(laid, urls=urls, limit=limit)


def two_workers(case: Case, *, kill: bool = False) -> Outcome:
    if case.task in case.peer.threads:
        raise StopCaseError("cannot", "its workers are threads")
    return case.deliver(case.lay(raw(LARGE, 2048)), workers=2, kill=kill, indexed=True)


def resume(case: Case, workers: int = 2) -> Outcome:
    """Stop an epoch of two workers after some batches; resume in a new process with *workers*."""
    laid = case.lay(raw(LARGE, 2048))
    case.index(laid)
    state = {"state": str(case.live / "state")}
    begun = case.run("start", laid.data, workers=2, batches=TAKEN, **state)
    if begun.ending != "end":
        return case.judge(laid, [begun])
    outcome = case.judge(laid, [begun, case.run("restore", laid.data, workers=workers, **state)])
    outcome.ranks = ()
    return outcome


def two_ranks(case: Case, counts: Sequence[int] = EVEN) -> Outcome:
    """Read one epoch in two processes with ranks as set by torchrun."""
    laid = case.lay(samples(case, counts))
    case.index(laid)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, **world} for rank in "01"]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda rank: case.run(case.task, laid.data, ranks=rank), ranks))
    return case.judge(laid, runs)


# The faults.


def truncation(case: Case) -> Outcome:
    """The second shard (in a peer's own format: the largest file) ends in the middle of a member."""
    laid = case.lay(samples(case))
    laid.damage(lambda content: content[: len(content) // 2])
    return case.deliver(laid)


def bad_header(case: Case) -> Outcome:
    """One bit of a checksum amid a shard is flipped; in a peer's own format, 8 bits at its largest file's start."""
    laid = case.lay(samples(case))
    if laid.victim.read_bytes() in laid.payloads.values():
        raise StopCaseError("cannot", "its files have no headers")
    if case.peer.own:
        laid.damage(lambda content: flipped(content, 0, 8))
    else:
        laid.damage(lambda content: flipped(content, content.index(b"%08d." % MIDDLE) + 150, 1))
        laid.sound.discard(MIDDLE)
    return case.deliver(laid)


def bad_gzip(case: Case) -> Outcome:
    """One bit of the content of a .tar.gz is flipped, so its CRC does not match."""
    laid = case.lay(samples(case), compressed=True)
    if not laid.victim.read_bytes().startswith(b"\x1f\x8b"):
        raise StopCaseError("cannot", "its files are not gzip")
    payload = laid.payloads[MIDDLE]

    def flip(content: bytes) -> bytes:
        start = content.find(payload[:64])
        return flipped(content, start + len(payload) // 2 if start >= 0 else len(content) // 2, 1)

    laid.damage(flip)
    return case.deliver(laid)


def duplicate_key(case: Case, distance: int = 1) -> Outcome:
    """A sample has the key of the sample *distance* before it."""
    shards = samples(case)
    twice = {**samples(case, (*SMALL, 1))[-1][0], "__key__": f"{MIDDLE:08d}"}
    victim, place = shards[VICTIM], MIDDLE - SMALL[0] + distance
    shards = [*shards[:VICTIM], [*victim[:place], twice, *victim[place:]], *shards[VICTIM + 1 :]]
    return case.deliver(case.lay(shards))


def interleaved(case: Case) -> Outcome:
    """The members of two neighbours are ordered a.bin, b.bin, a.cls, b.cls."""
    first = 2 * (MIDDLE - SMALL[0])  # each sample is two members

    def arrange(members: Members) -> Members:
        one, two, three, four = members[first : first + 4]
        return [*members[:first], one, three, two, four, *members[first + 4 :]]

    return case.deliver(case.lay(samples(case), arrange=arrange))


def unreadable_image(case: Case) -> Outcome:
    """One JPEG of many ends in its middle."""

    def arrange(members: Members) -> Members:
        broken = f"{MIDDLE:08d}.jpg"
        return [(name, content[: len(content) // 2] if name == broken else content) for name, content in members]

    laid = case.lay(photos(SMALL), arrange=arrange)
    laid.sound.discard(MIDDLE)
    return case.deliver(laid, "decode", indexed=True)


@dataclass(frozen=True)
class Fault:
    """A column of the table, or one of the forms of it; *sound* is the same work without the fault."""

    number: int
    name: str
    happens: Callable[[Case], Outcome]
    sound: Callable[[Case], Outcome]
    task: str = "stream"
    plain: str = ""  # why it can occur only in plain tars


KEYS, LOCAL = "its own format holds samples, not members with keys", "its own format is read from local files here"
FAULTS = (
    Fault(1, "truncation", truncation, read),
    Fault(2, "bad header", bad_header, read),
    Fault(3, "bad gzip", bad_gzip, read_compressed),
    Fault(4, "duplicate key, next to it", duplicate_key, read, plain=KEYS),
    Fault(4, "duplicate key, 10 on", functools.partial(duplicate_key, distance=10), read, plain=KEYS),
    Fault(5, "interleaved", interleaved, read, plain=KEYS),
    Fault(6, "unreadable image", unreadable_image, decode, "decode"),
    Fault(7, "reset", functools.partial(fetch, wrong="reset"), fetch, plain=LOCAL),
    Fault(8, "stall", functools.partial(fetch, wrong="stall", limit=STALL), fetch, plain=LOCAL),
    Fault(9, "length too large", functools.partial(fetch, wrong="length too large"), fetch, plain=LOCAL),
    Fault(9, "length too small", functools.partial(fetch, wrong="length too small"), fetch, plain=LOCAL),
    Fault(10, "killed worker", functools.partial(two_workers, kill=True), two_workers),
    Fault(11, "resume on 1 worker", functools.partial(resume, workers=1), resume, "resume"),
    Fault(11, "resume on 3 workers", functools.partial(resume, workers=3), resume, "resume"),
    Fault(12, "uneven shards", functools.partial(two_ranks, counts=UNEVEN), two_ranks),
)


def examine(peer: Peer, python: str | OSError, faults: Iterable[Fault], folder: Path) -> dict[str, Outcome]:
    """Return the results of *faults* for one peer."""
    sound: dict[Any, Outcome] = {}
    outcomes = {}
    case = Case(peer, str(python), folder)
    for fault in faults:
        task = case.task if fault.task == "stream" else fault.task
        reason = str(python) if isinstance(python, OSError) else peer.reason(task) or (peer.own and fault.plain)
        if reason:
            outcomes[fault.name] = Outcome("cannot", reason)
            continue
        work = read if peer.own and fault.sound is read_compressed else fault.sound
        if work not in sound:
            sound[work] = attempt(case, work)
            if work is read and sound[read].ending == "said":  # some need an index even to read in order
                case.always_index = True
                sound[read] = attempt(case, read)
        outcomes[fault.name] = judge(sound[work], lambda fault=fault: attempt(case, fault.happens))
        print(f"{peer.name}, {fault.name}: {verdict(outcomes[fault.name])}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def attempt(case: Case, work: Callable[[Case], Outcome]) -> Outcome:
    try:
        return work(case)
    except StopCaseError as stop:
        return stop.outcome


def judge(sound: Outcome, happen: Callable[[], Outcome]) -> Outcome:
    """Return the result with the fault, compared with the result without a fault."""
    if sound.ending == "cannot":
        return sound
    if sound.ending != "end" or not sound.whole:
        counts = [f"{sound.delivered} of {sound.total}", f"{sound.duplicated} twice", f"{sound.altered} altered"]
        ending = {"end": ""}.get(sound.ending, f"; {sound.ending} {sound.words}".rstrip())
        return Outcome("cannot", f"not right without the fault: {', '.join(counts)}{ending}")
    outcome = happen()
    known = {shape(line) for line in sound.log}
    news = [line.strip() for line in outcome.log if line.strip() and shape(line) not in known]
    if outcome.ending == "end" and not outcome.whole and news:
        outcome.ending, outcome.words = "warned", next(filter(worried, reversed(news)), news[-1])
    if outcome.ending == "died" and news:
        outcome.words = next(filter(worried, reversed(news)), news[-1])
    return outcome


def shape(line: str) -> str:
    """Return a line of a log without what differs from run to run."""
    return re.sub(r"0x[0-9a-f]+|\d+", "0", line).strip()


def worried(line: str) -> bool:
    return bool(re.search("warn|error|fail|corrupt|skip|trunc|invalid|kill|premature|bad |lost", line, re.IGNORECASE))


def main(peers: Sequence[Peer] | None = None, smoke: bool = False) -> None:
    """Test *peers*, two cases at a time, and save the results; a smoke run prints and saves them separately."""
    path = RESULTS.with_name("faults-smoke.json") if smoke else RESULTS
    peers = all_peers() if peers is None else peers
    if smoke:
        peers = [peer for peer in peers if peer.file in SMOKE_PEERS]
        pythons = {peer.file: sys.executable if is_here(peer) else OSError("is not installed here") for peer in peers}
    else:
        pythons = make_all(list(peers), lambda words: print(words, file=sys.stderr))
    faults = [fault for fault in FAULTS if not smoke or fault.name in SMOKE_FAULTS]
    waits = [fault for fault in faults if fault.name == "stall"]  # it takes long, but no CPU time
    works = [fault for fault in faults if fault not in waits]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=RESULTS.parent, prefix="faults-") as root,
        ThreadPoolExecutor(2) as working,
        ThreadPoolExecutor(2) as waiting,
    ):
        jobs = [
            (peer, pool.submit(examine, peer, pythons[peer.file], some, Path(root) / name / peer.file))
            for peer in peers
            for pool, some, name in ((waiting, waits, "wait"), (working, works, "work"))
        ]
        found: dict[str, dict[str, Any]] = {}
        for peer, job in jobs:
            outcomes = {name: told(outcome) for name, outcome in job.result().items()}
            found.setdefault(peer.file, {"name": peer.name, "version": peer.packages[:1], "faults": {}})
            found[peer.file]["faults"] |= outcomes
            path.write_text(json.dumps(found if smoke else kept(path) | found, indent=1))
    if smoke:
        print("\n".join(lines(path)))


def told(outcome: Outcome) -> dict[str, Any]:
    return {key: value for key, value in asdict(outcome).items() if key != "log"}


def kept(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def lines(path: Path = RESULTS) -> list[str]:
    """Return the report's section."""
    return table(kept(path), [(fault.number, fault.name) for fault in FAULTS])
