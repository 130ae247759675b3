"""What all tools share: running as a Unix program, reading samples, and common options."""

from __future__ import annotations

import gc
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from errno import ENOENT
from functools import cached_property, wraps
from inspect import signature
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import click

from tarshards import __version__
from tarshards.errors import OpenError, SampleError, TarshardsError, UrlError, visible

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tarshards.samples.keys import Sample
    from tarshards.samples.ledger import Ledger
    from tarshards.storage.location import Location
    from tarshards.storage.manifest import Shard
    from tarshards.write.shards import TarWriter

T = TypeVar("T")

ACCEPT = "--allow-empty accepts that"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{letter}i": 1 << 10 * power for power, letter in enumerate("kmgt", 1)
}


#: The options that many tools share, under the headings of --help; a tool's own options come before them.
HEADINGS = {
    "Input": (
        *("--list", "--index-dir", "--count", "--slice", "--fields", "--ignore-zeros", "--split"),
        *("--on-error", "--max-errors", "--allow-empty"),
    ),
    "Remote input": ("--connections", "--ahead", "--cache-dir", "--cache-bytes"),
    "Output": ("--output", "--overwrite", "--no-sync", "--dry-run"),
    "Other": ("--quiet", "--verbose", "--version", "--help"),
}


class Program(click.Command):
    """A click command that runs as a Unix program.

    Every program has -h, --help and --version, and completes its command line in a shell that asks for it by the
    variable _NAME_COMPLETE, as all programs of click do. *headings* are further ones of its options, as HEADINGS has
    them; *example* is a command line for the end of --help.

    Exit codes: 0 done, and no more was lost than --on-error and --max-errors allow, which stderr tells; 1 the data
    failed, or more was lost; 2 the command line is wrong; 130 interrupted, 143 terminated, after cleaning up. When the
    reader of stdout has gone away the program ends quietly, killed by SIGPIPE. A full disk is an error of one line,
    also where stdout leads to it, and also for --help.
    """

    def __init__(
        self, *, headings: dict[str, tuple[str, ...]] | None = None, example: str | None = None, **options: Any
    ):
        settings = {"help_option_names": ["--help", "-h"], "max_content_width": 120, "show_default": True}
        super().__init__(context_settings=settings, **options)
        self.headings, self.example = {"Options": (), **(headings or {}), **HEADINGS}, example
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

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, in columns of the same width."""
        shared = {name: heading for heading, names in self.headings.items() for name in names}
        order = {name: place for place, name in enumerate(shared)}
        found: dict[str, list[tuple[int, str, str]]] = {heading: [] for heading in self.headings}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                name = max(param.opts, key=len)
                found[shared.get(name, "Options")].append((order.get(name, 0), *record))
        width = min(30, max(len(term) for rows in found.values() for _, term, _ in rows))
        for heading, rows in found.items():
            if rows:
                with formatter.section(heading):
                    rows.sort(key=itemgetter(0))
                    formatter.write_dl([(term.ljust(width), text) for _, term, text in rows])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.example:
            with formatter.section("Example"):
                formatter.write(f"{'':{formatter.current_indent}}{self.example}\n")

    def main(self, args: Any = None, *_: Any, standalone_mode: bool = True, **options: Any) -> Any:
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **options)
        signal.signal(signal.SIGTERM, _terminate)
        _occupy_standard_streams()
        try:
            try:
                # Not click's own main(), which turns a closed pipe into an exit code.
                self._complete()
                arguments = sys.argv[1:] if args is None else list(args)
                with self.make_context(program_name(), arguments) as context:
                    self.invoke(context)
            finally:  # the interpreter would do it after the exit code is known
                sys.stdout.flush()
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except click.ClickException as error:
            lines = io.StringIO()
            error.show(lines)
            click.echo("\n".join(map(visible, lines.getvalue().split("\n"))), nl=False, err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(130)
        except BrokenPipeError:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
        except TarshardsError as error:
            say(str(error))
            sys.exit(1)
        except MemoryError as error:
            say(str(error) or "there is not enough memory")
            sys.exit(1)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter would try again to write the rest
            say(f"{os.fsdecode(error.filename or 'stdout')}: {error.strerror or error}")
            sys.exit(1)
        except Exception as error:
            # A signal that comes while a lock of Python's is taken back is followed by "release unlocked lock".
            if (code := _code_of_signal(error)) is None:
                raise
            sys.exit(code)
        finally:
            gc.freeze()  # the interpreter need not search all imported modules for garbage at exit

    def _complete(self) -> None:
        """Print what a shell asks for, and exit: the script that makes it complete command lines, or completions."""
        variable = f"_{program_name().replace('-', '_').replace('.', '_').upper()}_COMPLETE"
        if instruction := os.environ.get(variable):
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(self, {}, program_name(), variable, instruction))


class Verbs(Program):
    """A program whose first word may be one of other commands, its *verbs*."""

    verbs: ClassVar[dict[str, click.Command]] = {}

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> click.Context:
        verb = self.verbs.get(args[0]) if args else None
        if verb is None:
            return super().make_context(info_name, args, parent, **extra)
        return verb.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    @classmethod
    def complete(cls, incomplete: str) -> list[CompletionItem]:
        """Return the verbs that begin like *incomplete*."""
        from click.shell_completion import CompletionItem

        names = [name for name, verb in cls.verbs.items() if name.startswith(incomplete) and not verb.hidden]
        return [CompletionItem(name, help=cls.verbs[name].get_short_help_str()) for name in names]


def tool(**options: Any) -> Callable[[Callable[..., Any]], Program]:
    """Make a function the command of a tool; *options* are click's."""
    return click.command(cls=Program, **options)


