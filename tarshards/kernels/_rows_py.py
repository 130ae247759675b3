"""Gather, compare and parse a batch of payloads in numpy and ctypes: the twin of _rows.c, if that is not compiled.

Each row has an address (uint64) and a size in bytes (int64), which are trusted. All arrays are C-contiguous. If an
address is in a mapped file that has shrunk, the native kernels raise OSError; these functions would end the process, so
files are mapped only for the native ones.
"""

from __future__ import annotations

import re
import struct
from ctypes import c_char, string_at
from typing import Any

import numpy as np

INTEGER = re.compile(rb"\s*([+-]?[0-9]+)\s*")
LONGEST_FLOAT = 319  # bytes, as in the native twin; repr() gives at most 25
PNG = re.compile(rb"\x89PNG\r\n\x1a\n.{4}IHDR(.{4})(.{4}).{9}", re.DOTALL)
PNG_END, JPEG_END = b"\0\0\0\0IEND\xaeB`\x82", b"\xff\xd9"


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


def parse_image_sizes(out: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> int:
    """Write height and width of JPEGs and PNGs, two uint32 each; return the first row that is none, or -1.

    One whose header or end is not whole counts as none, and as no JPEG or PNG.
    """
    return _parse(_image_size, out, addresses, sizes)


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


def _image_size(data: bytes) -> tuple[int, int]:
    sides = 0, 0
    if data[:3] == b"\xff\xd8\xff":
        sides = _jpeg_size(data)
    elif (match := PNG.match(data)) is not None and PNG_END in data:
        sides = int.from_bytes(match[2], "big"), int.from_bytes(match[1], "big")
    if not all(sides):
        raise ValueError
    return sides


def _jpeg_size(data: bytes) -> tuple[int, int]:
    sides, at, marker = (0, 0), 2, 0
    while marker != 0xDA:
        if at + 4 > len(data) or data[at] != 0xFF:
            raise ValueError
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker == 1 or 0xD0 <= marker <= 0xD8:  # a marker without a length
            at += 2
        else:
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC) and at + 9 <= len(data):
                sides = struct.unpack_from(">HH", data, at + 5)
                if not all(sides):
                    raise ValueError
            (size,) = struct.unpack_from(">H", data, at + 2)
            at += 2 + size
    if data.find(JPEG_END, at) < 0:
        raise ValueError
    return sides
