// The list of cases: filters and search stand in the address. The server chooses the rows; those around the window are
// here, in blocks, and rows that were scrolled far away leave a gap of their height.
import { SILENT, addressOf, enter, get, pageOf, pixels } from "./api.js";
import { byId, element, say } from "./dom.js";

const PAGE = 100; // rows of a block
const MOST_BLOCKS = 10; // in one request
const NEAR = 2; // heights of the window, above and below it, in which blocks are filled
const SETTLE_MS = 100;
const POLL_MS = 5000;
const MAX_DOUBTS = 3;

/** Names of the filters and of the states of cases. */
const STATES = {
  all: "All",
  open: "Open",
  mine: "Mine",
  disagreed: "Disagreed",
  accept: "Accepted",
  edit: "Needs edit",
  reject: "Rejected",
  stale: "Replaced since",
};

/**
 * A case of the list, as the server sends it.
 * @typedef {object} Row
 * @property {string} id
 * @property {string} modality
 * @property {number[]} slices
 * @property {number[]} spacing
 * @property {string[]} models
 * @property {string[]} doubts
 * @property {string} state
 * @property {?string} mine
 * @property {number} revision
 * @property {string} version Of its result.
 * @property {boolean} draft
 * @property {string[]} who Patient, date and series, if the reviewer may see them.
 */

/**
 * Rows of the table, one after another; a single empty one while the block is far away.
 * @typedef {object} Block
 * @property {HTMLElement[]} lines
 * @property {boolean} isGap
 */

