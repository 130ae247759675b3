"""The options of all tools: each letter and name has one meaning; docs/tools/index.md lists all of them.

``python tests/cli/test_options.py`` writes the table.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path

import click
import pytest

import tarshards
from tarshards.cli.program import Program

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/tools/index.md"
MODULES = sorted(path.stem for path in (ROOT / "tarshards/cli").glob("tar*.py"))
OTHER_NAMES = ("tarscat", "kujob")  # of tarcat, and of tarjob

LETTERS = {
    "-b": "--backend",
    "-c": "--count",
    "-e": "--regexp",
    "-f": "--fields",
    "-h": "--help",
    "-i": "--ignore-zeros",
    "-j": "--parallel",
    "-k": "--key",
    "-l": "--list-keys",
    "-m": "--max-count",
    "-n": "--samples",
    "-o": "--output",
    "-p": "--parallel",
    "-q": "--quiet",
    "-r": "--reverse",
    "-s": "--size",
    "-v": "--invert-match",
    "-w": "--word-regexp",
    "-C": None,
    "-E": None,
    "-F": None,
    "-M": "--memory",
    "-P": "--parallel",
    "-S": "--subdirs",
    "-T": "--list",
}
#: The letters that mean something else in one tool.
PRINTED_IN_THE_SLIDES = {("tarproc", "-c"): "--command", ("tarjob", "-s"): "--items"}
AS_IN_GREP = {("targrep", "-i"): "--ignore-case", ("targrep", "-c"): "--count-found"}
#: The options that are not the same in all tools that have them, and why.
VARIES = {
    "--parallel": "says what is done at once, each tool its own; defaults are what suits it",
    "--retries": "tarproc tries a sample again, tarjob an item",
    "--key": "lines have no column that could be the key, so there is a default",
    "--memory": "tarpcat needs less by default; tarjob asks a scheduler for it, in the scheduler's notation",
    "--format": "tarindex writes indexes, tarimport and tarexport know other formats of data",
    "--missing": "tarmerge misses keys, tarcreate the fields of --exts",
    "--shuffle": "tarsort shuffles all samples, and needs no number of samples to hold",
    "--size": "the default depends on what else a tool has to limit shards",
    "--tmpdir": "the default depends on what is kept there",
    "--split": "tarimport takes one split of a dataset, the others a dot of a name",
    "--state": "tarproc keeps samples in a file, tarjob markers in a folder, and tarview reads that of a loader",
    "--name": "tarjob names a job, tarcard a dataset, tarfeed the objects of a cluster",
    "--image": "tarfeed has no image of its own, so that one is required",
    "--port": "tarfeed names the first port of a pod, tarview one of this machine",
    "--limit": "one case of a reader is shorter than a run of a loader",
    "--output": "one file, a pattern for many, or a folder",
    "--quiet": "targrep writes nothing, as grep does, and tarcheck only errors",
    "--dry-run": "tarjob runs commands and writes no files",
}
#: The words for the values of options; choices are written as [first|last].
WORDS = {
    *(
        "CMD",
        "DATE",
        "EXPR",
        "EXT",
        "FIELD",
        "FIELDS",
        "FILE",
        "FOLDER",
        "IMAGE",
        "ITEMS",
        "LO:HI:STEP",
        "MODULE:FUNCTION",
        "N",
    ),
    *("NAME", "OPTION", "PATTERN", "POLICY", "QUANTITY", "SECONDS", "SHARDS", "SIZE", "TEMPLATE", "TEXT", "URL"),
    *(
        "FIELD[:KIND]",
        "NAME,...",
        "NAME=R,...",
        "NAME=TYPE,...",
        "ROUNDS",
        "N|SIZE",
        "FOLDER|FILE",
        "SECRET:PATH",
        "SECRET|NAME=SECRET:KEY",
    ),
    *("first|last|N", "now|soon,fail=N|N%"),
}


def tools() -> dict[str, click.Command]:
    """Return the commands of all programs, and of their verbs, by their names on a command line."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found: dict[str, Program] = {}
    for line in setup["options.entry_points"]["console_scripts"].strip().splitlines():
        name, module, function = re.split(" = |:", line)
        if name not in OTHER_NAMES:
            found[name] = getattr(import_module(module), function)
    verbs = [(tool, command.verbs) for tool, command in found.items()]
    return found | {f"{tool} {name}": verb for tool, each in verbs for name, verb in each.items() if not verb.hidden}


def options() -> Iterator[tuple[str, click.Option]]:
    """Yield all options of all tools, each after the tool's name."""
    for tool, command in tools().items():
        for param in command.get_params(click.Context(command, **command.context_settings)):
            if isinstance(param, click.Option):
                yield tool, param


def name_of(option: click.Option) -> str | None:
    """Return the first long name of *option*."""
    return next((name for name in option.opts if name.startswith("--")), None)


def described(tool: str, option: click.Option) -> tuple[str, str, str]:
    """Return how --help writes *option*, its default, and its meaning."""
    command = tools()[tool]
    term, text = option.get_help_record(click.Context(command, **command.context_settings))
    meaning, *notes = [part.removesuffix("]") for part in text.split("  [")]
    notes = [re.sub(r"(; )?x>=?[01]$", "", note) for note in notes]
    return term, "; ".join(note.removeprefix("default: ") for note in notes if note), meaning


