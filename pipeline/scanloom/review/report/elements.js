// Elements of the report.

export const byId = (id) => document.getElementById(id);

/** The value of a field; empty if the page has no such field. */
export const valueOf = (id) => byId(id)?.value ?? "";

/**
 * @param {string} tag
 * @param {string} [text]
 * @param {string} [kind] Class of the element.
 * @returns {HTMLElement}
 */
export function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

/**
 * @param {string} title
 * @param {...(Node | string)} content
 * @returns {HTMLElement} A section with a heading.
 */
export function section(title, ...content) {
  const box = make("section");
  box.append(make("h3", title), ...content);
  return box;
}

/**
 * @param {string} kind Class of the list.
 * @param {HTMLElement[]} items
 * @returns {HTMLElement}
 */
export function listOf(kind, items) {
  const list = make("ul", undefined, kind);
  list.append(...items);
  return list;
}

/**
 * @param {string} text A sentence with `code` in it.
 * @returns {(Node | string)[]}
 */
export function sentence(text) {
  return text.split("`").map((piece, n) => (n % 2 ? make("code", piece) : piece));
}

/**
 * @param {string} text
 * @returns {HTMLElement} The text with a button that copies it.
 */
export function copyable(text) {
  const line = make("p", undefined, "copy");
  const button = make("button", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // a page from disk may not use the clipboard: select the text instead
      getSelection().selectAllChildren(line.firstChild);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
      return;
    }
    button.textContent = "Copied";
  });
  line.append(make("code", text), button);
  return line;
}
