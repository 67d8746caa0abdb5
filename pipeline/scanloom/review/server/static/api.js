// Requests to the server.

export class Refused extends Error {
  constructor(status, reason, text) { super(text); this.status = status; this.reason = reason; }
}

async function checked(answer) {
  if (answer.ok) return answer;
  let plain = {};
  try { plain = await answer.json(); } catch { /* not from this server */ }
  throw new Refused(answer.status, plain.reason || String(answer.status), plain.text || "The server does not answer.");
}

export async function get(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  return [204, 304].includes(answer.status) ? null : (await checked(answer)).json();
}

export async function pixels(path, signal) {
  return (await checked(await fetch(path, { credentials: "same-origin", signal }))).arrayBuffer();
}

export async function post(path, body = {}) {
  const answer = await fetch(path, { method: "POST", credentials: "same-origin",
    headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  return (await checked(answer)).json();
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