def _terminate(*_: object) -> None:
    sys.exit(143)


def _code_of_signal(error: BaseException | None) -> Any:
    """Return the exit code for the signal during which *error* was raised, or None."""
    while error is not None and (error := error.__context__) is not None:
        if isinstance(error, KeyboardInterrupt):
            return 130
        if isinstance(error, SystemExit):
            return error.code
    return None


def _occupy_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed: no other file takes their place, and using them fails."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if descriptor else os.O_WRONLY)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        name = program_name()
        click.echo(f"{name if name == 'tarshards' else f'{name} (tarshards)'} {__version__}")
        context.exit()


def program_name() -> str:
    """Return the name under which this program runs."""
    return os.path.basename(sys.argv[0])


def say(text: str) -> None:
    """Print a line to stderr, after the tool's name; terminals obey no escape sequences in it."""
    click.echo(f"{program_name()}: {visible(text)}", err=True)


def shown(line: str, output: str = "-", spell: Callable[[str], str] = visible) -> str:
    """Return *line* as it is written to *output*: for a terminal, *spell* escapes the characters that it might obey.

    It does so as the format of the line demands. Tabs stay as they are.
    """
    if output != "-" or line.isprintable() or not sys.stdout.isatty():
        return line
    return "".join(c if c.isprintable() or c == "\t" else spell(c) for c in line)


class Name(click.ParamType):
    """The name of a file or folder, which shells complete; it may also be a URL, or -."""

    def __init__(self, name: Literal["file", "folder"]):
        self.name = name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="dir" if self.name == "folder" else "file")]


FILE = Name("file")
FOLDER = Name("folder")
COUNT = click.IntRange(min=0)


