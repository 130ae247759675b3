"""Keys that come twice are found however many there are, and others are not."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarshards.errors import SampleError
from tarshards.samples import seen_keys
from tarshards.samples.seen_keys import SeenKeys


@settings(deadline=None)
@given(
    keys=st.lists(st.sampled_from([*"abcdefgh", "ü", "\udcff"]) | st.text("ab\0", min_size=1, max_size=3), max_size=40),
    latest=st.integers(1, 5),
)
def test_an_error_names_a_key_that_came_twice(keys, latest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen_keys, "LATEST", latest)
        seen, added = SeenKeys("twice"), []
        error = None
        try:
            for number, key in enumerate(keys):
                assert (key in seen) == (key in added)
                added.append(key)
                seen.add(key, url=f"{number}.tar")
            assert [*seen.which([*added, "none"])] == [True] * len(added) + [False]
            seen.check()
        except SampleError as raised:
            error = raised
    if error is None:
        assert len(set(keys)) == len(keys)
        return
    assert error.reason == "twice"
    assert added.count(error.key) > 1
    assert keys[int(error.url.removesuffix(".tar"))] == error.key


def test_a_key_of_the_latest_is_refused_at_once():
    seen = SeenKeys("twice")
    for key in "abc":
        seen.add(key, url=None)
    with pytest.raises(SampleError, match="b: twice"):
        seen.add("b", url=None)


def test_memory(monkeypatch):
    monkeypatch.setattr(seen_keys, "LATEST", 1 << 12)
    seen = SeenKeys("twice")
    tracemalloc.start()
    try:
        for i in range(100_000):
            seen.add(f"a key of some length {i}", url=None)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000 * 16 + (1 << 20)
    assert "a key of some length 7" in seen
    assert "a key" not in seen
