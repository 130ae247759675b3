"""Run webdataset's own tests over ``tarshards.webdataset``, and explain each that fails.

The tests come from webdataset's source distribution: the argument, or else the one in ``data/``, where ``--fetch``
downloads it with pip. They run in a temporary folder, where a package ``webdataset`` stands for ours and
a server of this machine for those that the tests ask. The files that the tests read are not in the distribution;
this program makes others of the same form. The exit status is 1 if a test fails without an explanation in
``EXPLAINED``, or fewer than ``PASSING`` pass.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from tarshards import TarWriter

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))  # for the program

from range_server import serving  # noqa: E402

VERSION = "1.0.2"
SDIST = ROOT / "data" / f"webdataset-{VERSION}.tar.gz"
PASSING = 175
#: Addresses in the tests that a server of this machine stands for.
SERVERS = r"https?://(storage\.googleapis\.com/[\w-]+(/testdata)?|httpbin\.org)"

FOLDERS = "shards that appear and vanish in a folder are not followed; no DirectoryShardList"
COPIES = "no copies of whole shards: cache_dir= keeps blocks, cache_size= bounds them, samples have no __local_path__"
REWRITE = "environment variables such as GOPEN_REWRITE do not change what a script opens"
#: Why a test fails, by its file and name: each is a promise that the module does not make.
EXPLAINED = {
    "test_shardlists.TestDirectoryShardList.test_random_selection": FOLDERS,
    "test_shardlists.TestDirectoryShardList.test_oldest_selection": FOLDERS,
    "test_shardlists.TestDirectoryShardList.test_adding_files": FOLDERS,
    "test_shardlists.TestDirectoryShardList.test_removing_files": FOLDERS,
    "test_shardlists.TestDirectoryShardList.test_recycle_unlink": FOLDERS,
    "test_shardlists.TestDirectoryShardList.test_recycle_keep": FOLDERS,
    "test_shardlists.TestDirectoryShardList.test_recycle_resample": FOLDERS,
    "test_shardlists.TestDirectoryShardList.test_cleanup_files_without_processes": FOLDERS,
    "test_cache.TestStreamingOpen.test_local_file": COPIES,
    "test_cache.TestStreamingOpen.test_remote_file": COPIES,
    "test_cache.TestFileCache.test_local_file": COPIES,
    "test_cache.TestFileCache.test_remote_file": COPIES,
    "test_cache.test_lru_cleanup": COPIES,
    "test_compat.test_cache_dir": COPIES,
    "test_compat.test_lmdb_cached": "no LMDBCached: Remote(cache_dir=...) keeps what was read",
    "test_security.TestEnforceSecurity.test_url_rewriting_allowed_when_security_disabled": REWRITE,
    "test_security.TestEnforceSecurity.test_url_rewriting_blocked_when_security_enabled": REWRITE,
    "test_writer.test_writer3": "decode() unpickles only with allow_unsafe=True or a handle_extension() of the script",
}

#: The package that tests import as webdataset.
PACKAGE = """
import sys
import tarshards.webdataset as ours
for name, module in list(sys.modules.items()):
    if name.partition("tarshards.webdataset.")[0] == "":
        sys.modules["webdataset." + name.removeprefix("tarshards.webdataset.")] = module
sys.modules["webdataset"] = ours
"""

#: What the tests import from their conftest.
CONFTEST = """
local_data = "testdata/imagenet-000000.tgz"
compressed = "testdata/compressed.tar"
remote_loc = {server!r} + "/"
remote_shards = "images-{{000000..000007}}.tar"
remote_shard = "images-000000.tar"
remote_sample = {server!r} + "/sample.tgz"

def count_samples_tuple(source, *checks, n=10000):
    count = 0
    for sample in source:
        if count == n:
            break
        assert isinstance(sample, (tuple, dict, list))
        assert all(check(sample) for check in checks)
        count += 1
    return count
"""

#: What the tests use of packages that may not be installed.
STAND_INS = {
    "torchvision/__init__.py": "",
    "torchvision/transforms.py": """
import numpy as np
import torch

class RandomResizedCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        return image.resize((self.size, self.size))

class RandomHorizontalFlip:
    def __call__(self, image):
        return image

class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255

class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std

class Compose:
    def __init__(self, functions):
        self.functions = functions

    def __call__(self, image):
        for function in self.functions:
            image = function(image)
        return image
""",
    "imageio/__init__.py": "",
    "imageio/v3.py": """
import numpy as np
from PIL import Image

