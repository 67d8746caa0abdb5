// Corrections: a brush on any plane; the server paints, and every plane shows the result.
// Steps are sent one by one, each with the version of the correction that it changes: another window may change it too.
import { addressOf, get, post, resultOf } from "./api.js";
import { byId, element, press, say } from "./dom.js";

const RETRY_MS = 2000;
const MAX_POINTS = 4000; // of a stroke: a longer one is sent in parts, since the server refuses it
const NO_LIMIT = 1e30; // beyond all values of scans; JSON has no infinity
const counted = (count) => `${count} ${count === 1 ? "stroke" : "strokes"}`;

const optionsOf = (layer) =>
  layer.labels.map((each) =>
    element("option", each.name, { value: `${layer.index}:${each.value}` }),
  );

/**
 * A change of a correction that the server does not have yet.
 * @typedef {{id: string, version: string, path: string, body: object}} Step
 */

/**
 * What is drawn on a slice, until it is sent.
 * @typedef {{name: string, index: number, points: number[][]}} Drawn
 */

/**
 * State of a correction by the server.
 * @typedef {object} DraftState
 * @property {string} version Changes with each stroke.
 * @property {number} undo Strokes that can be undone.
 * @property {number} redo
 * @property {boolean} strokes Whether there are any.
 */

export class Correction {
  /**
   * @param {Viewer} viewer
   * @param {{saved: (id: string, revision: number) => Promise, failed: (error: Error, id?: string) => void}} page
   */
  constructor(viewer, page) {
    this.viewer = viewer;
    this.page = page;
    this.on = false;
    this.isEraser = false;
    /** The stroke that is drawn, in pixels of its plane. @type {?Drawn} */
    this.stroke = null;
    /** @type {Step[]} */
    this.waiting = [];
    this.sending = null;
    /** The polygon that is drawn. @type {?Drawn} */
    this.polygon = null;
    /** The last slices that were painted, of one plane and structure. @type {{key: string, slices: number[]}} */
    this.painted = { key: "", slices: [] };
    /** Where the crosshair was when a person chose the structure of the brush. */
    this.chosenAt = "";
    /** Whether the server writes the correction as a revision. */
    this.isWriting = false;
    /** Version of the correction of each case, by id. @type {Map<string, string>} */
    this.versions = new Map();
    byId("correct").addEventListener("click", () => this.toggle());
    byId("eraser").addEventListener("click", () => this.erase(!this.isEraser));
    byId("shape").addEventListener("change", () => this.drop());
    byId("brush-label").addEventListener("change", () => {
      this.chosenAt = String(this.viewer.at);
      this.enableFill();
    });
    byId("ranged").addEventListener("change", () => this.showRange());
    byId("fill").addEventListener("click", () => this.fill());
    byId("smooth").addEventListener("click", () => this.tool("smooth"));
    byId("islands").addEventListener("click", () => this.tool("islands"));
    byId("stroke-undo").addEventListener("click", () => this.send("draft/undo"));
    byId("stroke-redo").addEventListener("click", () => this.send("draft/redo"));
    byId("discard").addEventListener("click", () => this.discard());
    byId("save-correction").addEventListener("click", () => this.save());
  }

  /** Strokes that the server does not have yet: those that it has are on its disk. */
  get unsaved() {
    return this.waiting.length > 0;
  }

  show() {
    const { layers } = this.viewer.about;
    this.set(false);
    this.erase(false);
    this.enable({ undo: 0, redo: 0, strokes: false });
    const models = Map.groupBy(layers, (layer) => layer.model);
    const groups = [...models].map(([model, each]) => {
      const group = element("optgroup", "", { label: model });
      group.append(...each.flatMap(optionsOf));
      return group;
    });
    byId("brush-label").replaceChildren(...(models.size > 1 ? groups : layers.flatMap(optionsOf)));
    this.chosenAt = "";
    byId("correct").disabled = !layers.length;
    byId("ranged").disabled = !this.viewer.about.image;
    byId("ranged").checked = false;
    this.painted = { key: "", slices: [] };
    this.stroke = null;
    this.polygon = null;
    this.showRange();
    this.enableFill();
  }

