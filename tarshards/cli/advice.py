"""Where the documentation explains an error: a tool that fails ends with the address.

The pages in troubleshooting/ have a heading for each message, in which … stands for what differs. The text below a
heading, or below several in succession, begins with the classes of the errors that have the message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import escape
from importlib import metadata
from pathlib import Path

from tarshards.errors import TarshardsError

PAGES = Path(__file__).with_name("troubleshooting")


def headings() -> Iterator[tuple[str, str, str]]:
    """Yield the messages that have a heading, each with the name of its page and the classes of its errors."""
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for messages, kinds in re.findall(r"^((?:### `.+`\n)+)\n(`\w+Error`(?:, `\w+Error`)*): ", text, re.MULTILINE):
            for message in re.findall("`(.+)`", messages):
                yield path.stem, kinds, message


def anchor(message: str) -> str:
    """Return the anchor of the heading of a message, as Markdown makes it.

    >>> anchor("no file matches: there is no folder …")
    'no-file-matches-there-is-no-folder'
    """
    words = re.sub(r"[^\w\s-]", "", message.encode("ascii", "ignore").decode()).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def place_of(error: TarshardsError) -> str | None:
    """Return the page and the anchor of the heading that fits *error*: that with the longest text, None without any."""
    fitting = [
        (len(message), page, message)
        for page, kinds, message in headings()
        if any(f"`{kind.__name__}`" in kinds for kind in type(error).__mro__)
        and fnmatchcase(error.reason, escape(message).replace("…", "*"))
    ]
    if not fitting:
        return None
    _, page, message = max(fitting)
    return f"troubleshooting/{page}/#{anchor(message)}"


def address_of(error: TarshardsError) -> str | None:
    """Return the address at which the documentation explains *error*; None if no heading fits it.

    The site is the one that the installed package names; None without any, as in a checkout.
    """
    try:
        urls = metadata.metadata("tarshards").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    site = dict(url.split(", ", 1) for url in urls).get("Documentation")
    place = place_of(error) if site else None
    return f"{site.rstrip('/')}/{place}" if site and place else None
