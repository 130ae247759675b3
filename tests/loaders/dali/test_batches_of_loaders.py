"""dali_loader over another loader: its batches, order, counts and state, with pixels that DALI decodes."""

from __future__ import annotations

import feed_specs
import numpy as np
import pytest
from dali_photos import THREADS, by_pillow, decode, jpeg_of
from fed import fed
from feed_specs import DATA

from tarshards import ArrayLoader, Stream, dali, readers
from tarshards.loaders.dali.external_source import columns_of
from tarshards.loaders.dali.image_check import ImageGuard

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
    """Their bytes are no .npy file, which a field of that name would be decoded as; those of cls are decoded."""
    values, offsets = np.arange(48, 54, dtype=np.uint8), np.array([0, 2, 6])
    ragged = {"jpg": values, "x.npy": values, "y": values.reshape(6, 1), "cls": values}
    batch = {"__key__": ["a", "b"], **{name: (data, offsets) for name, data in ragged.items()}}
    keys, columns = columns_of(batch, [[name] for name in ragged])
    guard = ImageGuard([*ragged], on_bad="mask", check="header")
    errors = []
    encoded = guard.encode(keys, [None, None], columns, errors.append)
    assert [error.field for error in errors] == ["jpg", "jpg"]
    x, y = ([np.asarray(row).tolist() for row in column] for column in encoded.columns[1:3])
    assert (x, y) == ([[48, 49], [50, 51, 52, 53]], [[[48], [49]], [[50], [51], [52], [53]]])
    assert encoded.columns[3].tolist() == [1, 2345]
    assert not encoded.valid.any()


def test_a_loader_that_reuses_its_memory_overwrites_nothing_that_dali_reads(photos):
    data = Stream.from_shards(photos(COUNT), shuffle=True, seed=1)
    fields = {"jpg": readers.ragged("u1"), "cls": readers.integer()}
    loader = ArrayLoader(data, 2, fields=fields, reuse=True, threads=1, prefetch=0)
    batches = list(dali.dali_loader(loader, lambda jpg, cls: (jpg, cls), arrays="numpy", **CPU))
    for batch in batches:
        assert [data.tobytes() for data in batch["jpg"]] == [jpeg_of(number) for number in batch["cls"].tolist()]
    assert sorted(number for batch in batches for number in batch["cls"].tolist()) == list(range(COUNT))


def test_what_is_not_for_loaders(folder):
    folder()
    local = feed_specs.encoded()
    for options in ({"batch_size": 8}, {"last_batch": "pad"}):
        with pytest.raises(TypeError, match=r"a loader makes its batches itself"):
            dali.dali_loader(local, decode, **options, **CPU)
    with pytest.raises(TypeError, match="requires batch_size="):
        dali.dali_loader(local.passes.stream, decode, **CPU)
