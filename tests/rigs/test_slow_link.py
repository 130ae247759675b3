"""The rig of a slow network: its round trip and rate are those it was made with, and nothing of it is left over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import need
from rigs.slow_link import PORT, Link, needs

pytestmark = pytest.mark.interop
TOTAL = 24_000_000  # bytes


@pytest.fixture(autouse=True)
def _programs():
    need(*needs)


def devices() -> set[str]:
    return {name for _, name in socket.if_nameindex() if name.startswith("slow")}


def curl(site, urls: list[str], *options: str) -> float:
    """Return the seconds of downloads, eight at once."""
    outputs = [word for url in urls for word in ("-o", "/dev/null", url)]
    command = ["curl", "-sS", "--no-progress-meter", "-Z", "--parallel-max", "8", "--cacert", str(site.certificate)]
    begun = time.monotonic()
    subprocess.run([*command, *options, *outputs], check=True)
    return time.monotonic() - begun


def test_a_connection_takes_a_round_trip_and_files_take_what_the_rate_says(tmp_path):
    for files in (1, 8):
        for number in range(files):
            (tmp_path / f"{files}-{number}.bin").write_bytes(os.urandom(TOTAL // files))
    with Link(one_way_ms=10, mb_s=20) as link, link.serving(tmp_path) as site:
        begun = time.monotonic()
        socket.create_connection((link.address, PORT)).close()
        assert time.monotonic() - begun >= 0.02  # a busy machine takes longer, never less
        for base in (site.url, site.tls_url):
            for files in (1, 8):
                seconds = curl(site, [f"{base}/{files}-{number}.bin" for number in range(files)])
                assert TOTAL / 1e6 / seconds <= 20
        site.taken()
        curl(site, [f"{site.url}/1-0.bin"] * 2, "-r", "5-14", "--parallel-max", "1")
        first, second = site.taken()
        assert first == second == (first.connection, "GET", "/1-0.bin", 206, 10, "bytes=5-14")


def test_links_beside_each_other():
    with Link() as one, Link() as other:
        assert one.address != other.address


def test_a_link_ends_with_a_process_that_is_killed():
    before = devices()
    program = f"""import sys, signal
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from rigs.slow_link import Link
with Link() as link:
    link.start("sh", "-c", "echo $$; exec sleep 600")
    print(link.pid, flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [process.stdout.readline().strip() for _ in range(2)]
        assert len(devices()) > len(before)
        process.send_signal(signal.SIGKILL)
    limit = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) or devices() - before:
        assert time.monotonic() < limit
        time.sleep(0.02)
