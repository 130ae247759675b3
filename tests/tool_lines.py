"""A command line for every tool that writes files, for tests of common properties; see ``make_inputs``."""

from __future__ import annotations

from configparser import ConfigParser
from importlib import import_module
from pathlib import Path
from typing import Any

from tarshards import ShardWriter

ROOT = Path(__file__).parents[1]

#: Every tool that writes files, and a line by which it writes out* in the current folder.
WRITING = {
    "lines2tar": "{0}lines.txt -o out.tar",
    "tar2json": "{0}in-0.tar -o out.jsonl",
    "tar2tsv": "{0}in-0.tar -o out.tsv",
    "tarcard": "{0}in-0.tar --name x -o out.json",
    "tarcat": "{0}in-0.tar -o out.tar",
    "tarcheck": "-q {0}in-0.tar --repair out.tar",
    "tarconvert": "-q {0}in-{{0..2}}.tar -o out-%d.gz",
    "tarcreate": "--dir {0}tree --class-field cls --classes out.txt -o out.tar",
    "tarexport": "-q {0}in-{{0..2}}.tar -o out-%d.jsonl",
    "tarfirst": "{0}in-0.tar --tar -o out.tar",
    "targrep": "text {0}in-0.tar -o out.tar",
    "tarimport": "-q {0}rows.jsonl -o out-%d.tar",
    "tarindex": "{0}in-0.tar --format dali -o .",
    "tarmerge": "{0}in-0.tar {0}in-0.tar --conflict first -o out.tar",
    "tarmix": "{0}in-0.tar {0}in-1.tar -o out.tar",
    "tarpcat": "{0}in-{{0..1}}.tar -o out.tar",
    "tarproc": "-c true {0}in-0.tar -o out.tar",
    "tarreshard": "{0}in-{{0..2}}.tar -o out-%d.tar",
    "tarscat": "{0}in-0.tar -o out.tar",
    "tarshow": "{0}in-0.tar --html out.html",
    "tarsort": "{0}in-0.tar -o out.tar",
    "tarsplit": "{0}in-{{0..2}}.tar -n 4 --index -o out-%d.tar",
}
#: The tools that write no files but markers, plans, logs, blocks of a cache, catalogs, and a page beside shards.
OTHERS = {"kujob", "tarcache", "tarcatalog", "tarfeed", "tarjob", "tarshards", "tarview"}


def make_inputs(folder: Path, *, size: int = 4) -> None:
    """Make the inputs of these lines; the text of each sample has *size* bytes."""
    with ShardWriter(str(folder / "in-%d.tar"), max_samples=4, sync=False) as writer:
        for i in range(9):
            writer.write({"__key__": f"{i:03d}", "txt": b"text".ljust(size, b"x"), "cls": b"%d" % (i % 3)})
    (folder / "lines.txt").write_text("a".ljust(size, "x") + "\nb\n")
    (folder / "rows.jsonl").write_text('{"txt": "' + "a".ljust(size, "x") + '"}\n{"txt": "b"}\n')
    (folder / "tree/cat").mkdir(parents=True)
    (folder / "tree/cat/a.txt").write_text("text".ljust(size, "x"))


def command_of(tool: str) -> Any:
    """Return the command of a tool."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    scripts = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    module, function = dict(line.split(" = ") for line in scripts)[tool].split(":")
    return getattr(import_module(module), function)
