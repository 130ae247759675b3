"""The samples that a command line selects, and the errors that the run may skip."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from errno import ENOENT
from functools import wraps
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from tarshards.cli.output import pattern_options, written
from tarshards.cli.parameters import (
    COUNT,
    FILE,
    FOLDER,
    IGNORE_ZEROS,
    Size,
    Slice,
    allow_empty_option,
    cache_bytes_option,
    end_option,
    index_dir_option,
    keys_option,
    list_option,
    max_errors_option,
    max_ratio_option,
    on_error_option,
    options,
    parallel_option,
    quiet_option,
    shards_argument,
    size_option,
    split_option,
    typed,
    where_option,
)
from tarshards.cli.program import say, show_log, usage_errors
from tarshards.cli.terminal import with_bar
from tarshards.errors import OpenError, SampleError, TarshardsError
from tarshards.parallel.forks import cached_property

if TYPE_CHECKING:
    from tarshards.samples.grouping import Copies
    from tarshards.samples.keys import Sample
    from tarshards.samples.ledger import Ledger
    from tarshards.storage.manifest import ArchiveEnd, Shard
    from tarshards.storage.remote import Remote
    from tarshards.write.shards import TarWriter

T = TypeVar("T")

ACCEPT = "--allow-empty accepts that"
REMOTE = "connections", "ahead", "cache_dir", "cache_bytes", "max_ratio"  # the options that are fields of ``Remote``


class Losses:
    """The errors of a run, which skips faulty data as far as --on-error and --max-errors allow.

    Readers pass their errors to *ledger*, which counts them, and raises the first that is not allowed. A tool that
    has no whole samples to put aside has no quarantine: *quarantines* is False.
    """

    def __init__(self, on_error: str | None, max_errors: int | None, *, quarantines: bool = True):
        from tarshards.samples.ledger import Ledger

        policy, _, target = (on_error or ("fail" if max_errors is None else "skip")).partition("=")
        known = policy in ("fail", "skip", "quarantine") and (policy == "quarantine") == bool(target)
        if not known:
            raise click.UsageError("--on-error is fail, skip or quarantine=TAR")
        if target and not quarantines:
            raise click.UsageError("this tool has no samples to put aside: --on-error is fail or skip")
        if policy == "fail" and max_errors is not None:
            raise click.UsageError("--max-errors cannot be combined with --on-error fail")
        self.goes_on: bool = policy != "fail"
        self.max_errors = max_errors
        self.ledger: Ledger = Ledger(max_errors=float("inf") if self.goes_on else 0, on_error=self._lose)
        self.count: int = 0
        self.first: Exception | None = None
        self._allowed = 0 if not self.goes_on else float("inf") if max_errors is None else max_errors
        self._target = written(target) if target else None
        self._quarantine: TarWriter | None = None

    def _lose(self, error: Exception) -> None:
        self.first = self.first or error
        self.count += 1
        if self.count > self._allowed:
            raise error

    def reject(self, sample: Sample, error: Exception) -> None:
        """Leave *sample* out because of *error*: raise the error, or count it and write *sample* to the quarantine."""
        self.ledger.fail(error)
        self.ledger.count(failed=1)
        if self._target:
            from tarshards.write.shards import TarWriter

            if self._quarantine is None:
                self._quarantine = TarWriter(self._target)
            try:
                self._quarantine.write(sample)
            except SampleError as problem:  # such as a second sample of this key
                say(f"not in the quarantine: {problem}")

    def reject_and_go_on(self, sample: Sample, error: Exception) -> None:
        """Reject *sample* in a run that goes on after such errors regardless of --on-error."""
        if not self.goes_on:
            self._allowed += 1
            self.ledger.max_errors += 1
        self.reject(sample, error)

    def explained(self, error: TarshardsError) -> TarshardsError:
        """Return the *error* that ends the run, or one that also counts the earlier errors."""
        if self.max_errors is None or self.count <= max(1, self.max_errors):
            return error
        return too_many(self.count, self.max_errors, self.first)

    @contextmanager
    def reported(self, explained: Callable[[TarshardsError], TarshardsError] | None = None) -> Iterator[Losses]:
        """Run the tool in a with-block: replace the error that ends it by the *explained* one, and ``close``."""
        failed = True
        try:
            yield self
            failed = False
        except click.exceptions.Exit:
            failed = False
            raise
        except TarshardsError as error:
            raise (explained or self.explained)(error) from error
        finally:
            self.close(failed=failed)

    def close(self, *, failed: bool) -> None:
        """Finish the quarantine's tar; unless the run has *failed*, report what was skipped and quarantined."""
        if self._quarantine is not None:
            self._quarantine.close()
        if not failed:
            say_skipped(self.ledger)
            if self.ledger.quarantined:
                click.echo(str(self.ledger), err=True)


