"""The ledger's sum over loaders: samples that reached the loop are delivered, prefetched ones are in flight."""

from __future__ import annotations

import gc
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, product

import pytest
from leaving_out import fail_on_fives, nothing
from leftovers import wait_until
from soak import SOAK, some
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, ShardWriter, Stream, World, readers
from tarshards.errors import SampleError
from tarshards.samples.ledger import OUTCOMES

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SAMPLES = 60
INDEXED = pytest.mark.parametrize("index", [True, False])


def odd(sample) -> bool:
    return int(sample["cls"]) % 2 == 1


def note(path, sample):
    """Make *path* longer by a byte for each sample that comes here."""
    with path.open("ab") as file:
        file.write(b".")
    return sample


def counts(ledger: Ledger) -> tuple[int, int, int, int, int]:
    """The samples that were delivered, filtered, failed, quarantined and in flight; their sum must close."""
    ledger.check()
    tally = ledger._total()
    found = tally.delivered, tally.filtered.total(), tally.failed, tally.quarantined_samples, tally.in_flight
    if tally.planned and not tally.streamed:
        sums = list(tally.passes.values())
        for each in sums:
            assert each["planned"] + each["repeated"] == sum(each[word] for word in OUTCOMES)
        words = "delivered", "filtered", "failed", "quarantined", "in flight"
        assert found == tuple(sum(each[word] for each in sums) for word in words)
    if tally.planned:
        assert sum(found) + tally.discarded + tally.dropped == tally.read.total() + tally.repeated
    else:
        assert sum(found) + tally.discarded == tally.samples
    return found


@pytest.fixture
def urls(tmp_path) -> str:
    """Six indexed shards of the classes 0 to 59; those of sevens are cats."""
    with ShardWriter(str(tmp_path / "set-{shard:02d}.tar"), max_samples=10) as writer:
        for i in range(SAMPLES):
            writer.write({"__key__": f"{i:03d}", "cls": i, "odd.cls": b"cat" if i % 7 == 0 else i})
    return str(tmp_path / "set-{00..05}.tar")


def dataset(urls: str, **options) -> ShardDataset:
    return ShardDataset(urls, **{"shuffle": True, "on_error": Ledger(max_errors=1000)} | options)


def taken(batches) -> int:
    return sum(len(batch["cls"]) for batch in batches if batch)


@pytest.mark.parametrize("workers", [0, 1, 3])
@INDEXED
def test_an_epoch_of_a_shard_loader(urls, workers, index):
    loader = ShardLoader(dataset(urls, index=index).filter(odd).map(fail_on_fives), 8, num_workers=workers)
    assert taken(loader) == 24
    assert counts(loader.ledger) == (24, 30, 6, 0, 0)
    assert taken(loader) == 24
    assert counts(loader.ledger) == (48, 60, 12, 0, 0)


def odd_alone(sample):
    return sample if odd(sample) else None


FIELDS = {"cls": readers.integer()}
LOADERS = {
    "ShardLoader": partial(ShardLoader, num_workers=0),
    "two workers": partial(ShardLoader, num_workers=2, fields=FIELDS),
    "ArrayLoader": partial(ArrayLoader, fields=FIELDS),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("make_loader", LOADERS.values(), ids=LOADERS)
def test_a_resumed_epoch_is_one_sum(urls, make_loader, ranks):
    """What a rank prints: its equal shares of the samples before the state, and of the rest, also on other ranks."""
    first = [make_loader(dataset(urls, world=World(rank, 2), tail="exact"), 4) for rank in range(2)]
    for loader in first:
        passed = iter(loader)
        for _ in range(5):
            next(passed)
        state = loader.state_dict()
        passed.close()
    rest = [make_loader(dataset(urls, world=World(rank, ranks), tail="exact"), 4) for rank in range(ranks)]
    for loader in rest:
        loader.load_state_dict(state)
        taken(loader)
    assert state["position"] == 40
    rows = [(each.ledger, *next(iter(each.ledger._total().passes.items()))) for each in rest]
    assert sum(sums["planned"] for _, _, sums in rows) == SAMPLES
    for ledger, this, sums in rows:
        counts(ledger)
        share = 40 // ranks + (this.rank < 40 % ranks)
        own = f"{sums['planned']} planned = {share} before + {sums['planned'] - share} delivered"
        assert (
            str(ledger).splitlines()[0]
            == (f"epoch 0, rank {this.rank} of {ranks}: " if ranks > 1 else "epoch 0: ") + own
        )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # in torchdata
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.interop)])
def test_a_dataset_that_resumes_is_one_sum(urls, workers):
    """Samples, not batches: each worker has a state of its own."""

    def loader_of(data):
        if not workers:
            return data
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, batch_size=None, num_workers=workers)

    first, again = loader_of(dataset(urls)), dataset(urls).filter(odd)
    rest = loader_of(again)
    passed = iter(first)
    for _ in range(21):
        next(passed)
    rest.load_state_dict(first.state_dict())
    passed = None
    assert sum(1 for _ in rest) <= 39
    delivered, filtered, *_ = counts(again.ledger)
    assert str(again.ledger).splitlines()[0] == (
        f"epoch 0: 60 planned = 21 before + {delivered} delivered + {filtered} filtered"
    )


