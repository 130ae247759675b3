"""Make many outputs in parallel, each once: a run keeps the outputs of a killed run that had the same arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from tarshards.errors import OpError, TarshardsError
from tarshards.parallel.calls import settled_map
from tarshards.parallel.process_pool import ProcessPool
from tarshards.samples.ledger import Ledger
from tarshards.storage.claims import Claims
from tarshards.storage.derived import forget
from tarshards.storage.expressions import expand_urls
from tarshards.storage.location import Location
from tarshards.storage.markers import (
    Marker,
    Provenance,
    digest_of,
    say_kept,
    versions_of,
)
from tarshards.storage.streams import taken
from tarshards.stream.ops import progress as show_progress
from tarshards.write.shards import enter_shards, is_pattern, shard_name

AHEAD = 1000  # the most items that are submitted to an executor at a time

Outcome = tuple[Any, Any, BaseException | None]  # an item, its result, and its exception


def run_all(
    function: Callable[[Any], Any], items: Sequence[Any], executor: Executor | None, *, progress: bool, phase: str = ""
) -> Generator[Outcome, None, None]:
    """Call *function* for all *items*; yield each item as it finishes, with the result and the error.

    The calls run in *executor*, or in this process if it is None. *progress* shows a bar on stderr, with the name of
    the *phase*.
    """
    calls: Generator[Outcome, None, None]
    if executor is None:
        calls = (_outcome(function, item) for item in items)
    else:
        calls = settled_map(function, items, executor=executor, window=AHEAD, ordered=False)
    with closing(calls):
        if not progress:
            yield from calls
        else:
            yield from show_progress(calls, total=len(items), description=phase or None, unit="shards")


def _outcome(function: Callable[[Any], Any], item: Any) -> Outcome:
    try:
        return item, function(item), None
    except Exception as error:
        return item, None, error


def at_shard(error: BaseException, url: str) -> Exception:
    """Return *error* as an error that names the shard *url*, with *error* as its cause."""
    if isinstance(error, TarshardsError) and error.url is not None:
        return error
    reason = error.reason if isinstance(error, TarshardsError) else f"{type(error).__name__}: {error}"
    name, key, field = Location.of(url).name, getattr(error, "key", None), getattr(error, "field", None)
    failure = OpError(reason, url=name, key=key, field=field)
    failure.__cause__ = error
    return failure


class Unit(Protocol):
    """One output of a run; an existing output is kept if its ``identity``, which describes the input, is the same.

    If ``is_file``, ``output`` is a file that must exist to be kept; otherwise it only names the marker.
    """

    @property
    def output(self) -> Location: ...

    @property
    def is_file(self) -> bool: ...

    @property
    def identity(self) -> list[Any]: ...

    @property
    def inputs(self) -> list[str]:
        """The URLs of the files that the output is made from, as far as they are known."""
        ...

    def make(self, ledger: Ledger) -> dict[str, Any]:
        """Write the output, pass errors of rows to *ledger*, and return a description of the output in JSON's types."""
        ...


def _make_unit(unit: Unit, *, skips: bool) -> tuple[dict[str, Any], bool]:
    """Make the output of *unit*, unless an interrupted run has; return its record, and whether that run made it."""

    def make() -> dict[str, Any]:
        failures = Ledger(max_errors=float("inf") if skips else 0)
        made = unit.make(failures)
        return {"made": made, "errors": failures.quarantined, "failed": failures.failed}

    digest = digest_of(unit.output.url, *unit.identity)
    output = unit.output if unit.is_file else None
    inputs = versions_of(unit.inputs)
    return Provenance(digest, output, inputs=inputs).make_once(unit.output.sibling(".done"), make)


