"""The findings and counts of a check."""

from __future__ import annotations

import gzip
import io
import json
import pydoc
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from soak import SOAK

from tarshards import ShardWriter, read_samples, write_samples
from tarshards.index.build import build_index
from tarshards.samples.codecs import decode_field, encode_field
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.opening import open_plain
from tarshards.tar.read import END, pack_header, padding
from tarshards.verbs.check import SHOWN, Report, check, check_shards, duplicates, inspection
from tarshards.verbs.check.duplicates import KeyOrigins
from tarshards.verbs.check.header_scan import scan_headers
from tarshards.verbs.repair import repair_shards


def write(path: Path, samples: list[dict]) -> str:
    write_samples(samples, str(path))
    return str(path)


def pack(path: Path, *names: str, data: bytes = b"1") -> str:
    path.write_bytes(b"".join(pack_header(name, len(data)) + data + bytes(padding(len(data))) for name in names) + END)
    return str(path)


def told(report: Report) -> list[tuple]:
    """Return severity, kind, key and field of each finding."""
    return [(finding.severity, finding.kind, finding.key, finding.field) for finding in report.findings]


def flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


SAMPLES = [{"__key__": f"s{i}", "cls": str(i).encode(), "txt": b"text" * (i + 1)} for i in range(6)]


def test_a_sound_dataset(tmp_path):
    a, b = write(tmp_path / "a.tar", SAMPLES[:3]), write(tmp_path / "b.tar", SAMPLES[3:])
    report = check_shards([a, b])
    assert report.findings == []
    assert (report.shards, report.samples, report.members, report.lost) == (2, 6, 12, 0)
    assert report.bytes == Path(a).stat().st_size + Path(b).stat().st_size
    assert report.fields["txt"].as_json() == {"samples": 6, "bytes": 84, "least": 4, "most": 24}
    assert report.fields["cls"].as_json() == {"samples": 6, "bytes": 6, "least": 1, "most": 1}


def test_damage_is_told_with_its_place_and_the_rest_is_counted(tmp_path):
    a = write(tmp_path / "a.tar", SAMPLES)
    flip(a, 4 * 1024 + 5)
    report = check_shards([a])
    assert told(report) == [("error", "damage", None, None), ("error", "sample", "s2", None)]
    assert report.findings[0].offset == 4096
    assert (report.samples, report.lost) == (5, 1)
    account = report.damaged[a]
    assert sum(account.values()) - account["samples"] - account["lost"] == report.bytes == Path(a).stat().st_size


@pytest.mark.parametrize("kind", ["truncated", "cut between members", "no tar", "empty", "gzip", "missing"])
def test_what_cannot_be_read_to_its_end(tmp_path, kind):
    a, b = write(tmp_path / "a.tar", SAMPLES), write(tmp_path / "b.tar", [{"__key__": "b", "txt": "x", "cls": 1}])
    data = Path(a).read_bytes()
    packed = gzip.compress(data)
    bad = {
        "truncated": data[:5000],
        "cut between members": data[:4096],
        "no tar": b"no tar " * 1000,
        "empty": b"",
        "gzip": packed[: len(packed) // 2],
        "missing": None,
    }[kind]
    Path(a).unlink()
    if bad is not None:
        Path(a).write_bytes(bad)
    report = check_shards([a, b])
    assert report.total("error") >= 1
    assert all(finding.url == a for finding in report.findings if finding.severity == "error")
    assert "b" in repr(list(read_samples(b)))
    assert report.samples >= 1
    assert re.search("^lost      (an unknown number of samples|1 samples or more)$", str(report), re.MULTILINE)
    assert report.as_json()["unread"] == (kind in ("gzip", "missing"))


TEN = [{"__key__": f"{number:02d}", "bin": random.Random(number).randbytes(600)} for number in range(10)]


def broken(data: bytes, kind: str) -> bytes:
    packed = gzip.compress(data)
    return {
        "inside": data[:9000],
        "between members": data[: 5 * 3 * 512],
        "header": data[: 1536 * 4] + b"X" + data[1536 * 4 + 1 :],
        "hole": data[: 1536 * 4] + bytes(1536 * 3) + data[1536 * 7 :],
        "end is a hole": data[: 1536 * 9] + bytes(1536 + 10240),
        "gzip": packed[: len(packed) * 3 // 4],
        "crc": packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:],
        "no tar": b"no tar " * 1000,
        "missing": b"",
    }[kind]


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    "kind", ["inside", "between members", "header", "hole", "end is a hole", "gzip", "crc", "no tar", "missing"]
)
def test_how_much_is_lost_is_known_from_a_manifest_alone(tmp_path, kind, counted, repair):
    a = write(tmp_path / "a.tar", TEN)
    Path(a).write_bytes(broken(Path(a).read_bytes(), kind))
    if kind == "missing":
        Path(a).unlink()
        repair = False
    shards = [Shard(a, samples=10 if counted else None)]
    if repair:
        report, saved = repair_shards(shards, str(tmp_path / "out.tar"))
        assert saved == report.samples
    else:
        report = check_shards(shards)
    told_of, found = str(report), report.as_json()
    assert report.samples < 10
    if counted:
        assert (report.lost, found["lost"], report.unsure) == (10 - report.samples,) * 2 + ([],)
        assert re.search(rf"^lost      {report.lost} samples$", told_of, re.MULTILINE)
        assert (f"{report.samples} samples are whole, {report.lost} lost" in told_of) == bool(report.damaged)
        assert not report.damaged or report.damaged[a]["lost"] == report.lost
    else:
        assert report.lost < 10 - report.samples or kind == "header"
        assert (found["lost"], found["unsure"]) == (report.lost or None, [a])
        amount = f"{report.lost} samples or more" if report.lost else "an unknown number of samples"
        assert re.search(f"^lost      {amount}$", told_of, re.MULTILINE)
        of_shard = f"{report.lost} or more" if report.lost else "an unknown number"
        assert (f"{report.samples} samples are whole, {of_shard} lost; bytes" in told_of) == bool(report.damaged)
        assert not report.damaged or report.damaged[a]["lost"] == (report.lost or None)


