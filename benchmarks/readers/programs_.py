"""GNU tar and bsdtar: the files that they extract, in the order in which they list them, grouped by the rule."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _members import grouped, one_file


def extracted(program: str, path: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        listed = subprocess.run([program, "-tf", path], stdout=subprocess.PIPE)
        done = subprocess.run([program, "-xf", path], cwd=folder)
        names = dict.fromkeys(os.fsdecode(listed.stdout).splitlines())
        files = ((name, Path(folder, name)) for name in names)
        yield from grouped((name, file.read_bytes()) for name, file in files if file.is_file())
        if done.returncode:
            raise OSError(f"exit status {done.returncode}")


def read_by_tar(expression: str) -> Iterator[dict[str, Any]]:
    return extracted("tar", one_file(expression))


def read_by_bsdtar(expression: str) -> Iterator[dict[str, Any]]:
    return extracted("bsdtar", one_file(expression))
