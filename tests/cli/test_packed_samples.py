"""Samples that stand in a shard as they would be written are copied by tarcat, many at once: the same bytes."""

from __future__ import annotations

import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest
from dirty_shards import any_members, write_tar
from programs import load_kernel
from soak import rounds

from tarshards import write_samples
from tarshards.errors import TarshardsError
from tarshards.samples.batch import PackedSamples
from tarshards.samples.grouping import read_shard, unpacked
from tarshards.samples.keys import split_name
from tarshards.samples.ledger import Ledger
from tarshards.storage.manifest import Shard
from tarshards.storage.streams import PIECE
from tarshards.tar.read import BLOCK, END, LARGE, MEMBER_LIMIT, pack_header, padding

CASES = Path(__file__).parents[1] / "cases"


def pack(*members: tuple[str, bytes]) -> bytes:
    return b"".join(pack_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in members)


def reading(samples, ledger: Ledger, errors: list[str]):
    found = []
    try:
        for each in samples:
            found += unpacked(each) if type(each) is PackedSamples else [each]
    except TarshardsError as error:
        errors.append(repr(error))
    counts = ledger.samples, ledger.members, ledger.shards, ledger.skipped
    return [dict(sample) for sample in found], errors, counts


def assert_the_same(path, **marks) -> None:
    shard = Shard(str(path), **marks)
    for on_error in (False, True):
        results = []
        for packs in (True, False):
            errors: list[str] = []
            lose = (lambda error: errors.append(repr(error))) if on_error else None  # noqa: B023
            ledger = Ledger(max_errors=99 if on_error else 0, on_error=lose)
            samples = read_shard(shard, ledger=ledger, copies="samples" if packs else "fields")
            results.append(reading(map(whole, samples), ledger, errors))
        compared = slice(None if on_error else 2)  # a run that an error ended shows no counts
        assert results[0][compared] == results[1][compared]


def whole(each):
    if type(each) is PackedSamples:
        return each
    return {name: data if isinstance(data, bytes | str) else b"".join(data.pieces()) for name, data in each.items()}


def random_shard(rng: random.Random, sizes=(0, 1, 511, 512, 3000)) -> bytes:
    """A shard of samples as we write them, with some faults, odd names and other headers between them."""
    parts = []
    for key in range(rng.randrange(1, 60)):
        fields = [(f"{key:03d}.{name}", rng.randbytes(rng.choice(sizes))) for name in ("a", "b.c", "d")]
        parts.append(pack(*fields[: rng.randrange(1, 4)]))
        odd = rng.randrange(40)
        if odd < 8:
            parts.append(
                [
                    pack(("README", b"1")),
                    pack((f"{key:03d}.d", b"1")),
                    pack(("000.x", b"")),
                    pack((f"{key:03d}x.D", b"1"), (f"{key:03d}x.E", b"1")),
                    pack((f"{key:03d}x.d", b"1"), (f"{key:03d}x.a", b"1")),
                    pack((f"{key:03d}é.d", b"1"), ("n" * 120 + ".d", b"1")),
                    pack((f"{key:03d}x.d", b"1")).replace(b"0000644", b"0000645"),
                    pack((f"{key:03d}x.a", b"1"))[:-1] + b"1",
                ][odd]
            )
    return b"".join(parts) + END


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [(0, 1, 511, 512, 3000), (1, 512, 2 * LARGE, 3 * LARGE + 1)])
@pytest.mark.parametrize("seed", range(rounds(40)))
def test_any_shards(tmp_path, seed, sizes):
    rng = random.Random(seed)
    path = tmp_path / "a.tar"
    whole = random_shard(rng, sizes)
    path.write_bytes(whole)
    assert_the_same(path)
    path.write_bytes(whole[: rng.randrange(len(whole))])
    assert_the_same(path, samples=7)
    at = rng.randrange(len(whole))
    path.write_bytes(whole[:at] + rng.randbytes(600) + whole[at + 600 :])
    assert_the_same(path)
    path.write_bytes(whole + whole)
    assert_the_same(path, concatenated=True)
    write_tar(path, any_members(rng), tarfile.USTAR_FORMAT)
    assert_the_same(path)


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("*.tar*")))
def test_archives_of_other_programs(name):
    assert_the_same(CASES / name)


