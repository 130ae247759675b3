"""States saved by an earlier release resume to the batches that it would have delivered.

``states.json`` holds states and the values of everything that followed in that epoch and the next: "saved" and "moved"
are of states of version 1, made by the releases that saved these; "linear" are of version 2; and "version 4" is what
this file writes again when it is run as a script.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, Stream, TarWriter, World, bucket, build_index, collate, mix, pack, readers
from tarshards.errors import StateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

STATES = Path(__file__).with_name("states.json")
STOPS = [0, 1, 4, 7]
STOP = 3  # of the states of version 2
SIZES = {"a": [13, 0, 30, 1, 12], "b": [9, 8], "plain": [7, 7, 7, 7, 7]}


def write_sets(folder: Path) -> dict[str, str]:
    """Write the data sets, "plain" without indexes; return their expressions."""
    urls = {}
    for number, (name, sizes) in enumerate(SIZES.items()):
        cls = 1000 * number
        for shard, size in enumerate(sizes):
            url = str(folder / f"{name}-{shard}.tar")
            with TarWriter(url) as writer:
                for _ in range(size):
                    writer.write({"__key__": f"{cls:06d}", "cls": cls})
                    cls += 1
            if name != "plain":
                build_index(url).save(url)
        urls[name] = str(folder / f"{name}-{{0..{len(sizes) - 1}}}.tar")
    return urls


def stream(urls, name="a", **options) -> Stream:
    return Stream.from_shards(urls[name], seed=5, **{"shuffle": True} | options)


def dataset(urls, name="a", rank=0, ranks=1, **options) -> ShardDataset:
    return ShardDataset(urls[name], seed=5, world=World(rank, ranks), **{"shuffle": True} | options)


def mixture(kind, urls, **options):
    return mix({name: kind(urls, name, **options) for name in "ab"}, weights={"a": 3, "b": 2}, seed=4, until=50)


def add_noise(batch, rng):
    return {**batch, "noise": rng.integers(1000, size=len(batch["cls"]))}


def arrays(data, size=6, **options) -> ArrayLoader:
    return ArrayLoader(data, size, fields={"cls": readers.integer()}, threads=2, transforms=[add_noise], **options)


def odd(sample) -> bool:
    return int(sample["cls"]) % 2 == 1


def schedule(kind, urls, **options):
    weights = {"a": {0: 1.0, 30: 0.2}, "b": 0.5}
    return mix({name: kind(urls, name, **options) for name in "ab"}, weights=weights, seed=4, until=40)


def steps(kind, urls, **options):
    weights = {"a": {0: 1.0, 12: 0.25, 30: 0}, "b": {0: 0.5, 20: "2/3"}}
    return mix({name: kind(urls, name, **options) for name in "ab"}, weights=weights, seed=4, until=40)


def streamed_steps(kind, urls, **options):
    weights = {"a": {0: 3, 15: 1}, "plain": {0: 0, 5: 0.1}}
    return mix({name: kind(urls, name, **options) for name in weights}, weights=weights, seed=4, until="last")


def streamed_mixture(kind, urls, **options):
    return mix({name: kind(urls, name, **options) for name in ("a", "plain")}, seed=4, until="last")


def lengths(name="a"):
    return [1 + number % 5 for number in range(sum(SIZES[name]))]


CASES: dict[str, Callable[[dict[str, str]], Any]] = {
    "stream": stream,
    "stream of a worker": lambda urls: stream(urls, world=World(1, 2, 1, 2), tail="pad", pool=300),
    "stream in storage order": lambda urls: stream(urls, shuffle=False).filter(odd).batched(3),
    "stream that holds samples": lambda urls: stream(urls).shuffle(10),
    "stream without index": lambda urls: stream(urls, "plain").decode(),
    "mixed stream": lambda urls: mixture(stream, urls),
    "ShardLoader": lambda urls: ShardLoader(dataset(urls), 5),
    "ShardLoader with workers": lambda urls: ShardLoader(dataset(urls).filter(odd), 5, num_workers=2),
    "ShardLoader of rank 1 of 3": lambda urls: ShardLoader(dataset(urls, rank=1, ranks=3, tail="drop", pool=300), 2),
    "ShardLoader in storage order": lambda urls: ShardLoader(dataset(urls, rank=1, ranks=2, shuffle=False), 3),
    "ShardLoader without index": lambda urls: ShardLoader(dataset(urls, "plain"), 4, num_workers=2),
    "ShardLoader of a mixture": lambda urls: ShardLoader(mixture(dataset, urls, rank=1, ranks=2), 3),
    "ArrayLoader": lambda urls: arrays(stream(urls)),
    "ArrayLoader without index": lambda urls: arrays(stream(urls, "plain"), 4),
    "ArrayLoader of a mixture": lambda urls: arrays(mixture(stream, urls)),
    "stream of a selection": lambda urls: stream(urls).select(odd),
    "stream that repeats": lambda urls: stream(urls, "b").repeat(2),
    "stream of drawn samples": lambda urls: stream(urls, resample=True),
    "streamed mixture": lambda urls: streamed_mixture(stream, urls),
    "ShardLoader of a selection": lambda urls: ShardLoader(dataset(urls).select(odd), 4),
    "ShardLoader that fills": lambda urls: ShardLoader(dataset(urls).filter(odd), 5, fill=True),
    "ShardLoader of bins": lambda urls: ShardLoader(
        dataset(urls), 2, packing=pack(lengths(), 8, window=20), collate_fn=collate
    ),
    "ShardLoader with blocks": lambda urls: ShardLoader(dataset(urls, block=4, pool=300), 5),
    "ShardLoader of a streamed mixture": lambda urls: ShardLoader(streamed_mixture(dataset, urls), 4),
    "ArrayLoader of bins": lambda urls: arrays(stream(urls), 2, packing=bucket(lengths(), budget=12)),
    "ArrayLoader of a streamed mixture": lambda urls: arrays(streamed_mixture(stream, urls), 4),
}

#: Cases of version 2 alone.
LATER: dict[str, Callable[[dict[str, str]], Any]] = {
    "mixed stream in steps": lambda urls: steps(stream, urls),
    "ShardLoader of a mixture in steps": lambda urls: ShardLoader(steps(dataset, urls, rank=1, ranks=2), 3),
    "ArrayLoader of a mixture in steps": lambda urls: arrays(steps(stream, urls)),
    "stream of streams in steps": lambda urls: streamed_steps(stream, urls),
    "ShardLoader of streams in steps": lambda urls: ShardLoader(streamed_steps(dataset, urls), 4, num_workers=2),
}

#: States of mixtures whose weights followed a line, of version 1 and 2.
LINEAR = ["mixed stream by a schedule", "ShardLoader of a schedule"]

#: Cases in which an epoch has the order that it had in version 1, for no blocks are permuted, or those asked for.
SAME_ORDER = {
    "stream in storage order",
    "stream of drawn samples",
    "ShardLoader in storage order",
    "ShardLoader with blocks",
}

#: Cases that resume the states of another: on other ranks, workers and batch sizes.
MOVED: dict[str, tuple[str, Callable[[dict[str, str]], Any]]] = {
    "five ranks, unlike lanes": ("ShardLoader", lambda urls: ShardLoader(dataset(urls, rank=3, ranks=5), 3)),
    "workers": ("ShardLoader", lambda urls: ShardLoader(dataset(urls), 3, num_workers=2)),
    "arrays": ("ShardLoader", lambda urls: arrays(stream(urls))),
    "a mixture on more ranks": (
        "ArrayLoader of a mixture",
        lambda urls: ShardLoader(mixture(dataset, urls, rank=2, ranks=3), 3),
    ),
}


def values(delivered: Any) -> list[Any]:
    """The numbers of a sample or batch, for JSON; an empty batch has none."""
    found = [delivered[field] for field in ("cls", "noise") if field in delivered]
    return [int(value) if isinstance(value, bytes | int) else [int(one) for one in value] for value in found]


def rest(loader: Any) -> list[Any]:
    """Everything that is left of the epoch, and the next one."""
    return [[values(delivered) for delivered in loader] for _ in range(2)]


def save(make: Callable[[dict[str, str]], Any], urls: dict[str, str], stop: int) -> tuple[Any, Any]:
    """Return the state after *stop* deliveries of the second epoch, and the later deliveries."""
    loader = make(urls)
    loader.set_epoch(1)
    iterator = iter(loader)
    for _ in islice(iterator, stop):
        pass
    state = loader.state_dict()
    del iterator
    fresh = make(urls)
    fresh.load_state_dict(state)
    return state, rest(fresh)


def without_batches(state: Any) -> Any:
    """A loader's state as it was before it counted the batches of its epoch."""
    return {name: value for name, value in json.loads(json.dumps(state)).items() if name != "batches"}


