"""No samples where some are expected: an error in all tools, unless --allow-empty or other options allow it."""

from __future__ import annotations

import os
import subprocess
import tarfile
from itertools import product

import pytest
from programs import need
from soak import some

from tarshards import read_samples, write_samples

SAMPLES = [{"__key__": f"s{i}", "cls": i, "txt": f"text {i}\n"} for i in range(4)]

READERS = {
    "tarcat": "tarcat {tar} -o {out}/a.tar",
    "tarcat --shuffle": "tarcat --shuffle 9 {tar} -o {out}/a.tar",
    "tarcat --interleave": "tarcat --interleave 2 {tar} -o {out}/a.tar",
    "tarcat --skip": "tarcat --skip 1 {tar} -o {out}/a.tar",
    "tarpcat": "tarpcat {tar} -o {out}/a.tar",
    "tarproc": "tarproc -c true {tar} -o {out}/a.tar",
    "tarsort": "tarsort {tar} -o {out}/a.tar",
    "tarsort --shuffle": "tarsort --shuffle {tar} -o {out}/a.tar",
    "tarsort --regroup": "tarsort --regroup {tar} -o {out}/a.tar",
    "tarsplit": "tarsplit {tar} -o {out}/a",
    "tarshow": "tarshow {tar}",
    "tarshow --summary": "tarshow --summary {tar}",
    "tarshow --html": "tarshow --html {out}/a.html {tar}",
    "tar2tsv": "tar2tsv {tar} -o {out}/a.tsv",
    "tar2tsv -f": "tar2tsv -f cls {tar} -o {out}/a.tsv",
    "tar2json": "tar2json {tar} -o {out}/a.json",
    "targrep": "targrep . {tar} -o {out}/a.tar",
    "targrep -l": "targrep -l -v nothing {tar} -o {out}/keys",
    "tarmerge": "tarmerge {tar} {tar} --conflict first -o {out}/a.tar",
    "tarreshard": "tarreshard -q -j 1 {tar} -o {out}/%d.tar",
    "tarcheck": "tarcheck {tar}",
    "tarcheck --repair": "tarcheck {tar} --repair {out}/a.tar",
    "tarindex": "tarindex {tar} --manifest {out}/a.json",
    "tarindex --format wids": "tarindex --format wids {tar} -o {out}/a.json",
}
KINDS = ["empty", "empty record", "without keys"]
NEEDS_A_SAMPLE = {
    "tarconvert": "tarconvert -q {tar} -o {out}/%d.gz",
    "tarexport": "tarexport -q {tar} -o {out}/%d.jsonl",
    "tarfirst": "tarfirst -f txt {tar} -o {out}/a.txt",
    "tarmix": "tarmix {tar} -o {out}/a.tar",
}


@pytest.fixture
def shell(tmp_path, path_with_tools):
    """Return a function that runs a line of bash in tmp_path, where out is an empty folder."""
    (tmp_path / "out").mkdir()

    def run(line: str, **options) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": path_with_tools}
        command = ["bash", "-uo", "pipefail", "-c", line]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, **options)

    return run


def without_keys(path) -> None:
    (path.parent / "README").write_text("no extension, so no key")
    with tarfile.open(path, "w") as tar:
        tar.add(path.parent / "README", "README")


@pytest.mark.soak
@pytest.mark.parametrize(("tool", "kind"), some([*product([*READERS, *NEEDS_A_SAMPLE], KINDS)], 3))
def test_no_samples_are_an_error(shell, tmp_path, tool, kind):
    tar = tmp_path / "a.tar"
    if kind == "empty record":
        tarfile.open(tar, "w").close()
    else:
        without_keys(tar) if kind == "without keys" else write_samples([], str(tar))
    line = {**READERS, **NEEDS_A_SAMPLE}[tool].format(tar="a.tar", out="out")
    done = shell(line)
    assert done.returncode == 1
    assert "no samples" in done.stderr + done.stdout
    assert os.listdir(tmp_path / "out") == []
    if tool in READERS:
        if not tool.startswith("tarcheck"):
            assert done.stderr.count("\n") == 1
            assert "allow-empty" in done.stderr
            lists = tool not in ("tarreshard", "tarindex", "tarindex --format wids")
            assert ("members skipped (no extension)" in done.stderr) == (lists and kind == "without keys")
        done = shell(f"{line} --allow-empty")
        assert done.returncode == 0, done.stderr


