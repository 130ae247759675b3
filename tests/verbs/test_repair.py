"""Damage in a shard: whole samples are read, others are reported, and the counts include every byte."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import tarfile
from typing import NamedTuple

import pytest
from soak import SOAK

from tarshards import Ledger, read_samples, write_samples
from tarshards.errors import OpenError
from tarshards.kernels import _tar_py as twin
from tarshards.samples.resync.reading import survey_file
from tarshards.samples.resync.walking import Gap, Zeros, walk
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.opening import PlainFile, open_plain
from tarshards.tar.read import BLOCK, END, NO_END, pack_header, padding

LONG = "folder/" + "n" * 110
FIELDS = {"cls": 1, "jpg": 700, "seg.png": 1536, "txt": 0}


class Archive(NamedTuple):
    """A sound archive, its samples by key, and where their members lie: (header, start, end, end of the padding)."""

    data: bytes
    samples: dict[str, dict[str, bytes]]
    places: dict[str, list[tuple[int, int, int, int]]]


def make_data(size: int, seed: str) -> bytes:
    """Return bytes none of which is zero."""
    return bytes(random.Random(seed).choices(range(1, 256), k=size))


def pack(members: dict[str, bytes]) -> bytes:
    return b"".join(pack_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in members.items())


def tarfile_pack(members: dict[str, bytes], form: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1234567890.25
            archive.addfile(info, io.BytesIO(data))
        return buffer.getvalue()[: archive.offset]


def archive(names: list[str], fields: dict[str, int], writer=pack) -> Archive:
    samples = {name: {field: make_data(size, name + field) for field, size in fields.items()} for name in names}
    members = {f"{name}.{field}": data for name in names for field, data in samples[name].items()}
    data = writer(members) + END
    places: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in names}
    end = 0
    with tarfile.open(fileobj=io.BytesIO(data)) as oracle:
        for info in oracle:
            stop = info.offset_data + info.size
            places[info.name.partition(".")[0]].append((info.offset, info.offset_data, stop, stop + padding(stop)))
            assert info.offset == end
            end = stop + padding(stop)
    return Archive(data, samples, places)


ARCHIVES = {
    "ours": archive([f"s{i}" for i in range(5)], FIELDS),
    "ours, long names": archive([f"{LONG}{i}é" for i in range(4)], {"cls": 1, "jpg": 700}),
    "pax": archive(["a", LONG, "é", "b"], {"cls": 1, "jpg": 700}, lambda m: tarfile_pack(m, tarfile.PAX_FORMAT)),
    "gnu": archive(["a", LONG, "b", "c"], {"cls": 1, "jpg": 512}, lambda m: tarfile_pack(m, tarfile.GNU_FORMAT)),
    "one field": archive([f"s{i}" for i in range(6)], {"txt": 100}),
}


@pytest.fixture
def plain(tmp_path):
    """Return a function that makes an open shard of bytes, each time instead of the last."""
    with open(tmp_path / "a.tar", "w+b") as file:

        def fill(data: bytes, *, concatenated: bool = False) -> PlainFile:
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), data, 0)
            shard = PlainFile(file, Location("a.tar"))
            shard.shard = Shard("a.tar", concatenated=concatenated)
            return shard

        yield fill


def whole_samples(file: PlainFile) -> dict[str, dict[str, bytes]]:
    """Survey a shard, check its byte counts, and return the samples that are taken for whole."""
    found = survey_file(file)
    assert sum(found.byte_counts.values()) == file.size
    assert min(found.byte_counts.values()) >= 0
    whole = [sample for sample in found.samples if sample.problem is None]
    read = {sample.key: {field: file.read(a, b - a) for field, a, b in sample.members} for sample in whole}
    assert len(read) == len(whole)
    return read


def reason(file: PlainFile, key: str) -> str | None:
    [problem] = [sample.problem for sample in survey_file(file).samples if sample.key == key]
    return problem


def check(sound: Archive, damaged: bytes, file: PlainFile) -> set[str]:
    """Check the samples read from an archive with one damaged range; return the keys of samples that are not read."""
    read = whole_samples(file)
    assert read.keys() <= sound.samples.keys(), "invented"

    def differ(start: int, end: int) -> bool:
        return damaged[start:end] != sound.data[start:end]

    undamaged = {key for key, places in sound.places.items() if not differ(places[0][0], places[-1][3])}
    felt = any(differ(header, begin) for places in sound.places.values() for header, begin, _, _ in places)
    for key, places in sound.places.items():
        if not any(differ(header, after) for header, _, _, after in places):
            if key not in read and read.keys() & undamaged:  # there is what it can be compared with
                _, _, end, after = places[-1]
                assert end == after, (key, "is intact")
                assert damaged[after : after + 100].strip(b"\0")
                assert reason(file, key) == "next to damage that may reach into its data"
            else:
                assert key not in read or read[key] == sound.samples[key]
        elif key in read and read[key] != sound.samples[key]:
            assert not felt, (key, "is damaged")  # but inside of data, where no header feels it, who could tell?
            assert read[key].keys() == sound.samples[key].keys(), (key, "is short")
    return sound.samples.keys() - read.keys()


def ends_within(survey):
    return [item for item in survey.items if isinstance(item, Zeros)]


@pytest.mark.parametrize("name", ARCHIVES)
def test_sound_archives_are_whole(plain, name):
    sound = ARCHIVES[name]
    assert whole_samples(plain(sound.data)) == sound.samples
    assert whole_samples(plain(sound.data + bytes(-len(sound.data) % 10240))) == sound.samples


@pytest.mark.soak
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_changed_byte_of_a_header_costs_its_own_sample_alone(plain, name):
    sound = ARCHIVES[name]
    step, lost = 1 if SOAK > 1 else 13, 0  # of a block's 512 bytes, which are no multiple
    for key, places in sound.places.items():
        for header, start, _, _ in places:
            for at in range(header, start, step):
                mask = (0x01, 0x20, 0x80, 0xFF)[at % 4]
                if is_extended_data(sound, at):
                    continue  # no checksum covers it, as test_tar_damage.py has it
                damaged = sound.data[:at] + bytes([sound.data[at] ^ mask]) + sound.data[at + 1 :]
                missing = check(sound, damaged, plain(damaged))
                assert missing <= {key}
                lost += len(missing)
    assert lost > 1000 // step


def is_extended_data(sound: Archive, at: int) -> bool:
    for places in sound.places.values():
        for header, start, _, _ in places:
            if header <= at < start - BLOCK:
                return at >= header + BLOCK
    return False


def holes(sound: Archive, kind: str):
    """Yield the archive with a hole at each block, of several sizes, and with holes anywhere."""
    rng = random.Random(1)
    length = len(sound.data) - len(END)
    places = [(start, start + n * BLOCK) for n in (1, 2, 3, 5, 8) for start in range(0, length - n * BLOCK + 1, BLOCK)]
    for _ in range(500 if SOAK > 1 else 150):
        start = rng.randrange(length)
        places.append((start, min(start + rng.randrange(1, 4000), length)))
    for start, end in places:
        if not all(is_extended_data(sound, at) for at in (start, end - 1)):
            hole = bytes(end - start) if kind == "zeros" else bytes(rng.choices(range(1, 128), k=end - start))
            yield sound.data[:start] + hole + sound.data[end:]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["zeros", "garbage"])
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hole_costs_what_it_touches_and_nothing_else(plain, name, kind):
    for damaged in holes(ARCHIVES[name], kind):
        check(ARCHIVES[name], damaged, plain(damaged))


@pytest.mark.soak
@pytest.mark.parametrize("name", ARCHIVES)
def test_pieces_leave_no_byte_out(plain, name):
    for damaged in [ARCHIVES[name].data, *holes(ARCHIVES[name], "garbage")]:
        file = plain(damaged)
        position = 0
        for piece in walk(file):
            start, end = (piece[0][1], piece[-1][3]) if isinstance(piece, list) else piece[:2]
            assert start == position
            position = min(end + (padding(end - piece[-1][2]) if isinstance(piece, list) else 0), file.size)
        assert position == file.size


@pytest.mark.parametrize("name", ARCHIVES)
def test_truncation_costs_the_sample_it_cuts(plain, name):
    sound = ARCHIVES[name]
    for length in range(1, len(sound.data) - len(END), 7 if SOAK > 1 else 23):
        read = whole_samples(plain(sound.data[:length]))
        whole = {key for key, places in sound.places.items() if places[-1][2] <= length}
        if len(whole) > 1:  # one alone may be cut short for all one knows
            assert read == {key: sound.samples[key] for key in whole}
        assert read.items() <= sound.samples.items()


@pytest.mark.parametrize("name", ["ours", "gnu", "one field"])
def test_bytes_that_are_missing_cost_what_they_were_in(plain, name):
    sound = ARCHIVES[name]
    keys = list(sound.samples)
    for seed in range(300):
        rng = random.Random(seed)
        start = rng.randrange(len(sound.data) - len(END))
        lost = rng.choice([1, 100, 511, 513])
        read = whole_samples(plain(sound.data[:start] + sound.data[start + lost :]))
        hit = [i for i, key in enumerate(keys) if sound.places[key][-1][3] > start]
        untouched = {*keys[: hit[0]], *keys[hit[0] + 3 :]}
        if len(untouched) > 2:
            assert untouched - {keys[hit[0] - 1]} <= read.keys()
        assert all(read[key] == sound.samples[key] for key in untouched & read.keys())


def test_gnu_tars_199_of_200_members_are_the_least(tmp_path):
    for i in range(200):
        (tmp_path / f"{i:03d}.txt").write_bytes(b"x" * i)
    subprocess.run(["tar", "-cf", "a.tar", "--sort=name", *sorted(os.listdir(tmp_path))], cwd=tmp_path, check=True)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    for bad in (0, 4096, len(data) // BLOCK // 2 * BLOCK):
        bad = next(at for at in range(bad, len(data), BLOCK) if data[at + 257 : at + 262] == b"ustar")
        damaged = data[:bad] + bytes([data[bad] ^ 1]) + data[bad + 1 :]
        (tmp_path / "a.tar").write_bytes(damaged)
        ledger = Ledger(max_errors=1)
        assert len(list(read_samples(tmp_path / "a.tar", on_error=ledger, on_damage="resync"))) == 199
        [gap] = ledger.quarantined
        assert (gap.offset, gap.shard) == (bad, str(tmp_path / "a.tar"))


def test_a_shard_with_many_holes(plain):
    sound = archive([f"{i:04d}" for i in range(400)], {"jpg": 3000, "cls": 1})
    rng = random.Random(0)
    damaged = bytearray(sound.data)
    for _ in range(25):
        start = rng.randrange(len(damaged) - len(END))
        size = min(rng.randrange(1, 20_000), len(damaged) - len(END) - start)
        damaged[start : start + size] = bytes(size) if rng.random() < 0.5 else rng.randbytes(size)
    read = whole_samples(plain(damaged))
    intact = {
        key
        for key, places in sound.places.items()
        if damaged[places[0][0] : places[-1][3]] == sound.data[places[0][0] : places[-1][3]]
    }
    assert 200 < len(intact) < 390
    assert intact <= read.keys() <= sound.samples.keys()
    assert all(read[key] == sound.samples[key] for key in intact)


def test_a_member_that_is_gone_is_seen_by_the_fields_of_the_others(plain):
    """A hole of a small member has exactly the bytes of an archive's end before another archive."""
    sound = ARCHIVES["ours"]
    header, _, _, after = sound.places["s2"][0]
    assert after - header == len(END)
    read = whole_samples(plain(sound.data[:header] + END + sound.data[after:]))
    assert read.keys() == {"s0", "s1", "s3", "s4"}