def test_a_number_of_samples_that_is_not_that_of_the_manifest(tmp_path):
    a = write(tmp_path / "a.tar", TEN)
    report = check_shards([Shard(a, samples=12)])
    assert [str(finding) for finding in report.findings] == [f"error: {a}: 10 samples, but 12 in the manifest"]
    assert (report.lost, report.unsure) == (2, [])
    report = check_shards([Shard(a, samples=9)])
    assert (report.total("error"), report.lost, report.unsure) == (1, 0, [])
    assert check_shards([Shard(a, samples=10)]).total("error") == 0


def test_what_an_error_kept_from_being_read_is_no_truncation(tmp_path):
    """The copy of a compressed shard ends where its data could not be decompressed."""
    a = write(tmp_path / "a.tar", TEN)
    Path(a).write_bytes(broken(Path(a).read_bytes(), "gzip"))
    [gap, error] = check_shards([a]).findings
    assert re.search(r"the rest of the shard could not be read; \d+ bytes skipped", gap.reason)
    assert error.reason == "truncated gzip data"


def test_fields_that_some_samples_lack(tmp_path):
    a = write(tmp_path / "a.tar", SAMPLES[:2])
    b = write(tmp_path / "b.tar", [{"__key__": "x", "cls": 1}, {"__key__": "y", "cls": 1, "json": {}, "txt": ""}])
    report = check_shards([a, b])
    assert [(f.severity, f.kind, f.url, f.key, f.reason) for f in report.findings] == [
        ("warning", "missing field", a, "s0", "3 of 4 samples have no json"),
        ("warning", "missing field", b, "x", "1 of 4 samples have no txt"),
    ]


def test_keys_that_come_again(tmp_path):
    a = write(tmp_path / "a.tar", SAMPLES[:3])
    b = write(tmp_path / "b.tar", SAMPLES[2:])
    c = pack(tmp_path / "c.tar", "i.x", "j.x", "i.y", "j.y")
    report = check_shards([a, b, c])
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert [(finding.url, finding.key) for finding in errors] == [(b, "s2"), (c, "i"), (c, "j")]
    assert f"offset 4096 of {a}" in errors[0].reason
    assert "not adjacent" in errors[1].reason


def test_a_field_that_comes_twice(tmp_path):
    report = check_shards([pack(tmp_path / "a.tar", "a.x", "a.X", "b.x")])
    assert told(report) == [("error", "sample", "a", "x")]
    assert (report.samples, report.lost) == (1, 1)