  /**
   * Show the strokes that were not saved.
   * @param {Promise<DraftState>} answer
   * @returns {Promise<string>} The message about them.
   */
  async resume(answer) {
    const { about } = this.viewer;
    const draft = await answer;
    if (this.viewer.about !== about) return "";
    this.versions.set(about.id, draft.version);
    if (draft.dropped) {
      return `${counted(draft.dropped)} that were not saved are dropped: the result has other voxels or structures now.`;
    }
    this.enable(draft);
    if (!draft.strokes && !draft.redo) return "";
    this.set(true);
    this.takeStructure();
    await this.reload();
    if (draft.carried) {
      return `The result was replaced: ${counted(draft.carried)} of yours were painted on the new one. Look at it, then save or discard.`;
    }
    if (!draft.strokes) return "";
    return `${counted(draft.undo)} of your correction not saved yet: save or discard.`;
  }

  reload() {
    return this.viewer.reload(this.on);
  }

  set(on) {
    this.on = on;
    press(byId("correct"), on);
    byId("tools").hidden = !on;
  }

  toggle() {
    this.set(!this.on);
    if (this.on) {
      this.viewer.measure(false);
      this.takeStructure();
    }
    this.drop();
    say(this.on ? "Correction: drag to paint; the wheel changes the slice." : "");
    this.reload();
  }

  // Paint the structure shown at the crosshair, the uppermost of several, else the one that was gone
  // to last; the structure that a person chose for the brush stays until the crosshair moves.
  takeStructure() {
    const { at, structures } = this.viewer;
    if (this.chosenAt === String(at)) return;
    const keys = this.viewer.structuresHere().map((each) => `${each.layer.index}:${each.value}`);
    const shown = keys.filter((key) => !structures.off.has(key));
    const here = shown.includes(structures.selected) ? structures.selected : shown.at(-1);
    if (here || structures.selected) byId("brush-label").value = here || structures.selected;
    this.enableFill();
  }

  erase(on) {
    this.isEraser = on;
    press(byId("eraser"), on);
  }

  enable({ undo, redo, strokes }) {
    byId("stroke-undo").disabled = !undo;
    byId("stroke-redo").disabled = !redo;
    byId("save-correction").disabled = !strokes;
    byId("discard").disabled = !strokes;
  }

  // The brush

  get radius() {
    return Number(byId("radius").value);
  }

  /** Layer and label that the brush paints. */
  get brush() {
    return byId("brush-label").value.split(":").map(Number);
  }

  get isPolygon() {
    return byId("shape").value === "polygon";
  }

  indexOf(name) {
    return this.viewer.at[this.viewer.about.planes[name].normal];
  }

  begin(name, point) {
    this.stroke = { name, index: this.indexOf(name), points: [point] };
    this.trace();
  }

  turnShape() {
    byId("shape").value = this.isPolygon ? "brush" : "polygon";
    this.drop();
  }

  // Paint only where the scan lies in a range: at first that of the window.
  toggleRange() {
    if (byId("ranged").disabled) return;
    byId("ranged").checked = !byId("ranged").checked;
    this.showRange();
  }

  showRange() {
    const isOn = byId("ranged").checked;
    for (const [id, end] of [
      ["lowest", "low"],
      ["highest", "high"],
    ]) {
      byId(id).disabled = !isOn;
      if (isOn && !byId(id).value) byId(id).value = Number(this.viewer.window[end].toPrecision(4));
    }
  }

  // The range of values; an end that is empty is none.
  get between() {
    if (!byId("ranged").checked) return null;
    const [low, high] = ["lowest", "highest"].map((id) => byId(id).valueAsNumber);
    return [Number.isNaN(low) ? -NO_LIMIT : low, Number.isNaN(high) ? NO_LIMIT : high];
  }

  // The polygon