def test_most_samples_are_packed_and_none_that_would_be_written_in_another_way():
    grouper = load_kernel("tarshards.kernels._tar").Grouper("u", split_name, True, True)
    plain = pack(*((f"{number}.{field}", b"123") for number in range(10) for field in ("a", "b")))
    odd = pack(("x.b", b""), ("x.a", b""), ("y.A", b""), ("z.a", b""))
    archive = plain + odd + plain[4 * BLOCK :] + END
    samples, events, *_ = grouper.read(archive, 0, 0, MEMBER_LIMIT, 0)
    assert [each[0] if type(each) is tuple else each["__key__"] for each in samples] == [
        "0",
        [str(number) for number in range(1, 10)],
        "x",
        "y",
        ["z"],
    ]
    begin, end, fields = samples[1][1:]
    assert archive[begin:end] == plain[4 * BLOCK :]
    assert (fields, samples[-1][-1]) == (18, 1)
    assert len(events) == 9  # keys that come again


SAMPLES = [
    {"__key__": f"{number:04d}", "cls": number, "txt": f"text {number}" * (number % 90)} for number in range(3000)
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_samples(SAMPLES[:2000], folder / "a.tar")
    write_samples(SAMPLES[2000:], folder / "b.tar")
    write_samples(SAMPLES[:1000], folder / "c.tar.gz")
    write_samples(SAMPLES[1990:2010], folder / "mixed.tar")
    write_samples([], folder / "empty.tar")
    write_samples([{**sample, "z": bytes(PIECE)} for sample in SAMPLES[:9]], folder / "large.tar")
    (folder / "cut.tar").write_bytes((folder / "a.tar").read_bytes()[:1_000_100])
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "tarcat a.tar b.tar",
        "tarcat - < a.tar",
        "cat a.tar | tarcat -",
        "tarcat c.tar.gz pipe:'cat b.tar'",
        "tarcat a.tar b.tar -o out.tar; sha256sum out.tar; ls -A",
        "tarcat a.tar a.tar",
        "tarcat a.tar a.tar b.tar --on-error skip",
        "tarcat a.tar mixed.tar",
        "tarcat mixed.tar b.tar --on-error quarantine=bad.tar; sha256sum bad.tar",
        "tarcat cut.tar",
        "tarcat cut.tar b.tar --on-error skip",
        "tarcat empty.tar",
        "tarcat empty.tar --allow-empty",
        "tarcat large.tar b.tar",
        "tarcat - < large.tar",
        "tarcat large.tar -o out.tar; sha256sum out.tar",
        "tarcat large.tar large.tar --on-error skip",
        "(head -c 2560 > /dev/null; tarcat -) < large.tar",
        "tarcat large.tar --keep-metadata",
    ],
)
def test_what_the_tool_writes_and_says(inputs, tmp_path, path_with_tools, line):
    for path in inputs.iterdir():
        os.link(path, tmp_path / path.name)

    def run(line: str):
        environment = {**os.environ, "PATH": path_with_tools}
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True)
        for name in ("out.tar", "bad.tar"):
            (tmp_path / name).unlink(missing_ok=True)
        return done.returncode, done.stdout, done.stderr

    code, out, said = run(line)
    slow_code, slow_out, slow_said = run(line.replace("tarcat", "tarcat --slice 0:", 1))  # which makes all samples
    assert (code, said) == (slow_code, slow_said)
    if code:  # how much has left the buffer when an error ends the run
        out = out[: len(slow_out)]
        slow_out = slow_out[: len(out)]
    assert out == slow_out
