"use strict";
(() => {
  const PAGE = 50;
  const cases = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const state = { key: "risk", up: false, page: 0, shown: cases };

  for (const one of cases) {
    one.words = [one.id, one.reason, one.detail, ...one.doubts, ...one.volumes.map((v) => v[0])]
      .join(" ").toLowerCase();
    one.ml = new Map(one.volumes.map((v) => [v[0], v[1]]));
  }
  const structures = [...new Set(cases.flatMap((one) => one.volumes.map((v) => v[0])))];
  for (const name of structures) {
    at("structure").append(new Option(name.replaceAll("_", " "), name));
  }
  at("structure").closest("label").hidden = structures.length === 0;

  function make(tag, text, kind) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  }

  function value(one) {
    if (state.key === "volume") return one.ml.get(at("structure").value) ?? -1;
    return one[state.key];
  }

  function select() {
    const words = at("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const [status, reason, flag, model] = ["status", "reason", "flag", "model"].map((id) => at(id).value);
    const doubtful = at("doubtful").checked;
    state.shown = cases.filter((one) =>
      (!status || one.status === status) && (!reason || one.reason === reason) &&
      (!flag || one.flags.includes(flag)) && (!model || one.models.includes(model)) &&
      (!doubtful || one.risk > 0) && words.every((word) => one.words.includes(word)));
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

  function what(one) {
    const cell = make("td");
    if (one.reason) {
      const line = make("p");
      line.append(make("code", one.reason), ` ${one.detail}. ${one.advice}.`);
      cell.append(line);
    }
    if (one.doubts.length) {
      const list = make("ul");
      one.doubts.slice(0, 6).forEach((text) => list.append(make("li", text)));
      if (one.doubts.length > 6) list.append(make("li", `and ${one.doubts.length - 6} more`));
      cell.append(list);
    }
    if (one.flags.length) cell.append(make("p", one.flags.join(", "), "flag"));
    return cell;
  }

  function row(one) {
    const line = make("tr");
    const picture = make("td");
    if (one.preview) {
      const link = make("a");
      link.href = `../cases/${encodeURIComponent(one.id)}/preview.png`;
      const image = make("img");
      image.src = `thumbs/${encodeURIComponent(one.id)}.webp`;
      image.alt = `Preview of case ${one.id}`;
      image.loading = "lazy";
      image.width = 200;
      link.append(image);
      picture.append(link);
    }
    const name = make("th", undefined, "id");
    name.scope = "row";
    if (one.status === "done") {
      const link = make("a", one.id);
      link.href = `../cases/${encodeURIComponent(one.id)}/`;
      name.append(link);
    } else name.textContent = one.id;
    const ml = one.ml.get(at("structure").value);
    line.append(picture, name, make("td", one.status, one.status),
      make("td", one.status === "failed" ? "" : one.risk.toFixed(1), "number"), what(one),
      make("td", ml === undefined ? "" : String(ml), "number"),
      make("td", one.seconds ? one.seconds.toFixed(1) : "", "number"));
    return line;
  }

  function draw() {
    const pages = Math.max(1, Math.ceil(state.shown.length / PAGE));
    const first = state.page * PAGE;
    at("rows").replaceChildren(...state.shown.slice(first, first + PAGE).map(row));
    at("count").textContent = `${state.shown.length} of ${cases.length} cases`;
    at("page").textContent = `Page ${state.page + 1} of ${pages}`;
    at("back").disabled = state.page === 0;
    at("next").disabled = state.page + 1 >= pages;
  }

  function turn(by) {
    state.page += by;
    draw();
    at("cases").scrollIntoView();
  }

  for (const head of document.querySelectorAll("th[data-key]")) {
    head.querySelector("button").addEventListener("click", () => {
      state.up = state.key === head.dataset.key ? !state.up : head.dataset.key === "id";
      state.key = head.dataset.key;
      document.querySelectorAll("th[aria-sort]").forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", state.up ? "ascending" : "descending");
      order();
    });
  }
  at("filters").addEventListener("input", select);
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("structure").addEventListener("change", () => (state.key === "volume" ? order() : draw()));
  at("back").addEventListener("click", () => turn(-1));
  at("next").addEventListener("click", () => turn(1));
  select();
})();