@pytest.mark.soak
@pytest.mark.parametrize("keys", [("a", "b", "c"), ("s1", "s2", "s3"), ("dog", "cat", "bird")])
def test_a_damaged_header_that_names_another_sample_bounds_its_neighbours(plain, keys):
    """No field need be known from elsewhere then; where the one wrong byte may be in the key, nothing is known."""
    sound = archive(list(keys), {"cls": 1, "jpg": 700})
    lost = 0
    for key in keys:
        for header, start, _, _ in sound.places[key]:
            for at in [*range(header, header + 16), *range(header + 16, start, 1 if SOAK > 1 else 7)]:
                damaged = sound.data[:at] + bytes([sound.data[at] ^ 0x20]) + sound.data[at + 1 :]
                read = whole_samples(plain(damaged))
                assert read == {name: sound.samples[name] for name in read}
                lost += len(sound.samples.keys() - {key} - read.keys())
    assert lost == 0


def test_a_damaged_header_that_names_the_sample_says_that_it_is_short(plain):
    sound = pack({f"s{i}.{field}": b"1" for i in range(5) for field in ("cls", "txt")} | {"s5.cls": b"1"})
    data = sound + pack({"s5.json": b"1"}) + END
    at = data.index(b"s5.json")
    damaged = data[: at + 110] + b"X" + data[at + 111 :]
    problems = [sample.problem for sample in survey_file(plain(damaged)).samples]
    assert problems == [None] * 5 + ["next to damage: it lacks a member"]


