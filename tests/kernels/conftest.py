"""Each kernel with its twin, which are asked the same; see tests/twins.py."""

import pytest
from twins import pair


def paired(name):
    return pytest.fixture(lambda: pair(name), scope="session", name=name)


headers, mapped, pixels = paired("headers"), paired("mapped"), paired("pixels")
rows, sidecars, tar = paired("rows"), paired("sidecars"), paired("tar")
