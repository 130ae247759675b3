import pytest
from readers_data import KERNELS, TWINS, load_twin


@pytest.fixture(params=TWINS)
def twin(request, monkeypatch):
    """Work with one of the two makes of the kernels."""
    for name in KERNELS:
        monkeypatch.setattr(f"tarshards.index.memory.{name}", getattr(load_twin(request.param), name))
    return request.param
