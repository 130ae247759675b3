// A grid that scrolls over any number of samples, and has elements only for those in sight.

import { element } from "./dom.js";

const HEIGHT = 236; // pixels of a card with its gap; style.css has the same
const WIDTH = 200; // the least
const TALLEST = 8_000_000; // pixels; browsers stop somewhere above 16 million
const PAGE = 48; // samples that are asked for at once
const PAGES = 40; // that are held
const REST = 40; // milliseconds after which scrolling has come to rest

export class Grid {
  /** *load(begin, count, signal)* returns rows, *card(row, position)* an element; *report* gets what is known, or an error. */
  constructor({ load, card, report, open, mark }) {
    Object.assign(this, { load, card, report, open, mark });
    this.layer = element("div", { class: "layer" });
    this.spacer = element("div", { class: "spacer" }, this.layer);
    this.scroller = element("div", {
      class: "scroller", tabindex: 0, role: "listbox", "aria-multiselectable": "true", "aria-label": "samples",
      scroll: () => this.#scrolled(), keydown: (event) => this.#key(event),
    }, this.spacer);
    this.scroller.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    this.layer.addEventListener("click", (event) => this.#click(event));
    new ResizeObserver(() => this.#resize()).observe(this.scroller);
    this.reset();
  }

  /** Forget all samples, and ask again. */
  reset(total = 0) {
    this.requests?.forEach((request) => request.abort());
    [this.pages, this.requests, this.cards] = [new Map(), new Map(), new Map()];
    this.failed = new Set(); // pages that are not asked for again before one scrolls
    [this.total, this.done, this.top, this.active, this.expected] = [total, false, 0, 0, 0];
    this.generation = (this.generation ?? 0) + 1;
    this.layer.replaceChildren();
    this.scroller.scrollTop = 0;
    this.#resize();
  }

  // Where it stands: *top* is in pixels of the whole grid, which may be taller than what the browser scrolls.

  get columns() {
    return Math.max(1, Math.floor(this.scroller.clientWidth / WIDTH));
  }

  get height() {
    return Math.ceil(this.total / this.columns) * HEIGHT;
  }

  get #scale() {
    const view = this.scroller.clientHeight;
    const scrolled = Math.min(this.height, TALLEST) - view;
    return scrolled > 0 ? Math.max(1, (this.height - view) / scrolled) : 1;
  }

  #resize() {
    this.spacer.style.height = `${Math.min(this.height, TALLEST)}px`;
    this.layer.style.height = `${this.scroller.clientHeight}px`;
    this.moveTo(this.top);
  }

  /** Scroll to a height of the whole grid. */
  moveTo(top) {
    if (top !== this.top) this.failed.clear();
    this.top = Math.max(0, Math.min(top, this.height - this.scroller.clientHeight));
    this.scroller.scrollTop = this.top / this.#scale;
    this.expected = this.scroller.scrollTop;
    this.#render();
  }

  /** Bring a sample, by its position, into sight, and make it the active one. */
  show(position) {
    this.active = Math.max(0, Math.min(position, this.total - 1));
    const top = Math.floor(this.active / this.columns) * HEIGHT;
    const view = this.scroller.clientHeight;
    if (top < this.top || top + HEIGHT > this.top + view) this.moveTo(top - (view - HEIGHT) / 2);
    else this.#render();
  }

