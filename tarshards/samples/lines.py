"""Read lines of text with their locations, and check the samples made from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader

from tarshards.errors import DecodeError, SampleError, TarshardsError
from tarshards.samples.keys import Sample, is_reserved, join_name
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard


def numbered_lines(url: str, *, allow_pipe: bool = False) -> Iterator[tuple[str, str]]:
    """Yield ``(location, line)`` for every line of *url*, decompressed; a location is like ``a.txt: line 7``."""
    name = Location.of(url).name
    with open_shard(url, allow_pipe=allow_pipe) as stream, BufferedReader(stream, 1 << 16) as lines:  # type: ignore[type-var]
        for number, line in enumerate(lines, 1):
            place = f"{name}: line {number}"
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise DecodeError("not UTF-8", url=place) from error
            yield place, text.removesuffix("\n")


@contextmanager
def located(place: str) -> Iterator[None]:
    """Prefix errors with *place*, the location of a line; a ValueError becomes a SampleError."""
    try:
        yield
    except TarshardsError as error:
        raise type(error)(str(error), url=place) from error
    except ValueError as error:
        raise SampleError(str(error), url=place) from error


def checked(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples; raise SampleError, with the location, for a duplicate key or one that does not read back."""
    keys: set[str] = set()
    for sample in samples:
        place, key = sample["__url__"], sample["__key__"]
        with located(place):
            fields = [field for field in sample if not is_reserved(field)]
            if not fields:
                raise SampleError("no field except the key", key=key)
            for field in fields:
                join_name(key, field)
            if key in keys:
                raise SampleError("this key occurred before", key=key)
        keys.add(key)
        yield sample