def test_some_shards_may_be_empty(shell, tmp_path):
    write_samples([], str(tmp_path / "a.tar"))
    write_samples(SAMPLES, str(tmp_path / "b.tar"))
    for tool, line in READERS.items():
        if not tool.startswith(("tarmerge", "tarcheck --repair")):
            done = shell(line.format(tar="a.tar b.tar", out="out") + " && rm -r out/*")
            assert "no samples" not in done.stderr, tool
    assert shell("tarindex -q a.tar b.tar; tarcheck a.tar b.tar").returncode == 0


def test_the_empty_archives_of_other_programs(shell, tmp_path):
    need("bsdtar")
    shell("tar cf a.tar -T /dev/null; bsdtar cf b.tar -T /dev/null; bsdtar cf c.tar --format pax -T /dev/null")
    for name in "abc":
        done = shell(f"tarcat -q --allow-empty {name}.tar | tar t; tarindex -q --allow-empty {name}.tar")
        zeros = f"{name}.tar: only zeros, 10240 bytes: an archive without members, or a shard that was overwritten\n"
        warnings = 2 * zeros * (os.path.getsize(tmp_path / f"{name}.tar") == 10240)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", warnings), name
    assert shell("tarcheck a.tar --allow-empty").returncode == 0
    assert shell("tarcat a.tar").stderr.endswith("tarcat: no samples in 1 shard; --allow-empty accepts that\n")


@pytest.mark.parametrize(
    "line",
    [
        "tarcat -f png {tar} -o out/a.tar",
        "tarsort --sort png {tar} -o out/a.tar",
        "tarsplit --by png {tar} -o out/a",
        "tar2tsv -f png {tar} -o out/a.tsv",
        "tar2json -f png {tar} -o out/a.json",
        "tarproc -c false --failed skip {tar} -o out/a.tar",
        "tarmerge {tar} b.tar -o out/a.tar",
    ],
)
def test_all_samples_lost_are_an_error_that_names_the_first(shell, tmp_path, line):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    write_samples([{**sample, "__key__": f"b{i}"} for i, sample in enumerate(SAMPLES)], str(tmp_path / "b.tar"))
    line = line.format(tar="a.tar") + " --on-error skip"
    done = shell(line)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "no sample is left of the " in last
    assert " errors, the first: " in last
    assert os.listdir(tmp_path / "out") == []
    assert shell(f"{line} --allow-empty").returncode == 0