def write_states() -> dict[str, Any]:
    """Return the content of the file, with the states that the package saves now."""
    saved = json.loads(STATES.read_text())
    with tempfile.TemporaryDirectory() as folder:
        urls = write_sets(Path(folder))
        now = {name: save(make, urls, STOP) for name, make in (CASES | LATER).items()}
    saved["version 4"] = {name: each for name, each in now.items() if each[0]["version"] == 4}
    for state, _ in saved["version 4"].values():
        state.pop("keys", None)
    return saved


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> dict[str, str]:
    return write_sets(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    return json.loads(STATES.read_text())


@pytest.fixture(scope="module")
def begun_anew(urls) -> Callable[[str, int], list[Any]]:
    """Return a function that returns an epoch of a loader that has loaded no state."""

    @cache
    def epoch_of(name: str, epoch: int) -> list[Any]:
        loader = CASES[name](urls)
        loader.set_epoch(epoch)
        return [values(delivered) for delivered in loader]

    return epoch_of


@pytest.mark.parametrize("stop", range(len(STOPS)))
@pytest.mark.parametrize("name", CASES)
def test_saved_states_resume_to_the_same_batches(urls, states, begun_anew, name, stop):
    state, (left, following) = states["saved"][name][stop]
    loader = CASES[name](urls)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    now = begun_anew(name, state["epoch"] + 1)
    assert rest(loader) == [left, now]
    assert (now == following) == (name in SAME_ORDER)


@pytest.mark.parametrize("name", MOVED)
def test_saved_states_resume_on_other_ranks_and_workers(urls, states, name):
    origin, make = MOVED[name]
    loader = make(urls)
    loader.load_state_dict(states["saved"][origin][1][0])
    for _ in islice(loader, 2):
        pass
    state, (left, _) = states["moved"][name]
    assert without_batches(loader.state_dict()) == state
    resumed = make(urls)
    resumed.load_state_dict(state)
    assert rest(resumed)[0] == left


@pytest.mark.parametrize("name", [*CASES, *LATER])
def test_states_are_saved_as_they_were(urls, states, name):
    state, following = save((CASES | LATER)[name], urls, STOP)
    assert ("keys" in state) == ("delivered" in state), "later states that are replayed have a digest of the keys"
    state.pop("keys", None)
    of_all = states["version 2"] | states["version 3"] | states["version 4"]
    assert json.loads(json.dumps([state, following])) == of_all[name]


@pytest.mark.parametrize("name", [*CASES, *LATER])
def test_states_of_versions_2_and_3_resume_in_their_order(urls, states, name):
    for version in ("version 2", "version 3"):
        if name in states[version]:
            state, (left, _) = states[version][name]
            loader = (CASES | LATER)[name](urls)
            loader.load_state_dict(state)
            assert rest(loader)[0] == left


@pytest.mark.parametrize("name", CASES)
def test_an_epoch_in_the_earlier_order_ends_in_it_after_further_stops(urls, states, name):
    (state, (left, _)), rest_of_it = states["saved"][name][1], []
    while len(rest_of_it) < len(left) and len(rest_of_it) < 6:
        loader = CASES[name](urls)
        loader.load_state_dict(state)
        rest_of_it += [values(delivered) for delivered in islice(loader, 2)]
        state = loader.state_dict()
    assert rest_of_it == left[: len(rest_of_it)]


@pytest.mark.parametrize("name", LINEAR)
def test_states_of_linear_schedules_are_refused(urls, states, name):
    kind = stream if name.startswith("mixed") else dataset
    mixed = schedule(kind, urls, rank=1, ranks=2) if kind is dataset else schedule(kind, urls)
    loader = mixed if kind is stream else ShardLoader(mixed, 3)
    for state, _ in [*states["saved"][name], states["linear"][name]]:
        with pytest.raises(StateError, match=r"linear schedule, which no longer exists: .* weights of stepwise\(\)"):
            loader.load_state_dict(state)
    assert rest(loader)[0], "and a new epoch begins in steps"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    STATES.write_text(json.dumps(write_states(), separators=(",", ":")) + "\n")
