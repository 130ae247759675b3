"""Members grouped in a buffer into samples, and what is reported of members outside samples."""

import ctypes
import gc
import io
import sys
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tar_corpus import entry, header, pack, pax
from test_tar_scan import buffers
from twins import Pair

from tarshards import Ledger
from tarshards.errors import SampleError, TarError
from tarshards.samples.grouping import group_members, read_shard
from tarshards.samples.keys import split_name
from tarshards.storage.manifest import Shard
from tarshards.tar.read import END, MEMBER_LIMIT, Member, pack_header, padding, read_members

PARTS = ["", "a", "b", "B", ".", "/", "_", "__", "__x__", "é", "\udcff", "x" * 40, "key__", "__key__"]
NAMES = st.builds("".join, st.lists(st.sampled_from(PARTS), min_size=1, max_size=7))
TIDY = st.builds("{}{}.{}".format, st.sampled_from(["", "d/", "d.e/", "__x__/", "é/"]), *2 * [st.sampled_from("abcAé")])
KINDS = [b"0", b"0", b"0", b"0", b"5", b"1", b"7", b"S"]


def by_dash(name):
    return name.split("-") if "-" in name else None


def by_odd_types(name):
    """A rule whose keys do not compare, and which fails at some names."""
    if name.startswith("b"):
        raise KeyError(name)
    return (len(name), name) if "." in name else ("", name)


RULES = [(split_name, True), (split_name, False), (by_dash, False), (by_odd_types, False)]


@st.composite
def members(draw):
    """A piece of an archive: members with tidy or odd names, small, and of several kinds."""
    pieces = []
    for name in draw(st.lists(st.one_of(TIDY, TIDY, NAMES), max_size=12)):
        raw = name.encode("utf-8", "surrogateescape")[:300]
        data = draw(st.sampled_from([b"", b"1", bytes(512), b"x" * 700]))
        if draw(st.integers(0, 9)) == 0:
            pieces.append(pax(b"path=" + raw) + entry(data))
        else:
            pieces.append(entry(data, name=raw[:100], kind=draw(st.sampled_from(KINDS))))
    return b"".join(pieces) + draw(st.sampled_from([b"", END, END, header(size=b"?"), b"\1" * 512]))


DOUBLED = pack([("a.x", b""), ("a.__key__", b"")])
APART = pack([("b.x", b""), ("a.X", b""), ("b.x", b"")])
RESERVED = pack([("_.x", b""), ("_.x__", b""), ("__.x", b"")])
LONGER = pax(b"mtime=0.5") + entry(bytes(600), name=b"a.x")[:512]  # than the buffer, after extended headers


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.one_of(members(), members(), buffers()), min_size=1, max_size=3),
    loose=st.lists(st.lists(st.one_of(TIDY, NAMES), max_size=3), min_size=3, max_size=3),
    rule=st.sampled_from(RULES),
    limit=st.sampled_from([MEMBER_LIMIT, 600]),
    splits=st.booleans(),
)
@example(pieces=[DOUBLED], loose=[["a.x"]], rule=RULES[0], limit=MEMBER_LIMIT, splits=False)
@example(pieces=[APART], loose=[["b.y"]], rule=RULES[0], limit=MEMBER_LIMIT, splits=False)
@example(pieces=[APART], loose=[["a.y"]], rule=RULES[0], limit=MEMBER_LIMIT, splits=True)
@example(pieces=[RESERVED], loose=[["__.x"]], rule=RULES[0], limit=600, splits=False)
@example(pieces=[LONGER], loose=[[]], rule=RULES[0], limit=MEMBER_LIMIT, splits=False)
def test_any_members_are_grouped(tar, pieces, loose, rule, limit, splits):
    grouper = tar.Grouper("x.tar", *rule, False, splits)
    for buffer, names in zip(pieces, loose):
        # In a buffer that ends where its memory ends, a sanitizer sees the first byte read too far.
        exact = Pair((ctypes.c_char * len(buffer)).from_buffer_copy(buffer), buffer)
        if isinstance(grouper.read(exact, 0, 0, limit, 1 << 40)[5], Exception):
            return
        for name in names:
            try:
                grouper.next(iter([(name, None if name.endswith("é") else b"", 7)]))
            except (KeyError, TypeError):
                return
    grouper.end()
    assert grouper.end() == []


VALUES = st.sampled_from([b"", b"x1", b"\xff\xfe", b"\xfe\xff\0a", b"\0\0\xfe\xff", b"\0\0\xfe", b"\xff", "x1", None])


