// msgpack, as indexes and fields have it.

const DEEPEST = 64;

/** Return the value in *bytes*: maps become objects without a prototype, bin a Uint8Array. */
export function unpack(bytes) {
  return new Unpacker(bytes).value(0);
}

class Unpacker {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  take(size) {
    if (this.at + size > this.bytes.length) throw new Error("msgpack that ends early");
    this.at += size;
    return this.at - size;
  }

  unsigned(size) {
    const at = this.take(size);
    if (size === 1) return this.view.getUint8(at);
    if (size === 2) return this.view.getUint16(at);
    if (size === 4) return this.view.getUint32(at);
    return plain(this.view.getBigUint64(at));
  }

  signed(size) {
    const at = this.take(size);
    if (size === 1) return this.view.getInt8(at);
    if (size === 2) return this.view.getInt16(at);
    if (size === 4) return this.view.getInt32(at);
    return plain(this.view.getBigInt64(at));
  }

  bin(size) {
    const at = this.take(size);
    return this.bytes.subarray(at, at + size);
  }

  text(size) {
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(this.bin(size));
  }

  array(size, depth) {
    if (size > this.bytes.length - this.at) throw new Error("msgpack that ends early");
    return Array.from({ length: size }, () => this.value(depth));
  }

  map(size, depth) {
    const found = Object.create(null);
    for (let number = 0; number < size; number += 1) {
      const name = this.value(depth);
      found[String(name)] = this.value(depth);
    }
    return found;
  }

  extension(size) {
    this.take(1);
    return this.bin(size);
  }

  value(depth) {
    if (depth > DEEPEST) throw new Error("msgpack that is nested too deep");
    const code = this.unsigned(1);
    if (code < 0x80) return code;
    if (code < 0x90) return this.map(code & 15, depth + 1);
    if (code < 0xa0) return this.array(code & 15, depth + 1);
    if (code < 0xc0) return this.text(code & 31);
    if (code >= 0xe0) return code - 256;
    switch (code) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.bin(this.unsigned(1 << (code - 0xc4)));
      case 0xc7: case 0xc8: case 0xc9: return this.extension(this.unsigned(1 << (code - 0xc7)));
      case 0xca: return this.view.getFloat32(this.take(4));
      case 0xcb: return this.view.getFloat64(this.take(8));
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return this.unsigned(1 << (code - 0xcc));
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return this.signed(1 << (code - 0xd0));
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: return this.extension(1 << (code - 0xd4));
      case 0xd9: case 0xda: case 0xdb: return this.text(this.unsigned(1 << (code - 0xd9)));
      case 0xdc: case 0xdd: return this.array(this.unsigned(2 << (code - 0xdc)), depth + 1);
      case 0xde: case 0xdf: return this.map(this.unsigned(2 << (code - 0xde)), depth + 1);
      default: throw new Error("not msgpack");
    }
  }
}

function plain(number) {
  return number <= Number.MAX_SAFE_INTEGER && number >= Number.MIN_SAFE_INTEGER ? Number(number) : number;
}
