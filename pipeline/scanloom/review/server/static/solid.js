// The structures from any side: points of their surfaces on a canvas, each with the light that its slope reflects.
import { pixels, resultOf } from "./api.js";
import { byId, press } from "./dom.js";

/** Sides by azimuth and elevation in degrees: 0, 0 is from the front, 90, 0 from the left. */
const SIDES = {
  front: [0, 0],
  back: [180, 0],
  left: [90, 0],
  right: [270, 0],
  top: [180, 90],
  feet: [0, -90],
};
const KEY_DEGREES = 15;
const DRAG_DEGREES = 0.5;
const CLICK_PIXELS = 4;
const MAX_PIXELS = 640;
const MAX_ZOOM = 8;
const MARGIN = 1.05;
const PARTS = 8; // of a voxel: units of the places of points
const POINT_BYTES = 11;
const OVERLAP = 1.6; // side of a point, in cells: those of a surface at any angle leave no gap
const LIGHT = [-0.4, 0.5, 0.77]; // from the upper left, before the structures: to the right, up, to the viewer
const [AMBIENT, DIFFUSE, FADING] = [0.32, 0.75, 0.35]; // as in the preview
const LETTER_FROM = 0.38; // sine of 22.5 degrees: a direction nearer to another axis lacks the letter
const LETTERS = ["RL", "AP", "IS"]; // of LPS axes, at the low and at the high end
const CROSS = "#ffd54a";
const BLACK = 0xff000000;

const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const opposite = (direction) => direction.map((n) => -n);

/**
 * Return LPS directions of the picture: to its right, up, and to the viewer.
 * @param {number} azimuth
 * @param {number} elevation
 */
export function directions(azimuth, elevation) {
  const [a, e] = [azimuth, elevation].map((degrees) => (degrees * Math.PI) / 180);
  const [sin, cos, rise, flat] = [Math.sin(a), Math.cos(a), Math.sin(e), Math.cos(e)];
  return {
    right: [cos, sin, 0],
    up: [-sin * rise, cos * rise, flat],
    viewer: [sin * flat, -cos * flat, rise],
  };
}

// The letters of an LPS direction, the nearest axis first, as of DICOM's PatientOrientation.
function lettersOf(direction) {
  return direction
    .map((n, axis) => [Math.abs(n), LETTERS[axis][n > 0 ? 1 : 0]])
    .filter(([n]) => n >= LETTER_FROM)
    .sort(([a], [b]) => b - a)
    .map(([, letter]) => letter)
    .join("");
}

/**
 * Points of the surfaces of all label maps of a case.
 * @typedef {object} Points
 * @property {number} count
 * @property {number} cell Distance of points, mm.
 * @property {Float32Array} at Places, LPS mm.
 * @property {Float32Array} slopes Directions out of the structures, LPS.
 * @property {Uint16Array} voxels Indices in the view.
 * @property {Uint16Array} kinds Number of each point's structure in `structures`.
 * @property {Set<number>} found All of these numbers.
 */

/**
 * Put the points of label maps together, as the server sends them.
 * @param {ArrayBuffer[]} answers
 * @param {Case} about
 * @param {{layer: number, value: number}[]} structures
 * @returns {Points}
 */
function pointsOf(answers, about, structures) {
  const counts = answers.map((each) => Math.max(0, (each.byteLength - 4) / POINT_BYTES));
  const count = counts.reduce((sum, n) => sum + n, 0);
  const [at, slopes, voxels] = [Float32Array, Float32Array, Uint16Array].map(
    (type) => new type(3 * count),
  );
  const kinds = new Uint16Array(count);
  let [first, cell] = [0, 0];
  for (const [layer, answer] of answers.entries()) {
    const here = counts[layer];
    if (!here) continue;
    cell = Math.max(cell, new Float32Array(answer, 0, 1)[0]);
    const places = new Uint16Array(answer, 4, 3 * here);
    const labels = new Uint16Array(answer, 4 + 6 * here, here);
    const sent = new Int8Array(answer, 4 + 8 * here, 3 * here);
    const kindOf = new Map();
    for (const [kind, each] of structures.entries()) {
      if (each.layer === layer) kindOf.set(each.value, kind);
    }
    for (let n = 0; n < here; n++) kinds[first + n] = kindOf.get(labels[n]) ?? structures.length;
    for (let n = 0; n < 3 * here; n++) voxels[3 * first + n] = Math.floor(places[n] / PARTS);
    for (let row = 0; row < 3; row++) {
      const [a, b, c, shift] = about.affine[row];
      const [u, v, w] = [a, b, c].map((n, axis) => n / about.spacing[axis] / 127);
      for (let n = 0; n < 3 * here; n += 3) {
        const place = a * places[n] + b * places[n + 1] + c * places[n + 2];
        at[3 * first + n + row] = place / PARTS - (a + b + c) / 2 + shift;
        slopes[3 * first + n + row] = u * sent[n] + v * sent[n + 1] + w * sent[n + 2];
      }
    }
    first += here;
  }
  return { count, cell, at, slopes, voxels, kinds, found: new Set(kinds) };
}

