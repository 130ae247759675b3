"""The page on media: its code runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/media.md"
BLOCKS = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_on_media(tmp_path):
    program = dict(BLOCKS)["part"]
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
