"""Man pages and completion scripts of all programs; installation puts them where man and shells look for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc
from typing import cast

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from tarshards import __version__
from tarshards.cli.program import Program

SHELLS: tuple[tuple[type[ShellComplete], str], ...] = (
    (BashComplete, "bash-completion/completions/{}"),
    (ZshComplete, "zsh/site-functions/_{}"),
    (FishComplete, "fish/vendor_completions.d/{}.fish"),
)
EXITS = {
    "0": "Done, with no more errors than the command line allows; stderr lists them.",
    "1": "The data failed, or had too many errors.",
    "2": "The command line is wrong, or an output exists.",
    "129, 130, 143": "The terminal hung up, interrupted, terminated.",
}
#: The characters that roff interprets, or that it would print as typographic ones.
ROFF = str.maketrans({"\\": r"\(rs", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"})


def share_files(scripts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the path below ``share`` and the text of each file for the programs *scripts*: MODULE:FUNCTION by name."""
    for name, entry in scripts.items():
        module, function = entry.split(":")
        program: Program = getattr(import_module(module), function)
        yield f"man/man1/{name}.1", man_page(name, program)
        for shell, path in SHELLS:
            yield path.format(name), completion_script(shell, name, program)


def completion_script(shell: type[ShellComplete], name: str, program: Program) -> str:
    """Return the script with which *shell* requests completions from *program*.

    It is the output of the program for _NAME_COMPLETE=SHELL_source, without the check of this machine's bash. zsh runs
    the file at each completion, so the file always completes: click's script completes only when it is loaded, and the
    second time only registers a function.
    """
    script = ShellComplete.source(shell(program, {}, name, f"_{name.upper()}_COMPLETE"))
    if shell is ZshComplete:
        functions, _, _ = script.partition("\nif [[ $zsh_eval_context")
        return f'{functions}\n_{name}_completion "$@"\n'
    return script


def man_page(name: str, program: Program) -> str:
    """Return the page of *program* for man, in roff."""
    context = _context(name, program)
    lines = [f'.TH {name.upper()} 1 "" "tarshards {__version__}" "tarshards"', ".ad l", ".SH NAME"]
    lines += [_roff(f"{name} - {program.get_short_help_str(100).rstrip('.')}"), ".SH SYNOPSIS", *_synopsis(context)]
    lines += [".SH DESCRIPTION", *_paragraphs(f"{program.help}\n\n{program.epilog or ''}")]
    lines += [".SH OPTIONS", *_options(context)]
    for task, rows in program.by_task().items():
        lines.append(f".SH {task.upper()}")
        for verb, does in rows.items():
            lines += [".TP", rf"\fB{_roff(verb)}\fR", _roff(does)]
    if program.verbs:
        lines.append(".SH COMMANDS")
        for verb, command in program.verbs.items():
            if not command.hidden:
                lines += _verb(f"{name} {verb}", cast(Program, command))
    lines += [".SH EXIT STATUS"]
    for code, meaning in EXITS.items():
        lines += [".TP", _roff(code), _roff(meaning)]
    if program.example:
        lines += [".SH EXAMPLE", ".nf", _roff(program.example), ".fi"]
    return "\n".join([*lines, ""])


def _context(name: str, command: click.Command) -> click.Context:
    return click.Context(command, info_name=name, **command.context_settings)


def _synopsis(context: click.Context) -> list[str]:
    words = context.command.collect_usage_pieces(context)
    return [rf"\fB{_roff(context.command_path)}\fR {_roff(' '.join(words))}"]


def _options(context: click.Context, heading: str = ".SS") -> Iterator[str]:
    for title, rows in cast(Program, context.command).options_by_heading(context).items():
        if title != "Options":
            yield f"{heading} {title}"
        for term, meaning in rows:
            yield from (".TP", rf"\fB{_roff(term)}\fR", _roff(meaning))


def _verb(name: str, command: Program) -> Iterator[str]:
    context = _context(name, command)
    yield f'.SS "{name}"'
    yield from _synopsis(context)
    yield ".PP"
    yield from _paragraphs(command.help or "")
    yield from _options(context, ".PP\n")


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring; those that click marks with \\b keep their lines."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", cleandoc(text.partition("\f")[0]))):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *map(_roff, paragraph.splitlines()[1:]), ".fi")
        else:
            yield _roff(" ".join(paragraph.split()))


def _roff(text: str) -> str:
    r"""Escape *text* so that roff prints it unchanged.

    >>> _roff("-o 'out-%d.tar'"), _roff(".index")
    ('\\-o \\(aqout\\-%d.tar\\(aq', '\\&.index')
    """
    text = text.translate(ROFF)
    return rf"\&{text}" if text.startswith(".") else text