def test_whole_epochs_are_one_line(urls):
    loader = ShardLoader(dataset(urls).filter(odd), 8)
    for _ in range(3):
        taken(loader)
    counts(loader.ledger)
    next(iter(loader))
    lines = str(loader.ledger).splitlines()
    assert lines[0] == "epochs 0 to 2: 180 planned = 90 delivered + 90 filtered"
    assert re.match(r"epoch 3: 60 planned = \d delivered .* \+ \d+ not taken \(left early: unaudited\)$", lines[1])


def test_passes_that_begin_in_threads_at_once(urls):
    """An order is an attribute of what torch iterates over: one thread's replaced or removed another one's."""
    loader = ShardLoader(dataset(urls), 8)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda _: taken(loader), range(40))) == [SAMPLES] * 40
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", ["collated", "fields", "arrays"])
def test_a_batch_that_fails_is_in_flight(urls, kind):
    """Three loaders count it alike: it was read, and did not arrive."""

    def fail(batch, *_):
        values = batch["cls"] if isinstance(batch, dict) else [int(sample["cls"]) for sample in batch]
        if 20 in values:
            raise ValueError("no")
        return batch

    stream = dataset(urls, shuffle=False)
    loader = {
        "collated": lambda: ShardLoader(stream, 8, collate_fn=fail),
        "fields": lambda: ShardLoader(stream, 8, fields=FIELDS, transforms=[fail]),
        "arrays": lambda: ArrayLoader(stream, 8, fields=FIELDS, transforms=[fail]),
    }[kind]()
    with pytest.raises(Exception, match="no"):
        list(loader)
    assert counts(loader.ledger) == (16, 0, 0, 0, 8)
    equation = "epoch 0: 60 planned = 16 delivered + 8 in flight + 36 not taken (left early: unaudited)"
    assert str(loader.ledger).splitlines()[0] == equation


@pytest.mark.parametrize("workers", [0, 2])
@INDEXED
def test_what_a_function_drops_is_filtered(urls, workers, index):
    samples = dataset(urls, index=index).map(odd_alone, drop_none=True).map(fail_on_fives)
    loader = ShardLoader(samples, 8, num_workers=workers)
    assert taken(loader) == 24
    assert counts(loader.ledger) == (24, 30, 6, 0, 0)
    assert loader.ledger.filtered == {"map(odd_alone)": 30}
    assert not index or len(loader) == 8


@pytest.mark.parametrize("workers", [0, 2])
@INDEXED
def test_samples_that_lack_a_field_fail(urls, workers, index):
    samples = dataset(urls, index=index).map(without_fives).select_fields("cls n").to_tuple("cls", "n")
    loader = ShardLoader(samples, 8, num_workers=workers)
    assert sum(len(batch[0]) for batch in loader if batch) == 48
    assert counts(loader.ledger) == (48, 0, 12, 0, 0)
    assert {entry.reason for entry in loader.ledger.quarantined} == {"no field n; the sample has cls, odd.cls"}
    with pytest.raises(SampleError, match="no field n; the sample has cls"):
        list(ShardLoader(dataset(urls, index=index, on_error=None).to_tuple("n"), 8, num_workers=workers))


def no_sevens(data):
    if data == b"cat":
        raise ValueError("a cat")
    return int(data)


