"""What stands on the core uses public names and the internal interface; the core knows nothing of what stands on it."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

import pytest
from parts import MODULES, PARTS, imported, names_used, needed, part_of, parts_imported, rows, tree_of

from tarshards.loaders.arrays import readers

#: The most names of the internal interface: the number only falls.
MOST_NAMES = 120
#: The modules of the core that import a part for an option, or for readers, which a removed part takes away.
IF_THERE = {"tarshards.cli.tarshow": {"view": False}, "tarshards.loaders.arrays.readers": {"media": False}}
#: The module that registers public names, each imported at its first use.
REGISTERED = "tarshards"


@pytest.fixture(scope="module", autouse=True)
def _trees():
    """Drop the trees of all modules after these tests: each pass of the garbage collector would walk over them."""
    yield
    tree_of.cache_clear()


@cache
def public_names() -> set[tuple[str, str]]:
    """Return what tarshards and its namespaces export, each name with the module that defines it."""
    found = {*imported("tarshards").values(), ("tarshards", "__version__")}
    return found | {imported(readers.__name__).get(name, (readers.__name__, name)) for name in readers.__all__}


@cache
def interface() -> dict[str, set[str]]:
    """Return the names of the core that parts use and that are not public, each with these parts."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        for owner, name in names_used(module) if part_of(module) else ():
            is_public = (owner, name) in public_names() or owner == "tarshards.stream.ops"
            if owner in MODULES and part_of(owner) is None and not is_public:
                found[f"{owner}.{name}".removeprefix("tarshards.").rstrip(".")].add(str(part_of(module)))
    return found


def listed() -> dict[str, set[str]]:
    """Return the names that docs/extending.md lists, each with the parts that use it."""
    found = {}
    for name, _, parts in rows("extending.md", "## What several parts use"):
        found[name.strip("`")] = set(parts.split(", "))
    for part, module, names in rows("extending.md", "## What one part uses"):
        found |= {f"{module.strip('`')}.{name}": {part} for name in re.findall(r"`([^`]+)`", names)}
    return found


def test_the_page_lists_the_names_that_parts_use():
    used, known = interface(), listed()
    assert {name: parts for name, parts in used.items() if known.get(name) != parts} == {}, "not on the page like this"
    assert known.keys() - used.keys() == set(), "no part uses these: remove them from the page"
    assert len(used) <= MOST_NAMES, "use what is public or listed, or move what one part needs to that part"


def test_several_parts_use_the_names_that_the_page_explains():
    several = [name for name, *_ in rows("extending.md", "## What several parts use")]
    assert [name for name in several if len(listed()[name.strip("`")]) < 2] == []


def test_the_core_imports_no_part():
    core = (module for module in MODULES if part_of(module) is None and module != REGISTERED)
    assert {module: parts for module in core if (parts := parts_imported(module))} == IF_THERE


def test_one_part_needs_another_and_is_removed_with_it():
    assert {part: needed(part) for part in PARTS if needed(part)} == {"engines": {"formats"}}
