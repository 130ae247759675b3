"""The factor by which ``make soak`` multiplies property tests, kills and long schedules."""

import os

SOAK = int(os.environ.get("TARSHARDS_SOAK", "1"))
