"""The cases of the convention: read as a stream and by index, past damage, and by the programs of others."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from contextlib import suppress

import pytest
from programs import need
from soak import some

from tarshards import EpochPlan, IndexedShards, Ledger, read_samples
from tarshards.errors import OpenError, SampleError, TarError, TarshardsError, UrlError
from tarshards.index.build import build_index
from tarshards.samples.grouping import group_members
from tarshards.samples.keys import split_name
from tarshards.tar.read import read_members
from tarshards.testing.conformance import CASES, ReaderOutput, examine, judge, load_cases

SPEC = CASES.parent
EVERY = load_cases()
NAMED = {case.name: case for case in EVERY}
CLASSES = {"archive": TarError, "sample": SampleError, "compression": OpenError, "open": OpenError}
CLASSES["expression"] = UrlError


def as_told(sample):
    fields = {
        name: bytes(data).decode("latin-1") for name, data in sample.items() if name not in ("__key__", "__url__")
    }
    return {"__key__": sample["__key__"], **fields}


def delivered(samples):
    """Take all samples, and the error at their end or None."""
    found = []
    try:
        for sample in samples:
            found.append(as_told(sample))
    except TarshardsError as error:
        return found, error
    return found, None


def is_right(case, found, error):
    """Tell whether this is the case's first outcome: what the page recommends."""
    outcome = case.outcomes[0]
    if outcome.error is None or error is None:
        return outcome.error is error is None and found == outcome.samples
    place = outcome.error.get("offset")
    is_meant = type(error) is CLASSES[outcome.error["class"]] and (place is None or error.offset == place)
    return is_meant and found == outcome.samples[: len(found)]


def test_the_cases_are_many_and_say_why_they_exist():
    assert len(EVERY) >= 250
    page = (SPEC / "webdataset-tar.md").read_text()
    for case in EVERY:
        assert case.why.endswith("."), case.name
        assert f"`{case.kind}`" in page
        for outcome in case.outcomes:
            assert outcome.error is None or f"| `{outcome.error['class']}` |" in page


def test_the_cases_are_those_that_the_script_makes(monkeypatch):
    monkeypatch.syspath_prepend(str(SPEC))
    from make_cases import described, made

    cases = made()
    assert sorted(cases) == [case.name for case in EVERY]
    for name, case in cases.items():
        folder = CASES / name
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        assert json.loads(files.pop("expected.json").read_text()) == described(case)
        assert {file: path.read_bytes() for file, path in files.items()} == case.files, name


def test_the_script_uses_no_library_of_archives():
    for path in [SPEC / "make_cases.py", *(SPEC / "making").glob("*.py")]:
        assert not {"import tarfile", "import tarshards", "from tarshards", "import gzip"} & {
            *path.read_text().split("\n")
        }


def test_each_case_is_read_as_the_page_recommends():
    pytest.importorskip("lz4.frame")
    wrong = {}
    for case in EVERY:
        found, error = delivered(read_samples(case.expression))
        if not is_right(case, found, error):
            wrong[case.name] = found, error
    assert wrong == {}


class Pipe(io.BytesIO):
    """A stream that cannot seek, and returns few bytes at a time."""

    def seekable(self):
        return False

    def read(self, size=-1):
        return super().read(min(size, 700))


def test_a_pipe_gives_the_same_or_says_that_it_cannot_go_back_to_the_target_of_a_link():
    wrong = {}
    for case in EVERY:
        if case.kind not in ("compression", "expression"):
            with open(case.expression, "rb") as file:
                found, error = delivered(group_members(read_members(Pipe(file.read()), url="-"), url="-"))
            outcome = case.outcomes[0]
            same = error is None and found == outcome.samples and outcome.error is None
            is_told = error is not None and (outcome.error is not None or "pipes and compressed" in error.reason)
            if not (same or (is_told and all(sample in outcome.samples for sample in found))):
                wrong[case.name] = found, error
    assert wrong == {}


def test_an_index_gives_what_the_stream_gives(tmp_path):
    """Only of plain archives: others have no index. A fault is an error when the index is made, or when it is used."""
    wrong = {}
    for case in EVERY:
        outcome = case.outcomes[0]
        if case.kind in ("compression", "expression"):
            continue
        path = tmp_path / "a.tar"
        shutil.copy(case.expression, path)
        try:
            build_index(str(path)).save(str(path))
            found, error = delivered(IndexedShards(str(path)))
        except TarshardsError as caught:
            found, error = [], caught
        if (error is None) != (outcome.error is None) or (error is None and found != outcome.samples):
            wrong[case.name] = found, error
    assert wrong == {}