def leaves_out(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --on-error and --max-errors to a command without a quarantine; it gets its *losses*."""

    @wraps(command)
    def with_losses(on_error: str | None, max_errors: int | None, **values: Any) -> Any:
        with Losses(on_error, max_errors, quarantines=False).reported() as losses:
            return command(losses=losses, **values)

    return options(on_error_option, max_errors_option)(with_losses)


def makes_files(
    meaning: str, *, makes_tars: bool = False, size: str | None = None, reads_shards: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add what tools share that make files in processes to a command: ``pattern_options``, -j, -q, ``leaves_out``.

    It gets an *executor* of -j processes, and the *ledger* of the errors. *size* describes the default of -s; None if
    the tool has no -s. A tool that does not read shards, whose options include --max-ratio, gets that too.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_executor(parallel: int, losses: Losses, **values: Any) -> Any:
            from tarshards.parallel.process_pool import ProcessPool

            with usage_errors(), ProcessPool(parallel) as pool:
                return command(executor=pool, ledger=losses.ledger, **values)

        return options(
            pattern_options(meaning, makes_tars=makes_tars),
            *([] if size is None else [size_option(size)]),
            *([] if reads_shards else [max_ratio_option(expose_value=False)]),
            parallel_option("Processes", 0),
            quiet_option,
        )(leaves_out(with_executor))

    return decorate


def too_many(losses: int, allowed: int, first: object) -> TarshardsError:
    """Return the error of a run with more *losses* than --max-errors allows."""
    return TarshardsError(f"{losses} errors, but --max-errors allows {allowed}; the first: {first}")


def say_skipped(ledger: Ledger) -> None:
    """Report the members that *ledger* has counted as part of no sample, except directories."""
    for reason, count in sorted(ledger.skipped.items()):
        if reason != "directory":
            say(f"skipped {count} members: {reason}")


class ShardArguments(NamedTuple):
    """The shard expressions of a command line, and how the shards are read.

    With *ignore_zeros* each shard may consist of several archives; *end* says whether zeros must end it. Names of
    members are split into key and field at the *split* dot. With *keep_metadata*, data include the headers of their
    members. Indexes are in *index_dir*, and *remote* has the options for reading.
    """

    specs: list[str]
    ignore_zeros: bool = False
    end: ArchiveEnd = "required"
    split: str | None = None
    keep_metadata: bool = False
    index_dir: str | None = None
    remote: Remote | None = None

    def named(self, spec: Any = None) -> list[Shard]:
        """Return the shards that *spec* names (default: all); they may run commands, since a user typed them.

        Without any expression, the shard is stdin.
        """
        from tarshards.storage.expressions import find_shards

        spec = self.specs or "-" if spec is None else spec
        marks: Any = {"concatenated": self.ignore_zeros, "end": self.end, "index_dir": self.index_dir}
        shards = find_shards(spec, self.remote, allow_pipe=True, **marks)
        return [shard._replace(split=self.split, keep_headers=self.keep_metadata) for shard in shards]


def all_specs(shards: Iterable[str], lists: Iterable[str]) -> list[str]:
    """Return the shard expressions of a command line: SHARDS, and the files of --list."""
    return [*shards, *(f"@{name}" for name in lists)]


def takes_shards(
    command: Callable[..., Any], *, ignore_zeros: tuple[str, ...] = ("-i", "--ignore-zeros")
) -> Callable[..., Any]:
    """Add SHARDS, --list, *ignore_zeros*, --end and --split to a command; it gets all of them as ``ShardArguments``.

    The values of --keep-metadata, --index-dir, and the options for remote input are included, if the tool has these.
    """

    @wraps(command)
    def with_shards(shards: tuple[str, ...], lists: tuple[str, ...], **values: Any) -> Any:
        from tarshards.storage.remote import with_options

        given = {name: values.pop(name) for name in ShardArguments._fields[1:] if name in values}
        with usage_errors():
            given["remote"] = with_options(None, **{name: values.pop(name) for name in REMOTE if name in values})
        return command(shards=ShardArguments(all_specs(shards, lists), **given), **values)

    ignore_zeros_option = click.option(*ignore_zeros, is_flag=True, help=IGNORE_ZEROS)
    return options(list_option, ignore_zeros_option, end_option, split_option, max_ratio_option())(with_shards)


def requires_shards(
    reason: str, *, metavar: str = "SHARDS...", has_index_dir: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add SHARDS, and the options of ``takes_shards``, to a command that needs some; it gets the shards that they name.

    Without SHARDS, the command line is refused for *reason*. With *has_index_dir*, the tool also has --index-dir.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_found(shards: ShardArguments, **values: Any) -> Any:
            if not shards.specs:
                raise click.UsageError(reason)
            return command(shards=shards.named(), **values)

        argument = click.argument("shards", nargs=-1, metavar=metavar, type=FILE)
        return options(argument, *([index_dir_option] if has_index_dir else []))(takes_shards(with_found))

    return decorate


class Input:
    """The samples of *shards* that a command line selects; can be iterated over once.

    *may_be_empty* says whether it may have no samples; None if the tool has no option that allows this.
    """

    def __init__(
        self,
        shards: ShardArguments,
        losses: Losses,
        *,
        count: int | None,
        part: slice | None,
        fields: str | None,
        may_be_empty: bool | None,
        quiet: bool,
    ):
        self.specs: list[str] = shards.specs or ["-"]
        self.split: str = shards.split or "first"
        self.named: Callable[..., list[Shard]] = shards._replace(split=self.split).named
        self.losses = losses
        self.ledger: Ledger = losses.ledger
        self.reject: Callable[[Sample, Exception], None] = losses.reject
        self.count = count
        self.slice = part
        self.fields = fields
        self.quiet = quiet
        self.may_be_empty = may_be_empty
        self.phase: str | None = None  # what is done with the samples, for the progress bar of a tool that does more
        self.selection: tuple[str | None, str | None] = (None, None)  # --where and --keys
        self._taken = 0  # samples, if there is a phase
        self._condition: Any = None
        self._wanted: Any = None

    @cached_property
    def shards(self) -> list[Shard]:
        """The shards that the command line names."""
        return self.named()

    # Which samples are read.

    def select(self, where: str | None, keys: str | None) -> None:
        """Read only the samples that meet the condition *where*, and have one of the keys in the file *keys*."""
        self.selection = where, keys
        if where is not None:
            from tarshards.samples.conditions import Condition

            with usage_errors("--where"):
                self._condition = Condition(where)
        if keys is not None:
            from tarshards.samples.lines import read_keys
            from tarshards.verbs.grep import KeyFilter

            if keys == "-" and "-" in self.specs:
                raise click.UsageError("both the keys and a tar would be read from stdin")
            self._wanted = KeyFilter(read_keys(typed(keys)))

    def read(self, copies: Copies | None = None) -> Iterator[Any]:
        """Yield the samples of the shards; for *copies* see ``read_shard``.

        Samples that an option, or the progress bar, examines are not packed.
        """
        from tarshards.samples.grouping import closed_at_exit, located, read_shard

        if any(self.selection):
            yield from self._selected()
            return
        if copies and self._looks():
            copies = "fields"

        def read_all() -> Generator[Any, None, None]:
            for shard, location in located(self.shards):
                yield from read_shard(shard, ledger=self.ledger, location=location, copies=copies)

        yield from closed_at_exit(read_all())

    @property
    def _shows_bar(self) -> bool:
        return not self.quiet and sys.stderr.isatty()

    def _looks(self) -> bool:
        """Return whether ``choose`` counts or changes samples."""
        return self._shows_bar or (self.count, self.slice, self.fields) != (None, None, None)

    def _selected(self) -> Iterator[Sample]:
        """Yield the selected samples; only these are read if indexes or columns identify them."""
        from tarshards.samples.grouping import read_samples
        from tarshards.verbs.grep import by_columns, matching

        condition, wanted = self._condition, self._wanted
        samples: Iterable[Sample] | None = None
        with usage_errors("--where"):
            samples = None if condition is None else by_columns(self.shards, condition, wanted, on_error=self.ledger)
        if samples is None:
            read = read_samples if wanted is None else wanted.candidates
            samples = read(self.shards, on_error=self.ledger)
            if wanted is not None:
                samples = filter(counted(wanted, self.ledger, "--keys"), samples)
            if condition is not None:
                samples = matching(samples, counted(condition, self.ledger, "--where"), reject=self.reject)
        yield from samples
        if wanted is not None:
            wanted.check(self.ledger if self.losses.goes_on else None)

    def known(self) -> int | None:
        """Return the number of samples, if manifests, or the indexes of local shards, have it."""
        from tarshards.index.inventory import count_samples

        total = 0
        if any(self.selection):
            return None
        for shard in self.shards:
            samples = count_samples(shard.location()) if shard.samples is None else shard.samples
            if samples is None:
                return None
            total += samples
        return total

    # Which samples and fields are taken.

    def __iter__(self) -> Iterator[Sample]:
        return self.chosen(self.read())

    def chosen(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Return the samples that the command line selects from *samples*, the list of all."""
        return self.choose(self.require(samples), self.known)

    def choose(self, samples: Iterable[Sample], count: Callable[[], int | None] = lambda: None) -> Iterator[Sample]:
        """Apply --slice, --count, --fields and the progress bar to *samples*; *count* may count them for the bar."""
        samples = self._take(samples)
        if self.fields is not None:
            samples = self.require(self._with_fields(samples, self.fields))
        if not self._shows_bar:
            return iter(samples)
        if self.phase is not None:
            samples = self._counted(samples)
        return iter(with_bar(samples, self.quiet, total=self._left(count()), phase=self.phase))

    def _counted(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        for sample in samples:
            self._taken += 1
            yield sample

    def written(self, samples: Iterable[Sample], *, phase: str, are_all: bool) -> Iterator[Sample]:
        """Yield *samples*, with a bar for this *phase* of the tool; the first one comes when this input has been read.

        *are_all* says that they are as many as were read.
        """
        rest = iter(samples)
        for first in rest:
            total = self._taken if are_all else None
            yield from with_bar(chain([first], rest), self.quiet, total=total, phase=phase)

    def take_fields(self) -> str | None:
        """Return the value of --fields, which the tool applies itself."""
        fields, self.fields = self.fields, None
        return fields

    def take_field_words(self) -> list[list[str]]:
        """Return the words of --fields as lists of alternatives, for the tool to apply; refuse renaming and ``*``."""
        from tarshards.samples.fields import parse_terms

        fields = self.take_fields()
        terms = [] if fields is None else parse_terms(fields)
        plain = all(term.name is None and term.alternatives != ["*"] for term in terms)
        if not plain:
            raise click.UsageError('-f takes only names of fields here, such as -f "jpg;png cls"')
        return [term.alternatives for term in terms]

    def _left(self, total: int | None) -> int | None:
        """Return how many of *total* samples remain, at most, after --slice and --count; None if unknown."""
        if self.slice is not None and (total is not None or self.slice.stop is not None):
            total = len(range(self.slice.stop if total is None else total)[self.slice])
        return min((number for number in (total, self.count) if number is not None), default=None)

    def _take(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        if self.slice is not None:
            samples = sliced(samples, self.slice, self.ledger, "--slice")
        return required(islice(samples, self.count), self._accept_nothing)

    def _accept_nothing(self) -> None:
        """Allow an empty output: --slice and --count selected no sample, or --allow-empty accepts an empty input."""
        self.may_be_empty = True

    def _with_fields(self, samples: Iterable[Sample], fields: str) -> Iterator[Sample]:
        from tarshards.stream.ops import select_fields

        for sample in samples:
            try:
                (selected,) = select_fields([sample], fields)
            except TarshardsError as error:
                self.reject(sample, error)
            else:
                yield selected

    # Errors of the samples.

    def require(self, samples: Iterable[T]) -> Iterator[T]:
        """Yield *samples*, or results made from them; raise SampleError if there are none, unless that is allowed."""
        return required(samples, self.check_nothing)

    def check_nothing(self) -> None:
        """Raise SampleError, which describes what was read and left out, unless a run without samples is allowed."""
        if self.may_be_empty:
            return
        ledger, losses, read = self.ledger, self.losses, self._count_read()
        why = [f"{count} left out ({name})" for name, count in sorted(ledger.filtered.items())]
        why += [f"{count} members skipped ({name})" for name, count in sorted(ledger.skipped.items())]
        if losses.first is not None:
            why.append(f"{losses.count} errors, the first: {losses.first}")
        shards = f" in {ledger.shards} shard{'s' * (ledger.shards != 1)}" if ledger.shards else ""
        reason = f"no sample is left of the {read} that were read" if read else f"no samples{shards}"
        reason += f": {', '.join(why)}" if why else ""
        raise SampleError(reason if self.may_be_empty is None else f"{reason}; {ACCEPT}")

    def _count_read(self) -> int:
        return self.ledger.samples + self.ledger.failed + sum(self.ledger.filtered.values())

    def explained(self, error: TarshardsError) -> TarshardsError:
        """Return the *error* that ends the run, or one that says more if it applies to all shards or keys."""
        if isinstance(error, OpenError) and error.errno == ENOENT and self._has_no_shard():
            return OpenError(f"{error.reason}; none of the {len(self.shards)} shards is there", url=error.url)
        if self.split == "last" and isinstance(error, SampleError) and "would read back" in error.reason:
            reason = f"{error.reason}; keys with dots cannot be written: `tarcat --rekey` makes new ones"
            return SampleError(reason, url=error.url, offset=error.offset, key=error.key, field=error.field)
        return self.losses.explained(error)

    def _has_no_shard(self) -> bool:
        """Return whether the command line names several local shards, and none of them exists."""
        locations = [shard.location() for shard in self.shards]
        return len(locations) > 1 and not any(each.is_stream or each.is_remote or each.exists() for each in locations)


def required(samples: Iterable[T], check_nothing: Callable[[], Any]) -> Iterator[T]:
    """Yield *samples*; if there are none, call *check_nothing*, which may raise."""
    items = iter(samples)
    for item in items:
        yield item
        yield from items
        return
    check_nothing()


def sliced(samples: Iterable[Sample], part: slice, ledger: Ledger, name: str) -> Iterator[Sample]:
    """Yield the samples of *part*; *ledger* counts the samples between them as filtered by *name*."""
    start, step = part.start or 0, part.step or 1
    for number, sample in enumerate(islice(samples, part.stop)):
        if number >= start and (number - start) % step == 0:
            yield sample
        else:
            ledger.leave_out(name)


def rekeyed(samples: Iterable[Sample], template: str) -> Iterator[Sample]:
    """Return *samples* with the keys of --rekey; refuse a wrong *template*."""
    from tarshards.stream.ops import rekey

    with usage_errors("--rekey"):
        return rekey(samples, template)


def counted(condition: Callable[[Sample], Any], ledger: Ledger, name: str) -> Callable[[Sample], bool]:
    """Return a function that checks *condition*; *ledger* counts the samples that fail it as filtered by *name*."""

    def holds(sample: Sample) -> bool:
        if condition(sample):
            return True
        ledger.leave_out(name)
        return False

    return holds


def reads_samples(
    command: Callable[..., Any],
    *,
    count: tuple[str, ...] = ("-c", "--count"),
    ignore_zeros: tuple[str, ...] = ("-i", "--ignore-zeros"),
    may_be_empty: bool = True,
    quiet: Callable[[Any], Any] = quiet_option,
) -> Callable[..., Any]:
    """Add the arguments and options of every tool that reads samples to a command; it gets *source*, an Input.

    *count* and *ignore_zeros* are the names of these options, for tools that use -c or -i differently; *quiet* is the
    option -q. Tools that need a sample have no --allow-empty: *may_be_empty* is False.
    """

    @wraps(command)
    def with_source(shards: ShardArguments, **values: Any) -> Any:
        taken = {name: values.pop(name) for name in ("count", "part", "fields", "quiet")}
        losses = Losses(values.pop("on_error"), values.pop("max_errors"))
        source = Input(shards, losses, may_be_empty=values.pop("allow_empty", None), **taken)
        refuse_terminal(source.specs == ["-"] and values.get("config") is None)
        with losses.reported(source.explained):
            return command(source=source, **values)

    return options(
        shards_argument,
        click.option(*count, "count", type=COUNT, metavar="N", help="Stop after N samples."),
        click.option("--slice", "part", type=Slice(), help="Take these samples, as a Python slice."),
        click.option(
            *("-f", "--fields"),
            metavar="FIELDS",
            callback=_checked_fields,
            help='Fields to take: "new:old1;old2 keep *".',
        ),
        on_error_option,
        max_errors_option,
        click.option(
            "--connections",
            type=click.IntRange(1),
            metavar="N",
            help="Concurrent requests.  [default: $TARSHARDS_CONNECTIONS or 32]",
        ),
        click.option("--ahead", type=Size(), metavar="SIZE", help="Memory for prefetched data."),
        click.option(
            "--cache-dir",
            type=FOLDER,
            metavar="FOLDER",
            help="Keep fetched data in FOLDER.  [default: $TARSHARDS_CACHE_DIR]",
        ),
        cache_bytes_option,
        *([allow_empty_option] if may_be_empty else []),
        quiet,
        click.option(
            "--verbose", is_flag=True, expose_value=False, callback=_log, help="Print more messages on stderr."
        ),
    )(takes_shards(with_source, ignore_zeros=ignore_zeros))


def _checked_fields(context: click.Context, parameter: click.Parameter, fields: str | None) -> str | None:
    if fields is not None:
        from tarshards.samples.fields import parse_terms

        with usage_errors("-f"):
            parse_terms(fields)
    return fields


def _log(context: click.Context, parameter: click.Parameter, verbose: bool) -> None:
    if verbose:
        show_log("info")


def selects_samples(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select samples before all others to a command; its *source* then has only these samples."""

    @wraps(command)
    def with_selection(source: Input, where: str | None, keys: str | None, **values: Any) -> Any:
        source.select(where, keys)
        return command(source=source, **values)

    return options(where_option, keys_option, index_dir_option)(with_selection)


def refuse_terminal(reads_stdin: bool) -> None:
    """Refuse to read a tar from a terminal."""
    is_terminal = reads_stdin and sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        raise click.UsageError("stdin is a terminal: name SHARDS, or pipe a tar into it")
