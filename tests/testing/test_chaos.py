"""Chaos finds nothing in our loaders, and what is wrong in others."""

from __future__ import annotations

import json
import random
import re
from multiprocessing import forkserver
from pathlib import Path

import pytest
from click.testing import CliRunner
from soak import SOAK
from with_torch import needs_torch

from tarshards import ShardWriter, write_samples
from tarshards.cli.chaos_check import chaos as chaos_command
from tarshards.testing import chaos
from tarshards.testing.chaos import (
    NEMESES,
    DeliveredSample,
    RoundOutcome,
    RoundWorld,
    Suite,
    draw,
    our_readers,
    preload,
)
from tarshards.testing.chaos_rank import open_loader
from tarshards.testing.chaos_shards import ShardCopies, beginning, changed, read_truth, resized

ROUNDS, PARTS = (10, 2) if SOAK == 1 else (40 * SOAK, 4)
WRONG = {  # the loader, a nemesis that shows what is wrong with it, and how
    "DropsTheTail": ("nothing", "silent"),
    "StartsAnew": ("kill a rank", "silent"),
    "CountsAhead": ("kill a rank", "silent"),
    "SameShare": ("nothing", "silent"),
    "GoesOn": ("a truncated shard", "silent"),
    "MixesThemUp": ("kill a rank", "silent"),
    "Hangs": ("a missing shard", "hung"),
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> list[str]:
    folder, rng = tmp_path_factory.mktemp("set"), random.Random(1)
    with ShardWriter(folder / "t-%d.tar", max_samples=25, sync=False) as writer:
        for i in range(90):
            writer.write({"__key__": f"{i:04d}", "bin": rng.randbytes(rng.randrange(10, 4000)), "txt": f"text {i}"})
    return [str(path) for path in sorted(folder.glob("*.tar"))]


@pytest.fixture(scope="module")
def copies(urls, tmp_path_factory) -> ShardCopies:
    return ShardCopies.make(urls, tmp_path_factory.mktemp("copies") / "shards")


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A busy machine is no hang."""
    monkeypatch.setattr(chaos, "LIMIT", 600.0)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_our_loaders(urls, copies, tmp_path, part):
    suite = Suite(urls, 5, ["stream", "planned", "arrays"], ["stream", "planned", "arrays"])
    preload(suite.readers)
    for number in range(part, ROUNDS, PARTS):
        suite.play(copies, number, tmp_path / f"{number}")
    check(suite)


@pytest.mark.soak
def test_our_loader_with_worker_processes(urls, copies, tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    suite = Suite(urls, 6, ["torch"], ["torch"])
    forkserver._forkserver._stop()  # one that has begun would not import torch
    preload(suite.readers)
    for number in range(1 if SOAK == 1 else 10 * SOAK):
        suite.play(copies, number, tmp_path / f"{number}")
    check(suite)


def check(suite: Suite) -> None:
    assert not suite.bad, suite.as_markdown()
    reported = [(world, outcome) for world, outcome in suite.rounds if outcome.outcome == "reported"]
    assert not [(world, outcome) for world, outcome in reported if NEMESES[world.nemesis].exact]


def play(name: str, nemesis: str, urls: list[str], copies: ShardCopies, folder, monkeypatch) -> list[RoundOutcome]:
    """Return the outcomes of some rounds of a user's loader with one nemesis."""
    monkeypatch.setattr(chaos, "NEMESES", {nemesis: NEMESES[nemesis]})
    if name == "Hangs":
        monkeypatch.setattr(chaos, "LIMIT", 3.0)
    suite = Suite(urls, 1, [f"chaos_loaders:{name}"])
    preload(suite.readers)
    if name in ("Plain", "MixesThemUp"):
        suite.learn(copies, folder / "undisturbed")
        assert len(suite.known) == 3
    rounds = 1 if name == "Hangs" else 4
    return [suite.play(copies, number, folder / f"{number}") for number in range(rounds)]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_loader_is_found(name, urls, copies, tmp_path, monkeypatch):
    nemesis, outcome = WRONG[name]
    found = play(name, nemesis, urls, copies, tmp_path, monkeypatch)
    assert outcome in {each.outcome for each in found}, found


@pytest.mark.parametrize("nemesis", ["nothing", "kill a rank", "a missing shard"])
def test_a_loader_that_is_right(nemesis, urls, copies, tmp_path, monkeypatch):
    found = play("Plain", nemesis, urls, copies, tmp_path, monkeypatch)
    allowed = {"exact"} if NEMESES[nemesis].exact else {"exact", "reported"}
    assert {each.outcome for each in found} <= allowed, found


@needs_torch  # without its loader not every nemesis is drawn
def test_a_round_is_drawn_from_the_seed_and_its_number():
    worlds = [draw(3, number, our_readers(), []) for number in range(200)]
    assert worlds == [draw(3, number, our_readers(), []) for number in range(200)]
    assert {world.nemesis for world in worlds} == {*NEMESES}
    assert not {world.source for world in worlds} & {"storage"}
    assert worlds != [draw(4, number, our_readers(), []) for number in range(200)]


@pytest.mark.parametrize("reader", ["stream", "module:function"])
def test_a_reader_meets_every_nemesis_before_it_meets_one_again(reader):
    fit = {
        name
        for name, each in NEMESES.items()
        if not each.readers or reader.replace("module:function", "user") in each.readers
    }
    for lap in range(3):
        worlds = [draw(3, lap * len(fit) + number, [reader], [reader]) for number in range(len(fit))]
        assert {world.nemesis for world in worlds} == fit


def test_faults_are_of_the_kinds_that_are_asked_for():
    for faults in ["shards"], ["processes", "machine"], ["network"]:
        worlds = [draw(3, number, ["module:function"], ["module:function"], faults) for number in range(60)]
        assert {NEMESES[world.nemesis].fault for world in worlds} == {"", *faults}
        assert ("http" in {world.source for world in worlds}) == ("network" in faults)


def test_a_loader_of_a_module_whose_name_is_no_identifier(tmp_path, monkeypatch):
    (tmp_path / "my-loaders.py").write_text("def urls_alone(urls):\n    return urls\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert open_loader({"reader": "my-loaders:urls_alone", "urls": ["a.tar"]}, None) == ["a.tar"]


def test_what_fails_with_nothing_wrong_is_no_result(urls, tmp_path):
    done = CliRunner().invoke(chaos_command, [*urls, "--loader", "chaos_loaders:is_broken"])
    assert done.exit_code == 1
    assert "with nothing wrong: ValueError: no module is here" in done.stderr


def test_a_killed_rank_ends_those_that_wait_for_it(urls, copies, tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "LIMIT", 30.0)
    found = play("WaitsForOthers", "kill a rank", urls[:3], copies, tmp_path, monkeypatch)
    assert {each.outcome for each in found} == {"exact"}, found


def test_ranks_that_wait_for_one_with_an_error_are_ended(urls, copies, tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "AFTER_ERROR", 1.0)
    found = play("FailsAlone", "nothing", urls[:3], copies, tmp_path, monkeypatch)
    assert {each.outcome for each in found} == {"reported"}, found
    assert {each.words for each in found} == {"OSError: the disk is gone"}


def test_what_was_delivered_is_compared_with_the_plan(urls, copies, tmp_path):
    world = RoundWorld(0, 0, "planned", "copy", "nothing", True, 1, False)
    round = chaos.Round(world, copies, urls, tmp_path)
    every = [DeliveredSample(key, fields, 0) for samples in copies.truth[0].values() for key, fields in samples.items()]
    by_key = {sample.key: sample for sample in every}
    right = [by_key[key]._replace(position=place) for place, key in enumerate(round.expected)]

    def judge(samples, errors=(), lost=()):
        outcome = round._judge(RoundOutcome(), samples, list(errors), list(lost))
        return outcome.outcome, outcome.lost, outcome.repeated, outcome.wrong, outcome.misplaced

    assert judge(right) == ("exact", 0, 0, 0, 0)
    assert judge(right[1:]) == ("silent", 1, 0, 0, 0)
    assert judge(right[1:], ["OpenError"]) == ("reported", 0, 0, 0, 0)
    assert judge(right[1:], lost=[(None, right[0].key)]) == ("reported", 0, 0, 0, 0)
    assert judge(right[1:], lost=[(None, right[1].key)]) == ("silent", 1, 0, 0, 0)
    shard = round._shard_of(right[0].key)
    assert judge(right[1:], lost=[(shard, None)]) == ("reported", 0, 0, 0, 0)
    assert judge([*right, right[0]], ["OpenError"]) == ("silent", 0, 1, 0, 0)
    assert judge([right[0]._replace(fields={}), *right[1:]], ["OpenError"]) == ("silent", 0, 0, 1, 0)
    swapped = [right[1]._replace(position=0), right[0]._replace(position=1), *right[2:]]
    assert judge(swapped) == ("silent", 0, 0, 0, 2)


def test_an_epoch_is_over_when_all_that_is_missing_is_named(urls, copies, tmp_path, monkeypatch):
    """The ranks may have been stopped after their last step, and would go on with the next epoch."""
    round = chaos.Round(RoundWorld(0, 0, "planned", "copy", "nothing", True, 1, True), copies, urls, tmp_path / "round")
    missing, *due = round.expected
    fields = {key: fields for samples in copies.truth[0].values() for key, fields in samples.items()}

    def run(jobs, others):
        for rank, job in enumerate(jobs):
            samples = [[key, fields[key]] for key in due[rank :: len(jobs)]]
            told = {"samples": samples}, {"saved": 1, "lost": [[None, missing]]}, {"ended": True}
            Path(job["output"]).write_text("".join(f"{json.dumps(line)}\n" for line in told))
        return True

    monkeypatch.setattr(chaos, "run_jobs", run)
    outcome = round.run()
    assert (outcome.outcome, len(outcome.legs)) == ("reported", 1), outcome


def test_copies_are_the_beginnings_of_shards_in_three_versions(copies, tmp_path):
    assert [len(samples) for samples in copies.truth[0].values()] == [25, 25, 25, 15]
    for name, samples in copies.truth[0].items():
        assert all(copies.truth[version][name].keys() == samples.keys() for version in (1, 2))
        assert not any(copies.truth[version][name][key] == samples[key] for version in (1, 2) for key in samples)
        assert len(copies.content(name, 1)) == len(copies.content(name))
    path = tmp_path / "long.tar"
    write_samples(({"__key__": f"{i}", "txt": bytes(50_000), "cls": b"1"} for i in range(100)), path)
    archive = beginning(str(path))
    assert 10 < len(read_truth(archive)) < 40
    assert read_truth(changed(archive)).keys() == read_truth(resized(archive)).keys() == read_truth(archive).keys()


@pytest.mark.parametrize(
    ("option", "value", "words"), [("--round", "3-1", "no range"), ("--faults", "shards,luck", "no faults luck")]
)
def test_wrong_options(option, value, words, urls):
    done = CliRunner().invoke(chaos_command, [*urls, option, value])
    assert done.exit_code == 2
    assert words in done.stderr


def test_command_for_some_rounds_of_some_faults(urls, tmp_path):
    options = ["--round", "1-2", "--faults", "shards,machine", "--report", str(tmp_path / "report")]
    done = CliRunner().invoke(chaos_command, [*urls, *options], standalone_mode=False)
    assert done.exception is None, done.output
    played = json.loads((tmp_path / "report.json").read_text())["rounds"]
    assert [each["number"] for each in played] == [1, 2]
    assert played[0]["repeat"] == f"tarshards chaos --seed 0 --round 1 --faults shards,machine {' '.join(urls)}"


def test_command(urls, tmp_path):
    options = ["--round", "0", "--report", str(tmp_path / "report")]
    done = CliRunner().invoke(chaos_command, [*urls, *options], standalone_mode=False)
    assert done.exception is None, done.output
    assert (tmp_path / "report.md").read_text() == done.stdout
    (played,) = json.loads((tmp_path / "report.json").read_text())["rounds"]
    assert played["outcome"] in ("exact", "reported")
    assert played["repeat"] == f"tarshards chaos --seed 0 --round 0 {' '.join(urls)}"
    assert re.search(rf"\| {played['reader']} \| {played['nemesis']} \| 1 \|", done.stdout)
