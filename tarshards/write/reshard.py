"""Shuffle or repartition datasets larger than memory into new shards, in two parallel passes.

The first pass distributes the samples to buckets by the high bits of a random number, which is also their position in
the new order. The second pass writes each new shard from the buckets that it spans. The order depends only on the seed
and the inputs.
"""

from __future__ import annotations

import os
import re
import shutil
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from tarshards.epoch.splitmix import splitmix64
from tarshards.errors import OpError, SampleError, flag, whole_number
from tarshards.samples.grouping import encode_sample, read_shard
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import Ledger, Tally
from tarshards.samples.retry_parse import retry_parse
from tarshards.storage.claims import Claims
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location, look_up
from tarshards.storage.manifest import ArchiveEnd, Shard, manifest_url
from tarshards.storage.markers import Marker, Provenance, digest_of, say_kept
from tarshards.storage.ranges import most_held
from tarshards.storage.streams import PIECE, taken, temporary
from tarshards.stream import ops
from tarshards.tar.read import pack_members
from tarshards.write.once import at_shard, run_all
from tarshards.write.shards import (
    SHARD_BYTES,
    TarWriter,
    is_pattern,
    most_of_members,
    name_leftovers,
    shard_name,
)

RECORD = "reshard.json"  # identifies the call to which the folder belongs
BUCKET = 1 << 26  # approximate bytes of samples in a bucket
MOST_BUCKETS = 1 << 12
BUFFER = 1 << 24  # bytes of samples that a task of the first pass holds in memory
SAMPLES = 40  # bits for the number of a sample in its shard
NUMBER = re.compile(r"%0?\d*d|\{shard(:0?\d*d?)?\}")
ENTRY = [("input", "<u4"), ("bucket", "<u4"), ("key", "<u4"), ("order", "<u8"), ("offset", "<u8"), ("size", "<u8")]


class Cut(NamedTuple):
    """The limit that determines where shards end; exactly one of the fields is set."""

    max_bytes: int | None
    max_samples: int | None
    shards: int | None


@dataclass(frozen=True)
class _Resharding:
    """The parameters of both passes; they are sent to every task, so their size does not depend on the inputs."""

    inputs: int  # the number of inputs
    pattern: Location
    folder: str
    buckets: int  # a power of two; not used without shuffling, where each input is one bucket
    seed: int | None
    rekey: str | None
    skips: bool = False  # whether damaged data are skipped

    def order(self, shard: int, sample: int) -> int:
        """Return the number by which a sample is sorted; it is unique because splitmix64 is a bijection."""
        number = shard << SAMPLES | sample
        return number if self.seed is None else splitmix64((splitmix64(self.seed) + number) % (1 << 64))

    def bucket(self, shard: int, order: int) -> int:
        return shard if self.seed is None else order * self.buckets >> 64

    def output(self, number: int) -> Location:
        return self.pattern.at(shard_name(self.pattern, number))

    def file(self, name: str) -> Location:
        """Return the location of a file in the folder, which is flushed to the disk if the outputs are."""
        return self.pattern.at(f"{self.folder}/{name}")

    def scattered(self, shard: int, end: str) -> Location:
        return self.file(f"scattered-{shard:06d}.{end}")

    @property
    def table(self) -> str:
        return f"{self.folder}/table"


