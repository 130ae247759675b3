"""Build the native kernels; everything else stands in setup.cfg.

They are optional: without a compiler the install succeeds and their pure-Python twins do the work. With
TARSHARDS_REQUIRE_KERNELS=1, as for the wheels of a release, a kernel that does not compile is an error.

One build serves all Pythons from 3.11 on, by the limited API, which a free-threaded Python does not have: it gets a
build of its own.
"""

import os
import sysconfig

from setuptools import Extension, setup

LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")


def native(name, *headers):
    folder, _, _ = name.rpartition("/")
    return Extension(
        f"tarshards.{name.replace('/', '.')}",
        [f"tarshards/{name}.c"],
        depends=[f"tarshards/{folder}/{header}" for header in headers],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED else [],
        extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
        py_limited_api=LIMITED,
        optional=os.environ.get("TARSHARDS_REQUIRE_KERNELS") != "1",
    )


setup(
    ext_modules=[
        native("tar/_tar", "_tar.h"),
        native("storage/_mapped", "_guard.h"),
        native("index/_sidecars"),
        native("index/_headers", "../tar/_tar.h", "../storage/_guard.h"),
        native("index/_rows", "../storage/_guard.h"),
        native("index/_pixels", "../storage/_guard.h"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
)
