"""Conditions on columns: they select what they select of samples, or are refused by name."""

from __future__ import annotations

import datetime
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tarshards import ShardWriter, Stream, attach_columns, build_columns
from tarshards.errors import OpError, SampleError
from tarshards.samples.conditions import Condition, RefusedError

try:
    import pyarrow as pa

    from tarshards.index.where import meets
except ImportError:
    pa = None

pytestmark = [pytest.mark.interop, pytest.mark.skipif(pa is None, reason="pyarrow is not installed")]

EDGES = [2**53, 2**53 + 1, -(2**53) - 1, 2**62, 2**63 - 1, -(2**63)]
LETTERS = "aAbßẞİ\u0131\u017fΣ\u03c3ςäÄŉǅﬁµ₀٣½ 1-.\x1c\x85\xa0\u2003\u3000\ufffd\0\U0001f600e\u0301"
VALUES = {
    "i": st.integers(-3, 3) | st.sampled_from(EDGES),
    "j": st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1),
    "f": st.floats() | st.sampled_from([0.0, -0.0, 0.5, float("nan"), 2.0**53, 1e308]),
    "g": st.floats(width=16) | st.sampled_from([1.0, float("inf")]),
    "b": st.booleans(),
    "s": st.text(LETTERS, max_size=3),
    "t": st.text(max_size=3, alphabet=st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["1", " 2", "0.5", "nan"]),
    "l": st.lists(st.none() | st.integers(0, 3), max_size=2),
    "m": st.lists(st.floats(), max_size=2),
    "u": st.lists(st.text("aß", max_size=2), max_size=2),
    "n": st.nothing(),
    "key": st.text("aäß\udcff\ufffd", max_size=2),
    "shard": st.sampled_from(["a", "ß", "\udce4"]),
}
KEYS = ("key", "shard")  # which every sample has
ROW_VALUES = {name: each if name in KEYS else st.none() | each for name, each in VALUES.items()}
ROWS = st.lists(st.fixed_dictionaries(ROW_VALUES), min_size=1, max_size=4)
NAMES = st.sampled_from([*VALUES])
NUMBERS = ["0", "1", "2", "3", "7", "0.5", "1.5", "1e308", str(2**53 + 1), str(2**63), "float('nan')", "float('inf')"]
TEXTS = ["''", "'a'", "'ß'", "'SS'", "'ä '", "'ς'", "'i'", "'\\x1c'", "'\\udcff'", "'1'", "' '"]
LITERALS = st.sampled_from(
    [*NUMBERS, *TEXTS, "True", "False", "None", "()", "[1, 0.5]", "(1, 2)", "('a', 'ß')", "[None, 1]"]
)


def expressions(inner):
    """Return every kind of node, with *inner* expressions."""
    three, two = st.tuples(inner, inner, inner), st.tuples(inner, inner)
    operators = "+ - * / // % == != < <= > >= in".split() + ["not in", "and", "or"]  # noqa: SIM905
    one = ["-{}", "+{}", "not {}", "{} is None", "{} is not None", "None == {}", "{} != None", "({},)"]
    one += [f"{name}({{}})" for name in "len min max sum any all abs int float str bool".split()]  # noqa: SIM905
    one += [f"{{}}.{name}()" for name in "lower upper strip split keys values items".split()]  # noqa: SIM905
    pairs = [f"{name}({{}}, {{}})" for name in "min max sum int str".split()]  # noqa: SIM905
    pairs += [f"{{}}.{name}({{}})" for name in "startswith endswith strip split count find get".split()]  # noqa: SIM905
    pairs += ["[{}, {}]", "{{{}, {}}}"]
    threes = ["{} < {} <= {}", "{} if {} else {}", "max({}, {}, {})", "{}.find({}, {})", "{}.startswith({}, {})"]
    return st.one_of(
        st.builds("({1} {0} {2})".format, st.sampled_from(operators), inner, inner),
        st.builds("({})".format, st.builds(lambda form, x: form.format(x), st.sampled_from(one), inner)),
        st.builds(lambda form, xs: form.format(*xs), st.sampled_from(pairs), two),
        st.builds(lambda form, xs: f"({form.format(*xs)})", st.sampled_from(threes), three),
    )


