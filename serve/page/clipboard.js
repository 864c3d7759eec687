// Copying text, also where the page came over plain HTTP and the browser offers no clipboard API.

import { button, element } from "./dom.js";

/** Put text into the clipboard; whether that worked. */
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not allowed here; the old way may be.
    }
  }
  const focused = document.activeElement;
  const area = element("textarea", { class: "hidden", readonly: true, "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(text, attributes = {}) {
  const node = button("Copy", async () => {
    node.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (node.textContent = "Copy"), 1500);
  }, { class: "quiet", ...attributes });
  return node;
}
