"""How many times as much the tests of ``make soak`` try: property tests, kills and long schedules."""

import os

SOAK = int(os.environ.get("TARSHARDS_SOAK", "1"))
