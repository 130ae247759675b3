"""Run the cases of the convention, `spec/cases`, over any reader of samples, and print the verdicts.

A reader is right if it delivers one of the case's outcomes. `spec/webdataset-tar.md` describes cases and outcomes, and
why some cases have several outcomes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tarshards.errors import visible
from tarshards.samples.keys import Sample

CASES = Path(__file__).parents[2] / "spec" / "cases"
LIMIT = 10  # seconds per case

#: The verdicts on a reader's output, from right to worst.
VERDICTS = ("same", "error", "silent loss", "wrong bytes", "crash", "hang")


class Allowed(NamedTuple):
    """An allowed output: *samples*, or an *error* after some or all of them."""

    samples: list[Sample]
    error: dict[str, Any] | None


class Case(NamedTuple):
    """A case: *expression* names the shards to read, and *why* gives the reason for the case."""

    name: str
    kind: str
    why: str
    expression: str
    outcomes: list[Allowed]


class ReaderOutput(NamedTuple):
    """The output of a reader for a case; *ending* is end, error, crash, hang or cannot."""

    samples: list[Sample]
    ending: str
    log: list[str]


class CaseResult(NamedTuple):
    """A case with its verdict (None if the reader does not support it), and the reader's last message."""

    case: Case
    verdict: str | None
    words: str


def load_cases(folder: Path = CASES) -> list[Case]:
    """Return the cases of a folder, by their names."""
    cases = []
    for path in sorted(folder.glob("*/expected.json")):
        expected = json.loads(path.read_text())
        outcomes = [Allowed(each["samples"], each.get("error")) for each in expected["outcomes"]]
        cases.append(
            Case(path.parent.name, expected["kind"], expected["why"], str(path.parent / expected["read"]), outcomes)
        )
    return cases


def examine(
    reader: str, cases: Sequence[Case], *, limit: int = LIMIT, python: str = sys.executable
) -> list[CaseResult]:
    """Return the results of *reader* for each case.

    *reader* is a function, `module:function`, which *python* imports and which returns the samples of an expression; or
    a command that gets the expression as its last argument and prints each sample as a line of JSON. Each case runs in
    a separate process, for *limit* seconds at most.

    Raises OSError if the reader cannot be imported.
    """
    worker = str(Path(__file__).with_name("conformance_worker.py"))
    lines = "".join(f"{json.dumps(case.expression)}\n" for case in cases)
    done = subprocess.run([python, worker, reader, str(limit)], input=lines, capture_output=True, text=True)
    deliveries = [ReaderOutput(**json.loads(line)) for line in done.stdout.splitlines()]
    if len(deliveries) != len(cases):
        raise OSError(f"{reader}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
    usual = {shape(line) for case, delivery in zip(cases, deliveries) if case.name == "plain" for line in delivery.log}
    return [CaseResult(case, *judge(case, delivery, usual)) for case, delivery in zip(cases, deliveries)]


def judge(case: Case, delivery: ReaderOutput, usual: Iterable[str] = ()) -> tuple[str | None, str]:
    """Return the verdict on a reader's output, and the reader's last message.

    A message also reports a fault, unless it is one of the *usual* ones, which the reader prints for a sound archive.
    """
    news = [line for line in delivery.log if shape(line) not in usual]
    words = (news or [""])[-1]
    if delivery.ending == "cannot":
        return None, words
    if delivery.ending in VERDICTS[-2:]:
        return delivery.ending, words
    verdicts = [compare(outcome, delivery, reported=bool(news)) for outcome in case.outcomes]
    return min(verdicts, key=VERDICTS.index), words


def compare(outcome: Allowed, delivery: ReaderOutput, *, reported: bool) -> str:
    """Return the verdict for one allowed outcome; *reported* says whether a message reports a fault.

    >>> one, two = {"__key__": "a", "txt": "1", "cls": "1"}, {"__key__": "b", "txt": "2"}
    >>> compare(Allowed([one, two], None), ReaderOutput([one], "end", []), reported=False)
    'silent loss'
    >>> compare(Allowed([one, two], None), ReaderOutput([{"__key__": "a", "txt": "1"}, two], "end", []), reported=False)
    'silent loss'
    >>> compare(Allowed([one], {"class": "archive"}), ReaderOutput([two], "error", []), reported=True)
    'wrong bytes'
    """
    expected, samples = outcome.samples, delivery.samples
    if any(sample.get("__key__") is None for sample in samples):  # the reader returns no keys
        expected, samples = without_keys(expected), without_keys(samples)
    failed = delivery.ending == "error"
    if outcome.error is None and samples == expected and not failed:
        return "same"
    left = [*expected]
    others = []
    for sample in samples:
        if sample in left:
            left.remove(sample)
        else:
            others.append(sample)
    if outcome.error is not None and not others and (failed or reported):
        return "same"
    if any(not is_part(sample, expected) for sample in others) or (not left and not others and samples != expected):
        return "wrong bytes"
    return "error" if failed or reported else "silent loss"


def without_keys(samples: list[Sample]) -> list[Sample]:
    return [{name: data for name, data in sample.items() if name != "__key__"} for sample in samples]


def is_part(sample: Sample, samples: list[Sample]) -> bool:
    """Return whether a sample is one of *samples* without some of its fields."""
    return any(sample.items() < each.items() for each in samples)


def shape(line: str) -> str:
    """Return a message without the parts that differ from run to run."""
    return re.sub(r"\S*/\S*|0x[0-9a-f]+|\d+", "0", line).strip()


def counts(results: Iterable[CaseResult]) -> list[int]:
    """Return the number of results with each verdict, and without one."""
    found = Counter(result.verdict for result in results)
    return [found[verdict] for verdict in (*VERDICTS, None)]


def table(results: list[CaseResult]) -> list[str]:
    """Return the lines of a table of verdicts by kind of case, and a line for each case that is not right."""
    kinds = {kind: [result for result in results if result.case.kind == kind] for kind in kinds_of(results)}
    lines = [f"{'':14}" + "".join(f"{verdict:>13}" for verdict in (*VERDICTS, "not read"))]
    for kind, some in {**kinds, "all": results}.items():
        lines.append(f"{kind:14}" + "".join(f"{count or '':>13}" for count in counts(some)))
    for result in results:
        if result.verdict not in ("same", None):
            lines += ["", f"{result.verdict}: {result.case.name}: {result.case.why}"]
            lines += [f"    {visible(result.words)[:200]}"] * bool(result.words)
    return lines


def kinds_of(results: list[CaseResult]) -> list[str]:
    return list(dict.fromkeys(result.case.kind for result in results))