def reshard(
    inputs: Any,
    output_pattern: str | os.PathLike[str] | Location,
    *,
    shuffle: bool = True,
    seed: int = 0,
    max_bytes: int | None = None,
    max_samples: int | None = None,
    shards: int | None = None,
    rekey: str | None = None,
    concatenated: bool = False,
    end: ArchiveEnd = "required",
    allow_pipe: bool = False,
    executor: Executor | None = None,
    tmpdir: str | None = None,
    progress: bool = False,
    sync: bool = True,
    overwrite: bool = True,
    allow_empty: bool = False,
    ledger: Ledger | None = None,
) -> list[Shard]:
    """Write the samples of *inputs* to the shards of *output_pattern*, with indexes and a manifest; return the shards.

    The order is a random permutation by *seed*, or with ``shuffle=False`` that of the inputs. One limit determines
    where shards end: *max_bytes* (default: 1e9; only a single larger sample exceeds it), *max_samples*, or *shards*,
    the number of shards, whose sizes then differ by at most one sample. *rekey* is a template for new keys with
    ``index`` (within the input), ``key`` and ``shard``, for inputs that share keys. *concatenated* allows inputs that
    are concatenated archives, *end* "optional" inputs that end without zeros, and *allow_pipe* allows inputs named
    ``pipe:command`` to run their commands. The output does not depend on *executor* (default: a ``ProcessPool`` of all
    cores).

    Between the passes, all samples are stored in a folder beside the first output, or in *tmpdir*; it needs as much
    space as the inputs. After an interruption, the same call resumes from this folder if the sizes and times of the
    inputs are the same, and logs how many shards it kept. The folder is removed at the end.
    With *sync*, its files and each output are flushed to the disk before they count as done, to survive a power loss.
    *ledger* counts the samples read, and the members that belong to no sample; as far as its ``max_errors`` allow,
    damaged shards and samples are left out. Without *overwrite*, OpenError is raised for a shard that exists, unless
    the call resumes an interrupted one.

    Raises ValueError for conflicting or invalid arguments, OpenError while another writer uses the same local pattern,
    and SampleError for a key that occurs twice in a shard, and for inputs without samples unless *allow_empty*.
    """
    import numpy as np

    from tarshards.index.manifests import remove_manifest, with_digests, write_manifest

    shuffle, seed = flag("shuffle", shuffle), whole_number("seed", seed)
    cut, pattern = _cut(max_bytes, max_samples, shards), Location.of(output_pattern, sync=sync)
    output_pattern = pattern.url
    if not is_pattern(output_pattern):
        raise ValueError(f"{pattern.name}: the pattern needs a shard number, {{shard:06d}} or %06d")
    pattern.compression()  # raises UrlError for a name of another format
    if rekey is not None:
        ops.rekey([], rekey)  # raises ValueError for an invalid template
    named = find_shards(inputs, concatenated=concatenated, end=end, allow_pipe=allow_pipe)
    urls = [shard.url for shard in named]
    sizes = [*look_up(Location.size, urls)]
    folder, manifest = work_folder(output_pattern, tmpdir), manifest_url(NUMBER.sub("\0", output_pattern))
    buckets = 1
    while buckets < MOST_BUCKETS and buckets * BUCKET < sum(size or BUCKET for size in sizes):
        buckets *= 2
    skips = ledger is not None and ledger.max_errors > 0
    plan = _Resharding(len(named), pattern, folder, buckets, seed if shuffle else None, rekey, skips)
    rules = ["last"] if any(shard.split == "last" for shard in named) else []
    rules += ["headers"] if any(shard.keep_headers for shard in named) else []
    rules += ["forgiving"] if skips else []
    rules += ["records"] if cut.max_bytes is not None else []  # without them, shards ended at other samples

    with ExitStack() as stack:
        claims = stack.enter_context(Claims())
        for location in (plan.output(0), Location(folder)):  # the folders of two calls may have the same name
            location.make_folder()
            claims.take(location)
        may_replace = overwrite or os.path.exists(folder)
        if not may_replace and plan.output(0).is_taken():  # of the others, the number is not known yet
            raise taken(plan.output(0).name)
        work = output_pattern, buckets, plan.seed, rekey, cut, ENTRY, *rules
        versions = list(look_up(Location.version, urls))
        is_unsure = _prepare(plan, digest_of(urls, versions, *work), digest_of(urls, sizes, *work))
        if executor is None:
            from tarshards.parallel.process_pool import ProcessPool

            executor = stack.enter_context(ProcessPool())
        scattered = _run(
            _Scatter(plan), list(enumerate(named)), executor, lambda item: item[1].url, progress, "reading"
        )
        if ledger is not None:
            for item in enumerate(named):
                read = scattered[item]
                errors = read.pop("errors", [])  # an earlier release recorded none
                ledger.add(Tally(**{**read, "skipped": Counter(read["skipped"])}))
                for url, key, field, offset, reason in errors:
                    ledger(OpError(reason, url=url, key=key, field=field, offset=offset))
        starts = _merge_tables(plan)
        ends = _ends(plan, cut, starts)
        if not ends and not allow_empty:
            shutil.rmtree(folder)
            read_from = f"{len(urls)} shard{'s' * (len(urls) != 1)}"
            raise SampleError(f"no samples in {read_from}; allow_empty (tarreshard --allow-empty) accepts that")
        bounds = np.concatenate([[0], ends]).tolist()
        spans = [(number, *span, _spanned(starts, *span)) for number, span in enumerate(pairwise(bounds))]
        for output in (plan.output(number) for number, *_ in spans):
            claims.take(output)
            if not may_replace and output.is_taken():
                shutil.rmtree(folder)  # the next call is not to resume, and replace it
                raise taken(output.name)
        remove_manifest(manifest)  # it lists shards that are being replaced
        found = _run(_Gather(plan), spans, executor, lambda span: plan.output(span[0]).url, progress, "writing")
        made = with_digests(
            Shard(url, samples, size, indexed=size is not None)
            for url, samples, size, _ in (found[span] for span in spans)
        )
        kept = sum(is_kept for *_, is_kept in found.values())
        say_kept([shard.url for shard in made], kept, unsure=kept if is_unsure else 0)
        write_manifest(pattern.at(manifest), made)
        name_leftovers(output_pattern, len(made))
        os.unlink(f"{folder}/{RECORD}")  # first: without it, nothing resumes from a half-removed folder
        shutil.rmtree(folder)
    return made


