import pytest
from readers_data import TWINS, load_twin

from tarshards import kernels


@pytest.fixture(params=TWINS)
def twin(request, monkeypatch):
    """Work with one of the two makes of the kernels."""
    for module in "rows", "pixels":
        monkeypatch.setattr(kernels, module, load_twin(request.param))
    return request.param
