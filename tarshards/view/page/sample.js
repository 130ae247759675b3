// The page of one sample.

import { inOrder } from "./card.js";
import { Clock } from "./charts.js";
import { button, copy, doing, element, fill, inBytes, line } from "./dom.js";
import { showField, textOf } from "./fields.js";
import { linkTo } from "./route.js";
import { kindOf } from "./values.js";

const MEDIA = ["video", "image", "audio"]; // what a sample's page begins with

/** Fill *host* with a sample; *around* has the positions before and after it, or null, and *leave* goes back. */
export async function showSample(host, number, source, { before, after, leave, marked, mark }) {
  const sample = await source.sample(number);
  const key = line(sample.key);
  const isMarked = () => (marked.has(sample.number) ? "☑ selected" : "☐ select");
  const choose = button(isMarked(), () => {
    mark([sample]);
    choose.textContent = isMarked();
  });
  const heading = element("h2", { tabindex: -1 }, key);
  const bar = element("nav", { "aria-label": "samples" },
    button("◀ before", before ?? (() => {}), { disabled: !before }), button("next ▶", after ?? (() => {}), { disabled: !after }),
    button("back", leave), choose, element("a", { href: linkTo({ key: sample.key }) }, "link by key"));
  const about = element("p", {}, `sample ${sample.number.toLocaleString("en")} of ${sample.total.toLocaleString("en")}, in `,
    element("code", {}, line(sample.shard)), sample.sample === undefined ? "" : ` (its number ${sample.sample})`);
  const media = (field) => MEDIA.indexOf(kindOf(field.name)) >>> 0; // the others last
  const fields = inOrder(sample.fields).sort((one, other) => media(one) - media(other));
  const sections = fields.map((field) => sectionOf(sample, field, source));
  const clock = new Clock();
  fill(host, bar, heading, about, sample.error ? element("p", { class: "error" }, line(sample.error)) : null, ...sections, linesOf(sample));
  heading.focus();
  await Promise.all(fields.map(async (field, at) => {
    const shown = field.error ? element("p", { class: "error" }, line(field.error)) : await showField(sample, field, source, clock);
    sections[at].append(shown);
  }));
  host.dataset.shown = String(sample.number);
}

function sectionOf(sample, field, source) {
  const offset = field.offset === undefined ? "" : `, at offset ${field.offset.toLocaleString("en")}`;
  const name = line(field.name);
  const isText = ["text", "json"].includes(kindOf(field.name));
  const file = `${sample.key.split("/").at(-1)}.${field.name}`;
  return element("section", { class: "field", "aria-label": name },
    element("h3", {}, name, element("small", {}, ` ${inBytes(field.size)} (${field.size.toLocaleString("en")} bytes)${offset}`),
      element("span", { class: "actions" },
        isText ? doing("copy", "copied", async () => copy(await textOf(sample, field, source)), { "aria-label": `copy ${name}` }) : null,
        source.offers.has("bytes") ? doing("download", "saved", () => source.download(sample, field, file), { "aria-label": `download ${name}` }) : null)));
}

/** Return the lines that take just this sample, for a shell and for Python. */
function linesOf(sample) {
  if (sample.sample === undefined) return null;
  const shell = `tarcat --slice ${sample.sample}:${sample.sample + 1} ${quoted(sample.shard)}`;
  const python = `tarshards.IndexedShards(${JSON.stringify(sample.shard)})[${sample.sample}]`;
  const copied = (text, language) => element("div", { class: "command" }, element("pre", { tabindex: 0 }, line(text)),
    doing("copy", "copied", () => copy(text), { "aria-label": `copy the line of ${language}` }));
  return element("section", { class: "field", "aria-label": "commands" }, element("h3", {}, "just this sample"),
    copied(shell, "the shell"), copied(python, "Python"));
}

function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}
