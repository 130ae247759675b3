"""What the page on the array loader shows does run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from programs import warnings_of

PAGE = Path(__file__).parents[2] / "docs" / "array-loader.md"


def test_the_page_on_the_array_loader(tmp_path):
    program = tmp_path / "arrays.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)))
    done = subprocess.run([sys.executable, "-W", "error", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")
    assert "samples/s" in done.stdout
