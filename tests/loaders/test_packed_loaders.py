"""Every loader gives packed rows and batches of similar length, for any workers, and resumes anywhere."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
from with_torch import ShardDataset, ShardLoader, needs_torch, torch

from tarshards import ArrayLoader, Ledger, ShardWriter, Stream, World, bucket, pack, readers
from tarshards.errors import SampleError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CAPACITY = 64
LENGTHS = np.clip(np.random.default_rng(7).lognormal(2.5, 0.9, 300), 1, CAPACITY).astype(int)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Shards of 120, 120 and 60 samples; the tokens of sample i are all i."""
    folder = tmp_path_factory.mktemp("packed")
    with ShardWriter(str(folder / "x-{shard}.tar"), max_samples=120) as writer:
        for i, length in enumerate(LENGTHS):
            npy = io.BytesIO()
            np.save(npy, np.full(length, i, np.int64))
            raw = np.full(length, i, "<i4").tobytes()
            writer.write({"__key__": f"{i:05d}", "ids.npy": npy.getvalue(), "raw": raw})
    return str(folder / "x-{0..2}.tar")


def decode(sample):
    return {"ids": np.load(io.BytesIO(sample["ids.npy"]))}


def shards(urls, ranks=1, rank=0, **options):
    return {"urls": urls, "shuffle": True, "seed": 3, "world": World(rank, ranks), **options}


def torch_loader(urls, packing, *, workers=0, ranks=1, rank=0, size=1, **options):
    ledger = Ledger(max_errors=0)
    dataset = ShardDataset(**shards(urls, ranks, rank, on_error=ledger, **options)).map(decode)
    return ShardLoader(dataset, size, num_workers=workers, packing=packing)


def array_loader(urls, packing, *, workers=0, ranks=1, rank=0, size=1, **options):
    dataset = Stream.from_shards(**shards(urls, ranks, rank, on_error=Ledger(max_errors=0), **options))
    fields = {"ids:raw": readers.ragged("<i4")}
    return ArrayLoader(dataset, size, fields=fields, threads=workers, packing=packing)


both = pytest.mark.parametrize("make", [torch_loader, array_loader])


def samples_of(batch):
    """The samples of a packed row, as their numbers; checks that the row is what it says."""
    ids, ends = np.asarray(batch["ids"]), np.asarray(batch["cu_seqlens"])
    assert ends.dtype == np.int32
    assert ends[0] == 0
    assert ends[-1] == len(ids)
    parts = np.split(ids, ends[1:-1])
    assert (
        np.concatenate([np.arange(len(part)) for part in parts]).tolist() == np.asarray(batch["position_ids"]).tolist()
    )
    for part in parts:
        assert part.tolist() == [part[0]] * LENGTHS[part[0]]
    return [int(part[0]) for part in parts]


@both
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_have_every_sample_once_for_any_workers(make, workers, urls):
    packing = pack(LENGTHS, CAPACITY, window=128)
    loader, alone = make(urls, packing, workers=workers), make(urls, packing)
    rows = [samples_of(batch) for batch in loader]
    assert len(rows) == len(loader)
    assert rows == [samples_of(batch) for batch in alone]
    assert Counter(i for row in rows for i in row) == Counter(range(300))
    assert max(sum(LENGTHS[row]) for row in rows) <= CAPACITY
    tally = loader.ledger._total()
    assert tally.planned == tally.delivered == 300


def test_both_loaders_deliver_the_same_rows(urls):
    packing = pack(LENGTHS, CAPACITY)
    ours, theirs = (make(urls, packing, size=2) for make in (torch_loader, array_loader))
    assert [samples_of(batch) for batch in ours] == [samples_of(batch) for batch in theirs]


@both
def test_a_batch_alone_is_the_one_that_comes(make, urls):
    loader = make(urls, pack(LENGTHS, CAPACITY), size=2)
    rows = [samples_of(batch) for batch in loader]
    assert [samples_of(loader.passes.maker.make(0, None, 0, 1, g)) for g in (0, 3, len(rows) - 1)] == [
        rows[0],
        rows[3],
        rows[-1],
    ]


@both
def test_a_run_resumes_on_other_ranks(make, urls):
    packing = pack(LENGTHS, CAPACITY, window=100)
    came, state = [], None
    for ranks, steps in ((2, 5), (3, 4), (1, 1000)):
        loaders = [make(urls, packing, ranks=ranks, rank=rank, tail="exact") for rank in range(ranks)]
        states = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            rows = iter(loader)
            for _, batch in zip(range(steps), rows):
                came += samples_of(batch)
            states.append(loader.state_dict())
            rows.close()
        assert all(each == states[0] for each in states)
        state = states[0]
    assert Counter(came) == Counter(range(300))


