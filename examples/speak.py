"""Speech to try the recipes on: espeak-ng speaks the Zen of Python, in the layouts of other corpora and toolkits.

Run as examples/speak.py FOLDER; it needs espeak-ng (Debian's package of that name), soundfile and lhotse.
"""

import json
import subprocess
import sys
import tarfile
from collections import defaultdict
from io import BytesIO
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import numpy as np
import soundfile

VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp")
SHARDS = 4


class Utterance(NamedTuple):
    """A line of the text, spoken by one of the voices."""

    speaker: str
    number: int
    text: str
    wav: bytes

    @property
    def name(self) -> str:
        return f"{self.speaker}-1-{self.number:04d}"

    def encoded(self, extension: str) -> bytes:
        samples, rate = soundfile.read(BytesIO(self.wav), dtype="int16")
        stream = BytesIO()
        soundfile.write(stream, samples, rate, format=extension)
        return stream.getvalue()

    @property
    def seconds(self) -> float:
        return float(soundfile.info(BytesIO(self.wav)).duration)


def speak(path: Path) -> list[Utterance]:
    """Return the utterances; each is first written to *path*, as the header of a WAV in a pipe has no size."""
    zen = subprocess.run([sys.executable, "-c", "import this"], capture_output=True, text=True, check=True).stdout
    utterances = []
    for speaker, voice in enumerate(VOICES, 1):
        for number, text in enumerate(zen.splitlines()[2:]):
            subprocess.run(["espeak-ng", "-v", voice, "-w", path, text], check=True)
            utterances.append(Utterance(str(speaker), number, text, path.read_bytes()))
    return utterances


def write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, BytesIO(data))


def lines(rows: list[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode()


def like_librispeech(utterances: list[Utterance], folder: Path) -> None:
    """An archive as LibriSpeech's: a folder for each chapter, with its sounds and a file of all their transcripts."""
    members = []
    for speaker, group in groupby(utterances, lambda each: each.speaker):
        chapter, own = f"Zen/all/{speaker}/1", list(group)
        members += [(f"{chapter}/{each.name}.flac", each.encoded("flac")) for each in own]
        spelled = lines([f"{each.name} {each.text.upper()}" for each in own])
        members.append((f"{chapter}/{speaker}-1.trans.txt", spelled))
    write_tar(folder / "zen-all.tar.gz", members)


def like_common_voice(utterances: list[Utterance], folder: Path) -> None:
    """An archive as Common Voice's: a folder of clips, and tables with the sentences of a part of them."""
    rows = ["client_id\tpath\tsentence\tup_votes"]
    rows += [f"{each.speaker}\tzen_en_{each.name}.mp3\t{each.text}\t2" for each in utterances if each.number % 4]
    members = [("zen-1.0/en/train.tsv", lines(rows))]
    members += [(f"zen-1.0/en/clips/zen_en_{each.name}.mp3", each.encoded("mp3")) for each in utterances]
    write_tar(folder / "zen-1.0-en.tar.gz", members)


def like_kaldi(utterances: list[Utterance], folder: Path) -> None:
    """Folders as Kaldi's recipes make them: with a sound for each utterance, and with segments of longer sounds."""
    whole, parts = folder / "kaldi", folder / "kaldi-segments"
    tables: dict[Path, list[str]] = defaultdict(list)
    for speaker, own in groupby(utterances, lambda each: each.speaker):
        recording, begun = [], 0.0
        for each in own:
            write_file(whole / f"wav/{each.name}.wav", each.wav)
            tables[whole / "wav.scp"].append(f"{each.name} {whole}/wav/{each.name}.wav")
            for data in whole, parts:
                tables[data / "text"].append(f"{each.name} {each.text}")
                tables[data / "utt2spk"].append(f"{each.name} {speaker}")
            tables[parts / "segments"].append(f"{each.name} {speaker}-1 {begun:.2f} {begun + each.seconds:.2f}")
            samples, rate = soundfile.read(BytesIO(each.wav), dtype="int16")
            recording.append(samples)
            begun += each.seconds
        tables[parts / "wav.scp"].append(f"{speaker}-1 {parts}/wav/{speaker}-1.wav")
        write_file(parts / f"wav/{speaker}-1.wav", b"")
        soundfile.write(parts / f"wav/{speaker}-1.wav", np.concatenate(recording), rate)
    for path, rows in tables.items():
        write_file(path, lines(rows))


def like_wenet(utterances: list[Utterance], folder: Path) -> None:
    """Shards and their list, as wenet's make_shard_list.py writes them, and a list of single files."""
    paths = [folder / f"wenet/shards_{shard:09d}.tar" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        pairs = [
            ((f"{each.name}.txt", each.text.encode()), (f"{each.name}.wav", each.wav))
            for each in utterances[shard::SHARDS]
        ]
        write_tar(path, [member for pair in pairs for member in pair])
    write_file(folder / "wenet/shards.list", lines(list(map(str, paths))))
    entries = [
        {"key": each.name, "wav": f"{folder}/kaldi/wav/{each.name}.wav", "txt": each.text} for each in utterances
    ]
    write_file(folder / "wenet/data.list", lines(list(map(json.dumps, entries))))


def like_nemo(utterances: list[Utterance], folder: Path) -> None:
    """Tars and their manifests, as NeMo's convert_to_tarred_audio_dataset.py writes them."""
    for shard in range(SHARDS):
        own = utterances[shard::SHARDS]
        write_tar(folder / f"nemo/audio_{shard}.tar", [(f"{each.name}.wav", each.wav) for each in own])
        entries = [
            {"audio_filepath": f"{each.name}.wav", "duration": each.seconds, "text": each.text, "shard_id": shard}
            for each in own
        ]
        write_file(folder / f"nemo/sharded_manifests/manifest_{shard}.json", lines(list(map(json.dumps, entries))))


def as_shar(utterances: list[Utterance], folder: Path) -> None:
    """Lhotse's Shar, written by lhotse."""
    from lhotse import Recording, SupervisionSegment
    from lhotse.shar import SharWriter

    (folder / "shar").mkdir(parents=True, exist_ok=True)
    with SharWriter(folder / "shar", fields={"recording": "flac"}, shard_size=20) as writer:
        for each in utterances:
            cut = Recording.from_bytes(each.wav, each.name).to_cut()
            said = SupervisionSegment(each.name, each.name, 0, cut.duration, text=each.text, speaker=each.speaker)
            cut.supervisions = [said]
            writer.write(cut)


if __name__ == "__main__":
    with NamedTemporaryFile(suffix=".wav") as file:
        spoken = speak(Path(file.name))
    for write in like_librispeech, like_common_voice, like_kaldi, like_wenet, like_nemo, as_shar:
        write(spoken, Path(sys.argv[1]))
    print(f"{len(spoken)} utterances, {sum(each.seconds for each in spoken):.0f} s, in {sys.argv[1]}")
