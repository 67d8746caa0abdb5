// The three planes through a case: slices, crosshair, grey window, and colours of the structures.
import { byId, element, press, say } from "./dom.js";
import { Plane, colours, greys } from "./plane.js";
import { Slices } from "./slices.js";
import { Solid } from "./solid.js";
import { Structures } from "./structures.js";

export const PLANES = ["axial", "coronal", "sagittal"];
const TOLD_AFTER_MS = 500;
const titleOf = (name) => name[0].toUpperCase() + name.slice(1);
const OWN_WINDOW = "-1";

/**
 * Description of a case by the server.
 * @typedef {object} Case
 * @property {string} id
 * @property {string} version Of the result.
 * @property {number[]} shape Voxels along each axis of the view.
 * @property {number[]} spacing In mm.
 * @property {number[][]} affine Index of a voxel to LPS mm.
 * @property {?string} image
 * @property {?number[]} scale Slope and intercept of the pixels of the scan.
 * @property {Object<string, PlaneDescription>} planes
 * @property {Layer[]} layers
 * @property {GrayWindow[]} windows
 * @property {{text: string, point: ?number[]}[]} doubts
 */

/**
 * @typedef {object} PlaneDescription
 * @property {number} normal Axis across the slices; `across` and `down` are those of columns and rows.
 * @property {number} across
 * @property {number} down
 * @property {number} count Number of slices.
 * @property {number} width
 * @property {number} height
 * @property {number[]} pixel_mm
 * @property {Object<string, string>} letters
 */

/**
 * A label map.
 * @typedef {object} Layer
 * @property {number} index
 * @property {string} file
 * @property {string} model
 * @property {number} bytes Bytes of a pixel.
 * @property {{value: number, label: string, name: string, color: string, hull: boolean}[]} labels Hulls span the body
 * and hide all others.
 */

/** @typedef {{name: string, low: number, high: number, inverted: boolean}} GrayWindow */

/**
 * Slices of a case that was described.
 * @param {Case} about
 * @param {Store} store
 */
export function slicesOf(about, store) {
  const make = (path, type) =>
    Object.fromEntries(PLANES.map((name) => [name, new Slices(about, path, name, type, store)]));
  return {
    image: about.image ? make("image", Int16Array) : null,
    labels: about.layers.map((layer) =>
      make(`labels/${layer.index}`, layer.bytes === 2 ? Uint16Array : Uint8Array),
    ),
  };
}

/** @param {Case} about */
export const middleOf = (about) => about.shape.map((n) => Math.floor(n / 2));

export class Viewer {
  /**
   * @param {Store} store Pixels that were fetched.
   * @param {Verdict} verdict
   * @param {(error: Error) => void} failed
   */
  constructor(store, verdict, failed) {
    this.store = store;
    this.failed = failed;
    /** The case that is shown; null until its description is here. @type {?Case} */
    this.about = null;
    this.planes = {};
    this.slices = { image: null, labels: [] };
    /** Voxel of the crosshair. */
    this.at = [0, 0, 0];
    /** Plane that keys act on. */
    this.active = "axial";
    /** @type {?GrayWindow} */
    this.window = null;
    this.greys = null;
    this.palettes = [];
    this.isOutlined = true;
    this.isHidden = false;
    this.isMeasuring = false;
    this.telling = 0;
    this.structures = new Structures(
      verdict,
      (point) => this.jump(point),
      () => this.redraw(),
    );
    this.solid = new Solid(this, failed);
    /** Listens to mouse and touch on a plane. @type {?Pointer} */
    this.pointer = null;
    byId("windows").addEventListener("change", () =>
      this.chooseWindow(Number(byId("windows").value)),
    );
    byId("opacity").addEventListener("input", () => this.redraw());
    byId("outline").addEventListener("click", () => this.toggleOutline());
    byId("ruler").addEventListener("click", () => this.measure(!this.isMeasuring));
    byId("hide").addEventListener("click", () => this.toggleLabels());
  }

  /** @param {Case} about */
  show(about) {
    this.about = about;
    this.pointer.drop();
    this.slices = slicesOf(about, this.store);
    this.at = middleOf(about);
    this.planes = Object.fromEntries(
      PLANES.map((name) => [
        name,
        new Plane(this.freshFigure(name), about.planes[name], about.body),
      ]),
    );
    this.setWindow(about.windows[0] || { name: "", low: 0, high: 1, inverted: false });
    byId("windows").replaceChildren(
      ...about.windows.map((each, n) => element("option", each.name, { value: n })),
      element("option", "own", { value: OWN_WINDOW }),
    );
    this.structures.show(about);
    this.solid.show(about);
    this.colour();
    press(byId("hide"), this.isHidden);
  }