@given(
    sample=st.dictionaries(st.sampled_from("abcde"), st.one_of(VALUES, st.binary(max_size=9)), max_size=5),
    text=st.sampled_from([b"1", b"x1", bytes(2), b"", b"a longer text"]),
    fields=st.none() | st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3), max_size=3),
)
def test_a_text_is_looked_for_in_bytes_that_are_not_in_wide_characters(tar, sample, text, fields):
    marks = b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"
    if fields is None:
        values = [data for data in sample.values() if isinstance(data, bytes)]
    else:
        values = [next((sample[name] for name in names if name in sample), None) for names in fields]
    wanted = any(not isinstance(data, bytes) or text in data or data.startswith(marks) for data in values)
    assert tar.may_contain(sample, text, fields) == wanted
    for wrong in ((sample, "1", None), ([], text, None), (sample, text), (sample, text, "a"), (sample, text, ["a"])):
        with pytest.raises((TypeError, AttributeError)):
            tar.kernel.may_contain(*wrong)


@st.composite
def written(draw):
    """A piece of an archive as we write it: of few keys and fields, in any order."""
    names = st.builds("{}.{}".format, st.sampled_from("aabbcdé"), st.sampled_from(["a", "a", "b", "c.d", "E", "f__"]))
    members = draw(st.lists(st.tuples(names, st.sampled_from([b"", b"1", bytes(512), b"x" * 700])), max_size=12))
    return b"".join(pack_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in members)


@settings(max_examples=80, deadline=None)
@given(pieces=st.lists(st.one_of(written(), written(), members(), buffers()), min_size=1, max_size=4))
@example(pieces=[pack([("a.a", b""), ("b.a", b""), ("b.A", b""), ("c.a", b"")])])
def test_packed_samples_are_those_that_would_be_made(tar, pieces):
    def read(packs):
        grouper, samples, events = tar.kernel.Grouper("u", split_name, True, packs), [], []
        for piece in pieces:
            buffer = (ctypes.c_char * len(piece)).from_buffer_copy(piece)
            found, more, *reached = grouper.read(buffer, 0, 0, MEMBER_LIMIT, 0)
            for each in found:
                if type(each) is tuple:
                    keys, begin, end, fields = each
                    inner = tar.kernel.Grouper("u", split_name, True)
                    packed = inner.read(piece[begin:end], 0, 0, MEMBER_LIMIT, 0)[0] + inner.end()
                    assert (keys, fields) == (
                        [sample["__key__"] for sample in packed],
                        sum(map(len, packed)) - 2 * len(packed),
                    )
                    samples += packed
                else:
                    samples.append(each)
            events += [event[1:] for event in more]
            events.append(reached)
        return samples + grouper.end(), events

    assert read(True) == read(False)


@settings(max_examples=300, deadline=None)
@given(names=st.lists(st.one_of(TIDY, NAMES), max_size=40))
def test_members_are_grouped_as_one_thinks_of_it(tar, names):
    """Runs of adjacent members of one key, each whole or left out, by a definition that reads all members at once."""
    runs, skipped = [], 0
    for offset, member in enumerate(names):
        if (parts := split_name(member)) is None:
            skipped += 1
            continue
        if not runs or runs[-1][0] != parts[0]:
            runs.append((parts[0], []))
        runs[-1][1].append((parts[1], offset))
    wanted, faults, seen = [], [], set()
    for key, fields in runs:
        known = {"__key__", "__url__"}
        twice = next(((field, at) for field, at in fields if field in known or known.add(field)), None)
        if key in seen:
            faults.append((key, None, fields[0][1]))
        elif twice:
            faults.append((key, *twice))
        else:
            wanted.append({"__key__": key, "__url__": "u"} | dict.fromkeys([field for field, _ in fields], b""))
        seen.add(key)
    grouper = tar.Grouper("u", split_name, True)
    members = ((name, b"", offset) for offset, name in enumerate(names))
    results = list(iter(lambda: grouper.next(members), None))
    events = [event for _, found in results for event in found]
    assert [sample for samples, _ in results for sample in samples] + grouper.end() == wanted
    assert [event[2:] for event in events if event[1] is None] == faults
    assert sum(event[1] == "" for event in events) == skipped


@pytest.fixture
def grouper(tar):
    return tar.Grouper


def test_events_stand_between_the_samples_they_came_between(grouper):
    names = [("a.x", b"1"), ("README", b""), ("b.x", b"2"), ("d/", b""), ("a.x", b"3"), ("c.x", b"4"), ("c.X", b"5")]
    found = grouper("u", split_name, True)
    archive = pack(names) + header(name=b"e.x", size=b"%011o\0" % 9)
    samples, events, *reached = found.read(archive, 0, 0, MEMBER_LIMIT, 1000)
    assert samples == [{"__key__": key, "__url__": "u", "x": data} for key, data in (("a", b"1"), ("b", b"2"))]
    assert events == [
        (0, "", "README", None, 1000 + 1024),
        (1, "directory", "d/", None, 1000 + 2560),
        (2, None, "a", None, 1000 + 3072),
        (2, None, "c", "x", 1000 + 5120),
    ]
    assert reached[3] is None
    assert reached[4] == ("e.x", len(archive) - 512, len(archive), len(archive) + 9, "")
    assert found.end() == []


