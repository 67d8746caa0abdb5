// Mouse and touch on the planes: crosshair, slices, window, zoom and pan, and strokes of the brush.

import { say } from "./dom.js";

const DRAG_PIXELS = 4;
const CORNER_PIXELS = 2; // between corners of a polygon that is drawn by a drag
const distance = ([a, b]) => Math.hypot(a[0] - b[0], a[1] - b[1]);
const middle = ([a, b]) => [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2];
const placeOf = (event) => [event.clientX, event.clientY];

function inside(figure, [x, y]) {
  const box = figure.getBoundingClientRect();
  return [x - box.left, y - box.top];
}

export class Pointer {
  /**
   * @param {Viewer} viewer
   * @param {Correction} correction
   */
  constructor(viewer, correction) {
    this.viewer = viewer;
    this.correction = correction;
    /** Places of the pointers that are down, by their id. */
    this.down = new Map();
    /** The gesture that is made: `drag`, and perhaps `end` and `cancel`. */
    this.gesture = null;
  }

  /**
   * @param {HTMLElement} figure
   * @param {string} name Name of its plane.
   */
  listen(figure, name) {
    figure.addEventListener("wheel", (event) => this.wheel(event, name), { passive: false });
    figure.addEventListener("contextmenu", (event) => event.preventDefault());
    figure.addEventListener("pointerdown", (event) => this.press(event, name));
    figure.addEventListener("pointermove", (event) => this.drag(event));
    figure.addEventListener("pointerup", (event) => this.release(event, false));
    figure.addEventListener("dblclick", () => this.correction.closePolygon());
    figure.addEventListener("pointercancel", (event) => this.release(event, true));
  }

  // Let go of what was begun on another case.
  drop() {
    this.down.clear();
    this.gesture = null;
  }

  wheel(event, name) {
    event.preventDefault();
    if (!this.viewer.about) return;
    const plane = this.viewer.planes[name];
    if (event.ctrlKey) {
      const point = inside(plane.figure, placeOf(event));
      plane.setZoom(plane.zoom * (event.deltaY < 0 ? 1.25 : 0.8), point);
      return;
    }
    const axis = plane.about.normal;
    const by = Math.sign(event.deltaY || event.deltaX) * (event.shiftKey ? 10 : 1);
    this.viewer.move(axis, this.viewer.at[axis] + by, name);
  }

  press(event, name) {
    if (event.target.closest("figcaption") || !this.viewer.about) return;
    event.currentTarget.setPointerCapture(event.pointerId);
    this.down.set(event.pointerId, placeOf(event));
    if (this.down.size === 1) this.gesture = this.begin(event, name);
    else {
      // a second finger: the first was no stroke
      this.gesture?.cancel?.();
      this.gesture = this.down.size === 2 ? this.pinch(name) : null;
    }
  }

  drag(event) {
    if (!this.down.has(event.pointerId)) return;
    this.down.set(event.pointerId, placeOf(event));
    if (this.viewer.about) this.gesture?.drag(event);
  }

  release(event, cancelled) {
    if (!this.down.delete(event.pointerId)) return;
    const { gesture } = this;
    this.gesture = null;
    if (cancelled || !this.viewer.about) gesture?.cancel?.();
    else gesture?.end?.();
  }

  begin(event, name) {
    this.viewer.mark(name);
    if (event.button === 1) {
      event.preventDefault();
      return this.pan(event, name);
    }
    if (event.shiftKey || event.button === 2) return this.window(event);
    if (this.viewer.isMeasuring) return this.ruler(event, name);
    if (!this.correction.on) return this.crosshair(event, name);
    return this.correction.isPolygon ? this.corners(event, name) : this.stroke(event, name);
  }

  ruler(event, name) {
    const plane = this.viewer.planes[name];
    const from = plane.point(event);
    const drag = (moved) => {
      const length = plane.setRuler([from, plane.point(moved)]);
      say(`${length.toFixed(1)} mm`);
    };
    return { drag };
  }

  // A click is a corner of a polygon; a drag goes around the whole of it.
  corners(event, name) {
    const plane = this.viewer.planes[name];
    const { correction } = this;
    let last = placeOf(event);
    let isDrag = false;
    correction.corner(name, plane.point(event));
    const { polygon } = correction;
    return {
      drag: (moved) => {
        // it was dropped or closed by a key, or another slice is shown by now
        if (correction.polygon !== polygon || correction.indexOf(name) !== polygon.index) return;
        // a mouse reports a hundred places a second, of which a polygon has thousands at most
        if (distance([last, placeOf(moved)]) < (isDrag ? CORNER_PIXELS : DRAG_PIXELS)) return;
        isDrag = true;
        last = placeOf(moved);
        correction.corner(name, plane.point(moved));
      },
      end: () => isDrag && correction.closePolygon(),
      cancel: () => correction.drop(),
    };
  }

  pan(event, name) {
    const plane = this.viewer.planes[name];
    const before = [...plane.pan];
    const from = placeOf(event);
    const drag = (moved) => {
      plane.isHome = false;
      plane.pan = placeOf(moved).map((n, axis) => before[axis] + n - from[axis]);
      plane.place();
    };
    return { drag };
  }

  window(event) {
    const window = { ...this.viewer.window };
    const range = window.high - window.low;
    const from = placeOf(event);
    const drag = (moved) => {
      const [right, down] = placeOf(moved).map((n, axis) => n - from[axis]);
      const width = Math.max(range * 2 ** (right / 200), range / 1000);
      const level = (window.high + window.low) / 2 + (down * range) / 400;
      this.viewer.setOwnWindow({ ...window, low: level - width / 2, high: level + width / 2 });
    };
    return { drag };
  }

  stroke(event, name) {
    const plane = this.viewer.planes[name];
    const { correction } = this;
    // beside the picture too, so that the brush paints nothing there
    const at = (place) => plane.under(place).map(Math.floor);
    correction.begin(name, at(event));
    return {
      drag: (moved) => correction.extend(at(moved)),
      end: () => correction.end(),
      cancel: () => {
        correction.stroke = null;
        this.viewer.draw();
      },
    };
  }

  crosshair(event, name) {
    const plane = this.viewer.planes[name];
    const drag = (moved) => {
      const [x, y] = plane.pixel(moved);
      this.viewer.at[plane.about.across] = x;
      this.viewer.at[plane.about.down] = y;
      this.viewer.draw();
    };
    const before = [...this.viewer.at];
    drag(event);
    return {
      drag,
      cancel: () => {
        this.viewer.at.splice(0, 3, ...before);
        this.viewer.draw();
      },
    };
  }

  // Two fingers: zoom by their distance, pan by their middle.
  pinch(name) {
    const plane = this.viewer.planes[name];
    const { zoom } = plane;
    const from = [...this.down.values()];
    let last = middle(from);
    const drag = () => {
      const now = [...this.down.values()];
      const centre = middle(now);
      plane.pan = plane.pan.map((n, axis) => n + centre[axis] - last[axis]);
      plane.place();
      const share = distance(now) / Math.max(1, distance(from));
      plane.setZoom(zoom * share, inside(plane.figure, centre));
      last = centre;
    };
    return { drag };
  }
}
