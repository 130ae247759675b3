"""Apply a function to many shards in parallel: each output is written atomically, once, and reported."""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tarshards.errors import EncodeError, OpError, SampleError, TarshardsError, check_function
from tarshards.parallel import settled_map
from tarshards.samples.batch import SampleBatch
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger, Quarantined, error_handler
from tarshards.samples.read import encode_sample, read_shard
from tarshards.storage.claims import Claims
from tarshards.storage.compression import named_compression
from tarshards.storage.expressions import common_name, expand_shards, expand_urls
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.markers import digest_of, read_marker, write_marker
from tarshards.storage.opening import open_url
from tarshards.stream.ops import progress as show_progress
from tarshards.tar.read import END, pack_members
from tarshards.write.shards import TarWriter, name_leftovers, shard_name

if TYPE_CHECKING:
    from tarshards.index.members import Members

AHEAD = 1000  # shards submitted to the executor at a time


@dataclass(frozen=True)
class ShardReport:
    """The result for one shard: *failed* counts samples, *bytes* is the output's size, *error* says why it failed."""

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
    allow_pipe: bool = False,
    progress: bool = True,
    per_sample: bool = False,
    sync: bool = True,
) -> list[ShardReport]:
    """Map each shard of *inputs* to the shard of *outputs* at the same position, and return a report for each.

    *function* takes an iterator of samples and returns one; with *per_sample* it takes a sample and returns a sample,
    or None to leave it out. *executor*, any of ``concurrent.futures`` (default: a ``ProcessPool`` of all cores), calls
    it. If a call raises or its process dies, the shard is tried *retries* more times; then its first error is raised,
    or passed to *on_error* while the other shards continue. With *on_error* ("skip" or a function of the error), a
    sample that fails is left out and counted. *concatenated* says that inputs may be concatenated archives, and
    *allow_pipe* that those named ``pipe:command`` may run their commands.

    Each output is written atomically, with *sync* to the disk, followed by its index and the marker ``OUTPUT.done``; a
    later call with *resume* skips outputs with this marker. The manifest of the outputs and the report
    ``NAME.report.jsonl`` (lines of JSON) are written last. Raises ValueError unless every input has an output of its
    own, and OpenError where another writer is at work on a local one.
    """
    check_function(function, "map_shards")
    shards = expand_shards(inputs, concatenated=concatenated, allow_pipe=allow_pipe)
    names = output_names(outputs, len(shards))
    named_compression(Location.of(names[0]))  # raises UrlError for a name of another format
    handler = error_handler(on_error)
    work = _ShardTask(function, per_sample, handler is not None, resume, sync, _name_of(function))
    ledger = Ledger.of(handler)
    reports: dict[int, ShardReport] = {}
    first: dict[int, BaseException] = {}
    with ExitStack() as stack:
        claims = stack.enter_context(Claims())
        for name in names:
            Location.of(name).make_folder()
            claims.take(name)
        executor = executor or stack.enter_context(_default_pool())
        todo = list(enumerate(zip(shards, names)))
        for left in range(retries, -1, -1):
            calls = stack.enter_context(closing(run_all(work, todo, executor)))
            outcomes: Iterable[Any] = calls
            if progress:
                outcomes = show_progress(calls, total=len(todo), unit="shards")
            todo = []
            for (number, (shard, name)), result, error in outcomes:
                if error is None:
                    reports[number], quarantined = result
                    for entry in quarantined:
                        ledger(_error_of(entry))
                    continue
                first.setdefault(number, error)
                if left:
                    todo.append((number, (shard, name)))
                else:
                    failure = at_shard(first[number], shard.url)
                    reports[number] = ShardReport(shard.url, name, error=str(failure))
                    ledger(failure)
        rows = [reports[number] for number in sorted(reports)]
        write_report(common_name(names) + ".report.jsonl", rows, sync=sync)
        write_manifests([row for row in rows if row.error is None], sync=sync)
        if is_pattern(outputs):
            name_leftovers(os.fspath(outputs), len(names))
    return rows


def _default_pool() -> Executor:
    from tarshards.parallel import ProcessPool

    return ProcessPool()


def output_names(outputs: Any, count: int) -> list[str]:
    """Return *count* URLs from *outputs*: a shard expression, or a pattern with ``{shard:06d}`` or ``%06d``.

    >>> output_names("out-{shard:03d}.tar", 2), output_names("out-{a,b}.tar", 2)
    (['out-000.tar', 'out-001.tar'], ['out-a.tar', 'out-b.tar'])
    """
    numbers = range(count)
    names = [shard_name(outputs, number) for number in numbers] if is_pattern(outputs) else expand_urls(outputs)
    if len(names) != count:
        raise ValueError(f"{count} inputs and {len(names)} outputs: each input needs one output")
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{times} shards would write {name}")
    return names


def is_pattern(outputs: Any) -> bool:
    """Say whether *outputs* is a name with the number of the shard in it."""
    return isinstance(outputs, str | os.PathLike) and shard_name(outputs, 0) != shard_name(outputs, 1)