def output_names(outputs: Any, count: int) -> list[str]:
    """Return *count* URLs from *outputs*: a shard expression, or a pattern with ``{shard:06d}`` or ``%06d``.

    Raises ValueError for another number of URLs, and if two are the same.

    >>> output_names("out-{shard:03d}.tar", 2), output_names("out-{a,b}.tar", 2)
    (['out-000.tar', 'out-001.tar'], ['out-a.tar', 'out-b.tar'])
    """
    numbers = range(count)
    names = [shard_name(outputs, number) for number in numbers] if is_pattern(outputs) else expand_urls(outputs)
    if len(names) != count:
        raise ValueError(f"{count} inputs and {len(names)} outputs: each input needs one output")
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{times} shards would write {Location.of(name).name}")
    return names


class Outputs:
    """The files *targets*, each made once, also by a run that follows a killed one: claimed, made, then finished."""

    def __init__(self, targets: Sequence[Location], pattern: str = ""):
        self.targets = targets
        self._pattern = pattern
        self._begun = Marker(targets[0].sibling(".begun"))

    @classmethod
    def named(cls, pattern: Location, count: int) -> Outputs:
        """Return *count* outputs that a pattern or an expression names, as ``output_names`` does."""
        return cls([pattern.at(name) for name in output_names(pattern.url, count)], pattern.url)

    @property
    def is_begun(self) -> bool:
        """Whether a killed run had begun to make these outputs."""
        return self._begun.read() is not None

    @contextmanager
    def claimed(self, *, overwrite: bool) -> Iterator[None]:
        """Claim the outputs for a with-block, which makes and finishes them.

        Raises OpenError if another run makes one of them; or if one exists, unless *overwrite* or a killed run had
        begun to make them.
        """
        with Claims() as claims:
            for target in self.targets:
                target.make_folder()
                claims.take(target)
            for target in () if overwrite or self.is_begun else self.targets:
                if target.is_taken():
                    raise taken(target.name)
            yield

    def make(
        self, units: Sequence[Unit], ledger: Ledger, *, executor: Executor | None, progress: bool
    ) -> list[dict[str, Any]]:
        """Make the units of the outputs that a killed run has not made; return the descriptions of all, in order.

        To what ``Unit.make`` returns they add the URL of the "output" with its credentials, which markers do not
        record.

        The error of a unit that fails is passed to *ledger*, which raises it or lets the run continue without the unit.
        The markers that a later run would use remain until ``finish``.
        """
        self._begun.write({"outputs": len(units)})
        task = partial(_make_unit, skips=ledger.max_errors > 0)
        made: dict[int, dict[str, Any]] = {}
        kept = 0
        try:
            with ExitStack() as stack:
                numbers = {id(unit): number for number, unit in enumerate(units)}
                if executor is None and len(units) > 1:
                    executor = stack.enter_context(ProcessPool())
                runs = stack.enter_context(closing(run_all(task, units, executor, progress=progress)))
                for unit, result, error in runs:
                    if error is not None:
                        ledger(at_shard(error, unit.output.url))
                        continue
                    result, is_kept = result
                    kept += is_kept
                    failed = result["failed"]
                    made[numbers[id(unit)]] = {**result["made"], "output": unit.output.url}
                    ledger.count(samples=failed, streamed=failed, failed=failed)
                    for url, key, field, offset, reason in result["errors"]:
                        ledger(OpError(reason, url=url, key=key, field=field, offset=offset))
        except BaseException:
            for unit in units:
                _sweep(unit.output)
            raise
        say_kept([unit.output.url for unit in units], kept)
        return [made[number] for number in sorted(made)]

    def finish(self, shards: Iterable[tuple[str, int, int]] | None = None) -> None:
        """Remove the markers of all outputs, which are made; the *shards* among them are entered in manifests."""
        if shards is not None:
            enter_shards(shards, self._pattern, self.targets)
        for target in self.targets:
            Marker(target.sibling(".done")).remove()
        self._begun.remove()

    def discard(self) -> None:
        """Remove the outputs and their markers, if a run has found no rows."""
        for target in self.targets:
            forget(target)
            target.remove()
        self.finish()


def _sweep(location: Location) -> None:
    """Remove the temporary file that a killed process has left beside a local output."""
    if location.path is not None:
        with suppress(OSError):
            location.open("wb").abort()  # type: ignore[attr-defined]