  corner(name, point) {
    const index = this.indexOf(name);
    if (this.polygon?.name !== name || this.polygon.index !== index) {
      this.polygon = { name, index, points: [] };
    }
    this.polygon.points.push(point);
    this.tracePolygon();
  }

  tracePolygon() {
    const { name, points } = this.polygon;
    const { context } = this.viewer.planes[name];
    context.save();
    context.strokeStyle = "#fff";
    context.lineWidth = 1;
    context.beginPath();
    for (const [n, [x, y]] of points.entries()) {
      if (n) context.lineTo(x + 0.5, y + 0.5);
      else context.moveTo(x + 0.5, y + 0.5);
    }
    context.stroke();
    context.restore();
  }

  // Drop the polygon that is drawn; return whether there was one.
  drop() {
    const was = this.polygon;
    this.polygon = null;
    if (was && this.viewer.about) this.viewer.draw();
    return Boolean(was);
  }

  async closePolygon() {
    const { polygon } = this;
    this.polygon = null;
    if (!polygon || polygon.points.length < 3) {
      this.viewer.draw();
      return;
    }
    await this.paint(polygon, "polygon");
  }

  extend(point) {
    if (!this.stroke) return;
    const { name, index, points } = this.stroke;
    const [x, y] = points.at(-1);
    if (x === point[0] && y === point[1]) return;
    if (index !== this.indexOf(name)) {
      this.end(); // another slice is shown by now
      return;
    }
    if (points.length === MAX_POINTS) {
      this.end();
      this.begin(name, [x, y]);
    }
    this.stroke.points.push(point);
    this.trace();
  }

  // Draw the stroke until the server has painted it.
  trace() {
    const { name, points } = this.stroke;
    const { context, about } = this.viewer.planes[name];
    const [width, height] = about.pixel_mm;
    const [layer, value] = this.brush;
    const { labels } = this.viewer.about.layers[layer];
    const [x, y] = points.at(-1);
    context.save();
    context.globalAlpha = 0.5;
    context.fillStyle = this.isEraser ? "#fff" : labels.find((each) => each.value === value).color;
    context.beginPath();
    context.ellipse(x + 0.5, y + 0.5, this.radius / width, this.radius / height, 0, 0, 2 * Math.PI);
    context.fill();
    context.restore();
  }

  async end() {
    const { stroke } = this;
    this.stroke = null;
    if (stroke) await this.paint(stroke, "brush");
  }

  async paint({ name, index, points }, shape) {
    const [layer, value] = this.brush;
    this.notePainted(name, index);
    await this.send("stroke", {
      layer,
      plane: name,
      index,
      points,
      shape,
      between: this.between,
      radius_mm: this.radius,
      label: this.isEraser ? 0 : value,
      only: this.isEraser && byId("only").checked ? [value] : null,
    });
  }

  // Tools

  // Remember the last two slices that were painted, to fill between them.
  notePainted(name, index) {
    const key = `${name} ${byId("brush-label").value}`;
    if (this.painted.key !== key) this.painted = { key, slices: [] };
    this.painted.slices = [index, ...this.painted.slices.filter((each) => each !== index)].slice(
      0,
      2,
    );
    this.enableFill();
  }

  get gap() {
    const [plane, label] = this.painted.key.split(" ");
    const [one, other] = this.painted.slices;
    const isGap = label === byId("brush-label").value && Math.abs(one - other) > 1;
    return isGap ? { plane, slices: [one, other] } : null;
  }

  enableFill() {
    byId("fill").disabled = !this.gap;
  }

  fill() {
    const { gap } = this;
    if (gap) return this.tool("fill", gap);
    say("Paint the structure in two slices with others between them, then fill.");
  }

  tool(name, more = {}) {
    const [layer, label] = this.brush;
    return this.send("tool", { tool: name, layer, label, radius_mm: this.radius, ...more });
  }

  // Paint at the crosshair: for the keyboard.
  dot(name) {
    const { across, down } = this.viewer.about.planes[name];
    const points = [[this.viewer.at[across], this.viewer.at[down]]];
    return this.paint({ name, index: this.indexOf(name), points }, "brush");
  }