CONDITIONS = st.recursive(NAMES | NAMES | LITERALS, expressions, max_leaves=7)


def outcomes(condition: Condition, rows: list[dict]) -> list[bool | str]:
    """Return for each row, as a sample, whether it meets the condition, or the error."""
    found: list[bool | str] = []
    for row in rows:
        sample = {"__key__": row["key"], "__url__": f"{row['shard']}.tar", **{n: row[n] for n in row if n not in KEYS}}
        try:
            found.append(condition(sample))
        except OpError as error:
            found.append(error.reason)
    return found


def by_columns(condition: Condition, columns: dict, rows: int) -> list[bool | str]:
    errors = {}
    found = meets(condition, columns, rows, fail=errors.__setitem__).tolist()
    return [errors[row].reason if row in errors else met for row, met in enumerate(found)]


def check(rows: list[dict], text: str) -> None:
    try:
        condition = Condition(text)
    except ValueError:
        return
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns = {name: values if name in KEYS else pa.array(values) for name, values in columns.items()}
    try:
        found = by_columns(condition, columns, len(rows))
    except RefusedError:  # which the tests below list
        assert re.search(r"\b(str|find|startswith|int)\(", text)
        return
    assert found == outcomes(condition, rows)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows=ROWS, condition=CONDITIONS)
def test_conditions_mean_the_same_of_columns_and_samples(rows, condition):
    check(rows, condition)


ROW = dict.fromkeys(VALUES) | {"key": "a", "shard": "a"}


@pytest.mark.parametrize(
    ("values", "condition"),
    [
        ({"f": float("nan")}, "min(f, 0.5) < 1"),
        ({"f": float("nan")}, "max(0.5, f) > 0"),
        ({"s": "ß"}, "s.upper() == 'SS'"),
        ({"s": "İ"}, "len(s.lower()) == 2"),
        ({"s": "ΑΣ"}, "s.lower() == 'ας'"),
        ({"s": "\x1ca\x85"}, "s.strip() == 'a'"),
        ({"f": -0.0}, "f in [0.0]"),
        ({"f": float("nan")}, "f in [float('nan')]"),
        ({"i": 2**53 + 1, "f": 2.0**53}, "i > f"),
        ({"i": 2**53 + 1}, "(i or 0.5) == 9007199254740993"),
        ({"i": 2**53 - 1, "f": 27021597764222972.0, "b": True}, "(i if b else 0.5) * 3 > f"),
        ({"i": 2**53 - 1, "f": 27021597764222972.0}, "max(i, 0.5) * 3 > f"),
        ({"i": 2**63 - 1}, "i + 1 == 9223372036854775808"),
        ({"i": -(2**63)}, "i // -1 == 9223372036854775808"),
        ({"i": 3}, f"i / {2**53 + 1} < 1"),
        ({"i": 3}, "i / '2' > 1"),
        ({"s": "12"}, "s / 2 == 6"),
        ({"s": "12"}, "float(s) == 12"),
        ({"s": "x"}, "float(s) == 12"),
        ({"s": "x"}, "+s == 'x'"),
        ({"b": True}, "+b == 1 and -b == -1 and abs(b) == 1 and b + 1 == 2 and b * 2 > b"),
        ({"i": 1}, "i == '1' or i == True"),
        ({"i": 0}, "i != 0 and 6 / i > 1"),
        ({"i": 0}, "6 // i > 1"),
        ({"s": "a"}, "s > 1"),
        ({"s": "ab"}, "s.find('b', None) == 1"),
        ({"l": [1, None]}, "None in l or sum(l) or 1 in l"),
        ({"l": [1], "m": [1.0]}, "l == m and l == [1] and str(l) == '[1]'"),
        ({"f": float("inf")}, "f // 2 == f or int(f) > 1"),
        ({"key": "\udcff"}, "key == '\\udcff' and len(key) == 1"),
        ({"shard": "\udce4"}, "shard == '\\udce4'"),
        ({"i": 1}, "i in (1, True, 'a') and i in {1, None} and i not in ()"),
        ({"s": "a"}, "s in 'abc' and s in ['a', 1]"),
        ({"f": 0.5}, "f + [1, 0.5]"),
        ({"f": 0.5}, "f != [1, 0.5]"),
        ({"b": True}, "([1, 2] if b else [3, 4]) == [3, 4]"),
        ({"s": "a"}, "s in {'a'} or {1, [2]}"),
        ({"u": [], "i": None}, "u.find(0, i)"),
    ],
)
def test_what_arrow_means_otherwise(values, condition):
    check([ROW | values, ROW], condition)