class ListPage {
  constructor() {
    this.query = new URLSearchParams(location.search);
    this.listed = null; // the last answer of the server
    /** Of the rows that the filters leave, those down to where the window was. @type {Block[]} */
    this.blocks = [];
    /** Lines of the table that are here, by the id of their case. @type {Map<string, HTMLElement>} */
    this.rows = new Map();
    this.turn = 0; // counts changes of the filters: answers for earlier ones are dropped
    this.isFetching = false; // whether the rows that follow are on their way
    this.isSettling = false; // whether the window is looked at soon
    /** Thumbnails by the id of their case. @type {Map<string, {version: string, address: Promise<string>}>} */
    this.pictures = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting) this.picture(target.querySelector("img"));
      }
    });
    this.end = new IntersectionObserver((entries) => {
      if (entries.at(-1).isIntersecting) this.more();
    });
    this.listen();
  }

  listen() {
    const set = (key, value) => {
      this.query.set(key, value);
      this.remember();
      this.choose();
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
    for (const kind of ["scroll", "resize"]) {
      addEventListener(kind, () => this.settleSoon(), { passive: true });
    }
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

  openNext() {
    const id = this.listed?.next;
    if (id) location.assign(pageOf(id));
  }

  // Rows

  /** Ask for rows at places of the selection, from first; null if nothing changed since a version. */
  ask(first, count, since = "") {
    const fields = new URLSearchParams(this.query);
    fields.set("rows", `${first}-${first + count - 1}`);
    if (since) fields.set("since", since);
    return get(`/api/worklist?${fields}`);
  }

  /** Ask for something, unless the filters change meanwhile; say why it failed. */
  async fetched(asked, use) {
    const { turn } = this;
    try {
      const answer = await asked;
      if (turn !== this.turn) return;
      byId("status").classList.remove("error");
      if (answer) use(answer);
    } catch (error) {
      if (turn === this.turn) say(error.reason ? error.message : SILENT, true);
    }
  }

  // Show the rows that the filters leave, from the top.
  async choose() {
    this.turn += 1;
    if (this.listed) this.drawFilters();
    await this.fetched(this.ask(0, PAGE), (answer) => {
      this.listed = answer;
      this.blocks = [];
      byId("rows").replaceChildren();
      this.rows.clear();
      this.fill(0, answer);
      this.drawAll(true);
    });
  }

  // Fetch what changed since, of the rows around the window.
  async load() {
    if (!this.listed) {
      await this.choose();
      return;
    }
    const near = this.blocks.flatMap((block, n) => (this.isNear(block) ? [n] : []));
    const first = near[0] ?? 0;
    const count = Math.min(MOST_BLOCKS, (near.at(-1) ?? 0) + 1 - first);
    const asked = this.ask(first * PAGE, count * PAGE, this.listed.version);
    await this.fetched(
      asked.then((answer) => this.whole(answer, first * PAGE)),
      (answer) => {
        this.listed = answer;
        this.keepFocus(() => {
          this.fill(first, answer);
          this.cut(answer.found);
        });
        this.drawAll(false);
      },
    );
  }

  // Fetch rows too that did not change, but came into the window since others left it.
  async whole(answer, first) {
    if (!answer) return null;
    const changed = new Set(answer.cases.map((row) => row.id));
    const isHere = (id) => this.rows.has(id) || changed.has(id);
    const missing = answer.names.flatMap((id, n) => (isHere(id) ? [] : [n]));
    if (!missing.length) return answer;
    const more = await this.ask(first + missing[0], missing.at(-1) - missing[0] + 1);
    return { ...answer, cases: [...more.cases, ...answer.cases] };
  }

  // Add the rows that follow, when the end is in view.
  async more() {
    const n = this.blocks.length;
    if (!this.listed || n * PAGE >= this.listed.found || this.isFetching) return;
    this.isFetching = true;
    await this.fetched(this.ask(n * PAGE, PAGE), (answer) => {
      if (this.blocks.length === n) this.fill(n, answer);
    });
    this.isFetching = false;
    this.drawEnd();
  }

  /**
   * Put rows into blocks: those that changed are in the answer, the others are here.
   * @param {number} first Number of the first block.
   * @param {{names: string[], cases: Row[]}} answer
   */
  fill(first, answer) {
    for (const row of answer.cases) this.rows.set(row.id, this.rowOf(row));
    const known = answer.names.filter((id) => this.rows.has(id));
    if (known.length < answer.names.length) this.listed.version = ""; // the list changed meanwhile: ask for all again
    for (let n = first; (n - first) * PAGE < known.length; n += 1) {
      const names = known.slice((n - first) * PAGE, (n - first + 1) * PAGE);
      this.put(n, { lines: names.map((id) => this.rows.get(id)), isGap: false });
    }
    this.forget();
  }

  // Forget rows that are not in the page any more, with their pictures.
  forget() {
    for (const [id, line] of this.rows) {
      if (line.isConnected) continue;
      this.rows.delete(id);
      this.dropPicture(id);
    }
  }

  dropPicture(id) {
    this.pictures.get(id)?.address.then(URL.revokeObjectURL, () => {});
    this.pictures.delete(id);
  }

  // Set a block; rows that stay are not taken out of the page, so that nothing jumps.
  put(n, block) {
    const old = this.blocks[n]?.lines ?? [];
    const stays = new Set(block.lines);
    const after = this.blocks[n + 1]?.lines[0] ?? null;
    for (const line of old) if (!stays.has(line)) line.remove();
    let next = after;
    for (const line of block.lines.toReversed()) {
      if (line.nextSibling !== next || !line.parentNode) byId("rows").insertBefore(line, next);
      next = line;
    }
    this.blocks[n] = block;
  }

  // Leave out the blocks behind the last row.
  cut(found) {
    for (const block of this.blocks.splice(Math.ceil(found / PAGE))) {
      for (const line of block.lines) line.remove();
    }
  }

  isNear({ lines }) {
    if (!lines.length) return true;
    const room = NEAR * innerHeight;
    const bottom = lines.at(-1).getBoundingClientRect().bottom;
    return lines[0].getBoundingClientRect().top < innerHeight + room && bottom > -room;
  }

  settleSoon() {
    if (this.isSettling) return;
    this.isSettling = true;
    setTimeout(() => {
      this.isSettling = false;
      this.settle();
    }, SETTLE_MS);
  }

  // Empty blocks that are far from the window, and fill those that came near.
  settle() {
    this.blocks.forEach((block, n) => {
      const isNear = this.isNear(block);
      if (isNear && block.isGap) {
        this.fetched(this.ask(n * PAGE, PAGE), (answer) => {
          if (this.blocks[n] === block) this.fill(n, answer);
        });
      } else if (!isNear && !block.isGap && !this.holdsFocus(block)) this.empty(n);
    });
  }

  holdsFocus({ lines }) {
    return lines.includes(document.activeElement.closest("#rows tr"));
  }

  empty(n) {
    const { lines } = this.blocks[n];
    const top = lines[0].getBoundingClientRect().top;
    const cell = element("td", "", { colspan: "7" });
    cell.style.height = `${lines.at(-1).getBoundingClientRect().bottom - top}px`;
    const gap = element("tr", "", { class: "gap", "aria-hidden": "true" });
    gap.append(cell);
    this.put(n, { lines: [gap], isGap: true });
    this.forget();
  }

  // A row that is drawn anew, or moved, loses the focus.
  keepFocus(change) {
    const link = document.activeElement.closest("#rows a.id");
    change();
    if (!link || document.activeElement === link) return;
    const same = `#rows a.id[href="${link.getAttribute("href")}"]`;
    document.querySelector(same)?.focus({ preventScroll: true });
  }

  drawAll(isChosen) {
    const { models, modalities } = this.listed;
    for (const [id, all] of Object.entries({ model: models, modality: modalities })) {
      // a choice that is open would close
      if (isChosen || document.activeElement.id !== id) this.drawChoice(id, all);
    }
    this.drawFilters();
    this.drawCounts();
    this.drawEnd();
  }

  drawCounts() {
    const { checking, damaged, found, counts, next } = this.listed;
    const parts = [`${found} of ${counts.all} cases`];
    if (checking !== null) parts.push(`as last listed, ${checking} % checked so far`);
    if (damaged) parts.push(`${damaged} can't be read: see scanloom verify`);
    byId("count").textContent = parts.join("; ");
    document.body.classList.toggle("empty", !counts.all);
    let text = "";
    if (!counts.all) {
      text = damaged
        ? `No case can be shown: ${damaged} can't be read, see scanloom verify.`
        : "No case has a result yet. Results appear here while a run goes on.";
    }
    byId("status").textContent = text;
    byId("next").disabled = !next;
  }

  drawFilters() {
    const focused = document.activeElement.closest("#filters button")?.dataset.state;
    const current = this.query.get("filter") || "all";
    const buttons = Object.entries(STATES).map(([state, name]) =>
      element("button", `${name} ${this.listed.counts[state] ?? 0}`, {
        type: "button",
        "aria-pressed": String(state === current),
        "data-state": state,
      }),
    );
    byId("filters").replaceChildren(...buttons);
    if (focused) byId("filters").querySelector(`[data-state=${focused}]`).focus();
  }

  drawChoice(id, all) {
    const values = [...all];
    const requested = this.query.get(id) || "";
    if (requested && !values.includes(requested)) values.push(requested);
    byId(id).replaceChildren(
      element("option", "all", { value: "" }),
      ...values.map((value) => element("option", value, { value })),
    );
    byId(id).value = requested;
  }

  drawEnd() {
    const isWhole = this.blocks.length * PAGE >= this.listed.found;
    byId("end").textContent = isWhole ? "" : "More cases follow as you scroll.";
    this.end.unobserve(byId("end")); // so that it is looked at again: the rows may not fill the window
    this.end.observe(byId("end"));
  }

  // Show the thumbnail of a row when it comes into view; a case may have none.
  async picture(image) {
    this.seen.unobserve(image.closest(".frame"));
    const { id, version } = image.dataset;
    if (this.pictures.get(id)?.version !== version) {
      this.dropPicture(id);
      const address = pixels(`${addressOf(id)}/thumbnail`).then((content) =>
        URL.createObjectURL(new Blob([content], { type: "image/png" })),
      );
      this.pictures.set(id, { version, address });
    }
    try {
      const picture = this.pictures.get(id);
      const address = await picture.address;
      if (this.pictures.get(id) !== picture) return; // its row has gone, and the picture with it
      image.src = address;
      image.hidden = false;
    } catch {
      image.closest(".frame").remove();
    }
  }

  rowOf(row) {
    const name = element("th", "", { scope: "row" });
    const link = element("a", "", { href: pageOf(row.id), tabindex: "-1" });
    const image = element("img", "", {
      alt: "",
      class: "thumbnail",
      "data-id": row.id,
      "data-version": row.version,
    });
    image.hidden = true;
    link.append(image);
    const frame = element("div", "", { class: "frame", "aria-hidden": "true" });
    frame.append(link);
    this.seen.observe(frame);
    name.append(frame, element("a", row.id, { href: pageOf(row.id), class: "id" }));
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
