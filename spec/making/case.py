"""A case: files, what is read of them, why it exists, and the outcomes that are right."""

from __future__ import annotations

from typing import Any, NamedTuple

from making.pieces import END, member, raw

Sample = dict[str, str]


class Outcome(NamedTuple):
    """Samples in their order, and the error after them, if any: its class, and where in the archive."""

    samples: list[Sample]
    error: dict[str, Any] | None


class Case(NamedTuple):
    name: str
    kind: str
    why: str
    files: dict[str, bytes]
    read: str
    outcomes: list[Outcome]


cases: dict[str, Case] = {}


def text(data: str | bytes) -> str:
    """Return bytes as expected.json has them: one character a byte, as in ISO 8859-1."""
    return raw(data).decode("latin-1")


def s(key: str, /, others: dict[str, str | bytes] | None = None, **fields: str | bytes) -> Sample:
    """Return a sample; *others* are fields whose names are no Python names."""
    return {"__key__": key, **{name: text(data) for name, data in {**fields, **(others or {})}.items()}}


def good(*samples: Sample) -> Outcome:
    return Outcome(list(samples), None)


def bad(cause: str, *samples: Sample, at: int | None = None) -> Outcome:
    """Return the outcome of an error of the class *cause* at the offset *at*, after *samples*."""
    return Outcome(list(samples), {"class": cause} if at is None else {"class": cause, "offset": at})


def case(
    kind: str,
    name: str,
    why: str,
    archive: bytes | dict[str, bytes],
    *outcomes: Outcome | Sample,
    read: str = "a.tar",
) -> None:
    """Add a case; samples as *outcomes* are those of the only outcome, all others besides the first are allowed too."""
    if name in cases:
        raise ValueError(f"two cases {name}")
    if not any(isinstance(outcome, Outcome) for outcome in outcomes):
        outcomes = (good(*outcomes),)  # type: ignore[arg-type]
    files = archive if isinstance(archive, dict) else {read: archive}
    cases[name] = Case(name, kind, why, files, read, list(outcomes))  # type: ignore[arg-type]


#: Two samples that many cases are made of.
A = member("a.txt", "one") + member("a.cls", "1")
B = member("b.txt", "two") + member("b.cls", "2")
AB = A + B
SA, SB = s("a", txt="one", cls="1"), s("b", txt="two", cls="2")
PLAIN = AB + END
LONG = "long/" + "n" * 120  # a key that needs an extended header