def test_reading_past_damage_delivers_nothing_wrong():
    pytest.importorskip("lz4.frame")
    wrong = {}
    for case in EVERY:
        ledger = Ledger(max_errors=100)
        with suppress(TarshardsError):
            found, error = delivered(read_samples(case.expression, on_error=ledger, on_damage="resync"))
            told = ["told"] if ledger.failed or ledger.quarantined else []
            verdict, _ = judge(case, ReaderOutput(found, "error" if error else "end", told))
            if verdict not in ("same", "error"):
                wrong[case.name] = verdict, found, error
    assert wrong == {}


SOUND = [case for case in EVERY if case.outcomes[0].error is None and case.kind not in ("expression", "compression")]


def grouped(files):
    """Return samples by their keys, of names and data."""
    samples = {}
    for name, data in files:
        if (parts := split_name(name)) is not None:
            samples.setdefault(parts[0], {})[parts[1]] = data
    return samples


def told_of(samples):
    return {
        sample["__key__"]: {name: data.encode("latin-1") for name, data in sample.items() if name != "__key__"}
        for sample in samples
    }


def by_tarfile(path):
    files = []
    with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as archive:
        for info in archive:
            if info.isreg() or info.islnk() or info.issym():
                file = archive.extractfile(info)
                files += [(info.name, file.read())] if file is not None else []
    return files


def extracted(program, path, folder):
    """Return the names and contents of the files that a program extracts; None if it fails."""
    folder.mkdir()
    done = subprocess.run([program, "-xf", path], cwd=folder, capture_output=True)
    files = [file for file in folder.rglob("*") if file.is_file()]
    found = [(file.relative_to(folder).as_posix(), file.read_bytes()) for file in files]
    shutil.rmtree(folder)
    return found if not done.returncode else None


#: Cases of names that are no paths of files or too long for them, or that need a file system with other attributes.
NO_FILES = {"key-absolute", "key-double-slash", "key-parent", "gnu-absolute", "key-deep", "key-long", "macos-pax"}
NO_FILES |= {"gnu-long-name-511", "gnu-long-name-512", "gnu-long-name-513", "pax-record-998", "pax-record-1000"}
NO_FILES |= {"key-dot-slash-differs", "key-normalization", "symlink-dots"}

#: Where programs give other samples than the page recommends: they refuse numbers that do not matter, take another of
#: two names, take times for a prefix, or (tarfile) sizes and names of sparse members from the wrong record.
OTHERS = {
    "tarfile": {"devices-junk", "owner-junk", "gnu-long-and-pax", "pax-two-headers-path", "v7-no-prefix", "gnu-times"}
    | {"sparse-1.0-path", "sparse-1.0-size"},
    "GNU tar": {"owner-junk", "gnu-long-name-twice", "sparse-old-no-last"},
    "bsdtar": {"devices-junk", "owner-junk", "gnu-long-and-pax", "gnu-long-name-twice", "size-junk-after-nul"}
    | {"pax-two-headers", "pax-two-headers-path"},
}


def test_tarfile_reads_sound_archives_in_the_same_way():
    others = set()
    for case in SOUND:
        try:
            found = grouped(by_tarfile(case.expression))
        except (tarfile.TarError, KeyError, ValueError):
            found = None
        if found != told_of(case.outcomes[0].samples):
            others.add(case.name)
    assert others <= OTHERS["tarfile"]


@pytest.mark.soak
@pytest.mark.parametrize("program", ["GNU tar", "bsdtar"])
def test_programs_extract_sound_archives_in_the_same_way(program, tmp_path, monkeypatch):
    need(program)
    monkeypatch.delenv("TAR_OPTIONS", raising=False)
    others = set()
    for case in some(SOUND, 3):
        if case.name not in NO_FILES:
            files = extracted(program.rpartition(" ")[2], case.expression, tmp_path / "out")
            samples = told_of(case.outcomes[0].samples)
            if files is None or grouped(files) != {key.removeprefix("./"): samples[key] for key in samples}:
                others.add(case.name)
    assert others <= OTHERS[program]


