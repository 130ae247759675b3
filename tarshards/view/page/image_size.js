// The size of an image by its header, so that none of too many pixels is decoded.

const MOST = 1 << 26; // pixels: 8192 x 8192

/** Throw unless the header of an image says that it is small enough to be shown. */
export function checkPixels(bytes) {
  const size = sizeOf(bytes, new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength));
  if (!size) throw new Error("an image whose size this page cannot read");
  const [width, height] = size;
  if (width * height > MOST) throw new Error(`${width} x ${height} pixels are more than are shown`);
}

function sizeOf(bytes, view) {
  if (bytes.length < 30) return null;
  const text = (begin, end) => String.fromCharCode(...bytes.slice(begin, end));
  if (text(1, 4) === "PNG") return [view.getUint32(16), view.getUint32(20)];
  if (text(0, 3) === "GIF") return [view.getUint16(6, true), view.getUint16(8, true)];
  if (text(0, 2) === "BM") return [Math.abs(view.getInt32(18, true)), Math.abs(view.getInt32(22, true))];
  if (text(0, 4) === "RIFF" && text(8, 12) === "WEBP") return webpSize(bytes, view, text(12, 16));
  if (bytes[0] === 0xff && bytes[1] === 0xd8) return jpegSize(bytes, view);
  if (text(4, 8) === "ftyp") return avifSize(bytes, view);
  return null;
}

function webpSize(bytes, view, kind) {
  if (kind === "VP8 ") return [view.getUint16(26, true) & 0x3fff, view.getUint16(28, true) & 0x3fff];
  if (kind === "VP8L") {
    const bits = view.getUint32(21, true);
    return [(bits & 0x3fff) + 1, ((bits >> 14) & 0x3fff) + 1];
  }
  const number = (at) => bytes[at] + (bytes[at + 1] << 8) + (bytes[at + 2] << 16) + 1;
  return kind === "VP8X" ? [number(24), number(27)] : null;
}

function jpegSize(bytes, view) {
  let at = 2;
  while (at + 9 < bytes.length && bytes[at] === 0xff) {
    const marker = bytes[at + 1];
    if (marker >= 0xc0 && marker <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(marker)) {
      return [view.getUint16(at + 7), view.getUint16(at + 5)];
    }
    at += marker === 0xff ? 1 : 2 + view.getUint16(at + 2);
  }
  return null;
}

/** The largest size of all images in an AVIF, which its "ispe" boxes say. */
function avifSize(bytes, view) {
  let largest = null;
  for (let at = 4; at + 16 < Math.min(bytes.length, 4096); at += 1) {
    if (bytes[at] === 0x69 && bytes[at + 1] === 0x73 && bytes[at + 2] === 0x70 && bytes[at + 3] === 0x65) {
      const size = [view.getUint32(at + 8), view.getUint32(at + 12)];
      if (!largest || size[0] * size[1] > largest[0] * largest[1]) largest = size;
    }
  }
  return largest;
}