  // A figure without the listeners of the case before.
  freshFigure(name) {
    const figure = byId("plane").content.firstElementChild.cloneNode(true);
    figure.id = name;
    figure.ariaLabel = titleOf(name);
    for (const each of figure.querySelectorAll("[aria-label]")) each.ariaLabel += `, ${name}`;
    byId(name)?.remove();
    byId("solid").before(figure);
    const range = figure.querySelector("input");
    const { normal, count } = this.about.planes[name];
    const listen = (button, act) => figure.querySelector(button).addEventListener("click", act);
    range.max = count - 1;
    range.addEventListener("input", () => this.move(normal, Number(range.value), name));
    listen(".zoom-in", () => this.zoom(1.5, name));
    listen(".zoom-out", () => this.zoom(1 / 1.5, name));
    listen(".enlarge", () => this.turnTo(name));
    figure.addEventListener("focusin", () => this.mark(name));
    this.pointer.listen(figure, name);
    if (!this.about.image && !this.about.layers.length) {
      figure.append(element("p", "Nothing to show", { class: "nothing" }));
    }
    return figure;
  }

  // Drawing

  async draw() {
    const { about } = this;
    this.solid.cross();
    await Promise.all(PLANES.map((name) => this.drawPlane(name)));
    if (!about || this.about !== about) return;
    this.readOut();
    for (const name of PLANES) {
      for (const source of this.sources(name)) source.around(this.at[about.planes[name].normal]);
    }
  }

  sources(name) {
    return [this.slices.image, ...this.slices.labels].filter(Boolean).map((each) => each[name]);
  }

  async drawPlane(name) {
    if (!this.about) return;
    const plane = this.planes[name];
    const sources = this.sources(name);
    const index = this.at[plane.about.normal];
    if (sources.some((source) => source.at(index) === null)) {
      try {
        await Promise.all(sources.map((source) => source.fetch(index)));
      } catch (error) {
        this.failed(error);
        return;
      }
      const isCurrent = this.about && this.planes[name] === plane;
      if (!isCurrent || this.at[plane.about.normal] !== index) return; // another slice by now
    }
    const labels = this.isHidden ? [] : this.slices.labels.map((each) => each[name].at(index));
    const image = this.slices.image?.[name].at(index) ?? null;
    plane.draw(image, this.greys, labels, this.palettes, this.isOutlined);
    if (plane.canvas.dataset.index !== String(index)) plane.setRuler(null); // of another slice
    plane.canvas.dataset.index = index;
    plane.cross([this.at[plane.about.across], this.at[plane.about.down]]);
    plane.figure.querySelector("input").value = index;
    plane.figure.querySelector(".where").textContent =
      `${titleOf(name)} ${index + 1}/${plane.about.count}`;
  }

  colour() {
    const opacity = Number(byId("opacity").value) / 100;
    this.palettes = colours(this.about.layers, this.structures.off, opacity);
  }

  redraw() {
    if (!this.about) return;
    this.colour();
    this.solid.redraw();
    this.draw();
  }

  // Fetch the labels again: with the strokes of a correction, or without.
  reload(isDraft) {
    if (!this.about) return Promise.resolve();
    this.store.forget(`${this.about.id}/labels/`);
    for (const layer of this.slices.labels) {
      for (const name of PLANES) layer[name].setDraft(isDraft);
    }
    return this.draw().then(() => void this.solid.load(isDraft));
  }

  /**
   * Return layer and value of the structures at the crosshair, as far as their slices are here.
   * @returns {{layer: Layer, value: number}[]}
   */
  structuresHere() {
    const { about, at, active } = this;
    const { normal, across, down, width } = about.planes[active];
    const pixel = at[down] * width + at[across];
    return about.layers.flatMap((layer, index) => {
      const value = this.slices.labels[index][active].at(at[normal])?.[pixel];
      return value ? [{ layer, value }] : [];
    });
  }

