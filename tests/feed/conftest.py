"""The dataset of all tests of feeding, whose folder the environment names."""

from __future__ import annotations

import feed_specs
import pytest
from feed_specs import DATA


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("data")
    feed_specs.make(str(folder))
    return str(folder)


@pytest.fixture(autouse=True)
def data(dataset, monkeypatch):
    monkeypatch.setenv(DATA, dataset)
