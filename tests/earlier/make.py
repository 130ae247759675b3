"""Make files.tar.gz with the package of an earlier version: its tree, with kernels, is the PYTHONPATH."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from itertools import islice
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import served  # noqa: E402

import tarshards  # noqa: E402
from tarshards import ShardWriter, write_samples  # noqa: E402

CASES = HERE.parent / "cases"
TREE = Path(tarshards.__file__).parents[1]

TOOLS = f"""
tarindex -q --crc --key-index --columns "length:txt, json.n, bytes=size:txt" set/a.shards.json
tarindex -q --format dali set/a.shards.json
tarindex -q --split last --no-manifest last.tar
tarindex -q -i concatenated-0.tar
tarindex -q --no-manifest faults.tar || [ $? = 1 ]
for name in links-{{bsdtar,gnu,pax}} sparse-{{0.0,0.1,1.0,bsdtar,old}}; do
    cp {CASES}/$name.tar . && tarindex -q --no-manifest $name.tar && rm $name.tar
done
tarcard set/a.shards.json --name a --licence CC0-1.0 -o set/card.json
tarcatalog add catalog.yaml a@1 train=set/a.shards.json --card set/card.json --op 'decode="rgb8"'

{served.TARPROC} && exit 1
{served.TARJOB} && exit 1 || true
"""


def write_sets() -> None:
    """Shards of all kinds, in the current folder."""
    Path("set").mkdir()
    samples = [{"__key__": f"{i:02d}", "cls": i, "txt": f"text {i}", "json": {"n": i % 5}} for i in range(20)]
    with ShardWriter("set/a-%d.tar", max_samples=7, index=True, sha256=True) as writer:
        for sample in samples:
            writer.write(sample)
    with tarfile.open("last.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("img_0.01.txt", "img_0.01.cls", "img_0.02.txt"):
            add(archive, name)
    with tarfile.open("faults.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("a.txt", "b.txt", "b.txt", "c.txt", "d.txt", "c.cls", "e.txt"):
            add(archive, name)
        link = tarfile.TarInfo("f.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/gone"
        archive.addfile(link)
    write_samples(samples[:2], "concatenated-0.tar")
    write_samples(samples[2:5], "more.tar")
    Path("concatenated-0.tar").write_bytes(Path("concatenated-0.tar").read_bytes() + Path("more.tar").read_bytes())
    Path("more.tar").unlink()


def add(archive: tarfile.TarFile, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(name)
    archive.addfile(info, io.BytesIO(name.encode()))


def fill_cache() -> None:
    """Read an epoch into a cache, and leave it in the middle of the next block, as a kill does."""
    from tarshards.storage.cache import LEAST_CACHE, Block, BlockCache
    from tarshards.storage.wire import calling, run

    with served.site(Path("set")):
        for sample in served.dataset("cache"):
            assert sample["txt"]
        if os.fork() == 0:
            cache = BlockCache.of(served.remote("cache"))
            spooled, begun = (Block("http://host/b.tar", '"v1"', 1 << 20, at, 1 << 12) for at in (0, 1 << 12))
            cache.reserve(LEAST_CACHE - cache.folder.read_counts()["pinned"])  # so that no other block may stay
            run(cache.fill(spooled, lambda: calling(lambda: bytes(1 << 12))))
            run(cache.fill(begun, lambda: calling(lambda: os.kill(os.getpid(), signal.SIGKILL))))
        os.wait()


def states() -> dict[str, object]:
    """A state of each kind of the dataset, and the keys that came after it."""
    found = {}
    for name, make in served.STREAMS.items():
        stream = make("set/a.shards.json")
        for _ in islice(stream, 4):
            pass
        state = stream.state_dict()
        stream = make("set/a.shards.json")
        stream.load_state_dict(state)
        found[name] = state, [sample["__key__"] for sample in stream]
    return found


def pack() -> None:
    """Put all files of the current folder into the archive."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(Path().rglob("*")):
            info = archive.gettarinfo(path)
            info.mtime, info.uid, info.gid, info.uname, info.gname = 10**9, 0, 0, "", ""
            archive.addfile(info, path.open("rb") if path.is_file() else None)
    (HERE / "files.tar.gz").write_bytes(gzip.compress(data.getvalue(), 9, mtime=0))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_sets()
        path = f"{TREE}/bin:{sys.prefix}/bin:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "FOLDER": folder}
        subprocess.run(["bash", "-euxc", TOOLS], env=environment, check=True)
        fill_cache()
        Path("states.json").write_text(json.dumps(states()))
        pack()


if __name__ == "__main__":
    main()
