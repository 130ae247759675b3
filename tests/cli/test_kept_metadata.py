"""--keep-metadata: members that a tool writes again have the mode, owner, times and pax records of before."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tarshards import Ledger, write_samples
from tarshards.samples.grouping import read_shard
from tarshards.storage.manifest import Shard

FORMATS = {"gnu": ["--format=gnu"], "pax": ["--format=pax", "--pax-option=TEST.note:=x"], "ustar": ["--format=ustar"]}
KEYS = ["0", "1", "2", "3", "big", "a" * 60 + "/" + "b" * 60]
#: Lines that write all samples of s.tar again, to o.tar or to shards o-*.tar.
LINES = [
    "tarcat s.tar -o o.tar",
    "tarcat --shuffle 10 s.tar -o o.tar",
    "tarcat --interleave 2 s.tar -o o.tar",
    "tarcat --where 'has(\"cls\")' s.tar -o o.tar",
    "tarcat --keys keys s.tar -o o.tar",
    "tarindex -q s.tar; tarcat --keys keys s.tar -o o.tar",
    "cat s.tar | tarcat >o.tar",
    "tarpcat s.tar -o o.tar",
    "tarsort -r s.tar -o o.tar",
    "tarsort -r -M 64KB s.tar -o o.tar",
    "tarsort --shuffle s.tar -o o.tar",
    "tarsort --regroup s.tar -o o.tar",
    "targrep 1 s.tar -o o.tar",
    "targrep -f cls . s.tar -o o.tar",
    "tarmix s.tar -o o.tar",
    "tarsplit -q -n 2 s.tar -o o",
    "tarsplit -q --by cls s.tar -o 'o-{cls}-%d.tar'",
    "tarreshard -q --shards 2 s.tar -o 'o-%d.tar'",
    *(
        f"tarcat --where 'has(\"jpg\")' -f jpg s.tar >jpg; tarcat -f cls s.tar {line} -o o.tar"
        for line in (
            "| tarmerge --missing ignore - jpg",
            "| tarsort -r | tarmerge --missing ignore jpg -",
            "| tarsort -r >c; tarindex -q c; tarmerge --missing ignore jpg c",
        )
    ),
]


@pytest.fixture
def shell(tmp_path, path_with_tools):
    environment = {**os.environ, "PATH": path_with_tools}

    def shell(line: str) -> str:
        command = ["bash", "-euo", "pipefail", "-c", line]
        return subprocess.run(command, cwd=tmp_path, env=environment, stdout=-1, text=True, check=True).stdout

    return shell


def kept(line: str) -> str:
    """Return the line with the option at each tool that has it."""
    for tool in ("tarcat", "tarpcat", "tarsort", "targrep", "tarmix", "tarsplit", "tarreshard", "tarmerge"):
        line = line.replace(f"{tool} ", f"{tool} --keep-metadata ")
    return line


def pack(folder: Path, options: list[str]) -> None:
    """Pack members with different modes, owners and times: one is large, and one, without a jpg, has a long name."""
    names = [f"{key}.{field}" for key in KEYS for field in ("cls", "jpg")][:-1]
    archive = str(folder / "s.tar")
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"1" * (200_000 if name == "big.jpg" else 1))
        times = [f"--mtime=2024-02-03 04:05:{number:02d}.5", f"--mode=6{number % 8}0", "--sort=name"]
        owner = [f"--owner=alice{number}:{1000 + number}", f"--group=staff:{50 + number}"]
        subprocess.run(["tar", *options, *times, *owner, "-rf", archive, name], cwd=folder, check=True)
        (folder / name).unlink()
    (folder / "keys").write_text("\n".join(KEYS))


def metadata(*paths: Path) -> dict[str, object]:
    """Return what Python's tarfile finds of the members, apart from where they are."""
    found: dict[str, object] = {}
    for path in paths:
        with tarfile.open(path) as archive:
            for info in archive:
                records = {name: value for name, value in info.pax_headers.items() if name not in ("path", "size")}
                found[info.name] = info.mode, info.uid, info.gid, info.uname, info.gname, info.mtime, records
    return found