@both
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_ranks_take_equal_steps(make, tail, urls):
    loaders = [make(urls, pack(LENGTHS, CAPACITY), ranks=4, rank=rank, tail=tail) for rank in range(4)]
    rows = [[samples_of(batch) for batch in loader] for loader in loaders]
    assert len({len(own) for own in rows}) == 1
    for loader in loaders[1:]:
        loaders[0].ledger.merge(loader.ledger)
    total = loaders[0].ledger._total()
    counts = Counter(i for own in rows for row in own for i in row)
    assert total.planned == 300
    assert total.dropped == 300 - len(counts)
    assert total.repeated == counts.total() - len(counts)


@both
def test_overlong_samples_count_as_dropped(make, urls):
    loader = make(urls, pack(LENGTHS, 30, overlong="drop"))
    came = Counter(i for batch in loader for i in samples_of(batch))
    assert came == Counter(np.flatnonzero(LENGTHS <= 30).tolist())
    assert loader.ledger._total().dropped == (LENGTHS > 30).sum() > 0


def test_buckets_have_samples_of_like_length_within_a_budget(urls):
    loader = torch_loader(urls, bucket(LENGTHS, budget=200))
    batches = [[len(ids) for ids in batch["ids"]] for batch in loader]
    assert sum(map(len, batches)) == 300
    assert max(max(own) * len(own) for own in batches) <= 200
    padded = sum(max(own) * len(own) for own in batches)
    assert LENGTHS.sum() / padded > 0.9


@both
def test_a_row_that_exceeds_its_capacity_is_an_error(make, urls):
    with pytest.raises(SampleError, match=r"a packed row has .* 1 x 64 fit: the samples are longer than the lengths"):
        list(make(urls, pack(np.maximum(LENGTHS // 2, 1), CAPACITY)))


def test_a_state_without_packing_does_not_fit(urls):
    plain = torch_loader(urls, None)
    packed = torch_loader(urls, pack(LENGTHS, CAPACITY))
    with pytest.raises(StateError, match="without any"):
        packed.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match="requires the packing="):
        plain.load_state_dict(packed.state_dict())


def test_what_cannot_be_packed_is_refused(urls):
    packing = pack(LENGTHS, CAPACITY)
    with pytest.raises(TypeError, match="fill= is not for packed samples"):
        ShardLoader(ShardDataset(urls), 1, packing=packing, fill=True)
    with pytest.raises(TypeError, match="packing= requires indexed shards"):
        ShardLoader(ShardDataset(urls, index=False), 1, packing=packing)
    with pytest.raises(TypeError, match=r"what pack\(\) or bucket\(\) returns"):
        ShardLoader(ShardDataset(urls), 1, packing=[1])


def new_model():
    """Return one layer of attention that predicts the next token."""
    torch.manual_seed(0)
    parts = torch.nn.ModuleList([torch.nn.Embedding(300, 16), torch.nn.Embedding(CAPACITY, 16)])
    return parts.extend([torch.nn.Linear(16, 48), torch.nn.Linear(16, 300)])


def predict(model, ids, numbers, mask):
    tokens, positions, mix, out = model
    query, key, value = mix(tokens(ids) + positions(numbers)).chunk(3, -1)
    return out(torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def train(loader, loss_of):
    model = new_model()
    losses = []
    for batch in loader:
        loss = loss_of(model, batch["ids"], batch["cu_seqlens"], batch["position_ids"])
        if loss is not None:
            model.zero_grad()
            loss.backward()
            with torch.no_grad():  # by hand: the first optimizer imports the compiler, in a second and 60 MB
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            losses.append(loss.item())
    return losses


def packed_loss(model, ids, ends, numbers):
    sample = torch.bucketize(torch.arange(len(ids)), ends[1:].long(), right=True)
    mask = (sample[:, None] == sample[None]) & (numbers[:, None] >= numbers[None])
    logits, is_followed = predict(model, ids, numbers, mask)[:-1], sample[1:] == sample[:-1]
    if is_followed.any():
        return torch.nn.functional.cross_entropy(logits[is_followed], ids[1:][is_followed])
    return None


def padded_loss(model, ids, ends, _):
    samples = list(ids.split(ends.diff().tolist()))
    rows = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)
    width = rows.shape[1]
    numbers = torch.arange(width).expand_as(rows)
    logits = predict(model, rows.clamp(min=0), numbers, torch.ones(width, width, dtype=torch.bool).tril())
    if width > 1 and (rows[:, 1:] >= 0).any():
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    return None


@needs_torch
def test_a_model_learns_from_packed_rows_what_it_learns_from_padded_ones(urls):
    packing = pack(LENGTHS, CAPACITY)
    packed = train(torch_loader(urls, packing), packed_loss)
    padded = train(torch_loader(urls, packing), padded_loss)
    assert len(packed) > 50
    np.testing.assert_allclose(packed, padded, rtol=1e-3)
