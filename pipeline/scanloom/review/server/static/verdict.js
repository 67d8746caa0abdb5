// The form of the verdict: of the case, of single structures, tags and a comment.
import { addressOf, post } from "./api.js";
import { byId, element, press, say } from "./dom.js";

const DECISIONS = { accept: "Accept", edit: "Needs edit", reject: "Reject" };
const KEYS = { accept: "a", edit: "e", reject: "r" };
const nameOf = (decision) => DECISIONS[decision] ?? "none";
const quoted = (comment) => (comment ? `, "${comment}"` : "");
const isPressed = (button) => button.getAttribute("aria-pressed") === "true";

/**
 * What the form holds.
 * @typedef {object} Filled
 * @property {?string} decision
 * @property {Object<string, string>} structures Decisions by "<model>/<label>".
 * @property {string[]} tags
 * @property {string} comment
 */

export class Verdict {
  /**
   * @param {object} page
   * @param {(id: string) => Promise} page.saved
   * @param {(id: string) => Promise<object>} page.describeAnew Describes a case as it is now.
   * @param {(error: Error, id: string) => void} page.failed Says why something about a case failed.
   */
  constructor(page) {
    this.page = page;
    /** Id of the case and version of the result that is judged; null while none is shown. */
    this.subject = null;
    this.last = 0; // number of the verdict that counts
    this.since = 0; // when it was shown
    this.decision = null;
    this.structures = {};
    /** The form as it was shown or saved last. @type {Filled} */
    this.saved = {};
    /** What was filled in, but not saved, by the id of its case. */
    this.unsavedForms = new Map();
    const buttons = Object.entries(DECISIONS).map(([value, name]) => {
      const button = toggleButton(`${name} `, "data-decision", value);
      button.append(element("kbd", KEYS[value]));
      button.addEventListener("click", () => this.choose(value));
      return button;
    });
    byId("decisions").replaceChildren(...buttons);
    byId("save").addEventListener("click", () => this.save());
    byId("undo").addEventListener("click", () => this.undo());
  }

  /** @param {{id: string, name: string}[]} tags */
  showTags(tags) {
    const buttons = tags.map(({ id, name }) => {
      const button = toggleButton(name, "data-tag", id);
      button.addEventListener("click", () => press(button, !isPressed(button)));
      return button;
    });
    byId("tags").replaceChildren(...buttons);
  }

  /** @returns {Filled} */
  get filled() {
    const tags = [...byId("tags").children].filter(isPressed).map((button) => button.dataset.tag);
    const { decision, structures } = this;
    return { decision, structures: { ...structures }, tags, comment: byId("comment").value };
  }

  /** @returns {Partial<Filled>} What is not saved. */
  get changes() {
    const isNew = ([key, value]) => JSON.stringify(value) !== JSON.stringify(this.saved[key]);
    return Object.fromEntries(Object.entries(this.filled).filter(isNew));
  }

  get isChanged() {
    return this.subject !== null && Object.keys(this.changes).length > 0;
  }

  get unsaved() {
    return this.isChanged || this.unsavedForms.size > 0;
  }

  /** @param {Filled} filled */
  fillIn({ decision, structures, tags, comment }) {
    this.structures = { ...structures };
    this.choose(decision);
    for (const button of byId("tags").children) press(button, tags.includes(button.dataset.tag));
    for (const select of byId("layers").querySelectorAll("select")) {
      select.value = this.structures[select.dataset.structure] || "";
    }
    byId("comment").value = comment;
  }

  // Show the verdicts about a case; and the form that was filled in, but not saved, when it was left.
  show({ id, version, verdict: own, last, again, state, others }) {
    this.subject = { id, version };
    this.last = last;
    this.since = performance.now();
    const form = this.unsavedForms.get(id);
    this.unsavedForms.delete(id);
    if (form && form.version !== version) {
      Object.assign(form, { decision: null, structures: {} }); // of another result
    }
    this.fillIn(own || { decision: null, structures: {}, tags: [], comment: "" });
    this.saved = this.filled;
    if (form) this.fillIn({ ...this.saved, ...form });
    byId("undo").disabled = !own;
    const texts = [];
    if (this.isChanged) texts.push("Not saved yet.");
    if (again) texts.push("You read this case before: please decide again.");
    if (state === "stale") {
      texts.push("The result was replaced since the verdict: please look again.");
    }
    if (own) {
      const moment = own.at.slice(0, 16).replace("T", " ");
      const comment = own.comment === byId("comment").value ? "" : own.comment;
      texts.push(`Yours: ${nameOf(own.decision)}, ${moment} UTC${quoted(comment)}.`);
    }
    for (const { reviewer, decision, comment } of others) {
      texts.push(`${reviewer}: ${nameOf(decision)}${quoted(comment)}.`);
    }
    byId("decided").textContent = texts.join(" ");
  }

  // Leave a case: a form that is not saved is kept until this page is closed.
  clear() {
    if (this.isChanged) {
      const { id, version } = this.subject;
      this.unsavedForms.set(id, { ...this.changes, version });
    }
    this.subject = null;
    this.choose(null);
    byId("undo").disabled = true;
    byId("decided").textContent = "";
  }

  choose(decision) {
    this.decision = this.subject && decision;
    for (const button of byId("decisions").children) {
      press(button, button.dataset.decision === this.decision);
    }
    byId("save").disabled = !this.decision;
  }

  /**
   * @param {string} key "<model>/<label>" of the structure.
   * @param {string} name
   * @returns {HTMLElement} A choice of the verdict on the structure.
   */
  ofStructure(key, name) {
    const select = element("select", "", {
      "aria-label": `Verdict on ${name}`,
      "data-structure": key,
    });
    const options = Object.entries(DECISIONS).map(([value, text]) =>
      element("option", text, { value }),
    );
    select.append(element("option", "verdict", { value: "" }), ...options);
    select.addEventListener("change", () => {
      if (select.value) this.structures[key] = select.value;
      else delete this.structures[key];
    });
    return select;
  }

  async save() {
    if (!this.decision || byId("save").disabled) return;
    if (this.page.isWriting()) {
      say("Not saved yet: the correction is being written. Decide on it when it is here.");
      return;
    }
    const { id, version } = this.subject;
    const { filled, last } = this;
    const seconds = (performance.now() - this.since) / 1000;
    byId("save").disabled = true;
    try {
      await post(`${addressOf(id)}/verdict`, { ...filled, seconds, version, last });
      if (this.subject?.id === id) this.saved = filled;
      else this.unsavedForms.delete(id);
      await this.page.saved(id);
    } catch (error) {
      if (this.subject?.id === id) byId("save").disabled = false;
      await this.refused(error, id);
    }
  }

  async undo() {
    if (byId("undo").disabled) return;
    const { last, subject } = this;
    try {
      await post(`${addressOf(subject.id)}/undo`, { last });
      await this.readAgain(subject.id);
    } catch (error) {
      await this.refused(error, subject.id);
    }
  }

  // Show the verdict that counts now, under what is filled in.
  async readAgain(id) {
    const verdicts = await this.page.describeAnew(id);
    const { subject } = this;
    if (subject?.id !== id) return;
    this.clear();
    this.show({ ...verdicts, ...subject });
  }

  async refused(refusal, id) {
    if (refusal.reason === "VERDICT_CHANGED") await this.readAgain(id).catch(() => {}); // said below
    this.page.failed(refusal, id);
  }
}

function toggleButton(text, key, value) {
  return element("button", text, { type: "button", "aria-pressed": "false", [key]: value });
}
