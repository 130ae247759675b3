"""Our hot paths, run up to each of their stages with the functions that they consist of, and their limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from sets import Data

from tarshards import ArrayLoader, IndexedShards, Stream, kernels
from tarshards.epoch.permutations import hash_of
from tarshards.index.access import SampleReader
from tarshards.index.readahead import LOOKED_UP
from tarshards.loaders.arrays.array_loader import TOGETHER_QUICK
from tarshards.loaders.arrays.assembly import Assembler
from tarshards.samples.batch import SampleBatch
from tarshards.samples.codecs.jpeg import read_headers
from tarshards.samples.fields import parse_terms
from tarshards.samples.grouping import read_shard
from tarshards.samples.ledger import Ledger
from tarshards.samples.payloads import Payloads
from tarshards.storage.opening import open_shard
from tarshards.storage.streams import PIECE
from tarshards.stream import ops
from tarshards.stream.collate import collate_ragged
from tarshards.tar.read import MEMBER_LIMIT, scan

Work = Callable[[], Any]
MEMCPY, BYTES = "one memcpy of the same bytes", "bytes(view) of each member"
exhaust: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend


class Path(NamedTuple):
    """The *stages* of a path, each including those before it, and the minimum time of some of them."""

    stages: dict[str, Work]
    limits: dict[str, tuple[str, Work]]  # its stage, and its work


def parts(source: Any, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Plan an epoch; yield the shard and the number of its samples, *size* of them at a time."""
    plan = source.plan(0, 1)
    for begin in range(0, len(plan), size):
        yield plan[np.arange(begin, min(begin + size, len(plan)))]


def payloads_of(source: Any, fields: str, size: int) -> list[list[Payloads]]:
    """Return the offsets of the bytes of each part of the epoch."""
    mapped = source.shards.mapped(parse_terms(fields))
    return [[*mapped.find(*part, part[1]).columns.values()] for part in parts(source, size)]


def memcpy(payloads: list[list[Payloads]]) -> Work:
    """Copy all bytes, in the order of the epoch, into memory that every part reuses."""
    works = []
    for part in payloads:
        addresses, sizes = (np.stack([getattr(p, name) for p in part], 1).ravel() for name in ("addresses", "sizes"))
        works.append((part, int(sizes.sum()), addresses, sizes))  # the part keeps the mappings alive
    out = np.empty(max(total for _, total, _, _ in works), np.uint8)

    def run() -> None:
        for _, total, addresses, sizes in works:
            kernels.rows.pack(out[:total], addresses, sizes)

    return run


def make_bytes(payloads: list[list[Payloads]]) -> Work:
    """Make a bytes object of every member, and release it at once."""
    places = []
    for part in payloads:
        addresses, sizes = (np.stack([getattr(p, name) for p in part], 1).ravel() for name in ("addresses", "sizes"))
        places.append((part, addresses.tolist(), sizes.tolist()))  # the part keeps the mappings alive
    return lambda: [exhaust(map(kernels.rows.copy_bytes, addresses, sizes)) for _, addresses, sizes in places]


