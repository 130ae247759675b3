// The query box: one line of text for all that chooses and orders samples, with completion.

import { button, element, line } from "./dom.js";
import { complete, formatQuery, parseQuery } from "./query_text.js";
import { go, queryOf, route, takes } from "./route.js";

/** Return the form of the query; *find(key)* resolves to whether a sample has exactly this key. */
export function makeQueryBox(source, find) {
  const hint = takes("where", source.offers) ? 'a key, #7, cls == 3, has:jpg …' : "part of the key, #number";
  const input = element("input", {
    name: "query", type: "text", placeholder: hint, spellcheck: "false", autocomplete: "off", autocapitalize: "none", enterkeyhint: "search",
    role: "combobox", "aria-label": "query", "aria-autocomplete": "list", "aria-controls": "completions", "aria-expanded": "false",
    input: () => offer(), focus: () => offer(), blur: () => close(), keydown: (event) => key(event),
  });
  const list = element("ul", { id: "completions", role: "listbox", "aria-label": "completions", hidden: true });
  const about = element("small", {}); // what another part of the page has chosen
  const form = element("form", { class: "query", role: "search", "aria-label": "query", submit: (event) => {
    event.preventDefault();
    close();
    follow(input.value.trim());
  } }, input, list, button("clear", () => go({})), about);
  let names = null;
  let [begin, active] = [0, -1];

  async function follow(text) {
    if (/^#\d+$/.test(text)) {
      go({ ...queryOf(route()), sample: text.slice(1) });
      return;
    }
    const query = parseQuery(text);
    const isKey = query.match && Object.keys(query).length === 1 && !text.startsWith("key:");
    if (isKey && (await find(query.match))) go({ key: query.match });
    else go(query);
  }

  async function offer() {
    names ??= source.names().catch(() => ({ fields: [], columns: [] }));
    const found = complete(input.value, input.selectionStart, await names, (name) => takes(name, source.offers));
    if (document.activeElement !== input) return;
    ({ begin } = found);
    active = -1;
    list.replaceChildren(...found.options.map(([text, kind], number) => element("li", {
      id: `completion-${number}`, role: "option", "data-text": text, "aria-selected": "false",
      mousedown: (event) => { event.preventDefault(); accept(text); },
    }, element("code", {}, line(text)), " ", element("small", {}, kind))));
    list.hidden = !found.options.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
    input.removeAttribute("aria-activedescendant");
  }

  function close() {
    list.hidden = true;
    active = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }

  function choose(step) {
    list.children[active]?.setAttribute("aria-selected", "false");
    active = (active + step + list.childElementCount + (active < 0 && step < 0 ? 1 : 0)) % list.childElementCount;
    list.children[active].setAttribute("aria-selected", "true");
    list.children[active].scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", `completion-${active}`);
  }

  function accept(text) {
    const rest = input.value.slice(input.selectionStart);
    input.value = input.value.slice(0, begin) + text + rest;
    input.setSelectionRange(begin + text.length, begin + text.length);
    offer();
  }

  function key(event) {
    if (list.hidden) {
      if (event.key === "ArrowDown") offer();
      else if (event.key === "Escape") input.blur();
      else return;
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") choose(event.key === "ArrowDown" ? 1 : -1);
    else if (event.key === "Escape") close();
    else if ((event.key === "Enter" || event.key === "Tab") && active >= 0) accept(list.children[active].dataset.text);
    else if (event.key === "Tab" && list.childElementCount === 1) accept(list.children[0].dataset.text);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Show the query of the address. */
  function update() {
    const entries = route();
    input.value = formatQuery(entries);
    about.textContent = entries.step === undefined ? "" : `batch ${line(entries.step)}`;
  }
  return { form, input, update };
}
