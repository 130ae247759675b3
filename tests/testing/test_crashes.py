"""All crash states of our writers are whole, absent or an error; and writers that do it wrong are found out."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_cases import CASES, check_case
from crash_writers import NEW, flushed, in_place, left_over, removed_first, right, unflushed
from programs import need
from soak import SOAK

from tarshards.testing.crashes import check_writer, crash_states
from tarshards.testing.system_calls import Change, _Recording, read_tree, record, replay

OLD = b"old" * 400
LONG = (  # with one change lost at a time
    "a key index",
    "a shard that is replaced",
    "shards, their indexes and the manifest",
)
SOAKED = (  # only in `make soak`
    "shards that are replaced with all that is derived",
    "mapped shards",
    "resharded shards",
    "a cache",
    "a catalog",  # "a catalog with one more version" is written in the same way
    "a compressed shard",
    "an index",  # so is "an index that is stale, and a manifest"
)


@pytest.fixture(autouse=True)
def _strace():
    need("strace")


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "files"
    path.mkdir()
    return path


@pytest.mark.soak
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.interop] if CASES[name].needs else [])
        for name in CASES
        if SOAK > 1 or name not in SOAKED
    ],
)
def test_our_writers(tmp_path, name):
    if CASES[name].needs:
        pytest.importorskip(CASES[name].needs)
    result = check_case(name, tmp_path / "files", lost=1 if SOAK == 1 and name in LONG else 2)
    assert result.states > len(result.changes)
    assert not result.faults, str(result)
    assert not result.found["half"] + result.found["gone"]


def whole(folder: Path) -> dict[str, bytes]:
    """Read a file that has no checksum: whatever is in it counts."""
    path = folder / "file"
    return {"file": path.read_bytes()} if path.exists() else {}


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (in_place, "file is half"),
        (unflushed, "file is half"),
        (flushed, "file has not lasted"),
        (removed_first, "file is gone"),
        (left_over, "written again, 2.lock differs"),
        (right, None),
    ],
)
def test_wrong_writers_are_found_out(folder, write, words):
    (folder / "file").write_bytes(OLD)
    result = check_writer(write, whole, folder, again=".")
    assert bool(result.faults) == bool(words), str(result)
    if words:
        assert any(fault.startswith(words) for fault in result.faults), str(result)
    assert (folder / "file").read_bytes() == NEW
    assert [path.name for path in folder.parent.iterdir()] == ["files"]


def test_a_reader_that_fails_is_a_fault(folder):
    (folder / "file").write_bytes(OLD)

    def strict(folder):
        if (folder / "file.tmp").exists():
            raise RuntimeError("what is this?")
        return whole(folder)

    result = check_writer(right, strict, folder)
    assert {fault.partition(":")[0] for fault in result.faults} == {"the reader fails with RuntimeError"}


def test_a_function_that_cannot_be_called_in_a_new_process(folder):
    with pytest.raises(ValueError, match="not a function at the top of a module"):
        check_writer(lambda folder: None, whole, folder)


def test_commands_are_recorded_with_their_children(folder):
    (folder / "deep").mkdir()
    (folder / "deep/old").write_bytes(b"0123456789")
    line = "(cd deep; printf abc >new; printf def >>new; mv new newer; cp old old2; rm old) & "
    line += "mkdir other; echo x >other/x; ln other/x y; mv other there; truncate -s 5 y; wait; rm -r there"
    before = read_tree(folder)
    changes = record(["sh", "-c", line], folder)
    assert replay(before, changes) == read_tree(folder)
    assert read_tree(folder) == {"deep": None, "deep/newer": b"abcdef", "deep/old2": b"0123456789", "y": b"x\n\0\0\0"}
    assert {change.kind for change in changes} >= {"mkdir", "rename", "link", "unlink", "create", "write", "resize"}


def test_a_child_that_runs_before_its_creation_has_returned_has_the_folder_of_its_parent():
    recording = _Recording("/root", {"deep": None})
    recording.read(
        r"""1 clone(child_stack=NULL, flags=SIGCHLD) = 2
2 chdir("\x64\x65\x65\x70") = 0
1 vfork( <unfinished ...>
2 vfork( <unfinished ...>
3 mkdir("\x78", 0777) = 0
4 mkdir("\x79", 0777) = 0
2 <... vfork resumed>) = 4
1 <... vfork resumed>) = 3""".splitlines()
    )
    assert recording.changes == [Change("mkdir", "x"), Change("mkdir", "deep/y")]


def test_a_write_through_a_mapping_is_refused(folder):
    (folder / "file").write_bytes(bytes(10))
    program = "import mmap; file = open('file', 'r+b'); mmap.mmap(file.fileno(), 10)[0] = 1"
    with pytest.raises(ValueError, match="do not give its files"):
        record(["python3", "-c", program], folder)


CHANGES = [
    Change("create", "tmp", 0),
    Change("write", "tmp", 0, data=b"ab"),
    Change("sync", "tmp", 0),
    Change("rename", "tmp", 0, "file"),
    Change("sync", "."),
]


def test_states_are_all_prefixes_with_what_no_sync_has_kept_lost():
    found = {tuple(state.tree.items()) for state in crash_states({}, CHANGES)}
    partly = {(("tmp", data),) for data in (b"", b"a", b"ab", b"\0\0")}
    assert found == {(), *partly, (("file", b"ab"),)}
    without_flush = [change for change in CHANGES if change.kind != "sync"]
    trees = [state.tree for state in crash_states({}, without_flush)]
    assert {"file": b""} in trees
    assert {"file": b"\0\0"} in trees
    complete = [state.tree for state in crash_states({}, CHANGES) if state.is_complete]
    assert complete == [{"file": b"ab"}]


def test_states_with_two_changes_lost():
    changes = [Change("create", name, number) for number, name in enumerate("abc")]
    trees = {tuple(state.tree) for state in crash_states({}, changes) if state.is_complete}
    assert trees == {("a", "b", "c"), ("a", "b"), ("a", "c"), ("b", "c"), ("a",), ("b",), ("c",)}
    assert ("a",) not in {tuple(state.tree) for state in crash_states({}, changes, lost=1) if state.is_complete}
