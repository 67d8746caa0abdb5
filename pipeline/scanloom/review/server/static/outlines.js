// Outlines of structures in pixels of the screen: as in the preview, each inside its structure, with a dark casing, and
// lighter where the tissue below is too dark for that.

const LINE = 2;
const CASING = 1;
const CONTRAST = 3.2;
const DARK = 0.15;
const LIGHTEST = 0.5;
const MAX_PIXELS = 4 << 20;
const BLACK = 0xff000000;

const linear = (byte) =>
  byte / 255 <= 0.04045 ? byte / 255 / 12.92 : ((byte / 255 + 0.055) / 1.055) ** 2.4;
const encoded = (share) =>
  Math.round(255 * (share <= 0.0031308 ? share * 12.92 : 1.055 * share ** (1 / 2.4) - 0.055));
const luminance = ([red, green, blue]) => 0.2126 * red + 0.7152 * green + 0.0722 * blue;

/**
 * Return a colour for each grey below it, as `lightened` of the preview.
 * @param {number[]} rgb
 * @returns {Uint32Array} Pixels of a canvas, by the grey.
 */
export function lightened(rgb) {
  return Uint32Array.from({ length: 256 }, (_, grey) => {
    const tissue = linear(grey);
    const needed = Math.min(
      CONTRAST * (tissue + 0.05) - 0.05,
      LIGHTEST - 2 * Math.max(tissue - DARK, 0),
    );
    let parts = rgb.map(linear);
    const brighter = Math.max(1, needed / Math.max(luminance(parts), 1e-3));
    const factor = Math.min(brighter, 1 / Math.max(...parts, 1e-3));
    parts = parts.map((part) => part * factor);
    const own = luminance(parts);
    const white = Math.min(1, Math.max(0, (needed - own) / Math.max(1 - own, 1e-3)));
    const [red, green, blue] = parts.map((part) => encoded(part + white * (1 - part)));
    return (BLACK | (blue << 16) | (green << 8) | red) >>> 0;
  });
}

/**
 * Where a slice lies on the canvas, in CSS pixels.
 * @typedef {{left: number, top: number, step: number[], width: number, height: number}} Place
 */

export class Outlines {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    /** Colours by the grey below, by the colour. @type {Map<number, Uint32Array>} */
    this.colours = new Map();
  }

  // Give the canvas the size of a room in CSS pixels.
  fit([width, height]) {
    const most = Math.sqrt(MAX_PIXELS / Math.max(1, width * height));
    this.scale = Math.min(window.devicePixelRatio || 1, most);
    const size = [width, height].map((n) => Math.max(1, Math.round(n * this.scale)));
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    if (this.picture?.width === size[0] && this.picture?.height === size[1]) return;
    [this.canvas.width, this.canvas.height] = size;
    this.picture = this.context.createImageData(...size);
    this.pixels = new Uint32Array(this.picture.data.buffer);
    this.labels = new Uint16Array(this.pixels.length);
    this.below = new Uint8Array(this.pixels.length);
  }

  /**
   * @param {{slice: ?(Uint8Array | Uint16Array), palette: Float32Array}[]} layers
   * @param {Uint8Array} grey Of each pixel of the slice.
   * @param {Place} place
   */
  draw(layers, grey, place) {
    if (!this.picture) return;
    const { width } = this.picture;
    this.pixels.fill(0);
    const columns = this.indices(width, place.left, place.step[0], place.width);
    const rows = this.indices(this.picture.height, place.top, place.step[1], place.height);
    const lines = layers
      .filter(({ slice }) => slice)
      .map((layer) => this.linesOf(layer, grey, columns, rows, place.width));
    // casings first: they must not cover the outline of another layer
    for (const { at } of lines) this.drawCasing(at);
    for (const { at, colours } of lines) {
      for (let n = 0; n < at.length; n++) this.pixels[at[n]] = colours[n];
    }
    this.context.putImageData(this.picture, 0, 0);
  }

  // The column or row of the slice at each pixel of the canvas; -1 outside.
  indices(count, low, step, size) {
    return Int32Array.from({ length: count }, (_, n) => {
      const index = Math.floor(((n + 0.5) / this.scale - low) / step);
      return index >= 0 && index < size ? index : -1;
    });
  }

  // The pixels of the outlines of a layer, and their colours.
  linesOf({ slice, palette }, grey, columns, rows, sliceWidth) {
    this.fill(slice, palette, grey, columns, rows, sliceWidth);
    const { labels, below } = this;
    const { width, height } = this.picture;
    const [nearX, nearY] = [columns, rows].map(nearBorders);
    const at = [];
    const colours = [];
    const tables = new Map();
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const n = y * width + x;
        const label = labels[n];
        if (!label || !(nearX[x] || nearY[y])) continue;
        if (!isEdge(labels, label, n, x, y, width, height)) continue;
        if (!tables.has(label)) tables.set(label, this.coloursOf(palette, label));
        at.push(n);
        colours.push(tables.get(label)[below[n]]);
      }
    }
    return { at, colours };
  }

  coloursOf(palette, label) {
    const rgb = Array.from(palette.subarray(4 * label, 4 * label + 3));
    const key = (rgb[0] << 16) | (rgb[1] << 8) | rgb[2];
    if (!this.colours.has(key)) this.colours.set(key, lightened(rgb));
    return this.colours.get(key);
  }

  // Fill in label and grey at each pixel of the canvas; structures that are not drawn are background.
  fill(slice, palette, grey, columns, rows, sliceWidth) {
    const { labels, below } = this;
    const width = columns.length;
    const isDrawn = (label) => 4 * label + 3 < palette.length && palette[4 * label + 3] > 0;
    const drawn = Uint16Array.from({ length: 1 + Math.floor(palette.length / 4) }, (_, label) =>
      isDrawn(label) ? label : 0,
    );
    for (let y = 0; y < rows.length; y++) {
      const first = y * width;
      if (y && rows[y] === rows[y - 1]) {
        labels.copyWithin(first, first - width, first);
        below.copyWithin(first, first - width, first);
        continue;
      }
      const row = rows[y] * sliceWidth;
      for (let x = 0; x < width; x++) {
        const isOutside = rows[y] < 0 || columns[x] < 0;
        labels[first + x] = isOutside ? 0 : (drawn[slice[row + columns[x]]] ?? 0);
        below[first + x] = isOutside ? 0 : grey[row + columns[x]];
      }
    }
  }

  drawCasing(at) {
    const { width, height } = this.picture;
    for (const n of at) {
      const x = n % width;
      const y = (n - x) / width;
      for (let row = Math.max(0, y - CASING); row <= Math.min(height - 1, y + CASING); row++) {
        const first = Math.max(0, x - CASING);
        this.pixels.fill(BLACK, row * width + first, row * width + Math.min(width, x + CASING + 1));
      }
    }
  }
}

// Whether another column or row is within the width of a line.
function nearBorders(indices) {
  return Uint8Array.from(indices, (index, n) =>
    [-LINE, -1, 1, LINE].some((by) => indices[n + by] !== undefined && indices[n + by] !== index)
      ? 1
      : 0,
  );
}

// Whether a pixel of a structure is within the width of a line of another one, or of none.
function isEdge(labels, label, n, x, y, width, height) {
  for (let by = LINE; by > 0; by--) {
    if (x >= by && labels[n - by] !== label) return true;
    if (x + by < width && labels[n + by] !== label) return true;
    if (y >= by && labels[n - by * width] !== label) return true;
    if (y + by < height && labels[n + by * width] !== label) return true;
  }
  return false;
}
