// The page of a case over the table: findings, picture, flags, measurements, files, source.
import { byId, copyable, listOf, make, section, sentence } from "./elements.js";
import { describe, slice, strip } from "./figures.js";

const SOURCE = ["patient", "name", "accession", "study date", "series", "description", "path"];

/**
 * @param {object} record
 * @param {string} name Path of a file in the folder of the case.
 * @returns {string}
 */
export function addressOf(record, name) {
  const folders = record.subfolder ? [record.subfolder, record.id] : [record.id];
  return ["../cases", ...[...folders, ...name.split("/")].map(encodeURIComponent)].join("/");
}

/** Elements that tell of a case, in the table and on its own page. */
export class CaseElements {
  /** @param {object} data Data of the report. */
  constructor({ structures, distributions, advice }) {
    this.structures = structures;
    this.distributions = distributions;
    this.advice = advice;
  }

  /** @returns {?Distribution} */
  distributionOf(structure, quantity) {
    return this.distributions[`${structure}:${quantity}`] ?? null;
  }

  /** Return the place of a value among those of other cases; null if it is unknown. */
  stripOf(structure, quantity, value) {
    const known = this.distributionOf(structure, quantity);
    return known && value !== null && value !== undefined ? strip(known, value) : null;
  }

  reason(record) {
    const line = make("p");
    const texts = [record.detail, this.advice[record.reason]].filter(Boolean);
    line.append(make("code", record.reason), ...texts.flatMap((text) => sentence(` ${text}.`)));
    return line;
  }

  // A finding with the slices that it is about, and its place among the other cases.
  card(record, finding) {
    const item = make("li");
    item.append(make("p", finding.text));
    const slices = make("div", undefined, "slices");
    for (const each of finding.slices ?? []) {
      const label = `Slice ${each.number}: ${finding.text}`;
      slices.append(slice(addressOf(record, "preview.png"), record.page, each, label));
    }
    if (slices.firstChild) item.append(slices);
    const picture = finding.value && this.stripOf(...finding.value);
    if (picture) {
      const [structure, quantity] = finding.value;
      const text = describe(this.distributionOf(structure, quantity));
      const figure = make("figure");
      figure.append(picture, make("figcaption", text));
      item.append(figure);
    }
    return item;
  }

  verdict(record) {
    const box = section(record.status);
    box.firstChild.className = record.status;
    if (record.verdict) box.append(make("p", `Verdict of the reviewers: ${record.verdict}`));
    if (record.reason) box.append(this.reason(record));
    if (record.findings.length) {
      const cards = record.findings.map((finding) => this.card(record, finding));
      box.append(listOf("plain cards", cards));
    } else if (record.status === "done" && !record.reason) {
      box.append(make("p", "no findings", "quiet"));
    }
    return box;
  }

  measurements(record) {
    const head = make("tr");
    for (const title of ["Structure", "Volume, ml", "", `Mean, ${record.units}`, "", "Parts"]) {
      const kind = title === "Structure" ? "" : "number";
      const cell = title ? make("th", title, kind) : make("td");
      if (title) cell.scope = "col";
      head.append(cell);
    }
    const top = make("thead");
    top.append(head);
    const body = make("tbody");
    this.structures.forEach((name, n) => {
      const volume = record.volumes[n];
      if (volume !== null && volume >= 0) body.append(this.measurement(record, name, n));
    });
    const table = make("table");
    table.append(top, body);
    const box = make("div", undefined, "scroll");
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Measurements of the case");
    box.append(table);
    if (box.querySelector("svg")) {
      const text =
        "Dot: this case. Bars: the other cases. Band: usual values, or the reference range of the model.";
      box.append(make("p", text, "notice"));
    }
    return box;
  }

  measurement(record, name, n) {
    const line = make("tr");
    const title = make("th", name);
    title.scope = "row";
    line.append(title);
    const [volume, mean] = [record.volumes[n], record.means[n]];
    for (const [quantity, value, isCompared] of [
      ["volume", volume, volume > 0],
      ["intensity", mean, record.units === "HU"],
    ]) {
      const picture = isCompared ? this.stripOf(n, quantity, value) : null;
      const cell = make("td");
      if (picture) cell.append(picture);
      line.append(make("td", value === null ? "" : String(value), "number"), cell);
    }
    line.append(make("td", String(record.parts[n]), "number"));
    return line;
  }

  flags(record) {
    const list = make("dl", undefined, "explained");
    for (const code of record.flags) {
      const text = make("dd");
      text.append(...sentence(this.advice[code] ?? ""));
      list.append(make("dt", code), text);
    }
    return list;
  }

  files(record) {
    const items = record.files.map((name) => {
      const link = make("a", name);
      const item = make("li");
      link.href = addressOf(record, name);
      item.append(link);
      return item;
    });
    return listOf("plain files", items);
  }

  source(record) {
    const known = record.source;
    const box = section("Source", copyable(`scanloom where ${record.case ?? record.id}`));
    if (!known) return box;
    const list = make("dl", undefined, "volumes");
    SOURCE.forEach((title, n) => {
      if (known[n]) list.append(make("dt", title), make("dd", known[n]));
    });
    box.append(list);
    return box;
  }

  /** Return all that is known of a case. */
  whole(record) {
    const elements = [this.verdict(record)];
    if (record.preview) {
      const image = make("img", undefined, "large");
      image.alt = `Preview of case ${record.id}`;
      image.src = addressOf(record, "preview.png");
      elements.push(image);
    }
    if (record.volumes.length) {
      elements.push(section("Measurements", this.measurements(record)));
    }
    const box = make("div", undefined, "parts");
    if (record.flags.length) box.append(section("Flags", this.flags(record)));
    if (record.files.length) box.append(section("Files", this.files(record)));
    box.append(this.source(record));
    return [...elements, box];
  }
}

/** The dialog that shows a case. */
export class CaseDialog {
  /**
   * @param {CaseElements} elements
   * @param {{step: (by: number) => void, closed: () => void}} page
   */
  constructor(elements, page) {
    this.elements = elements;
    this.dialog = byId("case");
    byId("case-back").addEventListener("click", () => page.step(-1));
    byId("case-next").addEventListener("click", () => page.step(1));
    byId("case-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft") page.step(-1);
      if (event.key === "ArrowRight") page.step(1);
    });
    this.dialog.addEventListener("close", () => page.closed());
  }

  get isOpen() {
    return this.dialog.open;
  }

  close() {
    this.dialog.close();
  }

  /**
   * @param {object} record
   * @param {number} position In the selection of the table; -1 outside it.
   * @param {number} count Size of the selection.
   */
  show(record, position, count) {
    const body = byId("case-body");
    byId("case-title").textContent = `Case ${record.id}`;
    byId("case-place").textContent =
      position < 0 ? "not in the table's selection" : `${position + 1} of ${count}`;
    byId("case-back").disabled = position <= 0;
    byId("case-next").disabled = position < 0 || position + 1 >= count;
    body.replaceChildren(...this.elements.whole(record));
    if (!this.dialog.open) this.dialog.showModal();
    body.scrollTop = 0;
  }
}
