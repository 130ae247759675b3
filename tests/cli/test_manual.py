"""The man pages and completion scripts that an installation puts into share/."""

from __future__ import annotations

import os
import re
import subprocess

import click
import pytest
from test_completion import TOOLS
from tool_lines import command_of

from tarshards.cli.manual import SHELLS, completion_script, man_page, share_files


def unescaped(page: str) -> str:
    for code, character in ((r"\&", ""), (r"\-", "-"), (r"\(aq", "'"), (r"\(ga", "`"), (r"\(ha", "^"), (r"\(ti", "~")):
        page = page.replace(code, character)
    return page


def options_of(command: click.Command) -> set[str]:
    params = command.get_params(click.Context(command, **command.context_settings))
    return {
        name
        for param in params
        if isinstance(param, click.Option) and not param.hidden
        for name in (*param.opts, *param.secondary_opts)
    }


@pytest.mark.parametrize("name", TOOLS)
def test_a_man_page_names_all_options_and_commands(name):
    program = command_of(name)
    page = unescaped(man_page(name, program))
    assert page.startswith(f'.TH {name.upper()} 1 "" "tarshards ')
    assert f"\n{name} - " in page
    commands = [program, *(verb for verb in getattr(program, "verbs", {}).values() if not verb.hidden)]
    terms = set(re.findall(r"(?<![\w-])--?[\w-]+", " ".join(re.findall(r"^\.TP\n\\fB(.*)\\fR", page, re.MULTILINE))))
    assert terms == set().union(*map(options_of, commands))
    for task, rows in program.by_task().items():
        assert f".SH {task.upper()}\n" in page
        assert all(f"\n\\fB{verb}\\fR\n{does}\n" in page for verb, does in rows.items())
    for verb, command in program.verbs.items():
        assert (f'.SS "{name} {verb}"' in page) is not command.hidden
    assert {line.split()[0] for line in page.splitlines() if line.startswith(".")} <= {
        *(".TH", ".ad", ".SH", ".SS", ".TP", ".PP", ".nf", ".fi")
    }


@pytest.mark.parametrize("kind", [kind for kind, _ in SHELLS])
@pytest.mark.parametrize("name", ["tarcat", "tarjob"])
def test_a_completion_script_is_what_the_program_prints(name, kind, path_with_tools):
    shell = kind.name
    environment = {**os.environ, "PATH": path_with_tools, f"_{name.upper()}_COMPLETE": f"{shell}_source"}
    printed = subprocess.run([name], env=environment, capture_output=True, text=True, check=True).stdout
    script = completion_script(kind, name, command_of(name))
    if shell == "zsh":
        functions = script.removesuffix(f'\n_{name}_completion "$@"\n')
        assert printed.startswith(functions)
        assert functions != script
    else:
        assert script.strip() == printed.strip()


def test_files_of_a_program_lie_where_man_and_shells_look():
    files = dict(share_files({"kujob": "tarshards.cli.tarjob:kujob"}))
    assert list(files) == [
        "man/man1/kujob.1",
        "bash-completion/completions/kujob",
        "zsh/site-functions/_kujob",
        "fish/vendor_completions.d/kujob.fish",
    ]
    assert files["zsh/site-functions/_kujob"].startswith("#compdef kujob\n")
