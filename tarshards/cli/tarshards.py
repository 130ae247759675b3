"""All tools under one command, checks of loaders and readers, and a report of what is installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import click

from tarshards import __version__
from tarshards.cli.program import Program, tool
from tarshards.errors import did_you_mean

#: What each tool does, by the task that it is for. ``tarshards NAME`` runs it; the name lacks the "tar" of the tool's.
TASKS = {
    "Making shards": {
        "create": "from a table, a folder, lines or JSON",
        "lines": "from the lines of a text",
        "import": "from parquet, CSV, lines of JSON, folders, Hugging Face datasets and others",
        "convert": "from Squirrel's msgpack shards, and back",
        "split": "from one tar: cut it into shards",
        "reshard": "from other shards, in a random order of all samples",
    },
    "Shards to shards": {
        "cat": "concatenate; select, rename, shuffle, interleave",
        "pcat": "concatenate, with several readers at once",
        "mix": "mix by weights",
        "merge": "join parallel tars by key",
        "sort": "sort or shuffle samples",
        "grep": "select samples by a pattern, a condition or their keys",
        "proc": "run a command on every sample",
    },
    "Looking into shards": {
        "show": "list samples; a summary, pictures, an HTML page",
        "view": "show samples on a page for a browser",
        "check": "find damage, and save the intact samples",
        "index": "index for random access, planned epochs and other loaders",
        "first": "write a field of the first sample that meets a condition",
        "tsv": "tabulate fields",
        "json": "write lines of JSON, which create converts back",
        "export": "write parquet, lines of JSON, msgpack shards or files",
    },
    "Datasets and caches": {
        "cache": "list, verify, fill and empty a cache of remote shards",
        "card": "write the card of a dataset, as MLCommons' Croissant",
        "catalog": "name and pin versions of datasets",
    },
    "Many machines": {
        "job": "run a command for each shard: here, on Ray, by Slurm or by Kubernetes",
        "feed": "make batches for loaders on other hosts",
    },
    "Checks": {
        "chaos": "read shards while ranks, workers, network and machine fail",
        "conformance": "run the convention's cases over a reader of tar files",
        "demo": "write a small dataset, train on it, and audit the run",
        "epoch": "compare epochs of a loader with its dataset",
        "resume": "stop a loader at every batch, and resume it",
        "shuffle": "compare a loader's orders with random permutations",
    },
}
#: What commands of other programs are called here.
OTHERS = {
    "help": "--help",
    "version": "--version",
    "ls": "show",
    "list": "show",
    "head": "cat -c N",
    "join": "merge",
    "filter": "grep",
    "map": "proc",
    "write": "create",
}
CHECKS = "Checks"  # the task whose commands are no programs of their own
#: The modules of commands that are not named "tar" and the command.
MODULES = {
    "lines": "lines2tar",
    "tsv": "tar2tsv",
    "json": "tar2json",
    "chaos": "chaos_check",
    "conformance": "reader_check",
    "demo": "demo",
    "epoch": "loader_checks",
    "resume": "loader_checks",
    "shuffle": "loader_checks",
}


def _module_of(name: str) -> str | None:
    """Return the module of the command *name*, None if the part that has it is removed."""
    module = f"tarshards.cli.{MODULES.get(name, f'tar{name}')}"
    return module if find_spec(module) else None


class Checks(Mapping[str, click.Command]):
    """The commands that are no tools of their own, each imported on first use."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in TASKS[CHECKS] or (module := _module_of(name)) is None:
            raise KeyError(name)
        command: click.Command = getattr(import_module(module), name)
        return command

    def __iter__(self) -> Iterator[str]:
        return filter(_module_of, TASKS[CHECKS])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class AllTools(Program):
    """The command ``tarshards``: its first word is a tool, or one of its own verbs, the checks."""

    def by_task(self) -> dict[str, dict[str, str]]:
        found = {task: {name: does for name, does in rows.items() if _module_of(name)} for task, rows in TASKS.items()}
        return {task: rows for task, rows in found.items() if rows}

    def summaries(self) -> dict[str, str]:
        return {name: does for rows in self.by_task().values() for name, does in rows.items()}

    def tool_named(self, args: list[str]) -> Program | None:
        """Return the tool that the first of *args* names."""
        is_tool = any(args[:1] == [name] for task, rows in TASKS.items() if task != CHECKS for name in rows)
        module = _module_of(args[0]) if is_tool else None
        return None if module is None else cast(Program, import_module(module).main)

    def main(self, args: Any = None, *others: Any, **options: Any) -> Any:
        """Run the tool that the command line names, as a program whose name is both words."""
        if args is None and (found := self.tool_named(sys.argv[1:])) is not None:
            sys.argv[:2] = [" ".join(sys.argv[:2])]
            return found.main(None, *others, **options)
        return super().main(args, *others, **options)

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> click.Context:
        if (found := self.tool_named(args)) is None:
            return super().make_context(info_name, args, parent, **extra)
        return found.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)

    def unknown(self, words: tuple[str, ...]) -> click.UsageError:
        meant = f"; did you mean {OTHERS[words[0]]!r}?" if words[0] in OTHERS else ""
        hint = meant or did_you_mean(words[0], self.summaries())
        return click.UsageError(f"there is no command {words[0]!r}{hint}")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        for task, rows in self.by_task().items():
            with formatter.section(task):
                formatter.write_dl([(f"{name:11}", does) for name, does in rows.items()])


@tool(
    "[COMMAND ...]",
    cls=AllTools,
    verbs=Checks(),
    epilog="Each command has its own --help. Each tool is a program too: `tarshards cat` is tarcat, `tarshards lines` "
    "is lines2tar, and `tarshards tsv` tar2tsv.",
    example="tarshards cat -c 10 'train-{000..146}.tar' | tarshards show",
)
def main() -> None:
    """Work on tar shards: make, change, look into and index them.

    Without a COMMAND: show the versions of tarshards and Python, the kernels that are compiled, and the extras that are
    installed.
    """
    click.echo("\n".join(report()))


def report() -> Iterator[str]:
    """Yield the lines that describe this installation."""
    import platform
    from importlib import metadata

    from tarshards import kernels
    from tarshards.samples.codecs import jpeg

    yield f"tarshards {__version__}, Python {platform.python_version()}, {platform.platform()}"
    count = len(kernels.__all__)
    yield f"kernels   {count - len(kernels.MISSING)} of {count} compiled"
    if kernels.MISSING:
        yield f"          without {' '.join(kernels.MISSING)} all run in Python, several times slower"
        yield f"          {kernels.cure()}"
    reason = "no libjpeg-turbo is found" if kernels.IS_COMPILED else "its kernel is not compiled"
    yield f"JPEG      decoded by {jpeg.library() or f'Pillow, image by image: {reason}'}"
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
    from importlib import metadata

    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return None
