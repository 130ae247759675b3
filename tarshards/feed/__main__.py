"""A process of `tarfeed serve -p`; it serves until its parent closes stdin."""

from __future__ import annotations

import json
import signal
import sys

from tarshards.errors import TarshardsError
from tarshards.feed.feeder import Feeder


def main() -> None:
    """Serve with the arguments of ``Feeder`` in JSON; exit with 1 after a TarshardsError."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        feeder = Feeder(**json.loads(sys.argv[1]))
    except TarshardsError as error:
        sys.exit(f"tarfeed: {error}")
    try:
        feeder.run(until_closed=0)
    finally:
        feeder.close()


if __name__ == "__main__":
    main()
