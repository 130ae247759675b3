"""``python -m tarshards``, and the command ``tarshards``: what is installed, and checks of loaders and readers."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import ClassVar

import click

import tarshards
from tarshards import kernels
from tarshards.cli.program import Program, tool
from tarshards.samples.codecs import jpeg


class Checks(Mapping[str, click.Command]):
    """The commands that are no tools of their own, each imported on first use; none without ``testing``."""

    modules: ClassVar[dict[str, str]] = {
        "chaos": "chaos_check",
        "conformance": "reader_check",
        "demo": "demo",
        "epoch": "loader_checks",
        "resume": "loader_checks",
        "shuffle": "loader_checks",
    }

    def __getitem__(self, name: str) -> click.Command:
        command: click.Command = getattr(import_module(f"tarshards.cli.{self.modules[name]}"), name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules if find_spec("tarshards.testing") else ())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class MainVerbs(Program):
    """The program ``tarshards``, whose verbs are the checks."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        if self.verbs:
            with formatter.section("Checks"):
                formatter.write_dl([(name, verb.get_short_help_str(80)) for name, verb in self.verbs.items()])


@tool("[CHECK ...]", cls=MainVerbs, verbs=Checks())
def main() -> None:
    """Show the versions of tarshards and Python, the kernels that are compiled and the extras that are installed.

    With a CHECK: check a loader or a reader of tar files, ours or yours, or train on a small dataset.

    The tools are programs of their own: tarcat, tarsplit, tarproc and others, each with --help.
    """
    click.echo("\n".join(report()))


def report() -> Iterator[str]:
    """Yield the lines that describe this installation."""
    yield f"tarshards {tarshards.__version__}, Python {platform.python_version()}, {platform.platform()}"
    count = len(kernels.__all__)
    yield f"kernels   {count - len(kernels.MISSING)} of {count} compiled"
    if kernels.MISSING:
        cost = f"without {' '.join(kernels.MISSING)} all run in Python, several times slower"
        yield f"          {cost}; reinstall where a C compiler is found"
    yield f"JPEG      decoded by {jpeg.library() or 'Pillow, image by image: no libjpeg-turbo is found'}"
    try:
        requirements = metadata.requires("tarshards") or []
    except metadata.PackageNotFoundError:
        yield "extras    unknown: tarshards is not installed, it runs from a checkout"
        return
    extras: dict[str, list[str | None]] = {}
    for text in requirements:
        if found := re.search(r'extra == "([\w-]+)"', text):
            extras.setdefault(found[1], []).append(_installed(re.split(r"[^\w.-]", text)[0]))
    there = {extra: ", ".join(filter(None, names)) for extra, names in sorted(extras.items()) if all(names)}
    missing = sorted(extras.keys() - there.keys())
    yield "extras" if there else "extras    none"
    yield from (f"  {extra:12}{names}" for extra, names in there.items())
    if missing:
        yield f"others    {', '.join(missing)}: pip install 'tarshards[NAME]'"


def _installed(distribution: str) -> str | None:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.argv[0] = "tarshards"
    main()
