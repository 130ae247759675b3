"""dali_loader over another loader: its batches, order, counts and state, with pixels that DALI decodes."""

from __future__ import annotations

import feed_specs
import numpy as np
import pytest
from dali_photos import THREADS, by_pillow, decode, jpeg_of
from fed import fed
from feed_specs import DATA

from tarshards import dali
from tarshards.loaders.dali.external_source import samples_of

pytest.importorskip("zmq")

pytestmark = pytest.mark.interop

CPU = {"device": "cpu", "num_threads": THREADS}
COUNT = 50  # samples, in batches of 8
SPECS = ["encoded", "encoded_objects"]


@pytest.fixture
def folder(photos, tmp_path, monkeypatch):
    """Return a function that writes the photos, and may damage some."""
    monkeypatch.setenv(DATA, str(tmp_path))
    return lambda bad=None: photos(COUNT, bad)


def labels(batches) -> list[list[int]]:
    return [[int(label) for label in batch["cls"]] for batch in batches]


@pytest.mark.parametrize("spec", SPECS)
def test_batches_order_counts_and_states_are_those_of_the_loader(folder, spec):
    folder()
    local = getattr(feed_specs, spec)()
    with fed(spec, 2) as remote:
        loader = dali.dali_loader(remote, decode, **CPU)
        assert len(loader) == len(local) == 7
        for _ in range(2):  # epochs
            found = list(loader)
            assert labels(found) == labels(local)
            assert [list(batch["__key__"]) for batch in found] == [
                [f"{number:05d}" for number in batch] for batch in labels(found)
            ]
            assert loader.state_dict() == remote.state_dict() == local.state_dict()
            for image, label in zip(found[-1]["jpg"], labels(found)[-1], strict=True):
                assert np.abs(np.asarray(image).astype(int) - by_pillow(jpeg_of(label))).max() <= 3
        loader.ledger.check()
        assert str(loader.ledger) == str(local.ledger)
        assert (remote.monitor.samples, remote.monitor.threads) == (COUNT, 4)
        assert remote.monitor.seconds > 0
        assert type(remote).monitor.samples == 0


def test_a_run_resumes_at_every_batch(folder):
    folder()
    whole = labels(feed_specs.encoded())
    for stop in range(len(whole)):
        with fed("encoded") as remote:
            loader = dali.dali_loader(remote, decode, **CPU)
            iterator = iter(loader)
            assert labels(next(iterator) for _ in range(stop)) == whole[:stop]
            state = loader.state_dict()
            iterator.close()
            loader.ledger.check()
        with fed("encoded") as remote:
            loader = dali.dali_loader(remote, decode, **CPU)
            loader.load_state_dict(state)
            assert labels(loader) == whole[stop:]


def test_bad_images_are_left_out_or_masked(folder):
    bad = {3: b"no image", 20: jpeg_of(20)[:-200]}
    folder(bad)
    with fed("encoded") as remote:
        found = labels(dali.dali_loader(remote, decode, **CPU))
        assert sorted(label for batch in found for label in batch) == [i for i in range(COUNT) if i not in bad]
        remote.ledger.check()
        assert (remote.ledger.samples, remote.ledger.failed) == (COUNT - 2, 2)
    with fed("encoded") as remote:
        batches = list(dali.dali_loader(remote, decode, on_bad="mask", **CPU))
        masked = [int(label) for batch in batches for label in batch["cls"][~batch["valid"]]]
        assert sorted(masked) == sorted(bad)
        remote.ledger.check()
        assert remote.ledger.samples == COUNT


def test_ragged_rows_of_npy_stay_arrays():
    """Their bytes are no .npy file, which a field of that name would be decoded as."""
    values, offsets = np.arange(6, dtype=np.uint8), np.array([0, 2, 6])
    samples = samples_of({"jpg": (values, offsets), "x.npy": (values, offsets), "y": (values.reshape(6, 1), offsets)})
    assert [sample["jpg"] for sample in samples] == [bytes([0, 1]), bytes([2, 3, 4, 5])]
    assert [(sample["x.npy"].tolist(), sample["y"].shape) for sample in samples] == [
        ([0, 1], (2, 1)),
        ([2, 3, 4, 5], (4, 1)),
    ]


def test_what_is_not_for_loaders(folder):
    folder()
    local = feed_specs.encoded()
    for options in ({"batch_size": 8}, {"last_batch": "pad"}):
        with pytest.raises(TypeError, match=r"a loader makes its batches itself"):
            dali.dali_loader(local, decode, **options, **CPU)
    with pytest.raises(TypeError, match="requires batch_size="):
        dali.dali_loader(local.passes.stream, decode, **CPU)
