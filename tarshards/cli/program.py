"""A tool as a Unix program: start and end, messages on stderr, and refusal of a command line."""

from __future__ import annotations

import gc
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EEXIST
from functools import wraps
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from tarshards import __version__
from tarshards.cli.terminal import above_bars, color_option, colored, log_above_bars
from tarshards.errors import TarshardsError, visible
from tarshards.storage.streams import check_written

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: The options that many tools share, by their headings in --help; a tool's own options precede them.
HEADINGS = {
    "Input": (
        *(
            "--list",
            "--null",
            "--index-dir",
            "--count",
            "--slice",
            "--fields",
            "--ignore-zeros",
            "--split",
            "--keep-metadata",
        ),
        *("--on-error", "--max-errors", "--allow-empty"),
    ),
    "Remote input": ("--connections", "--ahead", "--cache-dir", "--cache-bytes"),
    "Output": ("--output", "--overwrite", "--no-sync", "--dry-run"),
    "Other": ("--quiet", "--verbose", "--color", "--version", "--help"),
}


class Program(click.Command):
    """A click command that runs as a Unix program.

    Every program has -h, --help and --version, and completes its command line for a shell through the variable
    _NAME_COMPLETE, like all click programs. *headings* are further headings of its options, like HEADINGS; *example* is
    a command line for the end of --help. Its first argument may be one of its *verbs*, commands by their names.

    Exit codes: 0 done, with no more errors, listed on stderr, than --on-error and --max-errors allow; 1 the data
    failed, or had more errors; 2 the command line is wrong, or an output exists; 129 the terminal hung up, 130
    interrupted, 143 terminated, after cleaning up. If the reader of stdout has gone away, the program is killed quietly
    by SIGPIPE. A full disk is an error of one line, also if stdout is redirected to that disk, and also for --help.
    """

    def __init__(
        self,
        *,
        headings: dict[str, tuple[str, ...]] | None = None,
        example: str | None = None,
        verbs: Any = None,
        **options: Any,
    ):
        settings = {"help_option_names": ["--help", "-h"], "max_content_width": 120, "show_default": True}
        super().__init__(context_settings=settings, **options)
        self.headings: dict[str, Any] = {"Options": (), **(headings or {}), **HEADINGS}
        self.example = example
        self.verbs: Any = verbs or {}
        self.params.append(color_option())
        self.params.append(
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_version,
                help="Show the version and exit.",
            )
        )

    def verb(self, name: str, **options: Any) -> Callable[[Callable[..., Any]], Program]:
        """Make a function the verb *name*; *options* are click's."""
        return lambda function: self.verbs.setdefault(name, tool(**options)(function))

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> click.Context:
        verb = self.verbs.get(args[0]) if args else None
        if verb is None:
            return super().make_context(info_name, args, parent, **extra)
        return verb.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from tarshards.cli.other_options import answer_to

            known = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
            tool = self.callback.__module__.rpartition(".")[2] if self.callback else ""
            if answer := answer_to(tool, error.option_name, known):
                raise click.UsageError(f"no such option {error.option_name}: {answer}", ctx) from error
            raise

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def unknown(self, words: tuple[str, ...]) -> click.UsageError:
        """Return the error for *words* that do not begin with a verb."""
        *others, last = self.verbs or ["an option"]  # if the part with its verbs is removed
        known = f"{', '.join(others)} or {last}" if others else last
        return click.UsageError(f"the first word is {known}, not {words[0]!r}" if words else f"say what to do: {known}")

    def complete(self, incomplete: str) -> list[CompletionItem]:
        """Return the verbs that begin with *incomplete*."""
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(name, help=does) for name, does in self.summaries().items() if name.startswith(incomplete)
        ]

    def summaries(self) -> dict[str, str]:
        """Return what each verb does."""
        return {name: verb.get_short_help_str() for name, verb in self.verbs.items() if not verb.hidden}

    def by_task(self) -> dict[str, dict[str, str]]:
        """Return what the commands do, by task, if the first word may be another program, too."""
        return {}

    def options_by_heading(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the rows of the options, each its names and its meaning, under the headings that have any."""
        shared = {name: heading for heading, names in self.headings.items() for name in names}
        order = {name: number for number, name in enumerate(shared)}
        found: dict[str, list[tuple[int, str, str]]] = {heading: [] for heading in self.headings}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                name = max(param.opts, key=len)
                found[shared.get(name, "Options")].append((order.get(name, 0), *record))
        for rows in found.values():
            rows.sort(key=itemgetter(0))
        return {heading: [row[1:] for row in rows] for heading, rows in found.items() if rows}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, in columns of the same width."""
        found = self.options_by_heading(ctx)
        width = min(30, max(len(term) for rows in found.values() for term, _ in rows))
        for heading, rows in found.items():
            with formatter.section(heading):
                formatter.write_dl([(term.ljust(width), text) for term, text in rows])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.example:
            with formatter.section("Example"):
                formatter.write(f"{'':{formatter.current_indent}}{self.example}\n")

    def main(self, args: Any = None, *_: Any, standalone_mode: bool = True, **options: Any) -> Any:
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **options)
        signal.signal(signal.SIGTERM, _terminate)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, _terminate)
        _occupy_standard_streams()
        try:
            try:
                # Not click's own main(), which turns a closed pipe into an exit code.
                self._complete()
                _obey_variables()
                arguments = sys.argv[1:] if args is None else list(args)
                with self.make_context(program_name(), arguments) as context:
                    self.invoke(context)
            finally:  # the interpreter would flush after the exit code is determined
                sys.stdout.flush()
                check_written(1)
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except click.ClickException as error:
            shown = io.StringIO()
            error.show(shown)
            text = "\n".join(map(_printed, shown.getvalue().split("\n")))
            text = re.sub("^Error:", lambda word: colored(word[0], "error", sys.stderr), text, flags=re.MULTILINE)
            click.echo(text, nl=False, err=True, color=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(130)
        except BrokenPipeError:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
        except TarshardsError as error:
            from tarshards.cli.advice import address_of

            say(str(error), failed=True)
            if address := address_of(error):
                say(f"see {address}")
            sys.exit(2 if getattr(error, "errno", None) == EEXIST else 1)
        except MemoryError as error:
            say(str(error) or "there is not enough memory", failed=True)
            sys.exit(1)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter would try again to write the rest
            say(f"{os.fsdecode(error.filename or 'stdout')}: {error.strerror or error}", failed=True)
            sys.exit(1)
        except Exception as error:
            # A signal during the re-acquisition of a Python lock is followed by "release unlocked lock".
            if (code := _code_of_signal(error)) is None:
                raise
            sys.exit(code)
        finally:
            gc.freeze()  # the interpreter need not search all imported modules for garbage at exit

    def _complete(self) -> None:
        """Print the completion script or the completions that a shell requests, and exit."""
        variable = f"_{program_name().replace('-', '_').replace('.', '_').upper()}_COMPLETE"
        if instruction := os.environ.get(variable):
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(self, {}, program_name(), variable, instruction))