def work_folder(pattern: str, tmpdir: str | None = None) -> str:
    """Return the folder for the samples between the passes.

    Raises ValueError for a *pattern* that is not local, if no *tmpdir* is given.
    """
    first = Location.of(shard_name(pattern, 0))
    if first.path is None and tmpdir is None:
        name = Location.of(pattern).name
        raise ValueError(f"{name} is not local: name a local folder for the samples between the passes with tmpdir")
    name = f"{first.base if first.path is None else os.path.basename(first.path)}.reshard"
    return os.path.join(os.path.dirname(first.path or "") if tmpdir is None else tmpdir, name)


def _cut(max_bytes: int | None, max_samples: int | None, shards: int | None) -> Cut:
    limits = {"max_bytes": max_bytes, "max_samples": max_samples, "shards": shards}
    given = [whole_number(name, number, 1) for name, number in limits.items() if number is not None]
    if len(given) > 1:
        raise ValueError("max_bytes, max_samples and shards exclude one another")
    return Cut(SHARD_BYTES if not given else max_bytes, max_samples, shards)


def _prepare(plan: _Resharding, digest: str, earlier: str) -> bool:
    """Create the folder, or keep the folder of an interrupted call with the same arguments and inputs.

    Return whether it is of an earlier release, which gave the call the digest *earlier*.
    """
    found = Provenance(digest, earlier=earlier).find(plan.file(RECORD))
    if found is None:
        shutil.rmtree(plan.folder, ignore_errors=True)
        Marker(plan.file(RECORD)).write({"digest": digest})
    return found is not None and found["digest"] != digest


def _run(
    work: Callable[[Any], Any],
    items: list[Any],
    executor: Executor,
    name: Callable[[Any], str],
    progress: bool,
    phase: str,
) -> dict[Any, Any]:
    """Return the results of *work* by item; raise the first error, with the name of its item."""
    results = {}
    with closing(run_all(work, items, executor, progress=progress, phase=phase)) as outcomes:
        for item, result, error in outcomes:
            if error is not None:
                raise at_shard(error, name(item)) from error
            results[item] = result
    return results


