"""Pages beside shards: how they name these, and where they are refused; test_view_browser.py opens them."""

from __future__ import annotations

import json
import re

import pytest
import range_server
from shard_rig import write_set

from tarshards.errors import OpenError, ShardIndexError
from tarshards.view.static_page import write_static_page


def config_of(page):
    return json.loads(re.search(r'id="config">(.*?)</script>', page.read_text())[1])


def names_in(page):
    return [shard["url"] for shard in config_of(page)["shards"]]


def test_a_page_names_shards_below_it_relatively(tmp_path):
    (tmp_path / "my data").mkdir()
    urls = write_set(tmp_path / "my data")
    assert write_static_page(urls, str(tmp_path)).path == str(tmp_path / "index.html")
    assert config_of(tmp_path / "index.html")["shards"] == [
        {"url": f"my%20data/set-{shard:03d}.tar", "samples": 20} for shard in range(3)
    ]
    assert "connect-src 'self';" in (tmp_path / "index.html").read_text()


def test_a_page_on_a_web_server_is_written_there(tmp_path):
    write_set(tmp_path)
    with range_server.serving(tmp_path) as site:
        write_static_page(f"{site.url}/set-{{000..002}}.tar", f"{site.url}/")
        assert names_in(tmp_path / "index.html") == [f"set-{shard:03d}.tar" for shard in range(3)]
        (tmp_path / "pages").mkdir()
        write_static_page(f"{site.url}/set-001.tar", str(tmp_path / "pages"))
        assert names_in(tmp_path / "pages/index.html") == [f"{site.url}/set-001.tar"]
        assert f"connect-src 'self' {site.url};" in (tmp_path / "pages/index.html").read_text()


def test_shards_that_a_page_cannot_read_are_refused(tmp_path):
    urls = write_set(tmp_path)
    (tmp_path / "pages").mkdir()
    with pytest.raises(OpenError, match="cannot reach this shard"):
        write_static_page(urls, str(tmp_path / "pages"))
    (tmp_path / "plain").mkdir()
    with pytest.raises(ShardIndexError, match="tarindex"):
        write_static_page(write_set(tmp_path / "plain", index=False), str(tmp_path / "plain"))
    assert not list(tmp_path.rglob("index.html"))


@pytest.mark.parametrize("secret", ["?key=secret", "me:secret@"])
def test_a_page_shows_no_credentials(tmp_path, secret):
    write_set(tmp_path, 20)
    with range_server.serving(tmp_path) as site:
        url = f"{site.url}/set-000.tar"
        url = url.replace("//", f"//{secret}") if "@" in secret else url + secret
        with pytest.raises(OpenError, match="would show"):
            write_static_page(url, str(tmp_path / "pages"))
