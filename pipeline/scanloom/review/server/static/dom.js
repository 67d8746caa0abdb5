// Elements of the pages.

/**
 * @param {string} id
 * @returns {HTMLElement}
 */
export const byId = (id) => document.getElementById(id);

/**
 * Make an element with a text and attributes.
 * @param {string} name
 * @param {string} [text]
 * @param {Object<string, string | number>} [attributes]
 * @returns {HTMLElement}
 */
export function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/**
 * Show whether a button that stays down is pressed.
 * @param {HTMLElement} button
 * @param {boolean} on
 */
export function press(button, on) {
  button.setAttribute("aria-pressed", String(on));
}

/**
 * Write into the status line, which screen readers read out.
 * @param {string} text
 * @param {boolean} [bad] Whether it is an error.
 */
export function say(text, bad = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("error", bad);
}
