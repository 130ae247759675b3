"""Grain: indexed shards are a source of its datasets and of its DataLoader, whose states load in another process."""

from __future__ import annotations

import json
import subprocess
import sys

import grain
import pytest

from tarshards import IndexedShards, ShardWriter

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

COUNT = 103


@pytest.fixture
def urls(tmp_path) -> str:
    with ShardWriter(f"{tmp_path}/set-%02d.tar", max_samples=20) as writer:
        for number in range(COUNT):
            writer.write({"__key__": f"{number:05d}", "cls": number})
    return f"{tmp_path}/set-{{00..05}}.tar"


def number_of(sample) -> int:
    return sample["cls"]


def pipeline(urls: str) -> grain.IterDataset:
    source = IndexedShards(urls).decode()
    return grain.MapDataset.source(source).shuffle(seed=3).map(number_of).batch(10).to_iter_dataset()


def test_it_is_a_source(urls):
    assert isinstance(IndexedShards(urls), grain.sources.RandomAccessDataSource)


def test_a_shuffled_epoch_has_each_sample_once(urls):
    batches = [batch.tolist() for batch in pipeline(urls)]
    assert sorted(number for batch in batches for number in batch) == list(range(COUNT))
    assert batches[0] != list(range(10))
    assert [len(batch) for batch in batches] == [10] * 10 + [3]


def test_an_iterator_goes_on_from_its_state_at_every_batch(urls):
    whole = [batch.tolist() for batch in pipeline(urls)]
    iterator = iter(pipeline(urls))
    for number in range(len(whole)):
        again = iter(pipeline(urls))
        again.set_state(json.loads(json.dumps(iterator.get_state())))
        assert [batch.tolist() for batch in again] == whole[number:]
        assert next(iterator).tolist() == whole[number]


def test_ranks_take_slices(urls):
    parts = [grain.MapDataset.source(IndexedShards(urls).decode())[rank::3].map(number_of) for rank in range(3)]
    assert [list(part) for part in parts] == [list(range(rank, COUNT, 3)) for rank in range(3)]


PROGRAM = """
import sys
import grain
from tarshards import IndexedShards

def loader(urls):
    source = IndexedShards(urls).decode(only="cls")
    sampler = grain.samplers.IndexSampler(len(source), shuffle=True, seed=3, num_epochs=1)
    return grain.DataLoader(data_source=source, sampler=sampler, worker_count=int(sys.argv[2]))

if __name__ == "__main__":
    iterator = iter(loader(sys.argv[1]))
    if sys.argv[3:]:
        iterator.set_state(open(sys.argv[3], "rb").read())
        print(*(sample["cls"] for sample in iterator))
    else:
        print(*(next(iterator)["cls"] for _ in range(17)))
        open("state", "wb").write(iterator.get_state())
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_its_data_loader_goes_on_in_another_process(urls, tmp_path, workers):
    """It compares the ``repr`` of the source with that in the state."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-W", "ignore", "program.py", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    first, rest = run(urls, str(workers)).split(), run(urls, str(workers), "state").split()
    assert len(first) == 17
    assert sorted(map(int, first + rest)) == list(range(COUNT))
    if workers == 0:
        other = urls.replace("{00..05}", "{05..00}")
        assert "DataSource in checkpoint does not match" in run(other, "0", "state", code=1)
