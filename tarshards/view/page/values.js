// What the bytes of a field are, and one line of them.

import { line, shorten } from "./dom.js";
import { readNpyHeader } from "./arrays.js";
import { unpack } from "./msgpack.js";

const TEXT = new Set(
  "txt text transcript cls cls2 class count index inx id json jsn jsonl csv tsv md svg html htm xml yaml yml py js css srt vtt".split(" "),
);
let types = {};

/** Use these media types, by the last part of a field's name. */
export function setTypes(given) {
  types = given;
}

export function extensionOf(field) {
  return field.toLowerCase().replace(/\.gz$/, "").split(".").pop();
}

/** Return "image", "audio", "video", "json", "msgpack", "array", "text" or "bytes". */
export function kindOf(field) {
  const extension = extensionOf(field);
  const type = types[extension];
  if (type && !field.toLowerCase().endsWith(".gz")) return type.split("/")[0];
  if (["json", "jsn"].includes(extension)) return "json";
  if (["mp", "msg", "msgpack"].includes(extension)) return "msgpack";
  if (extension === "npy") return "array";
  return TEXT.has(extension) ? "text" : "bytes";
}

export function typeOf(field) {
  return types[extensionOf(field)] ?? "application/octet-stream";
}

export function isText(bytes) {
  return !bytes.slice(0, 1024).some((byte) => byte < 9 || (byte > 13 && byte < 32 && byte !== 27));
}

/** Return whether bytes, perhaps without their end, are text in UTF-8. */
function isUtf8(bytes) {
  try {
    return isText(bytes) && new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: true }) !== "";
  } catch {
    return false;
  }
}

export function decodeText(bytes) {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
}

/** Return a line for the first bytes of a field. */
export function preview(field, bytes, length) {
  const kind = kindOf(field.name);
  const isWhole = bytes.length === field.size;
  try {
    if (field.name.toLowerCase().endsWith(".gz") || !bytes.length) return "";
    if (kind === "array") {
      const { type, shape } = readNpyHeader(bytes);
      return `${type} ${shape.join("x") || "scalar"}`;
    }
    if (kind === "msgpack") return isWhole ? shorten(line(JSON.stringify(unpack(bytes), packed)), length) : "";
    if (kind === "text" || kind === "json" || (kind === "bytes" && isUtf8(bytes))) {
      return shorten(line(decodeText(bytes).trim().replace(/\s+/g, " ")), length) + (isWhole ? "" : "…");
    }
  } catch (error) {
    return `<${line(error.message)}>`;
  }
  return "";
}

function packed(name, value) {
  if (value instanceof Uint8Array) return `${value.length} bytes`;
  return typeof value === "bigint" ? value.toString() : value;
}

/** Return the bytes that a field holds, decompressed as far as *limit*. */
export async function decompressed(field, bytes, limit) {
  if (!field.name.toLowerCase().endsWith(".gz")) return bytes;
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")).getReader();
  const parts = [];
  let size = 0;
  try {
    for (let part = await reader.read(); !part.done && size < limit; part = await reader.read()) {
      parts.push(part.value);
      size += part.value.length;
    }
    await reader.cancel();
  } catch (error) {
    if (!parts.length) throw error; // only the beginning of the field was given
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer()).slice(0, limit);
}