  // State place, intensity and structures at the crosshair.
  readOut() {
    const { about, at, active } = this;
    const { normal, across, down, width } = about.planes[active];
    const pixel = at[down] * width + at[across];
    const places = ["RL", "AP", "IS"].map(([below, above], row) => {
      const mm = at.reduce(
        (sum, n, axis) => sum + about.affine[row][axis] * n,
        about.affine[row][3],
      );
      const text = Math.abs(mm).toFixed(1);
      return `${mm > 0 || Number(text) === 0 ? above : below} ${text}`;
    });
    const texts = [`${places.join(", ")} mm`];
    const stored = this.slices.image?.[active].at(at[normal])?.[pixel];
    if (stored !== undefined) {
      const value = Number((about.scale[0] * stored + about.scale[1]).toPrecision(6));
      const unit = about.unit === "unknown" ? "" : ` ${about.unit}`;
      texts.push(`${value}${unit}${about.exact ? "" : " (rounded)"}`);
    }
    for (const { layer, value } of this.structuresHere()) {
      texts.push(layer.labels.find((each) => each.value === value)?.name ?? `label ${value}`);
    }
    byId("readout").textContent = texts.join(" · ");
    clearTimeout(this.telling); // read out when the movement is over, not at each slice
    this.telling = setTimeout(() => {
      const title = byId(this.active).querySelector(".where").textContent;
      byId("told").textContent = `${title}: ${texts.join(", ")}`;
    }, TOLD_AFTER_MS);
  }

  // Grey window and labels

  setWindow(window) {
    this.window = window;
    this.greys = greys(window, this.about.scale || [1, 0]);
  }

  chooseWindow(n) {
    const window = this.about?.windows[n];
    if (!window) return;
    byId("windows").value = n;
    this.setWindow(window);
    say(`Window ${window.name}: ${window.low} to ${window.high}`);
    this.draw();
  }

  nextWindow() {
    const count = Math.max(1, this.about.windows.length);
    this.chooseWindow((Number(byId("windows").value) + 1) % count);
  }

  setOwnWindow(window) {
    byId("windows").value = OWN_WINDOW;
    this.setWindow({ ...window, name: "own" });
    this.draw();
  }

  // Widen the window, or raise its level, by a share of its width.
  changeWindow(wider, higher) {
    const width = this.window.high - this.window.low;
    const level = (this.window.high + this.window.low) / 2 + higher * width;
    const [low, high] = [level - (width * wider) / 2, level + (width * wider) / 2];
    this.setOwnWindow({ ...this.window, low, high });
    say(`Window ${Number(low.toPrecision(4))} to ${Number(high.toPrecision(4))}`);
  }

  toggleOutline() {
    this.isOutlined = !this.isOutlined;
    press(byId("outline"), this.isOutlined);
    this.draw();
  }

  // Let the pointer measure distances, or not.
  measure(on) {
    this.isMeasuring = on;
    press(byId("ruler"), on);
    if (on) say("Ruler: drag from point to point.");
    else for (const plane of Object.values(this.planes)) plane.setRuler(null);
  }

  toggleLabels() {
    this.isHidden = !this.isHidden;
    press(byId("hide"), this.isHidden);
    this.draw();
  }

  // Moving about

  jump(point) {
    this.at = [...point];
    return this.draw();
  }

  // Move the crosshair along an axis of the view.
  move(axis, index, name) {
    this.at[axis] = Math.min(this.about.shape[axis] - 1, Math.max(0, index));
    if (name) this.mark(name);
    return this.draw();
  }

  // Move the crosshair along the "normal", "across" or "down" axis of the active plane.
  shift(direction, by) {
    const axis = this.about.planes[this.active][direction];
    return this.move(axis, this.at[axis] + by);
  }

  zoom(factor, name = this.active) {
    this.planes[name].setZoom(this.planes[name].zoom * factor);
  }

  // Back to the body, as a case is opened.
  home(name = this.active) {
    this.planes[name].home();
  }

  mark(name) {
    this.active = name;
    for (const each of PLANES) byId(each).classList.toggle("active", each === name);
  }

  // Show a plane, or the view in 3-D, in the large field.
  enlarge(name) {
    if (name !== "solid") this.mark(name);
    for (const each of [...PLANES, "solid"]) byId(each).classList.toggle("main", each === name);
    byId("planes").prepend(byId(name));
    for (const plane of Object.values(this.planes)) plane.place();
  }

  turnTo(name) {
    this.enlarge(name);
    byId(name).focus({ preventScroll: true });
    this.readOut();
  }
}
