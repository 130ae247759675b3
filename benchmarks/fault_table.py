"""The truth table of the report: one cell per fault and peer, and below it the details of each case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fault_cases import LIMIT, Outcome

STEP, STALL = 16, 60  # samples per step of a rank; seconds to wait for a stall
TITLES = {
    1: "truncated shard",
    2: "bad header",
    3: "bad gzip",
    4: "duplicate key: adjacent / apart",
    5: "interleaved members",
    6: "unreadable image",
    7: "reset over HTTP",
    8: "stall over HTTP",
    9: "wrong length over HTTP: too large / too small",
    10: "killed worker",
    11: "resume of 2 workers on 1 / on 3",
    12: "uneven shards, 2 ranks",
}
LEGEND = (
    "Each peer reads a few shards with one fault, with its default error handling; every sample delivered is compared "
    "with what was written. **said**: it raised an exception. **warned**: it continued and logged something that it "
    "does not log without the fault. **silent**: it ended normally. *lost* counts samples that were never delivered, "
    "*twice* samples delivered again, *altered* samples with wrong bytes or without a field. **all**: every sample "
    f"was delivered once, despite the fault. **hung**: no sample for {LIMIT} s ({STALL} s for a stall; the server "
    "stops sending on that connection, and serves later ones correctly). **died**: a signal ended the process. Column "
    f"12 shows the samples of the two ranks if they take different numbers of steps of {STEP}: a job with a "
    "collective in each step then hangs at its end. **-**: the fault cannot occur, or the peer fails without it, too; "
    "the reasons are below.",
)


def table(found: dict[str, Any], faults: Sequence[tuple[int, str]]) -> list[str]:
    """Return the lines of the table of results *found*; *faults* has the number and name of each form of a fault."""
    peers = sorted(found, key=lambda peer: (not peer.startswith("tarshards"), peer))
    outcomes = {(peer, name): Outcome(**told) for peer in peers for name, told in found[peer]["faults"].items()}
    page = [*LEGEND, ""]
    for numbers in range(1, 7), range(7, 13):
        page += ["| | " + " | ".join(f"{number} {TITLES[number]}" for number in numbers) + " |", "|---" * 7 + "|"]
        for peer in peers:
            forms = [[outcomes.get((peer, name)) for each, name in faults if each == number] for number in numbers]
            page.append(f"| {found[peer]['name']} | " + " | ".join(map(cell, forms)) + " |")
        page.append("")
    page += ["<details><summary>Details of each case</summary>", ""]
    page += ["| fault | peer | sound samples | lost | twice | altered | ending | words |", "|---" * 8 + "|"]
    for number, name in faults:
        for peer in peers:
            told = outcomes.get((peer, name))
            if told and told.ending != "cannot":
                counts = [f"{told.delivered} of {told.sound}", told.lost, told.duplicated, told.altered]
                row = [f"{number} {name}", found[peer]["name"], *counts, told.ending, words(told)]
                page.append("| " + " | ".join(map(str, row)) + " |")
    page += ["", "</details>", ""]
    cannot = []
    for peer in peers:
        reasons: dict[str, dict[int, None]] = {}
        for number, name in faults:
            if (told := outcomes.get((peer, name))) and told.ending == "cannot":
                reasons.setdefault(words(told), {})[number] = None
        parts = [f"{', '.join(map(str, numbers))}: {reason}" for reason, numbers in reasons.items()]
        cannot += [f"- {found[peer]['name']}: {'; '.join(parts)}"] * bool(parts)
    if not cannot:
        return page
    return [
        *page,
        "<details><summary>Cases that cannot occur, or that a peer does not support</summary>",
        "",
        *cannot,
        "",
        "</details>",
    ]


def words(outcome: Outcome) -> str:
    text = " ".join(outcome.words.split()).replace("|", "\\|").replace("<", "&lt;")
    text = re.sub(r"/\S*/(?=shard-|own\b)", "", text)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-75:]}"


def cell(forms: Sequence[Outcome | None]) -> str:
    """Return the cell of a fault; forms with different results are listed side by side."""
    return " / ".join(dict.fromkeys(verdict(form) for form in forms if form)) or "not run"


def verdict(outcome: Outcome) -> str:
    counts = {"lost": outcome.lost, "twice": outcome.duplicated, "altered": outcome.altered}
    if outcome.ending == "cannot":
        return "-"
    if outcome.ending in ("hung", "died"):
        return f"**{outcome.ending}**"
    if outcome.ending == "said":
        counts.pop("lost")  # it stopped there
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    steps = {-(-count // STEP) for count in outcome.ranks}
    if outcome.ending == "end" and len(steps) > 1:
        return f"**{', '.join([' + '.join(map(str, outcome.ranks)), *parts])}**"
    if outcome.ending == "end" and parts:
        return f"**silent, {', '.join(parts)}**"
    if outcome.ending == "end":
        return "all"
    return ", ".join([outcome.ending, *parts])
