"""Shards that many tasks write, which may run twice or die before they end: each sample is in one shard.

Each task writes under its own names, in a folder beside the output, and reports the shards that it has written;
``ShardOutput.commit`` renames the reported shards and removes the rest.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from typing import Any, Literal, get_args
from uuid import uuid4

from tarshards.errors import OpenError, shortened
from tarshards.index.manifests import add_to_manifests, remove_manifest
from tarshards.samples.keys import Sample
from tarshards.storage.claims import Claims
from tarshards.storage.derived import forget
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard, series_url
from tarshards.write.shards import (
    MOST_BYTES,
    MOST_SAMPLES,
    ShardWriter,
    TarWriter,
    made_shard,
    name_leftovers,
    shard_name,
)

Mode = Literal["error", "append", "overwrite"]  # what to do with shards that exist


class ShardOutput:
    """Shards named by *pattern* that many tasks write; they appear when ``commit`` gets the reports of the tasks.

    With *mode* "error", they are numbered from 0, and OpenError is raised if one of them exists; "overwrite" replaces
    it. With "append" they get the first numbers that no shard has; jobs that append at the same time get different
    ones.

    *pattern*, *max_samples*, *max_bytes* and *sync* are as for ``ShardWriter``. Each task writes its own shards, so
    many are smaller than these limits. The output must be on a file system that all hosts share, or in an object store
    that can copy objects, because ``commit`` renames files.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        mode: Mode = "error",
        max_samples: int | None = MOST_SAMPLES,
        max_bytes: int | None = MOST_BYTES,
        sync: bool = True,
    ):
        if mode not in get_args(Mode):
            raise ValueError(f"mode= is one of {', '.join(get_args(Mode))}, not {shortened(mode)}")
        self.mode: Mode = mode
        self.limits: dict[str, Any] = {"max_samples": max_samples, "max_bytes": max_bytes, "sync": sync}
        ShardWriter(pattern, **self.limits).abort()  # raises for wrong arguments
        self.pattern: Location = Location.of(pattern, sync=sync).absolute()
        if not self.pattern.can_rename:
            raise OpenError(
                "files cannot be renamed here, which writing by several tasks requires", url=self.pattern.name
            )
        self.folder: str = f"{self.pattern.folder}.{uuid4().hex}.tasks/"
        if mode == "error":
            self._check_new([self._target(0)])

    def write(self, samples: Iterable[Sample]) -> list[Shard]:
        """Write *samples* to shards of this task; return the shards, for ``commit``."""
        own = self.pattern.at(f"{self.folder}{uuid4().hex}-{self.pattern.base}{self.pattern.query}")
        own.make_folder()
        shards = []

        def finish(name: str, writer: TarWriter) -> None:
            shards.append(made_shard(name, writer.samples, writer.size))

        with ShardWriter(own.url, **self.limits, on_finish=finish) as writer:
            for sample in samples:
                writer.write(sample)
        return shards

    def commit(self, written: Iterable[Iterable[Shard]]) -> list[Shard]:
        """Rename the shards that each task has *written*, in this order, and write their manifest; return the shards.

        Raises OpenError, before the first is renamed, if another writer has one of the names, or a shard may not be
        replaced.
        """
        shards = [shard for each in written for shard in each]
        with Claims() as claims:
            names = self._claimed(claims)
            targets = list(islice(names, len(shards)))
            if self.mode == "error":
                self._check_new(targets)
            if self.mode == "overwrite":
                remove_manifest(series_url(self._target(0).url))
            names = chain(targets, names)
            published = [self._publish(shard, names) for shard in shards]
            made = add_to_manifests(published, self.pattern)
        self.abort()
        if self.mode != "append":
            name_leftovers(self.pattern.url, len(made))
        return made

    def _claimed(self, claims: Claims) -> Iterator[Location]:
        """Yield the names of shards in their order, and claim each; to append, those that nobody has or has claimed."""
        for number in count():
            target = self._target(number)
            if self.mode == "append" and target.exists():
                continue
            try:
                claims.take(target)
            except OpenError as error:
                if self.mode == "append" and error.errno == errno.EBUSY:
                    continue
                raise
            yield target

    def _publish(self, shard: Shard, names: Iterator[Location]) -> Shard:
        """Rename *shard* to the next of *names*, to append, to the next that no other writer has used meanwhile."""
        source = self.pattern.at(shard.url)
        for output in names:
            if self.mode == "overwrite":
                forget(output)
            try:
                source.rename(output, replace=self.mode == "overwrite")
            except OpenError as error:
                if self.mode == "append" and error.errno == errno.EEXIST:
                    continue
                raise
            break
        if self.mode != "overwrite":
            forget(output)  # of a shard that is gone
        if shard.indexed:
            source.sibling(".index").rename(output.sibling(".index"))
        return shard._replace(url=output.url)

    @staticmethod
    def _check_new(targets: list[Location]) -> None:
        for target in targets:
            if target.exists():
                raise OpenError('the shard exists; mode="overwrite" replaces it', url=target.name, errno=errno.EEXIST)

    def _target(self, number: int) -> Location:
        return self.pattern.at(shard_name(self.pattern, number))

    def abort(self) -> None:
        """Remove the files of tasks that were not committed."""
        folder = Location(self.folder)
        if folder.path is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
            return
        for url in self.pattern.at(f"{self.folder}*").glob():
            self.pattern.at(url).remove()