@pytest.mark.soak
@settings(deadline=None, max_examples=20_000, suppress_health_check=[HealthCheck.too_slow])
@given(rows=ROWS, condition=CONDITIONS)
def test_many_conditions(rows, condition):
    check(rows, condition)


@pytest.mark.parametrize(
    ("condition", "refused"),
    [
        ("d == 1", "d cannot be asked of columns"),
        ("len(d) > 1 or not d", "d cannot"),
        ("x and 'a' in x", "x cannot"),
        ("str(f) == '1'", "str(f)"),
        ("'ab'.find('b', f) == 1", "'ab'.find('b', f)"),
        ("b is True", "b is True"),
        ("has('json')", "has('json')"),
        *(("has('key')", "has('key')"), ("has('shard')", "has('shard')"), ("has('__key__')", "has('__key__')")),
        ("has('a' + 'b')", "has('a' + 'b')"),
        ("day < d2.strip()", "day < d2.strip()"),
    ],
)
def test_what_columns_do_not_keep_of_samples_is_refused_by_name(condition, refused):
    """Objects have null for what others have; whole numbers beside fractions are fractions; a null may be missing."""
    columns = {
        "d": pa.array([{"a": 1}, {}]),
        "x": pa.array([[{"a": 1}], []]),
        "f": pa.array([1, 0.5]),
        "b": pa.array([True, False]),
        **dict.fromkeys(["key", "shard", "__key__"], pa.array(["a", "b"])),
        "json": pa.array([None, 1]),
        "day": pa.array([datetime.date(2026, 1, 2)] * 2),
        "d2": pa.array([datetime.date(2026, 1, 2)] * 2),
    }
    with pytest.raises(ValueError, match=re.escape(refused)):
        meets(Condition(condition), columns, 2)
    assert meets(Condition("d is not None and None == x or has('d') and day <= d2"), columns, 2).all()


@pytest.mark.parametrize(
    "column",
    [
        *(lambda: pa.array([1, 2], pa.int8()), lambda: pa.array([1, 2], pa.uint64())),
        *(lambda: pa.array([1, 2**64 - 1], pa.uint64()), lambda: pa.array([0.1, 1], pa.float32())),
        *(lambda: pa.array(["ß", "a"], pa.large_string()), lambda: pa.array(["ß", "a"]).dictionary_encode()),
        *(lambda: pa.array([b"a", b""]), lambda: pa.array([b"a", b"b"], pa.binary(1))),
        *(lambda: pa.array([[1], []], pa.large_list(pa.int8())), lambda: pa.array([[1], [2]], pa.list_(pa.int64(), 1))),
    ],
)
def test_types_of_other_tables(column):
    """They have the values that Python reads of them."""
    column = column()
    rows = [ROW | {"i": value} for value in column.to_pylist()]
    for text in (
        "i > 1",
        "i == 0.1",
        "-i < 0 and i - 2 < 0",
        "len(i) == 1",
        "i.upper() == 'SS'",
        "i in (1, 2)",
        "not i",
    ):
        assert by_columns(Condition(text), {"i": column}, 2) == outcomes(Condition(text), rows), text