def test_a_field_that_only_some_have_is_no_sign_of_damage_elsewhere(plain):
    names = [f"s{i}" for i in range(9)]
    members = {f"{name}.cls": b"1" for name in names} | {f"{name}.json": b"{}" for name in names[::2]}
    data = pack(dict(sorted(members.items()))) + END
    at = data.index(b"s4.json")
    damaged = data[:at] + b"X" + data[at + 1 :]
    problems = [sample.problem for sample in survey_file(plain(damaged)).samples]
    assert problems == [None] * 4 + ["next to damage: it may lack members"] + [None] * 4
    at = data.index(b"s4.cls")
    end = data.index(b"s5.cls")
    problems = [sample.problem for sample in survey_file(plain(data[:at] + bytes(end - at) + data[end:])).samples]
    assert problems == [None] * 3 + ["next to damage: it may lack members"] * 2 + [None] * 3


def test_concatenated_archives_are_no_damage(plain):
    one, other = archive(["a", "b"], FIELDS).data, archive(["c", "d"], FIELDS).data
    for data in (one + other, one + bytes(-len(one) % 10240) + other + bytes(-len(other) % 10240)):
        found = survey_file(plain(data))
        assert (found.gaps, [sample.problem for sample in found.samples]) == ([], [None] * 4)
        assert len(found.zeros) == 2
        assert ends_within(found) == found.zeros[:1]


