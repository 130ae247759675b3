"""The start page and the guides run: the blocks of each, in order, in an empty folder, as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import range_server
from hub_server import Hub
from programs import need, warnings_of

from tarshards import IndexedShards
from tarshards.testing.faulty_server import serving

pytest.importorskip("torch")

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of code of a guide."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (GUIDES / page).read_text(), re.DOTALL | re.MULTILINE)


def steps(page: str) -> list[tuple[str, str]]:
    """Return the steps of a guide: files to save, programs of Python and lines of bash, each with its text.

    A block of Python that begins with a comment of a file's name is that file. The others that no bash divides are one
    program.
    """
    found: list[tuple[str, str]] = []
    for language, text in blocks(page):
        if named := re.match(r"# (\w+\.py)\n", text):
            found.append((named[1], text))
        elif language == "python" and found and found[-1][0] == "python":
            found[-1] = ("python", found[-1][1] + text)
        elif language in ("python", "bash"):
            found.append((language, text))
    return found


@pytest.fixture
def run(tmp_path, path_with_tools, python_with_torch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a command in the folder, where our tools and this Python's programs are found."""
    folders = path_with_tools.split(":")[0], Path(python_with_torch).parent, Path(sys.executable).parent
    path = ":".join([*map(str, folders), os.environ["PATH"]])
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    ours |= {"PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        everything = ours | environment
        return subprocess.run(command, cwd=tmp_path, env=everything, capture_output=True, text=True, timeout=500)

    run.environment = ours
    return run


@pytest.fixture
def follow(run, tmp_path) -> Callable[..., str]:
    """Return a function that follows a guide and returns the output of its steps."""

    def follow(page: str, **environment: str) -> str:
        printed = ""
        for kind, text in steps(page):
            if kind == "bash":
                done = run("bash", "-euo", "pipefail", "-c", text, **environment)
            else:
                (tmp_path / (kind if kind != "python" else "step.py")).write_text(text)
                if kind != "python":
                    continue
                done = run("python", "step.py", **environment)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            printed += done.stdout
            assert "Traceback" not in done.stderr
            unexpected = [line for line in warnings_of(done.stderr).splitlines() if "Warning" in line]
            assert not [line for line in unexpected if "This DataLoader will create" not in line], done.stderr
        return printed

    return follow


def test_every_guide_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for path in GUIDES.glob("*.md"):
        assert f"(docs/guides/{path.name})" in readme


def test_links_between_pages_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *GUIDES.glob("*.md"), *ROOT.glob("docs/tools/*.md")]:
        for link, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", path.read_text()):
            target = path.parent / link if link else path
            assert target.exists(), f"{path}: {link}"
            if anchor and target.suffix == ".md":
                heads = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
                assert anchor[1:] in anchors, f"{path}: {link}{anchor}"


def test_skill(follow):
    """The file from which coding agents learn to use the package."""
    printed = follow("../../skills/tarshards/SKILL.md")
    assert re.search(r"^filtered +\d+ samples: \d+ filter\(is_small\)$", printed, re.MULTILINE)


def test_start(follow):
    printed = follow("../start.md")
    assert "400 samples in bars-00.tar bars-01.tar bars-02.tar bars-03.tar\n" in printed
    assert re.findall(r"^begins at sample (\d+) of epoch (\d)", printed, re.MULTILINE) == [
        ("0", "0"),
        ("96", "0"),
        ("192", "0"),
    ]
    assert float(re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)[-1]) < 0.5
    assert re.search(r"^delivered +400 samples", printed, re.MULTILINE)


