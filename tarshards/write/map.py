"""Apply a function to many shards in parallel: each output is written atomically, once, and reported."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tarshards.errors import OpError, check_function
from tarshards.parallel.calls import check_sent
from tarshards.parallel.process_pool import ProcessPool
from tarshards.samples.grouping import read_shard
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger, Quarantined, error_handler
from tarshards.storage.claims import Claims
from tarshards.storage.code_digest import digest_code, name_unknown
from tarshards.storage.expressions import common_name, find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import ArchiveEnd, Shard
from tarshards.storage.markers import Provenance, digest_of, log, say_kept, versions_of
from tarshards.write.once import at_shard, output_names, run_all
from tarshards.write.shards import enter_shards, write_shard


@dataclass(frozen=True)
class ShardReport:
    """The result for one shard.

    *failed* is the number of samples that failed, *bytes* the size of the output, *resumed* whether an earlier call
    wrote it, and *error* the reason why the shard failed.
    """

    input: str
    output: str
    samples_in: int = 0
    samples_out: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    resumed: bool = False
    error: str | None = None


def map_shards(
    function: Callable[[Any], Any],
    inputs: Any,
    outputs: Any,
    *,
    executor: Executor | None = None,
    retries: int = 0,
    resume: bool = True,
    on_error: ErrorPolicy = None,
    concatenated: bool = False,
    end: ArchiveEnd = "required",
    allow_pipe: bool = False,
    progress: bool = True,
    per_sample: bool = False,
    sync: bool = True,
) -> list[ShardReport]:
    """Map each shard of *inputs* to the shard of *outputs* at the same position, and return a report for each.

    *function* takes an iterator of samples and returns one; with *per_sample* it takes a sample and returns a sample,
    or None to leave it out. It is called in *executor*, any of ``concurrent.futures`` (default: a ``ProcessPool`` of
    all cores). If a call raises or its process dies, the shard is tried *retries* more times; then its first error is
    raised, or passed to *on_error* while the other shards continue. With *on_error* ("skip" or a function of the
    error), a sample that fails is left out and counted. *concatenated* allows inputs that are concatenated archives,
    *end* "optional" inputs that end without zeros, and *allow_pipe* allows inputs named ``pipe:command`` to run their
    commands.

    Each output is written atomically, and with *sync* flushed to the disk, followed by its index and the marker
    ``OUTPUT.done``. A later call with *resume* keeps outputs with this marker, and logs how many, if the names of both
    shards, the function and the input are the same, and unless samples failed, which only *on_error* allows. The
    function is compared by its code, constants, defaults and closure, not by the code of other functions that it calls;
    an input by its size with its time or ETag. The manifest of the outputs and the report
    ``NAME.report.jsonl`` (lines of JSON) are written last. Raises ValueError unless every input has its own output, and
    OpenError while another writer writes one of the local outputs.
    """
    check_function(function, "map_shards")
    shards = find_shards(inputs, concatenated=concatenated, end=end, allow_pipe=allow_pipe)
    names = output_names(outputs, len(shards))
    Location.of(names[0]).compression()  # raises UrlError for a name of another format
    handler = error_handler(on_error)
    code = digest_code(function)
    name_unknown(log.warning, "map_shards", code)
    work = _ShardTask(function, per_sample, handler is not None, resume, _name_of(function), code.digest)
    ledger = Ledger.of(handler)
    reports: dict[int, ShardReport] = {}
    first: dict[int, BaseException] = {}
    unsure = 0  # outputs that an earlier release made
    with ExitStack() as stack:
        executor = executor or stack.enter_context(ProcessPool())  # its processes begin with the first call
        check_sent(function, executor, "map_shards")
        claims = stack.enter_context(Claims())
        targets = [Location.of(name, sync=sync) for name in names]
        for target in targets:
            target.make_folder()
            claims.take(target)
        todo = list(enumerate(zip(shards, targets)))
        for left in range(retries, -1, -1):
            outcomes = stack.enter_context(closing(run_all(work, todo, executor, progress=progress)))
            todo = []
            for (number, (shard, target)), result, error in outcomes:
                if error is None:
                    reports[number], quarantined, is_unsure = result
                    unsure += is_unsure
                    for entry in quarantined:
                        ledger(_error_of(entry))
                    continue
                first.setdefault(number, error)
                if left:
                    todo.append((number, (shard, target)))
                else:
                    failure = at_shard(first[number], shard.url)
                    reports[number] = ShardReport(shard.url, target.url, error=str(failure))
                    ledger(failure)
        rows = [reports[number] for number in sorted(reports)]
        kept = sum(row.resumed for row in rows)
        say_kept(names, kept, unsure=unsure, cure="; resume=False makes them again")
        _write_report(Location.of(common_name(names) + ".report.jsonl", sync=sync), rows)
        made = [row for row in rows if row.error is None and not Location.of(row.output).is_stream]
        enter_shards([(row.output, row.samples_out, row.bytes) for row in made], outputs, targets)
    return rows


@dataclass(frozen=True)
class _ShardTask:
    """Maps one shard to its output; called in another process or on another machine."""

    function: Callable[[Any], Any]
    per_sample: bool
    skips: bool
    resume: bool
    name: str
    code: str

    def __call__(self, pair: tuple[int, tuple[Shard, Location]]) -> tuple[ShardReport, list[Quarantined], bool]:
        """Return the report, the samples that failed, and whether an earlier release made the output."""
        _, (shard, target) = pair
        url, output = shard.url, target.url
        earlier = digest_of(url, output, self.per_sample, self.name)
        digest = digest_of(url, output, self.per_sample, self.code)
        inputs = versions_of([shard.location()])
        failures = Ledger(max_errors=float("inf") if self.skips else 0)

        def make() -> dict[str, Any]:
            begun, counted = time.time(), Ledger()
            samples = read_shard(shard, ledger=counted)
            results = self._each(samples, failures) if self.per_sample else self.function(samples)
            count, size = write_shard(results, target)
            seconds = round(time.time() - begun, 3)
            report = ShardReport(url, output, counted.samples, count, len(failures.quarantined), size, seconds)
            return {"report": _recorded(report)}

        marker = target.sibling(".done")
        once = partial(Provenance(digest, target, earlier, inputs).make_once, marker, make)
        record, resumed = once(resume=self.resume)
        if resumed and record["report"]["failed"] and not self.skips:  # made by a call that left out what failed
            record, resumed = once(resume=False)
        urls = {"input": url, "output": output}  # with their credentials
        report = ShardReport(**{**record["report"], **urls, "resumed": resumed})
        return report, failures.quarantined, "inputs" not in record

    def _each(self, samples: Iterable[Sample], failures: Ledger) -> Iterator[Sample]:
        for sample in samples:
            try:
                result = self.function(sample)
            except Exception as error:
                origin = {"url": sample["__url__"], "key": sample["__key__"]}
                failure = OpError(f"{type(error).__name__}: {error}", **origin)
                failure.__cause__ = error
                failures(failure)
                continue
            if result is not None:
                yield {"__key__": sample["__key__"], **result}


def _name_of(function: Callable[..., Any]) -> str:
    """Return the identifier of a function in the markers of releases up to 0.2."""
    try:
        return digest_of(pickle.dumps(function, 4).hex())  # the default of Python before 3.14
    except Exception:
        return getattr(function, "__qualname__", type(function).__qualname__)


def _recorded(report: ShardReport) -> dict[str, Any]:
    """Return a report for a file: without the credentials of its URLs."""
    urls = {"input": Location.of(report.input).recorded, "output": Location.of(report.output).recorded}
    return {**asdict(report), **urls}


def _write_report(location: Location, rows: Iterable[ShardReport]) -> None:
    """Write *rows* as lines of JSON."""
    import json

    with location.open("wb") as stream:
        stream.write("".join(f"{json.dumps(_recorded(row))}\n" for row in rows).encode())


def _error_of(entry: Quarantined) -> OpError:
    return OpError(entry.reason, url=entry.shard, key=entry.key, field=entry.field, offset=entry.offset)
