"""A mixture of streams takes each source in its order, where a mixture of indexed datasets chooses it."""

from __future__ import annotations

import sys
from collections import Counter
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import Leftovers

from tarshards import Ledger, write_samples
from tarshards.epoch.choices import Choices
from tarshards.epoch.proportions import Quotas
from tarshards.errors import OpenError, SampleError, StateError, TarError, UrlError
from tarshards.verbs.mix import Source, mix_streams, parse_sources, read_sources


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of shards a.tar, b.tar, ... of 1 to 12 samples a0, a1, ..."""
    folder = tmp_path_factory.mktemp("shards")
    for size, name in enumerate("abcdefghijkl", 1):
        samples = [{"__key__": f"{name}{i}", "cls": i, "txt": f"text {i}"} for i in range(size)]
        write_samples(samples, str(folder / f"{name}.tar"))
    return folder


@pytest.fixture(scope="module")
def mixed(folder):
    """Return a function that mixes the shards of these letters by weights, and returns the keys."""

    def mix(weights: dict, **options) -> list[str]:
        sources = [Source(str(folder / f"{name}.tar"), weight) for name, weight in weights.items()]
        return [sample["__key__"] for sample in mix_streams(sources, **options)]

    return mix


WEIGHTS = st.dictionaries(
    st.sampled_from("abcdefghijkl"), st.integers(0, 9) | st.sampled_from(["0.7", 0.3, 1e-1, "2.50"]), min_size=1
).filter(lambda weights: any(Fraction(str(weight)) for weight in weights.values()))
UNTIL = st.sampled_from(["first", "last"]) | st.integers(0, 100)


@settings(max_examples=60)
@given(weights=WEIGHTS, until=UNTIL, seed=st.integers())
def test_sources_come_as_indexed_datasets_are_chosen_each_in_its_order(mixed, weights, until, seed):
    sizes = ["abcdefghijkl".index(name) + 1 for name in weights]
    choices = Choices(Quotas(list(weights.values())), seed, sizes, until, [1] * len(sizes))
    names, positions = list(weights), np.arange(choices.total)
    chosen, numbers = choices.unpermuted().look_up(0, positions)
    expected = [f"{names[i]}{number % sizes[i]}" for i, number in zip(chosen, numbers)]
    assert mixed(weights, until=until, seed=seed) == expected
    assert (np.bincount(choices.look_up(0, positions)[0]) == np.bincount(chosen)).all()


def test_it_ends_with_the_first_or_the_last_or_after_so_many(mixed):
    assert len(mixed({"c": 1, "l": 1})) in (6, 7), "c is asked for the 4th time when 6 or 7 have come"
    assert mixed({"c": 1, "l": 1}, until="last")[-1] == "l11"
    assert Counter(key[0] for key in mixed({"c": 3, "l": 1}, until=100)) == {"c": 75, "l": 25}
    assert mixed({"c": 1}, until="last") == mixed({"c": 1}) == ["c0", "c1", "c2"]
    assert mixed({"c": 1, "l": 1}, until=0) == []


def test_a_source_without_weight_is_not_opened_and_not_waited_for(mixed, folder):
    assert mixed({"c": 1, "l": 0}, until="last") == ["c0", "c1", "c2"]
    sources = [Source(str(folder / "c.tar")), Source(str(folder / "missing.tar"), 0)]
    assert len(list(mix_streams(sources))) == 3


def test_other_seeds_begin_with_others(mixed):
    assert {mixed({"a": 1, "b": 1, "c": 1}, until=1, seed=seed)[0] for seed in range(20)} == {"a0", "b0", "c0"}
    assert mixed({"a": 1, "b": 1}, seed=3, until=50) == mixed({"a": 1, "b": 1}, seed=3, until=50)


def test_every_pass_of_a_shuffled_source_has_another_order(folder):
    source = Source(str(folder / "{k,l}.tar"), shuffle=100)
    keys = [sample["__key__"] for sample in mix_streams([source], until=69, seed=1)]
    passes = [tuple(keys[i : i + 23]) for i in range(0, 69, 23)]
    assert len(set(passes)) == 3
    assert len({frozenset(each) for each in passes}) == 1
    assert keys == [sample["__key__"] for sample in mix_streams([source], until=69, seed=1)]


def test_fields_are_renamed(folder):
    sources = [Source(str(folder / "a.tar"), rename={"text": "caption;txt"}), Source(str(folder / "b.tar"))]
    assert {tuple(sorted(sample)) for sample in mix_streams(sources)} == {
        ("__key__", "__url__", "cls", "text"),
        ("__key__", "__url__", "cls", "txt"),
    }
    bad = Source(str(folder / "a.tar"), rename={"image": "png"})
    with pytest.raises(SampleError, match="no field png"):
        list(mix_streams([bad]))


def test_damage_is_an_error_or_counted_and_the_shares_hold(folder, tmp_path):
    data = bytearray((folder / "l.tar").read_bytes())
    data[6 * 2048] ^= 1
    (tmp_path / "bad.tar").write_bytes(data)
    sources = [Source([str(tmp_path / "bad.tar"), str(folder / "k.tar")]), Source(str(folder / "j.tar"), 2)]
    with pytest.raises(TarError, match=r"bad\.tar: offset 12288"):
        list(mix_streams(sources, until="last"))
    ledger = Ledger(max_errors=1)
    keys = [sample["__key__"][0] for sample in mix_streams(sources, until="last", on_error=ledger)]
    assert len(ledger.quarantined) == 1
    assert (keys.count("l"), keys.count("k")) == (5, 11), "whether the 6th was whole is not known"
    assert abs(keys.count("j") - 2 * 16) <= 1


def test_a_source_without_samples_is_an_error(folder, tmp_path):
    write_samples([], str(tmp_path / "empty.tar"))
    sources = [Source(str(folder / "l.tar")), Source(str(tmp_path / "empty.tar"))]
    with pytest.raises(SampleError, match=r"empty\.tar: no samples to mix"):
        list(mix_streams(sources, until="last"))


def test_stdin_is_read_once(folder, monkeypatch):
    def mix(until):
        file = open(folder / "b.tar", "rb")  # noqa: SIM115
        monkeypatch.setattr("tarshards.storage.stdio.Stdio.open", lambda *_, **__: file)
        with file:
            return len(list(mix_streams([Source("-"), Source(str(folder / "l.tar"))], until=until)))

    assert mix("first") in (4, 5)
    assert mix(4) == 4
    with pytest.raises(OpenError, match=r"^-: stdin has ended and cannot be read again"):
        mix("last")
    with pytest.raises(UrlError, match="stdin can be only one of the sources"):
        mix_streams([Source("-"), Source(["-", "a.tar"])])


def test_nothing_stays_open(folder):
    before = Leftovers()
    mixture = mix_streams([Source(str(folder / f"{name}.tar")) for name in "jkl"], until="last")
    assert len(list(islice(mixture, 10))) == 10
    assert before.files()
    mixture.close()
    assert not before.files()


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], ["x", 1], [float("inf"), 1], [float("nan")]])
def test_weights_that_are_none(folder, weights):
    with pytest.raises((ValueError, StateError), match="weights must be"):
        mix_streams([Source(str(folder / "a.tar"), weight) for weight in weights])


def test_until_is_no_negative_number(folder):
    with pytest.raises(ValueError, match="a number of samples"):
        mix_streams([Source(str(folder / "a.tar"))], until=-1)


# What a person writes


@pytest.mark.parametrize(
    ("text", "shards", "weight"),
    [
        ("a.tar:0.7", "a.tar", "0.7"),
        ("b-{0..9}.tar:3", "b-{0..9}.tar", "3"),
        ("http://host:80/a.tar:.5", "http://host:80/a.tar", ".5"),
        ("pipe:cat a.tar:1e-3", "pipe:cat a.tar", "1e-3"),
        ("http://host:80/a.tar", "http://host:80/a.tar", 1),
        ("-:2", "-", "2"),
    ],
)
def test_sources_and_weights(text, shards, weight):
    assert parse_sources([text]) == [Source(shards, weight)]


def test_either_all_sources_have_a_weight_or_none():
    assert [source.weight for source in parse_sources(["a.tar", "b.tar"])] == [1, 1]
    with pytest.raises(ValueError, match=r"^b\.tar has no weight, but others have"):
        parse_sources(["a.tar:2", "b.tar"])


def test_sources_in_yaml(tmp_path):
    (tmp_path / "mix.yaml").write_text(
        """
        sources:
        - shards: a-{0..9}.tar
          weight: 0.7
          shuffle: 1000
          rename: {image: jpg;png}
        - shards: [b.tar, c.tar]
        """
    )
    expected = [Source("a-{0..9}.tar", 0.7, 1000, {"image": "jpg;png"}), Source(["b.tar", "c.tar"], 1)]
    assert read_sources(str(tmp_path / "mix.yaml")) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a mixture must be a list of sources"),
        ("[]", "a mixture must be a list of sources"),
        ("{a: b", "not YAML: "),
        ("{sources: [{shards: a.tar}], seed: 1}", "a mixture must be a list of sources"),
        ("[a.tar]", "source 1 must have shards"),
        ("[{shards: a.tar}, {weight: 1}]", "source 2 must have shards"),
        ("[{shards: a.tar, weigth: 1}]", "source 1 must have shards, and may have weight"),
        ("[{shards: a.tar, weight: much}]", "weight must be a number"),
        ("[{shards: a.tar, weight: yes}]", "weight must be a number"),
        ("[{shards: 7}]", "shards must be an expression"),
        ("[{shards: []}]", "shards must be an expression"),
        ("[{shards: a.tar, shuffle: 0}]", "shuffle must be a number of samples"),
        ("[{shards: a.tar, rename: [a]}]", "rename must map new names to old ones"),
        ("[{shards: a.tar, rename: {a: 1}}]", "rename must map new names to old ones"),
        ("!!python/object/apply:os.getcwd []", "not YAML: .*could not determine a constructor"),
    ],
)
def test_yaml_that_is_no_mixture(tmp_path, text, reason):
    (tmp_path / "mix.yaml").write_text(text)
    with pytest.raises(SampleError, match=rf"mix\.yaml: .*{reason}"):
        read_sources(str(tmp_path / "mix.yaml"))


def test_without_pyyaml_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tarshards\[yaml\]'"):
        read_sources(str(tmp_path / "mix.yaml"))
