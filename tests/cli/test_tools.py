"""Common properties of all tools: Unix behaviour, and no silent damage."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import threading
from itertools import product
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from soak import some

from tarshards import read_samples, write_samples
from tarshards.cli.parameters import Size, Slice
from tarshards.cli.program import tool

SAMPLES = [{"__key__": f"s{i}", "cls": i, "txt": f"text {i}\n"} for i in range(8)]

READERS = {
    "tarcat": "tarcat {tar} -o {out}/a.tar",
    "tarscat": "tarscat {tar} -o {out}/a.tar",
    "tarcat --shuffle": "tarcat --shuffle 100 {tar} -o {out}/a.tar",
    "tarcat --interleave": "tarcat --interleave 2 {tar} -o {out}/a.tar",
    "tarpcat": "tarpcat {tar} -o {out}/a.tar",
    "tarpcat --keep-order": "tarpcat --keep-order -j 2 {tar} -o {out}/a.tar",
    "tarproc": "tarproc -c true {tar} -o {out}/a.tar",
    "tarsort": "tarsort {tar} -o {out}/a.tar",
    "tarsort --shuffle": "tarsort --shuffle {tar} -o {out}/a.tar",
    "tarshow": "tarshow {tar}",
    "tarshow --summary": "tarshow --summary {tar}",
    "tarshow --html": "tarshow --html {out}/a.html {tar}",
    "tarfirst": "tarfirst -f txt --where 'cls > 100' {tar}",
    "tar2tsv": "tar2tsv {tar}",
    "tar2json": "tar2json {tar} -o {out}/a.json",
    "targrep": "targrep . {tar} -o {out}/a.tar",
    "targrep -l": "targrep -l -v nothing {tar}",
}
ALL_OR_NOTHING = {
    "tarsplit": "tarsplit -n 100 {tar} -o {out}/a-%06d.tar",
    "targrep --keys": "printf 's%d\\n' 0 7 | targrep --keys - {tar} -o {out}/a.tar",
    "tarmix": "tarmix {tar} -o {out}/a.tar",
    "tarmerge": "tarmerge {tar} {tar} --conflict first -o {out}/a.tar",
}


@pytest.fixture
def shell(tmp_path, path_with_tools):
    """Return a function that runs a line of bash in tmp_path."""

    def run(line: str, **options) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": path_with_tools}
        command = ["bash", "-uo", "pipefail", "-c", line]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, **options)

    return run


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("tarcat --null -T - | targrep -l .", "s0 s1"),
        ("tarshow -T - --null | cut -f 1", "s0 s1"),
        ("tarindex --null -q -T - && echo *.index", "a b.tar.index c\\nd.tar.index"),
        ("tarsplit -q --null -T - -o x-%d.tar; targrep -l . x-0.tar", "s0 s1"),
        ("tarreshard -q -j 1 --null -T - -o x-%d.tar; targrep -l . x-0.tar | sort", "s0 s1"),
        ("tarcheck -q --null -T - && echo right", "right"),
        ("tarexport -q -j 1 --null -T - -o x-%d.jsonl; wc -l <x-1.jsonl", "1"),
        ("tar2tsv -f txt --nokey --noheader --null -T -", "text0 text1"),
        ("tarproc -P 2 -c true --null -T - | targrep -l .", "s0 s1"),
    ],
)
def test_names_from_find_end_with_nul(shell, tmp_path, tool, said):
    for i, name in enumerate(["a b.tar", "c\nd.tar"]):
        write_samples([{"__key__": f"s{i}", "txt": f"text{i}"}], str(tmp_path / name))
    done = shell(f"find . -name '* *.tar' -print0 -o -name 'c*.tar' -print0 | sort -z | {tool}")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert " ".join(done.stdout.replace("c\nd", "c\\nd").split()) == said


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_a_signal_while_a_lock_is_taken_back(stop, code, capsys):
    @tool()
    def command():
        lock = threading.Lock()
        try:
            try:
                raise stop
            finally:
                lock.release()
        finally:
            {}["cleaning up"]

    with pytest.raises(SystemExit) as exited:
        command.main([])
    assert (exited.value.code, capsys.readouterr().err) == (code, "")


@pytest.mark.parametrize("words", ["a.tar: offset 512: a.bin, 9 bytes, does not fit into memory", ""])
def test_memory_that_ends_is_told_in_one_line(words, capsys):
    @tool()
    def command():
        raise MemoryError(words)

    with pytest.raises(SystemExit) as caught:
        command.main([])
    assert caught.value.code == 1
    assert capsys.readouterr().err.partition(": ")[2] == f"{words or 'there is not enough memory'}\n"


def test_other_errors_are_raised():
    @tool()
    def command():
        raise RuntimeError("release unlocked lock")

    with pytest.raises(RuntimeError):
        command.main([])


def damaged(kind: str, path: Path) -> None:
    write_samples(SAMPLES, str(path))
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        del data[len(data) // 2 + 100 :]
    elif kind == "cut between members":
        del data[8 * 1024 :]
    elif kind == "flipped":
        data[6 * 1024 + 3] ^= 1
    elif kind == "zeroed":
        data[4096:8192] = bytes(4096)
    elif kind == "interleaved":
        data[:] = data[0:1024] + data[2048:3072] + data[1024:2048] + data[3072:]
    elif kind == "field twice":
        data[:] = data[0:1024] + data[0:1024] + data[1024:]
    else:
        data[:] = b"this is no tar\n" * 200
    path.write_bytes(data)


KINDS = ["truncated", "cut between members", "flipped", "zeroed", "interleaved", "field twice", "no tar at all"]


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "tool"), some([*product(KINDS, [*READERS, *ALL_OR_NOTHING])], 4))
def test_damage_never_passes_silently(shell, tmp_path, tool, kind):
    damaged(kind, tmp_path / "bad.tar")
    (tmp_path / "out").mkdir()
    done = shell({**READERS, **ALL_OR_NOTHING}[tool].format(tar="bad.tar", out="out"))
    assert done.returncode == 1
    assert "bad.tar" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("tool", [name for name in READERS if name != "tarfirst"])
def test_damage_skipped_is_told(shell, tmp_path, tool):
    damaged("flipped", tmp_path / "bad.tar")
    write_samples([{**sample, "__key__": f"good{i}"} for i, sample in enumerate(SAMPLES)], str(tmp_path / "good.tar"))
    (tmp_path / "out").mkdir()
    line = READERS[tool].format(tar="bad.tar good.tar", out="out")
    for options in (
        "--on-error skip",
        "--on-error quarantine=rest.tar",
        "--on-error skip --max-errors 1",
        "--max-errors 1",
    ):
        done = shell(f"rm -rf out/*; {line} {options}")
        assert done.returncode == 0, "what the command line allows to be lost is no failure"
        assert "quarantined      1" in done.stderr
        assert "bad.tar: offset 6144: bad header checksum" in done.stderr
        if (tmp_path / "out/a.tar").exists():
            kept = {sample["__key__"] for sample in read_samples(tmp_path / "out/a.tar")}
            assert {f"good{i}" for i in range(8)} <= kept
    done = shell(f"rm -rf out/*; {line} --on-error skip --max-errors 0")
    assert done.returncode == 1
    assert "bad.tar: offset 6144: bad header checksum" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("tool", READERS)
def test_more_errors_than_allowed_end_the_run_and_name_the_first(shell, tmp_path, tool):
    for i in range(4):
        damaged("no tar at all", tmp_path / f"bad{i}.tar")
    (tmp_path / "out").mkdir()
    line = READERS[tool].format(tar="bad0.tar bad1.tar bad2.tar bad3.tar", out="out")
    done = shell(f"{line} --on-error skip --max-errors 2")
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"{tool.split()[0]}: 3 errors, but --max-errors allows 2; the first: bad" in last
    assert last.endswith("offset 0: not a tar archive")
    assert list((tmp_path / "out").iterdir()) == []


TAKES_CONCATENATED = {
    **READERS,
    **ALL_OR_NOTHING,
    "tarsort --regroup": "tarsort --regroup {tar} -o {out}/a.tar",
    "tarreshard": "tarreshard -q -j 1 --shards 1 {tar} -o {out}/%d.tar",
    "tarindex": "tarindex {tar}",
    "tarindex --format wids": "tarindex --format wids -o {out}/a.json {tar}",
    "tarindex --format tar.idx": "tarindex --format tar.idx -o {out} {tar}",
    "tarcheck": "tarcheck {tar}",
    "tarcheck --repair": "tarcheck {tar} --repair {out}/a.tar",
}


@pytest.mark.parametrize("tool", TAKES_CONCATENATED)
def test_concatenated_archives_are_read_where_the_option_says_so(shell, tmp_path, tool):
    for name, samples in ("a", SAMPLES[:3]), ("b", SAMPLES[3:]):
        write_samples(samples, str(tmp_path / f"{name}.tar"))
    (tmp_path / "all.tar").write_bytes((tmp_path / "a.tar").read_bytes() + (tmp_path / "b.tar").read_bytes())
    (tmp_path / "out").mkdir()
    line = TAKES_CONCATENATED[tool].format(tar="all.tar", out="out").replace("100'", "6'")
    done = shell(line)
    assert done.returncode == 1
    assert "all.tar: offset " in done.stderr + done.stdout
    assert "`--ignore-zeros`" in done.stderr + done.stdout
    assert not (tmp_path / "all.tar.index").exists()
    done = shell(f"rm -rf out/*; {line} --ignore-zeros")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    if (tmp_path / "out/a.tar").exists() and "--keys" not in tool:
        assert sum(1 for _ in read_samples(tmp_path / "out/a.tar")) == 8
    if tool.startswith("tarcheck"):
        assert "joined    1 archives" in done.stdout


COMPRESSED = [tool for tool in TAKES_CONCATENATED if "tarindex" not in tool]  # compressed shards have no index


@pytest.mark.soak
@pytest.mark.parametrize(
    ("tool", "suffix"), [*product(TAKES_CONCATENATED, [""]), *product(some(COMPRESSED, 4), [".gz"])]
)
def test_archives_without_an_end_are_read_where_the_option_says_so(shell, tmp_path, tool, suffix):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    data = (tmp_path / "a.tar").read_bytes().rstrip(b"\0")
    (tmp_path / f"all.tar{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    (tmp_path / "out").mkdir()
    line = TAKES_CONCATENATED[tool].format(tar=f"all.tar{suffix}", out="out").replace("100'", "6'")
    done = shell(line)
    assert done.returncode == 1
    assert "`--end optional`" in done.stderr + done.stdout
    assert not (tmp_path / "all.tar.index").exists()
    done = shell(f"rm -rf out/*; {line} --end optional")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    if (tmp_path / "out/a.tar").exists() and "--keys" not in tool:
        assert sum(1 for _ in read_samples(tmp_path / "out/a.tar")) == 8


def test_an_index_or_a_manifest_says_that_archives_were_concatenated(shell, tmp_path):
    for name, samples in ("a", SAMPLES[:3]), ("b", SAMPLES[3:]):
        write_samples(samples, str(tmp_path / f"{name}.tar"))
    assert shell("cat a.tar b.tar >all.tar; tarindex -i all.tar").returncode == 0
    assert '"concatenated": true' in (tmp_path / "all.shards.json").read_text()
    for line in (
        "tarindex --crc all.tar; tarindex --check --crc all.tar",  # the index knows it
        "rm all.tar.index; tarcat all.shards.json | tarshow | wc -l",  # and so does the manifest
        "tarcheck all.shards.json",
        "tarindex --no-manifest all.shards.json",
        "cat a.tar b.tar | tarcat -i - | tarshow | wc -l",
    ):
        done = shell(line)
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout in ("", "8\n") or line.startswith("tarcheck")
    shell("rm all.tar.index; tarindex --manifest plain.json a.tar b.tar")
    assert "concatenated" not in (tmp_path / "plain.json").read_text()
    assert shell("tarcat all.tar >out.tar").returncode == 1


@pytest.mark.parametrize("line", ["tarcat all.tar", "tarshow all.tar", "tar2tsv all.tar", "tarpcat all.tar"])
def test_a_closed_pipe_ends_quietly(shell, tmp_path, line):
    write_samples([{"__key__": f"{i:06d}", "txt": "x" * 1000} for i in range(3000)], str(tmp_path / "all.tar"))
    done = shell(f"{line} | head -c 1 >first; echo ${{PIPESTATUS[0]}}")
    assert done.stderr == ""
    assert done.stdout == "141\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("tool", ["tarcat", "tarsort", "tarpcat", "tarproc -c cat"])
def test_interrupted_tools_leave_nothing(tmp_path, interrupt, tool, number):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    interrupt(f"{tool} a.tar never.tar -o out.tar", number)


def test_slices_and_counts(shell, tmp_path):
    write_samples(SAMPLES, str(tmp_path / "all.tar"))
    for options, expected in (
        ("--slice 2:5", "s2 s3 s4"),
        ("--slice ::3", "s0 s3 s6"),
        ("--slice 6:", "s6 s7"),
        ("--slice 2:7 -c 2", "s2 s3"),
        ("-c 0", ""),
    ):
        assert shell(f"tarshow all.tar {options} | cut -f 1").stdout.split() == expected.split()


def test_lists_of_shards(shell, tmp_path):
    for i in range(3):
        write_samples(SAMPLES[i : i + 1], str(tmp_path / f"{i}.tar"))
    (tmp_path / "list").write_text("1.tar\n\n# a comment\n2.tar\n")
    assert shell("tarshow 0.tar -T list | cut -f 1").stdout.split() == ["s0", "s1", "s2"]


def test_selections_of_fields(shell, tmp_path):
    write_samples(SAMPLES[:1], str(tmp_path / "all.tar"))
    assert shell("tarcat -f 'text:txt *' all.tar | tar -tf -").stdout.split() == ["s0.cls", "s0.text"]
    assert shell("tarcat -f 'a:b:' all.tar").returncode == 2


def test_quarantine_keeps_the_samples_that_fail(shell, tmp_path):
    samples = [*SAMPLES, {"__key__": "odd", "jpg": b"x"}]
    write_samples(samples, str(tmp_path / "all.tar"))
    done = shell("tarcat -f txt all.tar -o out.tar --on-error quarantine=bad.tar")
    assert done.returncode == 0
    assert "all.tar: odd: no field txt" in done.stderr
    assert [sample["__key__"] for sample in read_samples(tmp_path / "bad.tar")] == ["odd"]
    assert len(list(read_samples(tmp_path / "out.tar"))) == 8


@pytest.mark.parametrize(
    "options", ["--on-error nonsense", "--on-error quarantine", "--on-error fail --max-errors 3", "--slice 1"]
)
def test_wrong_options(shell, options):
    done = shell(f"tarcat {options} a.tar")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_existing_outputs_are_refused(shell, tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    (tmp_path / "out.tar").write_text("precious")
    assert shell("tarcat a.tar -o out.tar").returncode == 2
    assert (tmp_path / "out.tar").read_text() == "precious"
    assert shell("tarcat a.tar -o out.tar --overwrite").returncode == 0
    assert len(list(read_samples(tmp_path / "out.tar"))) == 8


def test_no_tar_onto_a_terminal(shell, tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    done = shell("script -qec 'tarcat a.tar' /dev/null")
    assert "stdout is a terminal" in done.stdout
    assert "ustar" not in done.stdout


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("1e9", 10**9), ("10MB", 10**7), ("10m", 10**7), ("1GiB", 2**30), ("1.5KiB", 1536)]
)
def test_sizes(text, size):
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1xb", "1e", "nan", "1ib"])
def test_wrong_sizes(text):
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


@given(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9), st.none() | st.integers(1, 4))
def test_slices_are_pythons(low, high, step):
    text = ":".join("" if number is None else str(number) for number in (low, high, step))
    assert list(range(9))[Slice().convert(text, None, None)] == list(range(9))[low:high:step]


@pytest.mark.parametrize("options", ["", "-r", "--keep-metadata", "-M 1MB"])
def test_tarsort_groups_what_tar_packed_in_the_order_of_a_folder(shell, tmp_path, options):
    """As `tar -c .` does: first all of one field, then all of another."""
    names = [f"{key}.{field}" for field in ("txt", "cls") for key in ("c", "a", "b", "d")]
    for name in names:
        (tmp_path / name).write_text(name)
    done = shell(f"tar -cf - {' '.join(names)} | tarsort {options} | tar -tf -")
    keys = sorted("abcd", reverse=options == "-r")
    assert (done.returncode, done.stdout.split()) == (0, [f"{key}.{field}" for key in keys for field in ("cls", "txt")])


@pytest.mark.parametrize(
    "line",
    [
        "tarcat",
        "tarsplit -o out-",
        "tarsort --shuffle",
        "tarsort --sort txt",
        "tarsort -c 9",
        "tarshow",
        "tarproc -c true",
    ],
)
def test_other_tools_name_what_groups_the_members(shell, tmp_path, line):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "a.cls").write_text("1")
    done = shell(f"tar -cf - b.txt a.txt b.txt a.cls | {line}")
    assert done.returncode == 1
    wanted = "b: members of this key are not adjacent; `tarsort --regroup` groups them, or pack with `tar --sort=name`"
    assert wanted in done.stderr


def test_tarsort_refuses_what_is_twice_and_what_damage_may_lack(shell, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    done = shell("tar -cf a.tar a.txt b.txt; tarsort a.tar a.tar")
    assert (done.returncode, "a: this key is already in the shard" in done.stderr) == (1, True)
    done = shell("tar -rf a.tar a.txt; tarsort a.tar")
    assert (done.returncode, "a: this key is already in the shard" in done.stderr) == (1, True)
    done = shell("tar -cf - b.txt a.txt b.txt | tarsort --on-error skip | tar -tf -")
    assert (done.returncode, done.stdout.split()) == (0, ["a.txt", "b.txt"])
