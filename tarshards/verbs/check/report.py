"""The findings of a check, for people and for programs."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, NamedTuple

from tarshards.errors import TarshardsError, visible
from tarshards.verbs.contents import Contents

# The most findings of a severity and kind, fields, and sets of fields that are kept; other findings are only counted.
SHOWN = 1000


class Finding(NamedTuple):
    """One fault; *url*, *offset* (bytes), *key* and *field* are None if they do not apply."""

    severity: Literal["error", "warning"]
    kind: str
    reason: str
    url: str | None = None
    offset: int | None = None
    key: str | None = None
    field: str | None = None

    def __str__(self) -> str:
        origin = {"url": self.url, "offset": self.offset, "key": self.key, "field": self.field}
        return f"{self.severity}: {TarshardsError(self.reason, **origin)}"  # type: ignore[arg-type]


class Report(Contents):
    """The findings of a check, and the contents of the shards.

    ``counts`` counts the findings by severity and kind; ``findings`` has the first SHOWN of each. ``samples`` counts
    whole samples, ``members`` their members, ``lost`` the other samples, ``joined`` the archives that follow another in
    their shard, ``skipped`` the members in no sample, by reason. ``damaged`` has, for each shard with a gap, the
    numbers of its samples and bytes; ``unread`` counts the shards that could not be opened or read to their end.
    ``unsure`` are the shards that may have lost more samples than ``lost`` counts, since no manifest says how many they
    had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.shards = self.bytes = self.members = self.lost = self.joined = self.unread = 0
        self.damaged: dict[str, dict[str, int | None]] = {}
        self.unsure: list[str] = []
        self.skipped: Counter[str] = Counter()

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it if it is one of the first SHOWN of its kind."""
        self.counts[finding.severity, finding.kind] += 1
        if self.counts[finding.severity, finding.kind] <= SHOWN:
            self.findings.append(finding)

    def add_error(self, kind: str, error: TarshardsError) -> None:
        """Count an error as a finding."""
        self.add(Finding("error", kind, error.reason, error.url, error.offset, error.key, error.field))

    def skip(self, reason: str) -> None:
        """Count a member that is in no sample."""
        self.skipped[reason] += 1

    def total(self, severity: str) -> int:
        """Return the number of findings of this *severity*: "error" or "warning"."""
        return sum(count for (of, _), count in self.counts.items() if of == severity)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dict of JSON's types."""
        return {
            "errors": self.total("error"),
            "warnings": self.total("warning"),
            "shards": self.shards,
            "joined": self.joined,
            "bytes": self.bytes,
            "samples": self.samples,
            "members": self.members,
            "lost": self.lost or (None if self.unsure else 0),
            "unsure": self.unsure,
            "unread": self.unread,
            "skipped": dict(sorted(self.skipped.items())),
            "fields": {
                name: {**sizes.as_json(), "missing": self.samples - sizes.samples}
                for name, sizes in sorted(self.fields.items())
            },
            "damaged": self.damaged,
            "counts": {kind: count for (_, kind), count in sorted(self.counts.items())},
            "findings": [finding._asdict() for finding in self.findings],
        }

    def listed(self, *severities: str) -> list[str]:
        """Return a line for each kept finding of these *severities*, then one for each kind that has more."""
        lines = [visible(str(finding)) for finding in self.findings if finding.severity in severities]
        for (severity, kind), count in sorted(self.counts.items()):
            if count > SHOWN and severity in severities:
                lines.append(f"{severity}: {count - SHOWN} more: {kind}")
        return lines

    def __str__(self) -> str:
        lines = self.listed("error", "warning")
        for name, counts in self.damaged.items():
            sizes = ", ".join(f"{count} {what}" for what, count in counts.items() if what not in ("samples", "lost"))
            known = (
                "an unknown number"
                if counts["lost"] is None
                else f"{counts['lost']}{' or more' * (name in self.unsure)}"
            )
            lines.append(f"{visible(name)}: {counts['samples']} samples are whole, {known} lost; bytes: {sizes}")
        lost = f"{self.lost} samples"
        if self.unsure:
            lost = f"{lost} or more" if self.lost else "an unknown number of samples"
        lines += [
            *([""] if lines else []),
            f"shards    {self.shards}",
            *([f"joined    {self.joined} archives to the first of their shard"] if self.joined else []),
            f"bytes     {self.bytes}",
            f"samples   {self.samples}",
            f"members   {self.members}",
            f"lost      {lost}",
            f"errors    {self.total('error')}",
            f"warnings  {self.total('warning')}",
        ]
        if self.fields:
            lines += ["", *self.table("bytes", "least", "mean", "most")]
        return "\n".join(lines)