@dataclass(frozen=True)
class _Scatter:
    """The first pass over one input: write its samples in pieces sorted by bucket; return the counts of a Tally."""

    plan: _Resharding

    def __call__(self, item: tuple[int, Shard]) -> dict[str, Any]:
        return Provenance(None).make_once(self.plan.scattered(item[0], "done"), partial(self._scatter, *item))[0]

    def _scatter(self, shard: int, source: Shard) -> dict[str, Any]:
        import numpy as np

        ledger = Ledger(max_errors=float("inf") if self.plan.skips else 0)
        entries: list[tuple[int, ...]] = []
        with self.plan.scattered(shard, "data").open("wb") as stream:
            offset = 0
            for piece in self._pieces(shard, source, ledger):
                for bucket, order, key, record in piece:
                    entries.append((shard, bucket, len(key), order, offset, len(record)))
                    stream.write(key)
                    stream.write(record)
                    offset += len(key) + len(record)
        table = np.array(entries, dtype=ENTRY)
        with self.plan.scattered(shard, "npy").open("wb") as stream:
            np.save(stream, table[np.argsort(table["bucket"], kind="stable")])
        counts = {name: getattr(ledger, name) for name in ("shards", "members", "samples", "joined", "skipped")}
        return {**counts, "errors": ledger.quarantined}

    def _pieces(self, shard: int, source: Shard, ledger: Ledger) -> Iterator[list[tuple[int, int, bytes, bytes]]]:
        """Yield pieces that fit into the buffer, sorted by bucket."""
        samples: Iterator[Sample] = read_shard(source, ledger=ledger)
        if self.plan.rekey is not None:
            samples = ops.rekey(samples, self.plan.rekey)
        piece: list[tuple[int, int, bytes, bytes]] = []
        held = 0
        for number, sample in enumerate(samples):
            order = self.plan.order(shard, number)
            encoded = encode_sample(sample)
            record = b"".join(pack_members(sample["__key__"], *encoded))
            key = sample["__key__"].encode(errors="surrogateescape")
            piece.append((self.plan.bucket(shard, order), order, key, record))
            held += len(record)
            if held > BUFFER:
                piece.sort(key=lambda entry: entry[0])
                yield piece
                piece, held = [], 0
        piece.sort(key=lambda entry: entry[0])
        yield piece


def _merge_tables(plan: _Resharding) -> list[int]:
    """Write the entries of all inputs to one table, sorted by bucket; return the start of each bucket."""
    import numpy as np

    buckets = plan.buckets if plan.seed is not None else plan.inputs
    names = [plan.scattered(shard, "npy").url for shard in range(plan.inputs)]
    counts = np.zeros(buckets, np.int64)
    for name in names:
        found, numbers = np.unique(retry_parse(np.load, name)["bucket"], return_counts=True)
        counts[found] += numbers
    starts = np.concatenate([[0], np.cumsum(counts)])
    offsets, size = starts[:-1].copy(), np.dtype(ENTRY).itemsize
    with temporary(os.path.dirname(plan.table)), open(plan.table, "wb") as file:
        for name in names:
            entries = retry_parse(np.load, name)
            found, firsts, numbers = np.unique(entries["bucket"], return_index=True, return_counts=True)
            for bucket, begin, count in zip(found.tolist(), firsts.tolist(), numbers.tolist()):
                file.seek(int(offsets[bucket]) * size)
                file.write(entries[begin : begin + count].tobytes())
            offsets[found] += numbers
    return starts.tolist()


def _spanned(starts: list[int], low: int, high: int) -> tuple[int, ...]:
    """Return the starts of the buckets that contain the positions *low* to *high*, and the end of the last one.

    >>> _spanned([0, 10, 10, 20, 30], 5, 12), _spanned([0, 10, 20], 10, 20)
    ((0, 10, 10, 20), (10, 20))
    """
    return tuple(starts[bisect_right(starts, low) - 1 : bisect_left(starts, high) + 1])