def test_a_command_that_leaves_no_file_of_any_sample(shell, tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    done = shell("tarproc -c 'rm sample.*' a.tar -o out/a.tar")
    assert (done.returncode, "no sample is left of the 4 that were read" in done.stderr) == (1, True)


@pytest.mark.parametrize("options", ["-c 0", "--slice 9:", "--slice 0:0", "--slice 2:2", "--slice 4::2"])
@pytest.mark.parametrize("tool", ["tarcat", "tarpcat", "tarsort", "tarproc -c true", "tarshow", "tarsplit"])
def test_what_the_options_leave_out_is_no_error(shell, tmp_path, tool, options):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    out = {"tarshow": "", "tarsplit": "-o out/a"}.get(tool, "-o out/a.tar")
    options = options.replace("-c 0", "--count 0")
    assert shell(f"{tool} {options} {out} a.tar").returncode == 0
    if tool not in ("tarshow", "tarsplit"):
        assert list(read_samples(tmp_path / "out/a.tar")) == []


def test_skipping_everything_is_no_error(shell, tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    assert shell("tarcat --skip 4 a.tar -o out/a.tar").returncode == 0


def test_grep_that_finds_nothing_writes_an_empty_tar_and_exits_with_1(shell, tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    done = shell("targrep nothing a.tar -o out/a.tar")
    assert (done.returncode, done.stderr) == (1, "targrep: no sample was found\n")
    assert list(read_samples(tmp_path / "out/a.tar")) == []
    assert shell("targrep nothing --allow-empty a.tar").returncode == 0


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("tarcreate --dir d", "d: no samples; skipped 1 files without an extension"),
        (
            "tarcreate --dir d/sub --exts jpg",
            "d/sub: no file has an extension of --exts 'jpg'; the extensions are jpeg (2)",
        ),
        ("tarcreate --lines /dev/null", "/dev/null: no samples"),
        ("tarcreate --jsonl /dev/null", "/dev/null: no samples"),
        ("tarcreate plan", "plan: no samples"),
        ("tarcreate <plan", "-: no samples"),
        ("lines2tar </dev/null", "the input has no lines"),
    ],
)
def test_a_tar_of_nothing_is_not_created(shell, tmp_path, line, error):
    (tmp_path / "d/sub").mkdir(parents=True)
    for name in "a", "b":
        (tmp_path / f"d/sub/{name}.JPEG").write_bytes(b"\xff")
    (tmp_path / "plan").write_text("__key__\ttxt\n")
    (tmp_path / "README").write_text("")
    shell("mv d/sub . && cp README d && mkdir -p x && mv sub x") if "sub" not in line else None
    done = shell(f"{line} -o out/a.tar")
    tool = line.split()[0]
    assert (done.returncode, done.stderr) == (1, f"{tool}: {error}; --allow-empty accepts that\n")
    assert os.listdir(tmp_path / "out") == []
    assert shell(f"{line} -o out/a.tar --allow-empty").returncode == 0
    assert list(read_samples(tmp_path / "out/a.tar")) == []


def test_what_is_left_out_is_counted(shell, tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    write_samples([{**sample, "txt": "other"} for sample in SAMPLES[:3]], str(tmp_path / "b.tar"))
    for line, count in (
        ("tarsort --unique first a.tar b.tar -o out/1.tar", "dropped 3 samples with repeated keys"),
        ("tarsort --shuffle --unique last a.tar b.tar -o out/2.tar", "dropped 3 samples with repeated keys"),
        (
            "tarmerge --missing skip --conflict first a.tar b.tar -o out/3.tar",
            "skipped 1 samples that not all inputs have",
        ),
        ("tarsplit --maxshards 1 -n 3 a.tar -o out/a", "stopped after 1 shards; the rest of the input was not read"),
        ("tarmix a.tar b.tar --rekey {index} -o out/4.tar", "b.tar has ended, and the mixture with it"),
    ):
        done = shell(line)
        assert (done.returncode, count in done.stderr) == (0, True), done.stderr
    assert "stopped" not in shell("tarsplit --maxshards 2 -n 2 a.tar -o out/b").stderr
    assert "ended" not in shell("tarmix a.tar b.tar --until last --rekey {index} -o out/5.tar").stderr


def test_resharding_reports_members_without_a_sample_also_when_it_resumes(shell, tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    (tmp_path / "README").write_text("")
    shell("tar rf a.tar README")
    done = shell("tarreshard -q -j 1 a.tar -o out/%d.tar")
    assert (done.returncode, done.stderr) == (0, "tarreshard: skipped 1 members: no extension\n")


@pytest.mark.parametrize(
    ("options", "filtered"),
    [
        ("tarcat --slice 1:7:2", "4 samples: 4 --slice"),
        ("tarcat --skip 3", "3 samples: 3 --skip"),
        ("tarcat --skip 1 --slice 2:", "3 samples: 1 --skip, 2 --slice"),
        ("tarsort --unique first", "4 samples: 4 repeated key"),
        ("tarsort --unique last --slice 1:7", "3 samples: 1 --slice, 2 repeated key"),
    ],
)
def test_the_sum_of_the_ledger_holds(shell, tmp_path, options, filtered):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    write_samples([{**sample, "txt": "other"} for sample in SAMPLES], str(tmp_path / "b.tar"))
    rekey = "" if "tarsort" in options else "--rekey {index}"
    done = shell(f"{options} missing.tar a.tar b.tar --on-error skip {rekey} -o out/a.tar")
    assert done.returncode == 0, done.stderr
    counts = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stderr.splitlines() if line[0].isalpha()}
    written = len(list(read_samples(tmp_path / "out/a.tar")))
    assert counts["filtered"].startswith(filtered)
    assert int(counts["delivered"].split()[0]) == written
    assert int(counts["read"].split()[0]) == written + int(counts["filtered"].split()[0])
