"""What a terminal shows besides plain text: colours, and progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TextIO

import click

Color = Literal["error", "warning", "key", "heading"]
CODES: dict[Color, str] = {"error": "1;31", "warning": "33", "key": "36", "heading": "1"}

_when = "auto"  # the value of --color, which also holds after the command is run, when its error is printed


def _set_colors(context: click.Context, parameter: click.Parameter, when: str) -> None:
    global _when
    _when = when


def color_option() -> click.Option:
    """Return the option --color, which holds for all that is shown after it is parsed."""
    return click.Option(
        ["--color"],
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        is_eager=True,
        expose_value=False,
        callback=_set_colors,
        help="Colours; auto: on a terminal, unless $NO_COLOR is set.",
    )


def has_colors(stream: TextIO) -> bool:
    """Return whether *stream* gets colours."""
    if _when != "auto":
        return _when == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colored(text: str, color: Color, stream: TextIO) -> str:
    """Return *text* for *stream*, in a colour if that has colours; *text* is made ``visible`` before."""
    return f"\x1b[{CODES[color]}m{text}\x1b[m" if has_colors(stream) else text


def above_bars() -> AbstractContextManager[Any]:
    """Return a context in which lines may be printed to stderr, above the bars that are shown."""
    module = sys.modules.get("tqdm")
    return nullcontext() if module is None else module.tqdm.external_write_mode(sys.stderr)


def log_above_bars() -> None:
    """Print the messages of the log to stderr, as Python does without any setting, but above the bars."""
    import logging

    class AboveBars(logging.StreamHandler[TextIO]):
        def emit(self, record: logging.LogRecord) -> None:
            with above_bars():
                super().emit(record)

    logging.basicConfig(format="%(message)s", handlers=[AboveBars(sys.stderr)])


def with_bar(
    items: Iterable[Any], quiet: bool, *, total: int | None = None, unit: str = "samples", phase: str | None = None
) -> Iterable[Any]:
    """Return *items*, and show a bar on stderr as they are taken, unless *quiet* or if that is no terminal.

    *total* is their number, if known, *unit* what they are called, and *phase* what the tool does with them. The rate
    of samples is shown in bytes too. The bar ends with the items, or with the command that is run: an error that ends
    it is printed below the bar.
    """
    if quiet or not sys.stderr.isatty():
        return items
    from tqdm import tqdm

    log_above_bars()
    taken = 0  # bytes

    class Bar(tqdm):
        @property
        def format_dict(self) -> dict[str, Any]:
            shown: dict[str, Any] = super().format_dict
            if taken and shown["elapsed"]:
                rate = taken / self.n * (shown["rate"] or self.n / shown["elapsed"])
                shown["postfix"] = self.format_sizeof(rate, "B/s")
            return shown

    bar = Bar(total=total, desc=phase, unit=f" {unit}")  # without the items, which must end where they are dropped
    context = click.get_current_context(silent=True)
    if context is not None:
        context.call_on_close(bar.close)

    def shown() -> Iterator[Any]:
        nonlocal taken
        with bar:
            for item in items:
                yield item
                bar.update()
                if isinstance(item, dict):
                    taken += sum(
                        len(data) for name, data in item.items() if name[:2] != "__" and isinstance(data, Sized)
                    )

    return shown()
