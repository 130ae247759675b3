"""Conditions and templates typed by users: their meaning, and what they cannot do."""

from __future__ import annotations

import pickle
import time

import pytest

from tarshards.errors import DecodeError, OpError, SampleError
from tarshards.samples.codecs import registry
from tarshards.samples.conditions import Condition, Template, shard_of

SAMPLE = {
    "__key__": "a/b",
    "__url__": "http://host/train-07.tar.gz",
    "cls": b"7",
    "json": b'{"ok": true, "boxes": [{"score": 0.5}, {"score": 0.9}]}',
    "txt": b"seven",
    "seg.cls": b"3",
    "key": b"a field",
    "bad.json": b"{",
}

LIKE = {"index": 0, "key": "", "shard": ""}


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ('cls > 3 and json["ok"]', True),
        ("3 < cls <= 6", False),
        ("not cls % 7", True),
        ("cls in (1, 7) or cls in [2]", True),
        ('fields["seg.cls"] == 3', True),
        ('key == "a/b" and shard == "train-07"', True),
        ('fields["key"] == b"a field"', True),
        ('txt.startswith("sev") and txt.upper() == "SEVEN"', True),
        ('any(box["score"] > .8 for box in json["boxes"])', True),
        ('len([box for box in json["boxes"] if box["score"] < .1])', False),
        ('has("png")', False),
        ('has("__key__")', False),
        ('has("cls") and cls - 1 == 6', True),
        ('has("png") and png == 1', False),
        ('json.get("none", 5) == 5', True),
        ("txt[0] == 's' if cls else False", True),
        (" -cls < 0 ", True),
        ("[k for k, (v, w) in [('a', (1, 2)), ('b', (3, 4))] if v > 1] == ['b']", True),
        ("[cls for cls in [1, 2] for cls in [cls, 3]] == [1, 3, 2, 3] and cls == 7", True),
        ("sum(box['score'] for box in json['boxes']) > 1 and txt[-3:] == 'ven' and str(cls) in {'7'}", True),
        # nulls
        ('json.get("none") > 3 or json["none_"] if False else json.get("none") != 1', False),
        ('not json.get("none")', False),
        ('json.get("none", False) or not json.get("none", False)', True),
        ('json.get("none") is None and json.get("none") == None and not json["ok"] is None', True),
        ('json.get("none").get("deeper")["x"] is None', True),
        ('(json.get("none") or 2) == 2', True),
        ('any(json.get("none") == 1 for box in json["boxes"])', False),
        ('not any(json.get("none") == 1 for box in json["boxes"])', False),
        ('all(box for box in json.get("none"))', True),
        ("1 in [None, 1] and not 2 in [None, 1]", True),
    ],
)
def test_conditions(expression, holds):
    assert Condition(expression)(SAMPLE) is holds


def test_conditions_are_pickled():
    condition = Condition("cls > 3")
    assert condition(SAMPLE)
    assert pickle.loads(pickle.dumps(condition))(SAMPLE)


def test_only_the_fields_that_are_come_to_are_decoded(monkeypatch):
    decoded = []

    def decode(data):
        decoded.append(data)
        return data

    monkeypatch.setitem(registry.DECODERS, "spied", decode)
    condition = Condition("cls == 7 or fields['x.spied']")
    assert condition({**SAMPLE, "x.spied": b"1"})
    assert decoded == []
    assert condition({**SAMPLE, "cls": b"8", "x.spied": b"1", "y.spied": b"2"})
    assert decoded == [b"1"]


def test_a_missing_field_is_an_error_that_names_the_place():
    with pytest.raises(SampleError, match=r"train-07.*a/b.*no field png; the sample has cls, json.*has\('png'\)"):
        Condition("png == 1")(SAMPLE)


def test_a_field_that_does_not_decode():
    with pytest.raises(DecodeError, match=r"a/b\.bad\.json"):
        Condition('fields["bad.json"]')(SAMPLE)


