"""Parquet on a web server is read by ranges, and gives the same shards as the local file."""

from __future__ import annotations

from pathlib import Path

import pytest
from inline import Inline
from range_server import serving

from tarshards import Ledger, import_dataset, read_samples
from tarshards.errors import OpenError, TarshardsError
from tarshards.storage import tuning
from tarshards.testing.faulty_server import Answer
from tarshards.testing.faulty_server import serving as serving_faults

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    pa = None

pytestmark = [pytest.mark.interop, pytest.mark.skipif(pa is None, reason="pyarrow is not installed")]


def write(path: Path, rows: int = 40) -> bytes:
    table = pa.table({"image": [bytes([row]) * 50_000 for row in range(rows)], "cls": list(range(rows))})
    pq.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False)
    return path.read_bytes()


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".tar", ".index")}


def test_remote_files_give_the_shards_of_local_ones(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet")
    options = {"max_bytes": 1_000_000, "sync": False}
    import_dataset(tmp_path / "{a,b}.parquet", tmp_path / "local/o-%d.tar", **options)
    with serving(tmp_path) as site:
        import_dataset(f"{site.url}/{{a,b}}.parquet", tmp_path / "remote/o-%d.tar", **options)
        assert None not in [wanted for _, wanted in site.requests]
        assert site.bytes < 1.1 * 2 * (tmp_path / "a.parquet").stat().st_size + 8 * 65536 * 8
    assert shards(tmp_path / "remote") == shards(tmp_path / "local")
    assert len(shards(tmp_path / "local")) == 8 * 2


def test_a_server_without_the_file_or_without_ranges(tmp_path):
    write(tmp_path / "a.parquet")
    with serving(tmp_path) as site:
        with pytest.raises(OpenError, match=r"b\.parquet"):
            import_dataset(f"{site.url}/b.parquet", tmp_path / "o-%d.tar")
        (tmp_path / "c.parquet").write_bytes(b"no parquet" * 99)
        with pytest.raises(OpenError, match=r"c\.parquet: not a parquet file"):
            import_dataset(f"{site.url}/c.parquet", tmp_path / "o-%d.tar")
    assert not list(tmp_path.glob("*.tar"))


WHOLE = Answer(end="keep")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(tuning, "LONGEST_SECONDS", 0)


@pytest.fixture
def imported(tmp_path):
    """A function that imports from a server with *whole* complete responses, then one *fault*, then *default*."""
    body = write(tmp_path / "a.parquet")
    with serving_faults() as server:

        def run(target: str, whole: int = 0, *fault: Answer, default: Answer = WHOLE, **options) -> int:
            url = server.play(*[WHOLE] * whole, *fault, body=body, default=default).replace("shard.tar", "a.parquet")
            import_dataset(url, tmp_path / target, executor=Inline(), **options)
            return len(server.requests)

        run.place = f"{server.url}/a.parquet"
        yield run


@pytest.mark.parametrize("fault", [Answer(cut=300_000, end="reset"), Answer(cut=300_000), Answer(status="503 Later")])
def test_what_breaks_once_is_read_again(tmp_path, imported, fault):
    import_dataset(tmp_path / "a.parquet", tmp_path / "local/o-%d.tar")
    needed = imported("whole/o-%d.tar")
    assert imported("remote/o-%d.tar", needed - 2, fault) == needed + 1
    assert shards(tmp_path / "remote") == shards(tmp_path / "whole") == shards(tmp_path / "local")


@pytest.mark.parametrize("fault", [Answer(status="403 Expired"), Answer(cut=0, end="reset")])
def test_a_server_that_fails_in_the_middle(tmp_path, imported, fault):
    needed = imported("whole-%d.tar")
    for whole in range(needed - 1):
        with pytest.raises(TarshardsError, match=imported.place):
            imported("o-%d.tar", whole, default=fault)
        assert not list(tmp_path.glob("o-*.tar"))
    ledger = Ledger(max_errors=4)
    imported("some-%d.tar", needed - 2, default=fault, on_error=ledger)
    kept = [sample["__key__"] for sample in read_samples(tmp_path / "some-0.tar")]
    assert kept == [f"a/{row:09d}" for row in range(len(kept))]
    assert 0 < len(kept) == 40 - ledger.failed < 40
    place = f"{imported.place}: row {len(kept)}: rows {len(kept)} to {len(kept) + 9} cannot be read"
    assert place in str(ledger)


def test_a_file_that_changes_while_it_is_read(imported):
    needed = imported("whole-%d.tar")
    with pytest.raises(TarshardsError, match=f"{imported.place}: row .* cannot be read: .*changed"):
        imported("o-%d.tar", needed - 2, default=Answer(etag='"v2"', end="keep"))