@pytest.mark.parametrize(
    "condition",
    [
        *("i > 1", "f / 2 <= g", "s.lower() == 'b'", "s.find('a') < 1", "len(l) < 2", "max(i, 2) > 1", "i in [1, 2]"),
        *("1 < i", "1 < i <= 3", "abs(f) > 0", "-i < 3", "i // 3 == 1", "'a' in s", "bool(s) == b", "int(s) != i", "b"),
    ],
)
def test_null_meets_neither_a_comparison_nor_its_negation(condition):
    columns = {name: pa.array([None, None]) for name in VALUES}
    typed = {name: pa.array([None, value], of) for name, value, of in TYPED}
    for of in columns, columns | typed:
        assert not meets(Condition(condition), of, 2)[0]
        assert not meets(Condition(f"not ({condition})"), of, 2)[0]


TYPED = [("i", 1, "int64"), ("f", 0.5, "float64"), ("g", 0.5, "float64"), ("b", True, "bool"), ("s", "1", "string")]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("i is None", [False, True]),
        ("i == None", [False, True]),
        ("i != None and f > 0", [True, False]),
        ("has('i')", [True, False]),
        ("i > 0 or f > 0", [True, True]),
        ("not has('i') or i > 3", [False, True]),
        ("not i > 3", [True, False]),
        ("i in (1, 2)", [True, False]),
        ("i not in (2, 3)", [True, False]),
        ("not (i > 3 and f > 1)", [True, True]),
        ("not (i > 3 or f > 1)", [True, False]),
        ("not (i > 3 if f > 1 else i > 5)", [True, False]),
        ("(i or 0) < 1", [False, True]),
        ("(i and 5) == 5", [True, False]),
        ("f > 0 if i > 3 else f < 1", [True, True]),
        ("0 < i < 3 or None", [True, False]),
        ("max(i, None) is None", [True, True]),
        ("n > 3 or abs(n) is None and n.lower() is None", [True, True]),
    ],
)
def test_nulls(condition, expected):
    columns = {"i": pa.array([1, None]), "f": pa.array([0.5, 0.5]), "n": pa.array([None, None])}
    assert meets(Condition(condition), columns, 2).tolist() == expected
    rows = ({"__key__": "", "i": i, "f": 0.5, "n": None} for i in (1, None))
    assert [Condition(condition)(row) for row in rows] == expected


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("i / 0 > 1", "'i / 0 > 1' fails: ZeroDivisionError: division by zero"),
        ("i // 0 > 1", "ZeroDivisionError"),
        ("s > 1", "TypeError: '>' not supported between instances of 'str' and 'int'"),
        ("day > 'a'", "ArrowNotImplementedError: Function 'greater'"),
    ],
)
def test_conditions_that_fail(condition, words):
    days = pa.array([datetime.date(2026, 1, 2)] * 2)
    with pytest.raises(OpError, match=words):
        meets(Condition(condition), {"i": pa.array([1, 2]), "s": pa.array(["a", "b"]), "day": days}, 2)


@pytest.mark.parametrize(
    "condition",
    [
        "open('/etc/passwd')",
        "read_csv('/etc/passwd') == s",
        "s.__class__ == 1",
        "(lambda: 1)()",
        "s == f'{i}'",
        "i ** 9 > 1",
    ],
)
def test_a_condition_opens_nothing_and_runs_nothing(condition):
    with pytest.raises(ValueError, match=r"not an expression|not allowed|no function|no attribute"):
        Condition(condition)


SAMPLES = [{"i": 0, "s": "ß"}, {"i": 2, "s": "a"}, {"i": 2**53 + 1, "s": "İ"}, {"i": 1, "s": "σς"}]


