"""States that are resumed by replaying the epoch: samples that are not those delivered before them are an error."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pytest
from soak import rounds
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, Stream, TarWriter, mix, readers
from tarshards.errors import StateError
from tarshards.stream.replaying import TOGETHER, Delivered, crc_of, crc_of_results, key_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

OTHERS = "the state was saved after other samples than replaying it leads to: a shard has changed"
SIZE = 3  # samples of a batch
STOP = 2  # batches, or SIZE times as many samples


def write(path: Any, classes: Iterable[int]) -> None:
    with TarWriter(str(path)) as writer:
        for number in classes:
            writer.write({"__key__": f"{number:04d}", "cls": number, "txt": "x" * 600})


def stream(urls: Any, **options: Any) -> Stream:
    return Stream.from_shards(urls, index=False, **options)


def dataset(urls: Any, **options: Any) -> ShardDataset:
    return ShardDataset(urls, index=False, **options)


def batched(urls: Any) -> Stream:
    return stream(urls).batched(SIZE)


def held_back(urls: Any) -> Stream:
    return stream(urls).shuffle(1)


def mixture(urls: Any) -> Stream:
    return mix({"one": stream(urls)})


def torch_loader(urls: Any, **options: Any) -> ShardLoader:
    return ShardLoader(dataset(urls, **options), SIZE)


def with_workers(urls: Any) -> ShardLoader:
    return ShardLoader(dataset(urls), SIZE, num_workers=2)


def without_keys(urls: Any) -> ShardLoader:
    return ShardLoader(dataset(urls), SIZE, collate_fn=lambda samples: [int(sample["cls"]) for sample in samples])


def tuples(urls: Any) -> ShardLoader:
    fields, transforms = {"cls": readers.integer()}, [lambda batch, rng: (batch["cls"],)]
    return ShardLoader(dataset(urls), SIZE, fields=fields, transforms=transforms)


def array_loader(urls: Any, **options: Any) -> ArrayLoader:
    return ArrayLoader(stream(urls, **options), SIZE, fields={"cls": readers.integer()})


def dali_loader(urls: Any) -> Any:
    pytest.importorskip("nvidia.dali")
    from tarshards import dali

    return dali.dali_loader(stream(urls), lambda cls: cls, batch_size=SIZE, fields="cls", device="cpu", arrays="numpy")


def dali_over_arrays(urls: Any) -> Any:
    pytest.importorskip("nvidia.dali")
    from tarshards import dali

    return dali.dali_loader(array_loader(urls), lambda cls: cls, fields="cls", device="cpu", arrays="numpy")


STREAMS = [stream, held_back, mixture]
LOADERS = [torch_loader, without_keys, tuples, array_loader]
WITH_DALI: list[Any] = [pytest.param(make, marks=pytest.mark.interop) for make in (dali_loader, dali_over_arrays)]
every_loader = pytest.mark.parametrize("make", [*STREAMS, batched, *LOADERS, *WITH_DALI])


def save(loader: Any, make: Callable[..., Any]) -> dict[str, Any]:
    """Return the state after the first STOP batches."""
    for _ in islice(iter(loader), STOP * SIZE if make in STREAMS else STOP):
        pass
    return json.loads(json.dumps(loader.state_dict()))


def resumed(loader: Any, state: dict[str, Any]) -> Any:
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("make", [*STREAMS, batched, *LOADERS, with_workers, *WITH_DALI])
def test_samples_in_another_order_before_the_state(tmp_path, make):
    """The last one before the state is as it was; 6 would be missing, and 4 come again."""
    path = tmp_path / "a.tar"
    write(path, range(10))
    state = save(make(str(path)), make)
    assert len(list(resumed(make(str(path)), state))) > 0
    write(path, [0, 1, 2, 3, 6, 5, 4, 7, 8, 9])
    with pytest.raises(StateError, match=OTHERS):
        list(resumed(make(str(path)), state))


@every_loader
def test_an_epoch_that_ends_before_the_state(tmp_path, make):
    path = tmp_path / "a.tar"
    write(path, range(10))
    state = save(make(str(path)), make)
    write(path, range(4))
    with pytest.raises(StateError, match=OTHERS):
        list(resumed(make(str(path)), state))


@every_loader
def test_states_after_a_resume_are_those_of_a_run_in_one_go(tmp_path, make):
    path = tmp_path / "a.tar"
    write(path, range(20))
    state = save(make(str(path)), make)
    again = save(resumed(make(str(path)), state), make)
    loader = make(str(path))
    batches = iter(loader)
    for _ in islice(batches, 2 * (STOP * SIZE if make in STREAMS else STOP)):
        pass
    assert again == loader.state_dict()
    assert again["keys"] != state["keys"]


def test_zeros_over_a_member_of_a_shuffled_shard(tmp_path):
    """A sample of another shard took the place of the destroyed one, between others as they were, and was lost."""
    urls = [str(tmp_path / f"{shard}.tar") for shard in range(4)]
    for shard, url in enumerate(urls):
        write(url, range(40 * shard, 40 * shard + 40))

    def first() -> tuple[list[str], Any]:
        shuffled = stream(urls, shuffle=True, seed=3, on_error=Ledger(max_errors=9))
        return [sample["__key__"] for sample in islice(iter(shuffled), 6)], shuffled

    before, begun = first()
    with open(urls[2], "r+b") as file:
        file.seek(5 * (512 + 512 + 512 + 1024))
        file.write(bytes(512))
    after, shuffled = first()
    assert len({*after} - {*before}) > 0
    assert after[-1] == before[-1], "the case: the last sample is as it was"
    with pytest.raises(StateError, match=OTHERS):
        list(resumed(shuffled, begun.state_dict()))


@pytest.mark.parametrize("make", [stream, torch_loader, array_loader])
def test_whatever_becomes_of_a_shard_nothing_is_lost_or_comes_again_without_a_word(tmp_path, make):
    refused = 0
    for seed in range(rounds(24)):
        rng = random.Random(seed)
        urls = [str(tmp_path / f"{shard}.tar") for shard in range(3)]
        for shard, url in enumerate(urls):
            write(url, range(20 * shard, 20 * shard + 20))
        options = {"shuffle": True, "seed": seed, "pool": rng.randrange(2, 10), "on_error": Ledger(max_errors=99)}
        begun = make(urls, **options)
        keys = [key_of(result) for result in islice(iter(begun), rng.randrange(1, 40 if make is stream else 14))]
        victim = rng.randrange(3)
        how = rng.choice(["zeros", "truncated", "reordered"])
        with open(urls[victim], "r+b") as file:
            at = rng.randrange(19) * 2560
            if how == "truncated":
                file.truncate(at)
            elif how == "zeros":
                file.seek(at)
                file.write(bytes(512))
        if how == "reordered":
            write(urls[victim], rng.sample(range(20 * victim, 20 * victim + 20), 20))
        ledger = Ledger(max_errors=99)
        loader = resumed(make(urls, **options | {"on_error": ledger}), begun.state_dict())
        try:
            keys += [key_of(result) for result in loader]
        except StateError:
            refused += 1
            continue
        counts = Counter("\0".join(keys).split("\0"))
        assert set(counts.values()) == {1}
        missing = {int(key) // 20 for key in {f"{number:04d}" for number in range(60)} - {*counts}}
        assert missing <= {int(os.path.basename(entry.shard or "")[0]) for entry in ledger.quarantined}
    assert refused > 0


@pytest.mark.parametrize("result", [None, 1, (1, 2), {}])
def test_results_without_keys_are_counted(tmp_path, result):
    path = tmp_path / "a.tar"
    write(path, range(10))

    def without_keys() -> Stream:
        return stream(str(path)).map(lambda sample: result)

    state = save(without_keys(), stream)
    assert list(resumed(without_keys(), state)) == [result] * 4
    write(path, range(4))
    with pytest.raises(StateError, match=OTHERS):
        list(resumed(without_keys(), state))


def test_a_sample_that_fails_in_its_batch_alone_is_no_difference(tmp_path):
    """It is left out of its batch, and the others have the same samples; so they may resume."""
    path = tmp_path / "a.tar"
    write(path, range(10))

    def loader(is_strict: bool) -> ArrayLoader:
        def number(data: bytes) -> int:
            return 1 // (0 if is_strict and data == b"5" else 1) and int(data)

        shards = stream(str(path), on_error=Ledger(max_errors=9))
        return ArrayLoader(shards, SIZE, fields={"cls": number})

    state = save(loader(True), array_loader)
    assert [list(batch["cls"]) for batch in resumed(loader(False), state)] == [[6, 7, 8], [9]]


@pytest.mark.parametrize("make", [stream, torch_loader, array_loader])
def test_states_of_earlier_releases_are_compared_by_their_last_key(tmp_path, make):
    path = tmp_path / "a.tar"
    write(path, range(20))
    loader = make(str(path))
    state = save(loader, make)
    del state["keys"]
    state["last"] = "0005"
    assert len(list(resumed(make(str(path)), state))) > 0
    assert save(resumed(make(str(path)), state), make)["keys"] > 0, "later states have all keys"
    for classes, end in ([0, 1, 2, 3, 5, 6, 7, 8, 9], "'0006'"), (range(3), "the end of the epoch"):
        write(path, classes)
        with pytest.raises(StateError, match=f"after the sample '0005', and replaying it leads to {end}: a shard has"):
            list(resumed(make(str(path)), state))


@pytest.mark.parametrize("saved", [{}, {"last": "0005"}])
def test_a_state_that_is_being_replayed_is_the_state(tmp_path, saved):
    """It is saved again by a program that ends meanwhile."""
    path = tmp_path / "a.tar"
    write(path, range(10))
    state = save(stream(str(path)), stream)
    if saved:
        del state["keys"]
        state |= saved
    states: list[Any] = []

    def look(sample: Any) -> Any:
        states.append(loader.state_dict())
        return sample

    loader = resumed(stream(str(path)).map(look), state)
    next(iter(loader))
    assert states == [state] * (STOP * SIZE) + [states[-1]]


def test_keys_of_results():
    sample = {"__key__": "a/b", "cls": 1}
    assert key_of(sample) == "a/b"
    assert key_of([sample, sample]) == key_of({"__key__": ["a/b", "a/b"]}) == "a/b\0a/b"
    others = {}, {"__key__": 3}, [], (1, 2), 3, None, "text"
    assert {key_of(each) for each in others} == {""}
    for each in others:
        assert crc_of_results([sample, each]) == crc_of(["a/b", ""])
    assert crc_of(["\udc80", "\ud800", "é"]) != crc_of(["\udc80", "\ud801", "é"])


def test_the_crc_does_not_depend_on_when_keys_are_added():
    keys = [f"{number:03d}" for number in range(2 * TOGETHER + 3)]
    rng = random.Random(0)
    for _ in range(20):
        delivered = Delivered().together()
        for key in keys:
            delivered.keys.append(key)
            if rng.random() < 0.1:
                assert delivered.state()["delivered"] == delivered.before + len(delivered.keys)
                delivered = delivered.together()
        assert delivered.state() == {"delivered": len(keys), "keys": crc_of(keys)}
    assert len({crc_of(part) for part in ([], [""], ["", ""], ["a", "b"], ["ab"], ["b", "a"])}) == 6