@pytest.mark.interop
def test_images(follow, run, tmp_path):
    import torch

    printed = follow("images.md")
    accuracies = [float(percent) for percent in re.findall(r"accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 4
    assert accuracies[-1] > 90
    (samples,) = re.findall(r"^samples +(\d+)", printed, re.MULTILINE)
    assert f"epochs 0 to 1: {2 * int(samples)} planned = " in printed
    assert f"epochs 2 to 3, rank 0 of 2: {2 * -(-int(samples) // 2)} planned = " in printed, "its half of two epochs"

    checkpoint = tmp_path / "photos.pt"
    checkpoint.unlink()
    with subprocess.Popen(["python", "train.py", "100"], cwd=tmp_path, env=run.environment) as killed:
        while not checkpoint.exists() and killed.poll() is None:
            time.sleep(0.01)
        killed.kill()
    state = torch.load(checkpoint, weights_only=True)["loader"]
    done = run("python", "train.py", str(state["epoch"] + 1))
    assert f"delivered {int(samples) - state['position']:8} samples" in done.stdout, done.stderr
    assert 0 < state["position"] < int(samples)


@pytest.mark.interop
def test_images_that_do_not_decode_are_replaced(run, tmp_path):
    for name, text in steps("images.md"):
        if name.endswith(".py"):
            (tmp_path / name).write_text(text)
    assert run("python", "draw.py").returncode == 0
    for number in range(9):
        (tmp_path / f"photos/disc/{number:04d}.jpg").write_bytes(b"no image")
    (pack,) = [text for kind, text in steps("images.md") if kind == "bash" and "tarsplit" in text]
    assert run("bash", "-eu", "-c", pack.replace("python draw.py\n", "")).returncode == 0
    done = run("python", "train.py", "1")
    (planned,) = map(int, re.findall(r"(\d+) planned", done.stdout))
    assert f"delivered {planned:8} samples" in done.stdout, done.stdout + done.stderr
    failed, repeated = (int(re.search(word, done.stdout)[1]) for word in (r"failed +(\d+)", r"(\d+) repeated"))
    assert 0 < failed <= 9
    assert repeated == failed
    done = run("torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "2")
    assert done.returncode == 0, done.stderr  # after the check over both ranks


@pytest.mark.interop
def test_lightning(follow, run, tmp_path):
    pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning")
    printed = follow("lightning.md", PYTHONWARNINGS="ignore")
    assert re.findall(r"^(\d+) steps, accuracy", printed, re.MULTILINE) == ["16", "24"]
    assert float(printed.rpartition("accuracy ")[2].rstrip("%\n")) > 80

    last = tmp_path / "saved/last.ckpt"
    for path in last.parent.iterdir():
        path.unlink()
    with subprocess.Popen(["python", "train.py", "100", "1"], cwd=tmp_path, env=run.environment) as killed:
        while not last.exists() and killed.poll() is None:
            time.sleep(0.01)
        killed.kill()
    done = run("python", "train.py", "3", "1", PYTHONWARNINGS="ignore")
    assert re.search(r"^48 steps, ", done.stdout, re.MULTILINE), done.stderr


@pytest.mark.interop
def test_masks(follow):
    folder = Path(sys.prefix, "imgaug")  # where `make test-interop` downloads the package
    if not folder.exists():
        pytest.skip("imgaug is not downloaded")
    printed = follow("masks.md", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder))
    assert re.search(r"^4 steps, loss [\d.]+; \d+ of 16 boxes in the last crops$", printed, re.MULTILINE)


def test_disks_and_nodes(follow):
    printed = follow("disks-and-nodes.md")
    assert re.search(r"the consumer alone takes [\d,]+ samples/s, [\d.]+ MB/s; [\d.]+ threads feed it", printed)


@pytest.mark.interop
def test_evaluation(follow):
    assert 0 <= float(follow("evaluation.md")) <= 1


@pytest.mark.interop
def test_accelerate(follow):
    pytest.importorskip("accelerate", reason="needs accelerate")
    printed = follow("accelerate.md", PYTHONWARNINGS="ignore", ACCELERATE_USE_CPU="true")
    assert re.findall(r"^epoch (\d)", printed, re.MULTILINE) == ["0", "1", "2", "3"]
    assert float(printed.rpartition("accuracy ")[2].rstrip("%\n")) > 90


@pytest.mark.interop
def test_the_trainer_of_transformers(run, tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    for name, text in steps("accelerate.md"):
        if name.endswith(".py"):
            (tmp_path / name).write_text(text)
    assert run("python", "data.py").returncode == 0
    settings = {"PYTHONWARNINGS": "ignore", "ACCELERATE_USE_CPU": "true"}
    done = run("python", "hf_train.py", "2", **settings)
    assert "64 steps, loss" in done.stdout, done.stderr
    state = json.loads((tmp_path / "runs/checkpoint-60/loader.json").read_text())
    assert (state["epoch"], state["position"]) == (1, 28 * 32)
    done = run("python", "hf_train.py", "3", **settings)  # from step 64, which train() saves at its end, or 60
    assert "96 steps, loss" in done.stdout, done.stderr
    assert float(done.stdout.split()[-1]) < 0.4


@pytest.mark.interop
def test_trainers(follow, tmp_path):
    pytest.importorskip("grain", reason="needs grain")
    titan = Path(sys.prefix, "torchtitan", "torchtitan")  # where `make test-interop` installs it
    if titan.exists():
        (tmp_path / "torchtitan").symlink_to(titan)
    printed = follow("trainers.md", PYTHONWARNINGS="ignore")
    (expected,) = [text for language, text in blocks("trainers.md") if text.startswith("2 ranks")]
    assert expected in printed
    assert "Grain goes on with (16, 40, 48, 3)" in printed
    assert "torchtitan goes on at position 80 on 3 ranks" in printed


def follow_remotes(follow, **environment: str) -> None:
    printed = follow("remotes.md", **environment)
    assert re.findall(r"^epoch \d: (\d+) samples", printed, re.MULTILINE) == ["2000", "2000"]
    first, second = re.findall(r"([\d.]+) MB received", printed)
    assert float(first) >= 4
    assert float(second) == 0
    assert '000000\tcls:1=0\ttxt:5="row 0"' in printed


def test_remotes_by_http(follow, tmp_path):
    (tmp_path / "site").mkdir()
    with range_server.serving(tmp_path / "site") as site:
        follow_remotes(follow, BUCKET=site.url)
    assert len([*(tmp_path / "site").glob("*.tar.index")]) == 6


@pytest.mark.interop
def test_remotes_in_s3(follow, s3_server):
    s3_server.reset()
    login = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "s3cret", "AWS_DEFAULT_REGION": "us-east-1"}
    follow_remotes(follow, BUCKET="s3://bucket/folder", AWS_ENDPOINT_URL_S3=s3_server.url, **login)
    assert "folder/texts.shards.json" in s3_server.objects()


def test_feeding(follow, tmp_path):
    printed = follow("feeding.md")
    assert printed.count("16 batches; ") == 2
    assert "the limit is" in printed
    assert "tcp://127.0.0.1:7701\t" in printed
    assert "silent" not in printed
    assert json.loads((tmp_path / "feeders.json").read_text())["kind"] == "List"


@pytest.mark.interop
def test_clusters(daft, follow, tmp_path):
    for package in ("ray", "pyspark", "daft"):
        pytest.importorskip(package, reason=f"needs {package}")
    need("java")
    printed = follow("clusters.md", PYTHONWARNINGS="ignore")
    for name, engine in (("ray", "Ray"), ("spark", "Spark"), ("daft", "Daft")):
        assert f"2000 rows on {engine}\n" in printed
        samples = list(IndexedShards(str(tmp_path / f"{name}.shards.json")))
        assert sorted(sample["__key__"] for sample in samples) == [f"{i:06d}" for i in range(2000) if i % 10 < 5]


def test_audio_text_and_ragged_batches(follow):
    printed = follow("audio-text-ragged.md")
    (percent,) = re.findall(r"^(\d+)% of the batches is padding", printed, re.MULTILINE)
    assert int(percent) < 15  # in batches of the plan it is almost a half


@pytest.mark.interop
def test_speech(follow, run, tmp_path):
    need("espeak-ng", "jq")
    for package in ("kaldiio", "lhotse", "pyarrow", "soundfile", "soxr"):
        pytest.importorskip(package, reason=f"needs {package}")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = follow("speech.md", PYTHONWARNINGS="ignore")
    spoken, seconds = re.search(r"^(\d+) utterances, (\d+) s, in spoken$", printed, re.MULTILINE).groups()
    assert f"batches, {seconds} s\n" in printed
    assert len(re.findall(r"^\d+ batches, loss \d", printed, re.MULTILINE)) == 7

    def keys_and_texts(shards: str, *, of: str = "") -> dict[str, bytes]:
        samples = list(IndexedShards(str(tmp_path / shards), fields="txt"))
        return {sample["__key__"].removeprefix(of): sample["txt"] for sample in samples}

    wenet = keys_and_texts("spoken/wenet/shards.shards.json")
    assert len(wenet) == int(spoken)
    assert wenet == keys_and_texts("nemo/text_{0..3}.tar") == keys_and_texts("shar/cuts.*.tar")
    assert wenet == keys_and_texts("raw.shards.json")
    assert wenet == keys_and_texts("kaldi.shards.json") == keys_and_texts("segments.shards.json")
    spelled = keys_and_texts("libri.shards.json")
    assert {key.rpartition("/")[2]: text for key, text in spelled.items()} == {k: t.upper() for k, t in wenet.items()}
    voice = keys_and_texts("voice.shards.json", of="zen-1.0/en/clips/zen_en_")
    assert voice == {key: text for key, text in wenet.items() if int(key[-4:]) % 4}

    program = """if True:
        import json
        from lhotse import CutSet
        cuts = CutSet.from_shar(in_dir="shar-of-wenet")
        print(json.dumps({cut.id: (cut.supervisions[0].text, cut.load_audio().shape[1]) for cut in cuts}))"""
    cuts = json.loads(run("python", "-c", program).stdout)
    assert {key: text.encode() for key, (text, _) in cuts.items()} == wenet
    sounds = IndexedShards(str(tmp_path / "spoken/wenet/shards.shards.json")).decode("audio")
    assert {sample["__key__"]: len(sample["wav"][0]) for sample in sounds} == {key: n for key, (_, n) in cuts.items()}
    twin = str(ROOT / "tests/examples/twins/speech.py")
    assert re.match(r"\d+ batches, loss \d", run("python", twin, "spoken/shar", "twin.pt").stdout)


@pytest.mark.interop
def test_language_models(follow, tmp_path):
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    titan = Path(sys.prefix, "torchtitan", "torchtitan")
    if titan.exists():
        (tmp_path / "torchtitan").symlink_to(titan)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = follow("language.md", PYTHONWARNINGS="ignore")
    assert re.search(r"^\d+ rows, loss \d", printed, re.MULTILINE)
    assert re.search(r"^\d+ documents, each as if it were alone", printed, re.MULTILINE)
    assert "torchtitan goes on after row 40\n" in printed

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = IndexedShards(str(tmp_path / "text.shards.json"))
    tokens = IndexedShards(str(tmp_path / "tokens.shards.json")).decode()
    for text, sample in zip(texts, tokens, strict=True):
        assert text["__key__"] == sample["__key__"]
        assert tokenizer.decode(sample["ids.npy"].tolist()).encode() == text["txt"]


@pytest.mark.interop
def test_medicine(follow, tmp_path):
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel")
    pytest.importorskip("pydicom", reason="needs pydicom")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = follow("medicine.md")
    assert re.search(r"^8 steps, loss 0\.\d+$", printed, re.MULTILINE)
    (shown,) = [text for _, text in blocks("medicine.md") if text.startswith("CT_small.dcm: ")]
    assert shown in printed
    images = [path.read_bytes() for path in (tmp_path / "patient").rglob("*") if path.is_file()]
    assert sorted(sample["dcm"] for sample in IndexedShards(str(tmp_path / "patient.shards.json"))) == sorted(images)
    with range_server.serving(tmp_path) as site:
        file = IndexedShards(f"{site.url}/volumes-0.tar", lazy="scan.nii")[0]["scan.nii"]
        assert nibabel.Nifti1Image.from_stream(file).dataobj[..., 7].shape == (128, 96)
        assert site.bytes < file.size
    assert "a patch of (3, 8, 8) of a volume of (5, 16, 16), " in printed


@pytest.mark.interop
def test_robots(follow, run, tmp_path):
    need("ffmpeg")
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    folders = [Path(sys.prefix, name) for name in ("lerobot", "torchvision")]  # where `make test-interop` installs them
    if not all(folder.exists() for folder in folders):
        pytest.skip("lerobot is not installed")
    paths = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONWARNINGS": "ignore", "HF_HOME": str(tmp_path)}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = follow("robots.md", **paths)
    (frames,) = re.findall(r"^6 episodes, (\d+) frames, in pushes$", printed, re.MULTILINE)
    assert re.findall(r"^epoch (\d): (\d+) windows, loss \d", printed, re.MULTILINE) == [("0", frames), ("1", frames)]
    assert re.search(r"^the mean action of the first four episodes: \[\d", printed, re.MULTILINE)

    twin, compare = ROOT / "tests/examples/twins/robots.py", ROOT / "tests/examples/lerobot_items.py"
    assert f"epoch 1: {frames} windows, loss " in run("python", str(twin), "pushes", **paths).stdout
    with range_server.serving(tmp_path / "shards") as site:
        done = run("python", str(compare), "pushes", "shards", site.url, **paths)
    assert done.stdout == f"{4 * int(frames)} equal items\n", done.stderr

    state = json.loads((tmp_path / "state.json").read_text()) | {"epoch": 1, "position": 64}
    (tmp_path / "state.json").write_text(json.dumps(state))
    done = run("python", "examples/robots.py", "shards", "state.json", **paths)
    assert done.stdout.startswith(f"epoch 1: {int(frames) - 64} windows, loss "), done.stderr


@pytest.mark.interop
def test_publishing(follow, tmp_path):
    for package in ("datasets", "huggingface_hub", "sklearn"):
        pytest.importorskip(package, reason=f"needs {package}")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with serving(Hub()) as hub:
        settings = hub.environment | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        printed = follow("publishing.md", **settings)
    (expected,) = [text for language, text in blocks("publishing.md") if "on the Hub" in text and not language]
    assert printed.endswith(expected)
    (header,) = [text for language, text in blocks("publishing.md") if language == "yaml"]
    assert hub.files["README.md"].decode().startswith(f"---\n{header}---\n\n# Handwritten digits\n")
    assert hub.files.keys() == {path.name for path in (tmp_path / "digits").iterdir()}


def test_faulty_shards(follow):
    printed = follow("faulty-shards.md")
    shown = [text for language, text in blocks("faulty-shards.md") if language == "" and "pip" not in text]
    for text in shown:
        assert text.removesuffix("...\n") in printed


def test_writing_shards(follow):
    printed = follow("writing-shards.md")
    assert "2000 samples in train-0000.tar train-0001.tar train-0002.tar train-0003.tar\n" in printed
    assert "5 shards\n" in printed
