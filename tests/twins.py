"""Replaces compiled kernels by their Python twins, for a test."""

from __future__ import annotations

from types import ModuleType

import pytest

from tarshards.index import _headers_py, access, header_checks, open, sidecar


def use_twin(monkeypatch: pytest.MonkeyPatch, twin: ModuleType = _headers_py) -> None:
    """Let indexes and the members of shards be those of *twin*."""
    for module, names in (
        (sidecar, ("MemberTable", "layout")),
        (open, ("MappedMembers", "find_undecided")),
        (header_checks, ("MappedMembers",)),
        (access, ("read_samples",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(twin, name))
    for module in sidecar, header_checks:
        monkeypatch.setattr(module, "IS_COMPILED", twin is not _headers_py)
