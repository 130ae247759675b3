"""Describe what a set has and a peer delivered, comparably: a digest per sample, or size and mean colour of an image.

Every peer's environment imports this module, so it needs only the standard library; references need numpy and
simplejpeg.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sets import CHECKED, FIELDS, LINKED, PART, SETS, SHARDS, SMOKE, Data, Sample, read_samples

CROP = 224
DECODED, CROPPED = 2, 12  # tolerance of a mean colour, in levels of 256: of one image, of the random crops of a set
FIELD = {kind: fields[0] for kind, fields in FIELDS.items()}  # of the kinds with one beside the label


def digest(payload: Any, label: int) -> int:
    """Return a 64-bit digest of a sample; an array is hashed by its bytes in C order."""
    known = blake2b(payload if isinstance(payload, bytes | memoryview) else payload.tobytes(), digest_size=8)
    known.update(b"%d" % label)
    return int.from_bytes(known.digest())


def look(pixels: Any, label: int) -> list[float]:
    """Return an image's label, height, width, and mean red, green and blue in levels of 256."""
    if pixels.shape[0] == 3:
        pixels = pixels.transpose(1, 2, 0)
    mean = pixels.reshape(-1, pixels.shape[2]).mean(axis=0, dtype="float64")
    scale = 255 if pixels.dtype.kind == "f" and pixels.max() <= 1 else 1
    return [int(label), *pixels.shape[:2], *(float(value) * scale for value in mean)]


def entries(task: str, samples: Iterable[tuple[Any, int]]) -> list[Any]:
    """Return what is compared for each sample."""
    tell = look if task in ("decode", "crop") else digest
    return [tell(payload, int(label)) for payload, label in samples]


def reference(data: Data) -> list[Any]:
    """Return the entries of a set's samples, in order, computed by programs that are not peers.

    The entry of an image also holds the mean colour of random crops.
    """
    samples = (_plain(sample, data.kind) for sample in read_samples(data.urls))
    if data.kind != "jpeg":
        return entries("stream", samples)
    return [[*look(pixels, label), *_cropped(pixels, label)] for pixels, label in samples]


def make(name: str, root: Path, *, smoke: bool = False) -> Path:
    """Generate a set below *root* once, with the reference for comparisons; return its folder."""
    from tarshards import ShardWriter

    folder = root / "sets" / name
    if folder.exists():
        return folder
    if name in LINKED:
        return _link(name, root)
    kind, count, fields = SETS[name]
    count = SMOKE if smoke else count
    part = folder.with_name(f"{name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with ShardWriter(f"{part}/{name}-{{shard:06d}}.tar", max_samples=-(-count // SHARDS.get(name, 4))) as writer:
        for i, sample in enumerate(fields(count)):
            writer.write({"__key__": f"{i:08d}", **sample})
    urls = tuple(map(str, sorted(part.glob("*.tar"))))
    entries = reference(Data(name, kind, count, urls, part))
    (part / "reference.json").write_text(json.dumps({"count": count, "entries": entries}))
    part.rename(folder)
    return folder


def _link(name: str, root: Path) -> Path:
    """Generate a set of hard links to the shards and indexes of another; return its folder."""
    from tarshards.index.manifests import read_manifest, write_manifest
    from tarshards.storage.location import Location

    base, copies = LINKED[name]
    source, folder = make(base, root), root / "sets" / name
    part = folder.with_name(f"{name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shards = []
    for number, entry in enumerate(read_manifest(f"{source}/{base}.shards.json") * copies):
        url = f"{part}/{name}-{number:06d}.tar"
        for end in ("", ".index"):
            os.link(f"{entry.url}{end}", f"{url}{end}")
        shards.append(entry._replace(url=url))
    write_manifest(Location(f"{part}/{name}.shards.json", sync=False), shards)
    known = json.loads((source / "reference.json").read_text())
    entries = known["entries"] * (1 if name in PART else copies)
    (part / "reference.json").write_text(json.dumps({"count": known["count"] * copies, "entries": entries}))
    part.rename(folder)
    return folder


def _cropped(pixels: Any, seed: int) -> list[float]:
    """Return the mean red, green and blue of a few random resized crops."""
    import numpy as np

    rng, (height, width, _) = np.random.default_rng(seed), pixels.shape
    means = []
    for _ in range(8):
        area, aspect = rng.uniform(0.08, 1) * width * height, np.exp(rng.uniform(-1, 1) * np.log(4 / 3))
        wide, high = (
            round(min(*sides)) for sides in ((width, np.sqrt(area * aspect)), (height, np.sqrt(area / aspect)))
        )
        left, top = rng.integers(0, width - wide + 1), rng.integers(0, height - high + 1)
        means.append(pixels[top : top + high, left : left + wide].mean(axis=(0, 1)))
    return np.mean(means, axis=0).tolist()


def _plain(sample: Sample, kind: str) -> tuple[Any, int]:
    label = int(sample["cls"])
    if kind == "jpeg":
        import simplejpeg

        return simplejpeg.decode_jpeg(sample["jpg"], "RGB"), label
    if kind == "otto":
        import io

        import numpy as np

        return np.load(io.BytesIO(sample["x.npy"])), label
    return b"".join(sample[field] for field in FIELDS[kind]), label


def judge_part(got: list[Any], expected: list[Any]) -> str:
    """Return "yes" if the first samples that were delivered are those of the set, or what is wrong with them."""
    wrong = len(got) - sum(map({*expected}.__contains__, got))
    return "yes" if len(got) >= min(CHECKED, len(expected)) and not wrong else f"wrong: {wrong:,} of {len(got):,}"


def judge(task: str, got: list[Any], expected: list[Any]) -> str:
    """Return "yes", or what is wrong with what was delivered."""
    if task == "random":
        wrong = sum(a != b for a, b in zip(got, expected))
        return "yes" if got == expected else f"wrong: {wrong:,} of {len(expected):,} places"
    images = task in ("decode", "crop", "train")
    took, wanted = (Counter(entry[0] if images else entry for entry in side) for side in (got, expected))
    if took != wanted:
        lost, other = (wanted - took).total(), (took - wanted).total()
        repeated = sum(count for entry, count in (took - wanted).items() if entry in wanted)
        parts = [f"{lost:,} lost"] * bool(lost) + [f"{repeated:,} repeated"] * bool(repeated)
        parts += [f"{other - repeated:,} altered"] * bool(other - repeated)
        return f"wrong: {len(got):,} of {len(expected):,}, {', '.join(parts)}"
    return _judge_images(task, got, expected) if images else "yes"


def _judge_images(task: str, got: list[Any], expected: list[Any]) -> str:
    known = {entry[0]: entry for entry in expected}
    shapes = sum((entry[1:3] != (known[entry[0]][1:3] if task == "decode" else [CROP, CROP])) for entry in got)
    if shapes:
        return f"wrong: {shapes:,} of another shape"
    if task != "decode":
        means = [[sum(entry[i] for entry in side) / len(side) for i in (-3, -2, -1)] for side in (got, expected)]
        off = max(abs(a - b) for a, b in zip(*means))
        return "yes" if off <= CROPPED else f"wrong: mean colour {off:.0f} levels off"
    off = sum(any(abs(a - b) > DECODED for a, b in zip(entry[3:], known[entry[0]][3:6])) for entry in got)
    return f"wrong: {off:,} of another colour" if off else "yes"