def words(*choices: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return the ``shell_complete`` of a parameter whose value may begin with one of *choices*."""
    return lambda context, parameter, incomplete: [word for word in choices if word.startswith(incomplete)]


def say_skipped(ledger: Ledger) -> None:
    """Report the members that *ledger* has counted as part of no sample, except directories."""
    for reason, count in sorted(ledger.skipped.items()):
        if reason != "directory":
            say(f"skipped {count} members: {reason}")


class Size(click.ParamType):
    """A number of bytes: 1000, 1e9, 10MB, 1GiB.

    >>> Size().convert("1.5KiB", None, None), Size().convert("1e9", None, None)
    (1536, 1000000000)
    """

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        number = value.lower().removesuffix("b")
        unit = number.lstrip("0123456789.e+")
        try:
            size = float(number.removesuffix(unit)) * UNITS[unit]
        except (ValueError, KeyError):
            self.fail(f"{value!r} is not a size, such as 1000, 1e9, 10MB or 1GiB", param, ctx)
        if size < 1:
            self.fail(f"{value!r} is less than one byte", param, ctx)
        return int(size)


class Slice(click.ParamType):
    """Python's lo:hi:step, without negative numbers.

    >>> Slice().convert("2::3", None, None)
    slice(2, None, 3)
    """

    name = "lo:hi:step"

    def convert(self, value: Any, param: Any, ctx: Any) -> slice:
        try:
            numbers = [int(part) if part.strip() else None for part in value.split(":")]
        except ValueError:
            numbers = []
        if not 2 <= len(numbers) <= 3 or any(n is not None and n < 0 for n in numbers) or numbers[2:] == [0]:
            self.fail(f"{value!r} is not a slice, such as 10:20, ::2 or 5:", param, ctx)
        return slice(*numbers)


class Input:
    """The samples that a command line asks for, with its --on-error; can be iterated over once."""

    def __init__(
        self,
        shards: tuple[str, ...],
        lists: tuple[str, ...],
        count: int | None,
        slice_: slice | None,
        fields: str | None,
        ignore_zeros: bool,
        split: str | None,
        on_error: str | None,
        max_errors: int | None,
        allow_empty: bool | None,
        quiet: bool,
        verbose: bool,
        connections: int | None,
        ahead: int | None,
        cache_dir: str | None,
        cache_bytes: int | None,
    ):
        from tarshards.samples.fields import parse_terms
        from tarshards.samples.ledger import Ledger

        with usage_errors("-f"):
            self.terms = None if fields is None else parse_terms(fields)
        self.specs = all_specs(shards, lists) or ["-"]
        self.count, self.slice, self.fields, self.quiet = count, slice_, fields, quiet
        self.may_be_empty = allow_empty
        self.concatenated = ignore_zeros
        self.split: Any = split or "first"
        read_as(connections=connections, ahead=ahead, cache_dir=cache_dir, cache_bytes=cache_bytes)
        if verbose:
            import logging

            logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        policy, _, target = (on_error or ("fail" if max_errors is None else "skip")).partition("=")
        known = policy in ("fail", "skip", "quarantine") and (policy == "quarantine") == bool(target)
        refuse(not known, "--on-error is fail, skip or quarantine=TAR")
        refuse(policy == "fail" and max_errors is not None, "--max-errors cannot be combined with --on-error fail")
        self.max_errors, self.goes_on = max_errors, policy != "fail"
        self.ledger = Ledger(max_errors=float("inf"), on_error=self._lose)
        self.losses = 0
        self.allowed = 0 if not self.goes_on else float("inf") if max_errors is None else max_errors
        self.first: Exception | None = None  # of all losses
        self._target, self.sync = target, True
        self.selection: list[str | None] = [None, None]
        self._condition: Any = None
        self._wanted: Any = None
        self._rejected: TarWriter | None = None

    def take_field_words(self) -> list[list[str]]:
        """Return the words of --fields as lists of alternatives, and select no fields; refuse renaming and ``*``."""
        terms, self.fields = self.terms or [], None
        plain = all(term.name is None and term.alternatives != ["*"] for term in terms)
        refuse(not plain, '-f takes only names of fields here, such as -f "jpg;png cls"')
        return [term.alternatives for term in terms]

    def select(self, where: str | None, keys: str | None) -> None:
        """Read only the samples that meet the condition *where*, and have one of the keys in the file *keys*."""
        self.selection = [where, keys]
        if where is not None:
            from tarshards.samples.conditions import Condition

            with usage_errors("--where"):
                self._condition = Condition(where)
        if keys is not None:
            from tarshards.samples.lines import read_keys
            from tarshards.verbs.grep import KeyFilter

            refuse(keys == "-" and "-" in self.specs, "both the keys and a tar would be read from stdin")
            self._wanted = KeyFilter(read_keys(typed(keys)))

    def _selected(self) -> Iterator[Sample]:
        """Yield the samples that were selected: those alone are read if indexes, and columns, say which they are."""
        from tarshards.verbs.grep import by_columns, matching

        condition, wanted = self._condition, self._wanted
        samples: Iterable[Sample] | None = None
        with usage_errors("--where"):
            samples = None if condition is None else by_columns(self.shards, condition, wanted, on_error=self.ledger)
        if samples is None:
            samples = self._all() if wanted is None else wanted.candidates(self.shards, on_error=self.ledger)
            if wanted is not None:
                samples = filter(self.counted(wanted, "--keys"), samples)
            if condition is not None:
                samples = matching(samples, self.counted(condition, "--where"), reject=self.reject)
        yield from samples
        if wanted is not None:
            wanted.check(self.ledger if self.goes_on else None)

    def __iter__(self) -> Iterator[Sample]:
        return self.chosen(self.read())

    def read(self, *, to_copy: bool = False) -> Iterator[Sample]:
        """Yield the samples of the shards; those *to_copy* are only written, each before the next: ``read_to_copy``."""
        from tarshards.samples.read import read_to_copy

        if any(self.selection):
            return self._selected()
        if to_copy:
            return read_to_copy(self.shards, ledger=self.ledger)
        return self._all()

    def _all(self) -> Iterator[Sample]:
        from tarshards.samples.read import read_samples

        return read_samples(self.shards, on_error=self.ledger)

    def chosen(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Return those of *samples*, all that there are, that the command line asks for."""
        return self.choose(self.require(samples), self.known)

    def require(self, samples: Iterable[T]) -> Iterator[T]:
        """Yield *samples*, or what is made of them; raise SampleError if there are none, unless that was asked for."""
        return required(samples, self.check_nothing)

    def check_nothing(self) -> None:
        """Raise SampleError, which says what was read and became of it, unless a run without samples was asked for."""
        if self.may_be_empty:
            return
        ledger = self.ledger
        read = ledger.samples + ledger.failed + sum(ledger.filtered.values())
        why = [f"{count} left out ({name})" for name, count in sorted(ledger.filtered.items())]
        why += [f"{count} members skipped ({name})" for name, count in sorted(ledger.skipped.items())]
        if self.first is not None:
            why.append(f"{self.losses} errors, the first: {self.first}")
        shards = f" in {ledger.shards} shard{'s' * (ledger.shards != 1)}" if ledger.shards else ""
        reason = f"no sample is left of the {read} that were read" if read else f"no samples{shards}"
        reason += f": {', '.join(why)}" if why else ""
        raise SampleError(reason if self.may_be_empty is None else f"{reason}; {ACCEPT}")

    @cached_property
    def shards(self) -> list[Shard]:
        """The shards that the command line names."""
        return named_shards(self.specs, self.concatenated, self.split)

    def _has_no_shard(self) -> bool:
        """Say whether the command line names several local shards, and none of them exists."""
        from tarshards.storage.location import Location

        locations = [Location.of(shard.url) for shard in self.shards]
        return len(locations) > 1 and not any(each.is_stream or each.is_remote or each.exists() for each in locations)

    def known(self) -> int | None:
        """Return how many samples the shards have, if their manifests or the indexes of local ones say so."""
        from tarshards.index.sidecar import count_samples

        total = 0
        if any(self.selection):
            return None
        for shard in self.shards:
            samples = count_samples(shard.url) if shard.samples is None else shard.samples
            if samples is None:
                return None
            total += samples
        return total

    def choose(self, samples: Iterable[Sample], count: Callable[[], int | None] = lambda: None) -> Iterator[Sample]:
        """Apply --slice, --count, --fields and the progress bar to *samples*; for the bar, *count* may count them."""
        samples = self._take(samples)
        if self.fields is not None:
            samples = self.require(self._select(samples, self.fields))
        if self.quiet or not sys.stderr.isatty():
            return iter(samples)
        from tarshards.stream.ops import progress

        return progress(samples, total=self._chosen(count()))

    def _chosen(self, total: int | None) -> int | None:
        """Return how many of *total* samples --slice and --count leave at most, None if that is unknown."""
        if self.slice is not None and (total is not None or self.slice.stop is not None):
            total = len(range(self.slice.stop if total is None else total)[self.slice])
        return min((number for number in (total, self.count) if number is not None), default=None)

    def _take(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        if self.slice is not None:
            samples = self.sliced(samples, self.slice, "--slice")
        taken = islice(samples, self.count)
        for sample in taken:
            yield sample
            yield from taken
            return
        self.may_be_empty = True  # these options left none, or --allow-empty accepted that there is none

    def sliced(self, samples: Iterable[Sample], part: slice, name: str) -> Iterator[Sample]:
        """Yield the samples of *part*, and count those between as filtered by *name*."""
        start, step = part.start or 0, part.step or 1
        for number, sample in enumerate(islice(samples, part.stop)):
            if number >= start and (number - start) % step == 0:
                yield sample
            else:
                self.ledger.leave_out(name)

    def _select(self, samples: Iterable[Sample], fields: str) -> Iterator[Sample]:
        from tarshards.stream.ops import select_fields

        for sample in samples:
            try:
                (selected,) = select_fields([sample], fields)
            except TarshardsError as error:
                self.reject(sample, error)
            else:
                yield selected

    def counted(self, condition: Callable[[Sample], Any], name: str) -> Callable[[Sample], bool]:
        """Return *condition* as a function that counts the samples for which it does not hold as filtered by *name*."""

        def holds(sample: Sample) -> bool:
            if condition(sample):
                return True
            self.ledger.leave_out(name)
            return False

        return holds

    def _lose(self, error: Exception) -> None:
        self.first = self.first or error
        self.losses += 1
        if self.losses > self.allowed:
            raise error

    def reject(self, sample: Sample, error: Exception) -> None:
        """Leave *sample* out because of *error*: raise the error, or count it and write *sample* to the quarantine."""
        self.ledger.fail(error)
        self.ledger.count(failed=1)
        if self._target:
            from tarshards.write.shards import TarWriter

            if self._rejected is None:
                self._rejected = TarWriter(self._target, sync=self.sync)
            try:
                self._rejected.write(sample)
            except SampleError as problem:  # such as a second sample of this key
                say(f"not in the quarantine: {problem}")

    def explained(self, error: TarshardsError) -> TarshardsError:
        """Return the *error* that ends the run, or one that says more where it is not the only one of its kind."""
        if isinstance(error, OpenError) and error.errno == ENOENT and self._has_no_shard():
            return OpenError(f"{error.reason}; none of the {len(self.shards)} shards is there", url=error.url)
        if self.split == "last" and isinstance(error, SampleError) and "would read back" in error.reason:
            reason = f"{error.reason}; keys with dots cannot be written: `tarcat --rekey` makes new ones"
            return SampleError(reason, url=error.url, offset=error.offset, key=error.key, field=error.field)
        if self.max_errors is None or self.losses <= max(1, self.max_errors):
            return error
        return _too_many(self.losses, self.max_errors, self.first)

    def close(self, *, failed: bool) -> None:
        """Finish the quarantine's tar, and report what was skipped and lost."""
        if self._rejected is not None:
            self._rejected.close()
        if failed:
            return
        say_skipped(self.ledger)
        if self.ledger.quarantined:
            click.echo(str(self.ledger), err=True)


def _too_many(losses: int, allowed: int, first: object) -> TarshardsError:
    return TarshardsError(f"{losses} errors, but --max-errors allows {allowed}; the first: {first}")


def read_as(**options: Any) -> None:
    """Let this program read all files as those fields of ``Remote`` say that are not None."""
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        from tarshards.storage.remote import default, set_default

        with usage_errors():
            set_default(replace(default(), **given))


def required(samples: Iterable[T], check_nothing: Callable[[], Any]) -> Iterator[T]:
    """Yield *samples*; call *check_nothing*, which may raise, if there are none."""
    items = iter(samples)
    for item in items:
        yield item
        yield from items
        return
    check_nothing()


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return one decorator for *decorators*, arguments and options of click; the first comes first in --help."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


shards_argument = click.argument("shards", nargs=-1, metavar="[SHARDS]...", type=FILE)
list_option = click.option("-T", "--list", "lists", multiple=True, type=FILE, help="Read shards from FILE too.")
index_dir_option = click.option(
    "--index-dir", type=FOLDER, metavar="FOLDER", help="Indexes lie in FOLDER, not beside the shards."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
IGNORE_ZEROS = "Read concatenated archives as one, as GNU tar does."
ignore_zeros_option = click.option("-i", "--ignore-zeros", is_flag=True, help=IGNORE_ZEROS)
split_option = click.option(
    "--split", type=click.Choice(["first", "last"]), help="The dot at which a name ends the key.  [default: first]"
)
output_option = click.option(
    "-o", "--output", default="-", show_default=False, type=FILE, help="Write to FILE rather than to stdout."
)
seed_option = click.option("--seed", default=0, metavar="N", help="Seed of everything random.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace existing files.")
sync_option = click.option(
    "--no-sync",
    "sync",
    flag_value=False,
    default=True,
    show_default=False,
    help="Do not wait for the disk: for scratch data.",
)
max_errors_option = click.option("--max-errors", type=COUNT, metavar="N", help="Skip up to N errors; fail on more.")
allow_empty_option = click.option("--allow-empty", is_flag=True, help="No error where there are no samples.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be written.")
shuffle_option = click.option(
    "--shuffle", "buffer", type=click.IntRange(min=1), metavar="N", help="Shuffle in a buffer of N samples."
)
allow_pipe_option = click.option("--allow-pipe", is_flag=True, help="Let sources in a file be pipe:COMMAND.")
cache_bytes_option = click.option(
    "--cache-bytes", type=Size(), help="Most bytes that the cache takes.  [default: nine tenths of the free disk]"
)
where_option = click.option("--where", metavar="EXPR", help="""Condition on the sample: 'cls > 3 and json["ok"]'.""")
keys_option = click.option(
    "--keys", type=FILE, help="Samples with these keys, one per line; read by index if there is one."
)
rekey_option = click.option(
    "--rekey", "template", metavar="TEMPLATE", help='New keys: "{shard}/{index:06d}", "{index}-{key}".'
)
keep_order_option = click.option("--keep-order", is_flag=True, help="Keep the order of the samples.")
samples_option = click.option("-n", "--samples", type=Size(), metavar="N", help="Most samples in a shard.")


def size_option(default: str) -> Callable[[Any], Any]:
    """Return the option for the size of shards; *default* describes the default."""
    return click.option("-s", "--size", type=Size(), help=f"Most bytes in a shard.  [default: {default}]")


def tmpdir_option(what: str, default: str) -> Callable[[Any], Any]:
    """Return the option for the folder of *what*; *default* describes the default."""
    existing = click.Path(exists=True, file_okay=False)
    return click.option("--tmpdir", type=existing, metavar="FOLDER", help=f"Folder for {what}.  [default: {default}]")


spill_options = options(
    click.option("-M", "--memory", type=Size(), default="1GiB", help="Memory to stay within."),
    tmpdir_option("what exceeds -M", "$TMPDIR or /tmp"),
)


def parallel_option(meaning: str, default: int, *letters: str) -> Callable[[Any], Any]:
    """Return the option that says how many of what *meaning* says are done at once; also under other *letters*."""

    def count(context: click.Context, parameter: click.Parameter, number: int) -> int:
        return number or len(os.sched_getaffinity(0))

    return click.option(
        *letters,
        "-j",
        "--parallel",
        metavar="N",
        type=COUNT,
        default=default,
        callback=count,
        help=f"{meaning} at once; 0: as many as cores.",
    )


def reads_samples(
    command: Callable[..., Any],
    *,
    count: tuple[str, ...] = ("-c", "--count"),
    ignore_zeros: tuple[str, ...] = ("-i", "--ignore-zeros"),
    may_be_empty: bool = True,
) -> Callable[..., Any]:
    """Give a command the arguments and options of every tool that reads samples; it gets them as *source*, an Input.

    *count* and *ignore_zeros* name these options, for a tool that uses -c or -i for something else. Without
    *may_be_empty* there is no --allow-empty, for a tool that needs a sample.
    """

    @wraps(command)
    def with_source(**values: Any) -> Any:
        source = Input(**{name: values.pop(name, None) for name in signature(Input).parameters})
        source.sync = values.get("sync", True)
        refuse_terminal(source.specs == ["-"] and values.get("config") is None)
        failed = True
        try:
            result = command(source=source, **values)
            failed = False
        except click.exceptions.Exit:
            failed = False
            raise
        except TarshardsError as error:
            raise source.explained(error) from error
        finally:
            source.close(failed=failed)
        return result

    return options(
        shards_argument,
        list_option,
        click.option(*count, "count", type=COUNT, metavar="N", help="Stop after N samples."),
        click.option("--slice", "slice_", type=Slice(), help="Take these samples, as Python does."),
        click.option("-f", "--fields", metavar="FIELDS", help='Fields to take: "new:old1;old2 keep *".'),
        click.option(*ignore_zeros, is_flag=True, help=IGNORE_ZEROS),
        split_option,
        click.option(
            "--on-error",
            metavar="POLICY",
            shell_complete=words("fail", "skip", "quarantine="),
            help="On bad data: fail, skip, or quarantine=TAR.  [default: fail]",
        ),
        max_errors_option,
        click.option("--connections", type=click.IntRange(1), metavar="N", help="Requests at once.  [default: 32]"),
        click.option("--ahead", type=Size(), metavar="SIZE", help="Memory for what is fetched ahead."),
        click.option("--cache-dir", type=FOLDER, metavar="FOLDER", help="Keep what was fetched in FOLDER."),
        cache_bytes_option,
        *([allow_empty_option] if may_be_empty else []),
        quiet_option,
        click.option("--verbose", is_flag=True, help="Say more on stderr."),
    )(with_source)


def selects_samples(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that select samples before all others; its *source* then has these alone."""

    @wraps(command)
    def with_selection(source: Input, where: str | None, keys: str | None, index_dir: str | None, **values: Any) -> Any:
        read_as(index_dir=index_dir)
        source.select(where, keys)
        return command(source=source, **values)

    return options(where_option, keys_option, index_dir_option)(with_selection)


def all_specs(shards: Iterable[str], lists: Iterable[str]) -> list[str]:
    """Return the shard expressions of a command line: SHARDS, and the files of --list."""
    return [*shards, *(f"@{name}" for name in lists)]


def named_splits(arguments: Iterable[str]) -> dict[str, list[str]]:
    """Return the shard expressions of each split: of arguments SPLIT=SHARDS, or all of them as one split.

    That one has the name that its shards begin with.

    >>> named_splits(["train=a.tar", "train=b.tar", "val=c.tar"]), named_splits(["d/train-{0..9}.tar"])
    ({'train': ['a.tar', 'b.tar'], 'val': ['c.tar']}, {'train': ['d/train-{0..9}.tar']})
    """
    from tarshards.storage.expressions import common_name, expand_urls

    specs = list(arguments)
    found = [re.fullmatch(r"(\w[\w.+-]*)=(.+)", spec, re.DOTALL) for spec in specs]
    splits: dict[str, list[str]] = {}
    if not any(found):
        name = common_name(expand_urls(specs)).rpartition("/")[2].strip("0123456789-_.")
        return {re.sub(r"[^\w.+-]", "-", name) or "data": specs}
    for spec, match in zip(specs, found):
        if match is None:
            raise click.UsageError(f"{spec} has no split, but others have: write SPLIT=SHARDS")
        splits.setdefault(match[1], []).append(match[2])
    return splits


def named_shards(specs: Iterable[str], ignore_zeros: bool = False, split: str | None = None) -> list[Shard]:
    """Return the shards that *specs*, which a person typed, name; they may run commands.

    With *ignore_zeros* each may consist of several archives. Their names are split into key and field at the *split*
    dot.
    """
    from tarshards.storage.expressions import find_shards

    shards = find_shards(specs, concatenated=ignore_zeros, allow_pipe=True)
    return [shard._replace(split=split) for shard in shards]


def typed(name: str) -> Location:
    """Return the location that a person typed: it may run a command."""
    from tarshards.storage.location import Location

    return Location.of(name, allow_pipe=True)


def refuse(wrong: object, reason: str) -> None:
    """Refuse the command line for *reason* if it is *wrong*."""
    if wrong:
        raise click.UsageError(reason)


@contextmanager
def usage_errors(option: str | None = None) -> Iterator[None]:
    """Refuse the command line, naming *option*, where a value on it raises ValueError; errors of data are raised."""
    try:
        yield
    except TarshardsError:
        raise
    except (ValueError, ModuleNotFoundError) as error:
        raise click.UsageError(str(error) if option is None else f"{option}: {error}") from error


def conversion_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Take the options of every import and export, which ``convert`` is given."""
    parallel = parallel_option("Processes", 0)
    for option in (quiet_option, sync_option, overwrite_option, max_errors_option, parallel):
        command = option(command)
    return command


def convert(
    function: Callable[..., list[str]],
    source: Any,
    target: str,
    *,
    parallel: int,
    max_errors: int | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Run an import or export with *parallel* processes, and say how many samples are in which files."""
    from tarshards.parallel import ProcessPool
    from tarshards.samples.ledger import Ledger

    errors: list[Exception] = []
    ledger = Ledger(max_errors=max_errors or 0, on_error=errors.append)
    shows = not quiet and sys.stderr.isatty()
    try:
        with usage_errors(), ProcessPool(parallel) as pool:
            made = function(source, target, executor=pool, on_error=ledger, progress=shows, **options)
    except TarshardsError as error:
        if max_errors is None or len(errors) <= max(1, max_errors):
            raise
        raise _too_many(len(errors), max_errors, errors[0]) from error
    if ledger.quarantined:
        click.echo(str(ledger), err=True)
    if not quiet:
        say(f"{ledger.samples} samples in {' to '.join([made[0], *made[1:][-1:]])}")


def refuse_terminal(reads_stdin: bool) -> None:
    """Refuse to read a tar from a terminal, which nobody types."""
    is_terminal = reads_stdin and sys.stdin is not None and sys.stdin.isatty()
    refuse(is_terminal, "stdin is a terminal: name SHARDS, or pipe a tar into it")


def check_output(target: str, overwrite: bool, *, is_field: bool = False) -> None:
    """Refuse a tar onto a terminal, a folder, an existing file, local or remote, and a local one that others write.

    Refuse the name of another format too, unless a field is written, which is of any format. Who overwrites may replace
    what another writes at the same time: the later one stays.
    """
    from tarshards.storage.claims import Claims
    from tarshards.storage.location import Location

    refuse(target == "-" and sys.stdout.isatty(), "stdout is a terminal: name a file with -o, or pipe it on")
    if not is_field:
        check_suffix(target)
    location = Location.of(target)
    refuse(not overwrite and location.is_taken(), f"{location.name} exists; --overwrite replaces it")
    path = location.path
    refuse(path is not None and os.path.isdir(path), f"{target} is a folder; name a file in it")
    if not overwrite:
        click.get_current_context().with_resource(Claims()).take(location)


def check_suffix(target: str) -> None:
    """Refuse the name of a compression or format that is not written, for an output or a pattern of outputs."""
    from tarshards.storage.compression import named_compression
    from tarshards.storage.location import Location

    try:
        named_compression(Location.of(target))
    except UrlError as error:
        raise click.UsageError(str(error)) from error


def write_new_keys(
    samples: Iterable[Sample], output: str, reject: Callable[[Sample, TarshardsError], object], *, sync: bool
) -> None:
    """Write *samples* to *output* in a tool with --rekey, and give *reject* those that the output cannot take."""
    from tarshards.write.shards import DUPLICATE_KEY, write_samples

    def refuse(sample: Sample, error: TarshardsError) -> None:
        if error.reason.startswith(DUPLICATE_KEY):
            error = SampleError(f"{error.reason}; --rekey makes new keys", url=error.url, key=error.key)
        reject(sample, error)

    write_samples(samples, typed(output), reject=refuse, sync=sync)


def shard_progress(items: Iterable[Any], total: int, quiet: bool) -> Iterable[Any]:
    """Show a bar on a terminal, unless *quiet*, while *items*, one for each of *total* shards, are iterated over."""
    if quiet or not sys.stderr.isatty():
        return items
    from tqdm import tqdm

    return tqdm(items, total=total, unit=" shards")
