"""The short examples run, and are no longer than the same programs over webdataset, which run too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from quokka import Quokka
from with_torch import needs_torch

from tarshards import ShardWriter

pytestmark = [pytest.mark.interop, needs_torch]

ROOT = Path(__file__).parents[2]
OURS, THEIRS = ROOT / "examples", Path(__file__).with_name("twins")
LINES = {
    "images": ["images-{0..3}.tar"],
    "masks": ["quokka-{0..3}.tar"],
    "pairs": ["images-{0..3}.tar"],
    "language": ["text-{0..1}.tar", "state.pt"],
    "sound": ["sounds-{0..1}.tar"],
    "medicine": ["volumes-{0..1}.tar"],
    "evaluation": ["images.shards.json"],
}


def code_lines(path: Path) -> int:
    """The lines of a program that are not blank, without its docstring."""
    text = re.sub(r'^""".*?"""', "", path.read_text(), count=1, flags=re.DOTALL)
    return sum(bool(line.strip()) for line in text.splitlines())


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    with ShardWriter(folder / "images-{shard}.tar", max_samples=32) as writer:
        for i in range(128):
            image = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            meta = {"width": 32 if i % 4 else 16}
            writer.write({"__key__": f"{i:03d}", "png": image, "cls": i % 10, "txt": f"photo {i}", "json": meta})
    with ShardWriter(folder / "text-{shard}.tar", max_samples=100) as writer:
        for i in range(200):
            ids = rng.integers(0, 2048, rng.integers(8, 400), np.uint16)
            writer.write({"__key__": f"{i:03d}", "ids.npy": ids})
    with ShardWriter(folder / "sounds-{shard}.tar", max_samples=16) as writer:
        for i in range(32):
            sound = rng.standard_normal((8000 + 100 * i, 1 + i % 2)).astype(np.float32) / 10
            field = "flac" if i % 3 else "wav"
            writer.write({"__key__": f"{i:03d}", field: (sound, (8000, 16000)[i % 2]), "cls": i % 4})
    return folder


@pytest.fixture(scope="module")
def photos(shards) -> Path:
    """The folder, where the photo with its mask, boxes and keypoints is in other shards."""
    sample = Quokka().sample()
    with ShardWriter(shards / "quokka-{shard}.tar", max_samples=16) as writer:
        for i in range(64):
            writer.write({"__key__": f"{i:02d}"} | sample)
    return shards


@pytest.fixture(scope="module")
def volumes(shards) -> Path:
    """The folder, where there are also shards of two volumes each, the scan that nibabel contains at two times."""
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel")
    scans = nibabel.load(Path(nibabel.__path__[0], "tests/data/example4d.nii.gz"))
    with ShardWriter(shards / "volumes-{shard}.tar", max_samples=2) as writer:
        for i in range(4):
            scan = scans.slicer[..., i % 2]
            label = nibabel.Nifti1Image((scan.get_fdata() > 100).astype(np.uint8), scan.affine)
            writer.write({"__key__": f"{i}", "scan.nii": scan.to_bytes(), "label.nii": label.to_bytes()})
    return shards


def run(program: Path, shards: Path, *more: str) -> str:
    words = [sys.executable, str(program), *LINES[program.stem], *more]
    if program.stem == "images":
        words[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, cwd=shards, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [*LINES, "speech", "publish"])  # these two run elsewhere
def test_an_example_is_no_longer_than_its_twin(name):
    assert code_lines(OURS / f"{name}.py") <= code_lines(THEIRS / f"{name}.py")


def test_images(shards):
    assert len(re.findall(r"rank [01], epoch [01]: 4 steps, loss \d", run(OURS / "images.py", shards))) == 4


def test_masks(photos):
    assert re.match(r"4 steps, loss [\d.]+; \d+ of 16 boxes in the last crops", run(OURS / "masks.py", photos))


def test_pairs(shards):
    assert run(OURS / "pairs.py", shards).startswith("6 steps, loss ")  # of 96 pairs


def test_language_resumes_where_it_was(shards):
    (shards / "state.pt").unlink(missing_ok=True)
    (rows,) = re.findall(r"(\d+) rows, loss", run(OURS / "language.py", shards))
    (rest,) = re.findall(r"(\d+) rows, loss", run(OURS / "language.py", shards))
    assert int(rest) == int(rows) % 10 or int(rows) % 10 == 0


def test_sound(shards):
    pytest.importorskip("soundfile"), pytest.importorskip("soxr")
    assert run(OURS / "sound.py", shards).startswith("4 steps, loss ")


def test_medicine(volumes):
    assert run(OURS / "medicine.py", volumes).startswith("2 steps, loss 0.")


def test_evaluation(shards):
    assert re.match(r"accuracy [\d.]+% of 128; sample 7 is of class 7", run(OURS / "evaluation.py", shards))


@pytest.mark.parametrize("name", LINES)
def test_the_twin_does_the_same(shards, name, request, monkeypatch):
    pytest.importorskip("wids" if name == "evaluation" else "webdataset")
    if name == "masks":
        request.getfixturevalue("photos")
        folder = Path(sys.prefix, "torchvision")  # where `make test-interop` installs it
        if not folder.exists():
            pytest.skip("torchvision is not installed")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    if name == "medicine":
        request.getfixturevalue("volumes")
    if name == "sound":
        pytest.importorskip("soundfile"), pytest.importorskip("soxr")
    assert run(THEIRS / f"{name}.py", shards, *(["128"] if name == "images" else []))
