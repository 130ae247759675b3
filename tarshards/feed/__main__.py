"""One of the processes of `tarfeed serve -p`: serves until stdin, which its parent holds, is closed."""

from __future__ import annotations

import json
import signal
import sys

from tarshards.errors import TarshardsError
from tarshards.feed.feeder import Feeder


def main() -> None:
    """Serve as the arguments of ``Feeder`` in JSON say; exit with 1 after an error of ours."""
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
