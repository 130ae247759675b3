"""Other formats -> shards: an input is cut into pieces, which become shards in parallel."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from tarshards.errors import SampleError, TarshardsError, shortened, whole_number
from tarshards.formats.inputs import name_of, plan_input
from tarshards.formats.naming import Columns, Naming, record_url, sample_of
from tarshards.formats.pieces import Piece, Plan, fail_rows
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger
from tarshards.storage.location import Location
from tarshards.write.once import Outputs
from tarshards.write.shards import write_shard

MAX_BYTES = 10**9


def import_dataset(
    source: Any,
    pattern: str | os.PathLike[str] | Location,
    *,
    format: str | None = None,
    split: str | None = None,
    key: str | None = None,
    types: Mapping[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
    executor: Executor | None = None,
    on_error: ErrorPolicy = None,
    overwrite: bool = False,
    progress: bool = False,
    sync: bool = True,
) -> list[str]:
    """Write the rows of *source* as samples to shards named by *pattern*, and return the names of the shards.

    *source* is a shard expression that names files (parquet, csv, jsonl, or Squirrel's msgpack shards), a folder with a
    folder for each class, a folder written by ``save_to_disk`` of Hugging Face's datasets, the name of such a dataset
    with *split*, or a dataset object; *format*, one of FORMATS, selects the kind if the file names do not. The columns
    become fields as ``tarshards.formats.naming`` and ``arrow`` describe. Keys come from the column ``__key__``, or from
    the template *key* over ``file``, ``record`` (the row's number in the file, from 0) and the columns. *types* sets
    types of csv columns: ``text``, ``int``, ``float``, ``bool``, ``date`` or ``timestamp``. Any other column is text,
    unless another type reproduces all its cells with one way of writing them.

    The processes of *executor* (default: all cores) make each shard from about *max_bytes* of one file; row groups of
    parquet, compressed text and msgpack shards are not divided. Repeating a killed call keeps the shards that it has
    written if the input is unchanged; the bytes are the same for any executor. The manifest of the shards and the
    record of their columns, ``NAME.columns.json``, are written last. Raises OpenError if a shard exists, unless
    *overwrite*. With *progress*, stderr shows a bar.

    The first error of a row is raised, and names file and row; or it is passed to *on_error* ("skip", a ``Ledger`` or a
    function of the error), and only that row is left out. Raises ModuleNotFoundError, which names the extra to install,
    if the library for a format is missing.
    """
    max_bytes = whole_number("max_bytes", max_bytes, 1)
    ledger = Ledger.of(on_error)
    target = Location.of(pattern, sync=sync)
    target.compression()  # raises UrlError for a name of another format
    name = name_of(source)
    plan = plan_input(source, format, split, key, types, max_bytes)
    outputs = Outputs.named(target, len(plan.pieces))
    units = [_ImportedShard(piece, output, plan.key) for piece, output in zip(plan.pieces, outputs.targets)]
    with outputs.claimed(overwrite=overwrite):
        made = outputs.make(units, ledger, executor=executor, progress=progress)
        samples = sum(each["samples"] for each in made)
        ledger.count(samples=samples, streamed=samples)
        if not samples:
            outputs.discard()
            raise SampleError("no samples: no row became one", url=name)
        columns = _columns(plan, [each["fields"] for each in made], name)
        columns.save(target.at(record_url([output.url for output in outputs.targets])))
        outputs.finish((each["output"], each["samples"], each["size"]) for each in made)
    return [each["output"] for each in made]


def row_to_sample(row: Any) -> Sample:
    """Return the sample of a row of a map-style dataset, a dict of Python values, for ``write_dataset``.

    The values become fields as in ``import_dataset``; Pillow images become ``png``. Raises TypeError for a row that is
    not a dict: convert tuples to dicts with your own function.

    >>> row_to_sample({"__key__": "a", "caption": "hello", "cls": 7})
    {'__key__': 'a', 'caption.txt': b'hello', 'cls': b'7'}
    """
    if not isinstance(row, dict):
        raise TypeError(f"a row is a dict of columns, not {shortened(row)}")
    sample = sample_of(Naming(), row, "", "")
    return {name: value for name, value in sample.items() if value or not name.startswith("__")}


@dataclass(frozen=True)
class _ImportedShard:
    """A shard made from a piece of an input."""

    piece: Piece
    output: Location
    template: str
    is_file = True

    @property
    def identity(self) -> list[Any]:
        return [type(self.piece).__name__, self.template, *self.piece.identity]

    @property
    def inputs(self) -> list[str]:
        url = getattr(self.piece, "url", None)
        return [] if url is None else [url]

    def make(self, ledger: Ledger) -> dict[str, Any]:
        def reject(sample: Sample, error: TarshardsError) -> None:
            fail_rows(ledger, error.at(sample))

        naming = Naming()
        samples = self.piece.samples(naming, self.template, ledger)
        try:
            count, size = write_shard(samples, self.output, reject=reject)
        except TarshardsError as error:
            if error.url is not None:
                raise
            raise type(error)(error.reason, url=self.piece.name, key=error.key, field=error.field) from error
        return {"shard": self.output.recorded, "samples": count, "size": size, "fields": naming.fields}


def _columns(plan: Plan, found: Sequence[dict[str, str]], name: str) -> Columns:
    """Return the record of the import; raise SampleError if two columns became one field."""
    naming = Naming()
    for fields in found:
        for field, column in fields.items():
            if naming.fields.setdefault(field, column) != column:
                other = naming.fields[field]
                reason = f"the columns {other!r} and {column!r} both became {field}; rename one of them"
                raise SampleError(reason, url=name)
    order = list(plan.order or dict.fromkeys(naming.fields.values())) if plan.schema is None else plan.schema.names
    schema = None if plan.schema is None else plan.schema.serialize().to_pybytes()
    return Columns(naming.fields, order, schema, plan.omit)