@pytest.mark.parametrize("jobs", [1, 3])
def test_fields_that_do_not_decode(tmp_path, jobs):
    image = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    samples = [{"__key__": f"{i:03d}", "png": image, "jpg": image, "json": {"i": i}, "npy": image} for i in range(40)]
    a = write(tmp_path / "a.tar", samples)
    whole = list(read_samples(a))
    for i, field in ((3, "png"), (17, "jpg"), (18, "json"), (30, "npy")):
        whole[i][field] = whole[i][field][:-5]
    b = write(tmp_path / "b.tar", whole)
    assert check_shards([a], decode=True, jobs=jobs).findings == []
    assert check_shards([b], jobs=jobs).findings == []
    report = check_shards([b], decode=True, jobs=jobs)
    assert [(f.key, f.field) for f in report.findings] == [
        ("003", "png"),
        ("017", "jpg"),
        ("018", "json"),
        ("030", "npy"),
    ]
    data = Path(b).read_bytes()
    for finding in report.findings:
        size = len(whole[int(finding.key)][finding.field])
        assert data[finding.offset : finding.offset + size] == whole[int(finding.key)][finding.field]


def jpegs() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    pixels = np.kron(rng.integers(0, 200, (5, 6, 3), np.uint8), np.ones((8, 8, 1), np.uint8))[:37, :45]
    image = Image.fromarray(pixels + rng.integers(0, 50, pixels.shape, np.uint8))
    found = {}
    for name, mode, options in [
        ("420", "RGB", {"subsampling": 2}),
        ("444", "RGB", {"subsampling": 0}),
        ("gray", "L", {}),
        ("cmyk", "CMYK", {}),
        ("rgb", "RGB", {"keep_rgb": True}),
        ("progressive", "RGB", {"progressive": True}),
        ("restarts", "RGB", {"restart_marker_blocks": 3}),
    ]:
        stream = io.BytesIO()
        image.convert(mode).save(stream, "JPEG", **options)
        found[name] = stream.getvalue()
    return found


@pytest.mark.parametrize("kind", jpegs())
def test_damaged_jpegs_are_found_as_by_decoding_them_at_their_full_size(tmp_path, monkeypatch, kind):
    rng = random.Random(0)
    sound = jpegs()[kind]
    samples = [{"__key__": "sound", "jpg": sound}]
    for i in range(300):
        data = bytearray(sound[: rng.randrange(4, len(sound))] if i % 3 == 0 else sound)
        for _ in range(rng.choice([0, 1, 3]) if i % 3 == 0 else rng.choice([1, 1, 3])):
            data[rng.randrange(3, len(data))] = rng.randrange(256)
        samples.append({"__key__": f"{i:03d}", "jpg": bytes(data)})
    a = write(tmp_path / "a.tar", samples)
    found = check_shards([a], decode=True, jobs=2)
    monkeypatch.setattr(inspection, "check_image", lambda data: decode_field("jpg", data, "rgb8"))
    assert found.as_json() == check_shards([a], decode=True, jobs=2).as_json()
    assert 100 < found.total("error") < 300


def test_damaged_sounds_are_found_as_decode_finds_them(tmp_path):
    sound = encode_field("wav", (np.zeros((100, 1), np.int16), 8000))
    a = write(tmp_path / "a.tar", [{"__key__": "a", "wav": sound}, {"__key__": "b", "wav": sound[:-9]}])
    (finding,) = check_shards([a], decode=True).findings
    assert (finding.key, finding.field, finding.reason) == ("b", "wav", "truncated: 235 of 244 bytes")
    assert check_shards([a]).findings == []


def test_what_can_run_code_is_not_decoded(tmp_path):
    pickled = b"cos\nsystem\n(S'touch " + str(tmp_path / "run").encode() + b"'\ntR."
    a = write(tmp_path / "a.tar", [{"__key__": "a", "pkl": pickled, "pth": b"x", "pkl.gz": b"x"}])
    assert check_shards([a], decode=True).findings == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["n" * 120 + ".x", "é.x", "a b.x", "a.", "d/" + "n" * 98 + ".x"])
def test_names_that_dali_misreads(tmp_path, name):
    report = check_shards([pack(tmp_path / "a.tar", name, "sound.x" if name[-1] == "x" else "sound.")])
    assert ("warning", "DALI") in {finding[:2] for finding in report.findings}
    assert report.total("error") == 0


def test_members_in_no_sample(tmp_path):
    report = check_shards([pack(tmp_path / "a.tar", "README", "a.txt", ".hidden", "__x__/a.json")])
    assert [finding.reason for finding in report.findings] == [
        "2 members are in no sample: no extension",
        "1 members are in no sample: reserved name",
    ]


