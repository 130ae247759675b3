"""Write `cases/`: tiny archives, byte by byte, and what every reader should deliver from them.

`python spec/make_cases.py` replaces the folder. The bytes are the same on every machine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from making import compressions, damage, dialects, elsewhere, headers, samples, writers
from making.case import Case, cases

CASES = Path(__file__).with_name("cases")
GROUPS = (
    *(dialects.dialects, dialects.extended, headers.numbers, headers.types, elsewhere.links, elsewhere.sparse),
    *(writers.writers, samples.keys, samples.fields, samples.expressions),
    *(damage.ends, damage.truncations, damage.faults, damage.concatenations, compressions.compressions),
)


def described(case: Case) -> dict[str, Any]:
    """Return what expected.json says."""
    outcomes = [{"samples": each.samples, **({"error": each.error} if each.error else {})} for each in case.outcomes]
    return {"kind": case.kind, "why": case.why, "read": case.read, "outcomes": outcomes}


def made() -> dict[str, Case]:
    if not cases:
        for group in GROUPS:
            group()
    return cases


def main() -> None:
    shutil.rmtree(CASES, ignore_errors=True)
    for case in made().values():
        for name, content in case.files.items():
            path = CASES / case.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        page = json.dumps(described(case), indent=1) + "\n"
        (CASES / case.name / "expected.json").write_text(page)


if __name__ == "__main__":
    main()
