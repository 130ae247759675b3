"""Duplicate keys are found among any number of keys, and no others."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarshards import TarWriter
from tarshards.errors import SampleError
from tarshards.samples import seen_keys
from tarshards.samples.seen_keys import SeenKeys


@settings(deadline=None)
@given(
    steps=st.lists(
        st.lists(st.sampled_from([*"abcdefgh", "ü", "\udcff"]) | st.text("ab\0", min_size=1, max_size=3), max_size=5),
        max_size=12,
    ),
    latest=st.integers(1, 5),
    bits=st.sampled_from([64, 64, 3, 0]),
)
def test_it_is_a_set(steps, latest, bits):
    """Of hashes that collide only one half: the other tells keys apart."""
    whole = seen_keys._hash

    def colliding(keys):
        first, second = whole(keys)
        return first & ((1 << bits) - 1) if bits < 64 else first, second

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen_keys, "LATEST", latest)
        patch.setattr(seen_keys, "_hash", colliding)
        if bits < 64:  # the filter takes the hash itself
            patch.setattr(seen_keys._Hashes, "__contains__", lambda self, key: bool(self.which([key])[0]))
        seen, added = SeenKeys(), set()
        for number, keys in enumerate(steps):
            assert seen.isdisjoint(keys) == added.isdisjoint(keys)
            assert [*seen.which([*keys, "none"])] == [key in added for key in [*keys, "none"]]
            if number % 2:
                seen.update(keys, "x.tar")
                added.update(keys)
            else:
                for key in keys:
                    assert (key in seen) == (key in added)
                    seen.add(key)
                    added.add(key)
        assert all(key in seen for key in added)
        assert all(shard == "x.tar" for shard in map(seen.shard_of, added) if shard is not None)


def test_memory(monkeypatch):
    monkeypatch.setattr(seen_keys, "LATEST", 1 << 12)
    seen = SeenKeys()
    tracemalloc.start()
    try:
        for i in range(40_000):
            seen.add(f"a key of some length {i}")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 40_000 * 20 + (1 << 20)
    assert "a key of some length 7" in seen
    assert "a key" not in seen


def test_a_writer_refuses_a_key_of_long_ago(monkeypatch, tmp_path):
    monkeypatch.setattr(seen_keys, "LATEST", 10)
    with TarWriter(tmp_path / "a.tar", sync=False) as writer:
        for i in range(100):
            writer.write({"__key__": f"{i}", "txt": "", "__url__": "x.tar"})
        for key in ("3", "99"):
            with pytest.raises(SampleError, match=f"{key}: this key is already in the shard"):
                writer.write({"__key__": key, "txt": ""})
    assert writer.samples == 100
