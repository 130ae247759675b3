"""Lightning's Trainer: every epoch is the dataset, once, also of a run that is resumed, on one rank or two."""

from __future__ import annotations

import json
from collections.abc import Callable

import feed_specs
import pytest
import pytorch_lightning as pl
from lightning_runs import EPOCHS, QUIET, Model, Saving, fit, torchdatas_loader, torchs_loader
from our_loaders import OURS, array_loader, shard_loader, with_workers

from tarshards import Ledger
from tarshards.errors import StateError

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

SIZES = [100, 3, 150, 0, 80]  # 333 samples
SIZE = 8  # 42 batches, the last one of 5


@pytest.fixture
def urls(make_uneven: Callable[..., str]) -> str:
    return make_uneven(SIZES)


@pytest.fixture
def other(make_uneven) -> str:
    """The validation samples."""
    return make_uneven([30, 9], "other")


def keys(count: int) -> list[str]:
    return [f"{i:06d}" for i in range(count)]


def by_epoch(noted: list[tuple[int, list[str]]]) -> list[list[str]]:
    return [sorted(key for at, batch in noted for key in batch if at == epoch) for epoch in range(EPOCHS)]


@pytest.mark.parametrize("make", [*OURS, torchs_loader, torchdatas_loader])
def test_every_epoch_is_the_dataset_and_so_is_validation(urls, other, make):
    ledger = Ledger()
    model, trainer = fit(make(urls, SIZE, on_error=ledger), make(other, SIZE))
    assert by_epoch(model.trained) == [keys(333)] * EPOCHS
    assert by_epoch(model.validated) == [keys(39)] * EPOCHS
    orders = [[batch for at, batch in model.trained if at == epoch] for epoch in range(EPOCHS)]
    assert len({str(order) for order in orders}) == EPOCHS
    if make in OURS:
        assert trainer.global_step == EPOCHS * 42
        assert (ledger.samples, ledger.unaudited) == (EPOCHS * 333, False)
        assert [list(batch["__key__"]) for batch in make(urls, SIZE)] == orders[0], "the first epoch is epoch 0"
    ledger.check()


@pytest.mark.parametrize("make", [*OURS, torchdatas_loader])
def test_a_resumed_run_has_the_same_batches(urls, other, tmp_path, make):
    stops = {"0-20": 20, "1-20": 42 + 20}
    if (
        make in OURS
    ):  # Lightning does not load torchdata's state at an epoch's end, or takes its empty rest for an epoch
        stops |= {"0-42": 42, "end": 42, "validated": 42}
    whole, _ = fit(make(urls, SIZE), make(other, SIZE), Saving(tmp_path, [(0, 20), (1, 20), (0, 42)]))
    assert len(whole.trained) == 126
    for name, before in stops.items():
        resumed, _ = fit(make(urls, SIZE), make(other, SIZE), start=tmp_path / name)
        assert resumed.trained == whole.trained[before:], name


@pytest.mark.parametrize("make", [shard_loader, array_loader])
def test_a_run_is_resumed_with_smaller_batches_and_not_with_larger_ones(urls, tmp_path, make):
    """Lightning asks for the length of a whole epoch before it loads the state, and counts to no more."""
    whole, _ = fit(make(urls, SIZE), None, Saving(tmp_path, [(1, 20)]))
    with pytest.raises(StateError, match="counts to 21 batches, but the epoch has 31 with those"):
        fit(make(urls, 2 * SIZE), start=tmp_path / "1-20")
    resumed, _ = fit(make(urls, SIZE // 2), start=tmp_path / "1-20")
    begun = [(epoch, batch) for epoch, batch in whole.trained[: 42 + 20] if epoch == 1]
    assert by_epoch(begun + resumed.trained)[1:] == [keys(333)] * 2


@pytest.mark.parametrize("make", [shard_loader, with_workers, array_loader])
def test_without_indexes_every_epoch_is_the_dataset(make_shards, make):
    model, _ = fit(make(make_shards(6, 20), SIZE))
    assert by_epoch(model.trained) == [keys(120)] * EPOCHS


def test_batches_of_feeders_are_trained_on_and_a_run_resumes(tmp_path, monkeypatch):
    pytest.importorskip("zmq")
    from fed import fed

    (tmp_path / "data").mkdir()
    feed_specs.make(str(tmp_path / "data"))
    monkeypatch.setenv(feed_specs.DATA, str(tmp_path / "data"))
    local = feed_specs.arrays()
    expected = [(epoch, list(batch["__key__"])) for epoch in range(EPOCHS) for batch in local]
    with fed("arrays", 2) as loader:
        whole, trainer = fit(loader, None, Saving(tmp_path, [(1, 7)]))
        assert whole.trained == expected
        assert trainer.global_step == EPOCHS * len(local)
        loader.ledger.check()
    with fed("arrays") as loader:
        resumed, _ = fit(loader, start=tmp_path / "1-7")
        assert resumed.trained == expected[len(local) + 7 :]


def test_a_model_predicts_every_sample(urls):
    """For this, Lightning recreates the loader from its attributes."""
    for loader in (shard_loader(urls, SIZE), array_loader(urls, SIZE)):
        batches = pl.Trainer(devices=1, **QUIET).predict(Model(), loader)
        assert sorted(key for batch in batches for key in batch) == keys(333)


def test_two_ranks_deliver_the_dataset_and_resume(make_shards, tmp_path, run_program):
    """Lightning's own launcher starts the second rank, which knows WORLD_SIZE and LOCAL_RANK, and no RANK."""
    run_program("lightning_runs.py", make_shards(8, 500, index=True), tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name, first in ranks[0].items():
        runs = [first, ranks[1][name]]
        for run in runs:
            assert [sum(at == epoch for at, _ in run["whole"]) for epoch in range(EPOCHS)] >= [20] * EPOCHS
            if "resumed" in run:
                assert run["resumed"] == run["whole"][20 + 7 :], name
        assert by_epoch(runs[0]["whole"] + runs[1]["whole"]) == [keys(4000)] * EPOCHS, name
