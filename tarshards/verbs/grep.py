"""Select samples: those that contain a pattern, meet a condition, repeat an earlier one, or have one of given keys."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from tarshards import kernels
from tarshards.errors import SampleError, TarshardsError
from tarshards.samples.codecs import encode_field
from tarshards.samples.codecs.basic import decode_text
from tarshards.samples.fields import find_field
from tarshards.samples.grouping import read_shard
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.ledger import ErrorPolicy, Ledger, Reject, error_handler, reject_or_raise
from tarshards.samples.lines import lacking_keys
from tarshards.storage.derived import COLUMNS
from tarshards.storage.expressions import Shard, find_shards
from tarshards.storage.manifest import Shards

if TYPE_CHECKING:
    from tarshards.index.access import SampleSequence
    from tarshards.samples.conditions import Condition

may_contain = kernels.tar.may_contain

META = frozenset(r".^$*+?{}[]\|()")  # characters with a special meaning in a regular expression


class Pattern:
    """A predicate: whether one of *patterns*, Python regular expressions, is found in a sample's fields.

    A field is searched as text if it is UTF-8, else as bytes; ``^`` and ``$`` match at each line. *fields* are the
    fields to search, as ``split_fields`` returns them: of alternatives, the first that the sample has is searched, and
    ``__key__`` is its key. By default all fields are searched. With *fixed*, patterns are literal text; with *words*,
    only whole words match. Raises ValueError for a malformed regular expression.

    ``missing`` counts, for each entry of *fields*, the samples that have none of its alternatives. ``text`` is literal
    bytes that every matching sample has in one of the fields; empty if none are known.

    >>> pattern = Pattern(["^cat"], ignore_case=True)
    >>> pattern({"__key__": "a", "txt": b"a dog\\nCats"}), pattern({"__key__": "cat", "txt": b"a cat"})
    (True, False)
    """

    def __init__(
        self,
        patterns: Iterable[str],
        *,
        fields: list[list[str]] | None = None,
        fixed: bool = False,
        words: bool = False,
        ignore_case: bool = False,
    ):
        self.fields = fields
        self.missing: Counter[str] = Counter()
        flags = re.MULTILINE | (re.IGNORECASE if ignore_case else 0)
        self._searches: list[tuple[Any, Any]] = []
        patterns = list(patterns)
        is_plain = len(patterns) == 1 and (fixed or not META.intersection(patterns[0]))
        self.text: bytes = patterns[0].encode(errors="replace") if is_plain and not ignore_case else b""
        for pattern in patterns:
            expression = re.escape(pattern) if fixed else pattern
            if words:
                expression = rf"(?<!\w)(?:{expression})(?!\w)"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # Python warns of [[:alpha:]], which it does not support
                    compiled = re.compile(expression, flags), re.compile(expression.encode(), flags)
            except (re.error, ValueError, Warning, OverflowError, RecursionError) as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            self._searches.append((compiled[0].search, compiled[1].search))

    def __call__(self, sample: Sample) -> bool:
        return any(map(self._is_in, _texts(sample, self.fields, self.missing)))

    def _is_in(self, data: bytes) -> bool:
        try:
            text = decode_text(data)
        except UnicodeDecodeError:
            return any(search(data) for _, search in self._searches)
        return any(search(text) for search, _ in self._searches)


def containing(samples: Iterable[Sample], pattern: Pattern, leave_out: Callable[[int], None]) -> Iterator[Sample]:
    """Yield the samples that may match, since they may contain the pattern's ``text``, or lack one of its fields.

    At the end, *leave_out* gets the number of the others.
    """
    left, text, fields = 0, pattern.text, pattern.fields
    if fields is not None:  # as ``find_field`` finds them
        fields = [[each for name in names for each in (name, name.lower())] for names in fields]
    for sample in samples:
        if may_contain(sample, text, fields):
            yield sample
        else:
            left += 1
    if left:
        leave_out(left)


class Duplicate:
    """A predicate: whether an earlier sample has the same fields with the same bytes; keys may differ.

    *fields* are the fields to compare, as in ``Pattern``; which of the alternatives a sample has does not matter. A
    sample that lacks one of the fields is not a duplicate, and is counted in ``missing``. Each sample takes about 100
    bytes of memory, for its 16-byte BLAKE2b hash.

    >>> duplicate = Duplicate([["jpg", "jpeg"]])
    >>> [duplicate(sample) for sample in ({"jpg": b"a"}, {"jpg": b"b"}, {"jpeg": b"a", "cls": b"7"}, {"cls": b"7"})]
    [False, False, True, False]
    """

    def __init__(self, fields: list[list[str]] | None = None):
        from hashlib import blake2b

        self.fields = fields
        self._hash = blake2b
        self.missing: Counter[str] = Counter()
        self._seen: set[bytes] = set()

    def __call__(self, sample: Sample) -> bool:
        hashed, lacking = self._hash(digest_size=16), self.missing.total()
        if self.fields is None:
            sample = dict(sorted(sample.items()))
            names = "\0".join(name for name in sample if not is_reserved(name)).encode(errors="surrogateescape")
            hashed.update(b"%d\0%b" % (len(names), names))
        for text in _texts(sample, self.fields, self.missing):
            hashed.update(b"%d\0" % len(text))  # "ab", "c" must differ from "a", "bc"
            hashed.update(text)
        if self.missing.total() > lacking:
            return False
        digest = hashed.digest()
        is_known = digest in self._seen
        self._seen.add(digest)
        return is_known


def _texts(sample: Sample, fields: list[list[str]] | None, missing: Counter[str]) -> Iterator[bytes]:
    """Yield the bytes of each of *fields*, or of all fields if None; count those that the sample lacks in *missing*."""
    if fields is None:
        yield from (encode_field(name, value) for name, value in sample.items() if not is_reserved(name))
        return
    for alternatives in fields:
        name = find_field(sample, alternatives)
        if name is None:
            missing[" or ".join(alternatives)] += 1
        elif is_reserved(name):
            yield str(sample[name]).encode(errors="surrogateescape")
        else:
            yield encode_field(name, sample[name])


def having(samples: Iterable[Sample], fields: list[list[str]]) -> Iterator[Sample]:
    """Yield the samples that have at least one alternative of each of *fields*.

    >>> list(having([{"jpg": b""}, {"png": b"", "cls": b"1"}], [["jpg", "png"], ["cls"]]))
    [{'png': b'', 'cls': b'1'}]
    """
    for sample in samples:
        if all(find_field(sample, alternatives) is not None for alternatives in fields):
            yield sample


def by_columns(
    urls: Any, condition: Condition, wanted: KeyFilter | None = None, *, on_error: ErrorPolicy = None
) -> Iterator[Sample] | None:
    """Return the *wanted* samples that meet a *condition* on columns.

    Returns None if the shards have no columns, or the condition names none of them. Raises ValueError if it names
    columns but headers are to be kept, since samples that are read by index have no headers.
    """
    shards = find_shards(urls)
    first = shards[0].location()
    if first.is_stream or not first.described.sibling(COLUMNS).is_taken():
        return None
    import numpy as np

    from tarshards.index.access import SampleSequence
    from tarshards.index.where import by_columns

    indexed, ledger = SampleSequence(shards), Ledger.of(on_error)
    among = None
    if wanted is not None:
        among = lambda: np.array([wanted({"__key__": key}) for key in indexed.shards.each_key()], np.bool_)  # noqa: E731
    found = by_columns(indexed, condition, among=among, on_error=ledger)
    if found is None:
        return None
    if shards[0].keep_headers:
        raise ValueError("samples found by columns are read without the headers that --keep-metadata needs")
    return read_numbers(indexed, found.nonzero()[0], ledger)


def read_numbers(indexed: SampleSequence, numbers: Any, ledger: Ledger) -> Iterator[Sample]:
    """Yield the samples with these ascending *numbers*; *ledger* counts them and receives the errors."""
    import numpy as np

    for result in indexed.read_numbers(np.asarray(numbers, np.int64)):
        if isinstance(result, dict):
            ledger.count(samples=1, members=len(result) - 2)
            yield result
        else:
            ledger(result)
    try:
        indexed.verify()
    except TarshardsError as error:
        ledger(error)
    else:
        ledger.count(shards=len(indexed.urls))


def matching(
    samples: Iterable[Sample],
    predicate: Callable[[Sample], bool],
    *,
    invert: bool = False,
    most: int | None = None,
    reject: Reject | None = None,
) -> Iterator[Sample]:
    """Yield at most *most* samples for which *predicate* holds, or with *invert* does not hold.

    An error of *predicate* is raised, or passed to *reject* with the sample.

    >>> list(matching([{"cls": 1}, {"cls": 2}], lambda sample: sample["cls"] == 1, invert=True))
    [{'cls': 2}]
    """

    def holds(sample: Sample) -> bool:
        try:
            return bool(predicate(sample)) != invert
        except TarshardsError as error:
            reject_or_raise(reject, sample, error)
            return False

    return islice(filter(holds, samples), most)


class KeyFilter:
    """A predicate: whether a sample has one of *keys*; ``lacking`` are the keys that no sample has had so far.

    >>> keys = KeyFilter(["a", "b"])
    >>> keys({"__key__": "a"}), keys({"__key__": "c"}), keys.lacking
    (True, False, {'b': None})
    """

    def __init__(self, keys: Iterable[str]):
        self.lacking: dict[str, Any | None] = dict.fromkeys(keys)
        self.keys: frozenset[str] = frozenset(self.lacking)

    def __call__(self, sample: Sample) -> bool:
        self.lacking.pop(sample["__key__"], None)
        return sample["__key__"] in self.keys

    def read(self, urls: Any, *, on_error: ErrorPolicy = None) -> Iterator[Sample]:
        """Yield the samples with these keys in the order of the shards *urls*.

        If all shards are indexed, only these samples are read. Raises SampleError at the end for keys that no sample
        has; other errors are as in ``read_samples``.
        """
        yield from filter(self, self.candidates(urls, on_error=on_error))
        self.check()

    def candidates(self, urls: Any, *, on_error: ErrorPolicy = None) -> Iterator[Sample]:
        """Yield the samples with these keys if all shards are indexed, otherwise all samples.

        Also yields all samples if their headers are to be kept.
        """
        from tarshards.index.inventory import has_index, has_ranges

        shards, ledger = find_shards(urls), Ledger.of(on_error)
        is_indexed = not shards[0].keep_headers and all(has_index(shards))
        if is_indexed and has_ranges(shards[0].location()):
            if (found := self._by_key_index(shards, ledger)) is not None:
                return found
            return chain.from_iterable(self._look_up(shard, ledger) for shard in shards)
        return chain.from_iterable(map(partial(read_shard, ledger=ledger), shards))

    def _by_key_index(self, shards: Shards, ledger: Ledger) -> Iterator[Sample] | None:
        """Return the samples with these keys, found in the key index of the shards; None if there is no key index."""
        from tarshards.index.access import SampleSequence
        from tarshards.index.key_index import key_index_location

        if not key_index_location(shards[0].location()).is_taken():
            return None
        indexed = SampleSequence(shards)
        if indexed.shards.key_index is None:
            return None
        return read_numbers(indexed, sorted(number for key in self.keys for number in indexed.places(key)), ledger)

    def _look_up(self, shard: Shard, ledger: Ledger) -> Iterator[Sample]:
        from tarshards.index.access import SampleSequence

        try:
            indexed = SampleSequence(Shards.of([shard]))
            indexed.shards.open(0)  # raises for a stale index, which may lack keys
            numbers = [number for number, key in enumerate(indexed.shards.each_key()) if key in self.keys]
        except TarshardsError as error:
            ledger(error)
            return
        yield from read_numbers(indexed, numbers, ledger)

    def check(self, on_error: ErrorPolicy = None) -> None:
        """Raise SampleError if no sample had some of the keys, or call *on_error* with an error for each such key."""
        handler = error_handler(on_error)
        if handler is not None:
            for key in self.lacking:
                handler(SampleError("no sample has this key", key=key))
        elif self.lacking:
            raise lacking_keys(self.lacking, len(self.keys))