export class Solid {
  /**
   * @param {Viewer} viewer
   * @param {(error: Error) => void} failed
   */
  constructor(viewer, failed) {
    this.viewer = viewer;
    this.failed = failed;
    this.figure = byId("solid");
    this.canvas = this.figure.querySelector("canvas");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.on = false;
    [this.azimuth, this.elevation] = SIDES.front;
    this.zoom = 1;
    this.structures = [];
    /** @type {?Points} */
    this.points = null;
    /** Middle of what is drawn, LPS mm, and its radius; it stays while the case is shown. */
    this.fitted = null;
    this.wanted = null;
    this.isLoading = false;
    byId("turn").addEventListener("click", () => this.toggle());
    this.listen();
  }

  listen() {
    const { figure } = this;
    for (const button of figure.querySelectorAll("[data-side]")) {
      button.addEventListener("click", () => this.turn(...SIDES[button.dataset.side]));
    }
    figure.querySelector(".enlarge").addEventListener("click", () => this.enlarge());
    figure.addEventListener("keydown", (event) => this.key(event));
    figure.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    figure.addEventListener("pointerdown", (event) => this.press(event));
    figure.addEventListener("pointermove", (event) => this.drag(event));
    figure.addEventListener("pointerup", (event) => this.release(event));
    figure.addEventListener("pointercancel", () => (this.held = null));
    new ResizeObserver(() => this.redraw()).observe(figure);
  }

  toggle() {
    this.on = !this.on;
    press(byId("turn"), this.on);
    this.figure.hidden = !this.on;
    if (this.on) {
      this.enlarge();
      this.load();
    } else this.viewer.enlarge(this.viewer.active);
  }

  // Show it in the large field.
  enlarge() {
    if (!this.on) this.toggle();
    this.viewer.enlarge("solid");
    this.figure.focus({ preventScroll: true });
  }

  // Points

  // Another case is shown: it is drawn when it is asked for.
  show(about) {
    this.points = this.fitted = null;
    delete this.figure.dataset.drawn;
    this.structures = about.layers.flatMap((layer) =>
      layer.labels.map(({ value, color, name, hull }) => {
        const rgb = parseInt(color.slice(1), 16);
        const parts = [rgb >> 16, (rgb >> 8) & 255, rgb & 255];
        return { layer: layer.index, value, name, hull, parts };
      }),
    );
    this.redraw();
  }

  // Fetch the points, if they are shown: with the strokes of a correction, or without.
  async load(isDraft = this.isDraft) {
    this.isDraft = isDraft;
    const { about } = this.viewer;
    if (!this.on || !about) return;
    this.wanted = about;
    if (this.isLoading) return;
    this.isLoading = true;
    while (this.wanted) {
      const wanted = this.wanted;
      this.wanted = null;
      await this.fetch(wanted).catch((error) => this.failed(error));
    }
    this.isLoading = false;
  }

  async fetch(about) {
    this.say("3-D ...");
    const answers = [];
    for (const { index } of about.layers) {
      answers.push(await pixels(resultOf(about, `surface/${index}`, this.isDraft)));
    }
    if (this.viewer.about !== about) return;
    this.points = pointsOf(answers, about, this.structures);
    this.figure.dataset.drawn = about.id;
    this.redraw();
  }

  // Whether each structure is drawn. Those that would hide all others are drawn if no other one is.
  shown() {
    const { off } = this.viewer.structures;
    const isTicked = ({ layer, value }) => !off.has(`${layer}:${value}`);
    const { found } = this.points;
    const isOther = (each, n) => isTicked(each) && !each.hull && found.has(n);
    const withHulls = !this.structures.some(isOther);
    return {
      drawn: this.structures.map((each) => isTicked(each) && (withHulls || !each.hull)),
      without: withHulls
        ? []
        : this.structures.filter((each) => each.hull && isTicked(each)).map(({ name }) => name),
    };
  }

