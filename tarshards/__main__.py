"""``python -m tarshards`` is the command ``tarshards``."""

import sys

from tarshards.cli.tarshards import main

if __name__ == "__main__":
    sys.argv[0] = "tarshards"
    main()
