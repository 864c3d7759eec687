// Making DOM nodes. Text enters the page as text nodes only; nothing here parses HTML.

/** A new element. `attributes` are set as they are; null and false leave one out, true sets an empty one. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** A button that does something. */
export function button(label, onClick, attributes = {}) {
  const node = element("button", { type: "button", ...attributes }, label);
  node.addEventListener("click", onClick);
  return node;
}

/** The element with an id of index.html. */
export function byId(id) {
  const node = document.getElementById(id);
  if (node === null) throw new Error(`index.html has no element #${id}`);
  return node;
}
