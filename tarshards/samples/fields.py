"""Select fields of a sample: by name, by alternatives, or by a selection with new names."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from tarshards.errors import SampleError, did_you_mean, shortened
from tarshards.parallel.forks import cached_property
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.ledger import OnError


class Term(NamedTuple):
    """One word of a selection: the first of *alternatives* that a sample has, renamed to *name* (None: not renamed)."""

    name: str | None
    alternatives: list[str]

    @property
    def column(self) -> str:
        """The name of the field in a batch."""
        return self.name or self.alternatives[0]


def find_field(known: Container[str], alternatives: Iterable[str]) -> str | None:
    """Return the first of *alternatives* that is *known*, as written or in lower case, as readers name fields.

    >>> find_field({"jpg", "cls"}, ["PNG", "JPG"]), find_field({"jpeg"}, ["jpg"])
    ('jpg', None)
    """
    for name in alternatives:
        if name in known:
            return name
        if (lower := name.lower()) in known:
            return lower
    return None


def value_path(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the field of a value's name, and the path to the value if the field is JSON.

    >>> value_path("json.a.b"), value_path("seg.png")
    (('json', ('a', 'b')), ('seg.png', ()))
    """
    parts = name.split(".")
    end = next((i for i, part in enumerate(parts, 1) if part in ("json", "jsn")), len(parts))
    return ".".join(parts[:end]), tuple(parts[end:])


