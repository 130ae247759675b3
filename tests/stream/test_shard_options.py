"""The keywords of datasets of shards stand once, and look as if each constructor listed them."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from with_torch import needs_torch

import tarshards
from tarshards import Stream
from tarshards.epoch.epoch_options import EpochOptions
from tarshards.index.opening_options import Opening


@pytest.fixture(params=["Stream.from_shards", pytest.param("ShardDataset.__init__", marks=needs_torch)])
def constructor(request):
    owner, _, name = request.param.partition(".")
    return getattr(getattr(tarshards, owner), name)


def test_the_signature_lists_all_options_with_their_defaults(constructor):
    parameters = inspect.signature(constructor).parameters
    given = [*fields(Opening), *fields(EpochOptions)]
    assert [*parameters][-len(given) - 2 :] == ["urls", *(each.name for each in given), "world"]
    for each in given:
        assert parameters[each.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert (parameters[each.name].default, parameters[each.name].annotation) == (each.default, each.type)


def test_help_describes_all_options(constructor):
    for each in (*fields(Opening), *fields(EpochOptions)):
        assert f"- *{each.name}*: " in constructor.__doc__


@pytest.mark.parametrize(
    ("args", "options", "reason"),
    [
        (["a.tar"], {"shufle": True}, "got an unexpected keyword argument 'shufle'"),
        ([], {}, "missing 1 required positional argument: 'urls'"),
        (["a.tar", "b.tar"], {}, "takes 2 positional arguments but 3 were given"),
    ],
)
def test_errors_of_the_call_name_the_constructor(constructor, args, options, reason):
    owner = [object()] if constructor.__name__ == "__init__" else []
    with pytest.raises(TypeError) as caught:
        constructor(*owner, *args, **options)
    assert str(caught.value).startswith(f"{constructor.__qualname__}() {reason}")


def test_names_of_fields_may_come_from_an_iterator(make_shards):
    url = make_shards(1)
    samples = Stream.from_shards(url, fields=(name for name in ["cls"]))
    assert [[*sample] for sample in samples] == [[*sample] for sample in samples] != []
    assert {"cls"} == {name for sample in samples for name in sample if not name.startswith("__")}
