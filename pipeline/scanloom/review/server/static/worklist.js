// The list of cases as the server sends it, and the filters that stand in the address.

/**
 * A case of the list.
 * @typedef {object} Row
 * @property {string} id
 * @property {string} modality
 * @property {number[]} slices
 * @property {number[]} spacing
 * @property {string[]} models
 * @property {string[]} doubts
 * @property {boolean} review
 * @property {string} state
 * @property {?string} mine
 * @property {number} revision
 * @property {boolean} draft
 * @property {string[]} who Patient, date and series, if the reviewer may see them.
 * @property {string} [text] The words that a search looks into.
 */

/** Names of the filters and of the states of cases. */
export const STATES = {
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
 * @param {{columns: string[], cases: Array[]}} listed Answer of the server.
 * @returns {Row[]}
 */
export function rowsOf({ columns, cases }) {
  return cases.map((values) => Object.fromEntries(columns.map((name, n) => [name, values[n]])));
}

/**
 * @param {Row} row
 * @returns {boolean} Whether the case waits for a decision.
 */
export const isOpen = (row) => row.state === "open" || row.state === "stale";

/**
 * Return the rows that the list shows, in its order: the same on the page of a case.
 * @param {Row[]} rows
 * @param {URLSearchParams} query
 * @returns {Row[]}
 */
export function chosen(rows, query) {
  const filter = STATES[query.get("filter")] ? query.get("filter") : "all";
  const terms = (query.get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
  const [model, modality, doubtful] = ["model", "modality", "doubtful"].map((key) =>
    query.get(key),
  );
  return rows.filter((row) => {
    if (filter === "mine" && row.mine === null) return false;
    if (!["mine", "all"].includes(filter) && row.state !== filter) return false;
    if (model && !row.models.includes(model)) return false;
    if ((modality && row.modality !== modality) || (doubtful && !row.review)) return false;
    row.text ??= [row.id, row.modality, ...row.models, ...row.doubts, ...row.who]
      .join(" ")
      .toLowerCase();
    return terms.every((term) => row.text.includes(term));
  });
}
