// The page: which view the address names, the grid, the selection, and the keyboard.

import { makeCard } from "./card.js";
import { button, counted, element, line, save } from "./dom.js";
import { EmbeddedSource } from "./embedded_source.js";
import { makeEpoch, makeFilter, makeHistograms } from "./filters.js";
import { Grid } from "./grid.js";
import { showLedger, showShards } from "./lists.js";
import { checkQuery, go, numberOf, queryOf, route } from "./route.js";
import { showSample } from "./sample.js";
import { ServerSource } from "./server_source.js";
import { StaticSource } from "./static_source.js";
import { setTypes } from "./values.js";

const MOST_MARKED = 100_000;
const SOURCES = { server: ServerSource, embedded: EmbeddedSource, static: StaticSource };

const config = JSON.parse(document.getElementById("config").textContent);
setTypes(config.types);
const source = new SOURCES[config.transport](config);
const marked = new Map(); // keys of the selected samples, by their numbers
let query = {};
let about = { name: "", total: 0, done: false };

const status = element("p", { class: "status", role: "status" });
const selection = element("span", { class: "selection" });
const detail = element("section", { class: "detail", hidden: true, "aria-label": "sample" });
const filter = makeFilter(source, (text) => (/^#\d+$/.test(text) ? go({ ...query, sample: text.slice(1) }) : go({ key: text })));
const epoch = makeEpoch();
const grid = new Grid({
  load: async (begin, count, signal) => {
    checkQuery(query, source.offers);
    return source.rows(query, begin, count, signal);
  },
  card: (row) => makeCard(row, source, marked.has(row.number)),
  report: (found) => tell(found),
  open: (row, position) => go({ ...query, sample: row.number, position }),
  mark,
});

function lay() {
  const title = element("h1", {}, "…");
  const panels = element("aside", { "aria-label": "panels" });
  if (source.offers.has("histograms")) panels.append(makeHistograms(source));
  if (source.offers.has("epochs")) panels.append(epoch.panel);
  const links = element("nav", { "aria-label": "lists" });
  if (source.offers.has("shards")) links.append(element("a", { href: "#show=shards" }, "shards"), " ");
  const ledger = element("a", { href: "#show=ledger", hidden: true }, "ledger");
  links.append(ledger);
  const main = element("main", {}, grid.scroller, detail);
  document.body.append(element("header", {}, title, links, filter.form, status, selection), element("div", { class: "body" }, panels, main));
  panels.hidden = !panels.childElementCount;
  return { title, ledger };
}

/** Say what is known of the samples that are shown. */
function tell(found) {
  if (found.error) {
    status.textContent = found.error;
    status.classList.add("error");
    return;
  }
  status.classList.remove("error");
  const words = [counted(found.total, "sample") + (found.done ? "" : " so far")];
  if (!about.indexed) words.push("no index found: shards are indexed in memory as far as you scroll; `tarindex` makes indexes");
  if (!found.done && found.searched) words.push(`${counted(found.searched, "sample")} searched`);
  if (found.failed) words.push(`${found.failed.toLocaleString("en")} could not be judged: ${found.reason}`);
  if (found.problems?.length) words.push(...found.problems.slice(0, 3));
  status.textContent = line(words.join("; "));
  epoch.report(found);
}

/** Select these samples; unless it *adds* them, those that are selected already are no longer. */
function mark(rows, adds = false) {
  for (const row of rows) {
    if (marked.has(row.number) && !adds) marked.delete(row.number);
    else if (marked.size < MOST_MARKED) marked.set(row.number, row.key);
  }
  tellSelection();
  grid.refresh();
}

function tellSelection() {
  const keys = () => [...marked.values()].map((key) => `${escaped(key)}\n`);
  selection.replaceChildren(...(marked.size ? [
    `${counted(marked.size, "sample")} selected `, button("save keys", () => save("keys.txt", keys())),
    button("none", () => { marked.clear(); tellSelection(); grid.refresh(); })] : []),
  ...(source.offers.has("keys") ? [element("a", { href: source.keysUrl(query), download: "keys.txt" }, "all keys")] : []));
}

/** Return a key as a line that `targrep --keys` reads. */
function escaped(key) {
  return key.replace(/[\u0000-\u001f\u007f\\\udc80-\udcff]/gu, (found) => {
    const code = found.codePointAt(0);
    return found === "\\" ? "\\\\" : `\\x${(code >= 0xdc80 ? code - 0xdc00 : code).toString(16).padStart(2, "0")}`;
  });
}

/** Show what the address names. */
async function follow() {
  const entries = route();
  const wanted = queryOf(entries);
  if (JSON.stringify(wanted) !== JSON.stringify(query)) {
    query = wanted;
    grid.reset(Object.keys(query).length ? 0 : about.total);
    status.textContent = "…";
  }
  filter.update();
  epoch.update();
  tellSelection();
  const hasDetail = ["show", "key", "sample"].some((name) => entries[name] !== undefined);
  [detail.hidden, grid.scroller.hidden] = [!hasDetail, hasDetail];
  if (!hasDetail) {
    detail.replaceChildren();
    grid.show(grid.active);
    grid.scroller.focus({ preventScroll: true });
    return;
  }
  const host = element("div"); // what an earlier address still fills is not shown any more
  detail.replaceChildren(host);
  try {
    await showDetail(host, entries);
  } catch (error) {
    host.replaceChildren(element("p", { class: "error" }, line(error.message)), button("back", leave));
  }
}

async function showDetail(host, entries) {
  if (entries.show !== undefined) {
    if (!source.offers.has("shards") || !["shards", "ledger"].includes(entries.show)) throw new Error(`this page has no list of ${entries.show}`);
    if (entries.show === "ledger") await showLedger(host, source);
    else await showShards(host, source, { begin: numberOf(entries, "begin"), check: numberOf(entries, "check") });
  } else if (entries.key !== undefined) {
    const numbers = await source.find(entries.key);
    if (!numbers.length) throw new Error(`no sample has the key ${entries.key}`);
    await showSample(host, numbers[0], source, stepsFrom({ sample: numbers[0] }));
  } else {
    await showSample(host, numberOf(entries, "sample"), source, stepsFrom(entries));
  }
}

/** Return what goes from a sample to those around it, in the order of the grid if it is there. */
function stepsFrom(entries) {
  const position = numberOf(entries, "position") ?? null;
  const number = Number(entries.sample);
  const step = (by) => {
    if (position === null) {
      const isThere = number + by >= 0 && (number + by < about.total || !about.done);
      return isThere ? () => go({ sample: number + by }) : null;
    }
    if (position + by < 0 || (position + by >= grid.total && grid.done)) return null;
    return async () => {
      const row = grid.row(position + by) ?? (await source.rows(query, position + by, 1)).rows[0];
      if (!row) return;
      grid.active = position + by;
      go({ ...query, sample: row.number, position: position + by });
    };
  };
  return { before: step(-1), after: step(1), leave, marked, mark };
}

function leave() {
  go(query);
}

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea, audio, video")) return;
  if (event.key === "/") {
    filter.inputs.key.focus();
    event.preventDefault();
  } else if (!detail.hidden) {
    const labels = { ArrowLeft: 0, ArrowRight: 1 };
    if (event.key === "Escape") go(query);
    else if (event.key in labels && !event.target.matches("pre")) detail.querySelectorAll("nav button")[labels[event.key]]?.click();
  }
});
window.addEventListener("hashchange", follow);

const parts = lay();
source.about().then((found) => {
  about = found;
  epoch.begin(found.state ?? null);
  document.title = `tarview: ${line(found.name)}`;
  parts.title.textContent = line(found.name);
  parts.ledger.hidden = !found.left_out;
  parts.ledger.textContent = `ledger (${found.left_out})`;
  grid.reset(found.total);
  status.textContent = counted(found.total, "sample");
  return follow();
}).catch((error) => {
  status.textContent = line(error.message);
  status.classList.add("error");
});
