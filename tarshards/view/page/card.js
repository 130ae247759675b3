// A sample in the grid: as a card, or as a row of the table.

import { element, fromBase64, inBytes, line, shorten } from "./dom.js";
import { showVisual, visualOf } from "./visuals.js";
import { extensionOf, kindOf, preview } from "./values.js";

/** How the grid shows samples: pixels of a card with its gap, of its picture, and of the longer side of a thumbnail. */
export const LOOKS = {
  small: { width: 120, height: 170, gap: 8, picture: 84, pixels: 240 },
  medium: { width: 176, height: 254, gap: 12, picture: 132, pixels: 240 },
  large: { width: 340, height: 384, gap: 12, picture: 260, pixels: 480 },
  table: { width: 0, height: 44, gap: 0, picture: 36, pixels: 240 },
};
const LINE = 16; // pixels; style.css has these too
const FRAME = 17; // of a card: its padding and border
const HEAD = 22; // its first line, with the key
const CAPTION = 2; // lines that the first field may have although others then have none
const LETTER = 6.2; // of text, on average
const COLUMN = 150; // the least of a table
const KINDS = { image: "picture", audio: "♪ sound", video: "▶ video" };
const FIRST = ["txt", "text", "transcript", "caption", "cls", "cls2", "class", "count", "index", "inx", "id"];
const THEN = ["json", "msgpack", "text", "array", "audio", "video", "image", "bytes"];

/** Return the fields in the order in which they are shown: captions, numbers, then the others by their kinds. */
export function inOrder(fields) {
  const rank = ({ name }) => {
    const first = FIRST.indexOf(extensionOf(name));
    return first < 0 ? FIRST.length + THEN.indexOf(kindOf(name)) : first;
  };
  return [...fields].sort((one, other) => rank(one) - rank(other));
}

/** Return the card of a row: what is to be seen of it, its key, and lines for the *chosen* fields, or for all. */
export function makeCard(row, { source, isMarked, look, chosen, width }) {
  const visual = visualOf(row, chosen, source);
  const card = element("div", { class: "card", "aria-label": line(row.key), "aria-selected": String(isMarked) }, headOf(row, isMarked));
  let lines = Math.floor((look.height - look.gap - FRAME - HEAD - (visual ? look.picture + 6 : 0)) / LINE);
  const letters = Math.floor((width - 20) / LETTER);
  const add = (text, most, attributes = {}) => {
    const count = Math.max(1, Math.min(most, lines, Math.ceil(text.length / letters)));
    const shown = element("p", attributes);
    shown.style.webkitLineClamp = count;
    lines -= count;
    card.append(shown);
    return shown;
  };
  for (const text of troublesOf(row)) if (lines > 0) add(text, 3, { class: "error", title: text }).append(text);
  if (visual) {
    const shown = showVisual(row, visual, source, look.pixels);
    shown.style.height = `${look.picture}px`;
    card.append(shown);
  }
  const rest = fieldsOf(row, chosen).filter((field) => field !== visual);
  rest.forEach((field, at) => {
    const left = rest.length - at; // with this one
    if (lines <= 0) return;
    if (lines === 1 && left > 1) {
      add("", 1).append(element("i", {}, `… ${left} more fields`));
      lines = 0;
      return;
    }
    const text = about(field, 240);
    const most = Math.max(lines - left + 1, at ? 1 : Math.min(CAPTION, lines - 1));
    add(`${field.name} ${text}`, most).append(element("i", {}, line(field.name)), ` ${text}`);
  });
  return card;
}

function headOf(row, isMarked) {
  const mark = element("span", { class: "mark", title: "select" }, isMarked ? "☑" : "☐");
  return element("div", { class: "head" }, mark, element("b", { title: line(row.key) }, line(row.key)));
}

function fieldsOf(row, chosen) {
  if (!chosen.length) return inOrder(row.fields);
  return chosen.map((name) => row.fields.find((field) => field.name === name)).filter(Boolean);
}

/** Return what is wrong with a sample, and the gaps in the shard beside it. */
function troublesOf(row) {
  const gaps = (row.gaps ?? []).map(({ start, end, reason }) => `gap of ${inBytes(end - start)} at ${start.toLocaleString("en")}: ${line(reason)}`);
  return row.error ? [shorten(line(row.error), 200), ...gaps] : gaps;
}

function about(field, length) {
  if (field.error) return `<${line(field.error)}>`;
  const kind = kindOf(field.name);
  if (KINDS[kind]) return `${KINDS[kind]}, ${inBytes(field.size)}`;
  const seen = field.head ? preview(field, fromBase64(field.head), length) : "";
  return seen || inBytes(field.size);
}

// The table.

/** Return the width in pixels that a table of these fields needs. */
export function tableWidth(fields) {
  return (fields.length + 1) * COLUMN;
}

export function makeHeader(fields) {
  return element("div", { class: "row header", "aria-hidden": "true" }, element("span", {}, "key"), ...fields.map((name) => element("span", {}, line(name))));
}

/** Return a row of the table whose columns are *fields*. */
export function makeRow(row, { source, isMarked, look, fields }) {
  const cells = fields.map((name) => {
    const field = row.fields.find((each) => each.name === name);
    if (!field) return element("span", {});
    if (visualOf({ fields: [field] }, [], source) && ["image", "video"].includes(kindOf(name))) {
      const shown = showVisual(row, field, source, look.pixels);
      shown.style.height = `${look.picture}px`;
      return element("span", {}, shown);
    }
    return element("span", { title: about(field, 240) }, about(field, 240));
  });
  const troubles = troublesOf(row).map((text) => element("span", { class: "error", title: text }, text));
  return element("div", { class: "card row", "aria-label": line(row.key), "aria-selected": String(isMarked) },
    element("span", { class: troubles.length ? "troubled" : "" }, headOf(row, isMarked), ...troubles.slice(0, 1)), ...cells);
}
