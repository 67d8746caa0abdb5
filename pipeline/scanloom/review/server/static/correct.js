// Corrections: a brush on any plane; the server paints, and every plane shows the result.
import { element, get, post } from "./api.js";

export class Correction {
  // page: { about, at, active, planes, reload(), say, failed, saved() }
  constructor(byId, page) {
    Object.assign(this, { byId, page, on: false, eraser: false, points: null });
    byId("correct").addEventListener("click", () => this.toggle());
    byId("eraser").addEventListener("click", () => this.erase(!this.eraser));
    byId("stroke-undo").addEventListener("click", () => this.send("draft/undo"));
    byId("stroke-redo").addEventListener("click", () => this.send("draft/redo"));
    byId("discard").addEventListener("click", () => this.discard());
    byId("save-correction").addEventListener("click", () => this.save());
  }

  show() {
    this.set(false);
    this.erase(false);
    this.steps({ undo: 0, redo: 0 });
    this.byId("brush-label").replaceChildren(...this.page.about.layers.flatMap((layer) =>
      layer.labels.map((each) => element("option", each.name, { value: `${layer.index}:${each.value}` }))));
    this.byId("correct").disabled = !this.page.about.layers.length;
  }

  // Take up the strokes that are not saved yet; return what is to be said about them.
  // Show the strokes that were not saved. `answer`: the server's, awaited here.
  async resume(answer) {
    const { about } = this.page, left = await answer;
    if (this.page.about !== about) return "";
    if (left.outdated) return "The result was replaced: the strokes of your correction, which were not saved, are dropped.";
    this.steps(left);
    if (!left.undo && !left.redo) return "";
    this.set(true);
    await this.page.reload();
    return left.undo ? `${left.undo} ${left.undo === 1 ? "stroke" : "strokes"} of your correction not saved yet: save or discard.` : "";
  }

  set(on) {
    this.on = on;
    this.byId("correct").setAttribute("aria-pressed", String(on));
    this.byId("tools").hidden = !on;
  }

  toggle() {
    this.set(!this.on);
    this.page.say(this.on ? "Correction: drag to paint; the wheel changes the slice." : "");
    this.page.reload();
  }

  erase(on) {
    this.eraser = on;
    this.byId("eraser").setAttribute("aria-pressed", String(on));
  }

  steps({ undo, redo }) {
    this.unsaved = undo > 0;
    this.byId("stroke-undo").disabled = this.byId("save-correction").disabled = this.byId("discard").disabled = !undo;
    this.byId("stroke-redo").disabled = !redo;
  }

  // Whether the case may be left: strokes that are not saved are asked about.
  leave() {
    if (this.unsaved && !confirm("The strokes of this correction are not saved. They are kept until the server stops. Leave this case?")) return false;
    this.unsaved = false;
    return true;
  }

  get radius() { return Number(this.byId("radius").value); }

  begin(name, point) { this.points = [point]; this.trace(name); }

  extend(name, point) {
    const [x, y] = this.points.at(-1);
    if (x === point[0] && y === point[1]) return;
    this.points.push(point);
    this.trace(name);
  }

  // Draw the stroke until the server has painted it.
  trace(name) {
    const plane = this.page.planes[name], context = plane.context, [width, height] = plane.about.pixel_mm;
    context.save();
    context.globalAlpha = 0.5;
    context.fillStyle = this.eraser ? "#fff" : this.colour();
    const [x, y] = this.points.at(-1);
    context.beginPath();
    context.ellipse(x + 0.5, y + 0.5, this.radius / width, this.radius / height, 0, 0, 2 * Math.PI);
    context.fill();
    context.restore();
  }

  chosen() { return this.byId("brush-label").value.split(":").map(Number); }

  colour() {
    const [layer, value] = this.chosen();
    return this.page.about.layers[layer].labels.find((each) => each.value === value).color;
  }

  async end(name) {
    const points = this.points, [layer, value] = this.chosen();
    this.points = null;
    if (!points) return;
    const index = this.page.at[this.page.about.planes[name].normal];
    await this.send("stroke", { layer, plane: name, index, points, radius_mm: this.radius, label: this.eraser ? 0 : value,
      only: this.eraser && this.byId("only").checked ? [value] : null });
  }

  // Paint at the crosshair: for the keyboard.
  dot(name) {
    const plane = this.page.about.planes[name];
    this.points = [[this.page.at[plane.across], this.page.at[plane.down]]];
    return this.end(name);
  }

  async send(path, body = {}) {
    try {
      const answer = await post(`/api/case/${encodeURIComponent(this.page.about.id)}/${path}`, body);
      this.steps(answer);
      if (typeof answer.changed === "number") this.page.say(`${answer.changed} voxels changed`);
    } catch (error) { this.page.failed(error); }
    await this.page.reload();
  }

  async discard() {
    if (!confirm("Discard all strokes of this correction?")) return;
    await this.send("draft/discard");
    this.steps({ undo: 0, redo: 0 });
  }

  async save() {
    const id = this.page.about.id;
    this.byId("save-correction").disabled = true;
    this.page.say("Writing the correction ...");
    try {
      const { revision } = await post(`/api/case/${encodeURIComponent(id)}/draft/save`);
      this.unsaved = false;
      await this.page.saved(id, revision);
    } catch (error) { this.byId("save-correction").disabled = false; this.page.failed(error); }
  }
}