READERS = """
import os, sys, time
from tarshards import read_samples

def right(expression):
    yield from read_samples(expression)

def short(expression):
    yield from list(read_samples(expression))[:1]

def partial(expression):
    for sample in read_samples(expression):
        yield {"__key__": sample["__key__"], "txt": sample["txt"]}

def upper(expression):
    for sample in read_samples(expression):
        yield {**sample, "txt": sample["txt"].upper()}

def fails(expression):
    yield from list(read_samples(expression))[:1]
    raise ValueError("no")

def warns(expression):
    print("opened", expression, file=sys.stderr)
    if "plain" in expression:
        yield from read_samples(expression)
    else:
        print("left out: b", file=sys.stderr)
        yield from list(read_samples(expression))[:1]

def aborts(expression):
    os.abort()

def sleeps(expression):
    time.sleep(60)

def cannot(expression):
    raise NotImplementedError("reads no files")

def without_keys(expression):
    for sample in read_samples(expression):
        yield {"__key__": None, **{name: sample[name] for name in ("cls", "txt")}}
"""


@pytest.fixture
def readers(tmp_path, monkeypatch):
    (tmp_path / "own_readers.py").write_text(READERS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("reader", "verdict"),
    [
        ("right", "same"),
        ("short", "silent loss"),
        ("partial", "silent loss"),
        ("upper", "wrong bytes"),
        ("fails", "error"),
        ("warns", "error"),
        ("aborts", "crash"),
        ("sleeps", "hang"),
        ("cannot", None),
        ("without_keys", "same"),
    ],
)
def test_a_reader_gets_its_verdict(readers, reader, verdict):
    cases = [NAMED["end-two-blocks"], *([NAMED["plain"]] if reader == "warns" else [])]
    first, *_ = examine(f"own_readers:{reader}", cases, limit=1)
    assert first.verdict == verdict
    if reader == "warns":
        assert first.words == "left out: b"


def test_an_error_where_one_is_due_is_right_and_its_lack_is_not(readers):
    cut = NAMED["cut-in-data"]
    assert [examine(f"own_readers:{name}", [cut])[0].verdict for name in ("right", "short")] == ["same", "same"]
    assert judge(cut, ReaderOutput(cut.outcomes[0].samples, "end", []))[0] == "silent loss"
    half = [*cut.outcomes[0].samples, {"__key__": "c", "txt": "x" * 500}]
    assert judge(cut, ReaderOutput(half, "error", ["cut"]))[0] == "wrong bytes"


def test_samples_in_another_order_are_wrong():
    plain = NAMED["plain"]
    assert judge(plain, ReaderOutput(plain.outcomes[0].samples[::-1], "end", []))[0] == "wrong bytes"


def test_a_command_is_a_reader_too(tmp_path):
    program = tmp_path / "reader.py"
    lines = ["import json, sys", "from tarshards import read_samples", "for sample in read_samples(sys.argv[1]):"]
    lines += ["    sample.pop('__url__')"]
    lines += ["    print(json.dumps({k: v if k == '__key__' else v.decode('latin-1') for k, v in sample.items()}))"]
    program.write_text("\n".join(lines))
    results = examine(f"{sys.executable} {program}", [NAMED["plain"], NAMED["cut-in-data"], NAMED["empty-file"]])
    assert [result.verdict for result in results] == ["same", "same", "same"]
    assert examine("false", [NAMED["plain"]])[0].verdict == "error"


def test_the_command_prints_a_table_and_tells_by_its_exit_code(readers):
    shutil.copytree(CASES / "plain", "some/plain")
    done = run("own_readers:right", "--cases", "some")
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()][1:] == [["dialect", "1"], ["all", "1"]]
    done = run("own_readers:short", "--cases", "some")
    assert "silent loss: plain: Two samples" in done.stdout
    assert done.returncode == 1
    done = run("own_readers:short", "--cases", ".")
    assert done.returncode == 2
    assert "no cases in ." in done.stderr


def run(*words):
    command = [sys.executable, "-m", "tarshards", "conformance", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_reader_that_cannot_be_imported_is_an_error():
    with pytest.raises(OSError, match="no_such_module"):
        examine("no_such_module:read", [NAMED["plain"]])


def test_the_vectors_are_what_the_package_computes(monkeypatch):
    monkeypatch.syspath_prepend(str(SPEC))
    from make_vectors import indexes, mixtures, orders

    told = json.loads((SPEC / "vectors.json").read_text())
    assert told == json.loads(json.dumps({"indexes": indexes(), "orders": orders(), "mixtures": mixtures()}))


def test_the_states_of_the_vectors_lead_to_the_rest_of_their_epochs():
    for order in json.loads((SPEC / "vectors.json").read_text())["orders"]:
        options = {"ranks": order.get("ranks", 1), "tail": order.get("tail", "exact")}
        rest = EpochPlan.restore(order["samples"], order["state"], **options)
        assert len(order["first"]) + len(rest) == order["length"]
