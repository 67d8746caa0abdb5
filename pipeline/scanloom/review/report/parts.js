// Parts of the report: in the page if it is small, else in files beside it, loaded as scripts when they are needed.

const MAX_PARTS = 100; // with rows, which are kept

const withEnds = (text, count) => {
  const ends = new Uint32Array(count).fill(text.length);
  for (let n = 0, at = -1; n < count - 1; n += 1) {
    at = text.indexOf("\n", at + 1);
    ends[n] = at;
  }
  return { text, ends };
};

export class Parts {
  /**
   * @param {?Object<string, *>} known The parts, by name, if they are in the page.
   * @param {string} folder Address of the folder with their files.
   */
  constructor(known, folder) {
    this.known = known;
    this.folder = folder;
    /** @type {Map<string, Promise>} */
    this.loaded = new Map();
    this.arrived = new Map();
    // what each file calls
    globalThis.reportPart = (name, content) => this.arrived.set(name, content);
  }

  /**
   * @param {string} name
   * @returns {Promise<*>} Content of a part.
   */
  get(name) {
    if (this.known) return Promise.resolve(this.known[name]);
    const before = this.loaded.get(name);
    const part = before ?? this.load(name);
    this.loaded.delete(name);
    this.loaded.set(name, part); // the last one that is let go of
    if (!before) this.letGo();
    return part;
  }

  load(name) {
    return new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = `${this.folder}${name}.js`;
      script.addEventListener("load", () => {
        script.remove();
        done(this.arrived.get(name));
        this.arrived.delete(name);
      });
      script.addEventListener("error", () => {
        script.remove();
        this.loaded.delete(name);
        failed(new Error(`no part ${name}`));
      });
      document.head.append(script);
    });
  }

  letGo() {
    const rows = [...this.loaded.keys()].filter((name) => name.startsWith("rows-"));
    for (const name of rows.slice(0, Math.max(0, rows.length - MAX_PARTS))) {
      this.loaded.delete(name);
    }
  }
}

/**
 * @param {string} text
 * @returns {ArrayBuffer}
 */
function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let n = 0; n < binary.length; n += 1) bytes[n] = binary.charCodeAt(n);
  return bytes.buffer;
}

/**
 * @param {string} text
 * @returns {number} CRC-32 of its UTF-8.
 */
