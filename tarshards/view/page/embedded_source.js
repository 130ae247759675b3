// Samples that are in the page itself: a contact sheet.

import { fromBase64 } from "./dom.js";

export class EmbeddedSource {
  offers = new Set();

  constructor(config) {
    this.samples = config.samples;
    this.name = config.name;
  }

  async about() {
    return { name: this.name, total: this.samples.length, done: true, indexed: true, shards: 0, left_out: 0 };
  }

  async rows(query, begin, count) {
    const chosen = this.samples.filter((row) => !query.match || row.key.includes(query.match));
    return { total: chosen.length, done: true, rows: chosen.slice(begin, begin + count) };
  }

  async names() {
    return { fields: [...new Set(this.samples.flatMap((row) => row.fields.map((field) => field.name)))], columns: [] };
  }

  async sample(number) {
    if (!this.samples[number]) throw new Error(`there is no sample ${number} on this page`);
    return { ...this.samples[number], total: this.samples.length };
  }

  async find(key) {
    return this.samples.filter((row) => row.key === key).map((row) => row.number);
  }

  async bytes(sample, field, begin, end) {
    return fromBase64(field.head ?? "").slice(begin, end);
  }

  async pictureUrl(sample, field) {
    if (!field.picture) throw new Error(field.error ?? "this page does not have it");
    return field.picture;
  }

  async mediaUrl() {
    throw new Error("this page does not have it");
  }

  async failure(sample, field) {
    return field.error ?? "the browser does not show it";
  }
}
