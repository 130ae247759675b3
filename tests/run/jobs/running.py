"""tarjob as a process, and a real Slurm where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

from programs import need
from slurm_cluster import SlurmCluster

from tarshards import TarWriter, read_samples

TARJOB = [sys.executable, str(Path(__file__).parents[3] / "bin/tarjob")]


def start_slurm(tmp_path_factory, **options) -> SlurmCluster:
    need("slurmctld", "munged", *(["slurmdbd", "mariadbd"] if options.get("accounting") else []))
    return SlurmCluster(tmp_path_factory.mktemp("slurm"), **options)


def upper(shard: str) -> bytes:
    """The bytes of a shard whose samples have a field more, made here and one after the other."""
    with TarWriter("serial.tar") as writer:
        for sample in read_samples(shard):
            writer.write({**sample, "up": sample["txt"].upper()})
    return Path("serial.tar").read_bytes()
