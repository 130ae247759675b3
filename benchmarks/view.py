"""What tarview takes to show the first samples, and those in the middle: a million and a billion samples, near and far.

Each time is of a new server, with an empty memory, and of a new page in headless Chromium.
"""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import growth
import numpy as np
from measure import machine, record
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import programs
from rigs.browser import cards, chromium
from rigs.slow_link import Link, needs

RUNS = 5
BIN = Path(__file__).parents[1] / "bin"
BASE, SHARD = 10_000, 1000  # distinct samples with pictures, and those of a shard
HUGE = 10**9


def pictures() -> Path:
    """Return the manifest of a million samples of an image, a class and a text: links to shards of 10,000."""
    from tarshards import ShardWriter

    base = growth.ROOT / "pictures"
    if not base.exists():
        part = growth.ROOT / "pictures.part"
        part.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        with ShardWriter(f"{part}/s-%06d.tar", max_samples=SHARD, sync=False) as writer:
            for number in range(BASE):
                file = io.BytesIO()
                small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
                small.resize((256, 192), Image.Resampling.BICUBIC).save(file, "jpeg", quality=85)
                sample = {"__key__": f"{number:06d}", "jpg": file.getvalue(), "cls": number % 1000, "txt": "a picture"}
                writer.write(sample)
        part.rename(base)
    return growth.make_set("pictures-1e6", base, 10**6 // SHARD)


def billion() -> Path:
    base = growth.make_base("large", growth.DISTINCT, growth.LARGE_SHARD)
    return growth.make_set("large-1e9", base, HUGE // growth.LARGE_SHARD)


@contextmanager
def tarview(spec: str) -> Iterator[tuple[str, float]]:
    """Serve shards, and return the address of their page and the seconds until it was printed."""
    begun = time.perf_counter()
    command = [sys.executable, str(BIN / "tarview"), spec]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "no_proxy": "*"}) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), time.perf_counter() - begun
        server.terminate()


def measure(browser: object, spec: str) -> dict[str, float]:
    """Return the seconds until the address was printed, and from then on those of the page."""
    with tarview(spec) as (url, printed):
        page = browser.new_page(viewport={"width": 1100, "height": 720})  # type: ignore[attr-defined]
        begun = time.perf_counter()
        page.goto(url, wait_until="commit")
        page.wait_for_selector(".card")
        painted = time.perf_counter() - begun
        cards(page)
        shown = time.perf_counter() - begun
        page.wait_for_load_state("networkidle")  # the pictures are there
        share = random.uniform(0.4, 0.6)
        begun = time.perf_counter()
        page.eval_on_selector(".scroller", f"each => each.scrollTop = each.scrollHeight * {share}")
        time.sleep(0.02)  # a frame
        cards(page)
        middle = time.perf_counter() - begun
        page.close()
    return {"the address": printed, "first paint": painted, "samples in sight": shown, "the middle": middle}


def main() -> None:
    if missing := [name for name in ("chromium", *needs) if not programs.is_installed(name)]:
        print(f"not measured, needs {', '.join(missing)}", file=sys.stderr)
        return
    near, huge = pictures(), billion()
    rows = {}
    with chromium() as browser, Link(1000 * growth.TRIP / 2, growth.RATE) as link, link.serving(growth.ROOT) as site:
        specs = {
            "1e6 samples with images, this disk": str(near),
            "1e6 samples with images, 50 ms away": f"{site.url}/{near.relative_to(growth.ROOT)}",
            "1e9 samples of 200 B, this disk": str(huge),
        }
        for name, spec in specs.items():
            runs = [measure(browser, spec) for _ in range(RUNS)]
            rows[name] = {what: sorted(run[what] for run in runs) for what in runs[0]}
            print(name, rows[name], file=sys.stderr, flush=True)
    lines = [
        machine("pillow"),
        "",
        f"Seconds (median of {RUNS}, least and most in brackets) until `tarview` prints its address; then, in headless "
        "Chromium, from opening it until the grid is painted, until all samples in sight are there, and, once their "
        "pictures are, from a jump to the middle until the samples there are. A new server each time; 50 ms away are a "
        f"round trip of a link of {growth.RATE:.0f} MB/s.",
        "",
        "| | " + " | ".join(next(iter(rows.values()))) + " |",
        "|---" * (1 + len(next(iter(rows.values())))) + "|",
    ]
    for name, row in rows.items():
        cells = [f"{median(times):.2f} ({times[0]:.2f}-{times[-1]:.2f})" for times in row.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    record("Looking at shards in a browser", lines)


if __name__ == "__main__":
    main()
