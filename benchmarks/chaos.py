"""Chaos for us and the peers that read plain tars: what each loses, repeats or says when things go wrong.

Every peer's rounds are drawn from the same seed. ``chaos.py MINUTES`` gives each that long; the reports are in
``data/benchmarks/chaos``, with the line that repeats each bad round.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from environments import Peer, all_peers, make_all
from measure import DATA

HERE = Path(__file__).parent
REPORTS = DATA / "chaos"
PEERS = ("dali", "datasets", "energon", "ray", "spdl", "webdataset")  # which read plain tars by ranks
SEED, SHARDS, EACH = 1, 4, 40
#: What lets a peer's Python import this program and what it needs, after the peer's own packages.
CUSTOMIZE = "import sys\nsys.path += {folders!r}\n"


def main(minutes: float = 2.0) -> None:
    peers = [peer for peer in all_peers() if peer.name in PEERS]
    pythons = make_all(peers, lambda words: print(words, file=sys.stderr))
    REPORTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder, "shards"))
        run(sys.executable, None, minutes, shards, Path(folder))
        for peer in peers:
            python = pythons[peer.file]
            if not isinstance(python, OSError):
                run(python, peer, minutes, shards, Path(folder))


def write_shards(folder: Path) -> list[str]:
    """Write shards whose labels are the numbers of the samples, as their keys are."""
    from tarshards import ShardWriter

    folder.mkdir()
    rng = random.Random(SEED)
    with ShardWriter(folder / "shard-%d.tar", max_samples=EACH) as writer:
        for number in range(SHARDS * EACH):
            writer.write({"__key__": f"{number:08d}", "bin": rng.randbytes(2000), "cls": number})
    return [str(path) for path in sorted(folder.glob("*.tar"))]


def run(python: str, peer: Peer | None, minutes: float, shards: list[str], folder: Path) -> None:
    """Run chaos in a peer's Python; without a peer over our loaders."""
    name = "tarshards" if peer is None else peer.name
    scratch = folder / name
    scratch.mkdir()
    folders = [str(HERE.parent), str(HERE), sysconfig.get_path("purelib")]
    (scratch / "sitecustomize.py").write_text(CUSTOMIZE.format(folders=folders))
    command = [python, "-m", "tarshards", "chaos", *shards, "--minutes", str(minutes), "--seed", str(SEED)]
    command += ["--report", str(REPORTS / name)]
    environment = {**os.environ, "PYTHONPATH": str(scratch), "TMPDIR": str(scratch)}
    if peer is not None:
        command += ["--loader", "chaos_peer:make_loader"]
        environment["PEER"] = peer.file
    print(f"{name}: {subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode}", file=sys.stderr)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