@pytest.mark.parametrize("workers", [0, 2])
@INDEXED
def test_samples_that_a_decoder_of_the_user_fails_on(urls, workers, index):
    samples = dataset(urls, index=index).decode({"odd.cls": no_sevens})
    loader = ShardLoader(samples, 8, num_workers=workers)
    assert taken(loader) == 51
    assert counts(loader.ledger) == (51, 0, 9, 0, 0)
    entries = loader.ledger.quarantined
    assert {(entry.field, entry.reason) for entry in entries} == {("odd.cls", "ValueError: a cat")}
    assert sorted(entry.key for entry in entries) == [f"{i:03d}" for i in range(0, 60, 7)]


def without_fives(sample):
    return sample if int(sample["cls"]) % 5 == 0 else {**sample, "n": 1}


def in_pairs(samples):
    for sample in samples:
        partner = next(samples, None)
        yield {"cls": [sample["cls"]] + ([] if partner is None else [partner["cls"]])}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipe_in_the_workers_of_a_loader(urls, workers):
    samples = dataset(urls, index=False).filter(odd).pipe(in_pairs)
    loader = ShardLoader(samples, 4, num_workers=workers, collate_fn=list)
    batches = list(loader)
    assert sorted(int(cls) for batch in batches for pair in batch for cls in pair["cls"]) == list(range(1, 60, 2))
    assert counts(loader.ledger)[:3] == (30, 30, 0)
    with pytest.raises(TypeError, match=r"^pipe is not for a ShardLoader: its function may hold samples"):
        ShardLoader(dataset(urls).pipe(in_pairs), 4)


def many_of_one(samples):
    for sample in samples:
        yield from [sample] * 20


@pytest.mark.soak
@pytest.mark.parametrize(
    ("workers", "steps", "drop_last"),
    [
        *product([0], [1, 5, None], [False, True]),
        *((2, 1, True), (2, 5, False), (2, None, True)),
        *[(2, 1, False), (2, 5, True), (2, None, False)] * (SOAK > 1),
    ],
)
def test_a_loader_left_behind_a_pipe_counts_what_went_into_it(urls, workers, steps, drop_last):
    """It yields more than it takes, so that batches are no count of samples."""
    samples = dataset(urls, index=False, pool=1).filter(odd).pipe(many_of_one)
    loader = ShardLoader(samples, 7, num_workers=workers, drop_last=drop_last)
    list(islice(loader, steps))
    gc.collect()
    delivered, filtered, *_, in_flight = counts(loader.ledger)
    assert (in_flight, loader.ledger._total().discarded) == (0, 0)
    assert 1 <= delivered <= 30
    assert steps is not None or (delivered, filtered) == (30, 30)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_left_counts_the_samples_of_its_buffers_as_in_flight(urls, workers):
    loader = ShardLoader(dataset(urls, index=False).filter(odd), 4, num_workers=workers)
    batches = iter(loader)
    assert taken(islice(batches, 3)) == 12
    batches.close()
    gc.collect()
    assert counts(loader.ledger)[0] == 12


FILLED = {
    "map": lambda stream: stream.map(without_fives).map(
        lambda sample: sample if "n" in sample else None, drop_none=True
    ),
    "keep_fields": lambda stream: stream.map(without_fives).keep_fields("__key__ n"),
    "decode": lambda stream: stream.decode({"odd.cls": no_sevens}),
}


@pytest.mark.parametrize("name", FILLED)
def test_batches_from_which_these_ops_took_samples_are_filled(urls, name):
    loader = ShardLoader(FILLED[name](dataset(urls)), 4, fill=True)
    assert [len(batch["__key__"]) for batch in loader] == [4] * 15
    loader.ledger.check()
    tally = loader.ledger._total()
    assert tally.repeated == tally.filtered.total() + tally.failed > 0


@pytest.mark.parametrize("workers", [0, 2])
@INDEXED
def test_a_pipe_in_the_workers_of_a_dataloader(urls, workers, index):
    samples = dataset(urls, index=index).filter(odd).pipe(in_pairs)
    pairs = list(DataLoader(samples, batch_size=None, num_workers=workers))
    assert sorted(int(cls) for pair in pairs for cls in pair["cls"]) == list(range(1, 60, 2))
    assert counts(samples.ledger) == (30, 30, 0, 0, 0)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("workers", "persistent", "steps"),
    [
        *product([0], [False], [1, 2, 5, 8]),
        *((1, False, 2), (3, False, 1), (3, False, 8), (3, True, 1), (3, True, 5)),
        *[*product([1], [False], [1, 5, 8]), *product([3], [False, True], [2, 5, 8])] * (SOAK > 1),
    ],
)
def test_a_shard_loader_that_is_left_delivered_what_its_loop_got(urls, workers, persistent, steps, tmp_path):
    made = tmp_path / "made"
    made.touch()
    samples = dataset(urls).filter(odd).map(fail_on_fives).map(partial(note, made))
    loader = ShardLoader(samples, 8, num_workers=workers, persistent_workers=persistent)
    iterator = iter(loader)
    got = taken(islice(iterator, steps))
    if workers == 3 and steps == 1:
        wait_until(lambda: made.stat().st_size > 16)
    del iterator
    gc.collect()
    expected = got
    if persistent:
        expected += taken(loader)  # the next pass ends the one before in the workers
    ledger = loader.ledger
    assert counts(ledger)[0] == expected
    assert ledger.unaudited or steps == len(loader)
    if workers == 3 and steps == 1:
        assert counts(ledger)[-1] > 0, "workers had made batches ahead"


