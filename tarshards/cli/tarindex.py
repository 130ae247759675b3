"""Index shards for random access, planned epochs and other loaders."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tarshards.cli.input import ACCEPT, Losses, ShardArguments, leaves_out, takes_shards
from tarshards.cli.output import sync_option, waits_for_disk
from tarshards.cli.parameters import (
    FILE,
    allow_empty_option,
    as_values,
    dry_run_option,
    index_dir_option,
    parallel_option,
    quiet_option,
)
from tarshards.cli.program import say, shown, tool, usage_errors
from tarshards.cli.terminal import with_bar

if TYPE_CHECKING:
    from tarshards.index.manifests import Writing
    from tarshards.index.refresh import IndexOutcome
    from tarshards.storage.manifest import Shard

FORMATS = ["index", "dali", "tar.idx", "energon", "wids"]


class Indexing(NamedTuple):
    """What is done with each shard: it is indexed, or with *check* compared, or with *format_* exported to *output*."""

    parallel: int
    check: bool
    crc: bool
    format_: str
    output: str | None
    dry_run: bool

    @property
    def exports(self) -> bool:
        return self.format_ != "index"

    def outcomes(self, shards: list[Shard], how: Writing) -> Iterable[IndexOutcome]:
        """Do it, and yield the outcome for each of *shards*."""
        from tarshards.index import manifests, refresh

        if self.check:
            return refresh.verify_indexes(shards, jobs=self.parallel, crc=self.crc)
        if self.format_ in ("dali", "tar.idx"):
            return refresh.export_indexes(shards, self.format_, folder=self.output, jobs=self.parallel, how=how)
        how = manifests.Writing(dry_run=True) if self.format_ == "wids" else how
        return refresh.refresh_indexes(shards, jobs=self.parallel, crc=self.crc, how=how)


class Listing(NamedTuple):
    """Where the indexed shards are listed: in *manifest*, by default one per series; and whether by key, too."""

    manifest: str | None
    no_manifest: bool
    key_index: bool

    @property
    def is_asked_for(self) -> bool:
        return bool(self.manifest) or self.no_manifest

    def write(self, indexed: Indexed, shards: ShardArguments, indexing: Indexing, how: Writing) -> None:
        """Write the manifests of the shards, and their key indexes."""
        from tarshards.index.manifests import update_manifests
        from tarshards.storage.location import Location

        target = self.manifest or indexing.output
        for name in update_manifests(indexed.found, target, unchanged=indexed.unchanged, how=how):
            if how.dry_run:
                click.echo(shown(Location.of(name).name))
            if self.key_index:
                self._write_key_index(name, indexed.found, shards, indexing.parallel)

    def _write_key_index(self, name: str, found: list[Shard], shards: ShardArguments, parallel: int) -> None:
        from tarshards.index.key_index import build_key_index
        from tarshards.index.manifests import read_manifest
        from tarshards.parallel.process_pool import ProcessPool

        given = {shard.location().recorded: shard.url for shard in found}  # with their credentials
        own: dict[str, Any] = {"remote": shards.remote, "index_dir": shards.index_dir}
        listed = [shard._replace(url=given.get(shard.url, shard.url), **own) for shard in read_manifest(name)]
        with ProcessPool(parallel) if parallel > 1 else nullcontext() as pool:
            build_key_index(listed, executor=pool, sync=waits_for_disk())


class Added(NamedTuple):
    """The columns that are added to the indexes: an expression, and a table with the name of its keys."""

    columns: str | None
    attach: str | None
    key: str

    def check(self) -> None:
        """Refuse an expression that is not one of columns."""
        if self.columns is not None:
            from tarshards.index.columns import parse_columns

            with usage_errors("--columns"):
                parse_columns(self.columns)

    def write(self, shards: list[Shard], parallel: int, losses: Losses) -> None:
        """Add the columns to the indexed *shards*."""
        if self.columns is not None:
            from tarshards.index.columns import build_columns
            from tarshards.parallel.process_pool import ProcessPool

            ledger = losses.ledger if losses.goes_on else None
            with usage_errors("--columns"), ProcessPool(parallel) if parallel > 1 else nullcontext() as pool:
                build_columns(shards, self.columns, executor=pool, on_error=ledger, sync=waits_for_disk())
        if self.attach is not None:
            from tarshards.index.columns import attach_columns

            with usage_errors("--attach"):
                done = attach_columns(shards, self.attach, key=self.key, sync=waits_for_disk())
            if done.samples_without or done.rows_without:
                say(f"{done.samples_without} samples have no row, and {done.rows_without} rows no sample")


class Indexed(NamedTuple):
    """The shards that were indexed, the URLs of the *unchanged* ones, and how many *failed* or have *faults*."""

    found: list[Shard]
    unchanged: set[str]
    failed: int
    faults: int

    @classmethod
    def of(cls, outcomes: Iterable[IndexOutcome], losses: Losses, *, names: bool) -> Indexed:
        """Report *outcomes*, with *names* what would be written, and return their sum."""
        found, unchanged, failed, faults, warned = list[Any](), set[str](), 0, 0, False
        for outcome in outcomes:
            if outcome.error is not None and losses.goes_on:
                losses.ledger(outcome.error)
                continue
            if outcome.error is not None:
                say(str(outcome.error), failed=True)
                failed += 1
            elif names and outcome.written is not None:
                click.echo(shown(outcome.written))
            if outcome.faults and losses.goes_on:
                for fault in outcome.faults:
                    losses.ledger(fault)
            elif outcome.faults:
                say(f"{outcome.faults[0]}; samples marked in the index: {len(outcome.faults)}")
                faults += len(outcome.faults)
            if outcome.warning is not None and not warned:
                say(outcome.warning)
                warned = True
            losses.ledger.count(shards=1, samples=outcome.shard.samples or 0)
            found.append(outcome.shard)
            if outcome.unchanged:
                unchanged.add(outcome.shard.url)
        return cls(found, unchanged, failed, faults)


@tool(epilog="Reads headers only, unless --crc is given; holds one index for each job.")
@as_values(indexing=Indexing, listing=Listing, added=Added)
@click.argument("shards", nargs=-1, metavar="SHARDS...", type=FILE)
@index_dir_option
@parallel_option("Processes", 1)
@click.option("--check", is_flag=True, help="Only compare the indexes with their shards.")
@click.option("--crc", is_flag=True, help="Add checksums of the data, which are read whole.")
@click.option("--format", "format_", type=click.Choice(FORMATS), default="index", help="Export to another loader.")
@click.option("-o", "--output", type=FILE, metavar="FOLDER|FILE", help="Export into FOLDER; for wids, write FILE.")
@click.option("--manifest", type=FILE, help="Name exactly these shards in this manifest.")
@click.option("--no-manifest", is_flag=True, help="Write no manifest.")
@click.option(
    "--key-index", is_flag=True, help="Write the key index too: samples are found by key without their indexes."
)
@click.option(
    "--columns", metavar="EXPR", help='Add columns, "width height:jpg, length:txt, json.score", to filter by.'
)
@click.option("--attach", type=FILE, help="Add the columns of this parquet or csv table.")
@click.option("--key", default="__key__", metavar="NAME", help="The column of --attach that has the keys.")
@leaves_out
@sync_option
@allow_empty_option
@dry_run_option
@quiet_option
@takes_shards
def main(
    shards: ShardArguments,
    indexing: Indexing,
    listing: Listing,
    added: Added,
    losses: Losses,
    allow_empty: bool,
    quiet: bool,
) -> None:
    """Index SHARDS: write SHARD.index where it is missing or stale, and the manifest that lists all shards.

    SHARDS are shard expressions: train-{000..146}.tar, globs, @listfile, http: and other URLs, manifests.

    The manifest is named after the shards: train-000000.tar, train-000001.tar, ... are listed in train.shards.json. An
    existing manifest keeps its other shards.

    --columns writes SHARD.columns.parquet: the width and height of images, the length of texts, the duration of audio,
    the size of fields, and values in json. --where, and select() in Python, then need not read samples.

    --index-dir FOLDER is for shards on read-only mounts: indexes, columns, manifest and key index are written to
    FOLDER, where other tools find them with --index-dir, and Python with index_dir=.
    """
    if not shards.specs:
        raise click.UsageError("name SHARDS to index")
    _check(shards, indexing, listing, added)
    from tarshards.index import manifests

    how = manifests.Writing(indexing.dry_run, waits_for_disk())
    named = list({shard.url: shard for shard in shards.named()}.values())
    if shards.index_dir is not None:  # the manifest there names shards in other folders
        named = [shard._replace(url=shard.location().absolute().url) for shard in named]
    if indexing.format_ == "energon":
        from tarshards.index.energon import export_energon

        for name in export_energon(named, indexing.output, how):
            if how.dry_run:
                click.echo(shown(name))
        return
    outcomes = with_bar(indexing.outcomes(named, how), quiet, total=len(named), unit="shards")
    indexed = Indexed.of(outcomes, losses, names=how.dry_run and indexing.format_ != "wids")
    writes_manifest = indexing.format_ in ("index", "wids") and not indexing.check and not listing.no_manifest
    no_manifest_words = "; no manifest is written" if writes_manifest else ""
    if indexed.failed:
        say(f"{indexed.failed} of {len(named)} shards failed{no_manifest_words}")
        sys.exit(1)
    if not any(shard.samples for shard in indexed.found) and not (indexing.check or allow_empty):
        say(f"no samples in {len(named)} shard{'s' * (len(named) != 1)}{no_manifest_words}; {ACCEPT}")
        sys.exit(1)
    if writes_manifest:
        listing.write(indexed, shards, indexing, how)
    added.write(indexed.found, indexing.parallel, losses)
    if indexed.faults:
        sys.exit(1)


def _check(shards: ShardArguments, indexing: Indexing, listing: Listing, added: Added) -> None:
    """Refuse options that do not go together."""
    exports, check, dry_run = indexing.exports, indexing.check, indexing.dry_run
    if exports and (check or indexing.crc or listing.is_asked_for):
        raise click.UsageError("--check, --crc and the manifest options require --format index")
    if not exports and indexing.output is not None:
        raise click.UsageError("-o requires --format dali, tar.idx, energon or wids")
    if shards.split is not None and (check or exports):
        raise click.UsageError("--split is for indexes that are written, and they keep it")
    if check and (dry_run or listing.is_asked_for):
        raise click.UsageError("--check cannot be combined with --dry-run or the manifest options")
    if listing.manifest and listing.no_manifest:
        raise click.UsageError("--manifest cannot be combined with --no-manifest")
    if listing.key_index and (exports or check or dry_run or listing.no_manifest):
        raise click.UsageError("--key-index requires that indexes and a manifest are written")
    if (added.columns is not None or added.attach is not None) and (exports or check or dry_run):
        raise click.UsageError("columns cannot be combined with --check, --dry-run or --format")
    added.check()
