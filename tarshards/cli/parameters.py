"""The arguments and options that tools share, each declared once, and the types of their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from tarshards.cli.program import usage_errors
from tarshards.parallel.host import available_cores

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tarshards.storage.location import Location

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{letter}i": 1 << 10 * power for power, letter in enumerate("kmgt", 1)
}


class Name(click.ParamType):
    """The name of a file or folder, completed by shells; it may also be a URL, or -."""

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


def typed(name: str) -> Location:
    """Return a location that a user typed: it may run a command."""
    from tarshards.storage.location import Location

    return Location.of(name, allow_pipe=True)


def _accept_ratio(context: click.Context, parameter: click.Parameter, max_ratio: float | None) -> float | None:
    if max_ratio is not None:
        from tarshards.storage.compression import accept_ratio

        with usage_errors():
            accept_ratio(max_ratio)
    return max_ratio


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return one decorator for *decorators*, arguments and options of click, in the order of --help."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def as_values(**parts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options that are the fields of named tuples as such values; *parts* are their names and types.

    >>> from collections import namedtuple
    >>> sides = as_values(size=namedtuple("Sides", "width height"))
    >>> sides(lambda name, size: (name, size))(name="a", width=3, height=4)
    ('a', Sides(width=3, height=4))
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_values(**options: Any) -> Any:
            values = {name: part(*map(options.pop, part._fields)) for name, part in parts.items()}
            return command(**values, **options)

        return with_values

    return decorate


shards_argument: Final = click.argument("shards", nargs=-1, metavar="[SHARDS]...", type=FILE)
list_option: Final = options(
    click.option("-T", "--list", "lists", multiple=True, type=FILE, help="Read shards from FILE too, - for stdin."),
    click.option(
        "--null", is_flag=True, expose_value=False, help="Names in FILE end with NUL, as find -print0 writes them."
    ),
)
index_dir_option: Final = click.option(
    "--index-dir", type=FOLDER, metavar="FOLDER", help="Indexes are in FOLDER, not beside the shards."
)
max_ratio_option: Final = partial(
    click.option,
    "--max-ratio",
    type=float,
    metavar="N",
    callback=_accept_ratio,
    help="Read members beyond 256 MiB of up to N times the compressed size.  [default: 200]",
)
quiet_option: Final = click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
IGNORE_ZEROS = "Read concatenated archives as one, as GNU tar does."
end_option: Final = click.option(
    "--end",
    type=click.Choice(["required", "optional"]),
    default="required",
    help="Whether zeros must end an archive.",
)
split_option: Final = click.option(
    "--split", type=click.Choice(["first", "last"]), help="The dot at which a name ends the key.  [default: first]"
)
seed_option: Final = click.option("--seed", default=0, metavar="N", help="Random seed.")
on_error_option: Final = click.option(
    "--on-error",
    metavar="POLICY",
    shell_complete=words("fail", "skip", "quarantine="),
    help="On bad data: fail, skip, or quarantine=TAR.  [default: fail]",
)
max_errors_option: Final = click.option(
    "--max-errors", type=COUNT, metavar="N", help="Skip up to N errors; fail on more."
)
allow_empty_option: Final = click.option("--allow-empty", is_flag=True, help="No error if there are no samples.")
dry_run_option: Final = click.option("--dry-run", is_flag=True, help="Only print what would be written.")
shuffle_option: Final = click.option(
    "--shuffle", "buffer", type=click.IntRange(min=1), metavar="N", help="Shuffle in a buffer of N samples."
)
allow_pipe_option: Final = click.option("--allow-pipe", is_flag=True, help="Allow pipe:COMMAND as a source in a file.")
cache_bytes_option: Final = click.option(
    "--cache-bytes", type=Size(), help="Maximum size of the cache.  [default: nine tenths of the free disk]"
)
where_option: Final = click.option(
    "--where", metavar="EXPR", help="""Condition on the sample: 'cls > 3 and json["ok"]'."""
)
keys_option: Final = click.option(
    "--keys", type=FILE, help="Samples with these keys, one per line; read by index if there is one."
)
rekey_option: Final = click.option(
    "--rekey", "template", metavar="TEMPLATE", help='New keys: "{shard}/{index:06d}", "{index}-{key}".'
)
keep_order_option: Final = click.option("--keep-order", is_flag=True, help="Keep the order of the samples.")
keep_metadata_option: Final = click.option(
    "--keep-metadata", is_flag=True, help="Keep mode, owner, times and pax records of members."
)
samples_option: Final = click.option(
    "-n", "--samples", "max_samples", type=Size(), metavar="N", help="Maximum number of samples in a shard."
)


def size_option(default: str) -> Callable[[Any], Any]:
    """Return the option for the size of shards; *default* describes the default."""
    return click.option(
        "-s", "--size", "max_bytes", type=Size(), help=f"Maximum size of a shard.  [default: {default}]"
    )


def tmpdir_option(what: str, default: str) -> Callable[[Any], Any]:
    """Return the option for the folder of *what*; *default* describes the default."""
    existing = click.Path(exists=True, file_okay=False)
    return click.option("--tmpdir", type=existing, metavar="FOLDER", help=f"Folder for {what}.  [default: {default}]")


spill_options: Final = options(
    click.option("-M", "--memory", type=Size(), default="1GiB", help="Memory limit."),
    tmpdir_option("what exceeds -M", "$TMPDIR or /tmp"),
)


def parallel_option(meaning: str, default: int, *letters: str) -> Callable[[Any], Any]:
    """Return the option -j N, "*meaning* at once", also with the names *letters*."""

    def count(context: click.Context, parameter: click.Parameter, number: int) -> int:
        return number or available_cores()

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
