// Indexes of shards, as docs/index-format.md describes them, and the headers that they are compared with.

import { unpack } from "./msgpack.js";

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(bytes) {
  let value = 0xffffffff;
  for (let at = 0; at < bytes.length; at += 1) value = (value >>> 8) ^ TABLE[(value ^ bytes[at]) & 0xff];
  return (value ^ 0xffffffff) >>> 0;
}

/** Return the index in *bytes*; throws for a damaged one, or one of another version. */
export function readIndex(bytes) {
  const end = bytes.length - 4;
  const checksum = new DataView(bytes.buffer, bytes.byteOffset).getUint32(end);
  if (end < 0 || crc32(bytes.subarray(0, end)) !== checksum) throw new Error("a damaged index; rebuild it with `tarindex`");
  const found = unpack(bytes);
  if (found.format !== "tarshards-index" || ![1, 2].includes(found.version)) throw new Error("an index of a version that is not known");
  const array = (name, Kind) => new Kind(found[name].slice().buffer);
  const sample = array("sample", Uint32Array);
  const first = new Uint32Array(found.keys.length + 1).fill(sample.length);
  for (let member = sample.length - 1; member >= 0; member -= 1) first[sample[member]] = member;
  return {
    keys: found.keys,
    fields: found.fields,
    field: array("field", Uint16Array),
    offset: Float64Array.from(array("offset", BigUint64Array), Number),
    size: Float64Array.from(array("size", BigUint64Array), Number),
    faults: new Map((found.faults ?? []).map(([number, reason]) => [number, reason])),
    elsewhere: new Set((found.elsewhere ?? []).map(([member]) => member)),
    members: (number) => Array.from({ length: first[number + 1] - first[number] }, (_, at) => first[number] + at),
  };
}

/** Throw unless *header*, the block before a member's data, is that of this field of the sample *key*. */
export function checkHeader(header, key, field) {
  const text = (begin, end) => new TextDecoder().decode(header.subarray(begin, end)).replace(/\0.*$/s, "");
  const stale = () => new Error("stale index: the shard has another member here; rebuild it with `tarindex`");
  if (text(257, 262) !== "ustar") throw stale();
  const isOctal = header[124] < 128;
  const prefix = text(345, 500);
  const name = header[263] === 48 && prefix ? `${prefix}/${text(0, 100)}` : text(0, 100);
  const expected = `${key}.${field.name}`;
  const isLong = new TextEncoder().encode(expected).length > 99 || /[^\x20-\x7e]/.test(expected); // named by another header
  if (!isLong && name.toLowerCase().replace(/^\.\//, "") !== expected.toLowerCase().replace(/^\.\//, "")) throw stale();
  if (isOctal && parseInt(text(124, 136), 8) !== field.size && field.size < 8 ** 11) throw stale();
}
