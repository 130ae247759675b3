"""Benchmark sounds: batches of one second at 16 kHz.

The peers are soundfile in torch's DataLoader and in webdataset, and lhotse with shards of its own format, Shar. That
of soundfile alone bounds what decoding by it can reach.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measure import interleave, machine, record

from tarshards import ArrayLoader, ShardWriter, Stream, readers
from tarshards.index.build import build_index

RATE, BATCH, CLIPS, WORKERS = 16000, 64, 4096, 2
FORMATS = "wav", "flac"


def read(data: bytes) -> np.ndarray:
    """The first second of a sound, padded to one."""
    import soundfile

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
    record("Audio", lines)


if __name__ == "__main__":
    main()
