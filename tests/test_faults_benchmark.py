"""The fault table is correct: three faults on three readers, with known outcomes."""

from __future__ import annotations

import http.client
import urllib.request
from pathlib import Path

import pytest
from with_torch import needs_torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def examine(tmp_path, python_with_torch):
    """Return a function that gives the outcomes of a smoke run's faults for a peer in this environment."""
    from environments import PEERS, read_peer
    from faults import FAULTS, SMOKE_FAULTS
    from faults import examine as outcomes

    some = [fault for fault in FAULTS if fault.name in SMOKE_FAULTS]
    return lambda peer: outcomes(read_peer(PEERS / f"{peer}.py"), python_with_torch, some, tmp_path)


def test_python_tarfile_says_that_a_shard_is_truncated_and_nothing_else(examine):
    found = examine("tarfile_")
    truncated, header, interleaved = (found[name] for name in ("truncation", "bad header", "interleaved"))
    assert truncated.ending == "said"
    assert "unexpected end of data" in truncated.words
    assert (truncated.delivered, truncated.sound, truncated.total, truncated.altered) == (75, 175, 200, 0)
    assert header.ending == "end"
    assert (header.delivered, header.sound, header.lost) == (175, 199, 25)
    assert interleaved.ending == "end"
    assert (interleaved.lost, interleaved.altered) == (2, 4)


@pytest.mark.interop
@needs_torch
def test_webdataset_loses_the_rest_of_a_shard_with_a_bad_header(examine):
    found = examine("webdataset_")
    assert found["truncation"].ending == "said"
    assert found["bad header"].ending == "end"
    assert found["bad header"].lost == 25
    assert found["interleaved"].ending == "end"
    assert found["interleaved"].altered == 4


@needs_torch
def test_ours_says_so_each_time(examine):
    found = examine("tarshards_")
    assert {name: outcome.ending for name, outcome in found.items()} == dict.fromkeys(found, "said")
    assert "truncated in this member" in found["truncation"].words
    assert "bad header checksum" in found["bad header"].words
    assert "not adjacent" in found["interleaved"].words


def test_a_fault_does_not_count_where_sound_data_is_not_delivered_either():
    from fault_cases import Outcome
    from faults import judge

    broken = Outcome("end", total=10, sound=10, delivered=9, lost=1)
    told = judge(broken, lambda: pytest.fail("must not be asked"))
    assert told.ending == "cannot"
    assert "9 of 10" in told.words


def test_a_loss_is_no_silent_one_if_it_is_logged():
    from fault_cases import Outcome
    from faults import judge

    sound = Outcome("end", total=10, sound=10, delivered=10, log=["worker 12 is up"])
    loss = Outcome("end", total=10, sound=10, delivered=9, lost=1, log=["worker 7 is up", "warning: skipped a.tar"])
    assert judge(sound, lambda: loss).words == "warning: skipped a.tar"
    assert loss.ending == "warned"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("reset", ConnectionResetError),
        ("stall", TimeoutError),
        ("length too large", http.client.IncompleteRead),
    ],
)
def test_the_server_does_wrong_once(tmp_path, wrong, error):
    from wrong_server import serving

    (tmp_path / "a.tar").write_bytes(bytes(1000))
    with serving(tmp_path, wrong, "a.tar") as site:
        with (
            pytest.raises(error),
            urllib.request.urlopen(f"{site}/a.tar", timeout=0.5 if wrong == "stall" else 60) as answer,
        ):
            answer.read()
        with urllib.request.urlopen(f"{site}/a.tar") as answer:
            assert answer.read() == bytes(1000)


def test_the_server_says_half_of_a_length_once_and_honours_ranges(tmp_path):
    from wrong_server import serving

    (tmp_path / "a.tar").write_bytes(bytes(range(100)))
    with serving(tmp_path, "length too small", "a.tar") as site:
        for expected in bytes(range(50)), bytes(range(100)):
            with urllib.request.urlopen(f"{site}/a.tar") as answer:
                assert answer.read() == expected
        part = urllib.request.Request(f"{site}/a.tar", headers={"Range": "bytes=90-94"})
        with urllib.request.urlopen(part) as answer:
            assert (answer.status, answer.read()) == (206, bytes(range(90, 95)))
