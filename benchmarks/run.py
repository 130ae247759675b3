"""Run all benchmarks, or those of one name; this is the program behind `make bench`.

`make bench` runs the suite, the faults, the single programs and the report. Any run but smoke then writes the tables of
docs/benchmarks.md, the charts of the README and the docs, and what the README and the docs quote, from RESULTS.md.
`make bench ONLY=NAME` runs one of them: core (the ratios that must not get worse; exit 1 if one falls short), smoke (a
small, quick run that only checks, of all but the single programs or of the tasks that are named, too), suite, tables
(the parts of the suite that docs/benchmarks.md shows, for the peers in them), faults, report, a task of the suite, a
part of it such as stream,raw-1m, a single program, or a part of one such as growth,tools; of several in quotes:
ONLY="stream cold".
PEERS=a,b restricts the suite to some peers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import chaos
import conformance
import faults
import figures
import growth
import quotes
import report
import resumes
import suite
import tables
from environments import all_peers, try_again

HERE = Path(__file__).parent
PROGRAMS = (
    "index",
    "dali",
    "gpu",
    "check",
    "tools",
    "merge",
    "sort",
    "jobs",
    "shuffle",
    "handover",
    "crops",
    "cores",
    "feeding",
    "engines",
    "planning",
    "packing",
    "tokens",
    "columns",
    "keys",
    "audio",
    "video",
    "remote",
    "wire",
    "resumes",
    "start",
    "stages",
    "formats",
    "cost",
    "view",
    "growth",
    "conformance",
    "chaos",
    "writers",
)
PROGRAM_PARTS = [f"growth,{part}" for part in growth.PARTS]
PROGRAM_PARTS += [f"conformance,{name}" for name in conformance.READERS]
PROGRAM_PARTS += [f"resumes,{name}" for name in resumes.PEERS]
PROGRAM_PARTS += [f"chaos,{name}" for name in chaos.LOADERS]
TASKS = {task for task, _ in suite.PARTS} | {f"{task},{name}" for task, name in suite.PARTS}


def smoke(only: set[str]) -> None:
    """Run the suite and the faults, or these tasks, on small sets with the installed peers; exit 1 if a check fails."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        suite.main([part for part in suite.PARTS if not only or part[0] in only], smoke=True, root=root)
        if not only or "faults" in only:
            faults.main(all_peers(), smoke=True)
        report.main(root, root / "RESULTS.md")
        print((root / "RESULTS.md").read_text())
        wrong = figures.wrong(root)
    raise SystemExit("\n".join(wrong) if wrong else 0)


def program(name: str) -> int:
    name, *parts = name.split(",")
    return subprocess.run([sys.executable, str(HERE / f"{name}.py"), *parts], check=False).returncode


def main(only: list[str], names: list[str]) -> None:
    """Run the benchmarks of these names; of none, all."""
    known = {"core", "smoke", "suite", "tables", "faults", "report", *TASKS, *PROGRAMS, *PROGRAM_PARTS}
    if unknown := sorted({*only} - known):
        raise SystemExit(f"no benchmark {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    try_again()
    if "smoke" in only:
        smoke({*only} - {"smoke"})
    parts = [part for part in suite.PARTS if not only or {"suite", part[0], ",".join(part)} & {*only}]
    if "tables" in only:
        parts, names = tables.parts(), names or [*figures.FORMS, *tables.peers()]
    if parts:
        suite.main(parts, names)
    if not only or "faults" in only:
        faults.main([peer for peer in all_peers() if not names or peer.name in names])
    if parts or {"report", "faults"} & {*only}:
        report.main()
    failed = [name for name in ("core", *PROGRAMS, *PROGRAM_PARTS) if name in (only or PROGRAMS) and program(name)]
    tables.main()
    quotes.main()
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("only", nargs="*", help="core, smoke, suite, tables, faults, report, tasks, parts, programs")
    parser.add_argument("--peers", default="", help="of the suite only these, joined by commas")
    options = parser.parse_args()
    main(options.only, [name for name in options.peers.split(",") if name])