def planned(data: Data, *, shuffled: bool) -> Path:
    """Samples one by one, by index."""
    stream = Stream.from_shards(data.urls, shuffle=shuffled)
    source = stream.source
    names, keys = source.shards.names, [source.shards.shards.index(i).keys for i in range(len(data.urls))]
    without_fields = IndexedShards(list(data.urls), fields=[])

    def dicts() -> None:
        for shards, numbers in parts(source, LOOKED_UP):
            for shard, number in zip(shards.tolist(), numbers.tolist()):
                _ = {"__key__": keys[shard][number], "__url__": names[shard]}

    def read(shards: SampleReader) -> None:
        for part in parts(source, LOOKED_UP):
            exhaust(shards.read_all(*part))

    payloads = payloads_of(source, "bin cls", max(1, (1 << 18) * data.count // int(source.shards.sizes.sum())))
    stages: dict[str, Work] = {
        "plan positions": lambda: exhaust(parts(source, LOOKED_UP)),
        "make dicts of key and URL": dicts,
        "look up members": lambda: read(without_fields),
        (copying := "copy bytes"): lambda: read(source.shards),
        "Stream: generators, ledger": lambda: exhaust(stream),
    }
    return Path(stages, {MEMCPY: (copying, memcpy(payloads)), BYTES: (copying, make_bytes(payloads))})


def streamed(data: Data) -> Path:
    """Samples one by one, without index."""
    stream, buffer = Stream.from_shards(data.urls, index=False), bytearray(PIECE)

    def each(work: Callable[[Any], None]) -> Work:
        def run() -> None:
            for url in data.urls:
                with open_shard(url) as file:
                    work(file)

        return run

    def headers(file: Any) -> None:
        rest, position, ended = b"", 0, 0
        while chunk := file.read(PIECE):
            rest, position = rest[position:] + chunk, max(0, position - len(rest))
            _, position, _, ended, _ = scan(rest, position, ended, MEMBER_LIMIT)

    stages: dict[str, Work] = {
        (reading := "read files"): each(lambda file: exhaust(iter(lambda: file.read(PIECE), b""))),
        "scan headers": each(headers),
        (grouping := "group, make bytes and dicts"): lambda: [
            exhaust(read_shard(url, ledger=Ledger())) for url in data.urls
        ],
        "Stream: generators, ledger": lambda: exhaust(stream),
    }
    payloads = payloads_of(Stream.from_shards(data.urls).source, "bin cls", LOOKED_UP)
    return Path(
        stages,
        {
            "readinto() of the files": (reading, each(lambda file: exhaust(iter(lambda: file.readinto(buffer), 0)))),
            BYTES: (grouping, make_bytes(payloads)),
        },
    )


def batched(data: Data, fields: dict[str, Any], size: int, *, shuffled: bool, threads: int | None = None) -> Path:
    """Batches of arrays: images, if there are *threads*, in the first field."""
    stream = Stream.from_shards(data.urls, shuffle=shuffled)
    source, loader = stream.source, ArrayLoader(stream, size, fields=fields, threads=threads)
    together, kept = (LOOKED_UP if threads else TOGETHER_QUICK) // size * size, (threads or 1) + loader.prefetch + 2
    assembler, key = Assembler(fields, (), size, kept, False), hash_of(0, 0)
    mapped = source.shards.mapped(assembler.terms)
    starts = np.cumsum(source.shards.counts) - source.shards.counts

    def batches() -> Iterator[tuple[int, SampleBatch]]:
        number = count()
        for shards, samples in parts(source, together):
            located = mapped.find(shards, samples, starts[shards] + samples)
            for begin in range(0, len(shards), size):
                yield next(number), located.part(begin, begin + size)

    def run(work: Callable[[int, SampleBatch], Any]) -> Work:
        return lambda: each_of(lambda batch: work(*batch), batches(), threads)

    assembler.open(next(batches())[1])
    columns = [[reader.make(size) for _ in range(kept if threads else 1)] for reader in assembler.readers]

    def read(until: int) -> Work:
        def work(number: int, found: SampleBatch) -> None:
            draws = assembler.draws(key, found.numbers)
            for reader, payloads, mine in zip(assembler.readers[:until], found.columns.values(), columns):
                column = mine[number % len(mine)][: len(payloads)]
                reader.read(column, payloads, draws)
                reader.join(column)

        return run(work)

    stages: dict[str, Work] = {
        "plan positions": lambda: exhaust(parts(source, together)),
        "look up offsets": lambda: exhaust(batches()),
    }
    first, *others = assembler.names
    if threads:
        view = assembler.readers[0].view

        def scales(number: int, found: SampleBatch) -> np.ndarray:
            """Return the minimum height and width at which each JPEG of a batch must be decoded for its crop."""
            heights, widths, _ = read_headers(next(iter(found.columns.values()))).astype(np.int64).T
            boxes = view.boxes(heights, widths, assembler.draws(key, found.numbers))
            down, across = (side / (boxes[:, 3 - i] - boxes[:, 1 - i]) for i, side in enumerate(view.size))
            factors = np.minimum(1, np.maximum(down, across))
            return np.ceil(np.stack([heights * factors, widths * factors], 1)).astype(int)

        def job(number: int, found: SampleBatch) -> list[tuple[bytes, list[int]]]:
            return list(zip(next(iter(found.columns.values())), scales(number, found).tolist()))

        stages["read headers, draw boxes"] = run(scales)
        stages[decoding := f"decode, resize and mirror {first}"] = read(1)
        jobs = [job(*batch) for batch in batches()]
        limits = {f"simplejpeg alone, {threads} threads": (decoding, lambda: each_of(decode_alone, jobs, threads))}
    else:
        stages[f"read {first}"] = read(1)
        limits = {MEMCPY: (f"read {first}", memcpy(payloads_of(source, " ".join(fields), size)))}
    stages |= {f"read {name}": read(i) for i, name in enumerate(others, 2)}
    stages["make batches: memory, keys"] = run(lambda number, found: assembler.assemble(lambda: found, key, number))
    stages["ArrayLoader: order, ledger"] = lambda: exhaust(loader)
    return Path(stages, limits)


def handed_over(data: Data, size: int) -> Path:
    """Batches of worker processes: what a worker and the loader do, one after the other in this process."""
    import torch

    from tarshards import ShardDataset, ShardLoader
    from tarshards.loaders.tensors import tensors
    from tarshards.loaders.torch.handover import Arenas

    torch.set_num_threads(1)
    stream, dataset, arenas = Stream.from_shards(data.urls), ShardDataset(data.urls), Arenas(1, 2)
    loaders = {
        "ShardLoader, no workers": ShardLoader(dataset, size),
        "ShardLoader, 2 workers": ShardLoader(dataset, size, num_workers=2, persistent_workers=True),
    }

    def collated() -> Iterator[Any]:
        return ops.batched(iter(stream), size, collate=collate_ragged)

    def write() -> None:
        for batch in collated():
            arenas.put(0, [batch])
            arenas.begin(0)  # frees what was not taken

    def take() -> None:
        for batch in collated():
            exhaust(map(tensors, arenas.take(arenas.put(0, [batch]))))

    stages: dict[str, Work] = {
        "worker: read samples": lambda: exhaust(stream),
        "worker: collate": lambda: exhaust(collated()),
        "worker: pickle, copy into shared memory": write,
        (taking := "loader: copy out, unpickle"): take,
    }
    return Path(stages, {name: (taking, partial(exhaust, loader)) for name, loader in loaders.items()})


def each_of(work: Callable[[Any], Any], things: Iterable[Any], threads: int | None) -> None:
    """Do the work for each item, by threads if there are any."""
    with ThreadPoolExecutor(threads) if threads else nullcontext() as pool:
        exhaust(pool.map(work, things) if pool else map(work, things))


def decode_alone(job: list[tuple[bytes, list[int]]]) -> None:
    """Decode JPEGs from bytes, whole, at the scale that their crops need, into a reused buffer."""
    buffer = np.empty(1 << 20, np.uint8)
    for data, (height, width) in job:
        scaling = {"min_height": height, "min_width": width, "min_factor": 2.0}
        simplejpeg.decode_jpeg(data, "RGB", buffer=buffer, **scaling)
