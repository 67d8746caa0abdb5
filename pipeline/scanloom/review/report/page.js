// The table of cases: search, filters, order and pages.
import { CaseDialog, CaseElements, addressOf } from "./case.js";
import { byId, make, valueOf } from "./elements.js";
import { Index, Parts } from "./parts.js";

const PAGE = 30;
const THUMBNAIL = "thumbnail.png";
const PREVIEW = "preview.png"; // of results of earlier versions, which have no thumbnail
const MAX_FINDINGS = 6;
const FIELDS = ["search", "status", "verdict", "reason", "flag", "model", "structure"];
const WITH_RESULT = new Set(["done", "outdated"]);

class ReportPage {
  constructor(data) {
    this.index = new Index(new Parts(data.parts, data.folder), data);
    this.count = data.count;
    this.structures = data.structures;
    this.elements = new CaseElements(data);
    this.dialog = new CaseDialog(this.elements, {
      step: (by) => this.step(by),
      closed: () => this.closed(),
    });
    this.initial = Object.fromEntries(FIELDS.map((id) => [id, valueOf(id)]));
    this.key = "risk";
    this.isAscending = false;
    this.page = 0;
    this.selected = new Uint32Array(); // places of the rows that the filters leave
    this.shown = this.selected; // the same in the order of the table
    this.opened = null; // the case in the dialog
    this.turn = 0; // counts changes of filters, order and page: answers to earlier ones are dropped
    this.listen();
  }

  listen() {
    for (const head of document.querySelectorAll("th[data-key]")) {
      const { key } = head.dataset;
      head.querySelector("button").addEventListener("click", () => {
        this.sort(key, this.key === key ? !this.isAscending : key === "id");
      });
    }
    byId("sort").addEventListener("input", (event) => {
      event.stopPropagation();
      this.sort(valueOf("sort"), valueOf("sort") === "id");
    });
    byId("filters").addEventListener("input", () => this.select());
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("back").addEventListener("click", () => this.turnPage(-1));
    byId("next").addEventListener("click", () => this.turnPage(1));
    for (const link of document.querySelectorAll("a[data-case]")) {
      link.addEventListener("click", (event) => {
        event.preventDefault();
        this.openCase(link.dataset.case);
      });
    }
    for (const button of document.querySelectorAll("button[data-reason]")) {
      button.addEventListener("click", () => {
        byId("filters").reset();
        if (byId("reason")) byId("reason").value = button.dataset.reason;
        this.select();
        byId("cases").focus();
      });
    }
    addEventListener("hashchange", () => this.recall());
  }

  // The address

  // Search, filters, order, page and the open case are in the address: back and reload keep them.
  remember(isNew = false) {
    const fields = new URLSearchParams();
    for (const id of FIELDS) if (valueOf(id) !== this.initial[id]) fields.set(id, valueOf(id));
    if (byId("review").checked) fields.set("review", "1");
    if (this.key !== "risk" || this.isAscending) {
      fields.set("sort", `${this.key}${this.isAscending ? "-up" : ""}`);
    }
    if (this.page) fields.set("page", String(this.page + 1));
    if (this.opened) fields.set("case", this.opened.id);
    const text = fields.toString();
    if (location.hash.slice(1) === text) return;
    const address = text ? `#${text}` : location.pathname + location.search;
    if (isNew) history.pushState("case", "", address);
    else history.replaceState(history.state, "", address);
  }

  recall() {
    const fields = new URLSearchParams(location.hash.slice(1));
    for (const id of FIELDS) {
      const field = byId(id);
      const text = fields.get(id) ?? this.initial[id];
      const isKnown = (each) => each.tagName === "INPUT" || hasOption(each, text);
      if (field && isKnown(field)) field.value = text;
    }
    byId("review").checked = fields.has("review");
    const [key, up] = (fields.get("sort") ?? "risk").split("-");
    const isColumn = document.querySelector(`th[data-key="${CSS.escape(key)}"]`);
    this.showOrder(isColumn ? key : "risk", isColumn && up === "up");
    const page = Number.parseInt(fields.get("page") ?? "1", 10) - 1 || 0;
    const opened = fields.get("case");
    return this.update(page, () => {
      if (opened) this.openCase(opened, false);
      else this.leave();
    });
  }

