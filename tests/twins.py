"""Replaces compiled kernels by their Python twins, for a test."""

from __future__ import annotations

from types import ModuleType

import pytest

from tarshards import kernels
from tarshards.kernels import _headers_py


def use_twin(monkeypatch: pytest.MonkeyPatch, twin: ModuleType = _headers_py) -> None:
    """Let indexes and the members of shards be those of *twin*."""
    monkeypatch.setattr(kernels, "headers", twin)
    monkeypatch.setattr(kernels, "IS_COMPILED", twin is not _headers_py)
