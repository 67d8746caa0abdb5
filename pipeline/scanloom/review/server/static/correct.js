// Corrections: a brush on any plane; the server paints, and every plane shows the result.
// Steps are sent one by one, each with the version of the correction that it changes: another window may change it too.
import { element, get, post } from "./api.js";

const RETRY_MS = 2000;
const strokes = (count) => `${count} ${count === 1 ? "stroke" : "strokes"}`;

export class Correction {
  // page: { about, at, active, planes, reload(), say, failed, saved() }
  constructor(byId, page) {
    Object.assign(this, { byId, page, on: false, eraser: false, points: null, waiting: [], sending: null, versions: new Map() });
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
    this.steps({ undo: 0, redo: 0, strokes: false });
    this.byId("brush-label").replaceChildren(...this.page.about.layers.flatMap((layer) =>
      layer.labels.map((each) => element("option", each.name, { value: `${layer.index}:${each.value}` }))));
    this.byId("correct").disabled = !this.page.about.layers.length;
  }

  // Show the strokes that were not saved. `answer`: the server's, awaited here.
  async resume(answer) {
    const { about } = this.page, left = await answer;
    if (this.page.about !== about) return "";
    this.versions.set(about.id, left.version);
    if (left.dropped) return `${strokes(left.dropped)} that were not saved are dropped: the result has other voxels or structures now.`;
    this.steps(left);
    if (!left.strokes && !left.redo) return "";
    this.set(true);
    await this.page.reload();
    if (left.carried) return `The result was replaced: ${strokes(left.carried)} of yours were painted on the new one. Look at it, then save or discard.`;
    return left.strokes ? `${strokes(left.undo)} of your correction not saved yet: save or discard.` : "";
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

  steps({ undo, redo, strokes }) {
    this.byId("stroke-undo").disabled = !undo;
    this.byId("save-correction").disabled = this.byId("discard").disabled = !strokes;
    this.byId("stroke-redo").disabled = !redo;
  }

  // Strokes that the server does not have yet: those that it has are on its disk.
  get unsaved() { return this.waiting.length > 0; }

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

  send(path, body = {}) {
    this.waiting.push({ id: this.page.about.id, path, body });
    return this.start();
  }

  start() {
    this.sending ??= this.sendAll().finally(() => { this.sending = null; if (this.waiting.length) this.start(); });
    return this.sending;
  }

  // Send what waits. Strokes that were refused because another window changed the correction are sent again.
  async sendAll() {
    const again = new Set(), lost = [];
    let said = "", id = null, refused = null;
    while (this.waiting.length) {
      const [step] = this.waiting;
      id = step.id;
      try {
        const answer = await this.post(step);
        if (typeof answer.changed === "number") said = `${answer.changed} voxels changed`;
      } catch (error) {
        if (!error.reason || error.reason === "SESSION" || error.status === 503) { await this.pause(error); continue; }
        if (error.reason === "DRAFT_CHANGED" && step.path === "stroke") { again.add(step); continue; }
        refused = error;
        lost.push(...this.waiting.filter((each) => each === step || error.reason === "STALE" && each.id === id));
      }
      this.waiting = this.waiting.filter((each) => each !== step && !lost.includes(each));
    }
    if (again.size) said = `Another window changed this correction: ${strokes(again.size)} of this window painted on it again.`;
    await this.tell(id, said, refused, lost.filter(({ path }) => path === "stroke").length);
  }

  pause(error) {
    const text = error.reason ? error.message.replace(/\.$/, "") : "The server does not answer";
    this.page.say(`${text}: ${strokes(this.waiting.length)} not painted yet.`, true);
    return new Promise((done) => setTimeout(done, RETRY_MS));
  }

  // Show the correction as it is now, and what became of the steps that were sent.
  async tell(id, said, refused, lost) {
    const shown = this.page.about?.id === id;
    if (refused?.reason === "DRAFT_CHANGED") refused.message += " Look at it, then do that again.";
    if (refused && lost) refused.message = `${refused.message.replace(/\.?$/, ".")} Not painted: ${strokes(lost)}.`;
    if (!refused && shown) this.page.say(said);
    if (refused && shown) this.page.failed(refused);
    if (refused && !shown) this.page.say(refused.message, true);
    if (shown && refused?.reason !== "STALE") await this.page.reload();
  }

  // Send a step; if another window changed the correction since, read its version before that is told.
  async post({ id, path, body }) {
    const address = `/api/case/${encodeURIComponent(id)}`;
    try {
      if (!this.versions.has(id)) this.heard(id, await get(`${address}/draft`));
      return this.heard(id, await post(`${address}/${path}`, { ...body, version: this.versions.get(id) }));
    } catch (error) {
      if (error.reason === "DRAFT_CHANGED") this.heard(id, await get(`${address}/draft?version=${encodeURIComponent(this.versions.get(id))}`));
      throw error;
    }
  }

  heard(id, answer) {
    if (answer.version) this.versions.set(id, answer.version);
    if (answer.version && this.page.about?.id === id) this.steps(answer);
    return answer;
  }

  async discard() {
    if (confirm("Discard all strokes of this correction?")) await this.send("draft/discard");
  }

  async save() {
    const id = this.page.about.id;
    await this.sending;
    this.byId("save-correction").disabled = true;
    this.page.say("Writing the correction ...");
    try {
      const { revision } = await this.post({ id, path: "draft/save" });
      await this.page.saved(id, revision);
    } catch (error) {
      this.byId("save-correction").disabled = false;
      if (error.reason === "DRAFT_CHANGED") { error.message += " Look at it, then save again."; await this.page.reload(); }
      this.page.failed(error);
    }
  }
}
