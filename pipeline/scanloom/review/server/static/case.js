// The page of a case: three planes, structures, doubts, and the verdict.
import { HOME, chosen, element, enter, get, pixels, rowsOf } from "./api.js";
import { Correction } from "./correct.js";
import { Plane, colours, greys } from "./plane.js";
import { Pointer } from "./pointer.js";
import { Slices, Store } from "./slices.js";
import { Verdict } from "./verdict.js";

const byId = (id) => document.getElementById(id);
const PLANES = ["axial", "coronal", "sagittal"];
const AHEAD = 2;
const TOLD_AFTER_MS = 500;
const query = new URLSearchParams(location.search);
const store = new Store();
const fetched = new Map();
const verdict = new Verdict(byId, { saved, failed });
let about = null, planes = {}, slices = {}, at = [0, 0, 0], active = "axial", rows = [], doubt = -1;
let shownId = null, telling = 0;
let table = null, shownWindow = null, palettes = [], off = new Set(), outline = false, hidden = false, asked = 0;

const correction = new Correction(byId, { get about() { return about; }, get at() { return at; }, get planes() { return planes; },
  say: (text, bad) => say(text, bad), failed, reload, saved: corrected });
const pointer = new Pointer({ get about() { return about; }, get at() { return at; }, get planes() { return planes; },
  get window() { return shownWindow; }, correction, draw, mark, move, ownWindow });
const say = (text, bad = false) => { byId("status").textContent = text; byId("status").classList.toggle("error", bad); };
function failed(error) {
  if (["STALE", "CORRECTED"].includes(error.reason) && about) {
    forget(about.id);
    open(about.id).then(() => tell(error, byId("status").textContent));
  } else tell(error);
}
function tell(error, more = "") {
  const text = error.reason ? error.message[0].toUpperCase() + error.message.slice(1) : "The server does not answer. Is it still running?";
  say(`${text} ${more}`.trim(), true);
}
const current = () => decodeURIComponent(location.pathname.split("/").pop());

// Cases

function information(id) {
  if (!fetched.has(id)) {
    const ready = get(`/api/case/${encodeURIComponent(id)}`);
    ready.catch(() => fetched.delete(id));
    fetched.set(id, ready);
  }
  return fetched.get(id);
}

// Fetch a case anew when it is opened next.
function forget(id) {
  fetched.delete(id);
  store.forget(`${id}/`);
}

function layersOf(id, info) {
  const make = (path, type) => Object.fromEntries(PLANES.map((name) => [name, new Slices(id, path, name, info.planes[name], type, store)]));
  return { image: info.image ? make("image", Int16Array) : null,
    labels: info.layers.map((layer) => make(`labels/${layer.index}`, layer.bytes === 2 ? Uint16Array : Uint8Array)) };
}

const middle = (info) => info.shape.map((n) => Math.floor(n / 2));

// Fetch a case ahead, if the server has room for it beside the cases that are shown.
async function prefetch(id) {
  if (!fetched.has(id)) {
    const found = await get(`/api/case/${encodeURIComponent(id)}?ahead=1`);
    if (!found) return false;
    if (!fetched.has(id)) fetched.set(id, Promise.resolve(found));
  }
  const info = await information(id), layers = layersOf(id, info), start = middle(info);
  for (const name of PLANES) {
    for (const source of [layers.image, ...layers.labels]) if (source) await source[name].fetch(start[info.planes[name].normal]);
  }
  return true;
}

async function open(id) {
  const turn = ++asked;
  say("Opening ...");
  delete document.body.dataset.opened;  // hides what is left of the case before
  shownId = id;
  about = null;
  verdict.clear();  // what is typed until the case is here is about none
  byId("name").textContent = id;
  document.title = `${id}: scanloom review`;
  try {
    const info = await information(id);
    if (turn !== asked) return;
    start(id, info);
  } catch (error) { if (turn === asked) failed(error); return; }
  const draft = get(`/api/case/${encodeURIComponent(id)}/draft`);
  draft.catch(() => {});  // told below
  await draw();
  if (turn !== asked) return;
  const left = await correction.resume(draft).catch(() => "");
  if (turn !== asked) return;
  say([about.image_reason, left].filter(Boolean).join(" "));
  document.body.dataset.opened = id;
  if (document.activeElement === document.body) byId(active).focus({ preventScroll: true });
  for (const row of following(AHEAD)) {
    if (turn !== asked || !await prefetch(row.id).catch(() => true)) return;
  }
}

