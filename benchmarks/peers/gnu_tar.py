"""GNU tar, plain tars: the program, which knows files and not samples."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from sets import Data, Sample

PACKAGES = ()
SYSTEM = ("tar",)
OWN = False
THREADS = ()
CANNOT = {
    "stream": "tar -xO concatenates the bytes of all members, so samples cannot be told apart",
    "arrays": "knows files, not arrays",
    "decode": "knows files, not images",
    "crop": "knows files, not images",
    "random": "reads an archive from its beginning for every member",
    "resume": "has no state",
}
SHARDS = 4


def index(data: Data) -> None:
    for url in data.urls:
        with (data.folder / f"{Path(url).name}.list").open("wb") as listing:
            subprocess.run(["tar", "-tf", url], stdout=listing, check=True)


def write(samples: list[Sample], data: Data) -> None:
    """Only files can be archived, so the samples become files first."""
    for shard in range(SHARDS):
        files = data.folder / "files"
        files.mkdir()
        for sample in samples[shard * len(samples) // SHARDS : (shard + 1) * len(samples) // SHARDS]:
            for field, value in sample.items():
                if field != "__key__":
                    (files / f"{sample['__key__']}.{field}").write_bytes(value)
        subprocess.run(["tar", "--sort=name", "-cf", data.folder / f"{shard}.tar", "-C", files, "."], check=True)
        shutil.rmtree(files)
