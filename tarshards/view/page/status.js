// The line that says what is known of the samples that are shown, and searches on.

import { button, counted, element, line } from "./dom.js";

const FAR = 10_000_000; // a position behind every result of a query

export class Status {
  /** *ask(begin, count)* returns rows of the query that is shown, and *grow* takes how many samples are known now.
   *
   * *rest* is called when the search is to go no further.
   */
  constructor(ask, { grow, rest }) {
    Object.assign(this, { ask, grow, rest, isIndexed: true });
    this.text = element("p", { class: "status", role: "status" });
    this.bar = element("progress", { "aria-label": "searched" });
    this.all = button("search all", () => {
      if (!this.isSearching) return this.#searchAll();
      this.rest();
      return this.stop();
    });
    this.search = element("span", { class: "search", hidden: true }, this.bar, this.all);
    this.element = element("div", { class: "known" }, this.text, this.search);
  }

  /** Say that something is asked for, *of* so many samples, if that is known; a search for all ends. */
  wait(of) {
    this.of = of;
    this.stop();
    this.search.hidden = true;
    this.text.classList.remove("error");
    this.text.textContent = "…";
  }

  stop() {
    this.isSearching = false;
    this.all.textContent = "search all";
  }

  fail(reason) {
    this.search.hidden = true;
    this.text.textContent = line(reason);
    this.text.classList.add("error");
  }

  /** Say what is known of the samples that are shown. */
  tell(found) {
    this.text.classList.remove("error");
    const words = [counted(found.total, "sample") + (found.done ? "" : " so far")];
    if (!this.isIndexed) words.push("no index found: shards are indexed in memory as far as you scroll; `tarindex` makes indexes");
    const isSearch = !found.done && found.searched !== undefined;
    if (isSearch) words.push(`${found.searched.toLocaleString("en")}${this.of ? ` of ${this.of.toLocaleString("en")}` : ""} searched`);
    if (found.failed) words.push(`${found.failed.toLocaleString("en")} could not be judged: ${found.reason}`);
    if (found.problems?.length) words.push(...found.problems.slice(0, 3));
    this.text.textContent = line(words.join("; "));
    this.search.hidden = !isSearch;
    this.bar.removeAttribute("value");
    if (isSearch && this.of) [this.bar.max, this.bar.value] = [this.of, found.searched];
  }

  /** Search to the end, in steps; another query ends it. */
  async #searchAll() {
    const mine = {};
    this.isSearching = mine;
    this.all.textContent = "stop";
    try {
      while (this.isSearching === mine) {
        const found = await this.ask(FAR, 0);
        if (this.isSearching !== mine) return;
        this.grow(found);
        this.tell(found);
        if (found.done) this.stop();
      }
    } catch (error) {
      if (this.isSearching !== mine) return;
      this.stop();
      this.fail(error.message);
    }
  }
}
