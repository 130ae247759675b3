// How the grid shows samples: the size of the cards or a table, and which fields.

import { element, line } from "./dom.js";
import { go, route, shownFields } from "./route.js";

const USUAL = "medium";

/** Return the choice of a view, of these *names*. */
export function makeViews(names) {
  const chosen = () => (names.includes(route().view) ? route().view : USUAL);
  const select = element("select", { name: "view", change: () => go({ ...route(), view: select.value === USUAL ? "" : select.value }) },
    ...names.map((name) => element("option", { value: name }, name)));
  const update = () => { select.value = chosen(); };
  return { element: element("label", { class: "views" }, "view ", select), chosen, update };
}

/** Return the menu of the fields that are shown, in the order in which they were chosen; none is all. */
export function makeFieldMenu(source) {
  const list = element("div", { class: "choices", role: "group", "aria-label": "fields that are shown" });
  const name = element("summary", {}, "fields");
  const menu = element("details", { class: "menu" }, name, list);
  const choose = (fields) => go({ ...route(), shown: fields.map(encodeURIComponent).join(",") });
  const fill = async () => {
    const { fields } = await source.names().catch(() => ({ fields: [] }));
    const shown = shownFields();
    const all = [...shown, ...fields.filter((field) => !shown.includes(field))];
    list.replaceChildren(element("label", {}, choiceOf(!shown.length, () => choose([])), " all"), ...all.map((field) => element("label", {},
      choiceOf(shown.includes(field), (isOn) => choose(isOn ? [...shown, field] : shown.filter((each) => each !== field))), ` ${line(field)}`)));
  };
  const update = () => {
    const shown = shownFields();
    name.textContent = shown.length ? `fields (${shown.length})` : "fields";
    if (menu.open) fill();
  };
  menu.addEventListener("toggle", () => { if (menu.open) fill(); });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    name.focus();
    event.stopPropagation();
  });
  document.addEventListener("pointerdown", (event) => { if (!menu.contains(event.target)) menu.open = false; });
  return { element: menu, update };
}

function choiceOf(isOn, change) {
  const box = element("input", { type: "checkbox", change: () => change(box.checked) });
  box.checked = isOn;
  return box;
}