@pytest.fixture
def urls(tmp_path):
    with ShardWriter(f"{tmp_path}/a-%d.tar", max_samples=2, index=True) as writer:
        for number, sample in enumerate(SAMPLES):
            writer.write({"__key__": f"{number}", "cls": number, "json": sample})
    urls = f"{tmp_path}/a-{{0..1}}.tar"
    build_columns(urls, "json.i, json.s, cls")
    return urls


@pytest.mark.parametrize(
    "condition", ["i * i == 4", "s.upper() == 'SS'", "i > 9007199254740992", "cls > 0 and 2 / cls >= 1"]
)
def test_a_selection_is_the_same_without_columns(urls, tmp_path, condition):
    by_samples = Condition(re.sub(r"\b([is])\b", r'json["\1"]', condition))
    wanted = [each["__key__"] for each in Stream.from_shards(urls) if by_samples(each)]
    assert wanted
    assert [each["__key__"] for each in Stream.from_shards(urls).select(condition)] == wanted


def test_an_error_names_its_sample_and_goes_where_others_go(urls):
    with pytest.raises(OpError, match=r"a-0\.tar: 0: '2 / cls > 1' fails: ZeroDivisionError: division by zero"):
        Stream.from_shards(urls).select("2 / cls > 1")
    errors = []
    chosen = Stream.from_shards(urls).select("2 / cls > 1", on_error=errors.append)
    assert [each["__key__"] for each in chosen] == ["1"]
    assert [(error.key, type(error)) for error in errors] == [("0", OpError)]
    chosen = Stream.from_shards(urls).select("2 / cls > 1", keys=["1", "2"])
    assert [each["__key__"] for each in chosen] == ["1"], "of the samples with these keys"


def test_shards_whose_columns_have_other_types(tmp_path):
    """Whole numbers beside fractions or texts of another shard stay what they are."""
    values = [2**53 + 1, 0.5, "a", None, 2**53]
    with ShardWriter(f"{tmp_path}/a-%d.tar", max_samples=1, index=True) as writer:
        for number, value in enumerate(values):
            writer.write({"__key__": f"{number}", "json": {"x": value}})
    urls = f"{tmp_path}/a-{{0..4}}.tar"
    build_columns(urls, "json.x")
    for condition in "x == 9007199254740993", "x == 'a' or x == 0.5", "x is None", "not x == 'a'":
        chosen = [each["__key__"] for each in Stream.from_shards(urls).select(condition)]
        by_samples = Condition(re.sub(r"\bx\b", "json['x']", condition))
        assert chosen == [each["__key__"] for each in Stream.from_shards(urls) if by_samples(each)], condition


def test_truths_beside_numbers_make_no_column(tmp_path):
    for number, values in enumerate([[0.5, True], [True, 1], [1, False]]):
        with ShardWriter(f"{tmp_path}/{number}-%d.tar", index=True) as writer:
            for i, value in enumerate(values):
                writer.write({"__key__": f"{i}", "json": {"x": value}})
        with pytest.raises(SampleError, match="column x: "):
            build_columns(f"{tmp_path}/{number}-0.tar", "json.x")


def test_keys_that_are_no_unicode(tmp_path):
    """A table has none of them, and columns have another letter in their place."""
    with ShardWriter(f"{tmp_path}/a-%d.tar", index=True) as writer:
        for key in "a", "b\udcff", "b\ufffd":
            writer.write({"__key__": key, "cls": 1})
    url = f"{tmp_path}/a-0.tar"
    build_columns(url, "cls")
    for key in "a", "b\udcff", "b\ufffd":
        chosen = Stream.from_shards(url).select(f"cls == 1 and key == {key!a}")
        assert [each["__key__"] for each in chosen] == [key]
    attached = attach_columns(url, pa.table({"__key__": ["b\ufffd", "a"], "rank": [2, 0]}))
    assert (attached.samples_without, attached.rows_without) == (1, 0)
    chosen = Stream.from_shards(url).select("rank is None or rank == 2")
    assert [each["__key__"] for each in chosen] == ["b\udcff", "b\ufffd"]
