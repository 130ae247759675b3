"""The command lines of the WebDataset slides run as they were printed, on local shards."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile

import numpy as np
import pytest
from PIL import Image
from programs import need

from tarshards import TarWriter, read_samples

LINES = {
    "tarscat": "gsutil cat gs://lpr-imagenet/imagenet_train-0000.tgz | tarscat -c 10 > small.tar",
    "tvf": "tar tvf small.tar | fgrep .jpg | wc -l",
    "tar2tsv": "tar2tsv -f cls small.tar",
    "tarsplit": "tar -cf - --sort=name -C /mdata/imagenet-raw train | tarsplit -s 1e9 -o imagenet_train --maxshards 2",
    "tarshow": "tarshow  -c 2 small.tar",
    "tarproc": "tarproc -p 5 -c 'ls; gm mogrify -size 256x256 *.jpg -resize 256x256' small.tar > out.tar",
}


@pytest.fixture
def shell(tmp_path, path_with_tools):
    """Bash in a folder with the slides' shard and images; gsutil is cat, and /mdata is in the folder."""
    rng = np.random.default_rng(0)
    raw = tmp_path / "mdata/imagenet-raw/train"
    raw.mkdir(parents=True)
    with TarWriter(str(tmp_path / "imagenet_train-0000.tgz")) as writer:
        for i in range(25):
            ramp = np.linspace(0, 255, 900 * 600 * 3).reshape(600, 900, 3) * rng.random()
            image = Image.fromarray(ramp.astype(np.uint8))
            writer.write({"__key__": f"n{i:04d}", "jpg": image, "cls": i})
            image.save(raw / f"n{i:04d}.jpg")
            (raw / f"n{i:04d}.cls").write_text(str(i))
    gsutil = tmp_path / "bin/gsutil"
    gsutil.parent.mkdir()
    gsutil.write_text('#!/bin/sh\n[ "$1" = cat ] && exec cat "${2##*/}"\n')
    gsutil.chmod(0o755)

    def run(line: str) -> str:
        environment = {**os.environ, "PATH": f"{gsutil.parent}:{path_with_tools}"}
        line = line.replace("/mdata", f"{tmp_path}/mdata")
        done = subprocess.run(["bash", "-euc", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_take_ten_samples(shell):
    shell(LINES["tarscat"])
    assert shell(LINES["tvf"]).strip() == "10"


def test_tabulate(shell):
    shell(LINES["tarscat"])
    rows = [line.split("\t") for line in shell(LINES["tar2tsv"]).splitlines()]
    assert rows[0] == ["__key__", "cls"]
    assert rows[1:] == [[f"n{i:04d}", str(i)] for i in range(10)]


def test_split(shell, tmp_path):
    shell(LINES["tarsplit"])
    shards = sorted(path.name for path in tmp_path.glob("imagenet_train-*.tar"))
    assert shards == ["imagenet_train-000000.tar"]
    assert len(list(read_samples(tmp_path / shards[0]))) == 25


def test_show(shell):
    shell(LINES["tarscat"])
    listing = shell(LINES["tarshow"])
    assert listing.count("n000") == 2
    assert "900x600" in listing


def test_map_a_command(shell, tmp_path):
    need("gm")
    shell(LINES["tarscat"])
    shell(LINES["tarproc"])
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert tar.getnames() == [f"n{i:04d}.{field}" for i in range(10) for field in ("cls", "jpg")]
        shrunk = tar.extractfile("n0003.jpg").read()
    # GraphicsMagick takes -size for a hint to its JPEG reader, and no option after the files.
    with tarfile.open(tmp_path / "small.tar") as tar:
        (tmp_path / "n0003.jpg").write_bytes(tar.extractfile("n0003.jpg").read())
    shell("gm mogrify -size 256x256 n0003.jpg -resize 256x256")
    assert shrunk == (tmp_path / "n0003.jpg").read_bytes()
    assert Image.open(io.BytesIO(shrunk)).width < 900