def _bucket(plan: _Resharding, begin: int, end: int) -> Any:
    """Return the entries of the bucket that is at *begin* to *end* in the table, in the new order."""
    import numpy as np

    size = np.dtype(ENTRY).itemsize
    entries = np.fromfile(plan.table, ENTRY, end - begin, offset=begin * size)
    return entries[np.argsort(entries["order"])]


def _ends(plan: _Resharding, cut: Cut, starts: list[int]) -> list[int]:
    """Return the positions in the new order where shards end."""
    import numpy as np

    total = starts[-1]
    if not total:
        return []
    if cut.shards is not None:
        number = min(cut.shards, total)
        return [total * (i + 1) // number for i in range(number)]
    if cut.max_samples is not None:
        return [*range(cut.max_samples, total, cut.max_samples), total]
    ends, used, most = [], 0, most_of_members(cut.max_bytes or 0)
    for start, stop in pairwise(starts):
        sizes = np.cumsum(_bucket(plan, start, stop)["size"], dtype=np.int64)
        begin = before = 0
        while begin < len(sizes):
            fit = int(np.searchsorted(sizes, before + most - used, side="right"))
            if fit == begin and not used:
                fit += 1  # a single sample larger than max_bytes
            if fit == len(sizes):
                used += int(sizes[-1]) - before
                break
            ends.append(start + fit)
            begin, before, used = fit, int(sizes[fit - 1]) if fit else 0, 0
    return [*ends, total] if not ends or ends[-1] < total else ends


@dataclass(frozen=True)
class _Gather:
    """The second pass for one new shard, which has the positions *low* to *high* of the new order.

    *starts* has the starts of the buckets that it spans, and the end of the last one.
    """

    plan: _Resharding

    def __call__(self, span: tuple[int, int, int, tuple[int, ...]]) -> tuple[str, int, int | None, bool]:
        """Return the URL, the samples and the bytes of the shard, and whether an interrupted call wrote it."""
        number, low, high, starts = span
        target, marker = self.plan.output(number), self.plan.file(f"shard-{number:06d}.done")
        make = partial(self._gather, target, low, high, starts)
        record, is_kept = Provenance(None, target).make_once(marker, make)
        return target.url, *record["shard"][1:], is_kept

    def _gather(self, target: Location, low: int, high: int, starts: tuple[int, ...]) -> dict[str, Any]:
        target.make_folder()
        with TarWriter(target) as writer:
            writer.add_index()
            keys: list[str] = []
            packed: list[bytes] = []
            held = 0
            for key, record in self._records(low, high, starts):
                if held + len(record) > PIECE and packed:
                    self._write(writer, keys, packed)
                    keys, packed, held = [], [], 0
                keys.append(key)
                packed.append(record)
                held += len(record)
            self._write(writer, keys, packed)
        return {"shard": (target.recorded, writer.samples, None if writer.is_compressed else writer.size)}

    def _write(self, writer: TarWriter, keys: list[str], packed: list[bytes]) -> None:
        try:
            writer.write_packed(keys, packed)
        except SampleError as error:
            reason = f"{error.reason}, from another input; make the keys unique with rekey"
            raise SampleError(reason, url=error.url, key=error.key) from error

    def _records(self, low: int, high: int, starts: tuple[int, ...]) -> Iterator[tuple[str, bytes]]:
        """Yield the key and the packed members of each sample from *low* to *high*."""
        files: dict[int, Any] = {}
        most = most_held()
        with ExitStack() as stack:
            stack.callback(lambda: [file.close() for file in files.values()])
            for shard, _, length, _, offset, size in self._entries(low, high, starts):
                if shard not in files:
                    if len(files) >= most:
                        files.pop(next(iter(files))).close()
                    files[shard] = open(self.plan.scattered(shard, "data").url, "rb", buffering=0)  # noqa: SIM115
                record = os.pread(files[shard].fileno(), length + size, offset)
                yield record[:length].decode(errors="surrogateescape"), record[length:]

    def _entries(self, low: int, high: int, starts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for begin, end in pairwise(starts):
            yield from _bucket(self.plan, begin, end)[max(low - begin, 0) : high - begin].tolist()
