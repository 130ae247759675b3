"""Items whose outputs are on a web server: what a killed attempt has written is written again, nothing else is."""

from __future__ import annotations

import pytest
from range_server import serving

from tarshards import TarWriter
from tarshards.run.jobs.attempt import Attempt
from tarshards.run.jobs.job_plan import make_plan
from tarshards.run.jobs.worker import Worker


@pytest.fixture
def site(tmp_path, monkeypatch, path_with_tools):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path_with_tools)
    with TarWriter("in-0.tar") as writer:
        writer.write({"__key__": "a", "txt": "text"})
    (tmp_path / "site").mkdir()
    with serving(tmp_path / "site") as site:
        yield site


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_killed_attempt_has_written_is_replaced(site, tmp_path, killed):
    plan = make_plan(["tarcat", "in-{}.tar", "-o", f"{site.url}/out-{{}}.tar"], ["0"])
    (item,) = plan.items
    output = site.folder / "out-0.tar"
    if killed:
        with Attempt(plan, item) as attempt:
            assert attempt.lock(lambda: False)
            attempt.begin({"digest": plan.digest(item)}, None)
            assert attempt.absent == [f"{site.url}/out-0.tar"]
            assert (site.folder / "out-0.tar.started").exists()
    output.write_bytes(b"before")
    with Worker(plan, run="2", owner=str(tmp_path)) as worker, open("log", "a+b") as log:
        result = worker.run(item, log)
    assert result.status == (0 if killed else 2)
    assert output.read_bytes() == ((tmp_path / "in-0.tar").read_bytes() if killed else b"before")
    if not killed:
        assert "out-0.tar exists; --overwrite replaces it" in result.line
    assert not (site.folder / "out-0.tar.started").exists()
    assert (site.folder / "out-0.tar.done").exists() == killed
