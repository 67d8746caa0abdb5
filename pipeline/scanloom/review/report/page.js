"use strict";
(() => {
  const PAGE = 30;
  const MAX_FINDINGS = 6;
  const { cases, structures } = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const valueOf = (id) => byId(id)?.value ?? "";
  const state = { key: "risk", up: false, page: 0, shown: cases };

  for (const record of cases) {
    const present = structures.filter((_, n) => record.volumes[n] > 0);
    record.searchText = [record.id, record.reason, record.detail, ...record.findings, ...present].join(" ").toLowerCase();
  }

  function make(tag, text, kind) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  }

  function value(record) {
    if (state.key === "volume") return record.volumes[valueOf("structure")] ?? -1;
    return record[state.key];
  }

  function select() {
    const terms = byId("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const [status, reason, flag, model] = ["status", "reason", "flag", "model"].map(valueOf);
    const reviewOnly = byId("review").checked;
    state.shown = cases.filter((record) =>
      (!status || record.status === status) && (!reason || record.reason === reason) &&
      (!flag || record.flags.includes(flag)) && (!model || record.models.includes(model)) &&
      (!reviewOnly || record.review) && terms.every((term) => record.searchText.includes(term)));
    order();
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

  function findings(record) {
    const cell = make("td");
    if (record.reason) {
      const line = make("p");
      const sentences = [record.detail, record.advice].filter(Boolean).map((text) => ` ${text}.`);
      line.append(make("code", record.reason), ...sentences);
      cell.append(line);
    }
    if (record.findings.length) {
      const list = make("ul");
      record.findings.slice(0, MAX_FINDINGS).forEach((text) => list.append(make("li", text)));
      if (record.findings.length > MAX_FINDINGS) list.append(make("li", `and ${record.findings.length - MAX_FINDINGS} more`));
      cell.append(list);
    } else if (record.status === "done") cell.append(make("p", "no findings", "quiet"));
    if (record.flags.length) cell.append(make("p", record.flags.join(", "), "flag"));
    if (record.volumes.some((ml) => ml > 0)) cell.append(volumes(record));
    return cell;
  }

  function picture(record) {
    const cell = make("td");
    if (!record.preview) return cell;
    const link = make("a");
    link.href = `../cases/${encodeURIComponent(record.id)}/preview.png`;
    const image = make("img");
    [image.width, image.height] = record.preview;
    image.loading = "lazy";
    image.decoding = "async";
    image.alt = `Preview of case ${record.id}`;
    image.src = `thumbs/${encodeURIComponent(record.id)}.webp`;
    link.append(image);
    cell.append(link);
    return cell;
  }

  function figure(name, text, kind) {
    const cell = make("td", text, `number ${kind ?? ""}`);
    cell.dataset.name = name;
    return cell;
  }

  function row(record) {
    const name = make("th", undefined, "id");
    name.scope = "row";
    if (record.status === "done") {
      const link = make("a", record.id);
      link.href = `../cases/${encodeURIComponent(record.id)}/`;
      name.append(link);
    } else name.textContent = record.id;
    const ml = record.volumes[valueOf("structure")];
    const line = make("tr");
    line.append(picture(record), name, make("td", record.status, record.status),
      figure("Risk", record.reason ? "" : record.risk.toFixed(1), record.review ? "review" : "quiet"),
      findings(record),
      figure("Volume, ml", ml === undefined || ml === null ? "" : String(ml)),
      figure("Seconds", record.seconds ? record.seconds.toFixed(1) : ""));
    line.setAttribute("role", "row");
    for (const cell of line.cells) cell.setAttribute("role", cell === name ? "rowheader" : "cell");
    return line;
  }

  function draw() {
    const pages = Math.max(1, Math.ceil(state.shown.length / PAGE));
    const first = state.page * PAGE;
    byId("rows").replaceChildren(...state.shown.slice(first, first + PAGE).map(row));
    byId("count").textContent = `${state.shown.length} of ${cases.length} cases`;
    byId("page").textContent = `Page ${state.page + 1} of ${pages}`;
    byId("pages").hidden = pages === 1;
    byId("back").disabled = state.page === 0;
    byId("next").disabled = state.page + 1 >= pages;
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
  select();
})();
