"""A file system that reports only at close(2) that it could not write, as NFS does at a full quota."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest


def fail_to_close(patched: pytest.MonkeyPatch, *paths: str) -> None:
    """Let each close of a file that is open for writing fail if its path ends with one of *paths*; it is closed."""
    close = os.close

    def failing(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        is_written = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        close(descriptor)
        if is_written and path.endswith(paths):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    patched.setattr(os, "close", failing)
