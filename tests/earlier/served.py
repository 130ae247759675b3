"""The data set of files.tar.gz as it is read: over HTTP with a cache, under one name whatever the port; as streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from range_server import Site, serving

from tarshards import Stream, mix
from tarshards.storage.remote import LEAST_CACHE, Remote

URL = "http://data.example/a.shards.json"


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Serve *folder* as http://data.example, by a proxy that stands for it."""
    with serving(folder) as server, pytest.MonkeyPatch.context() as patch:
        server.find = lambda path, login: urlsplit(path).path
        patch.setenv("http_proxy", server.url)
        for name in "no_proxy", "NO_PROXY":
            patch.delenv(name, raising=False)
        yield server


def remote(cache: str) -> Remote:
    return Remote(cache_dir=cache, cache_bytes=LEAST_CACHE)


def dataset(cache: str) -> Stream:
    return Stream.from_shards(URL, shuffle=True, seed=3, remote=remote(cache))


def in_steps(url: str) -> Stream:
    """A mixture whose weights change in steps, which earlier versions had to be asked for."""
    options = {"schedule": "steps"} if "schedule" in signature(mix).parameters else {}
    sets = {"a": Stream.from_shards(url, shuffle=True, seed=3), "b": Stream.from_shards(url, seed=3)}
    return mix(sets, weights={"a": {0: 1, 6: 0.25}, "b": 0.5}, seed=4, until=30, **options)


#: Streams whose states were saved after four samples; loaders/states.json holds those of loaders.
STREAMS: dict[str, Callable[[str], Stream]] = {
    "shuffled": lambda url: Stream.from_shards(url, shuffle=True, seed=3),
    "selected by a column": lambda url: Stream.from_shards(url, shuffle=True, seed=3).select("n > 1"),
    "mixed in steps": in_steps,
}

#: Lines whose first run ended early; FOLDER is in their environment.
TARPROC = """tarproc -q --resume -c 'test $TAR_KEY != 04 -o -e $FOLDER/cured && echo $TAR_KEY >>$FOLDER/ran' \\
    set/a-0.tar -o up.tar"""
TARJOB = "tarjob -q -s '{0..3}' -j 1 --name job --retries 0 -- 'test {} != 2 -o -e cured && echo {} >>items'"
