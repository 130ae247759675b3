// The panels for histograms and for batches of an epoch.

import { button, counted, element, line } from "./dom.js";
import { go, queryOf, route } from "./route.js";

const EPOCH = ["seed", "epoch", "rank", "ranks", "batch_size"];

/** Return the panel of histograms, which is filled when it is opened. */
export function makeHistograms(source) {
  const inner = element("div", {});
  const panel = element("details", { class: "panel" }, element("summary", {}, "histograms"), inner);
  panel.addEventListener("toggle", async () => {
    if (!panel.open || inner.childElementCount) return;
    const bars = element("div", { class: "bars", "aria-live": "polite" });
    const { histograms: of } = await source.names();
    const select = element("select", { "aria-label": "histogram of", change: () => draw(source, select.value, bars) },
      ...of.map((name) => element("option", { value: name }, line(name))));
    inner.append(select, button("of the query", () => draw(source, select.value, bars)), bars);
    if (of.length) await draw(source, of[0], bars);
  });
  return panel;
}

async function draw(source, of, host) {
  host.replaceChildren("…");
  try {
    const found = await source.ask("histogram", { of, ...queryOf(route()) });
    const highest = Math.max(1, ...found.bars.map((bar) => bar.count));
    host.replaceChildren(...found.bars.map((bar) => {
      const row = button("", () => go({ ...queryOf(route()), ...bar.query }), { class: "bar", title: "filter by it" });
      const length = element("span", { class: "length", "aria-hidden": "true" });
      length.style.width = `${(100 * bar.count) / highest}%`;
      row.append(length, element("span", {}, line(bar.label)), element("span", {}, bar.count.toLocaleString("en")));
      return row;
    }));
    const all = counted(found.total, "sample");
    const part = found.samples < found.total ? `of ${counted(found.samples, "sample")} of ${all}, evenly spaced` : `of ${all}`;
    const rest = found.values > found.bars.length ? `; ${counted(found.values, "value")} in all` : "";
    host.append(element("p", {}, part + rest));
  } catch (error) {
    host.replaceChildren(element("p", { class: "error" }, line(error.message)));
  }
}

/** Return the panel for the batches of an epoch as a rank sees them. */
export function makeEpoch() {
  const defaults = { seed: 0, epoch: 0, rank: 0, ranks: 1, batch_size: 32 };
  const inputs = Object.fromEntries(EPOCH.map((name) => [name, element("input", { type: "number", min: 0, name, value: defaults[name] })]));
  const step = element("input", { type: "number", min: 0, name: "step", value: 0 });
  const shuffle = element("input", { type: "checkbox", name: "shuffle" });
  shuffle.checked = true;
  const about = element("p", { "aria-live": "polite" });
  let state = null;
  const loaded = element("span", {}, "no state");
  const file = element("input", { type: "file", accept: ".json", "aria-label": "state or checkpoint in JSON", change: async () => {
    try {
      state = file.files.length ? JSON.parse(await file.files[0].text()) : null;
      loaded.textContent = state ? "state loaded" : "no state";
    } catch (error) {
      loaded.textContent = line(error.message);
    }
  } });
  const show = (number) => {
    step.value = Math.max(0, number);
    const epoch = Object.fromEntries(EPOCH.map((name) => [name, Number(inputs[name].value)]));
    go({ step: step.value, epoch: JSON.stringify({ ...epoch, shuffle: shuffle.checked, ...(state ? { state } : {}) }) });
  };
  const form = element("form", { submit: (event) => { event.preventDefault(); show(Number(step.value)); } },
    ...EPOCH.map((name) => element("label", {}, `${name.replace("_", " ")} `, inputs[name])),
    element("label", {}, "shuffle ", shuffle), element("label", {}, "state ", file), loaded,
    element("label", {}, "step ", step), element("button", {}, "show the batch"),
    button("◀", () => show(Number(step.value) - 1), { "aria-label": "batch before" }),
    button("▶", () => show(Number(step.value) + 1), { "aria-label": "next batch" }));
  const panel = element("details", { class: "panel" }, element("summary", {}, "epoch"), form, about);
  const update = () => {
    const entries = route();
    if (entries.step === undefined) {
      about.textContent = "";
      return;
    }
    panel.open = true;
    step.value = entries.step;
    try {
      const given = JSON.parse(entries.epoch ?? "{}");
      for (const name of EPOCH) if (name in given) inputs[name].value = given[name];
      if ("shuffle" in given) shuffle.checked = given.shuffle;
    } catch {
      about.textContent = "the address has no epoch in JSON";
    }
  };
  const report = (found) => {
    if (found.about?.batches !== undefined) {
      about.textContent = `batch ${found.about.step} of ${found.about.batches.toLocaleString("en")} of this rank, epoch ${found.about.epoch}`;
    }
  };
  /** Count batches from the state of a loader. */
  const begin = (given) => {
    state = given;
    if (given) loaded.textContent = "state given";
  };
  return { panel, update, report, begin };
}