@pytest.mark.soak
@pytest.mark.parametrize(("workers", "tail"), some([*product([0, 2], ["pad", "drop", "exact"])], 2))
def test_ranks_and_tails(urls, tail, workers):
    loaders = []
    for rank in range(7):
        data = dataset(urls, tail=tail, world=World(rank, 7)).filter(odd).map(fail_on_fives)
        loaders.append(ShardLoader(data, 4, num_workers=workers))
        list(loaders[-1])
        counts(loaders[-1].ledger)
    ledger = loaders[0].ledger
    for loader in loaders[1:]:
        ledger.merge(loader.ledger)
    delivered, filtered, failed, lost, in_flight = counts(ledger)
    tally = ledger._total()
    assert (lost, in_flight, tally.planned) == (0, 0, SAMPLES)
    assert tally.repeated == (3 if tail == "pad" else 0)
    assert delivered + filtered + failed + tally.dropped == SAMPLES + tally.repeated
    assert tally.dropped == (4 if tail == "drop" else 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_gone_is_quarantined(urls, tmp_path, workers):
    data = dataset(urls)
    (tmp_path / "set-03.tar").unlink()
    loader = ShardLoader(data.filter(odd).map(fail_on_fives), 8, num_workers=workers)
    assert taken(loader) == 20
    assert counts(loader.ledger) == (20, 25, 5, 10, 0)
    assert "quarantined     10\n" in str(loader.ledger)


@pytest.mark.parametrize("workers", [0, 2])
@INDEXED
def test_a_dataset_in_a_data_loader(urls, workers, index):
    data = dataset(urls, index=index).filter(odd).map(fail_on_fives)
    assert len(list(DataLoader(data, None, num_workers=workers))) == 24
    assert counts(data.ledger) == (24, 30, 6, 0, 0)


@pytest.mark.parametrize(("index", "workers"), [(True, 0), (True, 2), (False, 0)])
def test_a_filter_that_leaves_nothing_is_a_warning(urls, workers, index, caplog):
    loader = ShardLoader(dataset(urls, index=index).filter(nothing), 8, num_workers=workers)
    assert taken(loader) == 0
    assert caplog.messages == ["no sample of this epoch was delivered: of 60 read, filter(nothing) left out 60"]


@INDEXED
@pytest.mark.parametrize("threads", [0, 2])
def test_an_array_loader(urls, threads, index):
    data = Stream.from_shards(urls, index=index, on_error=Ledger(max_errors=1000))
    fields = {"cls": readers.integer(), "odd.cls": readers.integer()}
    loader = ArrayLoader(data, 8, fields=fields, threads=threads)
    assert taken(loader) == 51
    assert counts(loader.ledger) == (51, 0, 9, 0, 0)
    assert loader.ledger.failed == len(loader.ledger.quarantined) == 9
    got = taken(islice(loader, 3))
    gc.collect()
    assert counts(loader.ledger)[0] == 51 + got
    assert loader.ledger.unaudited
    if index:
        assert counts(loader.ledger)[-1] == 0, "what threads made ahead was never counted as read"


def test_an_array_loader_of_a_shard_that_is_gone(urls, tmp_path):
    data = Stream.from_shards(urls, on_error=Ledger(max_errors=1000))
    (tmp_path / "set-03.tar").unlink()
    loader = ArrayLoader(data, 8, fields={"odd.cls": readers.integer()})
    assert sum(len(batch["__key__"]) for batch in loader) == 42
    assert counts(loader.ledger) == (42, 0, 8, 10, 0)
