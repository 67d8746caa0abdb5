"use strict";
(() => {
  const PAGE = 30;
  const MAX_FINDINGS = 6;
  const { cases, structures, distributions, advice, pictures, sources } = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const valueOf = (id) => byId(id)?.value ?? "";
  const SOURCE = ["patient", "name", "accession", "study date", "series", "description", "path"];
  const FIELDS = ["search", "status", "verdict", "reason", "flag", "model", "structure"];
  const state = { key: "risk", up: false, page: 0, shown: cases, opened: null };
  const find = new Map(cases.map((record) => [record.id, record]));
  const initial = Object.fromEntries(FIELDS.map((id) => [id, valueOf(id)]));

  for (const record of cases) {
    const present = structures.filter((_, n) => record.volumes[n] > 0);
    record.searchText = [record.id, record.status, record.verdict, record.reason, record.detail, ...record.findings.map((found) => found.text), ...(sources[record.case ?? record.id] ?? []), ...present].join(" ").toLowerCase();
  }

  function make(tag, text, kind) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  }

  // A sentence with `code` in it, as elements.
  function worded(text) {
    return text.split("`").map((part, n) => (n % 2 ? make("code", part) : part));
  }

  // Search, filters, order, page and the open case stand in the address: back and reload keep them.
  function remember(isNew = false) {
    const words = new URLSearchParams();
    for (const id of FIELDS) if (valueOf(id) !== initial[id]) words.set(id, valueOf(id));
    if (byId("review").checked) words.set("review", "1");
    if (state.key !== "risk" || state.up) words.set("sort", `${state.key}${state.up ? "-up" : ""}`);
    if (state.page) words.set("page", String(state.page + 1));
    if (state.opened) words.set("case", state.opened.id);
    const text = words.toString();
    const address = text ? `#${text}` : location.pathname + location.search;
    if (location.hash.slice(1) === text) return;
    if (isNew) history.pushState("case", "", address);
    else history.replaceState(history.state, "", address);
  }

  function recall() {
    const words = new URLSearchParams(location.hash.slice(1));
    for (const id of FIELDS) {
      const field = byId(id), text = words.get(id) ?? initial[id];
      if (field && (field.tagName === "INPUT" || [...field.options].some((o) => o.value === text))) field.value = text;
    }
    byId("review").checked = words.has("review");
    const [key, up] = (words.get("sort") ?? "risk").split("-");
    filter();
    sort(document.querySelector(`th[data-key="${CSS.escape(key)}"]`) ? key : "risk", up === "up");
    state.page = Math.min(Math.max(0, Number.parseInt(words.get("page") ?? "1", 10) - 1 || 0), pages() - 1);
    draw();
    const record = find.get(words.get("case"));
    if (record) open(record);
    else if (byId("case").open) {
      state.opened = null;
      byId("case").close();
    }
  }

  function value(record) {
    if (state.key === "volume") return record.volumes[valueOf("structure")] ?? -1;
    return record[state.key] ?? "";
  }

  function select() {
    filter();
    order();
  }

  function filter() {
    const terms = byId("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const [status, verdict, reason, flag, model] = ["status", "verdict", "reason", "flag", "model"].map(valueOf);
    const reviewOnly = byId("review").checked;
    state.shown = cases.filter((record) =>
      (!status || record.status === status) && (!verdict || record.verdict === verdict) && (!reason || record.reason === reason) &&
      (!flag || record.flags.includes(flag)) && (!model || record.models.includes(model)) &&
      (!reviewOnly || record.review) && terms.every((term) => record.searchText.includes(term)));
  }

  function order() {
    const sign = state.up ? 1 : -1;
    state.shown.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return x < y ? -sign : x > y ? sign : a.id < b.id ? -1 : 1;
    });
    state.page = 0;
    draw();
  }

  function volumes(record) {
    const box = make("details");
    const present = structures.map((name, n) => [name, record.volumes[n]]).filter((pair) => pair[1] > 0);
    const list = make("dl", undefined, "volumes");
    box.append(make("summary", present.length === 1 ? "1 structure" : `${present.length} structures`), list);
    box.addEventListener("toggle", () => {
      list.append(...present.flatMap(([name, ml]) => [make("dt", name), make("dd", `${ml} ml`)]));
    }, { once: true });
    return box;
  }

  function stripOf(n, quantity, value) {
    const known = distributions[`${n}:${quantity}`];
    return known && value !== null && value !== undefined ? figures.strip(known, value) : null;
  }

  function reason(record) {
    const line = make("p");
    const sentences = [record.detail, advice[record.reason]].filter(Boolean).flatMap((text) => worded(` ${text}.`));
    line.append(make("code", record.reason), ...sentences);
    return line;
  }

  function findings(record) {
    const cell = make("td", undefined, "findings");
    if (record.reason) cell.append(reason(record));
    if (record.findings.length) {
      const list = make("ul");
      for (const found of record.findings.slice(0, MAX_FINDINGS)) {
        const item = make("li", found.text), strip = found.place && stripOf(...found.place);
        if (strip) item.append(strip);
        list.append(item);
      }
      if (record.findings.length > MAX_FINDINGS) list.append(make("li", `and ${record.findings.length - MAX_FINDINGS} more`));
      cell.append(list);
    } else if (record.status === "done" && !record.reason) cell.append(make("p", "no findings", "quiet"));
    if (record.flags.length) cell.append(make("p", record.flags.join(", "), "flag"));
    if (record.volumes.some((ml) => ml > 0)) cell.append(volumes(record));
    return cell;
  }

  // A finding with the slices that it is about, and its place among the other cases.
  function card(record, found) {
    const item = make("li");
    item.append(make("p", found.text));
    const shown = make("div", undefined, "slices");
    for (const slice of found.slices ?? []) {
      shown.append(figures.slice(path(record, "preview.png"), record.page, slice, `Slice ${slice.number}: ${found.text}`));
    }
    if (shown.firstChild) item.append(shown);
    const strip = found.place && stripOf(...found.place);
    if (strip) {
      const known = distributions[`${found.place[0]}:${found.place[1]}`], box = make("figure");
      box.append(strip, make("figcaption", figures.describe(known)));
      item.append(box);
    }
    return item;
  }

  function verdict(record) {
    const box = section(record.status);
    box.firstChild.className = record.status;
    if (record.verdict) box.append(make("p", `Verdict of the reviewers: ${record.verdict}`));
    if (record.reason) box.append(reason(record));
    if (record.findings.length) {
      const list = make("ul", undefined, "plain cards");
      list.append(...record.findings.map((found) => card(record, found)));
      box.append(list);
    } else if (record.status === "done" && !record.reason) box.append(make("p", "no findings", "quiet"));
    return box;
  }

  function measurements(record) {
    const table = make("table"), head = make("tr"), body = make("tbody"), top = make("thead");
    const titles = ["Structure", "Volume, ml", "", `Mean, ${record.units}`, "", "Parts"];
    for (const title of titles) {
      const cell = title ? make("th", title, title === "Structure" ? "" : "number") : make("td");
      if (title) cell.scope = "col";
      head.append(cell);
    }
    structures.forEach((name, n) => {
      if (!(record.volumes[n] >= 0) || record.volumes[n] === null) return;
      const line = make("tr"), title = make("th", name);
      title.scope = "row";
      line.append(title);
      for (const [quantity, value] of [["volume", record.volumes[n]], ["intensity", record.means[n]]]) {
        const isKnown = quantity === "volume" ? value > 0 : record.units === "HU";
        const place = make("td"), strip = isKnown ? stripOf(n, quantity, value) : null;
        if (strip) place.append(strip);
        line.append(make("td", value === null ? "" : String(value), "number"), place);
      }
      line.append(make("td", String(record.parts[n]), "number"));
      body.append(line);
    });
    top.append(head);
    table.append(top, body);
    const box = make("div", undefined, "scroll");
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Measurements of the case");
    box.append(table);
    if (box.querySelector("svg")) box.append(make("p", "Dot: this case. Bars: the other cases. Band: usual values, or the reference range of the model.", "notice"));
    return box;
  }

  function path(record, name) {
    return ["../cases", record.id, ...name.split("/")].map((part) => part === "../cases" ? part : encodeURIComponent(part)).join("/");
  }

  function picture(record) {
    const cell = make("td");
    if (!record.preview) return cell;
    const link = make("a");
    link.href = path(record, "preview.png");
    opens(link, record);
    const image = make("img");
    [image.width, image.height] = record.preview;
    image.loading = "lazy";
    image.decoding = "async";
    image.alt = `Preview of case ${record.id}`;
    image.src = `${pictures}thumbs/${encodeURIComponent(record.id)}.webp`;
    link.append(image);
    cell.append(link);
    return cell;
  }

  function figure(name, text, kind) {
    const cell = make("td", text, `number ${kind ?? ""}`);
    cell.dataset.name = name;
    return cell;
  }

  function reviewed(record) {
    if (!byId("verdict")) return [];
    const cell = make("td", record.verdict ?? "");
    cell.dataset.name = "Verdict";
    return [cell];
  }

  function row(record) {
    const name = make("th", undefined, "id");
    name.scope = "row";
    const link = make("a", record.id);
    link.href = `#case=${encodeURIComponent(record.id)}`;
    opens(link, record);
    name.append(link);
    const known = sources[record.case ?? record.id];
    if (known) name.append(make("p", [known[0], known[1], known[5]].filter(Boolean).join(", ") || known[6], "known"));
    const ml = record.volumes[valueOf("structure")];
    const line = make("tr");
    line.append(picture(record), name, make("td", record.status, record.status), ...reviewed(record),
      figure("Risk", !["done", "outdated"].includes(record.status) ? "" : record.risk.toFixed(1), record.review ? "review" : "quiet"),
      findings(record),
      figure("Volume, ml", ml === undefined || ml === null ? "" : String(ml)),
      figure("Seconds", record.seconds ? record.seconds.toFixed(1) : ""));
    line.setAttribute("role", "row");
    for (const cell of line.cells) cell.setAttribute("role", cell === name ? "rowheader" : "cell");
    return line;
  }

  function pages() {
    return Math.max(1, Math.ceil(state.shown.length / PAGE));
  }

  function opens(link, record) {
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      open(record);
    });
  }

  function section(title, ...content) {
    const box = make("section");
    box.append(make("h3", title), ...content);
    return box;
  }

  function copyable(text) {
    const line = make("p", undefined, "copy"), button = make("button", "Copy");
    button.type = "button";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch { // a page from disk may not use the clipboard: select the words instead
        getSelection().selectAllChildren(line.firstChild);
        button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
        return;
      }
      button.textContent = "Copied";
    });
    line.append(make("code", text), button);
    return line;
  }

  function files(record) {
    const list = make("ul", undefined, "plain files");
    list.append(...record.files.map((name) => {
      const link = make("a", name), item = make("li");
      link.href = path(record, name);
      item.append(link);
      return item;
    }));
    return list;
  }

  function described(code) {
    const cell = make("dd");
    cell.append(...worded(advice[code] ?? ""));
    return cell;
  }

  function explained(record) {
    const list = make("dl", undefined, "explained");
    for (const code of record.flags) list.append(make("dt", code), described(code));
    return list;
  }

  function source(record) {
    const id = record.case ?? record.id, known = sources[id];
    const box = section("Source", copyable(`scanloom where ${id}`));
    if (known) {
      const list = make("dl", undefined, "volumes");
      SOURCE.forEach((title, n) => {
        if (known[n]) list.append(make("dt", title), make("dd", known[n]));
      });
      box.append(list);
    }
    return box;
  }

  // The page of a case over the table: findings, picture, flags, measurements, files, source.
  function open(record) {
    const dialog = byId("case"), body = byId("case-body"), at = state.shown.indexOf(record);
    const isNew = !dialog.open;
    state.opened = record;
    byId("case-title").textContent = `Case ${record.id}`;
    byId("case-place").textContent = at < 0 ? "not in the table's selection" : `${at + 1} of ${state.shown.length}`;
    byId("case-back").disabled = at <= 0;
    byId("case-next").disabled = at < 0 || at + 1 >= state.shown.length;
    body.replaceChildren(verdict(record));
    if (record.preview) {
      const image = make("img", undefined, "large");
      image.alt = `Preview of case ${record.id}`;
      image.src = path(record, "preview.png");
      body.append(image);
    }
    if (record.volumes.length) body.append(section("Measurements", measurements(record)));
    const parts = make("div", undefined, "parts");
    if (record.flags.length) parts.append(section("Flags", explained(record)));
    if (record.files.length) parts.append(section("Files", files(record)));
    parts.append(source(record));
    body.append(parts);
    if (isNew) dialog.showModal();
    body.scrollTop = 0;
    remember(isNew);
  }

  function step(by) {
    const record = state.shown[state.shown.indexOf(state.opened) + by];
    if (state.opened && state.shown.includes(state.opened) && record) open(record);
  }

  function draw() {
    const count = pages();
    const first = state.page * PAGE;
    byId("rows").replaceChildren(...state.shown.slice(first, first + PAGE).map(row));
    byId("count").textContent = `${state.shown.length} of ${cases.length} series`;
    byId("page").textContent = `Page ${state.page + 1} of ${count}`;
    byId("pages").hidden = count === 1;
    byId("back").disabled = state.page === 0;
    byId("next").disabled = state.page + 1 >= count;
    remember();
  }

  function turn(by) {
    state.page += by;
    draw();
    byId("cases").focus();
  }

  function sort(key, up) {
    [state.key, state.up] = [key, up];
    document.querySelectorAll("th[aria-sort]").forEach((head) => head.removeAttribute("aria-sort"));
    const head = document.querySelector(`th[data-key="${key}"]`);
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    byId("sort").value = key;
    order();
  }

  for (const head of document.querySelectorAll("th[data-key]")) {
    const key = head.dataset.key;
    head.querySelector("button").addEventListener("click", () =>
      sort(key, state.key === key ? !state.up : key === "id"));
  }
  byId("sort").addEventListener("input", (event) => {
    event.stopPropagation();
    sort(valueOf("sort"), valueOf("sort") === "id");
  });
  byId("filters").addEventListener("input", select);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("back").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  byId("case-back").addEventListener("click", () => step(-1));
  byId("case-next").addEventListener("click", () => step(1));
  byId("case-close").addEventListener("click", () => byId("case").close());
  byId("case").addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
  byId("case").addEventListener("close", () => {
    if (!state.opened) return;
    state.opened = null;
    if (history.state === "case") history.back(); // the address before the case was opened
    else remember();
  });
  for (const link of document.querySelectorAll("a[data-case]")) {
    link.addEventListener("click", (event) => {
      const record = find.get(link.dataset.case);
      if (!record) return;
      event.preventDefault();
      open(record);
    });
  }
  for (const button of document.querySelectorAll("button[data-reason]")) {
    button.addEventListener("click", () => {
      byId("filters").reset();
      if (byId("reason")) byId("reason").value = button.dataset.reason;
      select();
      byId("cases").focus();
    });
  }
  addEventListener("hashchange", recall);
  recall();
})();
