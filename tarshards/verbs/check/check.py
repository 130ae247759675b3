"""Checks of single shards, and of the dataset that they form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

from tarshards.errors import SampleError, ShardIndexError, TarError, TarshardsError
from tarshards.samples.keys import REGROUP, USUAL, KeyRule, Split, dots_in_key, have_dots_in_key, key_rule, split_name
from tarshards.storage.manifest import Shard
from tarshards.storage.opening import PlainFile, open_plain
from tarshards.verbs.check.duplicates import KeyOrigins
from tarshards.verbs.check.header_scan import ScannedShard, scan_headers
from tarshards.verbs.check.report import SHOWN, Finding, Report
from tarshards.verbs.contents import FieldSizes

if TYPE_CHECKING:
    from tarshards.samples.resync.reading import Survey
    from tarshards.samples.resync.walking import FoundSample

OnSurvey = Callable[["PlainFile", "Survey"], object]

REPEATED = "members of this key are not adjacent, or the sample occurs twice"


def check_shards(
    shards: Iterable[Shard | str],
    *,
    decode: bool = False,
    jobs: int = 1,
    allow_empty: bool = False,
    on_survey: OnSurvey | None = None,
) -> Report:
    """Check shards, and the dataset that they form; return the report.

    A shard may consist of several archives if ``Shard.concatenated`` is set. A dataset without samples is an error
    unless *allow_empty*.

    Reads headers only; with *decode*, *jobs* threads also decode all fields except videos and those that can run code.
    Shards that are not plain local files are copied to a temporary file. Keys are compared within bounded memory; while
    a shard is checked, each of its samples takes about 550 bytes if the shard is damaged or at most 1 GiB. *on_survey*
    is called with each open shard and its judged survey, after the shard was checked; its exceptions propagate.
    """
    with KeyOrigins() as keys:
        check = _Check(keys, jobs if decode else 0, on_survey)
        for shard in map(Shard.of, shards):
            check.shard(shard)
        return check.finish(allow_empty)


class _Check:
    """The check of one dataset, shard after shard; *threads* threads decode the fields, or none if it is 0."""

    def __init__(self, keys: KeyOrigins, threads: int, on_survey: OnSurvey | None):
        self.report, self.keys, self.threads, self.on_survey = Report(), keys, threads, on_survey
        self.rule: KeyRule = split_name  # how names in the current shard are split into key and field
        self.names: list[str] = []
        self.forms: dict[frozenset[str], tuple[str, int, str]] = {}  # fields -> origin of the first sample
        self.odd_names: dict[str, tuple[int, str, int, str]] = {}  # oddity -> count, origin of the first
        self.indexed: dict[str, bool] = {}
        self.dotted: str | None = None  # the last shard with a warning about dots in keys

    def shard(self, shard: Shard) -> None:
        self.rule = key_rule(shard.split or "first")
        location = shard.location()
        name = location.name
        self.names.append(name)
        report = self.report
        report.shards += 1
        samples, lost, gaps = report.samples, report.lost, self._count_gaps()
        survey = walked = None
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open_plain(shard, location))
                report.bytes += file.size
                if self.on_survey is None:
                    walked = self._count_shard(file, name)
                else:
                    survey = self._survey(file, name)
                if file.error is not None:
                    raise file.error
                if not file.is_copy or location.is_remote:
                    self._check_index(shard, name, walked)
            except TarshardsError as error:
                report.add_error("read", error)
                report.unread += 1
            self._count_lost(shard, name, report.samples - samples, report.lost - lost, self._count_gaps() > gaps)
            if survey is not None and self.on_survey is not None:
                self.on_survey(file, survey)

    def _count_gaps(self) -> int:
        """Return the number of findings that hide samples."""
        return sum(self.report.counts["error", kind] for kind in ("damage", "zeros", "read"))

    def _count_lost(self, shard: Shard, name: str, samples: int, lost: int, has_gaps: bool) -> None:
        """Count the lost samples of a shard that were not found, if its manifest has their number."""
        report = self.report
        expected = shard.samples if self.rule is split_name else None
        if expected is not None and expected != samples + lost:
            reason = f"{samples + lost} samples, but {expected} in the manifest"
            report.add_error("samples", SampleError(reason, url=name))
        if expected is not None and expected >= samples + lost:
            report.lost += expected - samples - lost
            lost = expected - samples
        elif has_gaps:
            report.unsure.append(name)
        if name in report.damaged:
            report.damaged[name]["lost"] = lost or (None if name in report.unsure else 0)

    def _count_shard(self, file: PlainFile, name: str) -> Any:
        """Count the samples of a shard: by one scan of its headers if that is enough, else one by one.

        Returns the result of ``walk`` in the scan, or None if there was none.
        """
        scanned = None if self.threads else scan_headers(file, self.rule)
        if scanned is None:
            self._count_each(file, name)
            return None
        self._count_scanned(scanned, name)
        return scanned.walked

    def _survey(self, file: PlainFile, name: str) -> Survey:
        """Survey a shard for a repair, count its samples, and return the judged survey."""
        from tarshards.samples.resync.judging import judge
        from tarshards.samples.resync.reading import group_file
        from tarshards.samples.resync.walking import walk

        survey = group_file(file, split=self.rule, pieces=walk(file))
        # Judging finds keys whose members are not adjacent. Only a repair leaves their samples out: the check counts
        # them as duplicates, so an intact shard is judged afterwards.
        if survey.gaps:
            judge(survey.samples, survey.gaps, file)
        self._count_each(file, name, survey)
        if not survey.gaps:
            judge(survey.samples, survey.gaps, file)
        return survey

    def _count_each(self, file: PlainFile, name: str, survey: Survey | None = None) -> None:
        """Count the samples of any shard one by one."""
        from tarshards.verbs.check.inspection import decoded, misread_by_dali, whole_samples

        samples = whole_samples(file, self.report, survey, split=self.rule)
        for sample in decoded(samples, file, self.report, self.threads) if self.threads else samples:
            self._count(sample, name)
            if odd := misread_by_dali(sample):
                count, *first = self.odd_names.get(odd, (0, name, sample.offset, sample.key))
                self.odd_names[odd] = (count + 1, *first)  # type: ignore[assignment]

    def _count(self, sample: FoundSample, name: str) -> None:
        report = self.report
        report.samples += 1
        report.members += len(sample.members)
        for number, (field_, _, _) in enumerate(sample.members):
            if sizes := self._sizes_of(field_):
                sizes.add(sample.content_size(number))
        self.keys.add(sample.key, (len(self.names) - 1, sample.offset))
        if len(sample.members) > USUAL:
            self._look_for_dots(sample.fields, name, sample.offset, sample.key)
        if len(self.forms) < SHOWN:
            self.forms.setdefault(sample.fields, (name, sample.offset, sample.key))

    def _count_scanned(self, headers: ScannedShard, name: str) -> None:
        """Count the samples of a plain shard by its scanned headers."""
        report = self.report
        report.samples += len(headers.keys)
        report.members += sum(sizes.total() for sizes in headers.sizes)
        for field_, lengths in zip(headers.fields, headers.sizes):
            if sizes := self._sizes_of(field_):
                sizes.extend(lengths)
        self.keys.extend(headers.keys, len(self.names) - 1, headers.offsets)
        for fields, number in headers.first_of_each_form():
            if len(fields) > USUAL:
                self._look_for_dots(fields, name, headers.offsets[number], headers.keys[number])
            if len(self.forms) < SHOWN:
                self.forms.setdefault(fields, (name, headers.offsets[number], headers.keys[number]))

    def _look_for_dots(self, fields: frozenset[str], name: str, offset: int, key: str) -> None:
        """Warn, once per shard, if dots in keys have merged many samples into one."""
        if self.rule is split_name and self.dotted != name and have_dots_in_key(fields):
            self.dotted = name
            self.report.add(Finding("warning", "dots", dots_in_key(len(fields), min(fields)), name, offset, key))

    def _sizes_of(self, field_: str) -> FieldSizes | None:
        """Return the counts of a field; None if there are too many fields."""
        if field_ not in self.report.fields and len(self.report.fields) < SHOWN:
            self.report.fields[field_] = FieldSizes()
        return self.report.fields.get(field_)

    def _check_index(self, shard: Shard, name: str, walked: Any) -> None:
        from tarshards.index.inventory import has_ranges
        from tarshards.index.refresh import verify_index
        from tarshards.index.sidecar import MISSING, Index

        location, split = shard.location(), cast(Split, shard.split or "first")
        self.indexed[name] = True
        try:
            if location.is_local:
                verify_index(shard, walked=None if walked is None else (split, walked))
            else:  # comparing all headers would fetch them, or even whole shards, once more
                Index.load(location, check=has_ranges(location))
        except ShardIndexError as error:
            if error.reason == MISSING:
                self.indexed[name] = False
            else:
                self.report.add_error("index", error)
        except (TarError, SampleError):
            pass  # damage, which has been reported

    def finish(self, allow_empty: bool) -> Report:
        from heapq import nsmallest

        report = self.report
        if not (report.samples or report.total("error") or allow_empty):
            shards = f"{report.shards} shard{'s' * (report.shards != 1)}"
            report.add(Finding("error", "empty", f"no samples in {shards}"))
        for keys in nsmallest(SHOWN, self._counted(self.keys.duplicates()), key=lambda pair: pair[1][1]):
            self._report_duplicate(*keys)
        for name in sorted(report.fields):
            missing = report.samples - report.fields[name].samples
            if missing:
                first = next((origin for fields, origin in self.forms.items() if name not in fields), ())
                reason = f"{missing} of {report.samples} samples have no {name}"
                report.add(Finding("warning", "missing field", reason, *first))
        for odd, (count, *origin) in self.odd_names.items():
            report.add(Finding("warning", "DALI", f"DALI's own reader misreads {odd}; {count} samples", *origin))  # type: ignore[arg-type]
        for reason, count in sorted(report.skipped.items()):
            if reason != "directory":
                report.add(Finding("warning", "skipped", f"{count} members are in no sample: {reason}"))
        without = [name for name, indexed in self.indexed.items() if not indexed]
        if without and len(without) < len(self.indexed):
            reason = f"{len(without)} of {len(self.indexed)} shards have no index; create it with `tarindex`"
            report.add(Finding("warning", "index", reason, without[0]))
        return report

    def _counted(self, duplicates: Iterable[tuple[str, list[tuple[int, int]]]]) -> Iterator[Any]:
        for pair in duplicates:
            self.report.counts["error", "duplicate key"] += 1
            yield pair

    def _report_duplicate(self, key: str, origins: list[tuple[int, int]]) -> None:
        """Add the finding for a duplicate key that was counted before."""
        (first, begin), (shard, offset) = origins[:2]
        more = f", and in {len(origins) - 2} more places" if len(origins) > 2 else ""
        reason = REPEATED if first == shard else "this key is also in another shard"
        reason = f"{reason}: it is at offset {begin} of {self.names[first]}{more}"
        reason += f"; {REGROUP}" if first == shard else ""
        self.report.findings.append(Finding("error", "duplicate key", reason, self.names[shard], offset, key))
