"""Imports run from each package only to those above it in the table, and each engine has one importer."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tarshards"
PACKAGES = [
    "errors",
    "parallel",
    "kernels",
    "storage",
    "tar",
    "samples",
    "index",
    "epoch",
    "stream",
    "loaders",
    "write",
]
PACKAGES += ["verbs", "run", "formats", "feed", "view", "engines", "testing", "cli", "webdataset"]
PACKAGES += ["__main__"]
ENGINES = {
    "zmq": {"feed"},
    "ray": {"engines"},
    "pyspark": {"engines"},
    "daft": {"engines"},
    # samples: imagespecs and .pth give tensors; testing: the demo trains; webdataset: its classes
    "torch": {"loaders", "samples", "testing", "webdataset"},
    "nvidia": {"loaders"},
    "kubernetes": {"run"},
    "pyarrow": {"engines", "formats", "index"},
    "datasets": {"formats"},
    "dask": {"stream"},
    "distributed": {"stream"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py*") if path.suffix in (".py", ".pyi"))
INNER = [path for path in FILES if path != PACKAGE / "__init__.py"]


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports_of(path: Path) -> set[str]:
    """The modules and names that *path* imports: inside functions and for type checkers too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_package_has_its_layer():
    assert {package_of(path) for path in INNER} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_downwards(package):
    allowed = PACKAGES[: PACKAGES.index(package) + 1]
    for path in filter(lambda path: package_of(path) == package, INNER):
        for name in imports_of(path):
            if name.startswith("tarshards."):
                assert name.split(".")[1] in [*allowed, "__version__"], f"{path} imports {name}, which lies above it"


@pytest.mark.parametrize("package", PACKAGES)
def test_engines_have_their_importers(package):
    for path in filter(lambda path: package_of(path) == package, INNER):
        for name in imports_of(path):
            engine = name.split(".")[0]
            assert package in ENGINES.get(engine, {package}), f"{path} imports {engine}"


def module_of(path: Path) -> str:
    name = str(path.relative_to(PACKAGE.parent).with_suffix(""))
    return name.replace("/", ".").removesuffix(".__init__")


#: Links and sparse members are rare: the reader imports what resolves them when it meets the first.
AT_FIRST_USE = ("tarshards.tar.read", "tarshards.tar.elsewhere")


def test_modules_do_not_import_in_circles():
    """No module needs, in a function or for type checkers either, one that needs it."""
    modules = {module_of(path) for path in INNER}
    graph: dict[str, set[str]] = {}
    for path in INNER:
        module = module_of(path)
        wanted = graph[module] = set()
        for name in imports_of(path):
            other = name if name in modules else name.rpartition(".")[0]
            if other != module and (module, other) != AT_FIRST_USE:
                wanted.add(other)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle of imports: {' -> '.join([*path, module])}"
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    "package", sorted({path.parent for path in INNER} - {PACKAGE}), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_the_text_of_a_package_names_its_modules(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    for path in package.glob("[a-z]*.py"):
        assert path.stem in text, f"{package.name}/__init__.py does not name {path.stem}"
