"""Gather, compare and parse a batch of payloads in numpy and ctypes: the twin of _rows.c, if that is not compiled.

Each row has an address (uint64) and a size in bytes (int64), which are trusted. All arrays are C-contiguous. If an
address is in a mapped file that has shrunk, the native kernels raise OSError; these functions would end the process, so
files are mapped only for the native ones.
"""

from __future__ import annotations

import re
from ctypes import c_char, string_at
from typing import Any

import numpy as np

INTEGER = re.compile(rb"\s*([+-]?[0-9]+)\s*")
LONGEST_FLOAT = 319  # bytes, as in the native twin; repr() gives at most 25


def gather(out: np.ndarray, addresses: np.ndarray, prefix: bytes) -> int:
    """Copy what follows *prefix* at each address into its row of *out*; return the first row that lacks it, or -1."""
    prefix = bytes(prefix)
    rows = out.reshape(len(addresses), -1).view(np.uint8) if len(addresses) else out
    for i, (row, address) in enumerate(zip(rows, addresses.tolist())):
        data = string_at(address, len(prefix) + len(row))
        if not data.startswith(prefix):
            return i
        row[:] = np.frombuffer(data, np.uint8)[len(prefix) :]
    return -1


def pack(out: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> None:
    """Copy the bytes at all addresses, concatenated, into *out*; raise ValueError unless they fill it exactly."""
    if len(sizes) != len(addresses) or min(sizes, default=0) < 0 or sum(sizes.tolist()) != out.nbytes:
        raise ValueError("out, addresses and sizes do not fit together")
    data = [string_at(address, size) for address, size in zip(addresses.tolist(), sizes.tolist())]
    out.reshape(-1).view(np.uint8)[:] = np.frombuffer(b"".join(data), np.uint8)


def copy_bytes(address: int, size: int) -> bytes:
    """Return a copy of the *size* bytes at an address."""
    if size >> 31:  # string_at takes an int of C
        return (c_char * size).from_address(address).raw
    return string_at(address, size)


def find_other(addresses: np.ndarray, prefix: bytes) -> int:
    """Return the first row whose bytes do not begin with *prefix*, or -1; no row may be shorter than the prefix."""
    prefix = bytes(prefix)
    return next((i for i, address in enumerate(addresses.tolist()) if string_at(address, len(prefix)) != prefix), -1)


def ask(addresses: np.ndarray, sizes: np.ndarray) -> None:
    """Do nothing, since no file is mapped; the native twin lets the system read ranges of mapped files ahead.

    Adjacent ranges are requested together. A range must be inside an existing mapping.
    """


def parse_integers(out: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> int:
    """Parse ASCII decimals, which white space may surround, into int64; return the first row that fails, or -1."""
    return _parse(_integer, out, addresses, sizes)


def parse_floats(out: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> int:
    """Parse numbers as ``float`` does into float64; return the first row that fails, or -1.

    Numbers with underscores, and those of more than 319 bytes without white space around them, fail.
    """
    return _parse(_float, out, addresses, sizes)


def _parse(read: Any, out: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> int:
    for i, (address, size) in enumerate(zip(addresses.tolist(), sizes.tolist())):
        try:
            out[i] = read(string_at(address, size))
        except (ValueError, OverflowError):
            return i
    return -1


def _integer(text: bytes) -> int:
    if (match := INTEGER.fullmatch(text)) is None:
        raise ValueError
    return int(match[1])


def _float(text: bytes) -> float:
    if b"_" in text or len(text.strip()) > LONGEST_FLOAT:
        raise ValueError
    return float(text)
