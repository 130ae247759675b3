"""TFRecord files, and the ``tf.train.Example`` messages in them, without TensorFlow.

A record is its length (8 bytes, little-endian), the checksum of these bytes, its data, and the checksum of the data.
The checksums are ``masked``: CRC-32C, rotated, plus a constant. Source:
https://www.tensorflow.org/tutorials/load_data/tfrecord.

The data is a message of protobuf (https://protobuf.dev/programming-guides/encoding/); with the number of each field,
Example { features: 1 }, Features { map of names to Feature: 1 }, Feature { one of bytes_list: 1, float_list: 2,
int64_list: 3 }, and each list { value: 1 }.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO

from tarshards.errors import OpenError, SampleError
from tarshards.formats.msgpack_shards import MOST_BYTES
from tarshards.formats.pieces import Plan, RecordPiece, fail_rows, file_identity
from tarshards.samples.ledger import Ledger
from tarshards.storage.compression import read_held
from tarshards.storage.opening import open_shard

if TYPE_CHECKING:
    import numpy as np

STRIP = 64  # bytes; numpy computes the checksums of all strips of a record at once
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # the wire types of protobuf
Field = tuple[int, int, Any]  # a field of a message: its number, wire type and value


@dataclass(frozen=True)
class TfrecordPiece(RecordPiece):
    """A TFRecord file of ``tf.train.Example`` messages."""

    def records(self, ledger: Ledger) -> Iterator[tuple[int, Mapping[str, Any]]]:
        number = 0  # the number of the next record
        try:
            with open_shard(self.url) as stream:
                for data in read_records(stream):
                    try:
                        if data is None:
                            raise ValueError("its bytes do not match their checksum")
                        yield number, parse_example(data)
                    except (ValueError, IndexError) as error:
                        fail_rows(ledger, SampleError(f"not a tf.train.Example: {error}", url=self.origin(number)))
                    number += 1
        except OpenError as error:
            ledger(error)
        except EOFError as error:
            ledger(SampleError(f"{error}; the rest of the file is not read", url=self.origin(number)))


def plan_tfrecord(urls: list[str], names: list[str], max_bytes: int | None) -> Plan:
    """Make a piece of each file; files are not cut, because finding a record's beginning requires reading."""
    return Plan([TfrecordPiece(url, file, file_identity(url)) for url, file in zip(urls, names)])


def read_records(stream: BinaryIO) -> Iterator[bytes | None]:
    """Yield the data of each record, or None if its data does not match its checksum.

    Raises EOFError if no more records can be found: the file ends within one, or a length does not match its
    checksum.
    """
    while head := read_held(stream, 12):
        if len(head) < 12:
            raise EOFError("the file ends within a record")
        length, checksum = struct.unpack("<QI", head)
        if masked(head[:8]) != checksum:
            raise EOFError("not a TFRecord: the length of a record does not match its checksum")
        if length > MOST_BYTES:
            raise EOFError(f"a record of {length:,} bytes, more than {MOST_BYTES:,}")
        data = read_held(stream, length + 4)
        if len(data) < length + 4:
            raise EOFError("the file ends within a record")
        yield data[:-4] if masked(data[:-4]) == int.from_bytes(data[-4:], "little") else None


def masked(data: bytes) -> int:
    """Return the masked CRC-32C of *data*, as in TFRecord files."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of *data*.

    numpy computes the CRCs of all strips at once, byte by byte; they are then joined, one after another. A loop over
    the bytes of *data* would be much slower.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    import numpy as np

    table, (first, second, third, fourth) = _tables()
    crc = 0xFFFFFFFF
    count = len(data) // STRIP
    if count > 1:
        strips = np.frombuffer(data, np.uint8, count * STRIP).reshape(count, STRIP)
        crcs = np.zeros(count, np.uint32)
        crcs[0] = crc
        array = np.array(table, np.uint32)
        for column in np.ascontiguousarray(strips.T):  # one byte of every strip
            crcs = array[(crcs ^ column) & 0xFF] ^ (crcs >> 8)
        crc = 0
        for strip in crcs.tolist():
            over = first[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ fourth[crc >> 24]
            crc = over ^ strip
        data = data[count * STRIP :]
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _tables() -> tuple[list[int], list[list[int]]]:
    """Return the table of CRC-32C, and four more that advance each byte of a CRC over a strip of zeros."""
    table = list(range(256))
    for byte in range(256):
        for _ in range(8):
            table[byte] = table[byte] >> 1 ^ (0x82F63B78 if table[byte] & 1 else 0)

    def over_strip(crc: int) -> int:
        for _ in range(STRIP):
            crc = table[crc & 0xFF] ^ crc >> 8
        return crc

    return table, [[over_strip(byte << 8 * position) for byte in range(256)] for position in range(4)]


def parse_example(data: bytes) -> dict[str, Any]:
    """Return the features of a ``tf.train.Example`` by name; raise ValueError for any other message.

    A feature with one value is bytes, a float or an int; with several values, it is a list of bytes or an array. Empty
    features are left out.

    >>> parse_example(bytes.fromhex("0a0e0a0c0a03636c7312051a030a0107"))
    {'cls': 7}
    """
    found: dict[str, Any] = {}
    for number, wire, features in _fields(data):
        if (number, wire) != (1, _BYTES):
            message = "a SequenceExample" if number == 2 else f"a message with field {number}"
            raise ValueError(f"{message}, which is not supported")
        for _, _, entry in _fields(features):
            parts = {number: value for number, _, value in _fields(entry)}  # 1 is the name, and 2 the feature
            name = bytes(parts.get(1, b"")).decode()
            for kind, _, values in _fields(parts.get(2, b"")):
                value = _value(kind, bytes(values))
                if value is not None:
                    found[name] = value
    return found


def _value(kind: int, data: bytes) -> Any:
    """Return the only value in the list *data*, or all its values, or None if it is empty.

    *kind* is the number of the list's field: 1 for bytes, 2 for floats, 3 for integers. Numbers are packed, many in one
    field, or each in a separate field.
    """
    import numpy as np

    values: list[Any] = []
    arrays: list[np.ndarray[Any, Any]] = []
    for _, wire, value in _fields(data):
        if kind == 1:
            values.append(bytes(value))
        elif kind == 2:
            arrays.append(np.frombuffer(value, "<f4"))
        elif kind == 3 and wire == _BYTES:
            arrays.append(np.array(_varints(bytes(value)), np.uint64).view(np.int64))
        elif kind == 3:
            arrays.append(np.array([value], np.uint64).view(np.int64))
        else:
            raise ValueError(f"a feature of kind {kind}")
    if kind == 1:
        return values[0] if len(values) == 1 else values or None
    array = np.concatenate(arrays) if arrays else np.empty(0)
    return None if not array.size else array[0].item() if array.size == 1 else array.copy()


def _fields(data: bytes) -> Iterator[Field]:
    """Yield the number, the wire type and the value of each field of a message."""
    position, size = 0, len(data)
    while position < size:
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, wire, value
            continue
        if wire == _BYTES:
            length, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"the wire type {wire}")
        if position + length > size:
            raise ValueError("it ends within a field")
        yield number, wire, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at *position*, 7 bits per byte, and the position after it."""
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _varints(data: bytes) -> list[int]:
    """Return the packed numbers in *data*."""
    position, numbers = 0, []
    while position < len(data):
        number, position = _varint(data, position)
        numbers.append(number)
    return numbers