@dataclass(frozen=True)
class _ShardTask:
    """The work on one pair of shards, called in another process or on another machine."""

    function: Callable[[Any], Any]
    per_sample: bool
    forgiving: bool
    resume: bool
    sync: bool
    name: str

    def __call__(self, pair: tuple[int, tuple[Shard, str]]) -> tuple[ShardReport, list[Quarantined]]:
        _, (shard, output) = pair
        url = shard.url
        digest = digest_of(url, output, self.per_sample, self.name)
        target = Location.of(output)
        marker = target.sibling(".done")
        if self.resume and (record := read_marker(marker)) and record.get("digest") == digest and target.exists():
            return ShardReport(**{**record["report"], "resumed": True}), []
        begun = time.time()
        failures = Ledger(max_errors=float("inf") if self.forgiving else 0)
        counted = Ledger()
        samples = read_shard(shard, ledger=counted)
        results = self._each(samples, failures) if self.per_sample else self.function(samples)
        count, size = write_shard(results, output, sync=self.sync)
        seconds = round(time.time() - begun, 3)
        report = ShardReport(url, output, counted.samples, count, len(failures.quarantined), size, seconds)
        write_marker(marker, {"digest": digest, "report": asdict(report)}, sync=self.sync)
        return report, failures.quarantined

    def _each(self, samples: Iterable[Sample], failures: Ledger) -> Iterator[Sample]:
        for sample in samples:
            try:
                result = self.function(sample)
            except Exception as error:
                place = {"url": sample["__url__"], "key": sample["__key__"]}
                failure = OpError(f"{type(error).__name__}: {error}", **place)
                failure.__cause__ = error
                failures(failure)
                continue
            if result is not None:
                yield {"__key__": sample["__key__"], **result}


def _name_of(function: Callable[..., Any]) -> str:
    """Return an identifier of a function that is the same in every process: its name, and the arguments bound to it."""
    try:
        return digest_of(pickle.dumps(function).hex())
    except Exception:
        return getattr(function, "__qualname__", type(function).__qualname__)


def write_shard(
    samples: Iterable[Sample | SampleBatch],
    target: str,
    *,
    sync: bool = True,
    reject: Callable[[Sample, TarshardsError], object] | None = None,
) -> tuple[int, int]:
    """Write *samples* to a shard, and an index unless it is compressed; return their number and its size in bytes.

    A sample that the shard cannot take is passed to *reject* with the error and left out; by default it is raised.
    """
    from tarshards.index.members import Members

    location = Location.of(target)
    location.make_folder()
    with TarWriter(target, sync=sync) as writer:
        index = None if writer.is_compressed else Members()
        for sample in _one_by_one(samples, writer, index):
            key, before = sample["__key__"], writer.size - len(END)
            try:
                fields, values = encode_sample(sample, in_pieces=True)
                packed = pack_members(key, fields, values)
                if index is not None and fields not in index.numbers:
                    index.check_room(key, fields, target)
                writer.write_members(key, packed, sample.get("__url__"))
            except (SampleError, EncodeError) as error:
                if reject is None:
                    raise
                reject(sample, error)
                continue
            if index is not None:
                index.add_written(key, fields, values, packed, before)
    if index is not None and not location.is_stream:
        index.index(writer.size, target).save(location.as_output, sync=sync)
    return writer.samples, writer.size


def _one_by_one(samples: Iterable[Sample | SampleBatch], writer: TarWriter, index: Members | None) -> Iterator[Sample]:
    """Yield the samples that are to be written one by one; others are written here."""
    for each in samples:
        if type(each) is SampleBatch:
            yield from writer.write_batch(each, index)
        else:
            yield each  # type: ignore[misc]


def write_report(url: str, rows: Iterable[Any], *, sync: bool = True) -> None:
    """Write *rows*, which are dataclasses, as lines of JSON."""
    import json

    with open_url(url, "wb", sync=sync) as stream:
        stream.write("".join(f"{json.dumps(asdict(row))}\n" for row in rows).encode())


def write_manifests(reports: Iterable[ShardReport], *, sync: bool = True) -> None:
    """Write the manifests of the outputs in *reports*."""
    from tarshards.index.manifests import update_manifests, with_digests

    shards = []
    for row in reports:
        output = Location.of(row.output)
        if not output.is_stream:
            size = None if named_compression(output) else row.bytes
            shards.append(Shard(row.output, row.samples_out, size, indexed=size is not None))
    list(update_manifests(with_digests(shards), sync=sync))


def run_all(
    function: Callable[[Any], Any], items: Iterable[Any], executor: Executor
) -> Generator[tuple[Any, Any, BaseException | None], None, None]:
    """Yield every item as it is done, with the result of *function* or the error."""
    return settled_map(function, items, executor=executor, window=AHEAD, ordered=False)


def at_shard(error: BaseException, url: str) -> Exception:
    """Return *error* as an error that names the shard *url*, with *error* as its cause."""
    if isinstance(error, TarshardsError) and error.url is not None:
        return error
    reason = error.reason if isinstance(error, TarshardsError) else f"{type(error).__name__}: {error}"
    name, key, field = Location.of(url).name, getattr(error, "key", None), getattr(error, "field", None)
    failure = OpError(reason, url=name, key=key, field=field)
    failure.__cause__ = error
    return failure


def _error_of(entry: Quarantined) -> OpError:
    return OpError(entry.reason, url=entry.shard, key=entry.key, field=entry.field, offset=entry.offset)