def value_at(value: Any, path: Iterable[str]) -> Any:
    """Return what a *path* leads to in the objects of a JSON value, None if it leads nowhere."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True)
class FieldNames:
    """The names of the fields to read, as alternatives; a sample gets every alternative that it has.

    >>> names = FieldNames.of("jpg;png cls")
    >>> "png" in names, "txt" in names
    (True, False)
    >>> names.check(["jpg", "txt"], "a.tar")
    Traceback (most recent call last):
    tarshards.errors.SampleError: a.tar: no sample has a field cls; the fields are jpg, txt
    """

    alternatives: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, fields: str | Iterable[str] | None) -> FieldNames | None:
        """Return the names of *fields*, a list or words in one string; None, which means all, stays None."""
        if fields is None:
            return None
        if isinstance(fields, Mapping | bytes) or not isinstance(fields, Iterable):
            cure = "; a dict of readers is for fields= of a loader" if isinstance(fields, Mapping) else ""
            raise TypeError(f"fields are names, in one string or a list, not {shortened(fields)}{cure}")
        words = fields.split() if isinstance(fields, str) else list(map(check_name, fields))
        if not words and isinstance(fields, str):
            raise ValueError("fields= names no field; None reads all, [] none")
        return cls(tuple(tuple(word.split(";")) for word in words))

    @cached_property
    def names(self) -> frozenset[str]:
        names = [name for alternatives in self.alternatives for name in alternatives]
        return frozenset(names + [name.lower() for name in names])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return map(";".join, self.alternatives)

    def lacking(self, known: Container[str]) -> tuple[str, ...] | None:
        """Return the first alternatives without a *known* name, None if all have one."""
        there = (find_field(known, each) is not None or any(map(is_reserved, each)) for each in self.alternatives)
        return next((each for each, found in zip(self.alternatives, there) if not found), None)

    def check(self, known: Collection[str], url: str) -> None:
        """Raise SampleError for a name that no sample of the shard *url* has; the samples have the fields *known*."""
        if known and (lacking := self.lacking(known)):
            hint = next(filter(None, (did_you_mean(name, known) for name in lacking)), "")
            reason = f"no sample has a field {' or '.join(lacking)}; the fields are {', '.join(sorted(known))}{hint}"
            raise SampleError(reason, url=url)

    def take(self, samples: Iterable[Sample], url: str, on_error: OnError) -> Iterator[Sample]:
        """Yield *samples* with only these fields; at the end *on_error* gets the error of ``check``."""
        known: set[str] = set()
        names, complete = self.names, False
        for sample in samples:
            if not complete:
                known.update(name for name in sample if not is_reserved(name))
                complete = self.lacking(known) is None
            yield {name: sample[name] for name in sample if name in names or is_reserved(name)}
        try:
            self.check(known, url)
        except SampleError as error:
            on_error(error)


def lazy_fields(
    lazy: str | Iterable[str] | None, fields: FieldNames | str | Iterable[str] | None = None
) -> FieldNames | None:
    """Return the names of *lazy* fields; raise ValueError for one that is not among the *fields* to read.

    >>> lazy_fields("mp4;webm wav")
    FieldNames(alternatives=(('mp4', 'webm'), ('wav',)))
    """
    if isinstance(lazy, str) and not lazy.split():
        raise ValueError("lazy= names no field; None reads all into memory")
    names, read = FieldNames.of(lazy), FieldNames.of(fields)
    if names is not None and read is not None:
        for each in names.alternatives:
            if read.names.isdisjoint(each):
                raise ValueError(f"lazy= names {' or '.join(each)}, which fields= leaves out")
    return names


def split_fields(fields: tuple[str, ...]) -> list[list[str]]:
    """Split words into alternatives; raise ValueError for an empty one.

    >>> split_fields(("jpg;png cls",))
    [['jpg', 'png'], ['cls']]
    """
    names = [name.split(";") for name in " ".join(map(check_name, fields)).split()]
    if not names:
        raise ValueError("no field is named")
    return names


def check_name(name: Any) -> str:
    """Return the name of a field; raise TypeError unless it is a str."""
    if not isinstance(name, str):
        raise TypeError(f'the name of a field is a str, such as "cls" or "jpg;png", not {shortened(name)}')
    return name


def check_mapping(fields: Any, caller: str, form: str) -> Mapping[Any, Any]:
    """Return a dict of fields; raise TypeError, which describes the argument of *caller*, for anything else."""
    if not isinstance(fields, Mapping):
        raise TypeError(f"{caller} takes a dict {form}, not {shortened(fields)}")
    return fields


def no_field(alternatives: Sequence[str], known: Iterable[str]) -> str:
    """Return a message with the field that a sample lacks, those that it has, and a suggestion.

    >>> no_field(["jpg", "PNG"], ["__key__", "cls", "png"])
    "no field jpg or PNG; the sample has cls, png; did you mean 'png'?"
    """
    return _no_field(tuple(alternatives), tuple(name for name in known if not is_reserved(name)))


@lru_cache(1024)  # many samples may lack the same field
def _no_field(alternatives: tuple[str, ...], known: tuple[str, ...]) -> str:
    hint = next(filter(None, (did_you_mean(name, known) for name in alternatives)), "")
    return f"no field {' or '.join(alternatives)}; the sample has {', '.join(known)}{hint}"


def pick_field(sample: Sample, alternatives: list[str]) -> str:
    """Return the first of *alternatives* that *sample* has, like ``find_field``; raise SampleError if it has none."""
    if (field := find_field(sample, alternatives)) is not None:
        return field
    raise SampleError(no_field(alternatives, sample)).at(sample)


def parse_terms(spec: str) -> list[Term]:
    """Parse ``new:old1;old2 keep *``; raise ValueError for a malformed word.

    >>> parse_terms("image:jpg;png *")
    [Term(name='image', alternatives=['jpg', 'png']), Term(name=None, alternatives=['*'])]
    """
    terms = []
    for word in check_name(spec).split():
        name, colon, old = word.rpartition(":")
        alternatives = old.split(";")
        if not all(alternatives) or (colon and not name) or ("*" in alternatives and word != "*"):
            raise ValueError(f"{word!r} in {spec!r} selects no field; write new:old1;old2, keep, or *")
        terms.append(Term(name or None, alternatives))
    if not terms:
        raise ValueError("an empty selection of fields")
    return terms


def apply_terms(sample: Sample, terms: list[Term]) -> Sample:
    """Return a new sample with the fields that *terms* select and all reserved names, such as ``__key__``."""
    picked = [(term.name, pick_field(sample, term.alternatives)) for term in terms if term.alternatives != ["*"]]
    taken = {field for _, field in picked}
    selected = {field: value for field, value in sample.items() if is_reserved(field)}
    names = [(name or field, field) for name, field in picked]
    if any(term.alternatives == ["*"] for term in terms):
        names += [(field, field) for field in sample if not is_reserved(field) and field not in taken]
    for name, field in names:
        if name in selected:
            raise SampleError(f"two fields would get the name {name}", field=name).at(sample)
        selected[name] = sample[field]
    return selected
