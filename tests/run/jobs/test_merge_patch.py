"""JSON Patch: the examples of RFC 6902 and what they leave out."""

from __future__ import annotations

import pytest

from tarshards.run.jobs.json_patch import apply_patch


@pytest.mark.parametrize(
    ("document", "operation", "patched"),
    [
        ({"foo": "bar"}, {"op": "add", "path": "/baz", "value": "qux"}, {"foo": "bar", "baz": "qux"}),
        ({"foo": [1, 3]}, {"op": "add", "path": "/foo/1", "value": 2}, {"foo": [1, 2, 3]}),
        ({"foo": [1]}, {"op": "add", "path": "/foo/-", "value": [2]}, {"foo": [1, [2]]}),
        ({"foo": [1]}, {"op": "add", "path": "/foo/1", "value": 2}, {"foo": [1, 2]}),
        ({"foo": 1}, {"op": "add", "path": "/foo", "value": None}, {"foo": None}),
        ({"foo": 1}, {"op": "add", "path": "", "value": []}, []),
        ({"foo": 1, "baz": 2}, {"op": "remove", "path": "/baz"}, {"foo": 1}),
        ({"foo": [1, 2, 3]}, {"op": "remove", "path": "/foo/1"}, {"foo": [1, 3]}),
        ({"foo": 1}, {"op": "replace", "path": "/foo", "value": 2}, {"foo": 2}),
        ([1, 2], {"op": "replace", "path": "/0", "value": 3}, [3, 2]),
        ({"a": {"b": [1]}}, {"op": "test", "path": "/a/b/0", "value": 1}, {"a": {"b": [1]}}),
        ({"/": 9, "~1": 10}, {"op": "test", "path": "/~01", "value": 10}, {"/": 9, "~1": 10}),
        ({"": 1}, {"op": "replace", "path": "/", "value": 2}, {"": 2}),
        ({"foo": 1}, {"op": "add", "path": "/baz", "value": 2, "more": 3}, {"foo": 1, "baz": 2}),
    ],
)
def test_operations(document, operation, patched):
    before = repr(document)
    assert apply_patch(document, [operation]) == patched
    assert repr(document) == before


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ({"op": "add", "path": "/no/b", "value": 1}, "add /no/b: there is no 'no'"),
        ({"op": "remove", "path": "/no"}, "remove /no: there is no 'no'"),
        ({"op": "replace", "path": "/no", "value": 1}, "replace /no: there is no 'no'"),
        ({"op": "add", "path": "/list/3", "value": 1}, "the list has 2 items"),
        ({"op": "remove", "path": "/list/2"}, "out of range"),
        ({"op": "remove", "path": "/list/-"}, "'-' is not an index"),
        ({"op": "add", "path": "/list/01", "value": 1}, "'01' is not an index"),
        ({"op": "add", "path": "/text/0", "value": 1}, "there is no '0'"),
        ({"op": "test", "path": "/text", "value": 1}, "the value is 'x'"),
        ({"op": "move", "path": "/text", "from": "/list"}, "the operations are add, remove, replace, test"),
        ({"op": "add", "path": "text", "value": 1}, "a path starts with /"),
        ({"op": "add", "path": "/text"}, "there is no 'value'"),
        ({"path": "/text"}, "there is no 'op'"),
        ({"op": "add"}, "there is no 'path'"),
    ],
)
def test_what_cannot_be_applied(operation, message):
    with pytest.raises(ValueError, match=f"operation 2 of the patch, .*{message}"):
        apply_patch({"list": [1, 2], "text": "x"}, [{"op": "test", "path": "/text", "value": "x"}, operation])
