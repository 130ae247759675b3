"""The writers of tarshards as cases for ``check_writer``: ``python tests/testing/crash_cases.py [CASE]...``.

Each case prepares a folder, with earlier files in some cases, and writes there. ``read`` is the same for all cases: it
reads each shard as a stream, by its index and with the checker, each manifest and its dataset, and all other files of a
writer. If a set is replaced, some shards may still be the earlier ones: each is whole, or an error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tarshards.errors import TarshardsError
from tarshards.index.build import build_index
from tarshards.index.columns import ShardColumns, build_columns
from tarshards.index.key_index import build_key_index
from tarshards.index.manifests import add_to_manifests
from tarshards.index.refresh import refresh_indexes
from tarshards.run.samples.journal import Journal, SampleResult
from tarshards.storage.cache import Block, BlockCache
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.markers import Marker
from tarshards.storage.wire import calling, run
from tarshards.stream.indexed_shards import IndexedShards
from tarshards.stream.stream import Stream
from tarshards.testing.crashes import Crashes, check_writer
from tarshards.verbs.check import check_shards
from tarshards.write.map import map_shards
from tarshards.write.reshard import reshard
from tarshards.write.shards import ShardWriter, write_samples

DERIVED = r"index|planned|columns|keys|shards\.json"  # outputs that can be recreated
COUNT, EACH = 7, 3  # samples in a set, and in a shard
BLOCKS = [Block("http://any/0.tar", '"v1"', 3000, 1000 * number, 1000) for number in range(3)]
FETCHED = bytes(1000)  # stands for a block that the cache does not have
NAMES = ("first", "second", "third")  # names of the samples in a journal
RESULT = SampleResult([{"__key__": "a", "txt": b"text" * 300}], None)


def samples(version: int) -> Iterator[dict[str, Any]]:
    """Yield the samples of one version of a set: versions differ in texts and in some sizes."""
    for number in range(COUNT):
        yield {"__key__": f"{number:03d}", "txt": f"{version}{number}" * (50 + 100 * version * (number % 2))}


def write_set(folder: Path, version: int = 0) -> None:
    with ShardWriter(folder / "set-%d.tar", max_samples=EACH, sha256=bool(version)) as writer:
        for sample in samples(version):
            writer.write(sample)


def write_other_set(folder: Path) -> None:
    write_set(folder, 1)


def write_one(folder: Path) -> None:
    write_samples(samples(1), folder / "set-0.tar")


def write_compressed(folder: Path) -> None:
    write_samples(samples(1), folder / "set.tar.gz")


def write_index(folder: Path) -> None:
    build_index(f"{folder}/one.tar").save(f"{folder}/one.tar")


def write_shard(folder: Path) -> None:
    write_samples(samples(0), folder / "one.tar")


def write_stale_index(folder: Path) -> None:
    """Replace a shard and keep its index, as programs do that do not know about indexes."""
    write_shard(folder)
    write_index(folder)
    with tempfile.TemporaryDirectory() as elsewhere:
        write_samples(samples(1), Path(elsewhere, "one.tar"))
        (folder / "one.tar").write_bytes(Path(elsewhere, "one.tar").read_bytes())


def refresh(folder: Path) -> None:
    shards = [outcome.shard for outcome in refresh_indexes([f"{path}" for path in sorted(folder.glob("*.tar"))])]
    add_to_manifests(shards, Location(str(folder)))


def write_columns(folder: Path) -> None:
    build_columns(f"{folder}/set-{{0..2}}.tar", "length:txt")


def write_keys(folder: Path) -> None:
    build_key_index(find_shards(f"{folder}/set.shards.json"))


def write_whole_set(folder: Path) -> None:
    """Write a set with all files derived from it."""
    write_set(folder)
    write_keys(folder)
    if find_spec("pyarrow"):
        write_columns(folder)


def write_mapped(folder: Path) -> None:
    map_shards(list, f"{folder}/set-{{0..2}}.tar", folder / "out-%d.tar", progress=False)


def write_resharded(folder: Path) -> None:
    reshard(f"{folder}/set-{{0..2}}.tar", folder / "out-%d.tar", shards=2)


def write_catalog(folder: Path, version: int = 1) -> None:
    from tarshards.formats.catalog import Catalog

    path = folder / "all.yaml"
    catalog = Catalog.load(path) if version > 1 else Catalog(path)
    catalog.add(f"all@{version}", {"all": f"{folder}/set.shards.json"})
    catalog.save()


def write_set_and_catalog(folder: Path) -> None:
    write_set(folder)
    write_catalog(folder)


def add_to_catalog(folder: Path) -> None:
    write_catalog(folder, 2)


def write_done(folder: Path) -> None:
    Marker(f"{folder}/deep/out.done").write({"samples": COUNT})


def write_journal(folder: Path) -> None:
    journal = Journal(f"{folder}/state")
    for name in NAMES:
        journal.add(name, RESULT)
    journal.close()


def write_cache(folder: Path) -> None:
    cache = BlockCache(f"{folder}/cache", 1 << 28)
    for number, block in enumerate(BLOCKS):
        run(cache.fill(block, partial(calling, bytes, [number + 1] * 1000)))
    cache.leave()


def read(folder: Path) -> dict[str, Any]:
    """Return what the readers find in *folder*: the samples of each shard by each reader, and the other files."""
    found: dict[str, Any] = {}

    def put(name: str, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            found[name] = function(*arguments)
        except (TarshardsError, OSError) as error:
            found[name] = error

    for path in sorted(folder.glob("*.tar*")):
        if path.suffix in (".tar", ".gz"):
            put(f"{path.name} as a stream", streamed, path)
            put(f"{path.name} for tarcheck", checked, path)
            if path.with_name(f"{path.name}.index").exists():
                put(f"{path.name} by its index", indexed, path)
                put(f"{path.name} in a planned epoch", planned, path)
            if path.with_name(f"{path.name}.columns.parquet").exists():
                put(f"the columns of {path.name}", columns, path)
    for path in sorted(folder.glob("*.shards.json")):
        put(path.name, listed, path)
        for number, name in enumerate(_named(path)):
            put(f"{name} as {path.name} says", part, path, number)
            put(f"{name} by keys of {path.name}", by_key, path, number)
    if (path := folder / "all.yaml").exists():
        put(path.name, cataloged, path)
    put("deep/out.done", Marker(f"{folder}/deep/out.done").read)
    if (folder / "state").exists():
        found |= {name: value for name, value in journaled(folder).items() if value is not None}
    if (folder / "cache").exists():
        found |= cached(folder)
    return {name: value for name, value in found.items() if value is not None}


def content(stream: Any) -> list[tuple[str, bytes]]:
    return [(sample["__key__"], sample["txt"]) for sample in stream]


def streamed(path: Path) -> list[tuple[str, bytes]]:
    return content(Stream.from_shards(str(path), index=False))


def indexed(path: Path) -> list[tuple[str, bytes]]:
    return content(IndexedShards(str(path)))


def planned(path: Path) -> list[tuple[str, bytes]]:
    return sorted(content(Stream.from_shards(str(path), index=True, shuffle=True, seed=1)))


def checked(path: Path) -> int:
    """Return the number of samples, or raise the first error that the checker finds."""
    report = check_shards([str(path)])
    for finding in report.findings:
        if finding.severity == "error":
            raise TarshardsError(str(finding))
    return report.samples


def columns(path: Path) -> Any:
    found = ShardColumns.load(Location.of(path))
    assert found is not None
    return found.table.to_pylist()  # type: ignore[union-attr]


def listed(manifest: Path) -> list[tuple[str, int | None]]:
    return [(Path(shard.url).name, shard.samples) for shard in find_shards(manifest)]


def cataloged(path: Path) -> list[str]:
    from tarshards.formats.catalog import Catalog

    return sorted(Catalog.load(path).entries())


def _named(manifest: Path) -> list[str]:
    try:
        return [name for name, _ in listed(manifest)]
    except (TarshardsError, OSError):
        return []


def part(manifest: Path, number: int) -> list[tuple[str, bytes]]:
    """Return the samples of one shard of the dataset that a manifest names."""
    shards = IndexedShards(str(manifest))
    counts = shards.counts.tolist()
    begin = sum(counts[:number])
    return content(shards[sample] for sample in range(begin, begin + counts[number]))


def by_key(manifest: Path, number: int) -> list[tuple[str, bytes]]:
    """Return the samples of a shard by the keys that it should contain."""
    shards = IndexedShards(str(manifest))
    keys = [f"{sample:03d}" for sample in range(COUNT)][number * EACH : (number + 1) * EACH]
    return [(key, shards[key]["txt"]) for key in keys]


def journaled(folder: Path) -> dict[str, Any]:
    """Return the records of a journal; a missing sample is run again."""
    try:
        journal = Journal(f"{folder}/state")
    except (TarshardsError, OSError) as error:
        return {"state": error}
    try:
        return {f"state of {name}": journal.find(name) for name in NAMES}
    finally:
        journal.close()


def cached(folder: Path) -> dict[str, bytes]:
    """Return the blocks in a cache; a missing block is fetched."""
    cache = BlockCache(f"{folder}/cache", 1 << 28)
    try:
        blocks = {
            f"block {block.offset}": bytes(run(cache.fill(block, lambda: calling(lambda: FETCHED)))) for block in BLOCKS
        }
    finally:
        cache.leave()
    return {name: data for name, data in blocks.items() if data != FETCHED}


class CrashCase(NamedTuple):
    """One of our writers; *prepare* makes the earlier files, *again* and *lasts* are as in ``check_writer``."""

    write: Callable[[Path], None]
    prepare: Callable[[Path], None] | None = None
    again: str = "."
    lasts: bool = True
    needs: str = ""


CASES = {
    "a shard": CrashCase(write_one),
    "a shard that is replaced": CrashCase(write_one, write_whole_set),
    "a compressed shard": CrashCase(write_compressed),
    "shards, their indexes and the manifest": CrashCase(write_set),
    "shards that are replaced with all that is derived": CrashCase(write_other_set, write_whole_set),
    "an index": CrashCase(write_index, write_shard),
    "an index that is stale, and a manifest": CrashCase(refresh, write_stale_index),
    "columns": CrashCase(write_columns, write_set, needs="pyarrow"),
    "a key index": CrashCase(write_keys, write_set),
    "mapped shards": CrashCase(write_mapped, write_set, again=r"\.tar$"),
    "resharded shards": CrashCase(write_resharded, write_set),
    "a catalog": CrashCase(write_catalog, write_set),
    "a catalog with one more version": CrashCase(add_to_catalog, write_set_and_catalog, again=""),
    "a marker": CrashCase(write_done),
    "a journal": CrashCase(write_journal, again="", lasts=False),
    "a cache": CrashCase(write_cache, again="", lasts=False),
}


def check_case(name: str, folder: Path, lost: int = 2) -> Crashes:
    """Run one case in a new *folder*, and return its result."""
    case = CASES[name]
    folder.mkdir()
    if case.prepare is not None:
        case.prepare(folder)
    return check_writer(case.write, read, folder, lost=lost, again=case.again, lasts=case.lasts, derived=DERIVED)


def main() -> None:
    """Check all cases, or those named, and print the results as JSON."""
    from importlib import import_module

    found = {}
    for number, name in enumerate(sys.argv[1:] or CASES):
        with tempfile.TemporaryDirectory() as folder:
            module = import_module("crash_cases")  # not __main__: a new process imports it
            result = module.check_case(name, Path(folder, str(number)))
        found[name] = {"changes": len(result.changes), "states": result.states, "found": dict(result.found)}
        found[name]["faults"] = result.faults
        sys.stderr.write(f"{name}: {result}\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
