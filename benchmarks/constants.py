"""The sizes of requests over a network, each halved and doubled: what it changes in round trips, requests and bytes.

A server in this process holds what it is asked for back until no more is asked for, and then sends it all: a round.
So the counts do not depend on the speed of the machine. The table is kept by hand in PROFILE.md.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from range_server import Site, serving

from tarshards import Remote, ShardWriter, Stream
from tarshards.storage import tuning
from tarshards.storage.servers import close_connections

SHARDS, SAMPLES, SIZE = 4, 150, 110 * 1024
ROUNDS = 3
HOLD = 0.4  # seconds without a request that end a round
#: The server is near, or far, whatever its answers take; and no request counts as late or stalled.
SERVERS = {"near": {"FAR_SECONDS": 1e9}, "far": {"FAR_SECONDS": 0.0}}
STEADY = {"LATE_SECONDS": 1e9}
CONSTANTS = ("FIRST_BYTES", "REQUEST_BYTES")

Read = Callable[[str], Iterator[object]]
ROWS: dict[str, Read] = {
    "stream": lambda url: iter(Stream.from_shards(f"{url}/s-{{0..3}}.tar", index=False, remote=Remote())),
    "stream of one shard": lambda url: iter(Stream.from_shards(f"{url}/s-0.tar", index=False, remote=Remote())),
    "beginning of one shard": lambda url: islice(Stream.from_shards(f"{url}/s-0.tar", index=False), 10),
    "planned, shuffled": lambda url: iter(Stream.from_shards(f"{url}/s-{{0..3}}.tar", shuffle=True)),
}


def measured(site: Site, read: Read, constants: dict[str, float]) -> tuple[int, int, int, float]:
    """Return the rounds, the requests, the bytes and the seconds of CPU that reading takes with these *constants*."""
    before = {name: getattr(tuning, name) for name in constants}
    try:
        for name, value in constants.items():
            setattr(tuning, name, value)
        site.clear()
        site.rounds, cpu = 0, time.process_time()
        for _ in read(site.url):
            pass
        close_connections()
        return site.rounds, len(site.requests), site.bytes, time.process_time() - cpu
    finally:
        for name, value in before.items():
            setattr(tuning, name, value)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as site:
        rng = random.Random(0)
        with ShardWriter(f"{folder}/s-%d.tar", max_samples=SAMPLES, index=True) as writer:
            for number in range(SHARDS * SAMPLES):
                writer.write({"__key__": f"{number:06d}", "bin": rng.randbytes(SIZE)})
        site.hold = HOLD
        print("| server | row | constant | rounds | requests | MB | CPU s |")
        print("|---|---|---|---|---|---|---|")
        for server, settings in SERVERS.items():
            for row, read in ROWS.items():
                variants: dict[str, dict[str, float]] = {"as they are": {}}
                for name in CONSTANTS:
                    value = getattr(tuning, name)
                    variants |= {f"{name} / 2": {name: value // 2}, f"{name} x 2": {name: 2 * value}}
                for name, constants in variants.items():
                    times = [measured(site, read, {**STEADY, **settings, **constants}) for _ in range(ROUNDS)]
                    rounds, requests, size, cpu = map(median, zip(*times))
                    print(
                        f"| {server} | {row} | {name} | {rounds} | {requests} | {size / 1e6:.1f} | {cpu:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
