// The page of one sample.

import { button, element, fill, inBytes, line } from "./dom.js";
import { showField } from "./fields.js";
import { linkTo } from "./route.js";

const options = { exif: false };

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
  const sections = sample.fields.map((field) => sectionOf(field));
  fill(host, bar, heading, about, sample.error ? element("p", { class: "error" }, line(sample.error)) : null, ...sections, linesOf(sample));
  heading.focus();
  await Promise.all(sample.fields.map(async (field, at) => {
    const shown = field.error ? element("p", { class: "error" }, line(field.error)) : await showField(sample, field, source, options);
    sections[at].append(shown);
  }));
  host.dataset.shown = String(sample.number);
}

function sectionOf(field) {
  const offset = field.offset === undefined ? "" : `, at offset ${field.offset.toLocaleString("en")}`;
  return element("section", { class: "field", "aria-label": line(field.name) },
    element("h3", {}, line(field.name), element("small", {}, ` ${inBytes(field.size)} (${field.size.toLocaleString("en")} bytes)${offset}`)));
}

/** Return the lines that take just this sample, for a shell and for Python. */
function linesOf(sample) {
  if (sample.sample === undefined) return null;
  const shard = sample.shard;
  const shell = `tarcat --slice ${sample.sample}:${sample.sample + 1} ${quoted(shard)}`;
  const python = `tarshards.IndexedShards(${JSON.stringify(shard)})[${sample.sample}]`;
  return element("section", { class: "field", "aria-label": "commands" }, element("h3", {}, "just this sample"),
    element("pre", { tabindex: 0 }, `${line(shell)}\n${line(python)}`));
}

function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}