def test_a_letter_means_one_thing():
    exceptions = PRINTED_IN_THE_SLIDES | AS_IN_GREP
    used = {}
    for tool, option in options():
        for letter in (name for name in option.opts + option.secondary_opts if not name.startswith("--")):
            meant = LETTERS[letter] if (tool, letter) not in exceptions else exceptions[tool, letter]
            assert name_of(option) == meant, f"{tool} {letter}"
            used[tool, letter] = name_of(option)
    assert set(exceptions.items()) <= set(used.items())
    assert {letter for _, letter in used} == set(LETTERS)


def test_a_name_means_one_thing():
    found = defaultdict(lambda: defaultdict(list))
    for tool, option in options():
        if name := name_of(option):
            form = (option.type.to_info_dict(), option.multiple, *described(tool, option)[1:])
            term = option.make_metavar(click.Context(tools()[tool])) if not option.is_flag else ""
            found[name][repr((term, form))].append(tool)
    varies = {name: forms for name, forms in found.items() if len(forms) > 1}
    assert set(varies) == set(VARIES), {name: dict(forms) for name, forms in varies.items() if name not in VARIES}


def test_a_default_is_shown_once():
    notes = [(tool, option, described(tool, option)[1].split("; ")) for tool, option in options()]
    assert not [(tool, option.name) for tool, option, parts in notes if len(set(parts)) < len(parts)]


def test_values_are_named_by_the_same_words():
    terms = [described(tool, option)[0] for tool, option in options() if not option.is_flag]
    values = {re.sub(r"^(-\w, )*(--?[\w-]+) ", "", term) for term in terms}
    assert {value for value in values if not value.startswith("[")} == WORDS


@pytest.mark.parametrize("tool", tools())
def test_every_tool_has_help_and_version(tool, path_with_tools, python_with_torch):
    name, *verb = tool.split()
    command = [python_with_torch, "-m", "tarshards", *verb] if name == "tarshards" else [name, *verb]
    options = {"env": {**os.environ, "PATH": path_with_tools}, "stdin": subprocess.DEVNULL}

    def run(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, **options)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    words = run("-h")
    assert run("--help") == words
    assert words.startswith(f"Usage: {tool} ")
    assert not [line for line in words.splitlines() if line != line.rstrip()], "a name without an explanation"
    shown = name if name == "tarshards" else f"{name} (tarshards)"
    assert run("--version") == f"{shown} {tarshards.__version__}\n"


def test_the_version_is_told_before_anything_heavy_is_loaded():
    code = "import sys; sys.argv = ['tarproc', '--version']; from tarshards.cli.tarproc import main\n"
    code += "try: main()\nfinally: print(*{'numpy', 'PIL', 'fsspec', 'tqdm', 'socket', 'logging'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"tarproc (tarshards) {tarshards.__version__}\n\n"


def test_tools_start_with_a_click_whose_types_are_not_generic():
    """Those before 8.4 are not, and setup.cfg allows them."""
    code = "import click; click.ParamType = type('ParamType', (click.ParamType,), {'__class_getitem__': None})\n"
    code += f"import importlib; [importlib.import_module(name) for name in {[f'tarshards.cli.{n}' for n in MODULES]}]"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("tarcat --suffle 3", "Did you mean one of: --shuffle, "),
        ("tarproc --paralel 3", "Did you mean --parallel?"),
        ("kujob --parallelism 3", "Did you mean --parallel?"),
        ("tarjob status --wat", "Did you mean --wait?"),
        ("tarcat --skip -1", "-1 is not in the range x>=0"),
        ("tarsplit --start -1 -o a", "-1 is not in the range x>=0"),
        ("tarcat --interleave 0", "0 is not in the range x>=1"),
        ("tarsplit -j -1 -o a", "-1 is not in the range x>=0"),
    ],
)
def test_a_wrong_option_names_the_right_one(line, hint, path_with_tools):
    tool, *arguments = line.split()
    environment = {**os.environ, "PATH": path_with_tools}
    done = subprocess.run([tool, *arguments], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert hint in re.sub(r"['\"]", "", done.stderr)


def table() -> str:
    """Return the table of all options, in Markdown."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    every = set(tools())
    for tool, option in options():
        rows.setdefault(described(tool, option), []).append(tool)
    lines = ["| option | meaning | default | tools |", "|---|---|---|---|"]
    for (term, default, meaning), names in sorted(rows.items(), key=lambda row: row[0][0].split("--")[-1].lower()):
        where = "all" if set(names) == every else ", ".join(names)
        cells = (f"`{term}`", meaning, default, where)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page_with_table() -> str:
    head, _, rest = PAGE.read_text().partition("| option | meaning |")
    tail = rest.partition("\n\n")[2]
    return head + table() + ("\n" + tail if tail else "")


def test_the_page_has_the_table_of_all_options():
    assert PAGE.read_text() == page_with_table(), "python tests/cli/test_options.py writes it"


if __name__ == "__main__":
    PAGE.write_text(page_with_table())