@pytest.mark.parametrize(
    "expression",
    [
        *("cls > 'a'", "json['none']", "cls / 0", "txt[9]", "int(txt)", "fields > 1", "cls.upper()", "txt.get('a')"),
        *("[a for a, b in json['boxes']]", "txt.find()", "len(cls)"),
    ],
)
def test_an_expression_that_fails(expression):
    with pytest.raises(OpError, match=r"a/b.*fails"):
        Condition(expression)(SAMPLE)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "cls >",
        "cls = 3",
        "import os",
        "cls; txt",
        "cls.__class__",
        "().__class__.__bases__[0].__subclasses__()",
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "eval('1')",
        "getattr(cls, 'real')",
        "txt.format(cls)",
        "'{0.__class__}'.format(cls)",
        "json['a'].ok",
        "json.update({})",
        "json.values.__class__ == 3",
        "has()",
        "[1 for json['a'] in txt]",
        "[a async for a in txt]",
        "~cls",
        "cls @ cls",
        "__key__",
        "...[...:lambda: 1]",
        "txt.join(txt)",
        "txt.ljust(10**9)",
        "9 ** 9 ** 9",
        "1 << 999999",
        "f'{cls:999999999}'",
        "lambda: 1",
        "(x := 1)",
        "[*txt]",
        "{**json}",
        "max(txt, key=len)",
        "(lambda: 1)()",
        "1" + " + 1" * 1000,
        "-" * 5000 + "1",
        "-" * 990 + "cls",
        "(" * 500 + "1" + ")" * 500,
        "\0",
    ],
)
def test_what_is_refused_before_any_sample_is_read(expression):
    with pytest.raises(
        ValueError, match=r"expression|not allowed|no (name|function|attribute|loop)|positional arguments|one field"
    ):
        Condition(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "'x' * 999999999",
        "[[0] * 99999] * 99999",
        "'%999999999d' % 1",
        "str([[0] * 99999] * 99999)",
        "sum([[cls]], [])",
        f"{'[y * y for y in ' * 40}[cls]{']' * 40}",
        f"{'[y + y for y in ' * 40}[txt]{']' * 40}",
        "len([a for a in json for b in json for c in json for d in json for e in json])",
    ],
)
def test_what_would_take_for_ever_or_all_memory_fails_at_once(expression):
    sample = {**SAMPLE, "json": str(list(range(100))).encode()}
    begun = time.monotonic()
    with pytest.raises(OpError):
        Condition(expression)(sample)
    assert time.monotonic() - begun < 5


def test_template():
    template = Template("{{{shard}}}/{index:04d}-{key:>5}", LIKE)
    assert template.fill({"key": "a", "shard": "y", "index": 12}) == "{y}/0012-    a"


@pytest.mark.parametrize(
    "template",
    [
        "{}",
        "{0}",
        "{cls}",
        "{key.__class__}",
        "{key[0]}",
        "{key!r}",
        "{index:{key}}",
        "{key",
        "}",
        "{key:d}",
        "{index:s}",
    ],
)
def test_bad_templates(template):
    with pytest.raises(ValueError, match=r"^'"):
        Template(template, LIKE)


