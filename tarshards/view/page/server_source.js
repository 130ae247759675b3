// Samples from the server of this page.

import { saveUrl } from "./dom.js";

export class ServerSource {
  offers = new Set(["queries", "histograms", "epochs", "shards", "keys", "bytes"]);

  async ask(path, parameters = {}, signal = undefined) {
    const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`, { signal });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  }

  about() {
    return this.ask("about");
  }

  rows(query, begin, count, signal) {
    return this.ask("rows", { ...query, begin, count }, signal);
  }

  sample(number) {
    return this.ask("sample", { number });
  }

  async find(key) {
    return (await this.ask("find", { key })).numbers;
  }

  /** Return bytes of a field, at most those from *begin* to *end*. */
  async bytes(sample, field, begin, end) {
    const size = Math.min(end, field.size);
    if (begin >= size) return new Uint8Array();
    const headers = { Range: `bytes=${begin}-${size - 1}` };
    const answer = await fetch(this.fieldUrl(sample, field), { headers });
    if (!answer.ok) throw new Error((await answer.json()).error);
    return new Uint8Array(await answer.arrayBuffer());
  }

  fieldUrl(sample, field) {
    return `field?${new URLSearchParams({ number: sample.number, field: field.name })}`;
  }

  /** Return the fields of the samples, their columns and the histograms that they have. */
  names() {
    this.known ??= this.ask("names");
    return this.known;
  }

  /** Return the address of a picture, or of one with this many *pixels* on its longer side. */
  async pictureUrl(sample, field, pixels = 0) {
    const parameters = { number: sample.number, field: field.name, ...(pixels ? { pixels } : {}) };
    return `picture?${new URLSearchParams(parameters)}`;
  }

  /** Return the address of sound or video, which the browser reads by ranges. */
  async mediaUrl(sample, field) {
    return this.fieldUrl(sample, field);
  }

  async failure(sample, field) {
    const answer = await fetch(await this.pictureUrl(sample, field));
    return answer.ok ? "the browser does not show it" : (await answer.json()).error;
  }

  async download(sample, field, name) {
    saveUrl(name, this.fieldUrl(sample, field));
  }

  keysUrl(query) {
    return `keys?${new URLSearchParams(query)}`;
  }
}