  // Steps

  send(path, body = {}) {
    const { id, version } = this.viewer.about;
    this.waiting.push({ id, version, path, body });
    return this.startSending();
  }

  startSending() {
    this.sending ??= this.sendAll().finally(() => {
      this.sending = null;
      if (this.waiting.length) this.startSending();
    });
    return this.sending;
  }

  // Send the steps that wait. Strokes that were refused because another window changed the correction are sent again.
  async sendAll() {
    const again = new Set();
    const lost = [];
    let message = "";
    let id = null;
    let refused = null;
    while (this.waiting.length) {
      const [step] = this.waiting;
      id = step.id;
      try {
        const answer = await this.post(step);
        if (typeof answer.changed === "number") message = `${answer.changed} voxels changed`;
      } catch (error) {
        if (!error.reason || error.reason === "SESSION" || error.status === 503) {
          await this.pause(error);
          continue;
        }
        if (error.reason === "DRAFT_CHANGED" && step.path === "stroke") {
          again.add(step);
          continue;
        }
        refused = error;
        const isStale = error.reason === "STALE";
        lost.push(...this.waiting.filter((each) => each === step || (isStale && each.id === id)));
      }
      this.waiting = this.waiting.filter((each) => each !== step && !lost.includes(each));
    }
    if (again.size) {
      message = `Another window changed this correction: ${counted(again.size)} of this window painted on it again.`;
    }
    await this.tell(id, message, refused, lost.filter(({ path }) => path === "stroke").length);
  }

  pause(error) {
    const text = error.reason ? error.message.replace(/\.$/, "") : "The server does not answer";
    say(`${text}: ${counted(this.waiting.length)} not painted yet.`, true);
    return new Promise((done) => setTimeout(done, RETRY_MS));
  }

  // Show the correction as it is now, and how the steps ended that were sent.
  async tell(id, message, refused, lost) {
    const isShown = this.viewer.about?.id === id;
    if (refused?.reason === "DRAFT_CHANGED") refused.message += " Look at it, then do that again.";
    if (refused && lost) {
      refused.message = `${refused.message.replace(/\.?$/, ".")} Not painted: ${counted(lost)}.`;
    }
    if (!refused && isShown) say(message);
    if (refused && isShown) this.page.failed(refused);
    if (refused && !isShown) say(refused.message, true);
    if (isShown && refused?.reason !== "STALE") await this.reload();
  }

  // Send a step; if another window changed the correction since, read its version before that is told.
  async post(step) {
    const { id, path, body } = step;
    const draft = resultOf(step, "draft");
    try {
      if (!this.versions.has(id)) this.note(id, await get(draft));
      const version = this.versions.get(id);
      return this.note(id, await post(`${addressOf(id)}/${path}`, { ...body, version }));
    } catch (error) {
      if (error.reason === "DRAFT_CHANGED") this.note(id, await get(draft));
      throw error;
    }
  }

  // Note the version of a correction from an answer.
  note(id, answer) {
    if (answer.version) this.versions.set(id, answer.version);
    if (answer.version && this.viewer.about?.id === id) this.enable(answer);
    return answer;
  }

  async discard() {
    if (confirm("Discard all strokes of this correction?")) await this.send("draft/discard");
  }

  async save() {
    const { id, version } = this.viewer.about;
    await this.sending;
    byId("save-correction").disabled = true;
    this.isWriting = true;
    say("Writing the correction ...");
    try {
      const { revision } = await this.post({ id, version, path: "draft/save" });
      await this.page.saved(id, revision);
    } catch (error) {
      if (this.viewer.about?.id === id) byId("save-correction").disabled = false;
      if (error.reason === "DRAFT_CHANGED") {
        error.message += " Look at it, then save again.";
        await this.reload();
      }
      this.page.failed(error, id);
    } finally {
      this.isWriting = false;
    }
  }
}