  // The middle and the radius of the points that are drawn.
  fit(drawn) {
    const { count, at, kinds } = this.points;
    const low = [Infinity, Infinity, Infinity];
    const high = low.map((n) => -n);
    for (let n = 0; n < count; n++) {
      if (!drawn[kinds[n]]) continue;
      for (let axis = 0; axis < 3; axis++) {
        low[axis] = Math.min(low[axis], at[3 * n + axis]);
        high[axis] = Math.max(high[axis], at[3 * n + axis]);
      }
    }
    const middle = low.map((n, axis) => (n + high[axis]) / 2);
    let radius = 0;
    for (let n = 0; n < count; n++) {
      if (!drawn[kinds[n]]) continue;
      let away = 0;
      for (let axis = 0; axis < 3; axis++) away += (at[3 * n + axis] - middle[axis]) ** 2;
      radius = Math.max(radius, away);
    }
    return { middle, radius: Math.sqrt(radius) + this.points.cell };
  }

  // Drawing

  redraw() {
    if (!this.on) return;
    this.resize();
    this.pixels.fill(BLACK);
    this.hits.fill(-1);
    this.axes = directions(this.azimuth, this.elevation);
    this.scale = 0;
    let more = this.points ? ", nothing to show" : " ...";
    if (this.points) {
      const { drawn, without } = this.shown();
      if (drawn.some((isDrawn, kind) => isDrawn && this.points.found.has(kind))) {
        this.fitted ??= this.fit(drawn);
        this.scale = (Math.min(...this.size) * this.zoom) / (2 * MARGIN * this.fitted.radius);
        this.paint(drawn);
        more = without.length ? `, without ${without.join(", ")}` : "";
      }
    }
    this.say(`From ${lettersOf(this.axes.viewer)}${more}`);
    const { right, up } = this.axes;
    const ends = { left: opposite(right), right, top: up, bottom: opposite(up) };
    for (const [side, direction] of Object.entries(ends)) {
      this.figure.querySelector(`.letter.${side}`).textContent = lettersOf(direction);
    }
    this.cross();
  }

  // Give the canvas the size of the figure without its caption.
  resize() {
    const box = this.figure.getBoundingClientRect();
    const caption = this.figure.querySelector("figcaption").offsetHeight;
    this.room = [box.width, box.height - caption].map((n) => Math.max(1, n));
    const ratio = window.devicePixelRatio || 1;
    const share = Math.min(ratio, MAX_PIXELS / Math.max(...this.room));
    this.size = this.room.map((n) => Math.max(1, Math.round(n * share)));
    Object.assign(this.canvas.style, { width: `${this.room[0]}px`, height: `${this.room[1]}px` });
    const [width, height] = this.size;
    if (this.picture?.width === width && this.picture?.height === height) return;
    this.canvas.width = width;
    this.canvas.height = height;
    this.picture = this.context.createImageData(width, height);
    this.pixels = new Uint32Array(this.picture.data.buffer);
    this.hits = new Int32Array(width * height);
    this.depths = new Float32Array(width * height);
  }

  // Paint each point that faces the viewer, where none is nearer.
  paint(drawn) {
    const { count, cell, at, slopes, kinds } = this.points;
    const { pixels: painted, hits, depths, scale } = this;
    const { right, up, viewer } = this.axes;
    const { middle, radius } = this.fitted;
    const [width, height] = this.size;
    const colours = this.structures.map(({ parts }) => parts);
    const side = Math.max(1, Math.ceil(cell * scale * OVERLAP));
    const light = [0, 1, 2].map(
      (axis) => LIGHT[0] * right[axis] + LIGHT[1] * up[axis] + LIGHT[2] * viewer[axis],
    );
    const left = width / 2 - scale * dot(middle, right) - side / 2;
    const top = height / 2 + scale * dot(middle, up) - side / 2;
    const back = dot(middle, viewer);
    depths.fill(-Infinity);
    // no destructuring in this loop: it would take several times longer
    for (let n = 0; n < count; n++) {
      const kind = kinds[n];
      if (!drawn[kind]) continue;
      const m = 3 * n;
      const a = slopes[m];
      const b = slopes[m + 1];
      const c = slopes[m + 2];
      if (a * viewer[0] + b * viewer[1] + c * viewer[2] < -0.2) continue; // on the far side
      const x = at[m];
      const y = at[m + 1];
      const z = at[m + 2];
      const column = Math.round(left + scale * (x * right[0] + y * right[1] + z * right[2]));
      const row = Math.round(top - scale * (x * up[0] + y * up[1] + z * up[2]));
      const depth = x * viewer[0] + y * viewer[1] + z * viewer[2] - back;
      const facing =
        a || b || c ? Math.max(0, a * light[0] + b * light[1] + c * light[2]) : LIGHT[2];
      const bright = (AMBIENT + DIFFUSE * facing) * (1 - (FADING * (1 - depth / radius)) / 2);
      const rgb = colours[kind];
      const colour =
        BLACK |
        (Math.min(255, rgb[2] * bright) << 16) |
        (Math.min(255, rgb[1] * bright) << 8) |
        Math.min(255, rgb[0] * bright);
      const bottom = Math.min(height, row + side);
      const end = Math.min(width, column + side);
      for (let j = Math.max(0, row); j < bottom; j++) {
        for (let i = Math.max(0, column); i < end; i++) {
          const pixel = j * width + i;
          if (depth <= depths[pixel]) continue;
          depths[pixel] = depth;
          painted[pixel] = colour;
          hits[pixel] = n;
        }
      }
    }
  }

