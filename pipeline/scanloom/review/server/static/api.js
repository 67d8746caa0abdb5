// Requests to the server.

export const SILENT = "The server does not answer. Is it still running?";

/** A request that the server did not serve, with its HTTP status and the code of the reason. */
export class Refused extends Error {
  constructor(status, reason, text) {
    super(text);
    this.status = status;
    this.reason = reason;
  }
}

/** The code of the reviewer: pages of several may be open in one browser. */
export const REVIEWER = location.pathname.split("/")[1];
export const HOME = `/${REVIEWER}/`;
const KEY = `scanloom session ${REVIEWER}`;

/**
 * @param {string} id
 * @returns {string} Address of a case for requests.
 */
export const addressOf = (id) => `/api/case/${encodeURIComponent(id)}`;

/**
 * @param {string} id
 * @returns {string} Address of the page of a case, with the filters of the list.
 */
export const pageOf = (id) => `${HOME}case/${encodeURIComponent(id)}${location.search}`;

/**
 * @param {Case} about
 * @param {string} path
 * @param {boolean} [isDraft] Whether the strokes of a correction are asked for as well.
 * @returns {string} Address of a part of this result of the case; it is refused once the result was replaced.
 */
export const resultOf = ({ id, version }, path, isDraft) =>
  `${addressOf(id)}/${path}?version=${version}${isDraft ? "&draft=1" : ""}`;

// The secret is in the storage of this origin, port included: no other server gets it. It is read anew for each
// request, since the link of a server that was started again at this address may be opened in another tab.
async function send(path, body) {
  const headers = { Authorization: `Bearer ${localStorage.getItem(KEY) ?? ""}` };
  const posted = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  return fetch(path, { credentials: "omit", cache: "no-store", headers, ...posted });
}

async function checked(answer) {
  if (answer.ok) return answer;
  let plain = {};
  try {
    plain = await answer.json();
  } catch {
    /* not from this server */
  }
  const text = plain.text || "The server does not answer.";
  throw new Refused(answer.status, plain.reason || String(answer.status), text);
}

/**
 * @param {string} path
 * @returns {Promise<?object>} The JSON of the answer; null if it has none.
 */
export async function get(path) {
  const answer = await send(path);
  return [204, 304].includes(answer.status) ? null : (await checked(answer)).json();
}

/**
 * @param {string} path
 * @returns {Promise<ArrayBuffer>}
 */
export async function pixels(path) {
  return (await checked(await send(path))).arrayBuffer();
}

/**
 * @param {string} path
 * @param {object} [body]
 * @returns {Promise<object>}
 */
export async function post(path, body = {}) {
  return (await checked(await send(path, body))).json();
}

/**
 * Turn the token of a link into the session. The token is not left in the address.
 * @returns {Promise<{reviewer: string, name: string, blind: boolean, tags: {id: string, name: string}[]}>}
 */
export async function enter() {
  const [, token] = location.hash.match(/^#([\w-]{43})$/) ?? [];
  if (token) {
    history.replaceState(null, "", location.pathname + location.search);
    try {
      const { session } = await post("/api/session", { token, reviewer: REVIEWER });
      localStorage.setItem(KEY, session);
    } catch (error) {
      if (error.reason !== "SESSION") throw error; // the link was used, perhaps in this browser
    }
  }
  try {
    const me = await get("/api/me");
    if (me.reviewer === REVIEWER) return me;
  } catch (error) {
    if (error.reason !== "SESSION") throw error;
  }
  location.replace("/"); // says that this browser has no access
  return new Promise(() => {});
}

addEventListener("hashchange", () => {
  if (location.hash.length > 40) enter().catch(() => {}); // another link, in this tab
});