@pytest.mark.parametrize("record", [2048, 4096, 10240, 1 << 16])
def test_archives_of_any_records_are_joined_where_the_word_says_so(plain, record):
    one, other = archive(["a", "b"], FIELDS).data, archive(["c", "d"], FIELDS).data
    data = one + bytes(-len(one) % record) + other
    found = survey_file(plain(data, concatenated=True))
    assert (found.gaps, [sample.problem for sample in found.samples]) == ([], [None] * 4)
    assert len(ends_within(found)) == 1
    gap = survey_file(plain(one + bytes(7 * BLOCK) + other, concatenated=True)).gaps
    assert [each.reason for each in gap] == ["zeros instead of members"]


def test_resyncing_tells_of_an_end_of_archive_unless_the_word_says_why(tmp_path):
    one, other = archive(["a", "b"], FIELDS).data, archive(["c", "d"], FIELDS).data
    (tmp_path / "a.tar").write_bytes(one + other)
    for options, errors in ({}, 1), ({"concatenated": True}, 0):
        ledger = Ledger(max_errors=9)
        found = list(read_samples(tmp_path / "a.tar", on_error=ledger, on_damage="resync", **options))
        assert [sample["__key__"] for sample in found] == list("abcd")
        assert (len(ledger.quarantined), ledger.joined) == (errors, 1 - errors)
    assert "archive ends here" not in str(ledger)


def test_interleaved_samples_are_told_and_the_others_read(plain):
    members = {f"{key}.{field}": b"1" for key in "abcdef" for field in ("x", "y")}
    order = list(members)
    order[2], order[4] = order[4], order[2]  # b.x and c.x
    data = pack({name: members[name] for name in order}) + END
    assert list(whole_samples(plain(data))) == ["a", "b", "d", "e", "f"]
    problems = {sample.problem for sample in survey_file(plain(data)).samples}
    assert problems == {None, "members of this key are not adjacent"}


def test_a_sample_that_comes_again_is_read_once(plain):
    sound = ARCHIVES["ours"]
    found = survey_file(plain(sound.data + sound.data))
    assert [sample.problem for sample in found.samples] == [None] * 5 + ["members of this key are not adjacent"] * 5


def nested(inner: dict[str, bytes], inner_end: bytes = END) -> tuple[bytes, int]:
    """Return an archive of samples with a tar in each, and the offset of the header of the third one's tar."""
    members = {}
    for i in range(6):
        members[f"s{i}.cls"] = b"7"
        members[f"s{i}.tar"] = pack(inner) + inner_end
    data = pack(members) + END
    return data, data.index(b"s2.tar\0")


@pytest.mark.parametrize("inner_end", [END, bytes(10 * BLOCK)], ids=["two blocks", "many"])
@pytest.mark.parametrize("fields", [("txt",), ("cls", "jpg"), ("cls", "tar")])
def test_a_tar_inside_of_a_member_adds_no_samples(plain, fields, inner_end):
    inner = {f"inner{i}.{field}": make_data(100 * i, field) for i in range(4) for field in fields}
    data, at = nested(inner, inner_end)
    expected = {"s0", "s1", "s3", "s4", "s5"}
    for byte in range(BLOCK):
        damaged = data[: at + byte] + bytes([data[at + byte] ^ 1]) + data[at + byte + 1 :]
        assert whole_samples(plain(damaged)).keys() - {"s2"} == expected
    if fields != ("cls", "tar"):  # else nothing tells the samples inside from those outside
        for hole in (bytes(BLOCK), make_data(BLOCK, "hole")):
            assert whole_samples(plain(data[:at] + hole + data[at + BLOCK :])).keys() == expected


