"""Benchmark sounds: batches of one second at 16 kHz, and batches of whole sounds by their durations.

The peers are soundfile in torch's DataLoader and in webdataset, and lhotse with shards of its own format, Shar. That
of soundfile alone bounds what decoding by it can reach.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import soundfile
from measure import interleave, machine, record

from tarshards import ArrayLoader, ShardWriter, Stream, bucket, build_columns, readers
from tarshards.index.build import build_index

RATE, BATCH, CLIPS, WORKERS = 16000, 64, 4096, 2
FORMATS = "wav", "flac"
LONG, SHARDS, BUDGET = 600, 4, 60  # sounds of 2 to 16 seconds, in so many shards; seconds of a batch, padding included


def read(data: bytes) -> np.ndarray:
    """The first second of a sound, padded to one."""
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True, frames=RATE)
    return np.pad(samples, ((0, RATE - len(samples)), (0, 0)))


class Files:
    """Sounds in files, which a DataLoader reads."""

    def __init__(self, folder: Path, field: str):
        self.paths = sorted(folder.glob(f"*.{field}"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> np.ndarray:
        return read(self.paths[place].read_bytes())


def write(folder: Path, field: str) -> None:
    """Write tones of 0.8 to 1.2 seconds as a shard and as files."""
    rng = np.random.default_rng(0)
    with ShardWriter(str(folder / f"{field}-%d.tar")) as writer:
        for i in range(CLIPS):
            time = np.arange(rng.integers(RATE * 4 // 5, RATE * 6 // 5)) / RATE
            tone = np.sin(2 * np.pi * rng.uniform(200, 2000) * time) * 0.5 + rng.normal(0, 0.01, len(time))
            writer.write({"__key__": f"{i:06d}", field: ((tone * 32767).astype(np.int16), RATE)})
    for sample in Stream.from_shards(str(folder / f"{field}-0.tar")):
        (folder / f"{sample['__key__']}.{field}").write_bytes(sample[field])
    build_index(folder / f"{field}-0.tar")
    write_shar(folder, field)


def write_shar(folder: Path, field: str) -> None:
    from lhotse import Recording
    from lhotse.shar import SharWriter

    (folder / f"shar-{field}").mkdir()
    with SharWriter(folder / f"shar-{field}", fields={"recording": field}, shard_size=None) as writer:
        for path in sorted(folder.glob(f"*.{field}")):
            writer.write(Recording.from_bytes(path.read_bytes(), recording_id=path.stem).to_cut())


def ours(folder: Path, field: str) -> None:
    reader = readers.audio(RATE, 1.0, crop="start")
    loader = ArrayLoader(Stream.from_shards(str(folder / f"{field}-0.tar")), BATCH, fields={field: reader})
    assert sum(len(batch[field][0]) for batch in loader) == CLIPS


def dataloader(folder: Path, field: str) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(Files(folder, field), BATCH, num_workers=WORKERS)  # type: ignore[arg-type]
    assert sum(len(batch) for batch in loader) == CLIPS


def alone(folder: Path, field: str) -> None:
    assert len([read(path.read_bytes()) for path in Files(folder, field).paths]) == CLIPS


def webdataset(folder: Path, field: str) -> None:
    import webdataset as wds

    samples = wds.WebDataset(str(folder / f"{field}-0.tar"), shardshuffle=False).to_tuple(field).map_tuple(read)
    loader = wds.WebLoader(samples.batched(BATCH), batch_size=None, num_workers=1)  # one shard feeds one worker
    assert sum(len(batch[0]) for batch in loader) == CLIPS


class Cuts:
    """What gives lhotse's loader a batch."""

    def __getitem__(self, cuts: Any) -> Any:
        from lhotse.dataset.collation import collate_audio

        second = cuts.truncate(max_duration=1.0, offset_type="start", preserve_id=True)
        return collate_audio(second.pad(1.0, preserve_id=True))


def lhotse(folder: Path, field: str) -> None:
    from lhotse import CutSet
    from lhotse.dataset import DynamicCutSampler, IterableDatasetWrapper
    from torch.utils.data import DataLoader

    cuts = CutSet.from_shar(in_dir=folder / f"shar-{field}")
    batches = IterableDatasetWrapper(Cuts(), DynamicCutSampler(cuts, max_cuts=BATCH, shuffle=False))
    assert sum(len(batch) for batch, _ in DataLoader(batches, batch_size=None, num_workers=1)) == CLIPS