  #scrolled() {
    if (Math.abs(this.scroller.scrollTop - this.expected) < 1.5) return;
    this.expected = this.scroller.scrollTop;
    this.top = this.scroller.scrollTop * this.#scale;
    this.failed.clear();
    this.#render();
  }

  #wheel(event) {
    if (this.#scale === 1 || event.ctrlKey) return; // the browser scrolls by itself
    event.preventDefault();
    this.moveTo(this.top + event.deltaY * (event.deltaMode ? 40 : 1));
  }

  #key(event) {
    const { columns } = this;
    const rows = Math.max(1, Math.floor(this.scroller.clientHeight / HEIGHT));
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns,
      PageUp: -columns * rows, PageDown: columns * rows, Home: -Infinity, End: Infinity,
    };
    if (event.key in steps) {
      const before = this.active;
      this.show(this.active + steps[event.key]);
      if (event.shiftKey) this.mark(this.between(before, this.active), true);
    } else if (event.key === "Enter" && this.row(this.active)) {
      this.open(this.row(this.active), this.active);
    } else if (event.key === " " && this.row(this.active)) {
      this.mark([this.row(this.active)]);
    } else {
      return;
    }
    event.preventDefault();
  }

  #click(event) {
    const card = event.target.closest("[data-position]");
    if (!card) return;
    const before = this.active;
    const position = Number(card.dataset.position);
    this.active = position;
    const row = this.row(position);
    if (row && event.shiftKey) this.mark(this.between(before, position), true);
    else if (row && (event.ctrlKey || event.metaKey || event.target.closest(".mark"))) this.mark([row]);
    else if (row) this.open(row, position);
    this.#render();
  }

  /** Return the rows from one position to another, of those that are here. */
  between(one, other) {
    const rows = [];
    for (let at = Math.min(one, other); at <= Math.max(one, other); at += 1) {
      if (this.row(at)) rows.push(this.row(at));
    }
    return rows;
  }

  // What is in sight.

  row(position) {
    return this.pages.get(Math.floor(position / PAGE))?.[position % PAGE];
  }

  /** Draw cards again that have changed otherwise. */
  refresh() {
    this.cards.clear();
    this.layer.replaceChildren();
    this.#render();
  }

  #render() {
    const { columns } = this;
    const first = Math.floor(this.top / HEIGHT) * columns;
    const end = Math.min(this.total, (Math.floor((this.top + this.scroller.clientHeight) / HEIGHT) + 1) * columns);
    for (const [position, card] of this.cards) {
      if (position < first || position >= end || (card.dataset.empty && this.row(position))) {
        card.remove();
        this.cards.delete(position);
      }
    }
    const width = this.scroller.clientWidth / columns;
    for (let position = first; position < end; position += 1) {
      const card = this.cards.get(position) ?? this.#make(position);
      card.style.width = `${width - 12}px`;
      const y = Math.floor(position / columns) * HEIGHT - this.top;
      card.style.transform = `translate(${(position % columns) * width + 6}px, ${y + 6}px)`;
      card.classList.toggle("active", position === this.active);
    }
    this.scroller.setAttribute("aria-activedescendant", `sample-${this.active}`);
    this.#want(first, end);
  }

  #make(position) {
    const row = this.row(position);
    const card = row ? this.card(row, position) : element("div", { class: "card", "data-empty": "1" }, `${position}`);
    card.dataset.position = position;
    card.id = `sample-${position}`;
    card.setAttribute("role", "option");
    card.setAttribute("aria-posinset", position + 1);
    card.setAttribute("aria-setsize", this.done ? this.total : -1);
    this.cards.set(position, card);
    this.layer.append(card);
    return card;
  }

  /** Ask for what is in sight and not here, once scrolling rests. */
  #want(first, end) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const wanted = new Set();
      for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(end - 1, 0) / PAGE); page += 1) wanted.add(page);
      if (end >= this.total && !this.done) wanted.add(Math.floor(end / PAGE));
      for (const [page, request] of this.requests) if (!wanted.has(page)) request.abort();
      for (const page of wanted) {
        if (!this.#isWhole(page) && !this.requests.has(page) && !this.failed.has(page)) this.#ask(page);
      }
    }, this.pages.size ? REST : 0);
  }

  #isWhole(page) {
    const rows = this.pages.get(page);
    return rows !== undefined && (rows.length === PAGE || (this.done && page * PAGE + rows.length >= this.total));
  }

  async #ask(page) {
    const { generation } = this;
    const request = new AbortController();
    this.requests.set(page, request);
    try {
      const found = await this.load(page * PAGE, PAGE, request.signal);
      if (generation !== this.generation) return;
      this.pages.delete(page);
      this.pages.set(page, found.rows);
      while (this.pages.size > PAGES) this.pages.delete(this.pages.keys().next().value);
      const hasGrown = found.total !== this.total;
      [this.total, this.done] = [found.total, found.done];
      this.report(found);
      if (hasGrown) this.#resize();
    } catch (error) {
      if (error.name === "AbortError" || generation !== this.generation) return;
      this.failed.add(page);
      this.report({ error: error.message });
    } finally {
      if (generation === this.generation) {
        this.requests.delete(page);
        this.#render();
      }
    }
  }
}
