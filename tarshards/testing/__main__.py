"""``python -m tarshards.testing``: each check as a command."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from tarshards.cli.program import Program

#: Command -> its module in this package, and its name there.
COMMANDS = {
    "conformance": "conformance:main",
    "resume": "loader_commands:resume",
    "epoch": "loader_commands:epoch",
    "shuffle": "loader_commands:shuffle",
}


class Commands(Program, click.Group):
    """A program whose first word is the command, imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        return getattr(import_module(f"tarshards.testing.{module}"), name)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


@click.command(cls=Commands)
def main() -> None:
    """Check a loader, a reader or a writer."""


if __name__ == "__main__":
    sys.argv[0] = "tarshards.testing"
    main()