def test_a_rule_that_fails_ends_the_grouping_after_what_came_before(grouper):
    found = grouper("u", by_odd_types, False)
    samples, _, *_, problem, last = found.read(pack([("a.", b""), ("aa.", b""), ("b", b""), ("c", b"")]), 0, 0, 9, 0)
    assert [sample["__key__"] for sample in samples] == [2]
    assert repr(problem) == "KeyError('b')"
    assert last is None


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_negative_arguments_are_refused(grouper, arguments):
    with pytest.raises(ValueError, match="must not be negative"):
        grouper("u", split_name, True).read(b"", *arguments, 0)


def test_native_groupers_keep_nothing(tar):
    native = tar.kernel
    archives = [
        pack([("a.x", b"1"), ("a.y", b"2"), ("b.x", b"3")]) + END,
        pack([("b.x", b""), ("a.x", b""), ("b.x", b""), ("a.a", b""), ("a.A", b"")]) + header(size=b"%011o\0" % 9),
        pack([("README", b""), ("é.É", b""), ("__x__/a", b"")]) + entry(name=b"d/", kind=b"5") + header(kind=b"S"),
    ]

    def use():
        for archive in archives:
            for rule in RULES:
                native.Grouper("u", *rule, False, True).read(archive, 0, 0, MEMBER_LIMIT, 0)
                native.Grouper("u", *rule, True).read(archive, 0, 0, MEMBER_LIMIT, 0)
                grouper = native.Grouper("u", *rule)
                grouper.read(archive, 0, 0, MEMBER_LIMIT, 0)
                for name in ("a.x", "\udcff.x", "b"):
                    with suppress(KeyError, TypeError):
                        grouper.next(iter([(name, b"", 0)]))
        # A cycle through the grouper is found.
        cycle = []
        cycle.append(native.Grouper("u", cycle.append, False))

    use()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(50):
        use()
    gc.collect()
    assert sys.getallocatedblocks() < before + 50


@settings(max_examples=300, deadline=None)
@given(archive=st.one_of(members(), buffers()), cut=st.integers(0, 4000), concatenated=st.booleans())
def test_reading_a_shard_is_grouping_its_members(tmp_path_factory, archive, cut, concatenated):
    """With one pass or two, samples, counts and errors are the same; also where the shard is cut."""
    path = tmp_path_factory.mktemp("shard") / "a.tar"
    path.write_bytes(archive[: len(archive) - cut] if cut < 1000 else archive)

    def in_two_passes(ledger):
        with path.open("rb") as stream:
            found = read_members(stream, url=str(path), concatenated=concatenated, ledger=ledger)
            yield from group_members(iter(found), url=str(path), ledger=ledger, on_error=ledger)

    shard = Shard(str(path), concatenated=concatenated)
    results, in_error = [], None
    for read in (in_two_passes, lambda ledger: read_shard(shard, ledger=ledger)):
        ledger, samples, error = Ledger(max_errors=float("inf")), [], None
        try:
            samples.extend(read(ledger))
        except TarError as caught:
            error = caught
        faults = [entry[:4] for entry in ledger.quarantined] + (
            [(error.url, None, None, error.offset)] if error else []
        )
        in_error = error if read is in_two_passes else in_error
        results.append((samples, faults, Counter(ledger.skipped), ledger.samples, ledger.members, ledger.joined))
    # At a member without content members alone end; and before members after the end the last sample is complete.
    if in_error is not None and ("'" in in_error.reason or "members after the end" in in_error.reason):
        assert results[0][0] == results[1][0][: len(results[0][0])]
        return
    assert results[0] == results[1]


def test_who_leaves_early_is_counted_what_was_delivered(tmp_path):
    names = ["a.x", "a.y", "README", "b.x", ".hidden", "c.x", "c.x", "d.x"]
    (tmp_path / "a.tar").write_bytes(pack([(name, b"") for name in names]) + END)
    ledger = Ledger(max_errors=1)
    samples = read_shard(str(tmp_path / "a.tar"), ledger=ledger)
    assert next(samples)["__key__"] == "a"
    samples.close()
    assert (ledger.samples, ledger.members, ledger.skipped) == (1, 2, {"no extension": 1})
    assert ledger.unaudited
    assert ledger.quarantined == []


def test_a_sample_that_is_changed_is_counted_as_it_was(tmp_path):
    (tmp_path / "a.tar").write_bytes(pack([(f"{key}.x", b"") for key in "abc"]) + END)
    ledger = Ledger()
    for sample in read_shard(str(tmp_path / "a.tar"), ledger=ledger):
        sample.clear()
    assert (ledger.samples, ledger.members) == (3, 3)


def test_members_of_any_iterable_are_grouped():
    assert [sample["x"] for sample in group_members(Member(name, name, 0) for name in ("a.x", "b.x"))] == ["a.x", "b.x"]
    with pytest.raises(SampleError, match="duplicate field"):
        list(group_members(Member(name, b"", 0) for name in ("a.x", "a.x")))
    assert list(group_members(read_members(io.BytesIO(END)))) == []
