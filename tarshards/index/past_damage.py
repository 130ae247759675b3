"""The index of a damaged shard, in memory: of the samples that a scan past its damage finds."""

from __future__ import annotations

import struct

from tarshards.index.members import ARRAYS, check_fields
from tarshards.index.sidecar import FORMATS, Fault, Index, fingerprint
from tarshards.samples.keys import key_rule
from tarshards.samples.resync.reading import ENDED, survey_file
from tarshards.samples.resync.walking import FoundSample, Gap, Zeros
from tarshards.storage.manifest import Shard
from tarshards.storage.opening import open_plain
from tarshards.tar.elsewhere import Step


def index_past_damage(shard: Shard) -> Index:
    """Return the index of all samples that are found in a damaged *shard*, in their order.

    Samples that are not known to be whole are its ``faults``, and bytes that are not valid members its ``gaps``. It is
    not to be saved: files of indexes have no gaps. Only headers are read; a remote shard is copied first. Raises
    OpenError if the shard cannot be read to its end, and ShardIndexError if it has too many fields.
    """
    split = shard.split or "first"
    with open_plain(shard) as file:
        found = survey_file(file, split=key_rule(split))
        if file.error is not None:
            raise file.error
        fields: dict[str, int] = {}
        entries: list[tuple[int, int, int, int]] = []  # as ARRAYS names them
        elsewhere: dict[int, list[Step]] = {}
        for number, sample in enumerate(found.samples):
            elsewhere |= {len(entries) + member: steps for member, steps in sample.elsewhere.items()}
            for name, start, end in sample.members:
                entries.append((number, fields.setdefault(name, len(fields)), start, end - start))
        check_fields(list(fields), found.url)
        columns = zip(*entries) if entries else [()] * len(ARRAYS)
        arrays = {name: struct.pack(f"<{len(entries)}{FORMATS[name][1]}", *each) for name, each in zip(ARRAYS, columns)}
        keys = [sample.key for sample in found.samples]
        # The end of the archive, behind which nothing may be appended, is not compared: that of the shard has no bytes.
        index = Index(found.size, fingerprint(file, arrays["offset"]), keys, list(fields), arrays, end=found.size)
    index.split = split
    index.elsewhere = elsewhere
    index.faults = {number: _fault(each) for number, each in enumerate(found.samples) if each.problem is not None}
    index.gaps = [
        item if isinstance(item, Gap) else Gap(*item, ENDED)
        for item in found.items
        if isinstance(item, Gap) or (isinstance(item, Zeros) and not shard.concatenated)
    ]
    return index


def _fault(sample: FoundSample) -> Fault:
    field, offset = sample.wrong or (None, sample.offset)
    return Fault(str(sample.problem), offset, field)
