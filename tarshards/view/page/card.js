// A sample in the grid.

import { element, fromBase64, inBytes, line, shorten } from "./dom.js";
import { kindOf, preview } from "./values.js";

const MARKS = { audio: "♪ audio", video: "▶ video" };

/** Return the card of a row: its first picture, its key, and a line for each other field. */
export function makeCard(row, source, isMarked) {
  const pictures = row.fields.filter((field) => kindOf(field.name) === "image");
  const card = element("div", { class: "card", "aria-label": line(row.key), "aria-selected": String(isMarked) });
  card.append(element("div", { class: "head" }, element("span", { class: "mark", title: "select" }, isMarked ? "☑" : "☐"),
    element("b", { title: line(row.key) }, line(row.key))));
  if (row.error) card.append(element("p", { class: "error" }, shorten(line(row.error), 200)));
  if (pictures.length) card.append(pictureOf(row, pictures[0], source));
  for (const field of row.fields) {
    if (field === pictures[0]) continue;
    card.append(element("p", {}, element("i", {}, line(field.name)), ` ${about(field)}`));
  }
  return card;
}

function about(field) {
  if (field.error) return `<${line(field.error)}>`;
  const kind = kindOf(field.name);
  if (MARKS[kind]) return `${MARKS[kind]}, ${inBytes(field.size)}`;
  const seen = field.head ? preview(field, fromBase64(field.head)) : "";
  return seen || inBytes(field.size);
}

/** Return a small picture, or why there is none. */
function pictureOf(row, field, source) {
  const image = element("img", {
    alt: line(field.name), loading: "lazy", decoding: "async",
    load: () => image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) <= 48),
    error: async () => {
      image.replaceWith(element("p", { class: "error" }, line(await source.failure(row, field).catch((error) => error.message))));
    },
  });
  source.pictureUrl(row, field, true).then(
    (url) => { image.src = url; },
    (error) => image.replaceWith(element("p", { class: "error" }, line(error.message))),
  );
  return image;
}
