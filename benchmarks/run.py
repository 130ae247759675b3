"""Run all benchmarks, or those of one name; this is the program behind `make bench`.

`make bench` runs the suite, the faults, the single programs and the report. `make bench ONLY=NAME` runs one of them:
core (the ratios that must not get worse; exit 1 if one falls short), smoke (a small, quick run of all but the single
programs that only checks), suite, faults, report, a task of the suite, or a single program. PEERS=a,b restricts the
suite to some peers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import faults
import figures
import report
import suite
from environments import all_peers

HERE = Path(__file__).parent
PROGRAMS = (
    "index",
    "dali",
    "check",
    "tools",
    "merge",
    "sort",
    "jobs",
    "shuffle",
    "planning",
    "remote",
    "start",
    "stages",
)
TASKS = {task for task, _ in suite.PARTS}


def smoke() -> None:
    """Run the suite and the faults on small sets, with the installed peers; exit 1 if a check fails."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        suite.main(smoke=True, root=root)
        faults.main(all_peers(), smoke=True)
        report.main(root, root / "RESULTS.md")
        print((root / "RESULTS.md").read_text())
        wrong = figures.wrong(root)
    raise SystemExit("\n".join(wrong) if wrong else 0)


def program(name: str) -> int:
    return subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode


def main(only: str, names: list[str]) -> None:
    """Run the benchmarks of this name; "" runs all."""
    if only == "smoke":
        smoke()
    if only == "core":
        raise SystemExit(program("core"))
    known = {"", "suite", "faults", "report", *TASKS, *PROGRAMS}
    if only not in known:
        raise SystemExit(f"no benchmark {only!r}; there are: core, smoke, {', '.join(sorted(known - {''}))}")
    if only in ("", "suite", *TASKS):
        suite.main([only] if only in TASKS else [], names)
    if only in ("", "faults"):
        faults.main([peer for peer in all_peers() if not names or peer.name in names])
    if only in ("", "suite", "faults", "report", *TASKS):
        report.main()
    failed = [name for name in PROGRAMS if only in ("", name) and program(name)]
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("only", nargs="?", default="", help="core, smoke, suite, faults, report, a task or a program")
    parser.add_argument("--peers", default="", help="of the suite only these, joined by commas")
    options = parser.parse_args()
    main(options.only, [name for name in options.peers.split(",") if name])
