"""Build the native kernels, and man pages and completions of the programs; everything else stands in setup.cfg.

They are optional: without a compiler the install succeeds and their pure-Python twins do the work. With
TARSHARDS_REQUIRE_KERNELS=1, as for the wheels of a release, a kernel that does not compile is an error.

One build serves all Pythons from 3.11 on, by the limited API, which a free-threaded Python does not have: it gets a
build of its own.
"""

import os
import re
import sys
import sysconfig
from configparser import RawConfigParser
from pathlib import Path

from setuptools import Distribution, Extension, setup

LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")


def native(name, *headers, libraries=()):
    return Extension(
        f"tarshards.kernels.{name}",
        [f"tarshards/kernels/{name}.c"],
        depends=[f"tarshards/kernels/{header}" for header in headers],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED else [],
        libraries=list(libraries),
        extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
        py_limited_api=LIMITED,
        optional=os.environ.get("TARSHARDS_REQUIRE_KERNELS") != "1",
    )


def published() -> dict[str, object]:
    """Return the description and the addresses of the project: what the url in setup.cfg leads to, if there is one.

    README.md is the description, with links and pictures that lead to the repository. The documentation is where
    GitHub publishes the pages of a repository.
    """
    here = Path(__file__).parent
    known = RawConfigParser()
    known.read(here / "setup.cfg")
    text = (here / "README.md").read_text()
    if not (url := known["metadata"]["url"].rstrip("/")):
        return {"long_description": text}
    link = r'(?P<before>\]\(|(?:href|src|srcset)=")(?P<path>[\w./-]+)'

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found["path"].endswith((".svg", ".png")) else "blob"
        return f"{found['before']}{url}/{kind}/main/{found['path']}"

    text = re.sub(link, lambda found: absolute(found) if (here / found["path"]).exists() else found[0], text)
    owner, name = url.split("/")[-2:]
    return {"long_description": text, "project_urls": {"Documentation": f"https://{owner.lower()}.github.io/{name}/"}}


class InstallData(Distribution().get_command_class("install_data")):
    """Write what man and shells read about each program to share/, made from the program's options."""

    def run(self):
        sys.path.insert(0, str(Path(__file__).parent))
        from tarshards.cli.manual import share_files

        scripts = self.distribution.entry_points["console_scripts"]
        for name, text in share_files(dict(script.split(" = ") for script in scripts)):
            path = Path(self.install_dir, "share", name)
            self.mkpath(str(path.parent))
            path.write_text(text)
            self.outfiles.append(str(path))


setup(
    **published(),
    long_description_content_type="text/markdown",
    cmdclass={"install_data": InstallData},
    data_files=[("share", [])],  # which install_data writes
    ext_modules=[
        native("_tar", "_tar.h"),
        native("_mapped", "_guard.h"),
        native("_sidecars"),
        native("_headers", "_tar.h", "_guard.h"),
        native("_rows", "_guard.h", "_jpeg_markers.h"),
        native("_wire"),
        native("_pixels", "_guard.h", "_resize.h"),
        native(
            "_jpeg",
            "_guard.h",
            "_jpeg_markers.h",
            "_resize.h",
            libraries=["dl"] if sys.platform == "linux" else [],
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
)
