"""How shards are opened: the options that all readers of shards share, as one value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from tarshards.errors import flag, shortened
from tarshards.samples.fields import FieldNames, lazy_fields
from tarshards.samples.grouping import OnDamage, check_reading, located, read_shard
from tarshards.samples.keys import KeyRule, Sample, Split, key_rule, split_name, split_of
from tarshards.samples.ledger import ErrorPolicy, Ledger
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location, are_remote
from tarshards.storage.manifest import ArchiveEnd, Shard, Shards
from tarshards.storage.remote import Remote, with_options


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How shards are opened.

    - *index*: read the shards through their indexes, which gives random access and planned epochs (True; every shard
      needs one), as streams, one after the other (False), or through indexes if all shards have one ("auto")
    - *index_dir*: the folder where `tarindex --index-dir` has put the indexes of shards beside which nothing can be
      written, with their columns and key indexes; None: beside the shards. With it, every shard needs an index
    - *fields*: the names of the fields to read, a list or words in one string; None reads all. A name that no sample of
      a shard has is an error: with an index when the shard is opened, else at the shard's end
    - *lazy*: the names of the fields whose bytes are not read: each is a ``MemberFile``, which seeks. They are among
      *fields*, and a name that no sample of a shard has is an error as there. Without an index the shards must be plain
      files, local or remote: neither pipes nor compressed
    - *on_error*: a function of the error, such as a ``Ledger``, which is called for a sample or a shard that cannot be
      read, and that is then left out; "skip" logs a warning of each, "raise" or None raises
    - *allow_pipe*: whether ``pipe:`` URLs may run their commands
    - *remote*: how shards of web servers and object stores are read; see ``Remote``
    - *max_ratio*: a member of more than 256 MiB must not be more than this many times as large as its compressed shard,
      or a sparse one as what is stored of it; None is 200. A decompression bomb would fill the memory

    The others are for shards that are read as streams; an index has the offsets of members:

    - *on_damage*: "end" ends a damaged shard at the damage; "resync" continues at the next sound header and requires
      *on_error*, which receives every gap and every sample that is not known to be complete. This reads the headers of
      a shard first, and copies anything but a plain local file to a temporary file
    - *split*: where the names of members are split into keys and fields: at the "first" or "last" dot of their base
      name, or as a function says. An index must have been made by the same rule, with `tarindex --split`. A function
      requires index=False or "auto", which then streams
    - *end*: "required" means that a shard must end in at least one block of zeros; "optional" accepts a shard that
      ends after any member, as one does whose writer was not closed
    - *concatenated*: whether shards may be concatenated archives, which are read as one; a manifest can say so, too.
      Zeros that overwrote members look like the end of an archive, so only with this option may members follow one

    Raises ValueError or TypeError for other values, and ValueError for combinations that are excluded here.
    """

    index: bool | Literal["auto"] = "auto"
    index_dir: str | os.PathLike[str] | None = None
    fields: str | Iterable[str] | None = None
    lazy: str | Iterable[str] | None = None
    on_error: ErrorPolicy = None
    on_damage: OnDamage = "end"
    split: KeyRule | Split = split_name
    end: ArchiveEnd = "required"
    concatenated: bool = False
    allow_pipe: bool = False
    remote: Remote | None = None
    max_ratio: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", FieldNames.of(self.fields))
        object.__setattr__(self, "lazy", lazy_fields(self.lazy, self.fields))
        if self.index not in (True, False, "auto"):
            raise ValueError(f'index must be True, False or "auto", not {self.index!r}')
        for name in ("allow_pipe", "concatenated"):
            flag(name, getattr(self, name))
        object.__setattr__(self, "split", key_rule(self.split))
        if self.index and self.index != "auto" and split_of(self.rule) is None:
            raise ValueError('split= requires index=False for a function: indexes are made with "first" or "last"')
        if self.remote is not None and not isinstance(self.remote, Remote):
            raise TypeError(f"remote must be a Remote, such as Remote(connections=32), not {shortened(self.remote)}")
        if self.index_dir is not None and not self.index:
            raise ValueError("index_dir= names the folder of indexes, and index=False reads none")
        remote = with_options(self.remote, max_ratio=self.max_ratio)
        object.__setattr__(self, "remote", remote)
        check_reading(self.on_error, self.on_damage, self.end, self.lazy_names)

    @property
    def names(self) -> FieldNames | None:
        """The names of the *fields*."""
        return cast("FieldNames | None", self.fields)

    @property
    def lazy_names(self) -> FieldNames | None:
        """The names of the *lazy* fields."""
        return cast("FieldNames | None", self.lazy)

    @property
    def rule(self) -> KeyRule:
        """The rule that *split* is, or names."""
        return cast(KeyRule, self.split)

    def find_shards(self, urls: Any) -> Shards:
        """Return the shards that *urls*, a shard expression, names, with the properties of these options."""
        marks = {"concatenated": self.concatenated, "allow_pipe": self.allow_pipe, "end": self.end}
        return find_shards(urls, self.remote, index_dir=self.index_dir, **marks)  # type: ignore[arg-type]

    def connect(self, spec: Any) -> None:
        """Open the connections for the first batch while *spec* is read, if it is a remote manifest."""
        if self.index and isinstance(spec, str) and spec.endswith(".json") and are_remote([spec]):
            from tarshards.index.fetch import connect

            location = Location.of(spec, self.remote)
            connect(location, location.remote.connections)

    def read(
        self, shards: Sequence[Shard], ledger: Ledger, processes: int = 1, draws: Iterable[int] | None = None
    ) -> Iterator[Sample]:
        """Yield the samples of *shards*, read as streams; *ledger* receives the errors.

        What is fetched ahead of remote ones shares the memory with as many *processes* on this host. *draws* gives each
        shard a number, which its samples have as ``__draw__``.
        """
        options: Any = {"on_damage": self.on_damage, "split": self.rule, "lazy": self.lazy_names}
        numbers = None if draws is None else iter(draws)
        for shard, location in located(shards, processes, ahead=self.lazy is None):
            samples = read_shard(shard, ledger=ledger, location=location, **options)
            if (names := self.names) is not None:
                samples = names.take(samples, location.name, ledger)
            yield from samples if numbers is None else _drawn(samples, next(numbers))


def _drawn(samples: Iterator[Sample], draw: int) -> Iterator[Sample]:
    for sample in samples:
        sample["__draw__"] = draw
        yield sample
