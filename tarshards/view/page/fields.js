// Fields of a sample: each by its kind; text, JSON as a tree, and bytes in hexadecimal digits.

import { showArray } from "./arrays.js";
import { button, counted, element, inBytes, line, visible } from "./dom.js";
import { showImage } from "./images.js";
import { unpack } from "./msgpack.js";
import { showAudio } from "./sounds.js";
import { decompressed, decodeText, isText, kindOf } from "./values.js";
import { showVideo } from "./videos.js";

const FIRST = 1 << 16; // bytes of a text or of other bytes that are shown first
const WHOLE = 1 << 24; // bytes of a JSON value or array that are read
const ENTRIES = 200; // of a list or object in a tree that are shown first

/** Return an element that shows a field; what has a time follows the *clock*. */
export async function showField(sample, field, source, clock) {
  const kind = kindOf(field.name);
  try {
    if (!field.size) return element("p", {}, "empty");
    if (kind === "image") return await showImage(sample, field, source);
    if (kind === "audio") return await showAudio(sample, field, source, clock);
    if (kind === "video") return await showVideo(sample, field, source, clock);
    const limit = ["json", "msgpack", "array"].includes(kind) ? WHOLE : FIRST;
    const bytes = await decompressed(field, await source.bytes(sample, field, 0, limit), limit);
    if (kind === "json" && bytes.length < WHOLE) return showJson(decodeText(bytes));
    if (kind === "msgpack") return showTree(unpack(bytes));
    if (kind === "array") return showArray(bytes, clock);
    return await showBytes(sample, field, source, bytes);
  } catch (error) {
    return element("div", {}, element("p", { class: "error" }, line(error.message)), await raw(sample, field, source));
  }
}

/** Return the text of a field, to be copied. */
export async function textOf(sample, field, source) {
  if (field.size > WHOLE) throw new Error(`more than ${inBytes(WHOLE)}`);
  return decodeText(await decompressed(field, await source.bytes(sample, field, 0, WHOLE), WHOLE));
}

async function raw(sample, field, source) {
  if (kindOf(field.name) !== "json" && kindOf(field.name) !== "msgpack") return null;
  return showBytes(sample, field, source, await source.bytes(sample, field, 0, FIRST).catch(() => new Uint8Array()));
}

/** Return the beginning of a text or of other bytes, and a button for what follows. */
async function showBytes(sample, field, source, bytes) {
  const asText = kindOf(field.name) !== "bytes" || isText(bytes);
  const pre = element("pre", { tabindex: 0 }, asText ? visible(decodeText(bytes)) : inHex(bytes.slice(0, 4096), 0));
  const shown = element("div", {}, pre);
  let end = asText ? bytes.length : Math.min(bytes.length, 4096);
  if (end < field.size && !field.name.endsWith(".gz")) {
    const step = asText ? FIRST : 4096;
    const next = button(`more of ${inBytes(field.size)}`, async () => {
      const more = await source.bytes(sample, field, end, end + step);
      pre.append(asText ? visible(decodeText(more)) : inHex(more, end));
      end += more.length;
      next.hidden = !more.length || end >= field.size;
    });
    shown.append(next);
  }
  return shown;
}

function inHex(bytes, begin) {
  const lines = [];
  for (let at = 0; at < bytes.length; at += 16) {
    const part = [...bytes.slice(at, at + 16)];
    const hex = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const text = part.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${(begin + at).toString(16).padStart(8, "0")}  ${hex.padEnd(47)}  ${text}\n`);
  }
  return lines.join("");
}

function showJson(text) {
  return showTree(JSON.parse(text));
}

/** Return a value as a tree whose branches are made when they are opened. */
function showTree(value) {
  return element("div", { class: "tree" }, branch(value, "", true));
}

function branch(value, name, isOpen) {
  const label = name === "" ? "" : `${line(name)}: `;
  if (value === null || typeof value !== "object" || value instanceof Uint8Array) {
    return element("div", {}, element("i", {}, label), leaf(value));
  }
  const entries = Object.entries(value);
  const about = Array.isArray(value) ? `[${counted(entries.length, "item")}]` : `{${counted(entries.length, "entry")}}`;
  const inner = element("div", { class: "inner" });
  const details = element("details", {}, element("summary", {}, element("i", {}, label), about), inner);
  let shown = 0;
  const more = () => {
    const part = entries.slice(shown, shown + ENTRIES);
    shown += part.length;
    inner.append(...part.map(([key, each]) => branch(each, key, false)));
    if (shown < entries.length) {
      const next = button(`${counted(entries.length - shown, "more item")}`, () => {
        next.remove();
        more();
      });
      inner.append(next);
    }
  };
  details.addEventListener("toggle", () => { if (details.open && !shown) more(); });
  if (isOpen) {
    more();
    details.open = true;
  }
  return details;
}

function leaf(value) {
  if (value instanceof Uint8Array) return element("code", {}, counted(value.length, "byte"));
  if (typeof value === "string") return element("span", { class: "string" }, `"${visible(value)}"`);
  return element("code", {}, String(value));
}
