// A grid that scrolls over any number of samples, and has elements only for those in sight.

import { element } from "./dom.js";

const TALLEST = 8_000_000; // pixels; browsers stop somewhere above 16 million
const PAGE = 48; // samples that are asked for at once
const PAGES = 40; // that are held
const HEADER = 28; // pixels of a table's header
const REST = 40; // milliseconds after which scrolling has come to rest

export class Grid {
  /** *load(begin, count, signal)* returns rows, *card(row, width)* an element; *report* gets what is known, or an error.
   *
   * *look* has the least width and the height of a card with its *gap*; without a width, each is a row.
   */
  constructor({ load, card, report, open, mark, look }) {
    Object.assign(this, { load, card, report, open, mark, look, header: null });
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
    this.failed = new Set(); // pages that are not asked for, or not again, before one scrolls
    [this.total, this.done, this.top, this.active, this.expected] = [total, false, 0, 0, 0];
    this.generation = (this.generation ?? 0) + 1;
    this.layer.replaceChildren(...(this.header ? [this.header] : []));
    this.scroller.scrollTop = 0;
    this.#resize();
  }

  /** Show samples in another way: a table has a *header*, and may be wider than what is in sight. */
  setLook(look, header = null, width = 0) {
    Object.assign(this, { look, header, width });
    this.refresh();
    this.#resize();
    this.show(this.active);
  }

  // Where it stands: *top* is in pixels of the whole grid, which may be taller than what the browser scrolls.

  get columns() {
    return this.look.width ? Math.max(1, Math.floor(this.scroller.clientWidth / this.look.width)) : 1;
  }

  get height() {
    return Math.ceil(this.total / this.columns) * this.look.height;
  }

  /** Pixels of the samples in sight, without the header. */
  get #view() {
    return this.scroller.clientHeight - this.#above;
  }

  get #above() {
    return this.header ? HEADER : 0;
  }

  get #scale() {
    const scrolled = Math.min(this.height, TALLEST) - this.#view;
    return scrolled > 0 ? Math.max(1, (this.height - this.#view) / scrolled) : 1;
  }

  #resize() {
    if (this.scroller.clientWidth !== this.laidOut && this.scroller.clientWidth) {
      this.laidOut = this.scroller.clientWidth; // what a card shows depends on its width
      this.cards.forEach((card) => card.remove());
      this.cards.clear();
    }
    this.spacer.style.height = `${Math.min(this.height, TALLEST) + this.#above}px`;
    this.spacer.style.width = this.header ? `max(100%, ${this.width}px)` : "";
    this.layer.style.height = `${this.scroller.clientHeight}px`;
    this.moveTo(this.top);
  }

  /** Scroll to a height of the whole grid. */
  moveTo(top) {
    if (top !== this.top) this.failed.clear();
    this.top = Math.max(0, Math.min(top, this.height - this.#view));
    this.scroller.scrollTop = this.top / this.#scale;
    this.expected = this.scroller.scrollTop;
    this.#render();
  }

  /** Bring a sample, by its position, into sight, and make it the active one. */
  show(position) {
    this.active = Math.max(0, Math.min(position, this.total - 1));
    const top = Math.floor(this.active / this.columns) * this.look.height;
    if (top < this.top || top + this.look.height > this.top + this.#view) this.moveTo(top - (this.#view - this.look.height) / 2);
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
    const rows = Math.max(1, Math.floor(this.#view / this.look.height));
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
    this.layer.replaceChildren(...(this.header ? [this.header] : []));
    this.#render();
  }

  /** Ask for no more samples before one scrolls. */
  rest() {
    this.failed.add(Math.floor(this.total / PAGE));
  }

  /** Note how many samples are known now, although none of them was asked for. */
  grow({ total, done }) {
    [this.total, this.done] = [total, done];
    this.#resize();
  }

  #render() {
    const { columns } = this;
    const { height, gap } = this.look;
    const first = Math.floor(this.top / height) * columns;
    const end = Math.min(this.total, (Math.floor((this.top + this.#view) / height) + 1) * columns);
    if (!this.scroller.clientWidth) { // it is hidden
      this.#want(first, end);
      return;
    }
    for (const [position, card] of this.cards) {
      if (position < first || position >= end || (card.dataset.empty && this.row(position))) {
        card.remove();
        this.cards.delete(position);
      }
    }
    const width = (this.header ? this.layer.clientWidth : this.scroller.clientWidth) / columns;
    for (let position = first; position < end; position += 1) {
      const card = this.cards.get(position) ?? this.#make(position, width - gap);
      card.style.width = `${width - gap}px`;
      card.style.height = `${height - gap}px`;
      const y = Math.floor(position / columns) * height - this.top + this.#above;
      card.style.transform = `translate(${(position % columns) * width + gap / 2}px, ${y + gap / 2}px)`;
      card.classList.toggle("active", position === this.active);
    }
    this.scroller.setAttribute("aria-activedescendant", `sample-${this.active}`);
    this.#want(first, end);
  }

  #make(position, width) {
    const row = this.row(position);
    const card = row ? this.card(row, width) : element("div", { class: "card", "data-empty": "1" }, `${position}`);
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
      if (!found.done && (this.done || found.total < this.total)) return; // a later answer came before
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