  async openCase(id, isNew) {
    const record = await this.fetched(this.index.find(id));
    if (record) this.open(record, isNew);
    else this.leave();
  }

  leave() {
    this.opened = null;
    if (this.dialog.isOpen) this.dialog.close();
    this.remember();
  }

  // Selection and order

  get pageCount() {
    return Math.max(1, Math.ceil(this.shown.length / PAGE));
  }

  // Wait for something from the parts of the report; say if they are not there.
  async fetched(asked) {
    try {
      return await asked;
    } catch {
      byId("count").textContent =
        "The files of this page are not here: it was written anew, or stands alone. Reload it.";
      return undefined;
    }
  }

  select() {
    return this.update(0, () => this.remember());
  }

  // Conditions of the filters, by field.
  conditions() {
    const conditions = {};
    for (const field of ["status", "verdict", "reason"]) {
      const chosen = valueOf(field);
      if (chosen) conditions[field] = (value) => value === chosen;
    }
    for (const [id, field] of Object.entries({ flag: "flags", model: "models" })) {
      const chosen = valueOf(id);
      if (chosen) conditions[field] = (values) => values.includes(chosen);
    }
    if (byId("review").checked) conditions.review = (value) => value;
    return conditions;
  }

  // Select, order and draw the rows; then do what follows, unless something else was chosen meanwhile.
  async update(page, then) {
    const turn = ++this.turn;
    const terms = valueOf("search").trim().toLowerCase().split(/\s+/).filter(Boolean);
    const selected = await this.fetched(this.index.select(terms, this.conditions()));
    if (!selected || turn !== this.turn) return;
    this.selected = selected;
    await this.order(page, then);
  }

  sort(key, isAscending) {
    this.showOrder(key, isAscending);
    return this.order(0, () => this.remember());
  }

  showOrder(key, isAscending) {
    this.key = key;
    this.isAscending = isAscending;
    for (const head of document.querySelectorAll("th[aria-sort]")) {
      head.removeAttribute("aria-sort");
    }
    const head = document.querySelector(`th[data-key="${key}"]`);
    head.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
    byId("sort").value = key;
  }

  async order(page, then) {
    const turn = ++this.turn;
    const asked = this.index.ordered(
      this.selected,
      this.key,
      this.isAscending,
      valueOf("structure"),
    );
    const shown = await this.fetched(asked);
    if (!shown || turn !== this.turn) return;
    this.shown = shown;
    this.page = Math.min(Math.max(0, page), this.pageCount - 1);
    await this.draw();
    if (turn === this.turn - 1) then();
  }

  turnPage(by) {
    this.page += by;
    this.remember();
    this.draw();
    byId("cases").focus();
  }

  // The dialog

  open(record, isNew = !this.dialog.isOpen) {
    this.opened = record;
    this.dialog.show(record, this.shown.indexOf(record.place), this.shown.length);
    this.remember(isNew);
  }

  async step(by) {
    const from = this.opened;
    const position = this.shown.indexOf(from.place);
    const place = this.shown[position + by];
    if (position < 0 || place === undefined) return;
    const record = await this.fetched(this.index.row(place));
    if (record && this.opened === from) this.open(record);
  }

  closed() {
    if (!this.opened) return;
    this.opened = null;
    // the address before the case was opened
    if (history.state === "case") history.back();
    else this.remember();
  }

  // The table

  async draw() {
    const turn = ++this.turn;
    const first = this.page * PAGE;
    const places = this.shown.slice(first, first + PAGE);
    const rows = Array.from(places, (place) => this.index.row(place));
    const records = await this.fetched(Promise.all(rows));
    if (!records || turn !== this.turn) return;
    byId("rows").replaceChildren(...records.map((record) => this.rowOf(record)));
    byId("count").textContent = `${this.shown.length} of ${this.count} series`;
    byId("page").textContent = `Page ${this.page + 1} of ${this.pageCount}`;
    byId("pages").hidden = this.pageCount === 1;
    byId("back").disabled = this.page === 0;
    byId("next").disabled = this.page + 1 >= this.pageCount;
  }