def tool(usage: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Program]:
    """Make a function the command of a tool; *options* are those of ``Program``, and click's.

    With *usage*, the first word is one of the verbs that ``Program.verb`` adds. Without any word, the function runs if
    *usage* is in brackets; otherwise a verb is required, and the function only has the help.
    """
    command = click.command(**{"cls": Program, **options})
    return command if usage is None else lambda function: command(_with_verbs(function, usage))


def _with_verbs(function: Callable[..., Any], usage: str) -> Callable[..., Any]:
    @click.argument("words", nargs=-1, metavar=usage, shell_complete=lambda at, _, word: at.command.complete(word))
    @click.pass_context
    @wraps(function)
    def command(context: Any, words: tuple[str, ...]) -> None:
        if words or usage[:1] != "[":
            raise context.command.unknown(words)
        function()

    return command


#: The levels of messages that TARSHARDS_LOG may name.
LEVELS = ("debug", "info", "warning", "error")


def show_log(level: str) -> None:
    """Print the messages of the logger "tarshards" from this level on to stderr."""
    import logging

    log_above_bars()
    logging.getLogger("tarshards").setLevel(level.upper())


def _obey_variables() -> None:
    """Show the log as TARSHARDS_LOG says, and refuse wrong values of this and other variables."""
    with usage_errors():
        if level := os.environ.get("TARSHARDS_LOG"):
            if level.lower() not in LEVELS:
                raise ValueError(f"the variable TARSHARDS_LOG must be one of {', '.join(LEVELS)}, not {level!r}")
            show_log(level)
        if any(map(os.environ.get, ("TARSHARDS_CONNECTIONS", "TARSHARDS_CACHE_DIR"))):
            from tarshards.storage.remote import Remote

            Remote()


