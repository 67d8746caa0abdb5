"use strict";
(() => {
  const PAGE = 30;
  const DOUBTS = 6;
  const { cases, structures } = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const chosen = (id) => at(id)?.value ?? "";
  const state = { key: "risk", up: false, page: 0, shown: cases };

  for (const one of cases) {
    const found = structures.filter((_, n) => one.volumes[n] > 0);
    one.words = [one.id, one.reason, one.detail, ...one.doubts, ...found].join(" ").toLowerCase();
  }

  function make(tag, text, kind) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  }

  function value(one) {
    if (state.key === "volume") return one.volumes[chosen("structure")] ?? -1;
    return one[state.key];
  }

  function select() {
    const words = at("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const [status, reason, flag, model] = ["status", "reason", "flag", "model"].map(chosen);
    const doubtful = at("doubtful").checked;
    state.shown = cases.filter((one) =>
      (!status || one.status === status) && (!reason || one.reason === reason) &&
      (!flag || one.flags.includes(flag)) && (!model || one.models.includes(model)) &&
      (!doubtful || one.doubtful) && words.every((word) => one.words.includes(word)));
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

  function volumes(one) {
    const box = make("details");
    const found = structures.map((name, n) => [name, one.volumes[n]]).filter((pair) => pair[1] > 0);
    const list = make("dl", undefined, "volumes");
    box.append(make("summary", found.length === 1 ? "1 structure" : `${found.length} structures`), list);
    box.addEventListener("toggle", () => {
      list.append(...found.flatMap(([name, ml]) => [make("dt", name), make("dd", `${ml} ml`)]));
    }, { once: true });
    return box;
  }

  function what(one) {
    const cell = make("td");
    if (one.reason) {
      const line = make("p");
      const said = [one.detail, one.advice].filter(Boolean).map((text) => ` ${text}.`);
      line.append(make("code", one.reason), ...said);
      cell.append(line);
    }
    if (one.doubts.length) {
      const list = make("ul");
      one.doubts.slice(0, DOUBTS).forEach((text) => list.append(make("li", text)));
      if (one.doubts.length > DOUBTS) list.append(make("li", `and ${one.doubts.length - DOUBTS} more`));
      cell.append(list);
    } else if (one.status === "done") cell.append(make("p", "nothing stands out", "quiet"));
    if (one.flags.length) cell.append(make("p", one.flags.join(", "), "flag"));
    if (one.volumes.some((ml) => ml > 0)) cell.append(volumes(one));
    return cell;
  }

  function picture(one) {
    const cell = make("td");
    if (!one.preview) return cell;
    const link = make("a");
    link.href = `../cases/${encodeURIComponent(one.id)}/preview.png`;
    const image = make("img");
    [image.width, image.height] = one.preview;
    image.loading = "lazy";
    image.decoding = "async";
    image.alt = `Preview of case ${one.id}`;
    image.src = `thumbs/${encodeURIComponent(one.id)}.webp`;
    link.append(image);
    cell.append(link);
    return cell;
  }

  function figure(name, text, kind) {
    const cell = make("td", text, `number ${kind ?? ""}`);
    cell.dataset.name = name;
    return cell;
  }

  function row(one) {
    const name = make("th", undefined, "id");
    name.scope = "row";
    if (one.status === "done") {
      const link = make("a", one.id);
      link.href = `../cases/${encodeURIComponent(one.id)}/`;
      name.append(link);
    } else name.textContent = one.id;
    const ml = one.volumes[chosen("structure")];
    const line = make("tr");
    line.append(picture(one), name, make("td", one.status, one.status),
      figure("Risk", one.reason ? "" : one.risk.toFixed(1), one.doubtful ? "doubt" : "quiet"),
      what(one),
      figure("Volume, ml", ml === undefined || ml === null ? "" : String(ml)),
      figure("Seconds", one.seconds ? one.seconds.toFixed(1) : ""));
    line.setAttribute("role", "row");
    for (const cell of line.cells) cell.setAttribute("role", cell === name ? "rowheader" : "cell");
    return line;
  }

  function draw() {
    const pages = Math.max(1, Math.ceil(state.shown.length / PAGE));
    const first = state.page * PAGE;
    at("rows").replaceChildren(...state.shown.slice(first, first + PAGE).map(row));
    at("count").textContent = `${state.shown.length} of ${cases.length} cases`;
    at("page").textContent = `Page ${state.page + 1} of ${pages}`;
    at("pages").hidden = pages === 1;
    at("back").disabled = state.page === 0;
    at("next").disabled = state.page + 1 >= pages;
  }

  function turn(by) {
    state.page += by;
    draw();
    at("cases").focus();
  }

  function sort(key, up) {
    [state.key, state.up] = [key, up];
    document.querySelectorAll("th[aria-sort]").forEach((head) => head.removeAttribute("aria-sort"));
    const head = document.querySelector(`th[data-key="${key}"]`);
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    at("sort").value = key;
    order();
  }

  for (const head of document.querySelectorAll("th[data-key]")) {
    const key = head.dataset.key;
    head.querySelector("button").addEventListener("click", () =>
      sort(key, state.key === key ? !state.up : key === "id"));
  }
  at("sort").addEventListener("input", (event) => {
    event.stopPropagation();
    sort(chosen("sort"), chosen("sort") === "id");
  });
  at("filters").addEventListener("input", select);
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("back").addEventListener("click", () => turn(-1));
  at("next").addEventListener("click", () => turn(1));
  select();
})();
