"""Reading shards from nginx on this machine, without a limit: GB/s a process and a host, and what a gigabyte takes.

Half of the cores serve, and the others read: in one process, in 4, and in 16, over http and over https. Every round of
a client has processes of its own. Needs nginx, curl and openssl; the clients are in wire_clients.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import median

import remote
import wire_clients
from environments import python_with
from measure import about, machine, record
from processes import CannotError, FailedError, Process
from remote import SETS, make, shards_of
from wire_clients import AT_ONCE, CLIENTS, RANGE, Shards, true_digest

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import programs
from rigs.slow_link import Site, serving

NEEDS = ("nginx", "curl", "openssl")
SETS["tiny"] = (2, 50, 2048)  # what each process reads before the timed part
SAMPLES = {"large": "110 KB", "small": "2 KB"}
READ = {1: 4, 4: 4, 16: 2}  # processes -> shards that each reads
ROUNDS = {1: 3, 4: 1, 16: 1}
MANY = {  # the clients that are measured in several processes
    "curl -Z, ranges",
    "obstore, ranges",
    "tarshards, `open_url`",
    "tarshards, `Stream`, un-indexed",
    "tarshards, `Stream`, shuffled",
}
LIMIT = 120  # seconds of a round, at most
LOOK = 0.05  # seconds between two looks at the threads of the clients
HEAD = "| | GB/s | from .. to | CPU s/GB | threads | page faults/GB | connections | server's CPU s/GB |"


@dataclass
class Row:
    """A client that reads shards of a set, and what each of its rounds took."""

    client: str
    set: str
    rounds: list[dict[str, float]] = field(default_factory=list)
    failure: str = ""

    @property
    def label(self) -> str:
        return f"{self.client}, {SAMPLES[self.set]} samples" if CLIENTS[self.client].kind == "samples" else self.client

    @property
    def line(self) -> str:
        """The row of a table."""
        if self.failure:
            return f"| {self.label} | {self.failure} |" + " |" * 6
        rates = [each["rate"] for each in self.rounds]
        middle = {what: median(each[what] for each in self.rounds) for what in self.rounds[0]}
        cells = [self.label, f"{about(rates)}{middle['rate']:.2f}", f"{min(rates):.2f} .. {max(rates):.2f}"]
        cells += [f"{middle['cpu']:.2f}", f"{middle['threads']:.0f}", f"{middle['faults']:,.0f}"]
        cells += [f"{middle['connections']:.0f}", f"{middle['server']:.2f}"]
        return f"| {' | '.join(cells)} |"


@dataclass
class Wire:
    """A server, and the cores that its clients may use."""

    site: Site
    cores: list[int]

    def shards(self, name: str, numbers: range, *, tls: bool) -> Shards:
        """Return the shards of a set that have these numbers; after the last comes the first again."""
        names = shards_of(name)
        chosen = [names[number % len(names)] for number in numbers]
        sizes = [(remote.ROOT / each).stat().st_size for each in chosen]
        return Shards(self.site.tls_url if tls else self.site.url, chosen, sizes, str(self.site.certificate))

    def measure(self, rows: list[Row], processes: int, *, tls: bool) -> list[str]:
        """Measure clients in so many processes, in turns; return their table. One that fails is not tried again."""
        for _ in range(ROUNDS[processes]):
            for row in rows:
                if row.failure:
                    continue
                try:
                    row.rounds.append(self.round(row, processes, tls=tls))
                except OSError as error:
                    row.failure = " ".join(str(error).split())[:200]
                print(f"  {processes}, {'https' if tls else 'http'} {row.line}", file=sys.stderr, flush=True)
        title = f"**{processes} process{'es' if processes > 1 else ''}, {'https' if tls else 'http'}**"
        return [title, "", HEAD, "|---" * 8 + "|", *(row.line for row in rows), ""]

    def round(self, row: Row, processes: int, *, tls: bool) -> dict[str, float]:
        """Read in so many processes at once; return what a GB took. Raises OSError, also for wrong bytes or samples."""
        client = CLIENTS[row.client]
        python = python_with(client.module, *client.environments)
        if python is None:
            raise OSError(f"no environment has {client.module}; `make bench ONLY=suite` makes those of the suite")
        count = READ[processes]
        given = [self.shards(row.set, range(each * count, (each + 1) * count), tls=tls) for each in range(processes)]
        with started(row.client, python, str(self.site.certificate), processes) as readers:
            tiny = asdict(self.shards("tiny", range(SETS["tiny"][0]), tls=tls))
            for reader in readers:
                reader.ask("prepare", cores=self.cores, shards=tiny)
            taken = self.read(readers, given)
            digest = readers[0].ask("check", LIMIT, shards=asdict(first := self.shards(row.set, range(1), tls=tls)))
        wanted = SETS[row.set][1] * count * processes
        if client.kind == "bytes":
            wanted = sum(sum(shards.sizes) for shards in given)
        if taken["count"] != wanted:
            raise OSError(f"wrong: {taken['count']:,} {client.kind} of {wanted:,}")
        if digest != true_digest_of(first.names[0], client.kind):
            raise OSError(f"wrong: other {client.kind} than the shard has")
        return taken

    def read(self, readers: list[Process], given: list[Shards]) -> dict[str, float]:
        """Let each process read its shards, all at once."""
        self.site.taken()
        served, threads = self.served(), 0
        with ThreadPoolExecutor(len(readers)) as pool:
            asked = [pool.submit(each.ask, "read", LIMIT, shards=asdict(part)) for each, part in zip(readers, given)]
            while not all(each.done() for each in asked):
                threads = max(threads, *map(threads_of, readers))
                wait(asked, LOOK)
        told = [each.result() for each in asked]
        gigabytes = sum(sum(part.sizes) for part in given) / 1e9
        return {
            "rate": gigabytes / (max(each["ended"] for each in told) - min(each["begun"] for each in told)),
            "count": sum(each["count"] for each in told),
            "cpu": sum(each["cpu"] for each in told) / gigabytes,
            "faults": sum(each["faults"] for each in told) / gigabytes,
            "threads": threads,
            "connections": len({request.connection for request in self.site.taken()}) / len(readers),
            "server": (self.served() - served) / gigabytes,
        }

    def served(self) -> float:
        """Return the CPU seconds of the server so far."""
        stats = [Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split() for server in self.site.servers]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(client: str, python: str, certificate: str, count: int) -> Iterator[list[Process]]:
    """Start processes of a client, and end them. Raises OSError if one fails."""
    variables = {"no_proxy": "*", "AWS_EC2_METADATA_DISABLED": "true", "SSL_CERT_FILE": certificate}
    program, logs = Path(wire_clients.__file__), remote.ROOT / "logs"
    readers = [Process(client, python, logs / f"{number}.log", program=program, **variables) for number in range(count)]
    try:
        for reader in readers:
            reader.ready()
        yield readers
    except (CannotError, FailedError) as error:
        raise OSError(str(error)) from error
    finally:
        for reader in readers:
            if reader.alive:
                reader.kill()


def threads_of(reader: Process) -> int:
    """Return how many threads a process has now."""
    folder = Path(f"/proc/{reader.process.pid}/task")
    return len(os.listdir(folder)) if folder.exists() else 0


@cache
def true_digest_of(name: str, kind: str) -> list[int]:
    return true_digest(remote.ROOT / name, kind)


@contextmanager
def serving_on(cores: list[int]) -> Iterator[Site]:
    """Serve the sets by as many processes of nginx as there are *cores*, one on each."""
    left = iter(cores)

    def start(*command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        os.sched_setaffinity(process.pid, [next(left)])
        return process

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    with serving(remote.ROOT, "127.0.0.1", ports, start, len(cores)) as site:
        yield site


def introduction(servers: int, readers: int) -> str:
    sizes = {name: (remote.ROOT / shards_of(name)[0]).stat().st_size / 1e6 for name in SAMPLES}
    most = max(READ)
    return (
        f"nginx serves shards over the loopback, from memory and without a limit. Half of the cores serve, the others "
        f"read: here {servers} and {readers}. GB/s are those of all processes together, which begin at the same time, "
        f"after their imports and small shards; a GB is 10^9 bytes of shards. A process reads {READ[1]} shards, of "
        f"{most} processes each {READ[most]}: of {sizes['large']:.0f} MB, or with 2 KB samples of {sizes['small']:.0f} "
        f"MB. curl, obstore and aiohttp fetch {AT_ONCE} files, or {AT_ONCE} ranges of {RANGE >> 20} MiB, at once; "
        f"s3torchconnector asks for the same files as path-style S3, and obstore does not check the certificate. "
        f"Threads are the most that a process had at once, connections those of a process. The count of bytes or "
        f"samples is checked in each round, and after it the content of a shard, against the file and what Python's "
        f"tarfile reads. GB/s is the median of {ROUNDS[1]} rounds, in which the clients take turns; of several "
        f"processes there is one round."
    )


def tables() -> list[str]:
    """Measure everything; return the lines of the section."""
    cores = sorted(os.sched_getaffinity(0))
    servers, readers = cores[len(cores) // 2 :], cores[: len(cores) // 2] or cores
    lines = [introduction(len(servers), len(readers)), ""]
    with serving_on(servers) as site:
        wire = Wire(site, readers)
        for processes in READ:
            for tls in (False, True):
                rows = [Row(name, "large") for name in CLIENTS if processes == 1 or name in MANY]
                if processes == 1:
                    rows += [Row(name, "small") for name, client in CLIENTS.items() if client.kind == "samples"]
                lines += wire.measure(rows, processes, tls=tls)
    return lines


def main() -> None:
    if missing := [name for name in NEEDS if not programs.is_installed(name)]:
        print(f"wire: not measured, needs {', '.join(missing)}")
        return
    for name in ("tiny", *SAMPLES):
        make(name)
    record("Wire", [machine("tarshards", "numpy"), "", *tables()[:-1]])


if __name__ == "__main__":
    main()