def test_headers_in_data_add_no_samples(plain):
    fake = pack_header("fake.bin", 0)
    samples = {f"s{i}": make_data(512, "a") + fake + make_data(1024, "b") for i in range(6)}
    data = pack({f"{key}.bin": value for key, value in samples.items()}) + END
    at = data.index(b"s2.bin")
    for hole in (bytes(BLOCK), make_data(BLOCK, "hole"), b"S" + data[at + 1 : at + BLOCK]):
        read = whole_samples(plain(data[:at] + hole + data[at + BLOCK :]))
        assert read.keys() <= samples.keys() - {"s2"}
        assert read.keys() >= samples.keys() - {"s1", "s2"}


def test_a_header_without_its_long_name_gives_no_sample(plain):
    sound = archive([f"{i}{LONG}" for i in range(6)], {"txt": 10})
    header, start, _, _ = sound.places[f"2{LONG}"][0]
    lost = start - BLOCK - header
    assert lost
    for hole in (bytes(lost), make_data(lost, "hole"), b"X" + sound.data[header + 1 : header + lost]):
        read = whole_samples(plain(sound.data[:header] + hole + sound.data[header + lost :]))
        assert read.keys() == sound.samples.keys() - {f"2{LONG}"}


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (b"junk" * 1000, "junk after the end of the archive"),
        (bytes(40 * BLOCK), "zeros instead of members"),
        (b"", NO_END),
    ],
)
def test_what_follows_the_last_member(plain, tail, reason):
    sound = ARCHIVES["ours"]
    data = sound.data + tail if tail else sound.data[: -len(END)]
    found = survey_file(plain(data))
    assert [gap.reason for gap in found.gaps] == [reason]
    assert whole_samples(plain(data)) == sound.samples


