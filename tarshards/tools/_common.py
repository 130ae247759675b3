"""What every tool shares: its arguments, its manners on errors and closed pipes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from tarshards.errors import TarshardsError
from tarshards.ledger import Ledger

shards_argument = click.argument("shards", nargs=-1, metavar="[SHARDS]...")
count_option = click.option("-c", "--count", type=click.IntRange(min=0), help="Stop after this many samples.")
fields_option = click.option("-f", "--fields", help='Keep only these fields: "jpg;png cls" (";" = the first there is).')
output_option = click.option("-o", "--output", default="-", help="Write here rather than to stdout.")


def run(command: Callable[..., Any]) -> None:
    """Run a click command as a program.

    Exit codes: 0 done; 1 the data failed, with one line on stderr that names the place; 2 the command line is wrong;
    130 interrupted. Where the reader of our stdout has gone away the program ends quietly, killed by SIGPIPE.
    """
    try:
        sys.exit(command(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    except TarshardsError as error:
        click.echo(f"{os.path.basename(sys.argv[0])}: {error}", err=True)
        sys.exit(1)


def tell_of_skipped(ledger: Ledger) -> None:
    """Say on stderr which members were no part of a sample; directories are expected and not worth a word."""
    for reason, count in sorted(ledger.skipped.items()):
        if reason != "directory":
            click.echo(f"{os.path.basename(sys.argv[0])}: skipped {count} members: {reason}", err=True)


def no_tar_onto_a_terminal(target: str) -> None:
    """Refuse to write an archive to a terminal."""
    if target == "-" and sys.stdout.isatty():
        raise click.UsageError("stdout is a terminal: name a file with -o, or pipe it on")
