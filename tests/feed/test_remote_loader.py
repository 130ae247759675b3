"""Batches of feeders equal those of the loader: content, order, counts, states."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from pathlib import Path

import feed_specs
import numpy as np
import pytest
from fed import fed
from feed_specs import DATA
from with_torch import needs_torch

from tarshards import AuditError, DecodeError, EncodeError, OpenError, OpError, RemoteLoader, UrlError
from tarshards.feed import feeder as feeder_module
from tarshards.feed.feeder import Feeder
from tarshards.feed.feeders import ask_status
from tarshards.feed.messages import ANSWERS
from tarshards.loaders.arrays.array_loader import ArrayBatchMaker

pytest.importorskip("zmq")

ARRAYS = ["arrays", "in_turn", "mixture"]
TORCH = [pytest.param(name, marks=needs_torch) for name in ("tensors", "filled", "fields", "failing")]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def plain(value):
    """The contents of a batch, for comparison, with types where these differ between loaders."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return ("tuple", *map(plain, value))
    if hasattr(value, "dtype"):
        array = np.asarray(value)
        return type(value).__name__, array.dtype.str, array.shape, array.tobytes()
    return list(value)


def batches(loader) -> list:
    return [plain(batch) for batch in loader]


def counts(ledger) -> tuple:
    return (
        re.sub(r" \(feeder .*?\)", "", str(ledger)),
        ledger.samples,
        ledger.filtered,
        ledger.failed,
        len(ledger.quarantined),
    )


@pytest.mark.parametrize("spec", [*ARRAYS, *TORCH])
@pytest.mark.parametrize("count", [1, 3])
def test_batches_counts_and_states_are_those_of_the_loader(spec, count):
    local = getattr(feed_specs, spec)()
    with fed(spec, count) as loader:
        assert len(loader) == len(local)
        for _ in range(2):  # epochs
            expected = batches(local)
            assert batches(loader) == expected
            assert loader.state_dict() == local.state_dict()
        loader.ledger.check()
        local.ledger.check()
        assert counts(loader.ledger) == counts(local.ledger)


def test_passes_of_steps():
    local = feed_specs.steps()
    with fed("steps", 2) as loader:
        for _ in range(5):
            assert batches(loader) == batches(local)
            assert loader.state_dict() == local.state_dict()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_state_resumes_on_other_ranks(ranks, monkeypatch):
    local = feed_specs.arrays()
    with fed("arrays") as loader:
        iterator = iter(loader)
        taken = [plain(next(iterator)) for _ in range(5)]
        state = json.loads(json.dumps(loader.state_dict()))
        iterator.close()
        assert taken == batches(local)[:5]
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        local = feed_specs.arrays()
        local.load_state_dict(state)
        with fed("arrays", 2) as loader:
            loader.load_state_dict(state)
            assert batches(loader) == batches(local)


def test_what_is_left_early_is_counted_and_begun_again():
    local = feed_specs.arrays()
    expected = batches(local)
    with fed("arrays") as loader:
        for taken in (1, 3):
            loader.set_epoch(0)
            iterator = iter(loader)
            assert [plain(next(iterator)) for _ in range(taken)] == expected[:taken]
            iterator.close()
        loader.set_epoch(0)
        assert batches(loader) == expected
        assert loader.ledger.unaudited


@needs_torch
def test_the_first_error_of_a_strict_dataset_is_raised_here_and_names_the_feeder():
    with pytest.raises(OpError, match="a seven"):
        list(feed_specs.strict())
    with fed("strict") as loader, pytest.raises(OpError, match=r"a seven.*\(feeder tcp://127") as caught:
        list(loader)
    assert caught.value.key is not None
    assert caught.value.url.endswith(".tar")


def test_errors_of_samples_have_shard_and_key(tmp_path, dataset, monkeypatch):
    shutil.copytree(dataset, tmp_path / "damaged")
    path = tmp_path / "damaged/2/0.tar"
    content = bytearray(path.read_bytes())
    at = content.find(b"\x93NUMPY")
    content[at : at + 6] = b"broken"
    path.write_bytes(content)
    monkeypatch.setenv(DATA, str(tmp_path / "damaged"))
    with fed("arrays") as loader, pytest.raises(DecodeError, match="feeder") as caught:
        list(loader)
    assert (caught.value.key, caught.value.field) == ("2-000", "npy")


@needs_torch
def test_a_batch_of_objects_is_refused():
    with fed("objects") as loader, pytest.raises(EncodeError, match=r"batches for feeding are made of arrays.*object"):
        list(loader)


def test_a_dataset_without_indexes_is_refused():
    with pytest.raises(UrlError, match="tarindex"):
        RemoteLoader("feed_specs:without_indexes", "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("feed_specs", UrlError, "module:function"),
        ("feed_specs:nothing", UrlError, "has no function nothing"),
        ("no_such_module:f", UrlError, "no module no_such_module"),
        ("feed_specs:urls", UrlError, "not a ShardLoader or an ArrayLoader"),
        ("feed_specs:__name__", TypeError, "feed_specs:__name__ is not callable"),
    ],
)
def test_specs_that_name_no_loader(spec, error, words):
    with pytest.raises(error, match=words):
        RemoteLoader(spec, "tcp://127.0.0.1:1")