function start(id, info) {
  about = info;
  slices = layersOf(id, info);
  at = middle(info);
  off = new Set();
  doubt = -1;
  planes = Object.fromEntries(PLANES.map((name) => [name, new Plane(fresh(name), name, info.planes[name])]));
  byId("about").textContent = `${info.modality || "unknown modality"}, ${info.models.join(", ")}${info.sheared ? ", sheared slices as stored" : ""}`;
  setWindow(info.windows[0] || { name: "", low: 0, high: 1, inverted: false });
  drawWindows();
  drawStructures();
  drawDoubts();
  byId("hide").setAttribute("aria-pressed", String(hidden));
  verdict.show(info);
  correction.show();
  setActive(active);
  byId("preview").open = !info.image;
  showPreview();
}

// A figure without the listeners of the case before.
function fresh(name) {
  const old = byId(name), figure = old.cloneNode(true);
  old.replaceWith(figure);
  const range = figure.querySelector("input"), plane = about.planes[name];
  range.max = plane.count - 1;
  range.addEventListener("input", () => move(plane.normal, Number(range.value), name));
  figure.querySelector(".zoom-in").addEventListener("click", () => planes[name].setZoom(planes[name].zoom * 1.5));
  figure.querySelector(".zoom-out").addEventListener("click", () => planes[name].setZoom(planes[name].zoom / 1.5));
  figure.querySelector(".enlarge").addEventListener("click", () => turnTo(name));
  figure.addEventListener("focusin", () => mark(name));
  pointer.listen(figure, name);
  if (!about.image && !about.layers.length) figure.append(element("p", "Nothing to show", { class: "nothing" }));
  return figure;
}

function following(count, step = 1) {
  const listed = chosen(rows, query), here = listed.findIndex((row) => row.id === shownId);
  const order = step > 0 ? listed.slice(here + 1) : listed.slice(0, Math.max(0, here)).reverse();
  return order.slice(0, count);
}

function go(id) {
  history.pushState(null, "", `${HOME}case/${encodeURIComponent(id)}${location.search}`);
  return open(id);
}

function step(direction) {
  const [row] = following(1, direction);
  if (row) go(row.id); else say(direction > 0 ? "This is the last case of the list." : "This is the first case of the list.");
}

async function list() {
  try { const answer = await get("/api/worklist"); rows = rowsOf(answer); } catch (error) { failed(error); }
}

async function saved(id) {
  fetched.delete(id);
  await list();
  const listed = chosen(rows, query), here = listed.findIndex((row) => row.id === id);
  const waits = (row) => row.id !== id && (row.state === "open" || row.state === "stale");
  const row = listed.slice(here + 1).find(waits) || listed.find(waits) || rows.find(waits);
  if (row) { await go(row.id); return; }
  await open(id);
  say("Saved. No case is open any more.");
}

// Fetch the labels again: with the strokes of a correction, or without.
function reload() {
  if (!about) return Promise.resolve();
  store.forget(`${about.id}/labels/`);
  for (const layer of slices.labels) for (const name of PLANES) layer[name].drafted(correction.on);
  return draw();
}

async function corrected(id, revision) {
  forget(id);
  const place = at, plane = active;
  await open(id);
  active = plane;
  setActive(active);
  await jump(place);
  say(`Saved as revision ${revision}: please decide on it.`);
}

// Drawing

async function draw() {
  const turn = asked;
  await Promise.all(PLANES.map((name) => drawPlane(name)));
  if (turn !== asked || !about) return;
  readout();
  for (const name of PLANES) for (const source of sources()) source[name].around(at[about.planes[name].normal]);
}

const sources = () => [slices.image, ...slices.labels].filter(Boolean);

async function drawPlane(name) {
  if (!about) return;
  const plane = planes[name], index = at[plane.about.normal];
  if (sources().some((source) => source[name].at(index) === null)) {
    try { await Promise.all(sources().map((source) => source[name].fetch(index))); } catch (error) { failed(error); return; }
    if (!about || planes[name] !== plane || at[plane.about.normal] !== index) return;  // another slice by now
  }
  const labels = hidden ? [] : slices.labels.map((source) => source[name].at(index));
  plane.draw(slices.image ? slices.image[name].at(index) : null, table, labels, palettes, outline);
  plane.canvas.dataset.index = index;
  plane.cross([at[plane.about.across], at[plane.about.down]]);
  const figure = plane.figure, title = name[0].toUpperCase() + name.slice(1);
  figure.querySelector("input").value = index;
  figure.querySelector(".where").textContent = `${title} ${index + 1}/${plane.about.count}`;
}

function redraw() {
  palettes = colours(about.layers, off, Number(byId("opacity").value) / 100);
  return draw();
}

