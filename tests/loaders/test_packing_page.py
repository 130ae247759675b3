"""What the page on packing shows does run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from programs import warnings_of

PAGE = Path(__file__).parents[2] / "docs" / "packing.md"


def test_the_page_on_packing(tmp_path):
    program = tmp_path / "rows.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)))
    done = subprocess.run([sys.executable, "-W", "error", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")
    assert float(re.search("filled to ([0-9.]+)", done.stdout)[1]) > 0.95