@pytest.mark.parametrize("options", [{}, {"on_survey": lambda *_: None}])
def test_an_archive_behind_another_is_an_error_unless_archives_were_concatenated(tmp_path, options):
    a, b = pack(tmp_path / "a.tar", "a.txt"), pack(tmp_path / "b.tar", "b.txt")
    Path(a).write_bytes(Path(a).read_bytes() + Path(b).read_bytes())
    report = check_shards([a], **options)
    assert told(report) == [("error", "zeros", None, None)]
    assert "`--ignore-zeros` (concatenated=True)" in report.findings[0].reason
    assert (report.samples, report.joined) == (2, 0)
    for shards in find_shards(a, concatenated=True), [Shard(a, concatenated=True)]:
        report = check_shards(shards, **options)
        assert told(report) == []
        assert (report.samples, report.joined) == (2, 1)


def test_indexes(tmp_path):
    with ShardWriter(str(tmp_path / "{shard}.tar"), max_samples=3) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    shards = writer.shards
    assert check_shards(shards).findings == []
    Path(f"{shards[1]}.index").unlink()
    assert [str(finding) for finding in check_shards(shards).findings] == [
        f"warning: {shards[1]}: 1 of 2 shards have no index; create it with `tarindex`"
    ]
    shutil.copy(f"{shards[0]}.index", f"{shards[1]}.index")
    assert told(check_shards(shards)) == [("error", "index", None, None)]
    for shard in shards:
        Path(f"{shard}.index").unlink()
    assert check_shards(shards).findings == []


def test_compressed_shards_and_pipes(tmp_path):
    a = write(tmp_path / "a.tar.gz", SAMPLES)
    for url in (a, f"pipe:zcat {a}"):
        report = check_shards(find_shards(url, allow_pipe=True))
        assert (report.samples, report.findings) == (6, [])


def test_findings_are_bounded(tmp_path):
    keys = [{"__key__": f"{i:06d}", "txt": ""} for i in range(SHOWN + 50)]
    a, b = write(tmp_path / "a.tar", keys), write(tmp_path / "b.tar", keys)
    report = check_shards([a, b])
    assert report.total("error") == SHOWN + 50
    assert [finding.key for finding in report.findings] == [sample["__key__"] for sample in keys[:SHOWN]]
    assert "error: 50 more: duplicate key" in str(report)


def test_the_report_as_json(tmp_path):
    a = write(tmp_path / "a.tar", SAMPLES)
    flip(a, 4 * 1024 + 5)
    report = check_shards([a])
    loaded = json.loads(json.dumps(report.as_json()))
    assert (loaded["errors"], loaded["samples"], loaded["lost"]) == (2, 5, 1)
    assert loaded["fields"]["cls"] == {"samples": 5, "bytes": 5, "least": 1, "most": 1, "missing": 0}
    assert loaded["findings"][0] == {
        "severity": "error",
        "kind": "damage",
        "reason": "bad header checksum; 1024 bytes skipped",
        "url": a,
        "offset": 4096,
        "key": None,
        "field": None,
    }


def test_repair_writes_whole_samples_once(tmp_path):
    a, b = write(tmp_path / "a.tar", SAMPLES), write(tmp_path / "b.tar", SAMPLES[3:])
    flip(a, 4 * 1024 + 5)
    assert repair_shards([a, b], str(tmp_path / "out.tar")).samples == 5
    read = {sample["__key__"]: sample for sample in read_samples(tmp_path / "out.tar")}
    assert list(read) == ["s0", "s1", "s3", "s4", "s5"]
    assert all(read[sample["__key__"]]["txt"] == sample["txt"] for sample in SAMPLES if sample["__key__"] in read)
    assert check_shards([str(tmp_path / "out.tar")]).findings == []


@pytest.mark.parametrize("held", [1, 7, 1000, 10**6])
def test_duplicates_are_those_of_a_dict(held, monkeypatch):
    monkeypatch.setattr(duplicates, "HELD", held)
    rng = random.Random(held)
    count = 5000 if held > 1 else 500
    keys = [f"{rng.randrange(3 * count // 5)}é\udce9" for _ in range(count)]
    expected: dict[str, list] = {}
    with KeyOrigins() as places:
        for number, key in enumerate(keys):
            places.add(key, (0, number))
            expected.setdefault(key, []).append((0, number))
        found = dict(places.duplicates())
    assert found == {key: numbers for key, numbers in expected.items() if len(numbers) > 1}