def write_long(folder: Path) -> None:
    """Write sounds of the durations of read speech, as our shards and as Shar."""
    from lhotse import Recording
    from lhotse.shar import SharWriter

    rng = np.random.default_rng(0)
    (folder / "shar-long").mkdir()
    with (
        ShardWriter(str(folder / "long-%d.tar"), max_samples=LONG // SHARDS) as writer,
        SharWriter(folder / "shar-long", fields={"recording": "flac"}, shard_size=LONG // SHARDS) as shar,
    ):
        for number, seconds in enumerate(np.clip(rng.normal(12, 4, LONG), 2, 16).tolist()):
            time = np.arange(int(seconds * RATE)) / RATE
            tone = np.sin(2 * np.pi * rng.uniform(200, 2000) * time) * 0.5 + rng.normal(0, 0.01, len(time))
            stream = io.BytesIO()
            soundfile.write(stream, (tone * 32767).astype(np.int16), RATE, format="flac")
            writer.write({"__key__": f"{number:06d}", "flac": stream.getvalue()})
            shar.write(Recording.from_bytes(stream.getvalue(), recording_id=f"{number:06d}").to_cut())
    build_columns(str(folder / "long.shards.json"), "duration:flac")


def check(batches: Iterable[Any]) -> None:
    """Read all batches of padded sounds; none may be longer than the budget, and no sound may be missing."""
    sizes = [(len(batch), batch.shape[1]) for batch in batches]
    assert sum(count for count, _ in sizes) == LONG
    assert all(count * frames <= BUDGET * RATE for count, frames in sizes)


def ours_by_duration(folder: Path) -> None:
    dataset = Stream.from_shards(str(folder / "long.shards.json"), shuffle=True)
    packing = bucket("duration", budget=BUDGET)
    check(batch["flac"][0] for batch in ArrayLoader(dataset, 1, fields={"flac": readers.audio(RATE)}, packing=packing))


def by_length(samples: Iterable[tuple[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yield padded batches of sounds of similar length, from all that this worker has."""
    batch: list[np.ndarray] = []
    for (sound,) in sorted(samples, key=lambda sample: len(sample[0])):
        if (len(batch) + 1) * len(sound) > BUDGET * RATE:
            yield np.stack([np.pad(each, (0, len(batch[-1]) - len(each))) for each in batch])
            batch = []
        batch.append(sound)
    yield np.stack([np.pad(each, (0, len(batch[-1]) - len(each))) for each in batch])


def read_whole(data: bytes) -> np.ndarray:
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    return samples


def webdataset_by_duration(folder: Path) -> None:
    import webdataset as wds

    dataset = wds.WebDataset(str(folder / f"long-{{0..{SHARDS - 1}}}.tar"), shardshuffle=SHARDS)
    dataset = dataset.to_tuple("flac").map_tuple(read_whole).compose(by_length)
    check(wds.WebLoader(dataset, batch_size=None, num_workers=WORKERS))


class WholeCuts:
    def __getitem__(self, cuts: Any) -> Any:
        from lhotse.dataset.collation import collate_audio

        return collate_audio(cuts)[0]


def lhotse_by_duration(folder: Path) -> None:
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler, IterableDatasetWrapper
    from torch.utils.data import DataLoader

    cuts = CutSet.from_shar(in_dir=folder / "shar-long", shuffle_shards=True, split_for_dataloading=False)
    sampler = DynamicBucketingSampler(cuts, max_duration=BUDGET, num_buckets=10, shuffle=True)
    loader = DataLoader(IterableDatasetWrapper(WholeCuts(), sampler), batch_size=None, num_workers=1)
    assert sum(len(batch) for batch in loader) == LONG  # its budget does not count the padding


def main() -> None:
    lines = [
        machine("numpy", "soundfile", "torch", "webdataset", "lhotse"),
        "",
        "| format | loader | batches/s | x ours |",
        "|---|---|---|---|",
    ]
    works: dict[str, Callable[[Path, str], None]] = {
        "tarshards": ours,
        "soundfile in a DataLoader": dataloader,
        "webdataset and soundfile": webdataset,
        "lhotse, its Shar format": lhotse,
        "soundfile alone, in a loop": alone,
    }
    with tempfile.TemporaryDirectory() as name:
        for field in FORMATS:
            write(Path(name), field)
            times = interleave({key: partial(work, Path(name), field) for key, work in works.items()}, runs=3)
            own = median(times["tarshards"])
            for key, seconds in times.items():
                middle = median(seconds)
                lines.append(f"| {field} | {key} | {CLIPS / BATCH / middle:.0f} | {own / middle:.2f} |")
        write_long(Path(name))
        works_by_duration = {
            "tarshards": ours_by_duration,
            "webdataset and soundfile": webdataset_by_duration,
            "lhotse, its Shar format": lhotse_by_duration,
        }
        times = interleave({key: partial(work, Path(name)) for key, work in works_by_duration.items()}, runs=3)
    lines += ["", f"{LONG} sounds of 2 to 16 s in FLAC, in batches of at most {BUDGET} s by their durations:", ""]
    lines += ["| loader | sounds/s | x ours |", "|---|---|---|"]
    own = median(times["tarshards"])
    lines += [f"| {key} | {LONG / median(each):.0f} | {own / median(each):.2f} |" for key, each in times.items()]
    record("Audio", lines)


if __name__ == "__main__":
    main()