@pytest.mark.parametrize(
    ("url", "shard"),
    [
        ("a.tar", "a"),
        ("d.x/a.b.tar.xz", "a.b"),
        ("a.tgz", "a"),
        ("a.gz", "a"),
        ("s3://bucket/d/a-000.tar.zst", "a-000"),
        ("https://host/a.tar?x=b/c.tar#d", "a"),
        ("file:a.tar", "a"),
        ("-", "stdin"),
    ],
)
def test_shards(url, shard):
    assert shard_of({"__url__": url}) == shard


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("(cls, 1) == (7, 1) and cls in {cls} and txt[:cls] == txt and txt[0:cls:2] == 'svn'", True),
        ('txt[cls - 7] == "s" and 7 - cls == 0 and 8 - cls == 1 and [cls] == [7]', True),
        ("3 == cls or 7 == cls", True),
        ('has(txt[:0] + "cls") and not has(txt)', True),
        ("6 < cls < 8 and 0 < cls - 6 < cls < 8 > cls", True),
        ("8 > cls > 7", False),
        ("6 < 8 < cls", False),
        ("1 < json.get('none') < 8", False),
        ("not 1 < json.get('none') < 8", False),
        ("(cls or 2) == 7 and (cls - 7 or cls) == 7 and (cls and txt) == 'seven' and (cls - 7 and txt) == 0", True),
        ("(json.get('none') and cls) is None and (json.get('none') or cls) == 7", True),
        ("cls is not None and None is not cls and None is json.get('none') and None == json.get('none')", True),
        ("None != cls and cls != None", True),
        ("None is cls or cls is None or None == cls", False),
        ("cls * 2 == 14 and cls % 4 == 3 and 2 * cls == 14 and 9 % cls == 2 and 'a' + txt == 'aseven'", True),
        ("[1] + [cls] == [1, 7] and 1 + cls == 8 and 2.5 * cls == 17.5 and 2.5 + cls == 9.5", True),
        ("sum([1, 2]) == 3 and sum([1, cls], 4) == 12 and sum([]) == 0", True),
        ("(1 if cls > 3 else 2) == 1 and (1 if cls < 3 else 2) == 2", True),
        ("(cls > 3) if txt == 'seven' else 0", True),
        ("0 if txt == 'seven' else cls > 3", False),
        ("None if cls else cls", False),
        ("cls is cls", True),
        ("[not cls, not (cls - 7)] == [False, True]", True),
        ("cls < 8 < 9 and not cls < 7 < 9", True),
        ("json.get('none') is json.get('none')", True),
    ],
)
def test_every_part_of_an_expression_sees_the_sample(expression, holds):
    assert Condition(expression)(SAMPLE) is holds


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("cls.lower()", "TypeError: int has no method lower"),
        ("txt.get(1)", "TypeError: str has no method get"),
        ("txt * cls", r"TypeError: \* and % accept numbers only"),
        ("cls * [1]", r"TypeError: \* and % accept numbers only"),
        ("sum(['a'], 'b')", "TypeError: sum accepts numbers only"),
        ("(2 ** 1)", "Pow is not allowed"),
        ("~cls", "Invert is not allowed"),
        ("lambda: 1", "Lambda is not allowed"),
        ("len(x=1)", "functions take positional arguments only"),
        ("open(1)", "no function open; known: has len min max sum any all abs int float str bool"),
        ("cls >", "is not an expression: invalid syntax"),
        ('json["a"] = "b"', "is not an expression: use == to compare, not ="),
        ("cls == 3 or (cls = 4)", "is not an expression: use == to compare, not ="),
        ("'" + "a" * 1000 + "'", "an expression has at most 1000 characters, not 1002"),
    ],
)
def test_an_error_says_what_is_wrong(expression, said):
    with pytest.raises((ValueError, OpError), match=rf"{said}$"):
        Condition(expression)(SAMPLE)


def test_limits_are_reached_exactly():
    longest = "'" + "a" * 998 + "'"
    assert len(longest) == 1000
    assert Condition(longest)(SAMPLE)
    sample = {"__key__": "a", "text": "a" * 50_000, "json": list(range(10_000)), "n": 1 << 49_999}
    assert Condition("len(text + text) == 100000 and len([x for x in json]) == 10000 and n * n > 0")(sample)
    for expression, said in [
        ("text + text + 'a'", "ValueError: + makes texts and lists of at most 100000 items"),
        ("[x for x in json] + [y for y in [1]]", "ValueError: loops have at most 10000 turns"),
        ("n * (n + n)", "ValueError: * makes integers of at most 100000 bits"),
    ]:
        with pytest.raises(OpError) as raised:
            Condition(f"{expression} == 1")(sample)
        assert said in str(raised.value)


@pytest.mark.parametrize(
    ("url", "name"), [(None, ""), ("-", "stdin"), ("a:b.tar", "b"), ("./a:b.tar", "a:b"), ("d/x.tar.gz", "x")]
)
def test_the_name_of_a_shard(url, name):
    sample = {"__key__": "a"} if url is None else {"__key__": "a", "__url__": url}
    assert shard_of(sample) == name


def test_rows_fill_a_template():
    assert Template("{key}-{index:02d}", LIKE).fill_rows({"index": [3, 4], "key": "ab"}) == ["a-03", "b-04"]
    with pytest.raises(ValueError, match=r"\{none\} is not among index, key, shard \(a format may follow\)"):
        Template("{none}", LIKE)