  rowOf(record) {
    const name = make("th", undefined, "id");
    name.scope = "row";
    const link = make("a", record.id);
    link.href = `#case=${encodeURIComponent(record.id)}`;
    this.opens(link, record);
    name.append(link);
    if (record.source) {
      const [patient, patientName, , , , description, path] = record.source;
      const text = [patient, patientName, description].filter(Boolean).join(", ") || path;
      name.append(make("p", text, "known"));
    }
    const ml = record.volumes[valueOf("structure")] ?? null;
    const risk = WITH_RESULT.has(record.status) ? record.risk.toFixed(1) : "";
    const cells = [this.picture(record), name, make("td", record.status, record.status)];
    if (byId("verdict")) cells.push(namedCell("Verdict", record.verdict ?? ""));
    cells.push(
      namedCell("Risk", risk, `number ${record.review ? "review" : "quiet"}`),
      this.findings(record),
      namedCell("Volume, ml", ml === null ? "" : String(ml), "number "),
      namedCell("Seconds", record.seconds ? record.seconds.toFixed(1) : "", "number "),
    );
    const line = make("tr");
    line.append(...cells);
    line.setAttribute("role", "row");
    for (const cell of cells) cell.setAttribute("role", cell === name ? "rowheader" : "cell");
    return line;
  }

  picture(record) {
    const cell = make("td");
    if (!record.preview) return cell;
    const link = make("a");
    link.href = addressOf(record, PREVIEW);
    this.opens(link, record);
    const image = make("img");
    [image.width, image.height] = record.preview;
    image.loading = "lazy";
    image.decoding = "async";
    image.alt = `Preview of case ${record.id}`;
    image.src = addressOf(record, record.files.includes(THUMBNAIL) ? THUMBNAIL : PREVIEW);
    link.append(image);
    cell.append(link);
    return cell;
  }

  opens(link, record) {
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      this.open(record);
    });
  }

  findings(record) {
    const cell = make("td", undefined, "findings");
    const { findings } = record;
    if (record.reason) cell.append(this.elements.reason(record));
    if (findings.length) {
      const list = make("ul");
      for (const { text, value } of findings.slice(0, MAX_FINDINGS)) {
        const item = make("li", text);
        const picture = value && this.elements.stripOf(...value);
        if (picture) item.append(picture);
        list.append(item);
      }
      const more = findings.length - MAX_FINDINGS;
      if (more > 0) list.append(make("li", `and ${more} more`));
      cell.append(list);
    } else if (record.status === "done" && !record.reason) {
      cell.append(make("p", "no findings", "quiet"));
    }
    if (record.flags.length) cell.append(make("p", record.flags.join(", "), "flag"));
    if (record.volumes.some((ml) => ml > 0)) cell.append(this.volumes(record));
    return cell;
  }

  volumes(record) {
    const box = make("details");
    const list = make("dl", undefined, "volumes");
    const present = this.structures
      .map((name, n) => [name, record.volumes[n]])
      .filter(([, ml]) => ml > 0);
    const text = present.length === 1 ? "1 structure" : `${present.length} structures`;
    box.append(make("summary", text), list);
    const fill = () =>
      list.append(...present.flatMap(([name, ml]) => [make("dt", name), make("dd", `${ml} ml`)]));
    box.addEventListener("toggle", fill, { once: true });
    return box;
  }
}

const hasOption = (field, text) => [...field.options].some((option) => option.value === text);

// A cell with the title of its column, which narrow pages show beside it.
function namedCell(name, text, kind) {
  const cell = make("td", text, kind);
  cell.dataset.name = name;
  return cell;
}

const report = new ReportPage(JSON.parse(byId("data").textContent));
// the words are there when the first search is typed; who misses them is told then
const loadAhead = () => report.index.words().catch(() => {});
report.recall().then(() => (globalThis.requestIdleCallback ?? setTimeout)(loadAhead)); // Safari has none