  // Draw the crosshair over the picture.
  cross() {
    if (!this.on || !this.picture) return;
    const { context, scale, viewer } = this;
    context.putImageData(this.picture, 0, 0);
    if (!scale || !viewer.about) return;
    const { affine } = viewer.about;
    const mm = affine
      .slice(0, 3)
      .map((row, n) => dot(row, viewer.at) + row[3] - this.fitted.middle[n]);
    const [width, height] = this.size;
    context.strokeStyle = CROSS;
    context.lineWidth = 2;
    context.beginPath();
    const [x, y] = [dot(mm, this.axes.right), dot(mm, this.axes.up)];
    context.arc(width / 2 + scale * x, height / 2 - scale * y, 7, 0, 2 * Math.PI);
    context.stroke();
  }

  say(text) {
    this.figure.querySelector(".where").textContent = text;
  }

  // Turning

  turn(azimuth, elevation) {
    this.azimuth = ((azimuth % 360) + 360) % 360;
    this.elevation = Math.min(90, Math.max(-90, elevation));
    this.redraw();
  }

  setZoom(zoom) {
    this.zoom = Math.min(MAX_ZOOM, Math.max(1, zoom));
    this.redraw();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { azimuth, elevation, zoom } = this;
    const act = {
      ArrowLeft: () => this.turn(azimuth + KEY_DEGREES, elevation),
      ArrowRight: () => this.turn(azimuth - KEY_DEGREES, elevation),
      ArrowUp: () => this.turn(azimuth, elevation - KEY_DEGREES),
      ArrowDown: () => this.turn(azimuth, elevation + KEY_DEGREES),
      "+": () => this.setZoom(zoom * 1.5),
      "-": () => this.setZoom(zoom / 1.5),
      0: () => this.setZoom(1),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
    byId("told").textContent = this.figure.querySelector(".where").textContent;
  }

  wheel(event) {
    event.preventDefault();
    this.setZoom(this.zoom * (event.deltaY < 0 ? 1.25 : 0.8));
  }

  press(event) {
    if (event.target.closest("figcaption")) return;
    this.figure.setPointerCapture(event.pointerId);
    const { azimuth, elevation } = this;
    this.held = { from: [event.clientX, event.clientY], azimuth, elevation, isDrag: false };
  }

  drag(event) {
    const { held } = this;
    if (!held) return;
    const [x, y] = [event.clientX - held.from[0], event.clientY - held.from[1]];
    held.isDrag ||= Math.hypot(x, y) > CLICK_PIXELS;
    if (!held.isDrag) return;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() =>
      this.turn(held.azimuth - x * DRAG_DEGREES, held.elevation + y * DRAG_DEGREES),
    );
  }

  // A click moves the crosshair to the structure under it.
  release(event) {
    const { held } = this;
    this.held = null;
    if (!held || held.isDrag || !this.points || !this.viewer.about) return;
    const box = this.canvas.getBoundingClientRect();
    const [column, row] = [event.clientX - box.left, event.clientY - box.top].map((n, axis) =>
      Math.floor((n / this.room[axis]) * this.size[axis]),
    );
    const hit = this.hits[row * this.size[0] + column] ?? -1;
    if (hit >= 0) this.viewer.jump(Array.from(this.points.voxels.subarray(3 * hit, 3 * hit + 3)));
  }
}
