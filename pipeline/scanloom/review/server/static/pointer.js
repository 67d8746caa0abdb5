// Mouse and touch on the planes: crosshair, slices, window, zoom and pan, and strokes of the brush.

const distance = ([a, b]) => Math.hypot(a[0] - b[0], a[1] - b[1]);
const middle = ([a, b]) => [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2];
const inside = (figure, [x, y]) => { const box = figure.getBoundingClientRect(); return [x - box.left, y - box.top]; };

export class Pointer {
  // page: { about, at, planes, window, correction, draw(), mark(), move(), ownWindow() }
  constructor(page) { Object.assign(this, { page, down: new Map(), gesture: null }); }

  listen(figure, name) {
    figure.addEventListener("wheel", (event) => this.wheel(event, name), { passive: false });
    figure.addEventListener("contextmenu", (event) => event.preventDefault());
    figure.addEventListener("pointerdown", (event) => this.press(event, name));
    figure.addEventListener("pointermove", (event) => this.drag(event));
    figure.addEventListener("pointerup", (event) => this.release(event, false));
    figure.addEventListener("pointercancel", (event) => this.release(event, true));
  }

  wheel(event, name) {
    event.preventDefault();
    if (!this.page.about) return;
    const plane = this.page.planes[name], axis = plane.about.normal;
    if (event.ctrlKey) plane.setZoom(plane.zoom * (event.deltaY < 0 ? 1.25 : 0.8), inside(plane.figure, [event.clientX, event.clientY]));
    else this.page.move(axis, this.page.at[axis] + Math.sign(event.deltaY || event.deltaX) * (event.shiftKey ? 10 : 1), name);
  }

  press(event, name) {
    if (event.target.closest("figcaption") || !this.page.about) return;
    event.currentTarget.setPointerCapture(event.pointerId);
    this.down.set(event.pointerId, [event.clientX, event.clientY]);
    if (this.down.size === 1) this.gesture = this.begin(event, name);
    else {  // a second finger: the first was no stroke
      this.gesture?.cancel?.();
      this.gesture = this.down.size === 2 ? this.pinch(name) : null;
    }
  }

  drag(event) {
    if (!this.down.has(event.pointerId)) return;
    this.down.set(event.pointerId, [event.clientX, event.clientY]);
    if (this.page.about) this.gesture?.drag(event);
  }

  release(event, cancelled) {
    if (!this.down.delete(event.pointerId)) return;
    const gesture = this.gesture;
    this.gesture = null;
    if (cancelled || !this.page.about) gesture?.cancel?.(); else gesture?.end?.();
  }

  begin(event, name) {
    this.page.mark(name);
    if (event.button === 1) { event.preventDefault(); return this.pan(event, name); }
    if (event.shiftKey || event.button === 2) return this.window(event);
    return this.page.correction.on ? this.stroke(event, name) : this.crosshair(event, name);
  }

  pan(event, name) {
    const plane = this.page.planes[name], pan = [...plane.pan], from = [event.clientX, event.clientY];
    return { drag: (moved) => { plane.pan = [pan[0] + moved.clientX - from[0], pan[1] + moved.clientY - from[1]]; plane.place(); } };
  }

  window(event) {
    const window = { ...this.page.window }, range = window.high - window.low, from = [event.clientX, event.clientY];
    return { drag: (moved) => {
      const width = Math.max(range * 2 ** ((moved.clientX - from[0]) / 200), range / 1000);
      const level = (window.high + window.low) / 2 + (moved.clientY - from[1]) * range / 400;
      this.page.ownWindow({ ...window, low: level - width / 2, high: level + width / 2 });
    } };
  }

  stroke(event, name) {
    const plane = this.page.planes[name], correction = this.page.correction;
    correction.begin(name, plane.pixel(event));
    return { drag: (moved) => correction.extend(name, plane.pixel(moved)), end: () => correction.end(name),
      cancel: () => { correction.points = null; this.page.draw(); } };
  }

  crosshair(event, name) {
    const plane = this.page.planes[name];
    const drag = (moved) => {
      const [x, y] = plane.pixel(moved);
      this.page.at[plane.about.across] = x;
      this.page.at[plane.about.down] = y;
      this.page.draw();
    };
    const before = [...this.page.at];
    drag(event);
    return { drag, cancel: () => { this.page.at.splice(0, 3, ...before); this.page.draw(); } };
  }

  // Two fingers: zoom by their distance, pan by their middle.
  pinch(name) {
    const plane = this.page.planes[name], from = [...this.down.values()], zoom = plane.zoom;
    let last = middle(from);
    return { drag: () => {
      const now = [...this.down.values()], centre = middle(now);
      plane.pan = plane.pan.map((n, axis) => n + centre[axis] - last[axis]);
      plane.place();
      plane.setZoom(zoom * distance(now) / Math.max(1, distance(from)), inside(plane.figure, centre));
      last = centre;
    } };
  }
}
