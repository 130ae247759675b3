"""A folder of shards as a megatron-energon dataset: its ``.nv-meta`` folder, and a ``.tar.idx`` per shard.

Format: megatron-energon 7.4, "flavors/webdataset/indexing.py" and "prepare.py".
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from zlib import crc32

from tarshards.errors import OpenError, ShardIndexError, UrlError
from tarshards.index.exports import pack_offsets, sample_bounds
from tarshards.index.manifests import TO_DISK, Writing
from tarshards.index.refresh import find_index
from tarshards.index.sidecar import Index
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.streams import temporary

TABLES = """
CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,
    content_byte_size INTEGER);
"""
LOOKUPS = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset,
    content_byte_size);
"""
DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def export_energon(shards: Sequence[Shard | str], folder: str | None = None, how: Writing = TO_DISK) -> Iterator[str]:
    """Make *shards* an Energon dataset in *folder*, by default their common one; yield the files written.

    All samples are in the split "train" and crude; an existing ``split.yaml`` or ``dataset.yaml`` is kept. Raises
    UrlError for shards that are not local files below the folder, ShardIndexError for a key that comes twice.
    """
    urls = [Shard.of(shard).url for shard in shards]
    folder = folder or os.path.commonpath([os.path.dirname(_path(url)) or "." for url in urls])
    names = [os.path.relpath(_path(url), folder) for url in urls]
    if outside := [url for url, name in zip(urls, names) if name.startswith("../")]:
        raise UrlError(f"not in the dataset's folder, {folder}", url=outside[0])
    meta = os.path.join(folder, ".nv-meta")
    counts: dict[str, int] = {}
    with ExitStack() as stack:
        with temporary():
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
        path = os.path.join(scratch, "index.sqlite")
        database = sqlite3.connect(path)
        try:
            database.executescript(TABLES)
            for number, (name, url, shard) in enumerate(zip(names, urls, shards)):
                index = find_index(shard)
                counts[name] = len(index)
                with Location.of(url).ranges() as ranges:
                    _add_shard(database, number, index, sample_bounds(index, ranges).tolist(), url)
                    yield how.write(Location(f"{_path(url)}.idx"), pack_offsets(index, ranges))
            database.executescript(LOOKUPS)
            database.commit()
        except sqlite3.OperationalError as error:
            raise OpenError(
                f"cannot write a temporary file: {error}; set TMPDIR to another folder", url=scratch
            ) from error
        finally:
            database.close()
        with open(path, "rb") as file:
            content = file.read()
    info = json.dumps({"energon_version": None, "shard_counts": counts}, indent=2)
    split = "".join(f"  - {json.dumps(name)}\n" for name in names)
    files = {
        "index.sqlite": content,
        "index.uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{info}{crc32(content)}")).encode(),
        ".info.json": info.encode(),
        "split.yaml": f"split_parts:\n  train:\n{split}  val: []\n  test: []\nexclude: []\n".encode(),
        "dataset.yaml": DATASET.encode(),
    }
    if not how.dry_run:
        Location(os.path.join(meta, "dataset.yaml"), sync=how.sync).make_folder()
    for name, data in files.items():
        target = os.path.join(meta, name)
        if name not in ("split.yaml", "dataset.yaml") or not os.path.exists(target):
            yield how.write(Location(target), data)


def _add_shard(database: sqlite3.Connection, number: int, index: Index, bounds: list[int], url: str) -> None:
    key = ""

    def samples() -> Iterator[tuple[int, str, int, int, int]]:
        nonlocal key
        for i, key in enumerate(index.keys):
            yield number, key, i, bounds[i], bounds[i + 1] - bounds[i]

    fields = [index.fields[field] for field in index.field.tolist()]
    parts = zip([number] * len(fields), index.sample.tolist(), fields, index.offset.tolist(), index.size.tolist())
    try:
        database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", samples())
        database.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
    except sqlite3.IntegrityError as error:
        raise ShardIndexError(
            "Energon requires unique keys in a dataset; rename with `tarcat --rekey`", url=url, key=key
        ) from error
    except UnicodeEncodeError as error:
        raise ShardIndexError(
            "Energon requires names in UTF-8; rename with `tarcat --rekey`", url=url, key=key
        ) from error


def _path(url: str) -> str:
    location = Location.of(url)
    if location.path is None:
        raise UrlError("an Energon dataset needs local shards", url=location.name)
    return location.path
