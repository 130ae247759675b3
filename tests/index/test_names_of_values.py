"""The names of columns, fields and values in JSON are one language: what makes, packs and selects takes each alike."""

from __future__ import annotations

import numpy as np
import pytest

from tarshards import ArrayLoader, IndexedShards, ShardWriter, Stream, bucket, build_columns, pack, readers
from tarshards.errors import SampleError
from tarshards.index.lengths import lengths_of
from tarshards.samples.conditions import Condition

COUNT = 12


def sample(i: int) -> dict:
    """Return sample *i*: text in one of two fields, and values in JSON, one of them a fraction."""
    made = {"__key__": f"{i:02d}", "json": {"score": i / 8, "deep": {"n": i + 1}}, "id": i + 1}
    return made | {"txt" if i % 2 else "text": "x" * (i + 1), "alt.txt": "y" * (i + 1)}


def written(folder) -> str:
    with ShardWriter(folder / "a-%d.tar", max_samples=5) as writer:
        for i in range(COUNT):
            writer.write(sample(i))
    return str(folder / "a-{0..2}.tar")


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return written(tmp_path_factory.mktemp("names"))


@pytest.fixture(scope="module")
def with_columns(tmp_path_factory):
    """The same samples with columns of all kinds."""
    pytest.importorskip("pyarrow")
    urls = written(tmp_path_factory.mktemp("columns"))
    build_columns(urls, "length:txt;text, score=json.score, json.deep.n, alt=alt.txt, long=length:alt.txt, id")
    return urls


WHOLE = list(range(1, COUNT + 1))

BY_FIELDS = {  # a name, and the lengths of the samples by it where there are no columns
    "alt.txt": WHOLE,
    "ALT.TXT": WHOLE,
    "txt;text": WHOLE,
    "TEXT;txt": WHOLE,
    "none;txt;text": WHOLE,
}
BY_COLUMNS = {  # and where there are
    "length": WHOLE,
    "length:txt;text": WHOLE,
    "length: txt;text": WHOLE,
    "long": WHOLE,
    "length:alt.txt": WHOLE,
    "n": WHOLE,
    "json.deep.n": WHOLE,
    "id": WHOLE,
    "score": [i / 8 for i in range(COUNT)],
    "json.score": [i / 8 for i in range(COUNT)],
}


@pytest.mark.parametrize("name", BY_FIELDS)
def test_lengths_by_fields(urls, name):
    assert lengths_of(IndexedShards(urls), name).tolist() == BY_FIELDS[name]


@pytest.mark.interop
@pytest.mark.parametrize("name", BY_COLUMNS)
def test_lengths_by_columns(with_columns, name):
    assert lengths_of(IndexedShards(with_columns), name).tolist() == BY_COLUMNS[name]


@pytest.mark.parametrize("make", [lambda name: pack(name, 30), lambda name: bucket(name, budget=30)])
@pytest.mark.parametrize("name", ["txt;text", "alt.txt"])
def test_packing_by_fields(urls, make, name):
    assert keys_of(urls, make(name)) == keys_of(urls, make(np.array(WHOLE)))


@pytest.mark.interop
@pytest.mark.parametrize("make", [lambda name: pack(name, 30), lambda name: bucket(name, budget=30)])
@pytest.mark.parametrize("name", BY_COLUMNS)
def test_packing_by_columns(with_columns, make, name):
    lengths = np.array(BY_COLUMNS[name])
    packing = make(lengths) if lengths.min() > 0 else make(np.maximum(lengths, 1e-6))
    assert keys_of(with_columns, make(name)) == keys_of(with_columns, packing)


def keys_of(urls, packing):
    stream = Stream.from_shards(urls, shuffle=True, seed=3)
    loader = ArrayLoader(stream, 1, fields={"alt.txt": readers.ragged("u1")}, packing=packing)
    return [batch["__key__"] for batch in loader]


