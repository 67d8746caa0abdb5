// The list of cases: filters and search stand in the address.
import { HOME, STATES, chosen, element, enter, get, rowsOf } from "./api.js";

const PAGE = 100;
const POLL_MS = 5000;
const byId = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const end = new IntersectionObserver((entries) => { if (entries.at(-1).isIntersecting && drawn < shown.length) more(); });
let listed = null, rows = [], shown = [], drawn = 0;

function address() {
  for (const [key, value] of [...query]) if (!value || value === "all") query.delete(key);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

function drawFilters() {
  const counts = listed.counts, current = query.get("filter") || "all";
  byId("filters").replaceChildren(...Object.entries(STATES).map(([state, name]) => {
    const button = element("button", `${name} ${counts[state] ?? 0}`, { type: "button", "aria-pressed": String(state === current) });
    button.dataset.state = state;
    button.addEventListener("click", () => { query.set("filter", state); address(); draw(); byId("filters").querySelector(`[data-state=${state}]`).focus(); });
    return button;
  }));
}

function drawRow(row) {
  const line = element("tr");
  const name = element("th", "", { scope: "row" });
  name.append(element("a", row.id, { href: `${HOME}case/${encodeURIComponent(row.id)}${location.search}`, class: "id" }));
  const doubts = element("td");
  if (row.doubts.length) {
    const list = element("ul");
    for (const text of row.doubts.slice(0, 3)) list.append(element("li", text));
    if (row.doubts.length > 3) list.append(element("li", `${row.doubts.length - 3} more`));
    doubts.append(list);
  }
  line.append(name, element("td", STATES[row.state], { class: row.state }), element("td", row.mine ? STATES[row.mine] : "", { "data-name": "Yours" }),
    doubts, element("td", `${row.modality} ${row.slices.join(" × ")}, ${row.spacing.join(" × ")} mm`),
    element("td", row.models.join(", ")), element("td", [row.revision || "", row.draft ? "correction not saved" : ""].filter(Boolean).join(", "), { class: "number", "data-name": "Revision" }));
  return line;
}

function more(count = PAGE) {
  const part = shown.slice(drawn, drawn + count);
  byId("rows").append(...part.map(drawRow));
  drawn += part.length;
  byId("end").textContent = drawn < shown.length ? "More cases follow as you scroll." : "";
  end.unobserve(byId("end"));  // so that it is looked at again: the rows may not fill the window
  end.observe(byId("end"));
}

function drawSelect(id, all) {
  const values = [...new Set(all)].filter(Boolean).sort(), wanted = query.get(id) || "";
  if (wanted && !values.includes(wanted)) values.push(wanted);
  byId(id).replaceChildren(element("option", "all", { value: "" }), ...values.map((value) => element("option", value, { value })));
  byId(id).value = wanted;
}

// Draw the list anew from its top; or after news, with as many rows and the focus as before.
function draw(news = false) {
  const focused = document.activeElement.closest("#rows a, #filters button"), count = news ? Math.max(drawn, PAGE) : PAGE;
  drawFilters();
  shown = chosen(rows, query);
  drawn = 0;
  byId("rows").replaceChildren();
  more(count);
  if (focused) document.querySelector(focused.dataset.state ? `[data-state=${focused.dataset.state}]` : `#rows a[href="${focused.getAttribute("href")}"]`)?.focus({ preventScroll: true });
  const all = `${shown.length} of ${rows.length} cases`;
  byId("count").textContent = listed.damaged ? `${all}; ${listed.damaged} can't be read: see scanloom verify` : all;
  document.body.classList.toggle("empty", !rows.length);
  byId("status").textContent = rows.length ? "" : listed.damaged ? `No case can be shown: ${listed.damaged} can't be read, see scanloom verify.`
    : "No case has a result yet. Results appear here while a run goes on.";
  byId("next").disabled = !rows.some((row) => row.state === "open" || row.state === "stale");
}

function next() {
  const row = shown.find((each) => each.state === "open" || each.state === "stale") ||
    rows.find((each) => each.state === "open" || each.state === "stale");
  if (row) location.assign(`${HOME}case/${encodeURIComponent(row.id)}${location.search}`);
}

async function load() {
  try {
    const answer = await get(`/api/worklist${listed ? `?since=${encodeURIComponent(listed.version)}` : ""}`);
    if (answer) {
      const news = listed !== null;
      listed = answer;
      rows = rowsOf(listed);
      if (!news || document.activeElement.id !== "model") drawSelect("model", rows.flatMap((row) => row.models));
      if (!news || document.activeElement.id !== "modality") drawSelect("modality", rows.map((row) => row.modality));
      draw(news);
    }
    byId("status").classList.remove("error");
  } catch (error) {
    byId("status").textContent = error.reason ? error.message : "The server does not answer. Is it still running?";
    byId("status").classList.add("error");
  }
}

byId("search").value = query.get("q") || "";
byId("search").addEventListener("input", () => { query.set("q", byId("search").value); address(); draw(); });
for (const id of ["model", "modality"]) byId(id).addEventListener("change", () => { query.set(id, byId(id).value); address(); draw(); });
byId("doubtful").checked = Boolean(query.get("doubtful"));
byId("doubtful").addEventListener("change", () => { query.set("doubtful", byId("doubtful").checked ? "1" : ""); address(); draw(); });
byId("next").addEventListener("click", next);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input:not([type=checkbox]), select")) return;
  if (event.key === "n") next();
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const links = [...document.querySelectorAll("#rows a")], here = links.indexOf(document.activeElement);
    const link = links[here < 0 ? 0 : here + (event.key === "ArrowDown" ? 1 : -1)];
    if (link) { event.preventDefault(); link.focus(); }
  }
  if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
});
try {
  const me = await enter();
  byId("reviewer").textContent = `Reviewer: ${me.name}${me.blind ? ", double reading" : ""}`;
} catch { /* told by what follows */ }
await load();
setInterval(load, POLL_MS);
