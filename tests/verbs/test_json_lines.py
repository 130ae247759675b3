"""JSON lines agree with Python's json and base64, and preserve every byte of text and base64."""

from __future__ import annotations

import base64
import json
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import need

from tarshards import read_samples, write_samples
from tarshards.errors import DecodeError, SampleError
from tarshards.verbs.jsonl import json_lines, read_json_lines

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def lines_of(**fields) -> list[dict]:
    return [json.loads(line) for line in json_lines([{"__key__": "a", "__url__": "x.tar", **fields}])]


def read_back(lines, folder) -> list[dict]:
    path = folder / "lines.json"
    path.write_bytes(b"".join(line.encode(errors="backslashreplace") + b"\n" for line in lines))
    return [{k: v for k, v in sample.items() if k != "__url__"} for sample in read_json_lines(str(path))]


@given(st.fixed_dictionaries({}, optional={name: st.binary() for name in ("jpg", "txt", "x.text", "npy", "json.gz")}))
def test_bytes_come_back_as_they_were(tmp_path_factory, fields):
    samples = [{"__key__": "a", "z": b"", **fields}]
    assert read_back(json_lines(samples), tmp_path_factory.mktemp("f")) == samples


@given(VALUES, st.integers())
def test_values_come_back_as_values(tmp_path_factory, value, number):
    sample = {"__key__": "a", "seg.json": json.dumps(value).encode(), "cls": b" %d\n" % number}
    (line,) = json_lines([sample])
    assert json.loads(line) == {"__key__": "a", "seg.json": value, "cls": number}
    (back,) = read_back([line], tmp_path_factory.mktemp("f"))
    assert json.loads(back["seg.json"]) == value
    assert back["cls"] == str(number).encode()
    assert list(json_lines([back])) == [line]


@given(st.text(st.characters(exclude_characters="./\0_"), min_size=1))
def test_texts_are_strings_whatever_is_in_them(tmp_path_factory, text):
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return
    (line,) = json_lines([{"__key__": text, "txt": data}])
    assert "\n" not in line
    assert json.loads(line) == {"__key__": text, "txt": text}
    assert read_back([line], tmp_path_factory.mktemp("f")) == [{"__key__": text, "txt": data}]


def test_what_a_field_becomes():
    fields = {"cls": b"7\n", "json": b'{"a": [1, null]}', "txt": "ü\n".encode(), "jpg": b"\xff\xd8", "html": b"<p>"}
    assert lines_of(**fields) == [
        {
            "__key__": "a",
            "cls": 7,
            "json": {"a": [1, None]},
            "txt": "ü\n",
            "jpg": {"base64": base64.b64encode(b"\xff\xd8").decode()},
            "html": {"base64": base64.b64encode(b"<p>").decode()},
        }
    ]


def test_text_that_is_none_is_base64():
    assert lines_of(txt=b"\xff") == [{"__key__": "a", "txt": {"base64": "/w=="}}]


def test_a_json_field_may_look_like_base64(tmp_path):
    sample = {"__key__": "a", "json": b'{"base64": "/w=="}', "jpg": b"\xff"}
    assert read_back(json_lines([sample]), tmp_path) == [sample]


def test_selected_and_renamed_fields_are_what_they_were():
    samples = [{"__key__": "a", "cls": b"7", "txt": b"x", "jpg": b"\xff"}]
    assert [*json_lines(samples, "label:cls *")] == [
        '{"__key__": "a", "label": 7, "txt": "x", "jpg": {"base64": "/w=="}}'
    ]
    assert [*json_lines(samples, "caption;txt")] == ['{"__key__": "a", "txt": "x"}']
    assert [*json_lines(samples, binary=False)] == ['{"__key__": "a", "cls": 7, "txt": "x"}']
    with pytest.raises(SampleError, match="no field png"):
        list(json_lines(samples, "png"))
    with pytest.raises(ValueError, match="selects no field"):
        list(json_lines(samples, "a:b:"))


