"""The modules of the page: they parse no HTML, form one module, and agree with Python on fields."""

from __future__ import annotations

import re
import subprocess

import pytest
from programs import need

from tarshards.view.page_text import EXPORT, FILES, bundled

MODULES = sorted(name for name in FILES if name.endswith(".js"))
NEVER = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|\.href\s*="


@pytest.mark.parametrize("name", MODULES)
def test_nothing_of_a_sample_can_become_markup(name):
    assert not re.findall(NEVER, FILES[name].read_text())


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_what_it_is_and_is_short(name):
    text = FILES[name].read_text()
    assert text.startswith("// ")
    assert len(text.splitlines()) <= 300


def test_every_module_is_used_and_exports_what_others_import():
    imported = {"main.js"}
    for name in MODULES:
        for names, module in re.findall(
            r'^import \{([^}]*)\} from "\./(\w+\.js)";$', FILES[name].read_text(), re.MULTILINE
        ):
            imported.add(module)
            assert {*names.replace(" ", "").split(",")} <= {*EXPORT.findall(FILES[module].read_text())}
    assert imported == set(MODULES)


def test_the_modules_are_javascript(tmp_path):
    need("node")
    for name in [*MODULES, "whole"]:
        path = tmp_path / f"{name}.mjs"
        path.write_text(bundled("main.js") if name == "whole" else FILES[name].read_text())
        done = subprocess.run(["node", "--check", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
