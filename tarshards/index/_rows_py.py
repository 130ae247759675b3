"""Gather, compare and parse a batch of payloads, in numpy and ctypes: the twin of _rows.c for want of a compiler.

Addresses are uint64, sizes int64, a row each; they are trusted. All arrays are C-contiguous.
"""

from __future__ import annotations

import re
from ctypes import string_at
from typing import Any

import numpy as np

INTEGER = re.compile(rb"\s*([+-]?[0-9]+)\s*")
LONGEST_FLOAT = 319  # bytes; Python writes at most 327 digits, and 25 of anything that it reads back


def gather(out: np.ndarray, addresses: np.ndarray, prefix: bytes) -> int:
    """Copy what follows *prefix* at each address into its row of *out*, until the first without; return it, or -1."""
    prefix = bytes(prefix)
    rows = out.reshape(len(addresses), -1).view(np.uint8) if len(addresses) else out
    for i, (row, address) in enumerate(zip(rows, addresses.tolist())):
        data = string_at(address, len(prefix) + len(row))
        if not data.startswith(prefix):
            return i
        row[:] = np.frombuffer(data, np.uint8)[len(prefix) :]
    return -1


def pack(out: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> None:
    """Copy so many bytes from each address, one after the other, into *out*; ValueError if they do not just fill it."""
    data = [string_at(address, size) for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True)]
    out.reshape(-1).view(np.uint8)[:] = np.frombuffer(b"".join(data), np.uint8)


def find_other(addresses: np.ndarray, prefix: bytes) -> int:
    """Return the first row whose bytes do not begin with *prefix*, -1 if all do; each must have as many."""
    prefix = bytes(prefix)
    return next((i for i, address in enumerate(addresses.tolist()) if string_at(address, len(prefix)) != prefix), -1)


def parse_integers(out: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> int:
    """Read ASCII decimals into int64, spaces around them ignored, until the first that is none; return it, or -1."""
    return _parse(_integer, out, addresses, sizes)


def parse_floats(out: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> int:
    """Read numbers into float64 as ``float`` does, until the first that is none; return it, or -1.

    Underscores and more than 319 bytes without the spaces are refused.
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
