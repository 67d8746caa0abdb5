// One plane on a canvas of the slice's own pixels, which the style sheet scales to its proportions, and one of the
// screen's pixels for outlines.
import { Outlines } from "./outlines.js";

const BODY_MARGIN_MM = 5;
const MAX_ZOOM = 16;

/**
 * Return the grey of each int16 pixel, as of `GrayWindow.gray`: 0 to 255, rounded.
 * @param {GrayWindow} window
 * @param {number[]} scale Slope and intercept.
 * @returns {Uint8Array} By the pixel as uint16.
 */
export function greys(window, [slope, intercept]) {
  const table = new Uint8Array(65536);
  for (let pixel = -32768; pixel < 32768; pixel++) {
    const value = Math.min(Math.max(slope * pixel + intercept, window.low), window.high);
    const grey = Math.floor(((value - window.low) / (window.high - window.low)) * 255 + 0.5);
    table[pixel & 0xffff] = window.inverted ? 255 - grey : grey;
  }
  return table;
}

/**
 * Return red, green, blue and opacity (0 to 1) of each label, for each layer.
 * @param {Layer[]} layers
 * @param {Set<string>} off Structures that are not drawn.
 * @param {number} opacity
 * @returns {Float32Array[]}
 */
export function colours(layers, off, opacity) {
  return layers.map((layer) => {
    const highest = Math.max(0, ...layer.labels.map((label) => label.value));
    const table = new Float32Array(4 * (highest + 1));
    for (const label of layer.labels) {
      const rgb = parseInt(label.color.slice(1), 16);
      const alpha = off.has(`${layer.index}:${label.value}`) ? 0 : opacity;
      table.set([rgb >> 16, (rgb >> 8) & 255, rgb & 255, alpha], 4 * label.value);
    }
    return table;
  });
}

// Paint a slice: pixels in grey, and unless outlines are drawn, labels over them.
function paint(out, greyPixels, labels, palettes) {
  for (let n = 0; n < out.length; n += 4) {
    out[n] = out[n + 1] = out[n + 2] = greyPixels[n >> 2];
    out[n + 3] = 255;
  }
  labels.forEach((slice, layer) => {
    if (!slice) return;
    const palette = palettes[layer];
    for (let n = 0; n < slice.length; n++) {
      const label = slice[n];
      if (!label || 4 * label + 3 >= palette.length) continue;
      const opacity = palette[4 * label + 3];
      if (!opacity) continue;
      for (let c = 0; c < 3; c++) {
        out[4 * n + c] = Math.round(
          out[4 * n + c] * (1 - opacity) + palette[4 * label + c] * opacity,
        );
      }
    }
  });
}

export class Plane {
  /**
   * @param {HTMLElement} figure
   * @param {PlaneDescription} about
   * @param {?number[][]} body Lowest and highest index of the body's box in the view.
   */
  constructor(figure, about, body) {
    this.figure = figure;
    this.about = about;
    this.body = body;
    this.zoom = 1;
    this.isHome = true; // until someone zooms or pans
    this.pan = [0, 0]; // from the middle of the figure, in CSS pixels
    this.canvas = figure.querySelector("canvas");
    this.outlines = new Outlines(figure.querySelector(".over"));
    this.canvas.width = about.width;
    this.canvas.height = about.height;
    this.context = this.canvas.getContext("2d", { alpha: false, willReadFrequently: true });
    this.picture = this.context.createImageData(about.width, about.height);
    this.caption = figure.querySelector("figcaption");
    this.lines = [...figure.querySelectorAll(".line")];
    for (const [side, letter] of Object.entries(about.letters)) {
      figure.querySelector(`.letter.${side}`).textContent = letter;
    }
    this.greyPixels = new Uint8Array(about.width * about.height);
    this.outlined = [];
    /** Both ends of the ruler in pixels of the slice. @type {?number[][]} */
    this.ruler = null;
    new ResizeObserver(() => (this.isHome ? this.home() : this.place())).observe(figure);
  }

  draw(image, table, labels, palettes, isOutlined) {
    const grey = this.greyPixels;
    for (let n = 0; n < grey.length; n++) grey[n] = image ? table[image[n] & 0xffff] : 0;
    paint(this.picture.data, grey, isOutlined ? [] : labels, palettes);
    this.context.putImageData(this.picture, 0, 0);
    this.outlined = isOutlined ? labels.map((slice, n) => ({ slice, palette: palettes[n] })) : [];
    this.drawOutlines();
  }

  drawOutlines() {
    if (!this.step) return;
    const { left, top, step, greyPixels } = this;
    const { width, height } = this.about;
    this.outlines.draw(this.outlined, greyPixels, { left, top, step, width, height });
  }

  // Show the body in the middle, as large as the figure allows; without one, the whole slice.
  home() {
    this.zoom = 1;
    this.pan = [0, 0];
    this.isHome = true;
    const { room, size } = this.measure();
    if (!this.body || !(size[0] > 1)) {
      this.place();
      return;
    }
    const pixels = [this.about.width, this.about.height];
    const ends = [this.about.across, this.about.down].map((axis, n) =>
      this.body.map((corner, end) => {
        const margin = ((end ? 1 : -1) * BODY_MARGIN_MM) / this.about.pixel_mm[n];
        return Math.min(pixels[n], Math.max(0, corner[axis] + 0.5 + margin)) / pixels[n];
      }),
    );
    const zooms = ends.map(([low, high], n) => room[n] / Math.max(1, (high - low) * size[n]));
    this.zoom = Math.min(MAX_ZOOM, Math.max(1, Math.min(...zooms)));
    this.pan = ends.map(([low, high], n) => (0.5 - (low + high) / 2) * size[n] * this.zoom);
    this.place();
  }

