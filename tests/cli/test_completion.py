"""Shells complete the command lines of the tools: options, choices, files, verbs; tried in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

BIN = Path(__file__).parents[2] / "bin"
TOOLS = sorted(path.name for path in BIN.iterdir())
SHELLS = ("bash", "zsh", "fish")

#: A line whose last word is completed, and what bash offers for it; files are given by readline's default.
LINES = {
    "tarcat --inter": "--interleave",
    "tarcat -": "--skip --shuffle --interleave --version -h",
    "tar2tsv --no": "--no-sync --noheader --nokey",
    "tarmerge --missing ": "fail skip ignore",
    "tarmerge a.tar --missing s": "skip",
    "tarcat --on-error q": "quarantine=",
    "tarmix --until ": "first last",
    "tarindex --format d": "dali",
    "tarsort --unique la": "last",
    "tarcache ": "list verify warm purge",
    "tarfeed ": "serve status keys kubernetes",
    "tarcache ve": "verify",
    "tarcache purge --u": "--url",
    "tarjob st": "status",
    "tarjob ": "status retry logs cancel",
    "tarjob status --w": "--wait",
    "tarjob status w": "words",
    "tarjob retry ": "words",
    "kujob --backend s": "slurm",
    "kujob logs -": "-h --help --version",
    "tarshards c": "cat cache card catalog chaos check conformance convert create",
    "tarshards cat --inter": "--interleave",
    "tarshards cache ve": "verify",
    "tarshards job retry ": "words",
    "tarshards demo --ep": "--epochs",
}
FILES = (
    "tarcat ",
    "tarcat a",
    "tarshards cat a",
    "tarcat -T ",
    "tarcat -o a",
    "tarjob -s x -- ",
    "tarcreate --jsonl a",
    "targrep x a.tar ",
)
FOLDERS = ("tarcache list ", "tarcreate --dir ", "tarproc --tmpdir s")

COMPLETE = """
compopt() { echo "compopt $1 $2"; }  # needs a completion of readline's; it tells that bash lists files, or folders
eval "$(_@NAME@_COMPLETE=bash_source @TOOL@)"
COMP_WORDS=(@WORDS@)
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
function=$(complete -p @TOOL@ | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" @TOOL@ "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def environment(path_with_tools):
    return {**os.environ, "PATH": path_with_tools}


@pytest.fixture
def complete(tmp_path, environment):
    """Return a function that lets bash complete the last word of a line, in a folder with a job named words."""
    (tmp_path / ".tarjob/words").mkdir(parents=True)
    (tmp_path / ".tarjob/words/job.json").write_text("{}")

    def run(line: str) -> list[str]:
        tool = line.split()[0]
        given = line.split() + [""] * line.endswith(" ")
        script = COMPLETE.replace("@NAME@", tool.upper()).replace("@TOOL@", tool)
        script = script.replace("@WORDS@", " ".join(f"'{word}'" for word in given))
        command = ["bash", "--norc", "-uc", script]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split("\n")[:-1]

    return run


@pytest.mark.parametrize("line", LINES)
def test_words(complete, line):
    found, expected = complete(line), LINES[line].split()
    assert set(expected) <= set(found)
    assert all(word.startswith(line.split(" ")[-1]) for word in found)
    assert len(expected) == len(found) or line.endswith("-")


@pytest.mark.parametrize("line", FILES)
def test_files(complete, line):
    assert complete(line) == ["compopt -o default", ""]


@pytest.mark.parametrize("line", FOLDERS)
def test_folders(complete, line):
    assert complete(line) == ["compopt -o dirnames", ""]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("tool", TOOLS)
def test_scripts(tool, shell, environment):
    variable = f"_{tool.upper()}_COMPLETE"
    done = subprocess.run(
        [tool],
        env={**environment, variable: f"{shell}_source"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{variable}={shell}_complete" in done.stdout.replace(f"{variable} {shell}", f"{variable}={shell}")
    assert f"_{tool}_completion" in done.stdout
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=done.stdout, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_keys_pressed_in_a_bash(tmp_path, environment):
    """Tab in an interactive bash completes an option, and the name of a file."""
    (tmp_path / "images-000.tar").touch()
    (tmp_path / "rc").write_text(
        'PS1="$ "\neval "$(_TAR2TSV_COMPLETE=bash_source tar2tsv)"\ntar2tsv() { echo "<$*>"; }\n'
    )
    primary, secondary = os.openpty()
    shell = subprocess.Popen(
        ["bash", "--rcfile", "rc", "-i"],
        cwd=tmp_path,
        env={**environment, "TERM": "dumb"},
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
    )
    os.close(secondary)
    shown = b""
    while not shown.endswith(b"$ "):
        shown += os.read(primary, 4096)
    os.write(primary, b"tar2tsv --nohea\t ima\t\nexit\n")
    with suppress(OSError):  # the end of what a terminal shows
        while chunk := os.read(primary, 4096):
            shown += chunk
    os.close(primary)
    shell.wait(60)
    assert "<--noheader images-000.tar>" in shown.decode()
