"""Index shards for random access, planned epochs and other loaders."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from tarshards.cli.input import ACCEPT, Losses, ShardArguments, leaves_out, shard_progress, takes_shards
from tarshards.cli.output import sync_option, waits_for_disk
from tarshards.cli.parameters import (
    FILE,
    allow_empty_option,
    dry_run_option,
    index_dir_option,
    parallel_option,
    quiet_option,
)
from tarshards.cli.program import say, shown, tool, usage_errors

if TYPE_CHECKING:
    from tarshards.storage.manifest import Shard

FORMATS = ["index", "dali", "tar.idx", "energon", "wids"]


@tool(epilog="Reads headers only, unless --crc is given; holds one index for each job.")
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
    parallel: int,
    check: bool,
    crc: bool,
    format_: str,
    output: str | None,
    manifest: str | None,
    no_manifest: bool,
    key_index: bool,
    columns: str | None,
    attach: str | None,
    key: str,
    losses: Losses,
    allow_empty: bool,
    dry_run: bool,
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
    exports, has_manifest = format_ != "index", manifest or no_manifest
    if exports and (check or crc or has_manifest):
        raise click.UsageError("--check, --crc and the manifest options require --format index")
    if not exports and output is not None:
        raise click.UsageError("-o requires --format dali, tar.idx, energon or wids")
    if shards.split is not None and (check or exports):
        raise click.UsageError("--split is for indexes that are written, and they keep it")
    if check and (dry_run or has_manifest):
        raise click.UsageError("--check cannot be combined with --dry-run or the manifest options")
    if manifest and no_manifest:
        raise click.UsageError("--manifest cannot be combined with --no-manifest")
    adds = columns is not None or attach is not None
    if key_index and (exports or check or dry_run or no_manifest):
        raise click.UsageError("--key-index requires that indexes and a manifest are written")
    if adds and (exports or check or dry_run):
        raise click.UsageError("columns cannot be combined with --check, --dry-run or --format")
    if columns is not None:
        from tarshards.index.columns import parse_columns

        with usage_errors("--columns"):
            parse_columns(columns)
    from tarshards.index import manifests, refresh
    from tarshards.storage.location import Location

    how = manifests.Writing(dry_run, waits_for_disk())
    named = list({shard.url: shard for shard in shards.named()}.values())
    if shards.index_dir is not None:  # the manifest there names shards in other folders
        named = [shard._replace(url=shard.location().absolute().url) for shard in named]
    if format_ == "energon":
        from tarshards.index.energon import export_energon

        for name in export_energon(named, output, how):
            if dry_run:
                click.echo(shown(name))
        return
    if check:
        outcomes = refresh.verify_indexes(named, jobs=parallel, crc=crc)
    elif format_ in ("dali", "tar.idx"):
        outcomes = refresh.export_indexes(named, format_, folder=output, jobs=parallel, how=how)
    else:
        indexing = manifests.Writing(dry_run=True) if format_ == "wids" else how
        outcomes = refresh.refresh_indexes(named, jobs=parallel, crc=crc, how=indexing)
    writes_manifest = format_ in ("index", "wids") and not check and not no_manifest
    found, unchanged, failed, faults, warned = [], set(), 0, 0, False
    for outcome in shard_progress(outcomes, len(named), quiet):
        if outcome.error is not None and losses.goes_on:
            losses.ledger(outcome.error)
            continue
        if outcome.error is not None:
            say(str(outcome.error))
            failed += 1
        elif dry_run and outcome.written is not None and format_ != "wids":
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
    no_manifest_words = "; no manifest is written" if writes_manifest else ""
    if failed:
        say(f"{failed} of {len(named)} shards failed{no_manifest_words}")
        sys.exit(1)
    if not any(shard.samples for shard in found) and not (check or allow_empty):
        say(f"no samples in {len(named)} shard{'s' * (len(named) != 1)}{no_manifest_words}; {ACCEPT}")
        sys.exit(1)
    if writes_manifest:
        target = manifest or output
        for name in manifests.update_manifests(found, target, unchanged=unchanged, how=how):
            if dry_run:
                click.echo(shown(Location.of(name).name))
            if key_index:
                from tarshards.index.key_index import build_key_index
                from tarshards.parallel.process_pool import ProcessPool

                given = {shard.location().recorded: shard.url for shard in found}  # with their credentials
                listed = [
                    shard._replace(
                        url=given.get(shard.url, shard.url), remote=shards.remote, index_dir=shards.index_dir
                    )
                    for shard in manifests.read_manifest(name)
                ]
                with ProcessPool(parallel) if parallel > 1 else nullcontext() as pool:
                    build_key_index(listed, executor=pool, sync=how.sync)
    if columns is not None:
        _add_columns(found, columns, parallel, losses)
    if attach is not None:
        from tarshards.index.columns import attach_columns

        with usage_errors("--attach"):
            done = attach_columns(found, attach, key=key, sync=how.sync)
        if done.samples_without or done.rows_without:
            say(f"{done.samples_without} samples have no row, and {done.rows_without} rows no sample")
    if faults:
        sys.exit(1)


def _add_columns(shards: list[Shard], columns: str, parallel: int, losses: Losses) -> None:
    from tarshards.index.columns import build_columns
    from tarshards.parallel.process_pool import ProcessPool

    ledger = losses.ledger if losses.goes_on else None
    with usage_errors("--columns"), ProcessPool(parallel) if parallel > 1 else nullcontext() as pool:
        build_columns(shards, columns, executor=pool, on_error=ledger, sync=waits_for_disk())