  // The room for the picture, and the picture's size in it, with square millimetres, in CSS pixels.
  measure() {
    const box = this.figure.getBoundingClientRect();
    const room = [box.width, box.height - this.caption.offsetHeight];
    const mm = [
      this.about.width * this.about.pixel_mm[0],
      this.about.height * this.about.pixel_mm[1],
    ];
    const scale = Math.min(room[0] / mm[0], room[1] / mm[1]) * this.zoom;
    return { room, size: mm.map((length) => Math.max(1, length * scale)) };
  }

  // Fit the canvas into its figure, then zoom and pan.
  place() {
    const {
      room,
      size: [width, height],
    } = this.measure();
    this.pan = [width, height].map((length, axis) => {
      const most = Math.abs(length - room[axis]) / 2;
      return Math.min(most, Math.max(-most, this.pan[axis]));
    });
    this.left = (room[0] - width) / 2 + this.pan[0];
    this.top = (room[1] - height) / 2 + this.pan[1];
    const box = { width, height, left: this.left, top: this.top };
    for (const [key, value] of Object.entries(box)) this.canvas.style[key] = `${value}px`;
    this.step = [width / this.about.width, height / this.about.height];
    this.outlines.fit(room);
    this.drawOutlines();
    this.drawCross();
    this.drawRuler();
  }

  // Where the crosshair is, in CSS pixels of the figure.
  crossing() {
    const corner = [this.left, this.top];
    return this.at.map((n, axis) => (n + 0.5) * this.step[axis] + corner[axis]);
  }

  // Put the crosshair on a pixel, and bring it into view.
  cross(at) {
    this.at = at;
    if (!this.step) return;
    const { room } = this.measure();
    const isOutside = (n, axis) => n < 0 || n > room[axis];
    const crossing = this.crossing();
    if (!crossing.some(isOutside)) {
      this.drawCross();
      return;
    }
    const moves = crossing.map((n, axis) => (isOutside(n, axis) ? room[axis] / 2 - n : 0));
    this.isHome = false;
    this.pan = this.pan.map((n, axis) => n + moves[axis]);
    this.place();
  }

  drawCross() {
    if (!this.at) return;
    const [x, y] = this.crossing();
    Object.assign(this.lines[0].style, { left: `${x}px`, top: "0", width: "1px", height: "100%" });
    Object.assign(this.lines[1].style, { left: "0", top: `${y}px`, width: "100%", height: "1px" });
  }

  // The place under a pointer in pixels of the slice, from its corner.
  under(event) {
    const box = this.figure.getBoundingClientRect();
    const at = [event.clientX - box.left - this.left, event.clientY - box.top - this.top];
    return at.map((n, axis) => n / this.step[axis]);
  }

  // The pixel under a pointer, clipped to the slice.
  pixel(event) {
    const size = [this.about.width, this.about.height];
    return this.under(event).map((n, axis) => Math.min(size[axis] - 1, Math.max(0, Math.floor(n))));
  }

  // The place under a pointer in pixels of the slice, between the centres of which it may lie.
  point(event) {
    return this.under(event).map((n) => Number((n - 0.5).toFixed(2)));
  }

  // Draw a line between two points, or none; return its length in mm.
  setRuler(ends) {
    this.ruler = ends;
    this.drawRuler();
    return ends ? Math.hypot(...this.along(this.about.pixel_mm)) : 0;
  }

  // From the first end of the ruler to the other, in units of which a pixel has some.
  along(units) {
    const [from, to] = this.ruler;
    return to.map((n, axis) => (n - from[axis]) * units[axis]);
  }

  drawRuler() {
    const line = this.figure.querySelector(".ruler");
    line.hidden = !this.ruler;
    if (!this.ruler) return;
    const [x, y] = this.along(this.step);
    const corner = [this.left, this.top];
    const [left, top] = this.ruler[0].map((n, axis) => (n + 0.5) * this.step[axis] + corner[axis]);
    Object.assign(line.style, {
      left: `${left}px`,
      top: `${top}px`,
      width: `${Math.hypot(x, y)}px`,
      transform: `rotate(${Math.atan2(y, x)}rad)`,
    });
  }

  // Zoom, and keep the place under a point of the figure: the crosshair if none is given.
  setZoom(zoom, anchor = this.crossing()) {
    const before = this.measure().size;
    const corner = [this.left, this.top];
    const share = anchor.map((n, axis) => (n - corner[axis]) / before[axis]);
    this.isHome = false;
    this.zoom = Math.min(MAX_ZOOM, Math.max(1, zoom));
    const { room, size } = this.measure();
    this.pan = size.map((length, axis) =>
      this.zoom === 1 ? 0 : anchor[axis] - share[axis] * length - (room[axis] - length) / 2,
    );
    this.place();
  }
}
