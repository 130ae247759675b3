"""Build the native tar header parser; everything else stands in setup.cfg.

The extension is optional: without a compiler the install succeeds and the pure-Python twin reads the shards.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tarshards._tar",
            ["tarshards/_tar.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
