"""What the page asks for: samples of queries, batches, histograms, damage, with and without indexes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import range_server
from shard_rig import sample, write_set
from with_torch import ShardDataset, ShardLoader, needs_torch, torch

from tarshards import Ledger, ShardWriter, Stream, TarWriter, build_columns
from tarshards.errors import DecodeError, ShardIndexError, StateError
from tarshards.index.build import build_index
from tarshards.samples.codecs import decode_field
from tarshards.samples.lines import read_keys
from tarshards.storage.expressions import find_shards
from tarshards.view import show
from tarshards.view.epoch_batches import read_state
from tarshards.view.static_page import write_static_page
from tarshards.view.view_api import ViewApi


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="module")
def api(urls):
    return ViewApi(urls)


KEYS = [sample(number)["__key__"] for number in range(60)]


def keys(api, begin=0, count=100, **query):
    found = {"done": False, "rows": []}
    while not found["done"] and len(found["rows"]) < count:  # each request searches for a short time
        found = api.rows({"begin": str(begin), "count": str(count), **query})
    return [row["key"] for row in found["rows"]]


def test_all_samples_come_in_their_order(api):
    assert api.about({})["total"] == 60
    assert keys(api) == KEYS
    assert keys(api, 19, 3) == KEYS[19:22]
    assert keys(api, 58) == KEYS[58:]


def test_an_index_of_the_other_rule_for_names_is_not_read(tmp_path):
    url = str(tmp_path / "a.tar")
    with TarWriter(url) as writer:
        for key in "ab":
            writer.write({"__key__": key, "left.txt": b"1", "right.txt": b"2"})
    build_index(url, split="last").save(url)
    assert keys(ViewApi(url)) == ["a", "b"]
    assert keys(ViewApi(find_shards(url).split_by("last"))) == ["a.left", "a.right", "b.left", "b.right"]
    with pytest.raises(ShardIndexError, match="made with `tarindex --split last`"):
        write_static_page(url, str(tmp_path))


QUERIES = [
    ({"match": "part1/"}, lambda n: n % 3 == 1),
    ({"where": "cls == 3"}, lambda n: n % 5 == 3),
    ({"where": 'json["score"] > 0.4 and key.startswith("part2")'}, lambda n: n > 40 and n % 3 == 2),
    ({"sizes": "raw:210-219"}, lambda n: 10 <= n < 20),
    ({"field": "jpg", "match": "/0001"}, lambda n: 10 <= n < 20),
    ({"field": "none"}, lambda n: False),
    ({"shard": "1", "where": "cls == 0"}, lambda n: 20 <= n < 40 and n % 5 == 0),
    ({"duplicates": "key"}, lambda n: False),
]


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(("query", "holds"), QUERIES)
def test_queries(tmp_path, urls, query, holds, index):
    api = ViewApi(urls if index else write_set(tmp_path, index=False))
    assert keys(api, **query) == [key for number, key in enumerate(KEYS) if holds(number)]


def test_a_query_is_searched_as_far_as_it_is_asked_for(api):
    found = api.rows({"begin": "0", "count": "2", "where": "cls >= 0"})
    assert (len(found["rows"]), found["done"]) == (2, False)
    assert found["searched"] < 60
    assert len(keys(api, 50, where="cls >= 0")) == 10


def test_what_a_condition_cannot_judge_is_counted(tmp_path):
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "a", "cls": 1})
        writer.write({"__key__": "b", "txt": "no class"})
    found = ViewApi(str(tmp_path / "a.tar")).rows({"begin": "0", "count": "9", "where": "cls == 1"})
    assert ([row["key"] for row in found["rows"]], found["failed"]) == (["a"], 1)
    assert "b" in found["reason"]


def test_a_search_goes_on_without_rows(api):
    found = api.rows({"begin": str(10**7), "count": "0", "where": "cls == 1"})
    assert [found[name] for name in ("total", "done", "searched", "rows")] == [12, True, 60, []]


def test_order(api):
    assert keys(api, order="key") == sorted(KEYS)
    assert keys(api, order="-key") == sorted(KEYS, reverse=True)
    assert keys(api, order="size:raw") == KEYS
    assert keys(api, order="-size:raw", where="cls == 1") == [key for n, key in enumerate(KEYS) if n % 5 == 1][::-1]


def test_duplicates_stand_side_by_side(tmp_path):
    for name in ("a", "b"):
        with TarWriter(str(tmp_path / f"{name}.tar")) as writer:
            for key in ("same", f"only-{name}", "twice"):
                writer.write({"__key__": key, "txt": key})
        build_index(str(tmp_path / f"{name}.tar"), crc=True).save(str(tmp_path / f"{name}.tar"))
    api = ViewApi(str(tmp_path / "{a,b}.tar"))
    assert keys(api, duplicates="key") == ["same", "same", "twice", "twice"]
    assert sorted(keys(api, duplicates="content")) == ["same", "same", "twice", "twice"]


@pytest.mark.interop
def test_a_column_orders_and_filters_without_reading(tmp_path):
    urls = write_set(tmp_path)
    build_columns(urls, "width:jpg, json.score")
    api = ViewApi(urls)
    assert keys(api, where="score >= 0.5") == KEYS[50:]
    assert keys(api, order="-score") == KEYS[::-1]
    found = api.rows({"begin": "0", "count": "100", "where": "1 / score >= 2"})  # the first has a score of 0
    assert ([row["key"] for row in found["rows"]], found["failed"]) == (KEYS[1:51], 1)
    assert "float division by zero" in found["reason"]
    assert api.names({})["histograms"][:3] == ["class:cls", "column:width", "column:score"]
    assert api.names({})["columns"] == ["width", "score"]
    bars = api.histogram({"of": "column:score"})["bars"]
    assert sum(bar["count"] for bar in bars) == 60
    for bar in bars:
        assert len(keys(api, **bar["query"])) == bar["count"]


@pytest.mark.parametrize("of", ["class:cls", "size:raw", "size:jpg"])
def test_each_bar_has_the_query_that_keeps_its_samples(api, of):
    found = api.histogram({"of": of})
    assert found["samples"] == 60
    for bar in found["bars"]:
        assert len(keys(api, **bar["query"])) == bar["count"]


def test_a_damaged_index_costs_its_shard_only(tmp_path):
    urls = write_set(tmp_path)
    with open(tmp_path / "set-001.tar.index", "r+b") as file:
        file.seek(400)
        file.write(b"damage")
    api = ViewApi(urls)
    rows = api.rows({"begin": "18", "count": "24"})["rows"]
    assert [row["key"] for row in rows] == [*KEYS[18:20], *[""] * 20, *KEYS[40:42]]
    assert all(("damaged" in row.get("error", "")) == (20 <= row["number"] < 40) for row in rows)
    found = api.rows({"begin": "0", "count": "100", "match": "part1"})
    assert [row["key"] for row in found["rows"]] == [key for key in KEYS[:20] + KEYS[40:] if "part1" in key]
    assert (found["failed"], "damaged" in found["reason"]) == (20, True)


def test_a_missing_shard_costs_its_samples_only(tmp_path):
    urls = write_set(tmp_path)
    api = ViewApi(urls)
    (tmp_path / "set-001.tar").unlink()
    rows = api.rows({"begin": "18", "count": "24"})["rows"]
    assert [row["key"] for row in rows] == KEYS[18:42]
    assert ["error" in row for row in rows] == [False] * 2 + [True] * 20 + [False] * 2


@pytest.mark.parametrize("query", [{"sizes": "raw"}, {"order": "nonsense"}, {"where": "("}, {"duplicates": "x"}])
def test_queries_that_are_none_are_refused(api, query):
    for _ in range(2):  # not only at first
        with pytest.raises((ValueError, ShardIndexError)):
            keys(api, **query)


NO_NUMBERS = ["-1", "NaN", "1e3", "1.5", "+1", " 1", "1_0", "٣", "²", "9" * 5000, "null"]
NUMBERS = [("rows", "begin"), ("rows", "count"), ("rows", "shard"), ("rows", "step"), ("keys", "shard")]
NUMBERS += [("histogram", "shard"), ("sample", "number"), ("field", "number"), ("picture", "number")]
NUMBERS += [("picture", "pixels"), ("shards", "begin"), ("shards", "count"), ("damage", "shard")]
GIVEN = {"begin": "0", "count": "2", "number": "0", "field": "jpg", "of": "class:cls"}


@pytest.mark.parametrize(("method", "name"), NUMBERS)
def test_what_is_no_number_is_refused_by_its_name(api, method, name):
    for text in NO_NUMBERS:
        with pytest.raises(ValueError, match=f"^{name}= is a whole number from 0, not "):
            api.methods[method]({**GIVEN, name: text})


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("method", ["rows", "keys", "histogram", "damage"])
@pytest.mark.parametrize("shard", ["3", str(10**17)])
def test_a_shard_that_is_not_there_is_refused(tmp_path, urls, monkeypatch, index, method, shard):
    api = ViewApi(urls if index else write_set(tmp_path, index=False))
    tries = iter(range(100))
    extend = api.viewed.extend
    monkeypatch.setattr(api.viewed, "extend", lambda samples: (next(tries), extend(samples)))
    with pytest.raises(ValueError, match=f"there is no shard {shard} of 3, which are numbered from 0"):
        api.methods[method]({**GIVEN, "shard": shard})
    if method in ("rows", "keys"):
        assert api.methods[method]({**GIVEN, "shard": "2"}), "the query's lock is free"


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("rows", "begin"),
        ("find", "key"),
        ("field", "field"),
        ("picture", "number"),
        ("shards", "count"),
        ("damage", "shard"),
    ],
)
def test_what_is_missing_is_named(api, method, name):
    with pytest.raises(ValueError, match=f"^{name}= is missing"):
        api.methods[method]({each: text for each, text in GIVEN.items() if each != name})


def test_shards_without_indexes_are_indexed_as_far_as_one_scrolls(tmp_path):
    urls = write_set(tmp_path, index=False)
    api = ViewApi(urls)
    assert api.about({}) | {"name": ""} == {
        "name": "", "total": 0, "done": False, "indexed": False, "shards": 3, "left_out": 0, "state": None,
    }  # fmt: skip
    assert keys(api, 0, 10) == KEYS[:10]
    assert api.viewed.known_shards == 1
    assert keys(api, 18, 4) == KEYS[18:22]
    assert api.viewed.known_shards == 2
    assert keys(api) == KEYS
    assert not list(tmp_path.glob("*.index"))
    assert api.find({"key": KEYS[45]}) == {"numbers": [45]}
    with pytest.raises(ShardIndexError, match="tarindex"):
        keys(api, step="0")


@pytest.mark.parametrize("index", [True, False])
def test_remote_samples_are_fetched_together(tmp_path, index):
    write_set(tmp_path, index=index)
    with range_server.serving(tmp_path) as site:
        api = ViewApi(f"{site.url}/set-{{000..002}}.tar")
        assert keys(api, 0, 10) == KEYS[:10]
        site.clear()
        rows = api.rows({"begin": "5", "count": "10"})["rows"]
        assert [row["key"] for row in rows] == KEYS[5:15]
        assert all("head" in field for row in rows for field in row["fields"] if field["name"] == "txt")
        assert len(site.requests) == 1
        assert keys(api, where="cls == 4") == KEYS[4::5]
        assert api.picture({"number": "33", "field": "seg.png"})[0] == "image/png"
        file = api.field({"number": "33", "field": "raw"})
        assert file.read() == sample(33)["raw"]


def of_damaged(number):
    return {"txt": f"text {number}", "cls": number % 5, "json": {"n": number}}


def damaged(folder, samples=60, *, shard="set-000.tar"):
    """Write a shard without index, damage three of its headers and cut its end; return its path."""
    url = str(folder / shard)
    with TarWriter(url) as writer:
        for number in range(samples):
            writer.write({"__key__": f"{number:03d}", **of_damaged(number)})
    with tarfile.open(url) as file:
        offsets = {member.name: member.offset for member in file}
    data = bytearray(Path(url).read_bytes())
    for name in ("010.txt", "020.cls", "031.json"):
        data[offsets[name] : offsets[name] + 200] = b"\xd0" * 200
    Path(url).write_bytes(data[: offsets[f"{samples - 1:03d}.json"] + 600])
    return url


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_damaged_shard_without_an_index_shows_its_whole_samples_and_gaps(tmp_path, is_remote):
    url = damaged(tmp_path)
    ledger = Ledger(max_errors=100)
    whole = [each["__key__"] for each in Stream.from_shards(url, on_damage="resync", on_error=ledger)]
    with range_server.serving(tmp_path) as site:
        api = ViewApi(f"{site.url}/set-000.tar" if is_remote else url)
        found = api.rows({"begin": "0", "count": "100"})
        assert [row["key"] for row in found["rows"] if "error" not in row] == whole
        assert len(whole) > 50
        not_whole = {row["key"]: row["error"] for row in found["rows"] if "error" in row}
        assert {"010", "020", "031", "059"} >= not_whole.keys() > set()
        assert found["total"] == len(whole) + len(not_whole)
        assert "set-000.tar" in found["problems"][0]
        for row in found["rows"]:
            assert [field.get("error") for field in row["fields"]] == [None] * len(row["fields"])
            number = int(row["key"])
            for field in row["fields"]:
                data = bytes(api.field({"number": str(row["number"]), "field": field["name"]}))
                assert decode_field(field["name"], data) == of_damaged(number)[field["name"]]
        gaps = [(row["key"], gap) for row in found["rows"] for gap in row.get("gaps", ())]
        report = ViewApi(url).damage({"shard": "0"})
        assert [(gap["start"], gap["end"]) for _, gap in gaps] == [(gap["begin"], gap["end"]) for gap in report["gaps"]]
        assert len(gaps) == 4
        assert report["whole"] == len(whole)
        assert keys(api, where="cls == 1") == [key for key in whole if int(key) % 5 == 1]
        assert keys(api, match="03") == [row["key"] for row in found["rows"] if "03" in row["key"]]


@pytest.mark.parametrize(("begin", "size"), [(0, 700), (0, 40_000), (2048, 100), (60_000, 10**9)])
def test_no_whole_sample_is_hidden_or_invented_wherever_the_damage_is(tmp_path, begin, size):
    url = str(tmp_path / "a.tar")
    with TarWriter(url) as writer:
        for number in range(30):
            writer.write({"__key__": f"{number:03d}", "txt": "text " * (number * 37 % 300), "cls": number})
    data = bytearray(Path(url).read_bytes())
    data[begin : begin + size] = b"\xd0" * min(size, len(data) - begin)
    Path(url).write_bytes(data)
    whole = [each["__key__"] for each in Stream.from_shards(url, on_damage="resync", on_error="skip")]
    rows = ViewApi(url).rows({"begin": "0", "count": "100"})["rows"]
    assert [row["key"] for row in rows if "error" not in row] == whole
    assert not [field for row in rows for field in row["fields"] if "error" in field]


def test_a_shard_that_cannot_be_indexed_is_named(tmp_path):
    urls = write_set(tmp_path, index=False)
    (tmp_path / "set-001.tar").write_bytes(b"no tar" * 1000)
    api = ViewApi(urls)
    found = api.rows({"begin": "0", "count": "100"})
    assert [row["key"] for row in found["rows"]] == KEYS[:20] + KEYS[40:]
    assert "set-001.tar" in found["problems"][0]


def test_keys_are_exported_for_select_and_targrep(api, urls, tmp_path):
    kind, text = api.keys({"where": "cls == 2"})
    assert kind.startswith("text/plain")
    (tmp_path / "keys.txt").write_bytes(text)
    expected = [key for number, key in enumerate(KEYS) if number % 5 == 2]
    assert list(read_keys(str(tmp_path / "keys.txt"))) == expected
    stream = Stream.from_shards(urls).select(keys=str(tmp_path / "keys.txt"))
    assert [each["__key__"] for each in stream] == expected


@needs_torch
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_batch_is_what_the_loader_gives(api, urls, ranks, monkeypatch):
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        epoch = {"seed": 7, "epoch": 2, "rank": rank, "ranks": ranks, "batch_size": 4}
        stream = ShardDataset(urls, shuffle=True, seed=7, fields="cls")
        loader = ShardLoader(stream, batch_size=4, collate_fn=list)
        loader.set_epoch(2)
        batches = [[each["__key__"] for each in batch] for batch in loader]
        for step, expected in enumerate(batches):
            assert keys(api, step=str(step), epoch=json.dumps(epoch)) == expected
        found = api.rows({"begin": "0", "count": "9", "step": "0", "epoch": json.dumps(epoch)})
        assert found["about"]["batches"] == len(batches)


@needs_torch
def test_a_state_is_where_the_batches_are_counted_from(api, urls):
    loader = ShardLoader(ShardDataset(urls, shuffle=True, seed=1, fields="cls"), batch_size=8, collate_fn=list)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    checkpoint = {"step": 3, "loaders": [loader.state_dict()]}
    epoch = {"seed": 1, "batch_size": 8, "state": checkpoint}
    expected = [each["__key__"] for each in next(batches)]
    batches.close()
    assert keys(api, step="0", epoch=json.dumps(epoch)) == expected
    with pytest.raises(StateError, match="not the state"):
        keys(api, step="0", epoch=json.dumps({"state": {"step": 3}}))
    assert read_state(json.dumps(checkpoint).encode()) == checkpoint["loaders"][0]
    file = io.BytesIO()
    torch.save({"model": torch.zeros(3), "loaders": (loader.state_dict(),)}, file)
    assert read_state(file.getvalue())["digest"] == checkpoint["loaders"][0]["digest"]
    with pytest.raises(StateError, match="not the state"):
        read_state(b'{"step": 3}')
    file = io.BytesIO()
    torch.save({"loaders": ShardLoader}, file)
    with pytest.raises(DecodeError, match="containers"):
        read_state(file.getvalue())


def test_the_damage_of_a_shard_has_its_places(tmp_path):
    urls = write_set(tmp_path)
    api = ViewApi(urls)
    offset = api.sample({"number": "25"})["fields"][0]["offset"] - 512
    with open(tmp_path / "set-001.tar", "r+b") as file:
        file.seek(offset)
        file.write(b"XXXX")
    found = api.damage({"shard": "1"})
    (gap,) = found["gaps"]
    assert gap["begin"] == offset
    assert found["whole"] + found["lost"] == 20
    assert "damage" in {finding["kind"] for finding in found["findings"]}
    assert found["size"] == (tmp_path / "set-001.tar").stat().st_size


def test_a_sample_that_cannot_be_read_says_why_and_the_others_are_shown(tmp_path):
    urls = write_set(tmp_path)
    first = ViewApi(urls).sample({"number": "3"})["fields"][0]
    with open(tmp_path / "set-000.tar", "r+b") as file:
        file.seek(first["offset"] - 512)
        file.write(b"other.name")
    rows = ViewApi(urls).rows({"begin": "0", "count": "5"})["rows"]
    assert [[field["name"] for field in row["fields"] if "error" in field] for row in rows] == [
        [],
        [],
        [],
        [first["name"]],
        [],
    ]


def test_show_serves_a_frame_and_the_ledger(tmp_path):
    with ShardWriter(str(tmp_path / "a-%03d.tar"), max_samples=5) as writer:
        for number in range(5):
            writer.write({"__key__": f"{number}", "txt": "text"})
    ledger = Ledger(max_errors=1)
    ledger(ShardIndexError("a reason", url="a-000.tar", key="3"))
    shown = show(str(tmp_path / "a-000.tar"), ledger=ledger)
    try:
        assert shown.url in shown._repr_html_()
        (entry,) = shown.server.api.ledger({})["entries"]
        assert (entry["key"], entry["reason"]) == ("3", "a reason")
    finally:
        shown.close()


def test_pictures_are_small_and_of_few_pixels(api, monkeypatch):
    kind, data = api.picture({"number": "0", "field": "jpg", "pixels": "240"})
    assert kind == "image/jpeg"
    assert np.frombuffer(data, "u1")[:2].tobytes() == b"\xff\xd8"
    assert api.picture({"number": "0", "field": "seg.png"})[0] == "image/png"
    monkeypatch.setattr("tarshards.view.pictures.MAX_PIXELS", 80 * 60 - 1)
    with pytest.raises(ValueError, match="80 x 60 pixels"):
        api.picture({"number": "0", "field": "jpg"})
