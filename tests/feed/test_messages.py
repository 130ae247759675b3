"""Whatever arrives is checked before it is made into anything, and costs the peer that sent it its answer only."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import feed_specs
import msgpack
import numpy as np
import pytest
from fed import feeders_of, remote
from hypothesis import given
from hypothesis import strategies as st
from soak import SOAK
from test_remote_loader import Frame, batches
from with_torch import needs_torch, torch

from tarshards import EncodeError, OpenError
from tarshards.feed.feeder import Feeder
from tarshards.feed.feeders import Feeders, ask_status
from tarshards.feed.messages import ANSWERS, ARRAY, BYTES, DEEPEST, REQUESTS, TENSOR, TUPLE, decode, encode

zmq = pytest.importorskip("zmq")

ERROR = {"class": "OpError", "reason": "r", "cost": "", "notes": ["n"], "errno": None}
ERROR |= {"url": "u", "key": None, "field": None, "offset": 3}
BATCH: dict[str, Any] = {
    "x": np.arange(12.0).reshape(3, 4),
    "two": (np.arange(3), [b"0", "é"]),
    "long": b"l" * 20_000,
    "day": np.array(["2026-11-29"], "M8[D]"),
}
REQUEST = {"kind": "make", "pass": "p", "epoch": 0, "state": None, "rank": 0, "ranks": 1, "g": 0}
ANSWER = {"kind": "batch", "pass": "p", "g": 0, "counts": [4, 0, 8, None], "errors": [[False, ERROR]]}
ANSWER |= {"work": [0.1, [0, 0, 0, 0, 0.0]], "batch": BATCH}
MESSAGES: list[tuple[dict[str, Any], Any]] = [
    (REQUEST, REQUESTS),
    (REQUEST | {"state": {"position": 3, "before": [[192, 0]]}}, REQUESTS),
    ({"kind": "hello"}, REQUESTS),
    (ANSWER, ANSWERS),
    ({"kind": "failed", "pass": "p", "g": 1, "again": True, "error": ERROR, "traceback": "T"}, ANSWERS),
    ({"kind": "welcome", "identity": {"data": "1"}, "instance": "i", "capacity": 2, "threads": 1}, ANSWERS),
]


def frames_of(header: Any) -> list[Frame]:
    return [Frame(frame) for frame in encode(header)]


def nested(levels: int) -> bytes:
    packed = msgpack.packb([1])
    for _ in range(levels):
        packed = msgpack.packb([msgpack.ExtType(TUPLE, packed)])
    return packed


def extension(code: int, content: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(content))


# What a batch cannot be made of, with a frame of eight bytes.
JUNK = {
    "a deep nesting": msgpack.ExtType(TUPLE, nested(3000)),
    "a nesting too deep": msgpack.ExtType(TUPLE, nested(DEEPEST + 1)),
    "no tuple": extension(TUPLE, 5),
    "no frame": extension(BYTES, 2),
    "the header as a frame": extension(BYTES, 0),
    "a frame from the end": extension(BYTES, -1),
    "a frame of a name": extension(BYTES, "1"),
    "an unknown extension": extension(9, [1]),
    "objects": extension(ARRAY, [1, "|O", [1]]),
    "objects of structures": extension(ARRAY, [1, "O,O", [1]]),
    "void": extension(ARRAY, [1, "|V8", [1]]),
    "no type": extension(ARRAY, [1, "<f3", [1]]),
    "a type that is a number": extension(ARRAY, [1, 8, [1]]),
    "a type of no bytes": extension(ARRAY, [1, "|S0", [8]]),
    "too short": extension(ARRAY, [1, "<f8", [2]]),
    "too long": extension(ARRAY, [1, "|u1", [7]]),
    "a negative shape": extension(ARRAY, [1, "|u1", [-1]]),
    "a shape that is a number": extension(ARRAY, [1, "|u1", 8]),
    "a product that wraps": extension(ARRAY, [1, "|u1", [1 << 32, 1 << 32, 8]]),
    "many dimensions": extension(ARRAY, [1, "|u1", [8] + [1] * 1000]),
    "three dimensions missing": extension(ARRAY, [1]),
    "an attribute of torch": extension(TENSOR, [1, "load", [8]]),
    "no attribute of torch": extension(TENSOR, [1, "nothing", [8]]),
    "a quantized tensor": extension(TENSOR, [1, "quint4x2", [8]]),
    "a short tensor": extension(TENSOR, [1, "float32", [3]]),
    "a large tensor of nothing": extension(TENSOR, [1, "float32", [0, 1 << 62, 1 << 62]]),
}
# And entries of a message that are not as they should be.
WRONG: list[tuple[dict[str, Any], Any]] = [
    ({**REQUEST, **change}, REQUESTS)
    for change in (
        {"kind": "batch"},
        {"kind": []},
        {"g": -1},
        {"g": "0"},
        {"g": True},
        {"rank": 0.0},
        {"epoch": None},
        {"state": []},
        {"pass": b"p"},
    )
] + [
    ({**ANSWER, **change}, ANSWERS)
    for change in (
        {"kind": "make"},
        {"counts": [1, 2, 3]},
        {"counts": [1, -2, 3, None]},
        {"counts": [1, 2, 3, {"failed": 1}]},
        {"errors": [[1, ERROR]]},
        {"errors": [[True, {**ERROR, "url": 5}]]},
        {"errors": [[True, {"class": "OpError"}]]},
        {"errors": {}},
        {"work": [0.1, [0, 0]]},
        {"work": None},
        {"g": 1 << 63},
    )
]


@pytest.mark.parametrize(("header", "kinds"), MESSAGES)
def test_messages_arrive(header, kinds):
    found = decode(frames_of(header), kinds)
    assert found.keys() == header.keys()
    if "batch" in header:
        assert np.array_equal(found["batch"].pop("x"), BATCH["x"])
        assert found["batch"]["two"][1] == [b"0", "é"]
        assert (found["batch"]["long"], found["batch"]["day"]) == (BATCH["long"], BATCH["day"])


@pytest.mark.parametrize("array", [np.zeros((0, 3)), np.zeros(0, "U3"), np.array(5), np.array([True]), np.array([b""])])
def test_arrays_arrive(array):
    found = decode(frames_of(ANSWER | {"batch": array}), ANSWERS)["batch"]
    assert (type(found), found.shape, found.dtype) == (type(array), array.shape, array.dtype)
    assert np.array_equal(found, array)


@needs_torch
def test_tensors_arrive():
    one = torch.ones(1)
    for tensor in (one, torch.zeros(0, 3), torch.zeros(2, 0, dtype=torch.int16), torch.tensor(5), torch.ones(2, 3).T):
        found = decode(frames_of(ANSWER | {"batch": tensor}), ANSWERS)["batch"]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    for kind in (torch.bfloat16, torch.bool, torch.uint16, torch.complex64, torch.float8_e5m2):
        found = decode(frames_of(ANSWER | {"batch": one.to(kind)}), ANSWERS)["batch"]
        assert found.dtype == kind
        assert torch.equal(found.to(torch.complex64), one.to(torch.complex64))


def test_what_is_nested_too_deeply_is_not_sent():
    value: Any = 0
    for _ in range(DEEPEST - 1):
        value = (value,)
    assert decode(frames_of(ANSWER | {"batch": value}), ANSWERS)["batch"] == value
    for wrap in (tuple, list):
        with pytest.raises(EncodeError, match=f"at most {DEEPEST} levels of dicts, lists and tuples"):
            encode(ANSWER | {"batch": wrap([wrap([value])])})


@pytest.mark.parametrize("name", JUNK)
def test_junk_is_no_batch(name):
    frames = [Frame(msgpack.packb(ANSWER | {"batch": JUNK[name]})), Frame(bytes(8))]
    with pytest.raises(ValueError, match="not a message of tarfeed"):
        decode(frames, ANSWERS)


@pytest.mark.parametrize(("header", "kinds"), WRONG)
def test_entries_are_checked(header, kinds):
    plain = {**header, "batch": 0} if "batch" in header else header
    with pytest.raises(ValueError, match="not a message of tarfeed"):
        decode([Frame(msgpack.packb(plain))], kinds)


def mutated(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """Return the frames of a message after some changes."""
    frames = [*frames]
    for _ in range(rng.randrange(1, 5)):
        number = rng.randrange(len(frames))
        content, at = bytearray(frames[number]), rng.randrange(max(1, len(frames[number])))
        what = rng.randrange(6)
        if what < 3 and content:
            content[at] = rng.choice([rng.randrange(256), 0xFF, 0xC7, 0xDC, 0x80, 0x90, content[at] ^ 1])
        elif what == 3:
            del content[at : at + rng.randrange(1, 9)]
        elif what == 4:
            content[at:at] = rng.choice([rng.randbytes(3), nested(rng.randrange(99)), msgpack.packb(JUNK["objects"])])
        else:
            frames.insert(rng.randrange(len(frames) + 1), bytes(content))
        frames[number] = bytes(content)
    if rng.random() < 0.1:
        del frames[rng.randrange(len(frames))]
    return frames or [b""]


@given(st.randoms(use_true_random=False), st.sampled_from(MESSAGES))
def test_mutated_messages(rng, message):
    header, kinds = message
    for _ in range(20):
        frames = mutated([*map(bytes, encode(header))], rng)
        with suppress(ValueError):
            assert decode([Frame(frame) for frame in frames], kinds)["kind"] in kinds


# Peers that send junk, to a feeder and to a training.


@contextmanager
def connected(address: str) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        yield dealer


@pytest.mark.soak
def test_a_feeder_outlives_junk():
    """Among it requests that are as they should be, but of batches, ranks and states that are none."""
    requests = [{"g": 10**9}, {"ranks": 1 << 40}, {"epoch": 1 << 62, "g": 99}]
    requests += [{"state": {}}, {"state": {"version": 4, "lanes": 1 << 60}}, {"state": {"before": [[1 << 20, 0]] * 9}}]
    rng = random.Random(0)
    junk = [[msgpack.packb(header)] for header, _ in WRONG if "batch" not in header]
    junk += [encode(REQUEST | change) for change in ({"rank": 5, "ranks": 2}, {"ranks": 0})]
    junk += [[msgpack.packb(REQUEST | {"state": {"x": each}})] for each in JUNK.values()]
    junk += [[b""], [b"\xc1"], [nested(6000)]]
    junk += [mutated([*map(bytes, encode(rng.choice(MESSAGES)[0]))], rng) for _ in range(50 * SOAK)]
    with feeders_of("arrays", threads=1) as (feeder,), connected(feeder.address) as dealer:
        for frames in junk:
            dealer.send_multipart(frames)
        for change in requests:
            dealer.send_multipart(encode(REQUEST | {"pass": "mine"} | change))
        for _ in requests:
            answer: dict[str, Any] = {}
            while answer.get("pass") != "mine":  # others answer what was mutated into a request
                assert dealer.poll(20_000)
                answer = decode(dealer.recv_multipart(copy=False), ANSWERS)
            assert answer["kind"] == "failed"
            assert not answer["again"]
        with remote("arrays", feeder.address) as loader:
            assert batches(loader) == batches(feed_specs.arrays())


def test_requests_of_a_consumer_that_has_gone_are_not_made():
    with feeders_of("slow", threads=1) as (feeder,):
        with connected(feeder.address) as dealer:
            for g in range(20):
                dealer.send_multipart(encode(REQUEST | {"g": g}))
            assert dealer.poll(20_000)
        while (words := feeder.status())["queued"]:
            time.sleep(0.01)
    assert words["batches"] < 10


def test_a_feeder_answers_others_during_a_flood():
    with feeders_of("arrays") as (feeder,), connected(feeder.address) as dealer:
        ends = threading.Event()

        def flood() -> None:
            while not ends.is_set():
                dealer.send_multipart(encode({"kind": "hello"}))

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            with remote("arrays", feeder.address) as loader:
                assert batches(loader) == batches(feed_specs.arrays())
        finally:
            ends.set()
            thread.join()


def test_a_long_message_ends_its_connection_only():
    with feeders_of("arrays") as (feeder,), connected(feeder.address) as dealer:
        with dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as events:
            dealer.send(bytes(1 << 21))
            assert events.poll(20_000)
            dealer.disable_monitor()
        with remote("arrays", feeder.address) as loader:
            assert batches(loader) == batches(feed_specs.arrays())


@contextmanager
def impostor(feeder: Feeder, answer: Callable[[dict[str, Any]], list[Any]], *, welcome: Any = None) -> Iterator[str]:
    """Give the address of a peer that says that it is a feeder as *feeder* is, and sends *answer* of each request."""
    given = {"kind": "welcome", "identity": feeder._identity, "instance": "i", "capacity": 2, "threads": 1}
    ends = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            while not ends.is_set():
                if router.poll(20):
                    consumer, *frames = router.recv_multipart(copy=False)
                    words = decode(frames, REQUESTS)
                    if words["kind"] == "hello":
                        router.send_multipart([consumer.bytes, *encode(given | (welcome or {}))])
                    elif words["kind"] in ("make", "status"):
                        router.send_multipart([consumer.bytes, *answer(words)])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            ends.set()
            thread.join()


def answers(kind: Any) -> Callable[[dict[str, Any]], list[Any]]:
    """Return what answers a request with a batch of something, with other entries, or with bytes."""

    def answer(words: dict[str, Any]) -> list[Any]:
        if isinstance(kind, bytes):
            return [kind]
        own = {"pass": words.get("pass"), "g": words.get("g", 0)}
        return [msgpack.packb({**ANSWER, "batch": 0, **own, **kind}), bytes(8)]

    return answer


LIES: dict[str, Any] = {name: {"batch": JUNK[name]} for name in ("a deep nesting", "objects", "too short")}
LIES |= {"no message": b"\xc1", "nothing": b"", "no counts": {"counts": None}, "an odd error": {"errors": [[True, {}]]}}


@pytest.fixture(scope="module")
def good(dataset) -> Iterator[Feeder]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(feed_specs.DATA, dataset)
        with feeders_of("arrays") as (feeder,):
            yield feeder


@pytest.mark.parametrize("name", LIES)
def test_a_training_outlives_junk_beside_a_good_feeder(name, good, caplog):
    expected = batches(feed_specs.arrays())
    with impostor(good, answers(LIES[name])) as address:
        with remote("arrays", good.address, address) as loader:
            for _ in range(2):
                loader.set_epoch(0)
                assert batches(loader) == expected
        assert f"feeder {address} is not used: not a message of tarfeed" in caplog.text
        with remote("arrays", address) as loader, pytest.raises(OpenError, match="not a message of tarfeed"):
            batches(loader)


def test_a_welcome_is_checked(good):
    for welcome in ({"capacity": 0}, {"capacity": 1 << 62}, {"identity": [1]}, {"identity": {"x": 1}}, {"instance": 1}):
        refused = pytest.raises(OpenError, match=f"welcome with {next(iter(welcome))}")
        with impostor(good, answers(b""), welcome=welcome) as address, remote("arrays", address) as loader, refused:
            batches(loader)


def test_batches_that_were_not_requested_are_left_out(good):
    """Another feeder makes a batch too that does not come for half of the timeout."""
    lying = impostor(good, answers({"g": 10**6}), welcome={"capacity": 1})
    with lying as address, remote("arrays", good.address, address, timeout=2) as loader:
        assert batches(loader) == batches(feed_specs.arrays())


def test_the_status_of_what_is_no_feeder(good):
    for lie in (b"\xc1", {"kind": "status", "batches": "1"}):
        with impostor(good, answers(lie)) as address:
            found = ask_status([address, good.address], keys=None, encrypted=True, seconds=0.3)
        assert found[address] is None
        assert found[good.address] is not None


def test_nothing_is_waited_for_once_the_time_is_over(good):
    feeders = Feeders([good.address], {}, keys=None, encrypted=True, patience=1, timeout=1)
    feeders.connect()
    try:
        while feeders.active(0.1):
            for feeder in feeders:
                deque(feeder.changes(), 0)
        waiting = threading.Thread(target=feeders.active, args=[-0.001], daemon=True)
        waiting.start()
        waiting.join(10)
        assert not waiting.is_alive()
    finally:
        feeders.close()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SOAK))
def test_mutated_answers(seed, good):
    """A training gets all batches of a good feeder, beside one that changes some bytes of what another one answers."""
    rng = random.Random(seed)

    def answer(words: dict[str, Any]) -> list[Any]:
        own = ANSWER | {"pass": words["pass"], "g": 10**6}
        return mutated([*map(bytes, encode(own))], rng)

    with impostor(good, answer) as address, remote("arrays", good.address, address, timeout=4) as loader:
        assert batches(loader) == batches(feed_specs.arrays())