function readout() {
  const plane = about.planes[active], x = at[plane.across], y = at[plane.down], n = y * plane.width + x;
  const mm = [0, 1, 2].map((row) => about.affine[row].slice(0, 3).reduce((sum, f, axis) => sum + f * at[axis], about.affine[row][3]));
  const parts = [`L ${mm[0].toFixed(1)}, P ${mm[1].toFixed(1)}, S ${mm[2].toFixed(1)} mm`];
  const pixel = slices.image?.[active].at(at[plane.normal])?.[n];
  if (pixel !== undefined) {
    const value = about.scale[0] * pixel + about.scale[1];
    parts.push(`${Number(value.toPrecision(6))}${about.unit === "unknown" ? "" : ` ${about.unit}`}${about.exact ? "" : " (rounded)"}`);
  }
  about.layers.forEach((layer, index) => {
    const label = slices.labels[index][active].at(at[plane.normal])?.[n];
    if (label) parts.push(layer.labels.find((each) => each.value === label)?.name ?? `label ${label}`);
  });
  byId("readout").textContent = parts.join(" · ");
  clearTimeout(telling);  // told when the movement is over, not at each slice
  telling = setTimeout(() => { byId("told").textContent = `${byId(active).querySelector(".where").textContent}: ${parts.join(", ")}`; }, TOLD_AFTER_MS);
}

function setWindow(window) {
  shownWindow = window;
  table = greys(window, about.scale || [1, 0]);
}

function drawWindows() {
  byId("windows").replaceChildren(...about.windows.map((each, n) => element("option", each.name, { value: n })), element("option", "own", { value: -1 }));
}

function chooseWindow(n) {
  if (!about.windows[n]) return;
  byId("windows").value = n;
  setWindow(about.windows[n]);
  say(`Window ${about.windows[n].name}: ${about.windows[n].low} to ${about.windows[n].high}`);
  draw();
}

function drawDoubts() {
  const items = about.doubts.map((each, n) => {
    const item = element("li");
    if (each.point) {
      const button = element("button", each.text, { type: "button" });
      button.addEventListener("click", () => { doubt = n; jump(each.point); });
      item.append(button);
    } else item.textContent = each.text;
    return item;
  });
  byId("doubts").replaceChildren(...items);
  byId("no-doubts").hidden = items.length > 0;
}

function drawStructures() {
  palettes = colours(about.layers, off, Number(byId("opacity").value) / 100);
  byId("layers").replaceChildren(...about.layers.map((layer) => {
    const part = element("div");
    if (about.layers.length > 1) part.append(element("h2", layer.file));
    const items = element("ul", "", { class: "structures" });
    for (const each of layer.labels) items.append(structure(layer, each));
    part.append(items);
    return part;
  }));
}

function structure(layer, each) {
  const item = element("li"), key = `${layer.index}:${each.value}`, swatch = element("span", "", { class: "swatch" });
  swatch.style.background = each.color;
  const tick = element("input", "", { type: "checkbox", "aria-label": `Show ${each.name}` });
  tick.checked = true;
  tick.dataset.key = key;
  tick.addEventListener("change", () => { if (tick.checked) off.delete(key); else off.add(key); redraw(); });
  const found = each.centre !== null, volume = found && each.volume_ml !== null ? ` ${each.volume_ml < 100 ? each.volume_ml.toPrecision(3) : Math.round(each.volume_ml)} ml` : "";
  const name = element("span", `${each.name}${found ? volume : ": not found"}`, { class: found ? "name" : "name quiet" });
  item.append(tick, swatch, name);
  if (found) {
    const button = element("button", "Go", { type: "button", "aria-label": `Go to ${each.name}` });
    button.addEventListener("click", () => jump(each.centre));
    item.append(button, verdict.ofStructure(`${layer.model}/${each.label}`, each.name));
  }
  return item;
}

function showAll(shown) {
  off = new Set();
  for (const tick of byId("layers").querySelectorAll("input[type=checkbox]")) {
    tick.checked = shown;
    if (!shown) off.add(tick.dataset.key);
  }
  redraw();
}

// Moving about

function jump(point) { at = [...point]; return draw(); }

function move(axis, index, name) {
  const last = about.shape[axis] - 1;
  at[axis] = Math.min(last, Math.max(0, index));
  if (name) mark(name);
  return draw();
}

function mark(name) {
  active = name;
  for (const each of PLANES) byId(each).classList.toggle("active", each === name);
}

function setActive(name) {
  mark(name);
  for (const each of PLANES) byId(each).classList.toggle("main", each === name);
  byId("planes").prepend(byId(name));
  for (const plane of Object.values(planes)) plane.place();
}

function ownWindow(window) {
  byId("windows").value = -1;
  setWindow({ ...window, name: "own" });
  draw();
}

// Widen the window, or raise its level, by a share of its width.
function changeWindow(wider, higher) {
  const width = shownWindow.high - shownWindow.low, level = (shownWindow.high + shownWindow.low) / 2 + higher * width;
  ownWindow({ ...shownWindow, low: level - width * wider / 2, high: level + width * wider / 2 });
  say(`Window ${Number(shownWindow.low.toPrecision(4))} to ${Number(shownWindow.high.toPrecision(4))}`);
}

