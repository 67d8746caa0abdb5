// Requests to the server.

export class Refused extends Error {
  constructor(status, reason, text) { super(text); this.status = status; this.reason = reason; }
}

// The code of the reviewer: pages of several may be open in one browser.
export const REVIEWER = location.pathname.split("/")[1];
export const HOME = `/${REVIEWER}/`;
const KEY = `scanloom session ${REVIEWER}`;

// The secret stands in the storage of this origin, port included: no other server gets it. It is read anew
// for each request, since the link of a server that was started again at this address may be opened in another tab.
async function send(path, { signal, body } = {}) {
  const headers = { Authorization: `Bearer ${localStorage.getItem(KEY) ?? ""}` };
  const posted = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  return fetch(path, { credentials: "omit", cache: "no-store", headers, signal, ...posted });
}

// Turn the token of a link into the session, and return who the reviewer is. The token is not left in the address.
export async function enter() {
  const [, token] = location.hash.match(/^#([\w-]{43})$/) ?? [];
  if (token) {
    history.replaceState(null, "", location.pathname + location.search);
    try {
      const { session } = await post("/api/session", { token, reviewer: REVIEWER });
      localStorage.setItem(KEY, session);
    } catch (error) { if (error.reason !== "SESSION") throw error; }  // the link was used, perhaps in this browser
  }
  try {
    const me = await get("/api/me");
    if (me.reviewer === REVIEWER) return me;
  } catch (error) { if (error.reason !== "SESSION") throw error; }
  location.replace("/");  // says that this browser has no access
  return new Promise(() => {});
}

addEventListener("hashchange", () => { if (location.hash.length > 40) enter().catch(() => {}); });  // another link, in this tab

async function checked(answer) {
  if (answer.ok) return answer;
  let plain = {};
  try { plain = await answer.json(); } catch { /* not from this server */ }
  throw new Refused(answer.status, plain.reason || String(answer.status), plain.text || "The server does not answer.");
}

export async function get(path) {
  const answer = await send(path);
  return [204, 304].includes(answer.status) ? null : (await checked(answer)).json();
}

export async function pixels(path, signal) {
  return (await checked(await send(path, { signal }))).arrayBuffer();
}

export async function post(path, body = {}) {
  return (await checked(await send(path, { body }))).json();
}

export function rowsOf(listed) {
  return listed.cases.map((values) => Object.fromEntries(listed.columns.map((name, n) => [name, values[n]])));
}

export const STATES = { all: "All", open: "Open", mine: "Mine", disagreed: "Disagreed", accept: "Accepted",
  edit: "Needs edit", reject: "Rejected", stale: "Replaced since" };

function matches(row, { filter, words, model, modality, doubtful }) {
  if (filter === "mine" ? row.mine === null : filter !== "all" && row.state !== filter) return false;
  if (model && !row.models.includes(model) || modality && row.modality !== modality || doubtful && !row.review) return false;
  return words.every((word) => row.text.includes(word));
}

// The rows that the list shows, in its order: the same on the page of a case.
export function chosen(rows, query) {
  const filter = STATES[query.get("filter")] ? query.get("filter") : "all";
  const words = (query.get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) {
    row.text ??= [row.id, row.modality, ...row.models, ...row.doubts].join(" ").toLowerCase();
  }
  const asked = { filter, words, model: query.get("model"), modality: query.get("modality"), doubtful: query.get("doubtful") };
  return rows.filter((row) => matches(row, asked));
}

export function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
