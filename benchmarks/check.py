"""Benchmark tarcheck: against cat and the bare JPEG decoder, with 10 million keys, and with holes in a gigabyte."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

from measure import DATA, KEEPING, install, interleave, machine, record

from tarshards import TarWriter, read_samples
from tarshards.samples.resync.reading import survey_file
from tarshards.storage.opening import open_plain

FOLDER = DATA / "check"
THREADS = 2
KEYS = 10_000_000
COUNT_KEYS = """
from tarshards.verbs.check.duplicates import KeyOrigins
with KeyOrigins() as keys:
    for number in range({count}):
        keys.add(f"some/folder/{{number % ({count} - 1000):012d}}", (number // 10_000, number))
    assert sum(1 for _ in keys.duplicates()) == 1000
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def write(name: str, count: int, make) -> Path:
    path = FOLDER / f"{name}.tar"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with TarWriter(str(path)) as writer:
            for i in range(count):
                writer.write({"__key__": f"{i:08d}", "cls": i % 1000, **make(i)})
    return path


def make_images(count: int):
    """Return a function that makes samples of *count* different JPEGs of 256 x 256 pixels."""
    import numpy as np
    import simplejpeg

    rng = np.random.default_rng(0)
    images = []
    for _ in range(count):
        coarse = rng.integers(0, 256, (32, 32, 3), np.uint8)
        pixels = np.kron(coarse, np.ones((8, 8, 1), np.uint8)) + rng.integers(0, 24, (256, 256, 3), np.uint8)
        images.append(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 90))
    return lambda i: {"jpg": images[i % count]}


def shell(command: str) -> None:
    """Run a bash line; Python caches bytecode, as for users."""
    arguments = ["bash", "-euo", "pipefail", "-c", command]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, env=KEEPING)


def decode_all(images: list[bytes]) -> None:
    import simplejpeg

    with ThreadPoolExecutor(THREADS) as executor:
        parts = [images[i :: 8 * THREADS] for i in range(8 * THREADS)]
        list(executor.map(lambda part: [len(simplejpeg.decode_jpeg(image)) for image in part], parts))


def table(seconds: dict[str, list[float]], peer: str, size: float) -> list[str]:
    rows = [f"| | MB/s, median of {len(seconds[peer])} | x {peer} |", "|---|---|---|"]
    for name, times in seconds.items():
        ratio = median(theirs / ours for theirs, ours in zip(seconds[peer], times))
        rows.append(f"| {name} | {size / median(times):,.0f} | {ratio:.2f} |")
    return [*rows, ""]


def damage(path: Path, holes: int) -> tuple[Path, set[str]]:
    """Return a copy of the shard with holes of zeros and of garbage, and the keys of the samples without holes."""
    with open_plain(str(path)) as file:
        sound = survey_file(file)
    rng = random.Random(0)
    target = path.with_name("holes.tar")
    target.write_bytes(path.read_bytes())
    places = []
    with open(target, "r+b") as file:
        for _ in range(holes):
            size = rng.randrange(1, 200_000)
            start = rng.randrange(sound.size - 1024 - size)
            file.seek(start)
            file.write(bytes(size) if rng.random() < 0.5 else rng.randbytes(size))
            places.append((start, start + size))
    intact = {
        sample.key
        for sample in sound.samples
        if not any(start < sample.offset + sample.size and sample.offset < end for start, end in places)
    }
    return target, intact


def main() -> None:
    large = write("large", 5000, lambda i: {"bin": random.Random(i).randbytes(110 * 1024)})
    small = write("small", 50_000, lambda i: {"bin": random.Random(i).randbytes(2048)})
    tool = f"{install() / 'tarcheck'} --quiet"
    lines = [machine("click", "simplejpeg"), "", "The tool is installed with pip, not editable.", ""]
    for shard, words in ((large, "110 KB"), (small, "2 KB")):
        works = {"cat >/dev/null": f"cat {shard} >/dev/null", "tarcheck": f"{tool} {shard}"}
        seconds = interleave({name: partial(shell, command) for name, command in works.items()}, runs=15)
        lines += [f"**One shard of {shard.stat().st_size / 1e6:.0f} MB, {words} samples**", ""]
        lines += table(seconds, "cat >/dev/null", shard.stat().st_size / 1e6)
    images = write("images-30000", 30_000, make_images(50))
    data = [sample["jpg"] for sample in read_samples(images)]
    size = sum(map(len, data)) / 1e6
    works = {
        "simplejpeg": partial(decode_all, data),
        "tarcheck --decode": partial(shell, f"{tool} --decode -j {THREADS} {images}"),
    }
    lines += [f"**{len(data):,} JPEGs of 256 x 256 pixels, {THREADS} threads**", ""]
    lines += ["`tarcheck` decodes valid JPEGs at an eighth of their size, the bare decoder at their full size.", ""]
    lines += table(interleave(works, runs=5), "simplejpeg", size)
    done = subprocess.run([sys.executable, "-c", COUNT_KEYS.format(count=KEYS)], capture_output=True, check=True)
    lines += [f"Duplicates among {KEYS:,} keys: {int(done.stdout) / 1024:.0f} MiB at most.", ""]
    gigabyte = write(
        "gigabyte", 9000, lambda i: {"bin": random.Random(i).randbytes(random.Random(i).randrange(220_000))}
    )
    holed, intact = damage(gigabyte, 100)
    with open_plain(str(holed)) as file:
        found = survey_file(file)
    holed.unlink()
    whole = {sample.key for sample in found.samples if sample.problem is None}
    lost = sum(gap.end - gap.start for gap in found.gaps)
    lines += [
        f"A shard of {found.size / 1e6:.0f} MB, 9,000 samples, with 100 holes of up to 200 KB: of {len(intact):,} "
        f"samples that no hole touches {len(intact & whole):,} are read; {lost / 1e6:.1f} MB are passed over, and "
        f"{sum(found.byte_counts.values()) - found.size} bytes are not accounted for."
    ]
    record("tarcheck", lines)


if __name__ == "__main__":
    main()