def imread(stream):
    return np.array(Image.open(stream).convert("RGB"))
""",
}


def picture(height: int, width: int, kind: str, seed: int | None = None) -> bytes:
    """Return an image file: of noise, which does not compress, or without a *seed* of one colour."""
    shape = (height, width, 3)
    pixels = np.zeros(shape, np.uint8)
    if seed is not None:
        pixels = np.random.default_rng(seed).integers(0, 255, shape, np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def make_data(folder: Path) -> None:
    """Write the shards that the tests read, with the numbers of samples, fields and shapes that they expect."""
    folder.mkdir()
    with TarWriter(folder / "imagenet-000000.tgz", sync=False) as writer:
        for number in range(47):
            png = picture(793, 600, "png") if number < 2 else picture(40, 50, "png", number)
            fields = {"cls": number, "png": png, "wnid": b"n02120079", "xml": b"<annotation/>"}
            writer.write({"__key__": f"{number:06d}", **fields})
    with TarWriter(folder / "compressed.tar", sync=False) as writer:
        writer.write({"__key__": "a", "txt.gz": "hello\n"})
    with TarWriter(folder / "tendata.tar", sync=False) as writer:
        for number in range(100):
            writer.write({"__key__": f"{number:06d}", "ten": [np.full((28, 28), number / 2)] * 2})
    with TarWriter(folder / "sample.tgz", sync=False) as writer:
        writer.write({"__key__": "10", "cls": 0, "png": picture(40, 50, "png", 10)})
    for shard in range(8):
        with TarWriter(folder / f"images-{shard:06d}.tar", sync=False) as writer:
            for number in range(20):
                fields = {"jpg": picture(40, 50, "jpeg", number), "json": [{"label": f"{number}"}]}
                writer.write({"__key__": f"{shard:03d}{number:03d}", **fields})


def unpack(sdist: Path, folder: Path, server: str) -> None:
    """Write the tests of *sdist* to *folder*, with the modules that they import; they access only *server*."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            if match := re.fullmatch(r"[^/]+/tests/(test_\w+\.py)", member.name):
                file = archive.extractfile(member)
                assert file is not None
                (folder / match[1]).write_text(re.sub(SERVERS, server, file.read().decode()))
    (folder / "__init__.py").touch()
    (folder / "conftest.py").write_text(CONFTEST.format(server=server))


def run(sdist: Path, arguments: list[str]) -> dict[str, str]:
    """Return for each test of *sdist* "" if it passes, else its message; *arguments* are pytest's."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_data(folder / "testdata")
        (folder / "webdataset").mkdir()
        (folder / "webdataset" / "__init__.py").write_text(PACKAGE)
        (folder / "tests").mkdir()
        for name, text in STAND_INS.items():
            path = folder / "instead" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (folder / "pytest.ini").write_text("[pytest]\nmarkers = quick\n")
        with serving(folder / "testdata") as site:
            unpack(sdist, folder / "tests", site.url)
            path = os.pathsep.join([str(folder), str(ROOT), *sys.path, str(folder / "instead")])
            command = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", f"--junitxml={folder}/report.xml"]
            command += ["tests", *arguments]
            environment = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if not (folder / "report.xml").exists():
            raise SystemExit(done.stdout + done.stderr)
        return dict(outcomes(folder / "report.xml"))


def outcomes(report: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each test and the message of its failure."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}".removeprefix("tests.")
        failed = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        yield name, failed[0].get("message", "failed").partition("\n")[0] if failed else ""


def fetch() -> None:
    """Download the source distribution."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "webdataset"]
    command += ["--dest", str(SDIST.parent), f"webdataset=={VERSION}"]
    if not SDIST.exists():
        subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sdist", nargs="?", type=Path, default=SDIST, help="webdataset's source distribution")
    parser.add_argument("--fetch", action="store_true", help="only download it, unless it is there")
    parsed, arguments = parser.parse_known_args()
    if parsed.fetch:
        fetch()
        return 0
    results = run(parsed.sdist, arguments)
    passed = sum(not words for words in results.values())
    unexplained = [name for name, words in results.items() if words and name not in EXPLAINED]
    for name, words in results.items():
        print(f"{'FAIL' if words else 'pass'} {name}")
        if words:
            print(f"     {EXPLAINED.get(name) or f'UNEXPLAINED: {words}'}")
    print(f"{passed} of {len(results)} tests pass, {len(unexplained)} fail unexplained")
    return int(bool(unexplained) or passed < PASSING)


if __name__ == "__main__":
    raise SystemExit(main())