@pytest.mark.parametrize("count", [300_000, *[pytest.param(1_000_000, marks=pytest.mark.soak)] * (SOAK > 1)])
def test_duplicates_within_bounded_memory(count):
    """Keys on disk take less than 90 MB, including 30 of Python and numpy; in a dict 300,000 would take 80 more."""
    code = (
        f"count = {count}"
        """
from tarshards.verbs.check.duplicates import KeyOrigins
with KeyOrigins() as keys:
    for number in range(count):
        keys.add(f"some/folder/{number % (count - 1):012d}", (number // 1000, number))
    assert [key for key, _ in keys.duplicates()] == ["some/folder/000000000000"]
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 90_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(tmp_path, interrupt, number):
    write(tmp_path / "a.tar", SAMPLES)
    interrupt("tarcheck --decode -j 2 --repair out.tar a.tar never.tar", number)


MEMBERS = st.builds(
    "{}.{}".format,
    st.sampled_from(["a", "b", "c", "d/a", "a__b", "é", "_"]),
    st.sampled_from(["x", "y.z", "X", "json"]),
)
ODD = st.sampled_from(
    ["README", ".hidden", "__x__/a.x", "a b.x", "a.", "a.__key__", "a.x y", "d/" + "n" * 98 + ".x", "d/" * 70 + "a.x"]
)
KINDS = st.sampled_from([tarfile.REGTYPE] * 9 + [tarfile.DIRTYPE, tarfile.SYMTYPE])
SHARDS = st.tuples(
    st.lists(st.tuples(MEMBERS | MEMBERS | MEMBERS | ODD, st.sampled_from([0, 1, 512, 3000]), KINDS), max_size=9),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.sampled_from([0, 0, 0, 512, 1024, 10240]),
)


def tarred(members: list[tuple[str, int, bytes]], form: int, more: int) -> bytes:
    """Return a tar as Python's tarfile writes it, with *more* bytes of zeros behind."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form, encoding="utf-8") as archive:
        for name, size, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, size if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(b"1" * size))
    return file.getvalue() + bytes(more)


def check_both_ways(urls: list[str]) -> tuple[Report, Report]:
    """Return the findings with all headers in one call where that is enough, and by a survey of every shard."""
    with pytest.MonkeyPatch.context() as patch:
        found = check_shards(urls)
        patch.setattr(check, "scan_headers", lambda *_: None)
        return found, check_shards(urls)


@settings(max_examples=75, deadline=None)
@given(st.lists(SHARDS, min_size=1, max_size=3), st.booleans())
def test_a_survey_of_sound_shards_finds_the_same(tmp_path_factory, shards, joined):
    folder = tmp_path_factory.mktemp("shards")
    archives = [tarred(*shard) for shard in shards]
    urls = []
    for i, data in enumerate([b"".join(archives)] if joined else archives):
        (folder / f"{i}.tar").write_bytes(data)
        urls.append(str(folder / f"{i}.tar"))
    found, surveyed = check_both_ways(urls)
    assert found.as_json() == surveyed.as_json()
    assert str(found) == str(surveyed)


def test_a_survey_of_many_samples_finds_the_same(tmp_path):
    rng = random.Random(0)
    urls = []
    for shard in range(3):
        names = [f"{rng.randrange(900):03d}{i % 7}" for i in range(1000)]
        samples = [{"__key__": key, "a": b"1", **({"b": b"2" * i} if i % 3 else {})} for i, key in enumerate(names)]
        unique = {sample["__key__"]: sample for sample in samples}
        urls.append(write(tmp_path / f"{shard}.tar", list(unique.values())))
        with open_plain(urls[-1]) as file:
            assert scan_headers(file) is not None
    found, surveyed = check_both_ways(urls)
    assert found.as_json() == surveyed.as_json()
    assert found.counts["error", "duplicate key"] > 100


@pytest.mark.parametrize("change", [(b"a.x", b"c.x"), (b"b.y", b"b.z"), None])
@pytest.mark.parametrize("split", ["first", "last"])
def test_a_stale_index_is_found_in_the_same_scan(tmp_path, change, split):
    path = tmp_path / "0.tar"
    path.write_bytes(b"".join(tarred_one(name) for name in ("a.x", "a.y", "b.x", "b.y")) + bytes(1024))
    build_index(str(path), split=split).save(Location.of(path))
    if change is not None:
        name, other = change
        path.write_bytes(path.read_bytes().replace(tarred_one(name.decode()), tarred_one(other.decode())))
    found, surveyed = check_both_ways([str(path)])
    assert found.as_json() == surveyed.as_json()
    assert (found.counts["error", "index"] > 0) == (change is not None)


