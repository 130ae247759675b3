"""Merge patches: the examples of RFC 7396, appendix A."""

from __future__ import annotations

import copy

import pytest

from tarshards.run.jobs.kubernetes_objects import merged


@pytest.mark.parametrize(
    ("document", "patch", "expected"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_the_examples_of_the_rfc(document, patch, expected):
    before = copy.deepcopy(document)
    assert merged(document, patch) == expected
    assert document == before


def test_named_objects_of_lists_are_merged_by_name():
    container = {"name": "tarjob", "image": "me", "volumeMounts": [{"name": "plan", "mountPath": "/plan"}]}
    document = {"containers": [container], "args": ["a"]}
    mount = {"name": "plan", "mountPath": "/again"}
    patch = {
        "containers": [{"name": "tarjob", "volumeMounts": [mount], "image": None}, {"name": "other"}],
        "args": ["b"],
    }
    merged_mounts = [*container["volumeMounts"], mount]
    expected = [{"name": "tarjob", "volumeMounts": merged_mounts}, {"name": "other"}]
    assert merged(document, patch) == {"containers": expected, "args": ["b"]}
