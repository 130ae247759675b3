"""Manage a catalog of datasets."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final

import click

from tarshards.cli.conversion import named_splits
from tarshards.cli.output import writes_file
from tarshards.cli.parameters import FILE
from tarshards.cli.program import say, tool
from tarshards.errors import visible

if TYPE_CHECKING:
    from tarshards.formats.catalog import Catalog
    from tarshards.storage.location import Location

catalog_argument: Final = click.argument("name", metavar="CATALOG[#ENTRY]", type=FILE)


@tool(
    "add|ls|show|pin|verify CATALOG...",
    epilog="ENTRY is DATASET, DATASET@VERSION or DATASET@VERSION/SPLIT; all tools take CATALOG#ENTRY as SHARDS. "
    "Each VERB has its own --help.",
    example="tarcatalog add catalog.yaml imagenet@2 train=imagenet/train.shards.json val=imagenet/val.shards.json",
)
def main() -> None:
    """Manage a catalog: a YAML file that names the versions of datasets, and the shards of their splits.

    add CATALOG DATASET@VERSION SHARDS adds a version; ls CATALOG lists its entries; show CATALOG#ENTRY describes an
    entry; pin CATALOG pins entries written by hand; verify CATALOG compares datasets with their digests.
    """


def _opened(name: str) -> tuple[Catalog, str | None]:
    """Return the catalog that *name* begins with, and the entry after ``#``."""
    from tarshards.formats.catalog import Catalog

    file, mark, entry = name.rpartition("#")
    return (Catalog.load(file), entry) if mark else (Catalog.load(name), None)


@main.verb("add", epilog="SHARDS may be SPLIT=SHARDS, for several splits. The file is made if it does not exist.")
@writes_file(click.argument, "file", metavar="CATALOG", replaces=False)
@click.argument("entry", metavar="DATASET@VERSION")
@click.argument("shards", nargs=-1, metavar="SHARDS...", type=FILE)
@click.option("--card", type=FILE, help="The card of the dataset, as tarcard writes it.")
@click.option("--op", "ops", multiple=True, metavar="TEXT", help="An op on all samples: NAME, or NAME=JSON; repeat.")
def add(file: Location, entry: str, shards: tuple[str, ...], card: str | None, ops: tuple[str, ...]) -> None:
    """Add a version of a dataset to CATALOG, and pin it: its digests cover the manifests SHARDS.

    A version that exists is never edited. The file is rewritten, sorted, and without comments. Ops are methods of
    Stream that define the samples, such as --op 'decode="rgb8"'.
    """
    from tarshards.formats.catalog import Catalog

    if not shards:
        raise click.UsageError("name SHARDS, or SPLIT=SHARDS")
    parsed = []
    for op in ops:
        word, _, given = op.partition("=")
        try:
            parsed.append({word: json.loads(given) if given else None})
        except ValueError:
            raise click.UsageError(f"--op: {given} is not JSON; write NAME=JSON, such as 'decode=\"rgb8\"'") from None
    with Catalog.locked(file, create=True) as catalog:
        added = catalog.add(entry, named_splits(shards), card=card, ops=parsed)
        catalog.save()
    for split in sorted(added.splits):
        click.echo(f"{visible(f'{added.name}/{split}')}\t{added.splits[split].digest}")


@main.verb("ls")
@click.argument("name", metavar="CATALOG", type=FILE)
def list_entries(name: str) -> None:
    """Print a line for each split: its entry, format, digest or a dash, and shards, separated by tabs."""
    from tarshards.storage.expressions import spec_name

    catalog, entry = _opened(name)
    for each in catalog.entries(entry):
        version, split = catalog[each], catalog[each].splits[each.partition("/")[2]]
        shards = "::".join(spec_name(spec) for spec in split.shards)
        click.echo(f"{visible(each)}\t{version.format}\t{split.digest or '-'}\t{visible(shards)}")


@main.verb("show")
@catalog_argument
def show(name: str) -> None:
    """Describe the entries of a catalog: shards, samples and bytes by their manifests, digest, card and ops."""
    catalog, entry = _opened(name)
    for number, each in enumerate(catalog.entries(entry)):
        version = catalog[each]
        lines: dict[str, object] = {"entry": each, "format": version.format}
        if version.format == "tar":
            shards = catalog.shards(each)
            lines["shards"] = len(shards)
            for word, counts in (("samples", [s.samples for s in shards]), ("bytes", [s.size for s in shards])):
                if None not in counts:
                    lines[word] = sum(count or 0 for count in counts)
        lines["digest"] = version.splits[each.partition("/")[2]].digest or "-"
        if (card := catalog.card(version)) is not None:
            lines["card"] = card.name
        for key, value in version.metadata.items():
            lines[f"metadata {key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
        if version.ops:
            lines["ops"] = json.dumps(version.ops)
        words = (visible(f"{key}: {catalog.location.redacted(str(line))}") for key, line in lines.items())
        click.echo("\n" * bool(number) + "\n".join(words))


@main.verb("pin")
@writes_file(click.argument, "file", metavar="CATALOG[#ENTRY]", replaces=False)
def pin(file: Location) -> None:
    """Add and print the digests of the splits of a catalog that have none.

    A split that was pinned and has changed is an error.
    """
    from tarshards.formats.catalog import Catalog

    name, mark, entry = file.url.rpartition("#")
    with Catalog.locked(file.at(name) if mark else file) as catalog:
        pinned = catalog.pin(entry if mark else None)
        if pinned:
            catalog.save()
    for each in pinned:
        click.echo(f"{visible(each)}\t{catalog[each].splits[each.partition('/')[2]].digest}")


@main.verb("verify")
@catalog_argument
@click.option("--content", is_flag=True, help="Also read all shards, and compare their SHA-256.")
def verify(name: str, content: bool) -> None:
    """Compare the manifests of a catalog with its digests, and the sizes of all shards with the manifests.

    Exit code: 0 everything is as pinned; 1 something differs, is missing or is not pinned.
    """
    catalog, entry = _opened(name)
    wrong = 0
    for check in catalog.verify(entry, content=content):
        for fault in check.faults:
            say(fault if fault.startswith(check.entry) else f"{check.entry}: {fault}")
        if not check.pinned:
            say(f"{check.entry}: not pinned; pin it with `tarcatalog pin`")
        wrong += bool(check.faults) or not check.pinned
        faults = f"{len(check.faults)} fault{'s' * (len(check.faults) != 1)}"
        state = faults if check.faults else "as pinned" if check.pinned else "not pinned"
        click.echo(f"{visible(check.entry)}\t{check.shards}\t{check.samples}\t{check.bytes}\t{state}")
    sys.exit(1 if wrong else 0)
