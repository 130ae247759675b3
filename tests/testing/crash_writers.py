"""Writers of one file, a right one and wrong ones, for ``check_writer``, whose new process imports them alone."""

from __future__ import annotations

import os
from pathlib import Path

NEW = b"new!" * 400


def in_place(folder: Path) -> None:
    (folder / "file").write_bytes(NEW)


def unflushed(folder: Path) -> None:
    (folder / "file.tmp").write_bytes(NEW)
    os.replace(folder / "file.tmp", folder / "file")


def flushed(folder: Path, is_named: bool = False) -> None:
    with open(folder / "file.tmp", "wb") as file:
        file.write(NEW)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "file.tmp", folder / "file")
    if is_named:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def right(folder: Path) -> None:
    flushed(folder, True)


def removed_first(folder: Path) -> None:
    (folder / "file").unlink(missing_ok=True)
    right(folder)


def left_over(folder: Path) -> None:
    (folder / f"{len(list(folder.iterdir()))}.lock").touch()
    right(folder)
