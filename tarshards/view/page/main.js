// The page: which view the address names, the grid, the selection, and the keyboard.

import { inOrder, LOOKS, makeCard, makeHeader, makeRow, tableWidth } from "./card.js";
import { button, counted, element, line, save } from "./dom.js";
import { EmbeddedSource } from "./embedded_source.js";
import { makeFieldMenu, makeViews } from "./look.js";
import { Grid } from "./grid.js";
import { showLedger, showShards } from "./lists.js";
import { makeEpoch, makeHistograms } from "./panels.js";
import { makeQueryBox } from "./query_box.js";
import { checkQuery, go, linkTo, numberOf, queryOf, route, shownFields } from "./route.js";
import { showSample } from "./sample.js";
import { ServerSource } from "./server_source.js";
import { StaticSource } from "./static_source.js";
import { Status } from "./status.js";
import { setTypes } from "./values.js";

const MOST_MARKED = 100_000;
const MOST_FOUND = 1_000_000; // samples in which a whole key is looked up: that reads all keys
const SOURCES = { server: ServerSource, embedded: EmbeddedSource, static: StaticSource };

const config = JSON.parse(document.getElementById("config").textContent);
setTypes(config.types);
const source = new SOURCES[config.transport](config);
const marked = new Map(); // keys of the selected samples, by their numbers
let query = {};
let look = null; // what the address says of how samples are shown
let view = "medium";
let columns = []; // fields of the table
let about = { name: "", total: 0, done: false };

const status = new Status((begin, count) => source.rows(query, begin, count), { grow: (found) => grid.grow(found), rest: () => grid.rest() });
const selection = element("span", { class: "selection" });
const detail = element("section", { class: "detail", hidden: true, "aria-label": "sample" });
const box = makeQueryBox(source, async (key) => source.offers.has("queries") && about.total <= MOST_FOUND && (await source.find(key)).length > 0);
const views = makeViews(Object.keys(LOOKS));
const menu = makeFieldMenu(source);
const epoch = makeEpoch();
const grid = new Grid({
  load: async (begin, count, signal) => {
    checkQuery(query, source.offers);
    return source.rows(query, begin, count, signal);
  },
  card: (row, width) => {
    const options = { source, isMarked: marked.has(row.number), look: LOOKS[view], width };
    return view === "table" ? makeRow(row, { ...options, fields: columns }) : makeCard(row, { ...options, chosen: shownFields() });
  },
  report: (found) => {
    if (found.error) status.fail(found.error);
    else if (!status.isSearching) status.tell(found);
    if (!found.error) epoch.report(found);
  },
  open: (row, position) => go({ ...query, sample: row.number, position }),
  mark,
  look: LOOKS[view],
});

function lay() {
  const title = element("h1", {}, "…");
  const panels = element("aside", { "aria-label": "panels" });
  if (source.offers.has("histograms")) panels.append(makeHistograms(source));
  if (source.offers.has("epochs")) panels.append(epoch.panel);
  const links = element("nav", { "aria-label": "lists" });
  const shards = source.offers.has("shards") ? element("a", {}, "shards") : null;
  const keys = source.offers.has("keys") ? element("a", { download: "keys.txt" }, "all keys") : null;
  const ledger = element("a", { hidden: true });
  links.append(...[shards, keys, ledger].filter(Boolean));
  const main = element("main", {}, grid.scroller, detail);
  document.body.append(element("header", {}, title, box.form, links, views.element, menu.element, status.element, selection), element("div", { class: "body" }, panels, main));
  panels.hidden = !panels.childElementCount;
  return { title, shards, keys, ledger };
}

/** Show samples as the address says. */
async function showLook() {
  const wanted = JSON.stringify([views.chosen(), shownFields()]);
  if (wanted === look) return;
  look = wanted;
  views.update();
  menu.update();
  const chosen = views.chosen();
  if (chosen === "table") {
    const { fields } = await source.names();
    columns = shownFields().length ? shownFields() : inOrder(fields.map((name) => ({ name }))).map(({ name }) => name);
    if (look !== wanted) return;
  }
  view = chosen;
  grid.setLook(LOOKS[view], view === "table" ? makeHeader(columns) : null, tableWidth(columns));
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
    button("none", () => { marked.clear(); tellSelection(); grid.refresh(); })] : []));
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
    status.wait(about.done && !query.shard ? about.total : null);
  }
  box.update();
  parts.shards?.setAttribute("href", linkTo({ show: "shards" }));
  parts.keys?.setAttribute("href", source.keysUrl(query));
  parts.ledger.setAttribute("href", linkTo({ show: "ledger" }));
  showLook().catch((error) => status.fail(error.message));
  epoch.update();
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
    box.input.focus();
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
  status.isIndexed = found.indexed;
  epoch.begin(found.state ?? null);
  document.title = `tarview: ${line(found.name)}`;
  parts.title.textContent = line(found.name).replace(/^[^{]*\//, "");
  parts.title.title = line(found.name);
  parts.ledger.hidden = !found.left_out;
  parts.ledger.textContent = `ledger (${found.left_out})`;
  grid.reset(found.total);
  status.text.textContent = counted(found.total, "sample");
  return follow();
}).catch((error) => status.fail(error.message));
