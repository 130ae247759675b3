import pytest
from tar_corpus import TWINS, load_twin


@pytest.fixture(scope="module", params=TWINS)
def twin(request):
    """Read with one of the two header parsers."""
    with pytest.MonkeyPatch.context() as patch:
        for function in ("scan", "cut"):
            patch.setattr(f"tarshards.tar.read.{function}", getattr(load_twin(request.param), function))
        yield request.param
