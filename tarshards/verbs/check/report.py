"""What a check found, for people and for programs."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, NamedTuple

from tarshards.errors import TarshardsError
from tarshards.samples.lines import visible

SHOWN = 1000  # findings of a kind that are kept; of the others the number


class Finding(NamedTuple):
    """Something wrong; *url*, *offset* (bytes), *key* and *field* are None where it is of no single place."""

    severity: Literal["error", "warning"]
    kind: str
    reason: str
    url: str | None = None
    offset: int | None = None
    key: str | None = None
    field: str | None = None

    def __str__(self) -> str:
        place = {"url": self.url, "offset": self.offset, "key": self.key, "field": self.field}
        return f"{self.severity}: {TarshardsError(self.reason, **place)}"  # type: ignore[arg-type]


class FieldSizes:
    """How many samples have a field, and the bytes of its data."""

    def __init__(self) -> None:
        self.samples = self.bytes = self.least = self.most = 0

    def add(self, size: int) -> None:
        """Count one member."""
        self.least = min(self.least, size) if self.samples else size
        self.most = max(self.most, size)
        self.samples += 1
        self.bytes += size

    def extend(self, sizes: list[int]) -> None:
        """Count members, at least one."""
        self.least = min(self.least, min(sizes)) if self.samples else min(sizes)
        self.most = max(self.most, max(sizes))
        self.samples += len(sizes)
        self.bytes += sum(sizes)


class Report:
    """What a check found. *counts* are the findings by kind, of which *findings* holds the first SHOWN each.

    *samples* and *members* are those that are whole, *lost* the samples that are not; *damaged* holds for each shard
    with a gap what its bytes are.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.shards = self.bytes = self.samples = self.members = self.lost = 0
        self.damaged: dict[str, dict[str, int]] = {}
        self.skipped: Counter[str] = Counter()
        self.fields: dict[str, FieldSizes] = {}

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it if it is one of the first of its kind."""
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
        """How many errors, or warnings, there are."""
        return sum(count for (of, _), count in self.counts.items() if of == severity)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON's types."""
        sizes = {name: vars(sizes) for name, sizes in sorted(self.fields.items())}
        return {
            "errors": self.total("error"),
            "warnings": self.total("warning"),
            "shards": self.shards,
            "bytes": self.bytes,
            "samples": self.samples,
            "members": self.members,
            "lost": self.lost,
            "skipped": dict(sorted(self.skipped.items())),
            "fields": {name: {**values, "missing": self.samples - values["samples"]} for name, values in sizes.items()},
            "damaged": self.damaged,
            "counts": {kind: count for (_, kind), count in sorted(self.counts.items())},
            "findings": [finding._asdict() for finding in self.findings],
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("field", "samples", "missing", "bytes", "least", "mean", "most")]
        for name, sizes in sorted(self.fields.items()):
            mean = f"{sizes.bytes / sizes.samples:.1f}"
            numbers = sizes.samples, self.samples - sizes.samples, sizes.bytes, sizes.least, mean, sizes.most
            rows.append((visible(name), *(str(number) for number in numbers)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [visible(str(finding)) for finding in self.findings]
        for (severity, kind), count in sorted(self.counts.items()):
            if count > SHOWN:
                lines.append(f"{severity}: {count - SHOWN} more: {kind}")
        for name, account in self.damaged.items():
            parts = ", ".join(f"{count} {what}" for what, count in account.items() if what not in ("samples", "lost"))
            lines.append(
                f"{visible(name)}: {account['samples']} samples are whole, {account['lost']} lost; bytes: {parts}"
            )
        lines += [
            *([""] if lines else []),
            f"shards    {self.shards}",
            f"bytes     {self.bytes}",
            f"samples   {self.samples}",
            f"members   {self.members}",
            f"lost      {self.lost} samples",
            f"errors    {self.total('error')}",
            f"warnings  {self.total('warning')}",
        ]
        if self.fields:
            lines.append("")
        for row in rows if self.fields else []:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
            lines.append("  ".join(cells))
        return "\n".join(lines)
