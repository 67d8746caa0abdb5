// Rows of the list of cases, as the server sends them. It chooses them by the filters that stand in the address.

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
 * @param {{columns: string[], cases: Array[]}} answer Of the server.
 * @returns {Row[]}
 */
export function rowsOf({ columns, cases }) {
  return cases.map((values) => Object.fromEntries(columns.map((name, n) => [name, values[n]])));
}
