"""Examine readers with the cases of the convention, `spec/cases`, and write the results into docs/conformance.md.

`make bench ONLY=conformance` examines all readers in `readers/`, each in the environment of the peer of its name or in
a separate one; `make bench ONLY=conformance,NAME` examines one reader, and keeps the lines of the others.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from environments import READERS as FILES
from environments import make_for_reader
from measure import kept_lines, record

from tarshards import __version__
from tarshards.testing.conformance import VERDICTS, Case, CaseResult, counts, examine, kinds_of, load_cases

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "conformance.md"
TITLE = "What readers make of the cases"
WRONG = VERDICTS[2:]


@dataclass(frozen=True)
class Reader:
    """A line of the table: a function of a file in `readers/`, or of a package, with a description."""

    function: str
    about: str


READERS = {
    "tarshards": Reader("tarshards:read_samples", "`read_samples`"),
    "tarfile": Reader("tarfile_:read", "Python's `tarfile`, grouped by the rule"),
    "webdataset": Reader("webdataset_:read", "`WebDataset`"),
    "wids": Reader("webdataset_:read_by_wids", "`ShardListDataset`"),
    "datasets": Reader("datasets_:read", "the `webdataset` builder, streaming"),
    "torchdata": Reader("torchdata_:read", "datapipes, `load_from_tar().webdataset()`"),
    "dali": Reader("dali:read", "`fn.readers.webdataset`, without keys"),
    "energon": Reader("energon:read", "`energon prepare`, `CrudeWebdataset`"),
    "spdl": Reader("spdl_:read", "`iter_tarfile` of bytes, grouped by the rule"),
    "spdl-file": Reader("spdl_:read_file", "`iter_tarfile` of a file, grouped by the rule"),
    "ray": Reader("ray_:read", "`read_webdataset`, the work of a task"),
    "daft": Reader("daft_:read", "`read_webdataset`, the work of a task"),
}


def environment(reader: Reader) -> tuple[str, str]:
    """Return the Python for a reader, and the version of the examined package."""
    module = reader.function.partition(":")[0]
    if not (FILES / f"{module}.py").exists():
        return sys.executable, __version__
    python, packages = make_for_reader(module)
    if not packages:
        return python, f"Python {sys.version.split()[0]}"
    name = "wids" if reader.function.endswith("wids") else re.split("=|\\[", packages[0])[0]
    return python, next(package.partition("==")[2] for package in packages if package.startswith(name))


def row(name: str, version: str, results: list[CaseResult]) -> str:
    cells = [
        f"**{count}**" if count and verdict in WRONG else str(count or "")
        for verdict, count in zip((*VERDICTS, None), counts(results))
    ]
    about = READERS[name].about
    return f"| {name} | {version}: {about} | {' | '.join(cells)} | {time.strftime('%Y-%m-%d')} |"


def by_kind(name: str, results: list[CaseResult]) -> str:
    """Return the row of cases that were lost or changed silently, or ended in a crash or hang, by their kinds."""
    cells = []
    for kind in sorted(kinds_of(results)):
        some = [result for result in results if result.case.kind == kind and result.verdict is not None]
        bad = sum(result.verdict in WRONG for result in some)
        cells.append(f"**{bad}** of {len(some)}" if bad else "0" if some else "-")
    return f"| {name} | {' | '.join(cells)} |"


def details(name: str, results: list[CaseResult]) -> list[str]:
    lines = []
    for verdict in VERDICTS[1:]:
        if names := sorted(result.case.name for result in results if result.verdict == verdict):
            lines.append(f"- {name}, {verdict}: {', '.join(names)}")
    return lines


def page(cases: list[Case], found: dict[str, list[str]]) -> list[str]:
    """Return the section's lines; *found* has each reader's lines, of the table, by kinds, and of details."""
    kinds = sorted({case.kind for case in cases})
    return [
        f"{len(cases)} cases, {len(found)} readers. **same**: an outcome that the case allows. **error**: an error or "
        "a message, although the case allows samples. **silent loss**: a normal end, although samples, fields or an "
        "error are missing. **wrong bytes**: a sample that was never written, or that has other bytes or fields, or "
        "part of a sample where an error is required. **not read**: expressions, for readers that take only files. "
        "`make bench ONLY=conformance,NAME` repeats a line.",
        "",
        f"| name | version: reader | {' | '.join(VERDICTS)} | not read | date |",
        "|---" * (len(VERDICTS) + 4) + "|",
        *[lines[0] for lines in found.values()],
        "",
        "Silent losses, wrong bytes, crashes and hangs, by the kinds of cases:",
        "",
        f"| name | {' | '.join(kinds)} |",
        "|---" * (len(kinds) + 1) + "|",
        *[lines[1] for lines in found.values()],
        "",
        "<details><summary>The cases of each reader</summary>",
        "",
        *[line for lines in found.values() for line in lines[2:]],
        "",
        "</details>",
    ]


def kept() -> dict[str, list[str]]:
    """Return the lines of each reader that the page has."""
    return kept_lines(PAGE, TITLE, READERS, ",")


def main(names: list[str]) -> None:
    if unknown := {*names} - {*READERS}:
        raise SystemExit(f"no reader {', '.join(unknown)}; there are: {', '.join(READERS)}")
    cases, found = load_cases(), kept()
    os.chdir(HERE.parent)  # where no module has the name of a reader
    folders = [str(FILES), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    failed = []
    for name in names or READERS:
        try:
            python, version = environment(READERS[name])
            results = examine(READERS[name].function, cases, python=python)
        except OSError as error:
            failed.append(f"{name}: {error}")
            continue
        found[name] = [row(name, version, results), by_kind(name, results), *details(name, results)]
        record(TITLE, page(cases, {each: found[each] for each in READERS if each in found}), PAGE)
    raise SystemExit("\n".join(failed) or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
