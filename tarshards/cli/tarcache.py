"""Manage a cache of blocks of remote shards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from tarshards.cli.input import ShardArguments, all_specs
from tarshards.cli.parameters import FOLDER, cache_bytes_option, list_option, quiet_option, shards_argument
from tarshards.cli.program import say, tool, usage_errors
from tarshards.cli.terminal import with_bar
from tarshards.errors import visible

if TYPE_CHECKING:
    from tarshards.storage.cache import CacheFolder

folder_argument: Final = click.argument("folder", type=FOLDER)


@tool(
    "list|verify|warm|purge FOLDER...",
    epilog="FOLDER is that of Remote(cache_dir=FOLDER). Programs may use it meanwhile. Each VERB has its own --help.",
    example="tarcache warm /scratch/cache 'https://host/train-{000..146}.tar'",
)
def main() -> None:
    """Manage a cache of blocks of remote shards.

    list FOLDER prints its contents; verify FOLDER checks all checksums; warm FOLDER SHARDS fetches missing blocks;
    purge FOLDER removes blocks.
    """


def _opened(folder: str) -> CacheFolder:
    from tarshards.storage.cache import CacheFolder

    return CacheFolder.existing(folder)


def _say_foreign(cache: CacheFolder) -> None:
    if names := sorted(cache.foreign):
        also = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(f"{names[0]}{also}: not of this cache, so left as it is")


@main.verb("list")
@folder_argument
def list_blocks(folder: str) -> None:
    """Print the number of blocks of each URL, their bytes on the disk, and the sums.

    The columns are separated by tabs.
    """
    cache = _opened(folder)
    budget = cache.read_counts()["budget"]
    found: dict[str, tuple[int, int]] = {}
    for stored in cache.entries():
        url = "damaged" if stored.block is None else stored.block.url
        blocks, size = found.get(url, (0, 0))
        found[url] = blocks + 1, size + stored.bytes
    for url, (blocks, size) in sorted(found.items()):
        click.echo(f"{blocks}\t{size}\t{visible(url)}")
    blocks, size = (sum(column) for column in zip((0, 0), *found.values()))
    click.echo(f"{blocks}\t{size}\ttotal, of a budget of {budget}" if budget else f"{blocks}\t{size}\ttotal")
    _say_foreign(cache)


@main.verb("verify")
@folder_argument
def verify(folder: str) -> None:
    """Check the checksums of all blocks, and remove damaged ones, which are fetched again when needed.

    Exit code: 0 all are whole; 1 some were damaged.
    """
    cache = _opened(folder)
    blocks = damaged = 0
    for stored, is_whole in cache.verify():
        blocks += 1
        if not is_whole:
            damaged += 1
            of = "" if stored.block is None else f" of {stored.block.url}, offset {stored.block.offset}"
            say(f"{stored.path}: removed a damaged block{of}")
    _say_foreign(cache)
    click.echo(f"{blocks} blocks, {damaged} damaged")
    sys.exit(1 if damaged else 0)


@main.verb("warm")
@folder_argument
@shards_argument
@list_option
@cache_bytes_option
@quiet_option
def warm(folder: str, shards: tuple[str, ...], lists: tuple[str, ...], cache_bytes: int | None, quiet: bool) -> None:
    """Fetch all blocks of remote SHARDS that are not yet in the cache; make FOLDER if it does not exist."""
    from tarshards.storage.cache import BlockCache
    from tarshards.storage.opening import open_shard
    from tarshards.storage.remote import Remote
    from tarshards.storage.streams import PIECE

    specs = all_specs(shards, lists)
    if not specs:
        raise click.UsageError("name SHARDS, or a list of them with -T")
    with usage_errors("--cache-bytes"):
        remote = Remote(cache_dir=folder, cache_bytes=cache_bytes)
    locations = [shard.location() for shard in ShardArguments(specs, remote=remote).named()]
    for location in locations:
        if not location.is_remote:
            raise click.UsageError(f"{location.name} is not remote, so no block of it is cached")
    cache = BlockCache.of(remote)  # raises errors before anything is fetched
    assert cache is not None
    for location in with_bar(locations, quiet, total=len(locations), unit="shards"):
        with open_shard(location) as stream:
            while stream.read(PIECE):
                pass
    if cache.refused:
        say(f"not all blocks are stored: the budget of {cache.budget} bytes is used up; --cache-bytes sets it")


@main.verb("purge")
@folder_argument
@click.option("--url", metavar="PATTERN", help="Only blocks of these URLs, such as 'https://host/train-*.tar'.")
def purge(folder: str, url: str | None) -> None:
    """Remove the blocks of a cache, all or those of some URLs; other files in FOLDER stay."""
    cache = _opened(folder)
    blocks, size = cache.purge(url)
    _say_foreign(cache)
    click.echo(f"removed {blocks} blocks, {size} bytes")
