// Slices of a case: fetched in chunks around the slice that is shown, and kept up to a limit.
import { pixels } from "./api.js";

const KEPT_BYTES = 192 << 20;
const CHUNK_BYTES = 2 << 20;

export class Slices {
  // path: "image" or "labels/0"; plane: entry of `planes`; type: constructor of the pixels' array
  constructor(id, path, name, plane, type, store) {
    Object.assign(this, { id, path, name, plane, type, store });
    this.length = plane.width * plane.height;
    this.chunk = Math.max(1, Math.floor(CHUNK_BYTES / (this.length * type.BYTES_PER_ELEMENT)));
  }

  // Show the labels with the strokes of a correction: slice by slice, since each stroke changes them.
  drafted(on) {
    this.draft = on;
    this.chunk = on ? 1 : Math.max(1, Math.floor(CHUNK_BYTES / (this.length * this.type.BYTES_PER_ELEMENT)));
  }

  key(index) { return `${this.id}/${this.path}/${this.name}/${this.draft ? "draft" : "kept"}/${Math.floor(index / this.chunk)}`; }

  // The slice if it is here, else null.
  at(index) {
    const held = this.store.get(this.key(index));
    if (!held || !held.data) return null;
    const from = (index % this.chunk) * this.length;
    return held.data.subarray(from, from + this.length);
  }

  async fetch(index) {
    const first = Math.floor(index / this.chunk) * this.chunk;
    const last = Math.min(first + this.chunk, this.plane.count) - 1;
    const address = `/api/case/${encodeURIComponent(this.id)}/${this.path}/${this.name}/${first}-${last}${this.draft ? "?draft=1" : ""}`;
    await this.store.load(this.key(index), async () => new this.type(await pixels(address)));
    return this.at(index);
  }

  // Fetch the chunks before and after the one of a slice: further on than back.
  async around(index) {
    for (const near of [index + this.chunk, index - this.chunk, index + 2 * this.chunk, index - 2 * this.chunk]) {
      if (near >= 0 && near < this.plane.count && !this.store.has(this.key(near))) await this.fetch(near).catch(() => {});
    }
  }
}

export class Store {
  constructor() { this.kept = new Map(); this.bytes = 0; }

  has(key) { return this.kept.has(key); }

  get(key) {
    const held = this.kept.get(key);
    if (held) { this.kept.delete(key); this.kept.set(key, held); }  // used last
    return held;
  }

  async load(key, make) {
    const held = this.get(key);
    if (held) return held.ready;
    const entry = { data: null };
    const kept = () => this.kept.get(key) === entry;  // it may be forgotten while it comes
    entry.ready = make().then((data) => {
      entry.data = data;
      if (kept()) { this.bytes += data.byteLength; this.trim(key); }
      return data;
    }).catch((error) => { if (kept()) this.kept.delete(key); throw error; });
    this.kept.set(key, entry);
    return entry.ready;
  }

  trim(newest) {
    for (const [key, entry] of this.kept) {
      if (this.bytes <= KEPT_BYTES) return;
      if (key === newest || !entry.data) continue;
      this.kept.delete(key);
      this.bytes -= entry.data.byteLength;
    }
  }

  forget(prefix) {
    for (const [key, entry] of this.kept) {
      if (!key.startsWith(prefix)) continue;
      this.kept.delete(key);
      this.bytes -= entry.data ? entry.data.byteLength : 0;
    }
  }
}