def tarred_one(name: str) -> bytes:
    return pack_header(name, 3) + b"123" + bytes(509)


@pytest.mark.parametrize(
    "names",
    [
        ["README"],
        ["a.x", "README", "b.x"],
        ["a.x", "README"],
        ["README", "a.x"],
        ["a b.x"],
        ["a."],
        ["a.x", "n" * 120 + ".x"],
        ["d/" + "n" * 98 + ".x"],
    ]
    + [["a.x", "a.X"], ["a.__key__"], ["é" * 40 + ".x"]],
)
def test_what_headers_alone_do_not_tell_is_surveyed(tmp_path, names):
    with open_plain(pack(tmp_path / "a.tar", *names)) as file:
        assert scan_headers(file) is None


@pytest.mark.parametrize("held", [1, 7, 10**6])
def test_many_keys_at_once_are_the_same_as_one_by_one(held, monkeypatch):
    monkeypatch.setattr(duplicates, "HELD", held)
    keys = [f"{number % 30}" for number in range(50)]
    with KeyOrigins() as one_by_one, KeyOrigins() as at_once:
        for number, key in enumerate(keys):
            one_by_one.add(key, (number // 20, number))
        for shard in range(3):
            numbers = range(20 * shard, min(20 * shard + 20, 50))
            at_once.extend([keys[number] for number in numbers], shard, numbers)
        found = dict(at_once.duplicates())
        assert found == dict(one_by_one.duplicates())
        assert len(found) == 20


@pytest.mark.parametrize("held", [1, 7, 50, 10**6])
@pytest.mark.parametrize("last", ["00", "37", "98", "99", "zz"])
def test_the_first_key_out_of_order_is_compared_with_all_before(held, last, monkeypatch):
    monkeypatch.setattr(duplicates, "HELD", held)
    keys = [f"{number:02d}" for number in range(99)]
    with KeyOrigins() as origins:
        origins.extend(keys[:40], 0, range(40))
        origins.extend([], 1, [])
        for number in range(40, 99):
            origins.add(keys[number], (1, number))
        assert list(origins.duplicates()) == []
        origins.extend([last, "zzz"], 2, [99, 100])
        origins.add("zzzz", (2, 101))
        expected = {last: [(int(int(last) >= 40), int(last)), (2, 99)]} if last in keys else {}
        assert dict(origins.duplicates()) == expected


def test_repair_opens_scans_and_judges_a_damaged_shard_once(tmp_path, monkeypatch):
    from tarshards.cli import tarcheck

    a = write(tmp_path / "a.tar", SAMPLES)
    flip(a, 4 * 1024 + 5)
    calls: Counter[str] = Counter()
    for name in (
        "storage.location.Location.open",
        "samples.resync.walking._pieces",
        "verbs.check.header_scan.walk",
        "samples.resync.judging._judge_segments",
    ):
        function = pydoc.locate(f"tarshards.{name}")

        def counted(*args, name=name, function=function, **options):
            if not isinstance(args[0], Location) or args[0].url == a:
                calls[name.rpartition(".")[2]] += 1
            return function(*args, **options)

        monkeypatch.setattr(f"tarshards.{name}", counted)
    with pytest.raises(SystemExit):
        tarcheck.main(["--repair", str(tmp_path / "out.tar"), a], standalone_mode=False)
    assert calls == {"open": 1, "_pieces": 1, "_judge_segments": 1}
    assert [sample["__key__"] for sample in read_samples(tmp_path / "out.tar")] == ["s0", "s1", "s3", "s4", "s5"]


def test_an_index_of_other_headers_is_an_error(tmp_path):
    url = str(tmp_path / "a.tar")
    samples = [{"__key__": f"{i}", "cls": 9} for i in range(5)]
    write_samples(samples, url)
    index = build_index(url)
    write_samples([*samples[:2], {"__key__": "2", "cls": 10}, *samples[3:]], url)
    index.save(url)
    (finding,) = check_shards([url]).findings
    assert finding.reason.startswith("stale: 2.cls has changed since the shard was indexed")