def _terminate(number: int, _: object) -> None:
    sys.exit(128 + number)


def _code_of_signal(error: BaseException | None) -> Any:
    """Return the exit code for the signal during which *error* was raised, or None."""
    while error is not None and (error := error.__context__) is not None:
        if isinstance(error, KeyboardInterrupt):
            return 130
        if isinstance(error, SystemExit):
            return error.code
    return None


def _occupy_standard_streams() -> None:
    """Open closed stdin, stdout and stderr, so that no other file gets their descriptors, and using them fails.

    Where they are non-blocking, printing waits.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if descriptor else os.O_WRONLY)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.stdout, sys.stderr = _waiting(sys.stdout), _waiting(sys.stderr)


def _waiting(stream: Any) -> Any:
    """Return *stream*, or one like it that waits for its reader if another program has set it to non-blocking."""
    try:
        if os.get_blocking(stream.fileno()):
            return stream
    except (OSError, ValueError):  # not a file, as in a test
        return stream
    from tarshards.storage.streams import LastingFile

    file = LastingFile(io.FileIO(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=stream.line_buffering)


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        name = program_name()
        click.echo(f"tarshards {__version__}" if name.startswith("tarshards") else f"{name} (tarshards) {__version__}")
        context.exit()


def program_name() -> str:
    """Return the name under which this program runs, of two words in ``tarshards cat``."""
    return os.path.basename(sys.argv[0])


def say(text: str, *, failed: bool = False) -> None:
    """Print a line to stderr, after the tool's name, without credentials; escape sequences in it are made visible.

    *failed* says that it is an error, which the name's colour shows.
    """
    name = f"{program_name()}:"
    with above_bars():
        click.echo(f"{colored(name, 'error', sys.stderr) if failed else name} {_printed(text)}", err=True, color=True)


def _printed(text: str) -> str:
    """Return a line of a message without credentials and without escape sequences."""
    from tarshards.storage.redaction import redacted  # no tool needs it to start

    return visible(redacted(text))


def shown(line: str, output: str = "-", spell: Callable[[str], str] = visible) -> str:
    """Return *line* for *output*: for a terminal, *spell* escapes the characters that it might interpret.

    *spell* follows the format of the line. Tabs stay unchanged.
    """
    if output != "-" or line.isprintable() or not sys.stdout.isatty():
        return line
    return "".join(c if c.isprintable() or c == "\t" else spell(c) for c in line)


@contextmanager
def usage_errors(option: str | None = None) -> Iterator[None]:
    """Refuse the command line, naming *option*, if one of its values raises ValueError; errors of data are raised."""
    try:
        yield
    except TarshardsError:
        raise
    except (ValueError, ModuleNotFoundError) as error:
        raise click.UsageError(str(error) if option is None else f"{option}: {error}") from error
