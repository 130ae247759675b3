// Samples from shards on any web server with ranges: their indexes and members are read by the page itself.

import { inBytes, line, save } from "./dom.js";
import { checkPixels } from "./image_size.js";
import { checkHeader, readIndex } from "./index_file.js";
import { kindOf, typeOf } from "./values.js";

const INDEXES = 8; // that are held
const HEAD = 256; // bytes of a field that are enough for a line of it
const TOGETHER = 1 << 20; // bytes of consecutive samples that one request fetches
const LARGEST = 1 << 28; // bytes of a member that is held whole
const URLS = 256; // of members, that are held
const SMALL = 1 << 24; // bytes of a video that is fetched for a card
const SEARCHED = 100_000; // samples at once

export class StaticSource {
  offers = new Set(["fields", "bytes"]);

  constructor({ name, shards }) {
    [this.name, this.shards] = [name, shards];
    [this.indexes, this.urls, this.found] = [new Map(), new Map(), null];
    let total = 0;
    this.begins = shards.map((shard) => (total += shard.samples) - shard.samples);
    this.total = total;
  }

  async about() {
    return { name: this.name, total: this.total, done: true, indexed: true, shards: this.shards.length, left_out: 0 };
  }

  // Where samples are.

  locate(number) {
    if (!(number >= 0 && number < this.total)) throw new Error(`there is no sample ${number} of ${this.total}`);
    let [low, high] = [0, this.begins.length];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.begins[middle] <= number) low = middle;
      else high = middle;
    }
    while (!this.shards[low].samples) low -= 1;
    return { shard: low, sample: number - this.begins[low] };
  }

  /** Return the index of a shard; the latest few are held. */
  index(shard) {
    const held = this.indexes.get(shard) ?? this.#fetchIndex(shard);
    this.indexes.delete(shard);
    this.indexes.set(shard, held);
    while (this.indexes.size > INDEXES) this.indexes.delete(this.indexes.keys().next().value);
    held.catch(() => this.indexes.delete(shard));
    return held;
  }

  async #fetchIndex(shard) {
    const { url, samples } = this.shards[shard];
    const [path, ask] = url.split("?");
    const answer = await fetch(`${path}.index${ask ? `?${ask}` : ""}`);
    if (!answer.ok) throw new Error(`${line(path)}.index: ${answer.status}`);
    const index = readIndex(new Uint8Array(await answer.arrayBuffer()));
    if (index.keys.length !== samples) throw new Error(`${line(path)}.index has other samples than this page; write it again`);
    return index;
  }

  async #range(shard, begin, end, signal) {
    if (begin >= end) return new Uint8Array();
    const answer = await fetch(this.shards[shard].url, { headers: { Range: `bytes=${begin}-${end - 1}` }, signal });
    if (answer.status !== 206) {
      await answer.body?.cancel();
      throw new Error(answer.ok ? "the server sends no ranges" : `${answer.status} ${answer.statusText}`);
    }
    return new Uint8Array(await answer.arrayBuffer());
  }

  // Rows.

  async rows(query, begin, count, signal) {
    let numbers = null;
    let [total, done] = [this.total, true];
    if (query.match || query.field) {
      const found = await this.#search(query, begin + count + 1);
      [numbers, total, done] = [found.numbers.slice(begin, begin + count), found.numbers.length, found.next >= this.shards.length];
    } else {
      numbers = Array.from({ length: Math.max(0, Math.min(count, this.total - begin)) }, (_, at) => begin + at);
    }
    const rows = await Promise.all(numbers.map((number) => this.#row(number)));
    await this.#addHeads(rows, signal);
    return { total, done, rows, searched: this.found?.searched };
  }

  async #search(query, most) {
    const asked = JSON.stringify(query);
    if (this.found?.asked !== asked) this.found = { asked, numbers: [], next: 0, searched: 0 };
    const { found } = this;
    let searched = 0;
    while (found.next < this.shards.length && found.numbers.length < most && searched < SEARCHED) {
      const shard = found.next;
      const index = await this.index(shard);
      if (this.found !== found || found.next !== shard) return this.found;
      const field = query.field ? index.fields.indexOf(query.field) : -1;
      index.keys.forEach((key, sample) => {
        const has = !query.field || index.members(sample).some((member) => index.field[member] === field);
        if (has && key.includes(query.match ?? "")) found.numbers.push(this.begins[shard] + sample);
      });
      found.next += 1;
      searched += index.keys.length;
      found.searched += index.keys.length;
    }
    return found;
  }

  async #row(number) {
    const { shard, sample } = this.locate(number);
    const index = await this.index(shard);
    const fields = index.members(sample).map((member) => ({
      name: index.fields[index.field[member]], size: index.size[member], offset: index.offset[member], member,
      error: index.elsewhere.has(member) ? "a link or a sparse member, which this page does not follow" : undefined,
    }));
    const row = { number, key: index.keys[sample], shard: this.shards[shard].url, fields, sample, shard_number: shard };
    return { ...row, error: index.faults.get(sample) };
  }

  /** Fetch the first bytes of fields, of consecutive small samples with one request. */
  async #addHeads(rows, signal) {
    const members = rows.flatMap((row) => row.fields.filter((field) => !field.error && !["image", "audio", "video"].includes(kindOf(field.name)))
      .map((field) => ({ row, field })));
    const groups = [];
    for (const each of members) {
      const group = groups.at(-1);
      const end = each.field.offset + Math.min(each.field.size, HEAD);
      if (group && group.shard === each.row.shard_number && end - group.begin <= TOGETHER && end > group.end) {
        group.end = end;
        group.members.push(each);
      } else {
        groups.push({ shard: each.row.shard_number, begin: each.field.offset - 512, end, members: [each] });
      }
    }
    await Promise.all(groups.map(async ({ shard, begin, end, members: some }) => {
      try {
        const bytes = await this.#range(shard, begin, end, signal);
        for (const { row, field } of some) {
          const at = field.offset - begin;
          try {
            checkHeader(bytes.subarray(at - 512, at), row.key, field);
            field.head = btoa(String.fromCharCode(...bytes.subarray(at, at + Math.min(field.size, HEAD))));
          } catch (error) {
            field.error = error.message;
          }
        }
      } catch (error) {
        if (error.name === "AbortError") throw error;
        for (const { field } of some) field.error = error.message;
      }
    }));
  }

  /** Return the fields of the first shard that has samples, and no columns. */
  async names() {
    const shard = this.shards.findIndex(({ samples }) => samples);
    return { fields: shard < 0 ? [] : (await this.index(shard)).fields, columns: [] };
  }

  async sample(number) {
    return { ...(await this.#row(number)), total: this.total };
  }

  async find(key) {
    for (let shard = 0; shard < this.shards.length; shard += 1) {
      const sample = (await this.index(shard)).keys.indexOf(key);
      if (sample >= 0) return [this.begins[shard] + sample];
    }
    return [];
  }

  // Fields.

  async bytes(sample, field, begin, end) {
    const size = Math.min(end, field.size);
    const first = begin ? begin : -512;
    const bytes = await this.#range(sample.shard_number, field.offset + first, field.offset + size);
    if (begin) return bytes;
    checkHeader(bytes.subarray(0, 512), sample.key, field);
    return bytes.slice(512);
  }

  async pictureUrl(sample, field) {
    return this.#url(sample, field, checkPixels);
  }

  /** Return the address of sound or video, which is fetched whole; for a card only if it is small. */
  async mediaUrl(sample, field, isForCard = false) {
    if (isForCard && field.size > SMALL) throw new Error(`more than ${inBytes(SMALL)}`);
    return this.#url(sample, field, () => {});
  }

  async download(sample, field, name) {
    save(name, [await this.bytes(sample, field, 0, field.size)], "application/octet-stream");
  }

  async #url(sample, field, check) {
    const name = `${sample.number} ${field.name}`;
    let url = this.urls.get(name);
    if (!url) {
      if (field.size > LARGEST) throw new Error("too large to be shown without a server: see tarview");
      const bytes = await this.bytes(sample, field, 0, field.size);
      check(bytes);
      url = URL.createObjectURL(new Blob([bytes], { type: typeOf(field.name) }));
    }
    this.urls.delete(name);
    this.urls.set(name, url);
    while (this.urls.size > URLS) {
      const [oldest, address] = this.urls.entries().next().value;
      this.urls.delete(oldest);
      URL.revokeObjectURL(address);
    }
    return url;
  }

  async failure() {
    return "the browser does not show it";
  }
}