def test_global_headers_and_links_belong_to_no_sample(plain):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x" * 900}) as tar:
        for name, kind in (("a.txt", tarfile.REGTYPE), ("d", tarfile.DIRTYPE), ("l.txt", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.txt"
            tar.addfile(info)
    found = survey_file(plain(buffer.getvalue()))
    assert dict(found.skipped) == {"directory": 1}
    assert [sample.members for sample in found.samples] == [[("txt", 2048, 2048)], [("txt", 3072, 3072)]]
    assert found.byte_counts == {"whole": 1024, "quarantined": 0, "other": 4 * 512, "zeros": 14 * 512, "gaps": 0}


@pytest.mark.parametrize("data", [b"", b"x", b"no tar at all " * 100])
def test_what_is_no_tar_at_all(plain, data):
    found = survey_file(plain(data))
    assert found.samples == []
    assert found.gaps
    assert sum(found.byte_counts.values()) == len(data)


def damaged_shard(path) -> Archive:
    sound = ARCHIVES["ours"]
    at = sound.places["s2"][1][0]
    path.write_bytes(sound.data[:at] + b"X" + sound.data[at + 1 :])
    return sound


def test_gaps_and_samples_stand_in_the_ledger(tmp_path):
    sound = damaged_shard(tmp_path / "a.tar")
    ledger = Ledger(max_errors=2)
    read = list(read_samples(tmp_path / "a.tar", on_error=ledger, on_damage="resync"))
    assert [sample["__key__"] for sample in read] == ["s0", "s1", "s3", "s4"]
    assert read[0] == {"__key__": "s0", "__url__": str(tmp_path / "a.tar"), **sound.samples["s0"]}
    at = sound.places["s2"][1][0]
    assert [entry[1:] for entry in ledger.quarantined] == [
        ("s2", None, sound.places["s2"][0][0], "next to damage: it may lack members"),
        (None, None, at, "bad header checksum; 1536 bytes skipped"),
    ]
    assert (ledger.shards, ledger.samples, ledger.members) == (1, 4, 16)


def test_too_many_gaps_raise(tmp_path):
    damaged_shard(tmp_path / "a.tar")
    with pytest.raises(Exception, match="bad header checksum"):
        list(read_samples(tmp_path / "a.tar", on_error=Ledger(max_errors=1), on_damage="resync"))


def test_a_sound_shard_reads_as_ever(tmp_path):
    samples = [{"__key__": f"s{i}", "txt": f"{i}"} for i in range(5)]
    write_samples(samples, str(tmp_path / "a.tar"))
    ledger = Ledger()
    read = list(read_samples(tmp_path / "a.tar", on_error=ledger, on_damage="resync"))
    assert read == list(read_samples(tmp_path / "a.tar"))
    assert (ledger.quarantined, ledger.samples) == ([], 5)


def test_compressed_shards_and_pipes(tmp_path):
    damaged_shard(tmp_path / "a.tar")
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    for url in (tmp_path / "a.tar.gz", f"pipe:cat {tmp_path}/a.tar"):
        read = read_samples(url, on_error=Ledger(max_errors=9), on_damage="resync", allow_pipe=True)
        assert [sample["__key__"] for sample in read] == ["s0", "s1", "s3", "s4"]


def test_a_fifo_is_opened_once(tmp_path):
    damaged_shard(tmp_path / "a.tar")
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(["cp", tmp_path / "a.tar", tmp_path / "fifo"]):
        read = list(read_samples(tmp_path / "fifo", on_error=Ledger(max_errors=9), on_damage="resync"))
    assert [sample["__key__"] for sample in read] == ["s0", "s1", "s3", "s4"]


def test_a_compressed_shard_is_read_up_to_where_it_breaks(tmp_path):
    packed = gzip.compress(ARCHIVES["ours"].data)
    (tmp_path / "a.tar.gz").write_bytes(packed[: len(packed) * 2 // 3])
    ledger = Ledger(max_errors=9)
    read = list(read_samples(tmp_path / "a.tar.gz", on_error=ledger, on_damage="resync"))
    assert [sample["__key__"] for sample in read] == ["s0", "s1", "s2"]
    assert any("gzip" in entry.reason for entry in ledger.quarantined)


def test_a_shard_that_is_not_there(tmp_path):
    ledger = Ledger(max_errors=1)
    assert list(read_samples(tmp_path / "a.tar", on_error=ledger, on_damage="resync")) == []
    assert len(ledger.quarantined) == 1
    with pytest.raises(OpenError), open_plain(str(tmp_path / "a.tar")):
        pass


def test_reading_that_is_broken_off_is_unaudited(tmp_path):
    damaged_shard(tmp_path / "a.tar")
    ledger = Ledger(max_errors=9)
    samples = read_samples(tmp_path / "a.tar", on_error=ledger, on_damage="resync")
    next(samples)
    samples.close()
    assert ledger.unaudited
    assert ledger.samples == 1


def test_members_of_no_sample_are_counted(tmp_path):
    (tmp_path / "a.tar").write_bytes(pack({"README": b"x", "a.txt": b"1", ".hidden": b"2"}) + END)
    ledger = Ledger()
    assert len(list(read_samples(tmp_path / "a.tar", on_error=ledger, on_damage="resync"))) == 1
    assert ledger.skipped == {"no extension": 2}
    with open_plain(str(tmp_path / "a.tar")) as file:
        assert survey_file(file).byte_counts["other"] == 2048


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="on_damage"):
        read_samples("a.tar", on_damage="repair")
    with pytest.raises(ValueError, match="needs an on_error"):
        read_samples("a.tar", on_damage="resync")


@pytest.mark.soak
def test_both_parsers_walk_alike(plain, monkeypatch):
    for name in ("ours", "pax"):
        for number, damaged in enumerate(holes(ARCHIVES[name], "garbage")):
            if number % 20 == 0:
                file = plain(damaged)
                native = list(walk(file))
                with monkeypatch.context() as patch:
                    patch.setattr("tarshards.samples.resync.walking.scan", twin.scan)
                    assert list(walk(file)) == native


def test_only_headers_are_read(tmp_path):
    """Large members are skipped: of a sparse file of 8 GB next to nothing is read."""
    with open(tmp_path / "a.tar", "wb") as file:
        for i in range(4):
            file.write(pack_header(f"s{i}.bin", 2 << 30))
            file.seek(2 << 30, os.SEEK_CUR)
        file.write(END)
    with open_plain(str(tmp_path / "a.tar")) as shard:
        read = []
        shard.read = lambda offset, size, read_=shard.read: read.append(size) or read_(offset, size)
        assert [len(piece) for piece in walk(shard) if not isinstance(piece, Gap)]
        assert sum(read) < 20_000
