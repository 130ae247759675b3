"""A case of the truth table: a small set on disk, a process that reads it, and a verdict on what it delivered."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

from checks import DECODED, FIELD, digest, look
from environments import Peer
from processes import RANKS, session
from sets import Data, Sample

IMPORTS, LIMIT, LINGER = 120, 20, 5  # seconds for a process to start, to do its job, to exit
VICTIM = 1  # the shard that is damaged

Members = list[tuple[str, bytes]]  # names and contents
Arrange = Callable[[Members], Members]


@dataclass
class Outcome:
    """The outcome for a set. *ending* is end, warned, said (an exception), hung, died or cannot."""

    ending: str
    words: str = ""
    total: int = 0  # samples before the fault
    sound: int = 0  # of them, those without damage
    delivered: int = 0  # of the undamaged ones, those delivered unaltered
    lost: int = 0  # of all, those never delivered
    duplicated: int = 0
    altered: int = 0  # with wrong bytes, or without a field
    ranks: tuple[int, ...] = ()  # samples of each, if there are several
    log: list[str] = field(default_factory=list, repr=False)

    @property
    def whole(self) -> bool:
        return not (self.lost or self.duplicated or self.altered)


class StopCaseError(Exception):
    """A case that ends before anything can be delivered."""

    def __init__(self, ending: str, words: str):
        super().__init__(words)
        self.outcome = Outcome(ending, words)


@dataclass
class Laid:
    """A set on disk, and its correct contents."""

    data: Data
    truth: dict[int, list[Any]]  # of the sample with each label
    payloads: dict[int, bytes]
    victim: Path  # the file that is damaged
    sound: set[int]

    def damage(self, damage: Callable[[bytes], bytes]) -> None:
        """Change the bytes of the victim; samples no longer complete in them count as damaged."""
        before = self.victim.read_bytes()
        self.victim.write_bytes(damage(before))
        here, there = inflated(before), inflated(self.victim.read_bytes())
        self.sound -= {label for label, payload in self.payloads.items() if payload in here and payload not in there}


@dataclass
class Run:
    """The record of one process."""

    ending: str
    words: str
    samples: list[list[Any]]
    broken: int
    log: list[str]


class Case:
    """A peer with its own folder, which contains one set at a time."""

    def __init__(self, peer: Peer, python: str, folder: Path):
        self.peer, self.python, self.folder, self.live = peer, python, folder, folder / "live"
        images_only = "stream" not in peer.functions and "decode" in peer.functions
        self.task = "decode" if images_only else "stream"  # how it is read from
        self.always_index = False
        self.writing: list[str] = []  # the log of making the peer's own format

    def lay(self, shards: list[list[Sample]], *, compressed: bool = False, arrange: Arrange | None = None) -> Laid:
        """Write samples as plain tars, and in the peer's own format if any; *arrange* changes members of one shard."""
        shutil.rmtree(self.live, ignore_errors=True)
        own, urls = self.live / "own", []
        own.mkdir(parents=True)
        for place, samples in enumerate(shards):
            named = members(samples)
            content = tar(arrange(named) if arrange and place == VICTIM else named)
            path = self.live / f"shard-{place:06d}.tar{'.gz' * compressed}"
            path.write_bytes(gzip.compress(content, compresslevel=0, mtime=0) if compressed else content)
            urls.append(str(path))
        every = [sample for samples in shards for sample in samples]
        kind = "jpeg" if "jpg" in every[0] else "raw"
        data = Data("photos256" if kind == "jpeg" else "raw-8k", kind, len(every), tuple(urls), own)
        if self.peer.own:
            self.write(data)
        files = [path for path in own.rglob("*") if path.is_file()] if self.peer.own else [Path(urls[VICTIM])]
        victim = max(files, key=lambda path: (path.stat().st_size, str(path)))
        truth = {int(sample["cls"]): tell(sample) for sample in every}
        payloads = {int(sample["cls"]): sample[FIELD[kind]] for sample in every}
        return Laid(data, truth, payloads, victim, set(truth))

    def write(self, data: Data) -> None:
        """Convert the tars to the peer's own format, once for the same bytes."""
        kept = self.folder / f"own-{zlib.crc32(b''.join(Path(url).read_bytes() for url in data.urls)):08x}"
        log = kept.with_suffix(".log")
        if kept.exists():
            shutil.rmtree(data.folder)
            shutil.copytree(kept, data.folder, symlinks=True)
        else:
            run = self.run("write", data, limit=IMPORTS)
            if run.ending != "end":
                raise StopCaseError(run.ending, f"at writing: {run.words}")
            shutil.copytree(data.folder, kept, symlinks=True)
            log.write_text("\n".join(run.log))
        self.writing = log.read_text().splitlines()

    def run(self, do: str, data: Data, *, limit: float = LIMIT, ranks: dict[str, str] | None = None, **job: Any) -> Run:
        """Run a job in one process; without progress for *limit* seconds it counts as hung."""
        place = Path(tempfile.mkdtemp(dir=self.live, prefix=f"{do}-"))
        described = {**vars(data), "folder": str(data.folder)}
        task = {"start": "resume", "restore": "resume"}.get(do, do)
        defaults = {"workers": int(task in self.peer.threads), "kill": False}
        job = {"peer": self.peer.file, "do": do, "data": described, **defaults, **job}
        (place / "job.json").write_text(json.dumps(job))
        program = [self.python, str(Path(__file__).with_name("deliver.py")), place / "job.json", place / "record"]
        inherited = {name: value for name, value in os.environ.items() if name not in RANKS}
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                program, stdout=log, stderr=log, cwd=place, env={**inherited, **(ranks or {})}, start_new_session=True
            )
        try:
            in_time = wait(process, place / "record", limit)
        finally:
            for found in session(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(int(found.name), SIGKILL)
            code = process.wait()
        return read_run(place, in_time, code)

    def index(self, laid: Laid) -> None:
        """Make the peer's index of the tars, if it has one."""
        if not self.peer.own and "index" in self.peer.functions:
            run = self.run("index", laid.data)
            if run.ending not in ("end", "cannot"):
                raise StopCaseError(run.ending, f"at indexing: {run.words}")

    def deliver(
        self,
        laid: Laid,
        do: str | None = None,
        *,
        urls: list[str] | None = None,
        indexed: bool = False,
        **options: Any,
    ) -> Outcome:
        """Open the set, and judge what is delivered."""
        if indexed or (self.always_index and not urls):
            self.index(laid)
        data = replace(laid.data, urls=tuple(urls)) if urls else laid.data
        return self.judge(laid, [self.run(do or self.task, data, **options)])

    def judge(self, laid: Laid, runs: list[Run]) -> Outcome:
        """Compare what was delivered with the correct contents."""
        right: Counter[int] = Counter()
        wrong: Counter[int] = Counter()
        for told in (told for run in runs for told in run.samples):
            (right if same(told, laid.truth.get(told[0])) else wrong)[told[0]] += 1
        return Outcome(
            ending=next((run.ending for run in runs if run.ending != "end"), "end"),
            words=next((run.words for run in runs if run.words), ""),
            total=len(laid.truth),
            sound=len(laid.sound),
            delivered=len(laid.sound & right.keys()),
            lost=len(laid.truth.keys() - right.keys() - wrong.keys()),
            duplicated=right.total() - len(right),
            altered=wrong.total() + sum(run.broken for run in runs),
            ranks=tuple(len(run.samples) for run in runs) if len(runs) > 1 else (),
            log=self.writing + [line for run in runs for line in run.log],
        )


def wait(process: subprocess.Popen[bytes], record: Path, limit: float) -> bool:
    """Return whether a process ended or reported its end, without stalling for more than *limit* seconds."""
    deadline, length, ended = time.monotonic() + IMPORTS, 0, False
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        noted = record.read_bytes() if record.exists() else b""
        if len(noted) > length:
            deadline, length = time.monotonic() + limit, len(noted)
        if not ended and re.search(rb'^\["(end|said|cannot)", .*\n\Z', noted[noted[:-1].rfind(b"\n") + 1 :]):
            deadline, ended = time.monotonic() + LINGER, True
    return ended or process.poll() is not None


def read_run(place: Path, in_time: bool, code: int) -> Run:
    record, log = place / "record", (place / "log").read_text(errors="replace").splitlines()
    events = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    last = next((line.strip() for line in reversed(log) if line.strip()), "")
    ending, words = events[-1] if events else ("cannot", f"cannot be imported: {last}")
    if ending not in ("end", "said", "cannot"):
        ending, words = ("died" if code < 0 else "said", f"exit status {code}: {last}") if in_time else ("hung", last)
    samples = [value for event, value in events if event == "sample"]
    broken = [value for event, value in events if event == "broken"]
    return Run(ending, words or next(iter(broken), ""), samples, len(broken), log)


def members(samples: list[Sample]) -> Members:
    return [(f"{each['__key__']}.{name}", each[name]) for each in samples for name in each if name != "__key__"]


def tar(named: Members) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in named:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def inflated(content: bytes) -> bytes:
    """Return the readable content of a gzip file, or the content of any other file."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    engine, parts = zlib.decompressobj(31), []
    with suppress(zlib.error):
        for start in range(0, len(content), 512):
            parts.append(engine.decompress(content[start : start + 512]))
    return b"".join(parts)


def tell(each: Sample) -> list[Any]:
    """Return the correct entry of a sample, computed by programs that are not peers."""
    label = int(each["cls"])
    if "jpg" in each:
        import simplejpeg

        return look(simplejpeg.decode_jpeg(each["jpg"], "RGB"), label)
    return [label, digest(each["bin"], label)]


def same(told: list[Any], truth: list[Any] | None) -> bool:
    """Return whether a sample is unaltered: same digest, or same size and mean colour within 2 levels."""
    if truth is None or len(truth) == 2:
        return told == truth
    return told[:3] == truth[:3] and all(abs(a - b) <= DECODED for a, b in zip(told[3:], truth[3:]))