def test_a_module_whose_name_is_no_identifier(tmp_path, monkeypatch):
    (tmp_path / "train-v2.py").write_text("from feed_specs import arrays\n")
    monkeypatch.syspath_prepend(tmp_path)
    RemoteLoader("train-v2:arrays", "tcp://127.0.0.1:1", encrypted=False)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "tcp://127.0.0.1", "udp://127.0.0.1:1", "dns:name"])
def test_addresses_that_are_none(address):
    with pytest.raises(UrlError, match=r"tcp://host:port|dns:name:port"):
        RemoteLoader("feed_specs:arrays", address, encrypted=False)


@pytest.mark.parametrize("name", ["patience", "timeout"])
@pytest.mark.parametrize("value", [0, -1, "5", None, True, float("nan")])
def test_seconds_that_are_none(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number of seconds above 0, not "):
        RemoteLoader("feed_specs:arrays", "tcp://127.0.0.1:1", **{name: value})


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:1", "tcp://host:1", "dns:host:1"])
def test_a_network_requires_keys(address):
    with pytest.raises(UrlError, match="tarfeed keys"):
        RemoteLoader("feed_specs:arrays", address)
    RemoteLoader("feed_specs:arrays", address, encrypted=False)


def test_a_feeder_listens_to_a_network_only_with_keys():
    for address in ("tcp://*:0", "tcp://0.0.0.0:0"):
        with pytest.raises(UrlError, match="tarfeed keys"):
            Feeder("feed_specs:arrays", address)


def test_a_feeder_that_differs_is_refused_by_name(monkeypatch, tmp_path, dataset):
    shutil.copytree(dataset, tmp_path / "other")
    (tmp_path / "other/0/0.tar").unlink()
    shutil.copy(tmp_path / "other/1/0.tar", tmp_path / "other/0/0.tar")
    shutil.copy(tmp_path / "other/1/0.tar.index", tmp_path / "other/0/0.tar.index")
    real = feeder_module.identity
    monkeypatch.setattr(feeder_module, "identity", lambda *given: real(*given) | {"numpy": "0.1"})
    with fed("arrays") as loader, pytest.raises(OpenError, match=r"it differs in numpy \(0\.1, here"):
        list(loader)
    monkeypatch.setattr(feeder_module, "identity", real)
    with monkeypatch.context() as patch:
        patch.setenv(DATA, str(tmp_path / "other"))
        other = Feeder("feed_specs:arrays", "tcp://127.0.0.1:*")
    thread = threading.Thread(target=other.run, daemon=True)
    thread.start()
    loader = RemoteLoader("feed_specs:arrays", other.address)
    with pytest.raises(OpenError, match="it differs in data"):
        list(loader)
    loader.close()
    other.stop()
    thread.join()
    other.close()


def test_a_feeder_that_cannot_read_is_no_outcome_while_another_can(monkeypatch):
    read = ArrayBatchMaker.read
    failed = []

    def unreadable(maker, part, epoch):
        if len(failed) < 3:
            failed.append(1)
            raise OpenError("no such file", url="a.tar")
        return read(maker, part, epoch)

    expected = batches(feed_specs.arrays())
    monkeypatch.setattr(ArrayBatchMaker, "read", unreadable)
    with fed("arrays", 3, threads=1) as loader:
        assert batches(loader) == expected
        assert loader.ledger.quarantined == []
        assert failed


def test_a_batch_that_one_feeder_cannot_read_waits_for_another_that_comes_late(monkeypatch):
    read, port = ArrayBatchMaker.read, free_port()
    late: list[Feeder] = []

    def unreadable(maker, part, epoch):
        if not late:
            raise OpenError("no such file", url="a.tar")
        return read(maker, part, epoch)

    expected = batches(feed_specs.arrays())
    monkeypatch.setattr(ArrayBatchMaker, "read", unreadable)

    def begin() -> None:
        late.append(Feeder("feed_specs:arrays", f"tcp://127.0.0.1:{port}", threads=1))
        late[0].run()

    thread = threading.Timer(0.5, begin)
    with fed("arrays", threads=1) as early:
        addresses = [*early._connected[0]._names, f"tcp://127.0.0.1:{port}"]
        loader = RemoteLoader("feed_specs:arrays", addresses, timeout=20)
        thread.start()
        assert batches(loader) == expected
        loader.close()
    late[0].stop()
    thread.join()
    late[0].close()


def test_what_no_feeder_can_read_is_an_error(monkeypatch):
    def unreadable(maker, part, epoch):
        raise OpenError("no such file", url="a.tar")

    monkeypatch.setattr(ArrayBatchMaker, "read", unreadable)
    with fed("arrays", 2) as loader, pytest.raises(OpenError, match=r"a\.tar: no such file \(feeder tcp"):
        list(loader)


def test_no_feeder_answers():
    loader = RemoteLoader("feed_specs:arrays", "tcp://127.0.0.1:1", timeout=0.5)
    with pytest.raises(OpenError, match=r"no feeder has answered for 0 s: tcp://127\.0\.0\.1:1: silent"):
        list(loader)
    loader.close()


def test_messages_of_others_do_not_end_a_feeder():
    import zmq

    expected = batches(feed_specs.arrays())
    with fed("arrays") as loader, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        address = next(iter(loader._connected[0]._names))
        dealer.connect(address)
        for frames in ([b""], [b"\xc1"], [b"x", b"y"], [b"\x81\xa4kind\xa4make"], [b"\x80"]):
            dealer.send_multipart(frames)
        assert batches(loader) == expected


def test_at_most_prefetch_batches_are_made_ahead():
    with fed("arrays", prefetch=3) as loader:
        iterator = iter(loader)
        next(iterator)
        threading.Event().wait(0.5)
        made = ask_status(loader._connected[0]._names, keys=None, encrypted=True)
        assert sum(words["batches"] for words in made.values()) <= 4
        iterator.close()


def test_status_says_who_waits():
    with fed("slow") as loader:
        list(loader)
        (words,) = ask_status(loader._connected[0]._names, keys=None, encrypted=True).values()
        assert words["batches"] == len(loader)
        assert 0 < words["making"] <= 1
        assert words["queued"] == 0
    assert loader.monitor.limit == "decoding"
    assert loader.monitor.samples == sum(feed_specs.COUNTS)


def test_addresses_of_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:  # a container without it: then a feeder says so
        with pytest.raises(OpenError):
            Feeder("feed_specs:arrays", "tcp://[::1]:*")
        return
    feeder = Feeder("feed_specs:arrays", "tcp://[::1]:*")
    thread = threading.Thread(target=feeder.run, daemon=True)
    thread.start()
    loader = RemoteLoader("feed_specs:arrays", feeder.address, timeout=20)
    assert batches(loader) == batches(feed_specs.arrays())
    loader.close()
    feeder.stop()
    thread.join()
    feeder.close()


def test_names_are_looked_up(monkeypatch):
    with fed("arrays") as running:
        port = running._connected[0]._names[0].rpartition(":")[2]
        loader = RemoteLoader("feed_specs:arrays", f"dns:127.0.0.1:{port}", encrypted=False, timeout=20)
        assert len(batches(loader)) == len(loader)
        loader.close()


def test_an_audit_finds_a_batch_that_was_counted_wrongly(monkeypatch):
    made = feeder_module._made

    def wrong(maker, request, *given):
        frames = made(maker, request, *given)
        message = feeder_module.decode([Frame(frame) for frame in frames], ANSWERS)
        if request.g == 2:
            message["counts"][0] -= 1
        return feeder_module.encode(message)

    monkeypatch.setattr(feeder_module, "_made", wrong)
    with fed("arrays") as loader, pytest.raises(AuditError):
        list(loader)


class Frame:
    """A frame as it arrives."""

    def __init__(self, content):
        self.buffer, self.bytes = memoryview(content), bytes(content)


def test_keys(tmp_path, monkeypatch):
    from tarshards.feed.encryption import make_keys

    for name in ("right", "wrong"):
        made = make_keys(str(tmp_path / name))
        assert len(made) == 4
        assert all(Path(path).stat().st_mode & 0o077 == 0 for path in made)
    with pytest.raises(OpenError, match="not overwritten"):
        make_keys(str(tmp_path / "right"))
    expected = batches(feed_specs.arrays())
    feeder = Feeder("feed_specs:arrays", "tcp://127.0.0.1:*", keys=str(tmp_path / "right"))
    thread = threading.Thread(target=feeder.run, daemon=True)
    thread.start()
    loader = RemoteLoader("feed_specs:arrays", feeder.address, keys=tmp_path / "right", timeout=20)
    assert batches(loader) == expected
    loader.close()
    mixed = tmp_path / "mixed"  # the right server's key, but a client that it does not know
    shutil.copytree(tmp_path / "wrong", mixed)
    shutil.copy(tmp_path / "right/server.key", mixed / "server.key")
    for keys in (tmp_path / "wrong", mixed, None):
        loader = RemoteLoader("feed_specs:arrays", feeder.address, keys=keys, timeout=2)
        with pytest.raises(OpenError, match=r"other keys|no feeder has answered"):
            list(loader)
        loader.close()
    feeder.stop()
    thread.join()
    feeder.close()
    with pytest.raises(OpenError, match="no such key"):
        RemoteLoader("feed_specs:arrays", "tcp://127.0.0.1:1", keys=tmp_path)
