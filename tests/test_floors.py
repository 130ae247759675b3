"""Imports run to lower floors only, late ones included, and each engine has one importer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tarshards"
FLOORS = [
    {"errors", "late"},
    {"keys", "duplicates", "world", "ledger", "manifest", "permutations"},
    {
        "openers",
        "_mapped",
        "_mapped_py",
        "kernels",
        "_pixels",
        "_pixels_py",
        "_rows",
        "_rows_py",
        "codecs",
        "fields",
        "image_headers",
        "collate",
        "parallel",
        "process_pool",
        "plan",
        "mixture",
        "monitoring",
        "tensors",
        "npy",
    },
    {"urls", "tar", "_tar", "_tar_py", "ranges", "expressions", "markers", "lines"},
    {"columns"},
    {"samples", "index", "repair", "reading"},
    {"ops", "writer", "concat", "sorting", "shell", "tabulate", "show", "sources", "dask_map", "places"},
    {
        "stream",
        "splitting",
        "checking",
        "create",
        "contact_sheet",
        "mapping",
        "selecting",
        "json_lines",
        "stream_mixing",
        "merging",
    },
    {"passes", "mixing", "readers", "augment", "making", "array_loader", "dataset_writer", "resharding"},
    {"torch_data", "torch_loader", "jobs", "dali"},
    {"tools"},
]
KERNELS = ["_pixels", "_pixels_py", "_rows", "_rows_py"]  # of one room
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
NEIGHBOURS = {("tar", "_tar"), ("tar", "_tar_py")}  # one room in three files
NEIGHBOURS |= {("samples", "repair")}  # which reads on behind damage
NEIGHBOURS |= {("index", "samples")}  # what is wrong with a shard, reading its samples says
NEIGHBOURS |= {("torch_loader", "torch_data"), *(("kernels", twin) for twin in KERNELS)}
NEIGHBOURS |= {("array_loader", room) for room in ("passes", "readers", "augment", "making")}
NEIGHBOURS |= {("making", "readers")}
ENGINES = {"torch": {"torch_data", "torch_loader", "codecs", "tensors"}}  # codecs: imagespecs and .pth give tensors
ENGINES |= {"nvidia": {"dali"}, "kubernetes": {"jobs"}, "dask": {"dask_map"}, "distributed": {"dask_map"}}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The modules that *path* imports, inside of functions too, but not those for type checkers only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_room_has_a_floor():
    rooms = {room_of(path) for path in FILES} | {path.stem for path in PACKAGE.glob("*.c")}
    assert rooms == set(FLOOR_OF)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path):
    room = room_of(path)
    for name in imports_of(path):
        if not name.startswith("tarshards."):
            continue
        other = name.split(".")[1]
        if other == room or (room, other) in NEIGHBOURS:
            continue
        assert FLOOR_OF[other] < FLOOR_OF[room], f"{room} imports {other}, which is not on a lower floor"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_engines_have_their_importers(path):
    for name in imports_of(path):
        engine = name.split(".")[0]
        assert room_of(path) in ENGINES.get(engine, {room_of(path)}), f"{room_of(path)} imports {engine}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_room_passes_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400