@pytest.mark.parametrize("line", LINES)
def test_every_tool_that_writes_members_again_keeps_it(line, shell, tmp_path):
    pack(tmp_path, FORMATS["pax"])
    shell(kept(line))
    assert metadata(*tmp_path.glob("o*.tar")) == metadata(tmp_path / "s.tar")
    shell("tarcheck o*.tar")


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_all_formats_keep_it_under_new_names(options, shell, tmp_path):
    pack(tmp_path, options)
    before = metadata(tmp_path / "s.tar")
    shell("tarcat --keep-metadata s.tar -o same.tar")
    assert metadata(tmp_path / "same.tar") == before
    shell("tarcat --keep-metadata --rekey 'new/{index:03d}' -f 'class:cls *' s.tar -o o.tar")
    after = metadata(tmp_path / "o.tar")
    assert sorted(map(repr, after.values())) == sorted(map(repr, before.values()))
    assert all(name.startswith("new/") for name in after)
    assert shell("tar tf o.tar | wc -l").strip() == str(len(before))


def test_links_and_sparse_members_become_files_with_it(shell, tmp_path):
    for format in ("gnu", "pax"):
        shell(
            "mkdir -p d; echo 1 >d/a.txt; ln -f d/a.txt d/b.txt; ln -sf a.txt d/c.txt;"
            "truncate -s 1M d/d.txt; echo x >>d/d.txt;"
            f"tar --format={format} -S --sort=name --owner=alice:7 --mtime=@12345 -cf {format}.tar d;"
            f"tarcat -q --keep-metadata {format}.tar -o {format}-o.tar"
        )
        with tarfile.open(tmp_path / f"{format}-o.tar") as archive:
            found = [(info.name, info.isreg(), info.uid, info.uname, info.mtime, info.size) for info in archive]
        sizes = {"d/a.txt": 2, "d/b.txt": 2, "d/c.txt": 2, "d/d.txt": (1 << 20) + 2}
        assert found == [(name, True, 7, "alice", 12345, size) for name, size in sizes.items()]
        assert shell(f"tar xOf {format}-o.tar d/d.txt | cmp - d/d.txt; tarcheck -q {format}-o.tar") == ""


def test_new_members_and_shards_of_ours_have_the_fixed_one(shell, tmp_path):
    write_samples([{"__key__": f"{i}", "txt": "x" * i, "cls": i} for i in range(5)], tmp_path / "s.tar")
    shell("tarcat s.tar -o plain.tar; tarcat --keep-metadata s.tar -o kept.tar; cmp plain.tar kept.tar")
    pack_before = metadata(tmp_path / "plain.tar")
    shell("tarcat --keep-metadata --source s.tar -o source.tar")
    assert set(map(repr, metadata(tmp_path / "source.tar").values())) == set(map(repr, pack_before.values()))


@pytest.mark.interop  # pyarrow
def test_columns_are_refused(tmp_path, shell):
    write_samples([{"__key__": "a", "txt": "x", "json": {"n": 1}}], tmp_path / "s.tar")
    shell("tarindex -q --columns length:txt s.tar")
    assert "--keep-metadata" in shell("tarcat --keep-metadata --where 'length > 0' s.tar 2>&1 || true")


def test_members_that_are_passed_over_count_when_they_are_reached(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for name in ("0.txt", "1.txt", "folder", "2.txt", "folder"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.REGTYPE if "." in name else tarfile.DIRTYPE
            archive.addfile(member)
    for keep_headers in (False, True):
        ledger = Ledger(max_errors=0)
        samples = read_shard(Shard(f"{tmp_path}/s.tar", keep_headers=keep_headers), ledger=ledger)
        counts = [(next(samples)["__key__"], dict(ledger.skipped)) for _ in range(3)]
        assert counts == [("0", {}), ("1", {"directory": 1}), ("2", {"directory": 2})]
        samples.close()