CONDITIONS = {  # a condition, and the samples that meet it, the same by columns and by fields
    "json.score > 1": range(9, 12),
    "json.deep.n <= 3": range(3),
    "json.deep.n <= 3 or json.score > 1": [*range(3), *range(9, 12)],
    "has('json.score') and not json.deep.n == 0": range(12),
    "id in (3, 4)": (2, 3),
    "alt.txt == 'yy'": (1,),
    "alt.txt.startswith('yyyyyyyyyy')": range(9, 12),
    "len(alt.txt) + json.score > 13": (11,),
}
OF_SAMPLES = {  # conditions that columns do not answer
    "json['score'] > 1": range(9, 12),
    "len(fields['txt;text']) > 10": (10, 11),
    "has('nothing;txt') and 'x' in fields['txt']": range(1, 12, 2),
    "any(each.a > 1 for each in [json]) or id < 3": (0, 1),
    "json.nothing.more is None and json.score.deeper is None": range(12),
}
OF_COLUMNS = {"score > 1": range(9, 12), "n <= 3": range(3), "length == long and alt == 'yy'": (1,)}


@pytest.mark.parametrize("condition", [*CONDITIONS, *OF_SAMPLES])
def test_conditions_on_samples(urls, condition):
    wanted = [f"{i:02d}" for i in {**CONDITIONS, **OF_SAMPLES}[condition]]
    stream = Stream.from_shards(urls, index=False).decode()
    assert [found["__key__"] for found in stream.filter(Condition(condition))] == wanted
    chosen = Stream.from_shards(urls).select(condition, fields="json alt.txt txt;text id")
    assert [found["__key__"] for found in chosen] == wanted


@pytest.mark.interop
@pytest.mark.parametrize("condition", [*CONDITIONS, *OF_SAMPLES, *OF_COLUMNS])
def test_conditions_on_columns(with_columns, condition):
    wanted = [f"{i:02d}" for i in {**CONDITIONS, **OF_SAMPLES, **OF_COLUMNS}[condition]]
    assert [found["__key__"] for found in Stream.from_shards(with_columns).select(condition)] == wanted


def lengths_error(urls, name):
    with pytest.raises(SampleError) as raised:
        lengths_of(IndexedShards(urls), name)
    return str(raised.value).partition("a-0.tar: ")[2]


def test_a_name_that_is_of_a_column_says_what_creates_it(urls):
    known = "the sample has alt.txt, id, json, text"
    for name, create in {
        "json.score": "json.score",
        "duration": "duration:FIELD",
        "duration:wav;flac": "duration:wav;flac",
    }.items():
        missing = " or ".join(name.split(";"))
        found = lengths_error(urls, name)
        assert found.startswith(f"00: no field {missing}; {known}")
        assert found.endswith(f"; a column is created by `tarindex --columns '{create}'`")
    assert lengths_error(urls, "wav;flac") == f"00: no field wav or flac; {known}"


@pytest.mark.interop
def test_a_column_that_has_no_length_for_each_sample_is_named(urls, tmp_path):
    pytest.importorskip("pyarrow")
    with ShardWriter(tmp_path / "a-%d.tar", max_samples=5) as writer:
        for i in range(COUNT):
            writer.write(sample(i))
    urls = str(tmp_path / "a-{0..2}.tar")
    odd = {"word": lambda sample: "seven", "some": lambda sample: None if int(sample["__key__"]) == 7 else 1}
    build_columns(urls, {**odd, "endless": lambda sample: float("inf"), "txt": "alt.txt"})
    assert lengths_error(urls, "word") == "00: column word is no length: it has values of the type string"
    assert lengths_error(urls, "endless") == "00: column endless is no length: it has inf for this sample"
    with pytest.raises(SampleError, match=r"a-1\.tar: 07: column some is no length: it has no value for this sample"):
        lengths_of(IndexedShards(urls), "some")
    assert lengths_of(IndexedShards(urls), "alt.txt").tolist() == WHOLE, "a field, and a column of its text"
