// The form of the verdict: of the case, of single structures, tags and a comment.
import { element, post } from "./api.js";

const DECISIONS = { accept: ["Accept", "a"], edit: ["Needs edit", "e"], reject: ["Reject", "r"] };

export class Verdict {
  constructor(byId, { saved, failed }) {
    Object.assign(this, { byId, saved, failed, structures: {}, since: 0, id: null, shown: "", kept: new Map() });
    byId("decisions").replaceChildren(...Object.entries(DECISIONS).map(([value, [name, key]]) => {
      const button = element("button", `${name} `, { type: "button", "aria-pressed": "false", "data-decision": value });
      button.append(element("kbd", key));
      button.addEventListener("click", () => this.choose(value));
      return button;
    }));
    byId("save").addEventListener("click", () => this.save());
    byId("undo").addEventListener("click", () => this.undo());
  }

  tags(all) {
    this.byId("tags").replaceChildren(...all.map(({ id, name }) => {
      const button = element("button", name, { type: "button", "aria-pressed": "false", "data-tag": id });
      button.addEventListener("click", () => button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true")));
      return button;
    }));
  }

  // What the form holds.
  get filled() {
    const tags = [...this.byId("tags").querySelectorAll("[aria-pressed=true]")].map((button) => button.dataset.tag);
    return { decision: this.decision, structures: this.structures, tags, comment: this.byId("comment").value };
  }

  get changed() { return this.id !== null && JSON.stringify(this.filled) !== this.shown; }

  get unsaved() { return this.changed || this.kept.size > 0; }

  fill({ decision, structures, tags, comment }) {
    this.structures = { ...structures };
    this.choose(decision);
    for (const button of this.byId("tags").children) button.setAttribute("aria-pressed", String(tags.includes(button.dataset.tag)));
    for (const select of this.byId("layers").querySelectorAll("select")) select.value = this.structures[select.dataset.structure] || "";
    this.byId("comment").value = comment;
  }

  // Show what was decided about a case; and what was filled in, but not saved, when it was left.
  show(info) {
    Object.assign(this, { id: info.id, recipe: info.recipe, seen: info.seen, since: performance.now() });
    const own = info.verdict, kept = this.kept.get(info.id);
    this.kept.delete(info.id);
    if (kept && JSON.stringify(kept.seen) !== JSON.stringify(info.seen)) Object.assign(kept, { decision: null, structures: {} });  // of another result
    this.fill(own || { decision: null, structures: {}, tags: [], comment: "" });
    this.shown = JSON.stringify(this.filled);
    if (kept) this.fill(kept);
    this.byId("undo").disabled = !own;
    const words = [];
    if (this.changed) words.push("Not saved yet.");
    if (info.again) words.push("You read this case before: please decide again.");
    if (info.state === "stale") words.push("The result was replaced since the verdict: please look again.");
    if (own) words.push(`Yours: ${DECISIONS[own.decision]?.[0] ?? "none"}, ${own.at.slice(0, 16).replace("T", " ")} UTC.`);
    for (const other of info.others) words.push(`${other.reviewer}: ${DECISIONS[other.decision]?.[0] ?? "none"}${other.comment ? `, "${other.comment}"` : ""}.`);
    this.byId("decided").textContent = words.join(" ");
  }

  // Leave a case: what was filled in is kept until this page is closed.
  clear() {
    if (this.changed) this.kept.set(this.id, { ...this.filled, seen: this.seen });
    this.id = null;
    this.choose(null);
    this.byId("undo").disabled = true;
    this.byId("decided").textContent = "";
  }

  choose(given) {
    const decision = this.id === null ? null : given;
    this.decision = decision;
    for (const button of this.byId("decisions").children) button.setAttribute("aria-pressed", String(button.dataset.decision === decision));
    this.byId("save").disabled = !decision;
  }

  ofStructure(key, name) {
    const select = element("select", "", { "aria-label": `Verdict on ${name}` });
    select.dataset.structure = key;
    select.append(element("option", "", { value: "" }), ...Object.entries(DECISIONS).map(([value, [text]]) => element("option", text, { value })));
    select.addEventListener("change", () => { if (select.value) this.structures[key] = select.value; else delete this.structures[key]; });
    return select;
  }

  async save() {
    if (this.id === null || !this.decision || this.byId("save").disabled) return;
    const id = this.id, filled = this.filled;
    const body = { ...filled, seconds: (performance.now() - this.since) / 1000, recipe: this.recipe, seen: this.seen };
    this.byId("save").disabled = true;
    try {
      await post(`/api/case/${encodeURIComponent(id)}/verdict`, body);
      if (this.id === id) this.shown = JSON.stringify(filled); else this.kept.delete(id);
      await this.saved(id);
    } catch (error) {
      this.byId("save").disabled = false;
      this.failed(error);
    }
  }

  async undo() {
    if (this.byId("undo").disabled) return;
    try {
      const left = await post(`/api/case/${encodeURIComponent(this.id)}/undo`);
      this.show({ ...left, id: this.id, recipe: this.recipe, seen: this.seen });
    } catch (error) { this.failed(error); }
  }
}