function toggle(id, on) { byId(id).setAttribute("aria-pressed", String(on)); draw(); }

function turnTo(name) { setActive(name); byId(name).focus({ preventScroll: true }); readout(); }

const WITHOUT_CASE = "npl?";
const KEYS = {
  "1": () => turnTo("axial"), "2": () => turnTo("coronal"), "3": () => turnTo("sagittal"),
  "]": () => changeWindow(1.2, 0), "[": () => changeWindow(1 / 1.2, 0), ".": () => changeWindow(1, 0.05), ",": () => changeWindow(1, -0.05),
  ArrowUp: (event) => move(about.planes[active].normal, at[about.planes[active].normal] - (event.shiftKey ? 10 : 1)),
  ArrowDown: (event) => move(about.planes[active].normal, at[about.planes[active].normal] + (event.shiftKey ? 10 : 1)),
  "+": () => planes[active].setZoom(planes[active].zoom * 1.5), "-": () => planes[active].setZoom(planes[active].zoom / 1.5),
  "0": () => planes[active].setZoom(1),
  ArrowLeft: () => shift("across", -1), ArrowRight: () => shift("across", 1),
  b: () => correction.toggle(), x: () => correction.erase(!correction.eraser),
  w: () => chooseWindow((Number(byId("windows").value) + 1) % Math.max(1, about.windows.length)),
  o: () => { outline = !outline; toggle("outline", outline); }, h: () => { hidden = !hidden; toggle("hide", hidden); },
  d: () => { const some = about.doubts.filter((each) => each.point); if (some.length) { doubt = (doubt + 1) % some.length; say(some[doubt].text); jump(some[doubt].point); } },
  a: () => verdict.choose("accept"), e: () => verdict.choose("edit"), r: () => verdict.choose("reject"),
  s: () => verdict.save(), u: () => verdict.undo(), c: () => byId("comment").focus(),
  n: () => step(1), p: () => step(-1), l: () => location.assign(byId("back").href), "?": () => byId("help").showModal(),
};

function shift(direction, by) { const axis = about.planes[active][direction]; return move(axis, at[axis] + by); }

function withModifier(event) {
  if (event.altKey && (event.key === "ArrowUp" || event.key === "ArrowDown")) shift("down", event.key === "ArrowUp" ? -1 : 1);
  else if ((event.ctrlKey || event.metaKey) && correction.on && (event.key === "z" || event.key === "y")) correction.send(event.key === "z" ? "draft/undo" : "draft/redo");
  else return;
  event.preventDefault();
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("textarea, select, dialog, input:not([type=checkbox])") && event.key !== "Escape") return;
  if (about && (event.ctrlKey || event.metaKey || event.altKey)) { withModifier(event); return; }
  if (event.key === "Enter" && correction.on && event.target.closest(".plane") && about) { event.preventDefault(); correction.dot(active); return; }
  if (event.key === "Escape" && event.target.closest("textarea")) { event.target.blur(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("textarea, select, dialog, input[type=range]")) return;
  const action = KEYS[event.key];
  if (!action || (!about && !WITHOUT_CASE.includes(event.key))) return;
  event.preventDefault();
  action(event);
});
byId("back").href = HOME + location.search;
byId("next").addEventListener("click", () => step(1));
byId("previous").addEventListener("click", () => step(-1));
byId("keys").addEventListener("click", () => byId("help").showModal());
byId("close").addEventListener("click", () => byId("help").close());
byId("windows").addEventListener("change", (event) => chooseWindow(Number(event.target.value)));
byId("opacity").addEventListener("input", redraw);
byId("outline").addEventListener("click", KEYS.o);
byId("hide").addEventListener("click", KEYS.h);
byId("all").addEventListener("click", () => showAll(true));
byId("none").addEventListener("click", () => showAll(false));
// A picture in a page can't send the session: it is fetched, and shown from memory.
async function showPreview() {
  if (!byId("preview").open || !about) return;
  const { id } = about, picture = byId("preview").querySelector("img");
  let address = "";
  try { address = URL.createObjectURL(new Blob([await pixels(`/api/case/${encodeURIComponent(id)}/preview`)], { type: "image/png" })); }
  catch (error) { if (error.status !== 404) { failed(error); return; } }
  if (about?.id !== id) { URL.revokeObjectURL(address); return; }
  URL.revokeObjectURL(picture.src);
  if (address) picture.src = address; else picture.removeAttribute("src");
}

byId("preview").addEventListener("toggle", showPreview);
addEventListener("popstate", () => open(current()));
addEventListener("beforeunload", (event) => { if (correction.unsaved || verdict.unsaved) event.preventDefault(); });
try {
  verdict.tags((await enter()).tags);
  await list();
  await open(current());
} catch (error) { failed(error); }
