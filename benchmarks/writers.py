"""What the writers in common use leave in a set, as `tarcheck` finds it, written into docs/conformance.md.

A small folder has what public sets have: classes as folders, images with captions, and one each of what people meet:
a caption that is missing, an empty one, a key with a dot, a long name, a name that is not ASCII, a hidden file, a file
without an extension, a duplicate as a hard link and one as a symbolic link. Each writer makes shards of it as its
documentation shows. `make bench ONLY=writers` repeats it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from measure import record

import tarshards
from tarshards import read_samples
from tarshards.verbs.check import check_shards

PAGE, TITLE = Path(__file__).parents[1] / "docs" / "conformance.md", "What writers leave"
CLASSES, EACH = ("n01440764", "n02102040", "n03000684"), 20
LONG = "a-very-long-title-" * 6  # with its folder more than 100 characters
ABOUT = """\
Each writer packs, as its documentation shows, a folder of 60 samples in three classes with one file per field. The
folder has the irregularities of public datasets: a missing caption and an empty one, a key with a dot, a name of more
than 100 characters and one that is not ASCII, a hidden file, a file without an extension, a hard link to another image,
and a symbolic link with an absolute path. *whole* counts the samples that are read back with their fields and bytes.
The next columns count the findings of [tarcheck](tools/tarcheck.md#what-it-finds) by kind:

- *duplicate key*: the members of a sample are not adjacent, or are in two shards;
- *sample*: a link whose target is not in the archive; *zeros*: the end of an archive in the middle of a shard;
- *missing field*: samples lack a field that others have, such as those of the key with a dot;
- *skipped*: files that belong to no sample; *DALI*: names that its reader misreads.

Hugging Face datasets has no writer of tars. `make bench ONLY=writers` repeats the table.
"""
WRITERS: dict[str, Callable[[Path, Path], str | None]] = {}

Sample = dict[str, Any]


def writer(name: str) -> Callable[[Callable[[Path, Path], str | None]], Callable[[Path, Path], str | None]]:
    """Register a writer of *source* into a new folder; it returns the version, if that is not in its name."""

    def register(write: Callable[[Path, Path], str | None]) -> Callable[[Path, Path], str | None]:
        WRITERS[name] = write
        return write

    return register


def make_source(folder: Path) -> None:
    """Write the files; those of a class in another order than that of their names, as downloads come."""
    from PIL import Image

    rng = random.Random(0)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        stems = [f"{name}_{number:04d}" for number in range(EACH)]
        files = [(stem, field) for stem in stems for field in ("jpg", "txt")]
        rng.shuffle(files)
        for stem, field in files:
            path = folder / name / f"{stem}.{field}"
            if field == "txt":
                path.write_text(f"a picture of {stem}")
            else:
                Image.frombytes("RGB", (8, 8), rng.randbytes(192)).save(path, "jpeg")
    first, second, third = (folder / name for name in CLASSES)
    (first / f"{CLASSES[0]}_0003.txt").unlink()
    (first / f"{CLASSES[0]}_0004.txt").write_text("")
    for field in ("jpg", "txt"):
        (first / f"{CLASSES[0]}_0005.{field}").rename(first / f"photo.v2.{field}")
        (first / f"{CLASSES[0]}_0006.{field}").rename(first / f"{LONG}.{field}")
        (first / f"{CLASSES[0]}_0007.{field}").rename(first / f"M\u00fcnchen.{field}")
    (folder / "LICENSE").write_text("free")
    (second / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    for path, link in (second / f"{CLASSES[1]}_0008.jpg", os.link), (third / f"{CLASSES[2]}_0009.jpg", os.symlink):
        path.unlink()
        link(path.with_name(path.name.replace("_000", "_001")), path)


def samples(source: Path) -> Iterator[Sample]:
    """Yield the samples of the folder as a conversion script does: keys are paths without the last extension."""
    found: dict[str, Sample] = {}
    for path in sorted(source.rglob("*")):
        if path.suffix in (".jpg", ".txt"):
            key = str(path.relative_to(source).with_suffix(""))
            found.setdefault(key, {"__key__": key})[path.suffix[1:]] = path.read_bytes()
    yield from found.values()


# Programs.


def run(line: str, source: Path, target: Path) -> None:
    subprocess.run(["bash", "-c", line], cwd=source, env={**os.environ, "OUT": str(target)}, check=True)


def version(program: str) -> str:
    return subprocess.check_output([program, "--version"], text=True).split("\n")[0].split(" - ")[0]


@writer("`tar -cf out.tar *`")
def gnu(source: Path, target: Path) -> str:
    run("tar -cf $OUT/out.tar *", source, target)
    return version("tar")


@writer("`tar --sort=name -cf out.tar .`")
def gnu_sorted(source: Path, target: Path) -> str:
    run("tar --sort=name -cf $OUT/out.tar .", source, target)
    return version("tar")


@writer("`tar --format=posix --sort=name`")
def gnu_posix(source: Path, target: Path) -> str:
    run("tar --format=posix --sort=name -cf $OUT/out.tar *", source, target)
    return version("tar")


@writer("`find \\| sort \\| split -l 41`, `tar -T`")
def gnu_split(source: Path, target: Path) -> str:
    """Shards of 41 files, wherever a sample ends."""
    run("find * -type f | sort | split -l 41 - $OUT/part.", source, target)
    run("for part in $OUT/part.*; do tar -cf $part.tar -T $part && rm $part; done", source, target)
    return version("tar")


@writer("`tar -rf` by class")
def gnu_append(source: Path, target: Path) -> str:
    run("for class in *; do tar --sort=name -rf $OUT/out.tar $class; done", source, target)
    return version("tar")


@writer("`tar` by class, then `cat`")
def gnu_cat(source: Path, target: Path) -> str:
    run("for class in n*; do tar --sort=name -cf $OUT/$class.tar $class; done", source, target)
    run("cat $OUT/n*.tar > $OUT/out.tar && rm $OUT/n*.tar", source, target)
    return version("tar")


@writer("`bsdtar -cf out.tar *`")
def bsd(source: Path, target: Path) -> str:
    run("bsdtar -cf $OUT/out.tar *", source, target)
    return version("bsdtar")


# Python's tarfile, as scripts and tutorials use it.


@writer("`TarFile.add(folder)`")
def tarfile_add(source: Path, target: Path) -> str:
    with tarfile.open(target / "out.tar", "w") as archive:
        archive.add(source, arcname="")
    return f"Python {sys.version.split()[0]}"


@writer("`TarFile.addfile` by sample")
def tarfile_addfile(source: Path, target: Path) -> str:
    with tarfile.open(target / "out.tar", "w") as archive:
        for sample in samples(source):
            for field in sorted(sample.keys() - {"__key__"}):
                member = tarfile.TarInfo(f"{sample['__key__']}.{field}")
                member.size = len(sample[field])
                archive.addfile(member, io.BytesIO(sample[field]))
    return f"Python {sys.version.split()[0]}"


# Writers of samples.


@writer("`ShardWriter`")
def webdataset_shards(source: Path, target: Path) -> str:
    from webdataset import ShardWriter

    with ShardWriter(f"{target}/%06d.tar", maxcount=20, verbose=0) as shards:
        for sample in samples(source):
            shards.write(sample)
    return f"webdataset {metadata.version('webdataset')}"


@writer("`TarWriter`, keys are numbers, captions may fail")
def img2dataset(source: Path, target: Path) -> str:
    """What img2dataset's writer does with webdataset's: numbered keys, json of each, no txt without a caption."""
    from webdataset import TarWriter

    with TarWriter(str(target / "00000.tar")) as shard:
        for number, sample in enumerate(samples(source)):
            key = f"{number:09d}"
            about = {"key": key, "status": "success", "caption": sample.get("txt", b"").decode() or None}
            row = {"__key__": key, "jpg": sample["jpg"], "json": json.dumps(about)}
            shard.write(row | ({"txt": sample["txt"].decode()} if about["caption"] else {}))
    return f"as img2dataset, webdataset {metadata.version('webdataset')}"


@writer("`Dataset.write_webdataset`")
def ray_data(source: Path, target: Path) -> str:
    import ray
    import ray.data

    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items(list(samples(source))).repartition(2)
    rows.write_webdataset(str(target), encoder=lambda row: {name: row[name] for name in row if row[name] is not None})
    ray.shutdown()
    return f"ray {metadata.version('ray')}"


@writer("`tarshards.ShardWriter`, dots in keys replaced")
def ours(source: Path, target: Path) -> str:
    """It refuses a key that would not read back, so it is given another."""
    with tarshards.ShardWriter(f"{target}/%06d.tar", max_samples=20, index=True) as shards:
        for sample in samples(source):
            shards.write(sample | {"__key__": sample["__key__"].replace(".", "_")})
    return f"tarshards {tarshards.__version__}"


# The table.


def told(counts: Counter[tuple[str, str]], severity: str) -> str:
    return ", ".join(f"{count} {kind}" for (of, kind), count in sorted(counts.items()) if of == severity)


def row(name: str, source: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        made_by = WRITERS[name](source, target)
        shards = [str(path) for path in sorted(target.rglob("*.tar"))]
        report = check_shards(shards)
        read = Counter(contents(sample) for sample in read_samples(shards, on_error="skip"))
    due = Counter(map(contents, samples(source)))
    cells = [made_by, len(shards), (due & read).total(), told(report.counts, "error"), told(report.counts, "warning")]
    for finding in report.findings:
        print(f"{name}: {finding}", file=sys.stderr)
    return f"| {name} | {' | '.join(map(str, cells))} | {time.strftime('%Y-%m-%d')} |"


def contents(sample: Sample) -> tuple[Any, ...]:
    """The fields that the source has: of the key only the files' names are the writer's choice."""
    return tuple(sample.get(field) for field in ("jpg", "txt"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        make_source(source)
        rows = [row(name, source) for name in WRITERS]
    lines = [
        ABOUT,
        "| what | writer | shards | whole | errors | warnings | date |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    record(TITLE, lines, PAGE)


if __name__ == "__main__":
    main()
