"""The pieces that make up the cases, byte by byte: headers, members, extended headers, and compressed frames."""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

BLOCK = 512
END = bytes(2 * BLOCK)
PLACES = {  # of the fields of a header (POSIX.1-2017, ustar Interchange Format)
    "name": 0,
    "mode": 100,
    "uid": 108,
    "gid": 116,
    "size": 124,
    "mtime": 136,
    "kind": 156,
    "link": 157,
    "magic": 257,
    "uname": 265,
    "gname": 297,
    "major": 329,
    "minor": 337,
    "prefix": 345,
    "islands": 386,  # of GNU's old sparse format, as the three after it
    "extended": 482,
    "real_size": 483,
    "tail": 500,
}
USTAR, GNU, V7 = b"ustar\x0000", b"ustar  \0", b""
USUAL = {"mode": b"0000644\0", "uid": b"0001750\0", "gid": b"0001750\0", "mtime": b"14371573345\0", "kind": b"0"}


def raw(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def octal(number: int, width: int = 12) -> bytes:
    return b"%0*o\0" % (width - 1, number)


def base256(number: int, width: int = 12) -> bytes:
    """Return a number in GNU's binary form: the first bit is set, the rest is big-endian, two's complement."""
    return ((1 << (8 * width - 1)) | (number & ((1 << (8 * width - 1)) - 1))).to_bytes(width, "big")


def header(name: str | bytes = b"", size: int | bytes = 0, **fields: Any) -> bytes:
    """Return a header of raw *fields*, with its checksum, or with the given bytes as *checksum*."""
    checksum = fields.pop("checksum", None)
    fields = {"magic": USTAR, **USUAL, **fields, "name": name}
    fields["size"] = octal(size) if isinstance(size, int) else size
    block = bytearray(BLOCK)
    for field, value in fields.items():
        value = raw(value)
        block[PLACES[field] : PLACES[field] + len(value)] = value
    return (
        seal(bytes(block)) if checksum is None else bytes(block[:148]) + checksum.ljust(8, b"\0") + bytes(block[156:])
    )


def total(block: bytes, *, signed: bool = False) -> int:
    """Return the sum of a header's bytes, with its checksum as spaces."""
    counted = block[:148] + b" " * 8 + block[156:]
    return sum(byte - 256 if signed and byte > 127 else byte for byte in counted)


def seal(block: bytes, form: bytes = b"%06o\0 ", *, signed: bool = False) -> bytes:
    return block[:148] + (form % total(block, signed=signed)).ljust(8, b"\0") + block[156:]


def filled(data: bytes) -> bytes:
    """Return *data*, and the zeros up to the next block."""
    return data + bytes(-len(data) % BLOCK)


def member(name: str | bytes, data: str | bytes = b"", **fields: Any) -> bytes:
    data = raw(data)
    fields.setdefault("size", len(data))
    return header(name, **fields) + filled(data)


def link(name: str | bytes, target: str | bytes, kind: bytes = b"1", **fields: Any) -> bytes:
    return header(name, link=target, kind=kind, **fields)


def symlink(name: str | bytes, target: str | bytes, **fields: Any) -> bytes:
    return link(name, target, b"2", **fields)


def record(key: str | bytes, value: str | bytes) -> bytes:
    """Return a pax record, which begins with its own length."""
    text = b" %b=%b\n" % (raw(key), raw(value))
    length = len(text) + 1
    while len(b"%d" % length) + len(text) != length:
        length += 1
    return b"%d" % length + text


def pax(*records: tuple[str, str | bytes], kind: bytes = b"x", name: str = "PaxHeader/a.txt", **fields: Any) -> bytes:
    body = b"".join(record(key, value) for key, value in records)
    return member(name, body, kind=kind, **fields)


def gnu_long(name: str | bytes, kind: bytes = b"L", end: bytes = b"\0") -> bytes:
    """Return the extended header of GNU tar for a long name (L) or link target (K)."""
    return member(
        "././@LongLink", raw(name) + end, kind=kind, magic=GNU, mode=octal(0, 8), uid=octal(0, 8), gid=octal(0, 8)
    )


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def flipped(data: bytes, at: int, bit: int = 1) -> bytes:
    return changed(data, at, bytes([data[at] ^ bit]))


# Compressed frames. All store their data, so that the bytes do not depend on a compressor.


def gzip(
    data: bytes, *, flags: int = 0, extra: bytes = b"", checksum: int | None = None, size: int | None = None
) -> bytes:
    """Return a gzip member (RFC 1952) of stored blocks (RFC 1951)."""
    pieces = [data[at : at + 65535] for at in range(0, len(data), 65535)] or [b""]
    blocks = [
        struct.pack("<BHH", number == len(pieces) - 1, len(piece), len(piece) ^ 0xFFFF) + piece
        for number, piece in enumerate(pieces)
    ]
    end = struct.pack("<II", crc32(data) if checksum is None else checksum, len(data) if size is None else size)
    return b"\x1f\x8b\x08" + bytes([flags]) + bytes(4) + b"\0\xff" + extra + b"".join(blocks) + end


def xz(data: bytes, *, check: int = 1) -> bytes:
    """Return an xz stream (The .xz File Format 1.2.1) of stored LZMA2 chunks; *check* is 0 (none) or 1 (CRC-32)."""
    flags = bytes([0, check])
    pieces = [data[at : at + 65536] for at in range(0, len(data), 65536)]
    chunks = [
        struct.pack(">BH", 1 if number == 0 else 2, len(piece) - 1) + piece for number, piece in enumerate(pieces)
    ]
    body = b"".join(chunks) + b"\0"
    head = bytes([2, 0, 0x21, 1, 16, 0, 0, 0])  # one filter, LZMA2, with a dictionary of 1 MiB
    head += struct.pack("<I", crc32(head))
    sums = struct.pack("<I", crc32(data)) if check else b""
    unpadded = len(head) + len(body) + len(sums)
    index = b"\0\1" + varint(unpadded) + varint(len(data))
    index += bytes(-len(index) % 4)
    index += struct.pack("<I", crc32(index))
    foot = struct.pack("<I", len(index) // 4 - 1) + flags
    return (
        b"\xfd7zXZ\0" + flags + struct.pack("<I", crc32(flags)) + head + body + bytes(-len(body) % 4) + sums + index
    ) + (struct.pack("<I", crc32(foot)) + foot + b"YZ")


def varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def zstd(data: bytes, *, sized: bool = True, checksum: bool = False, window: int | None = None) -> bytes:
    """Return a Zstandard frame (RFC 8878) of raw blocks; *window* is the byte that describes its window."""
    single = sized and window is None
    descriptor = (0x80 if sized else 0) | (0x20 if single else 0) | (0x04 if checksum else 0)
    head = b"\x28\xb5\x2f\xfd" + bytes([descriptor])
    head += b"" if single else bytes([0x58 if window is None else window])
    head += struct.pack("<I", len(data)) if sized else b""
    pieces = [data[at : at + 65536] for at in range(0, len(data), 65536)] or [b""]
    blocks = [zstd_block(piece, last=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    return head + b"".join(blocks) + (struct.pack("<I", xxh64(data) & 0xFFFFFFFF) if checksum else b"")


def zstd_block(data: bytes, *, last: bool, repeated: int = 0) -> bytes:
    """Return a raw block, or with *repeated* one byte that many times."""
    size = repeated or len(data)
    return (int(last) | (2 if repeated else 0) | size << 3).to_bytes(3, "little") + data


def skippable(data: bytes, number: int = 0) -> bytes:
    """Return a frame that decoders of Zstandard and LZ4 skip."""
    return struct.pack("<II", 0x184D2A50 + number, len(data)) + data


def lz4(data: bytes) -> bytes:
    """Return an LZ4 frame (LZ4 Frame Format 1.6) of uncompressed blocks, with its content's checksum."""
    descriptor = bytes([0x64, 0x40])  # version 1, independent blocks, content checksum; blocks of at most 64 KiB
    blocks = b"".join(
        struct.pack("<I", len(data[at : at + 65536]) | 1 << 31) + data[at : at + 65536]
        for at in range(0, len(data), 65536)
    )
    head = b"\x04\x22\x4d\x18" + descriptor + bytes([xxh32(descriptor) >> 8 & 0xFF])
    return head + blocks + bytes(4) + struct.pack("<I", xxh32(data))


def xxh32(data: bytes) -> int:
    """Return the 32-bit xxHash of *data*, with the seed 0 (xxHash fast digest algorithm, 0.1.1)."""
    p1, p2, p3, p4, p5 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1
    mask, at = 0xFFFFFFFF, 0

    def turned(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) & mask

    if len(data) >= 16:
        lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
        while at + 16 <= len(data):
            for i in range(4):
                word = int.from_bytes(data[at + 4 * i : at + 4 * i + 4], "little")
                lanes[i] = turned((lanes[i] + word * p2) & mask, 13) * p1 & mask
            at += 16
        found = sum(turned(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & mask
    else:
        found = p5
    found = (found + len(data)) & mask
    while at + 4 <= len(data):
        found = turned((found + int.from_bytes(data[at : at + 4], "little") * p3) & mask, 17) * p4 & mask
        at += 4
    for byte in data[at:]:
        found = turned((found + byte * p5) & mask, 11) * p1 & mask
    for shift, prime in ((15, p2), (13, p3)):
        found = (found ^ found >> shift) * prime & mask
    return found ^ found >> 16


def xxh64(data: bytes) -> int:
    """Return the 64-bit xxHash of *data*, with the seed 0."""
    p1, p2, p3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    p4, p5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
    mask, at = 0xFFFFFFFFFFFFFFFF, 0

    def turned(value: int, bits: int) -> int:
        return (value << bits | value >> (64 - bits)) & mask

    def mixed(lane: int, word: int) -> int:
        return turned((lane + word * p2) & mask, 31) * p1 & mask

    if len(data) >= 32:
        lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
        while at + 32 <= len(data):
            for i in range(4):
                lanes[i] = mixed(lanes[i], int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little"))
            at += 32
        found = sum(turned(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & mask
        for lane in lanes:
            found = ((found ^ mixed(0, lane)) * p1 + p4) & mask
    else:
        found = p5
    found = (found + len(data)) & mask
    while at + 8 <= len(data):
        found = (turned(found ^ mixed(0, int.from_bytes(data[at : at + 8], "little")), 27) * p1 + p4) & mask
        at += 8
    if at + 4 <= len(data):
        found = (turned(found ^ int.from_bytes(data[at : at + 4], "little") * p1 & mask, 23) * p2 + p3) & mask
        at += 4
    for byte in data[at:]:
        found = turned(found ^ byte * p5 & mask, 11) * p1 & mask
    for shift, prime in ((33, p2), (29, p3)):
        found = (found ^ found >> shift) * prime & mask
    return found ^ found >> 32
