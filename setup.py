"""Build the native rooms; everything else stands in setup.cfg.

They are optional: without a compiler the install succeeds and their pure-Python twins do the work.
"""

from setuptools import Extension, setup


def native(name, *headers):
    return Extension(
        f"tarshards.{name}",
        [f"tarshards/{name}.c"],
        depends=[f"tarshards/{header}" for header in headers],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[native("_tar", "_tar.h"), native("_mapped"), native("_rows"), native("_pixels")],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
