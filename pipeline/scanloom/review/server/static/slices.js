// Slices of a case: fetched in chunks around the slice that is shown, and kept up to a limit.
import { pixels, resultOf } from "./api.js";

const KEPT_BYTES = 192 << 20;
const CHUNK_BYTES = 2 << 20;

/** Slices of the scan or of a label map in a plane. */
export class Slices {
  /**
   * @param {Case} about
   * @param {string} path "image", or "labels/0" of the first label map.
   * @param {string} name Name of the plane.
   * @param {Int16ArrayConstructor | Uint8ArrayConstructor | Uint16ArrayConstructor} type
   * @param {Store} store
   */
  constructor(about, path, name, type, store) {
    const plane = about.planes[name];
    Object.assign(this, { about, path, name, plane, type, store });
    this.length = plane.width * plane.height;
    this.setDraft(false);
  }

  // Show the labels with the strokes of a correction: slice by slice, since each stroke changes them.
  setDraft(isDraft) {
    const bytes = this.length * this.type.BYTES_PER_ELEMENT;
    this.isDraft = isDraft;
    this.chunk = isDraft ? 1 : Math.max(1, Math.floor(CHUNK_BYTES / bytes));
  }

  key(index) {
    const state = this.isDraft ? "draft" : "kept";
    return `${this.about.id}/${this.path}/${this.name}/${state}/${Math.floor(index / this.chunk)}`;
  }

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
    const slices = `${this.path}/${this.name}/${first}-${last}`;
    const address = resultOf(this.about, slices, this.isDraft);
    await this.store.load(this.key(index), async () => new this.type(await pixels(address)));
    return this.at(index);
  }

  // Fetch the chunks before and after the one of a slice: further on than back.
  async around(index) {
    for (const step of [1, -1, 2, -2]) {
      const near = index + step * this.chunk;
      if (near >= 0 && near < this.plane.count && !this.store.has(this.key(near)))
        await this.fetch(near).catch(() => {});
    }
  }
}

/** Chunks of slices by their key, in the order of their last use. */
export class Store {
  constructor() {
    this.kept = new Map();
    this.bytes = 0;
  }

  has(key) {
    return this.kept.has(key);
  }

  get(key) {
    const held = this.kept.get(key);
    if (held) {
      this.kept.delete(key);
      this.kept.set(key, held);
    } // used last
    return held;
  }

  async load(key, make) {
    const held = this.get(key);
    if (held) return held.ready;
    const entry = { data: null };
    entry.ready = this.fill(key, entry, make);
    this.kept.set(key, entry);
    return entry.ready;
  }

  async fill(key, entry, make) {
    const isKept = () => this.kept.get(key) === entry; // it may be forgotten while it comes
    try {
      entry.data = await make();
    } catch (error) {
      if (isKept()) this.kept.delete(key);
      throw error;
    }
    if (isKept()) {
      this.bytes += entry.data.byteLength;
      this.trim(key);
    }
    return entry.data;
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