def test_names_that_are_no_text_come_back(tmp_path):
    sample = {"__key__": "a\udcff", "txt": b"x", "b\udcfe": b"y", "json": b'"\\udcfd"'}
    assert read_back(json_lines([sample]), tmp_path) == [sample]


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("json", b"{"),
        ("json", b"NaN"),
        ("json", b"[1e999]"),
        ("json", b'{"a": 1, "a": 2}'),
        ("json", b"[" * 1_000_000 + b"]" * 1_000_000),
        ("json", b"\xff\xfe\x00"),
        ("cls", b"seven"),
        ("cls", b"9" * 5000),
    ],
)
def test_what_json_cannot_hold_is_an_error(field, data):
    samples = [{"__key__": "a", "__url__": "x.tar", field: data}, {"__key__": "b", "cls": b"1"}]
    with pytest.raises(DecodeError, match=rf"^x\.tar: a\.{field}: "):
        list(json_lines(samples))
    rejected = []
    kept = list(json_lines(samples, reject=lambda sample, error: rejected.append((sample["__key__"], type(error)))))
    assert kept == ['{"__key__": "b", "cls": 1}']
    assert rejected == [("a", DecodeError)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", r"not JSON: "),
        ("[]", r"an object whose __key__"),
        ('{"txt": "x"}', r"an object whose __key__"),
        ('{"__key__": 7, "txt": "x"}', r"an object whose __key__"),
        ('{"__key__": "a"}', r"a: a sample without fields cannot be written"),
        ('{"__key__": "a.b", "txt": "x"}', r"a\.b\.txt: .* would read back as"),
        ('{"__key__": "a", "TXT": "x"}', r"a\.TXT: .* would read back as"),
        ('{"__key__": "a", "__url__": "x", "txt": "x"}', r"a\.__url__: not a valid field name"),
        ('{"__key__": "a", "txt": "x", "txt": "y"}', r"'txt' occurs twice"),
        ('{"__key__": "a", "txt": 7}', r'a\.txt: this field must be a string or {"base64": ...}, not 7'),
        ('{"__key__": "a", "cls": true}', r"a\.cls: this field must be a number, .*, not true"),
        ('{"__key__": "a", "cls": 1.0}', r"a\.cls: this field must be a number, .*, not 1.0"),
        ('{"__key__": "a", "jpg": {"base64": "?"}}', r"a\.jpg: "),
        ('{"__key__": "a", "jpg": {"base64": "/w==", "x": 1}}', r"a\.jpg: "),
        ('{"__key__": "a", "jpg": ["/w=="]}', r"a\.jpg: "),
        ('{"__key__": "a", "txt": "\\ud800"}', r"a\.txt: "),
        ('{"__key__": "a", "json": NaN}', r"NaN is not allowed"),
        ('{"__key__": "ok", "txt": "again"}', r"ok: duplicate key"),
    ],
)
def test_lines_that_are_no_samples_are_told(tmp_path, line, reason):
    (tmp_path / "lines").write_text('{"__key__": "ok", "txt": "x"}\n\n' + line + "\n")
    samples = read_json_lines(str(tmp_path / "lines"))
    assert next(samples)["txt"] == b"x"
    with pytest.raises(SampleError, match=rf"lines: line 3: .*{reason}"):
        next(samples)


def test_strings_of_other_fields_are_their_text(tmp_path):
    (tmp_path / "lines").write_text('{"__key__": "a", "html": "<p>ü", "cls": "7", "json": "x"}\n')
    (sample,) = read_json_lines(str(tmp_path / "lines"))
    assert (sample["html"], sample["cls"], sample["json"]) == ("<p>ü".encode(), b"7", b'"x"')


def test_to_lines_and_back_through_files(tmp_path):
    need("zstd")
    samples = [{"__key__": f"k{i}", "txt": f"text\n{i}", "cls": i, "bin": bytes(range(i, 256))} for i in range(20)]
    write_samples(samples, str(tmp_path / "a.tar"))
    (tmp_path / "a.json").write_text("".join(line + "\n" for line in json_lines(read_samples(tmp_path / "a.tar"))))
    subprocess.run(["zstd", "-q", tmp_path / "a.json"], check=True)
    write_samples(read_json_lines(str(tmp_path / "a.json.zst")), str(tmp_path / "b.tar"))
    assert (tmp_path / "b.tar").read_bytes() == (tmp_path / "a.tar").read_bytes()
