// The list of cases: filters and search stand in the address.
import { HOME, SILENT, addressOf, enter, get, pixels } from "./api.js";
import { byId, element, say } from "./dom.js";
import { STATES, chosen, isOpen, rowsOf } from "./worklist.js";

const PAGE = 100;
const POLL_MS = 5000;
const MAX_DOUBTS = 3;

class ListPage {
  constructor() {
    this.query = new URLSearchParams(location.search);
    this.listed = null; // the last answer of the server
    this.rows = [];
    this.shown = []; // the rows that the filters leave
    this.drawn = 0; // of these, the rows that are in the table
    /** Addresses of thumbnails, by case and revision. @type {Map<string, Promise<string>>} */
    this.pictures = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting) this.picture(target.querySelector("img"));
      }
    });
    this.end = new IntersectionObserver((entries) => {
      if (entries.at(-1).isIntersecting && this.drawn < this.shown.length) this.drawMore();
    });
    this.listen();
  }

  listen() {
    const set = (key, value) => {
      this.query.set(key, value);
      this.remember();
      this.draw();
    };
    byId("search").value = this.query.get("q") || "";
    byId("search").addEventListener("input", () => set("q", byId("search").value));
    for (const id of ["model", "modality"]) {
      byId(id).addEventListener("change", () => set(id, byId(id).value));
    }
    byId("doubtful").checked = Boolean(this.query.get("doubtful"));
    byId("doubtful").addEventListener("change", () =>
      set("doubtful", byId("doubtful").checked ? "1" : ""),
    );
    byId("filters").addEventListener("click", (event) => {
      const state = event.target.closest("button")?.dataset.state;
      if (!state) return;
      set("filter", state);
      byId("filters").querySelector(`[data-state=${state}]`).focus();
    });
    byId("next").addEventListener("click", () => this.openNext());
    byId("keys").addEventListener("click", () => byId("help").showModal());
    byId("close").addEventListener("click", () => byId("help").close());
    document.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input:not([type=checkbox]), select, dialog")) return;
    if (event.key === "?") byId("help").showModal();
    if (event.key === "n") this.openNext();
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const links = [...document.querySelectorAll("#rows a.id")];
      const here = links.indexOf(document.activeElement);
      const link = links[here < 0 ? 0 : here + (event.key === "ArrowDown" ? 1 : -1)];
      if (!link) return;
      event.preventDefault();
      link.focus();
    }
    if (event.key === "/") {
      event.preventDefault();
      byId("search").focus();
    }
  }

  remember() {
    const entries = Array.from(this.query);
    for (const [key, value] of entries) if (!value || value === "all") this.query.delete(key);
    history.replaceState(null, "", this.query.size ? `?${this.query}` : location.pathname);
  }

  addressOf(row) {
    return `${HOME}case/${encodeURIComponent(row.id)}${location.search}`;
  }

  openNext() {
    const row = this.shown.find(isOpen) || this.rows.find(isOpen);
    if (row) location.assign(this.addressOf(row));
  }

  // Fetch the list if it changed since.
  async load() {
    try {
      const since = this.listed ? `?since=${encodeURIComponent(this.listed.version)}` : "";
      const answer = await get(`/api/worklist${since}`);
      if (answer) this.show(answer);
      byId("status").classList.remove("error");
    } catch (error) {
      say(error.reason ? error.message : SILENT, true);
    }
  }

  show(answer) {
    const isNews = this.listed !== null;
    this.listed = answer;
    this.rows = rowsOf(answer);
    const values = {
      model: this.rows.flatMap((row) => row.models),
      modality: this.rows.map((row) => row.modality),
    };
    for (const [id, all] of Object.entries(values)) {
      // a choice that is open would close
      if (!isNews || document.activeElement.id !== id) this.drawChoice(id, all);
    }
    this.draw(isNews);
  }

  // Draw the list anew from its top; or after news, with as many rows and the focus as before.
  draw(isNews = false) {
    const focused = document.activeElement.closest("#rows a.id, #filters button");
    const count = isNews ? Math.max(this.drawn, PAGE) : PAGE;
    this.drawFilters();
    this.shown = chosen(this.rows, this.query);
    this.drawn = 0;
    byId("rows").replaceChildren();
    this.drawMore(count);
    if (focused) {
      const same = focused.dataset.state
        ? `[data-state=${focused.dataset.state}]`
        : `#rows a.id[href="${focused.getAttribute("href")}"]`;
      document.querySelector(same)?.focus({ preventScroll: true });
    }
    this.drawCounts();
  }

  drawCounts() {
    const { damaged } = this.listed;
    const all = `${this.shown.length} of ${this.rows.length} cases`;
    byId("count").textContent = damaged
      ? `${all}; ${damaged} can't be read: see scanloom verify`
      : all;
    document.body.classList.toggle("empty", !this.rows.length);
    let text = "";
    if (!this.rows.length) {
      text = damaged
        ? `No case can be shown: ${damaged} can't be read, see scanloom verify.`
        : "No case has a result yet. Results appear here while a run goes on.";
    }
    byId("status").textContent = text;
    byId("next").disabled = !this.rows.some(isOpen);
  }

  drawFilters() {
    const current = this.query.get("filter") || "all";
    const buttons = Object.entries(STATES).map(([state, name]) =>
      element("button", `${name} ${this.listed.counts[state] ?? 0}`, {
        type: "button",
        "aria-pressed": String(state === current),
        "data-state": state,
      }),
    );
    byId("filters").replaceChildren(...buttons);
  }

  drawChoice(id, all) {
    const values = [...new Set(all)].filter(Boolean).sort();
    const requested = this.query.get(id) || "";
    if (requested && !values.includes(requested)) values.push(requested);
    byId(id).replaceChildren(
      element("option", "all", { value: "" }),
      ...values.map((value) => element("option", value, { value })),
    );
    byId(id).value = requested;
  }

  drawMore(count = PAGE) {
    const rows = this.shown.slice(this.drawn, this.drawn + count);
    byId("rows").append(...rows.map((row) => this.rowOf(row)));
    this.drawn += rows.length;
    const isWhole = this.drawn >= this.shown.length;
    byId("end").textContent = isWhole ? "" : "More cases follow as you scroll.";
    this.end.unobserve(byId("end")); // so that it is looked at again: the rows may not fill the window
    this.end.observe(byId("end"));
  }

  // Show the thumbnail of a row when it comes into view; a case may have none.
  async picture(image) {
    this.seen.unobserve(image.closest(".frame"));
    const { id, key } = image.dataset;
    if (!this.pictures.has(key)) {
      const made = pixels(`${addressOf(id)}/thumbnail`).then((content) =>
        URL.createObjectURL(new Blob([content], { type: "image/png" })),
      );
      this.pictures.set(key, made);
    }
    try {
      image.src = await this.pictures.get(key);
      image.hidden = false;
    } catch {
      image.closest(".frame").remove();
    }
  }

  rowOf(row) {
    const name = element("th", "", { scope: "row" });
    const link = element("a", "", { href: this.addressOf(row), tabindex: "-1" });
    const image = element("img", "", {
      alt: "",
      class: "thumbnail",
      "data-id": row.id,
      "data-key": `${row.id} ${row.revision}`,
    });
    image.hidden = true;
    link.append(image);
    const frame = element("div", "", { class: "frame", "aria-hidden": "true" });
    frame.append(link);
    this.seen.observe(frame);
    name.append(frame, element("a", row.id, { href: this.addressOf(row), class: "id" }));
    if (row.who.length) name.append(element("div", row.who.join(" · "), { class: "who" }));
    const doubts = element("td");
    if (row.doubts.length) {
      const list = element("ul");
      for (const text of row.doubts.slice(0, MAX_DOUBTS)) list.append(element("li", text));
      const more = row.doubts.length - MAX_DOUBTS;
      if (more > 0) list.append(element("li", `${more} more`));
      doubts.append(list);
    }
    const scan = `${row.modality} ${row.slices.join(" × ")}, ${row.spacing.join(" × ")} mm`;
    const revision = [row.revision || "", row.draft ? "correction not saved" : ""];
    const line = element("tr");
    line.append(
      name,
      element("td", STATES[row.state], { class: row.state }),
      element("td", row.mine ? STATES[row.mine] : "", { "data-name": "Yours" }),
      doubts,
      element("td", scan),
      element("td", row.models.join(", ")),
      element("td", revision.filter(Boolean).join(", "), {
        class: "number",
        "data-name": "Revision",
      }),
    );
    return line;
  }
}

const page = new ListPage();
try {
  const me = await enter();
  byId("reviewer").textContent = `Reviewer: ${me.name}${me.blind ? ", double reading" : ""}`;
} catch {
  /* said by what follows */
}
await page.load();
setInterval(() => page.load(), POLL_MS);
