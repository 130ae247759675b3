import pytest
from tar_corpus import TWINS, load_twin


@pytest.fixture(scope="module", params=TWINS)
def twin(request):
    """Read with one of the two header parsers."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tar.read.scan", "tar.read.cut", "samples.grouping.Grouper"):
            patch.setattr(f"tarshards.{name}", getattr(load_twin(request.param), name.rpartition(".")[2]))
        yield request.param
