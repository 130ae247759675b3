"""Selections agree with grep on the files and Python on the decoded fields; missing keys are reported."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarshards import Ledger, ShardWriter, read_samples, write_samples
from tarshards.errors import DecodeError, OpenError, SampleError, ShardIndexError, TarError
from tarshards.samples.conditions import Condition
from tarshards.samples.lines import read_keys
from tarshards.verbs.grep import Duplicate, KeyFilter, Pattern, matching


def keys(samples) -> list[str]:
    return [sample["__key__"] for sample in samples]


def sample_of(number: int, **fields) -> dict:
    return {"__key__": f"k{number}", "__url__": "x.tar", **fields}


@pytest.fixture
def shards(tmp_path):
    """Return a function that writes the samples k0 to k29 to three shards, and returns their expression."""

    def write(*, index: bool) -> str:
        with ShardWriter(str(tmp_path / "%d.tar"), max_samples=10, index=index) as writer:
            for i in range(30):
                writer.write({"__key__": f"k{i}", "txt": f"text {i}", "bin": bytes([i]) * 2000})
        return str(tmp_path / "{0..2}.tar")

    return write


# Patterns

LINES = st.lists(st.text("abAB .-", max_size=5), min_size=1, max_size=3).map("\n".join)


@given(
    st.lists(LINES, min_size=1, max_size=5), st.text("ab.A^$ ", min_size=1, max_size=4), st.booleans(), st.booleans()
)
def test_patterns_are_found_where_grep_finds_them(tmp_path_factory, texts, pattern, fixed, ignore_case):
    folder = tmp_path_factory.mktemp("files")
    for i, text in enumerate(texts):
        (folder / f"k{i}").write_text(text + "\n")
    options = ["-F" if fixed else "-E", *(["-i"] if ignore_case else [])]
    if not fixed and re.search(r"[^^]\^|\$[^$]|^\$", pattern):
        return  # anchors within a pattern are matters of taste
    command = ["grep", "-l", *options, "-e", pattern, "-r", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.stderr == ""
    found = Pattern([pattern], fixed=fixed, ignore_case=ignore_case)
    samples = [sample_of(i, txt=text.encode()) for i, text in enumerate(texts)]
    assert keys(filter(found, samples)) == sorted(name.removeprefix("./") for name in done.stdout.split())


def test_letters_are_those_of_the_text():
    ü = sample_of(0, txt="Über\n".encode())
    assert Pattern(["über"], ignore_case=True)(ü)
    assert Pattern([r"^\wber$"])(ü)
    assert Pattern(["[äöüÜ]ber"])(ü)


def test_bytes_that_are_no_text_are_searched_too():
    jpg = sample_of(0, jpg=b"\xff\xd8 Exif \xfc")
    assert Pattern(["Exif"])(jpg)
    assert Pattern([r"^\xff"])(jpg)
    assert not Pattern(["exif"])(jpg)


def test_fields_say_where_to_look():
    sample = sample_of(7, txt=b"cat", json=b'"dog"', cls=3)
    assert Pattern(["dog"])(sample)
    assert not Pattern(["dog"], fields=[["txt"]])(sample)
    assert Pattern(["dog"], fields=[["txt"], ["json"]])(sample)
    assert not Pattern(["dog"], fields=[["txt", "json"]])(sample), "the first alternative that there is"
    assert Pattern(["cat"], fields=[["caption", "txt"]])(sample)
    assert Pattern(["^3$"], fields=[["cls"]])(sample)
    assert Pattern(["k7"], fields=[["__key__"]])(sample)
    assert not Pattern(["k7|x.tar"])(sample), "names of the sample are no fields"


def test_fields_that_are_missing_are_counted():
    pattern = Pattern(["a"], fields=[["txt", "text"], ["cls"]])
    assert not any(map(pattern, [sample_of(0, cls=1), sample_of(1, bin=b"a"), sample_of(2, text=b"b", cls=1)]))
    assert pattern.missing == {"txt or text": 2, "cls": 1}


def test_several_patterns_are_alternatives():
    assert [Pattern(["cat", "dog"])(sample_of(0, txt=text)) for text in ("a dog", "a cat", "a cow")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "[[:alpha:]]", "a{999999999999}"])
def test_what_is_no_regular_expression(pattern):
    with pytest.raises(ValueError, match="is not a regular expression"):
        Pattern([pattern])
    Pattern([pattern], fixed=True)


# Matching


@given(st.lists(st.integers(0, 3)), st.booleans(), st.none() | st.integers(0, 5))
def test_matching_is_filter(values, invert, most):
    samples = [sample_of(i, cls=str(value)) for i, value in enumerate(values)]
    expected = [sample for sample in samples if (int(sample["cls"]) > 1) != invert]
    assert list(matching(samples, lambda s: int(s["cls"]) > 1, invert=invert, most=most)) == expected[:most]


def test_nothing_is_read_after_the_last_that_is_wanted():
    samples = iter([sample_of(0), sample_of(1)])
    assert len(list(matching(samples, lambda sample: True, most=1))) == 1
    assert keys(samples) == ["k1"]


def test_what_cannot_be_decided_on_is_an_error_also_when_inverted():
    samples = [sample_of(0, cls=b"1"), sample_of(1, cls=b"many"), sample_of(2)]
    condition = Condition("cls == 1")
    with pytest.raises(DecodeError, match=r"x\.tar: k1\.cls"):
        list(matching(samples, condition))
    rejected = []
    kept = list(matching(samples, condition, invert=True, reject=lambda sample, error: rejected.append(sample)))
    assert (kept, keys(rejected)) == ([], ["k1", "k2"])


# KeyFilter


@pytest.mark.parametrize("index", [False, True])
def test_keys_come_in_the_order_of_the_shards(shards, index):
    wanted = ["k25", "k3", "k11", "k3", "k10", "k0"]
    ledger = Ledger()
    samples = list(KeyFilter(wanted).read(shards(index=index), on_error=ledger))
    assert keys(samples) == ["k0", "k3", "k10", "k11", "k25"]
    assert samples == [sample for sample in read_samples(shards(index=False)) if sample["__key__"] in wanted]
    assert ledger.shards == 3


def test_with_an_index_only_the_samples_of_the_keys_are_read(shards, tmp_path):
    urls = shards(index=True)
    data = bytearray((tmp_path / "1.tar").read_bytes())
    at = data.index(b"text 15")
    data[at - 512 + 148] ^= 1  # the checksum of the header of another sample
    (tmp_path / "1.tar").write_bytes(data)
    assert keys(KeyFilter(["k11"]).read(urls)) == ["k11"]
    (tmp_path / "2.tar.index").unlink()
    with pytest.raises(TarError, match=r"1\.tar: offset .* bad header checksum"):
        list(KeyFilter(["k11"]).read(urls))


@pytest.mark.parametrize("index", [False, True])
def test_keys_that_are_lacking_are_named(shards, index):
    read = KeyFilter(["k1", "x", "y"]).read(shards(index=index))
    assert next(read)["__key__"] == "k1"
    with pytest.raises(SampleError, match=r"^no sample has 2 of 3 keys: x, y$"):
        next(read)
    with pytest.raises(SampleError, match=r"no sample has 9 of 9 keys: 0, 1, 2, 3, 4, \.\.\.$"):
        list(KeyFilter(map(str, range(9))).read(shards(index=index)))


def test_keys_that_are_lacking_can_be_counted():
    wanted, ledger = KeyFilter(["a", "b", "c"]), Ledger(max_errors=2)
    assert wanted({"__key__": "b"})
    wanted.check(ledger)
    assert [entry.key for entry in ledger.quarantined] == ["a", "c"]


def test_a_stale_index_is_an_error(shards, tmp_path):
    urls = shards(index=True)
    with open(tmp_path / "1.tar", "ab") as file:
        file.write(bytes(512))
    with pytest.raises(ShardIndexError, match=r"1\.tar\.index"):
        list(KeyFilter(["k11"]).read(urls))
    ledger = Ledger(max_errors=9)
    assert keys(islice(KeyFilter(["k1", "k11", "k21"]).read(urls, on_error=ledger), 2)) == ["k1", "k21"]
    assert len(ledger.quarantined) == 1


def test_keys_are_escaped_as_in_a_table(tmp_path):
    (tmp_path / "keys").write_text("a\nb\\tc\r\n\n d\\\\e\nf\\xff\n")
    assert list(read_keys(str(tmp_path / "keys"))) == ["a", "b\tc", " d\\e", "f\udcff"]
    (tmp_path / "keys").write_text("a\n\\q\n")
    with pytest.raises(SampleError, match=r"keys: line 2: .* is not an escape"):
        list(read_keys(str(tmp_path / "keys")))
    with pytest.raises(OpenError):
        list(read_keys(str(tmp_path / "none")))


def test_a_key_of_two_shards_is_selected_twice(tmp_path):
    for name in "ab":
        write_samples([sample_of(1, txt=name)], str(tmp_path / f"{name}.tar"))
    assert [s["txt"] for s in KeyFilter(["k1"]).read(str(tmp_path / "{a,b}.tar"))] == [b"a", b"b"]


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "ab"]), st.binary(max_size=2), min_size=1)))
def test_duplicates_are_those_of_a_list(samples):
    duplicate = Duplicate()
    assert [duplicate(sample) for sample in samples] == [sample in samples[:i] for i, sample in enumerate(samples)]


def test_names_and_bytes_are_not_mixed_up():
    duplicate = Duplicate()
    assert not duplicate(sample_of(1, a=b"b0\x000\x00"))
    assert not duplicate(sample_of(2, a5=b"", b=b""))