function crc32(text) {
  let sum = ~0;
  for (const byte of new TextEncoder().encode(text)) {
    sum ^= byte;
    for (let bit = 0; bit < 8; bit += 1) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
}

const PLACES = 2 ** 21; // rows up to which 32 bits of their value fit beside their place into a number

/** Search, filters and orders of all rows, by the columns that they need. A row's place is that of the review order. */
export class Index {
  /**
   * @param {Parts} parts
   * @param {{count: number, structures: string[], values: Object<string, Array>, sizes: {rows: number, words: number}}} data
   */
  constructor(parts, { count, structures, values, sizes }) {
    this.parts = parts;
    this.count = count;
    this.structures = structures;
    this.values = values;
    this.sizes = sizes;
    /** Decoded columns, by the names of their parts. @type {Map<string, Promise>} */
    this.columns = new Map();
  }

  /** Return the record of a row. */
  async row(place) {
    const part = await this.parts.get(`rows-${Math.floor(place / this.sizes.rows)}`);
    const record = part[place % this.sizes.rows];
    record.place = place;
    return record;
  }

  /** Return the record of a case; null if there is none. */
  async find(id) {
    const hashes = await this.numbers("hash-id", Uint32Array);
    const wanted = crc32(id);
    for (let at = hashes.indexOf(wanted); at >= 0; at = hashes.indexOf(wanted, at + 1)) {
      const record = await this.row(at);
      if (record.id === id) return record;
    }
    return null;
  }

  column(name, decode) {
    if (!this.columns.has(name)) {
      const column = this.parts.get(name).then(decode);
      column.catch(() => this.columns.delete(name));
      this.columns.set(name, column);
    }
    return this.columns.get(name);
  }

  numbers(name, Kind) {
    return this.column(name, (text) => new Kind(bytesOf(text)));
  }

  codes(field) {
    const most = this.values[field].length;
    const Kind = most <= 0xff ? Uint8Array : most <= 0xffff ? Uint16Array : Uint32Array;
    return this.numbers(`codes-${field}`, Kind);
  }

  // Words of all rows: one text a part, with the end of each row in it.
  words() {
    const { words: most } = this.sizes;
    const count = Math.ceil(this.count / most);
    return Promise.all(
      Array.from({ length: count }, (_, n) => {
        const rows = Math.min(most, this.count - n * most);
        return this.column(`words-${n}`, (text) => withEnds(text, rows));
      }),
    );
  }

  /**
   * Return the places of the rows that have all terms and fulfil all conditions, ascending.
   * @param {string[]} terms Lower case.
   * @param {Object<string, (value: *) => boolean>} conditions By field.
   * @returns {Promise<Uint32Array>}
   */
  async select(terms, conditions) {
    const left = new Uint8Array(this.count).fill(1);
    for (const [field, isRight] of Object.entries(conditions)) {
      const [codes, right] = [await this.codes(field), this.values[field].map(isRight)];
      for (let n = 0; n < left.length; n += 1) if (!right[codes[n]]) left[n] = 0;
    }
    for (const term of terms) {
      const has = await this.having(term);
      for (let n = 0; n < left.length; n += 1) left[n] &= has[n];
    }
    let count = 0;
    for (const each of left) count += each;
    const places = new Uint32Array(count);
    for (let n = 0, at = 0; n < left.length; n += 1) if (left[n]) places[at++] = n;
    return places;
  }

  // Mark the rows with a term: in their own words, in a field that many share, or in the name of a structure.
  async having(term) {
    const has = new Uint8Array(this.count);
    const parts = await this.words();
    parts.forEach(({ text, ends }, n) => {
      const first = n * this.sizes.words;
      let row = 0;
      for (let at = text.indexOf(term); at >= 0; at = text.indexOf(term, ends[row])) {
        while (ends[row] < at) row += 1;
        has[first + row] = 1;
      }
    });
    for (const field of ["status", "verdict", "reason"]) {
      const right = this.values[field].map((value) => value.toLowerCase().includes(term));
      if (!right.includes(true)) continue;
      const codes = await this.codes(field);
      for (let n = 0; n < has.length; n += 1) if (right[codes[n]]) has[n] = 1;
    }
    for (const [n, name] of this.structures.entries()) {
      if (!name.toLowerCase().includes(term)) continue;
      const bits = await this.numbers(`has-${n}`, Uint8Array);
      for (let k = 0; k < has.length; k += 1) has[k] |= (bits[k >> 3] >> (k & 7)) & 1;
    }
    return has;
  }

  /**
   * Return places in an order; of equal values those first that are to be reviewed first.
   * @param {Uint32Array} places Ascending.
   * @param {string} key Column, "id" or "volume".
   * @param {boolean} isAscending
   * @param {string} structure Number of the structure whose volume counts.
   * @returns {Promise<Uint32Array>}
   */
  async ordered(places, key, isAscending, structure) {
    if (key === "risk" && !isAscending) return places;
    if (key === "id") {
      const chosen = new Uint8Array(this.count);
      for (const place of places) chosen[place] = 1;
      const sorted = (await this.numbers("order-id", Uint32Array)).filter((place) => chosen[place]);
      return isAscending ? sorted : sorted.reverse();
    }
    const ranks = await this.ranks(key, structure);
    // value and place in one number, which sorts many times faster than by a function
    const room = Math.max(PLACES, 2 ** Math.ceil(Math.log2(this.count)));
    const packed = Float64Array.from(places, (place) => {
      const rank = isAscending ? ranks[place] : 0xffffffff - ranks[place];
      return Math.floor((rank * PLACES) / room) * room + place;
    }).sort();
    return Uint32Array.from(packed, (value) => value % room);
  }

  // Whole numbers in the order of the values.
  async ranks(key, structure) {
    if (key in this.values) return this.codes(key);
    const name = key === "volume" ? `volume-${structure}` : key;
    const values = await this.numbers(`values-${name}`, Float32Array);
    const signs = 0x80000000;
    // the bits of a float32 rise with its value; those of a negative one fall
    return new Uint32Array(values.buffer).map((bits) => (bits < signs ? bits + signs : ~bits));
  }
}
