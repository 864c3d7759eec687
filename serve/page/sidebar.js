// The list of conversations: beside the messages, or over them where the window is narrow.

import { titleOf } from "./conversation.js";
import { button, byId, element } from "./dom.js";

const narrow = window.matchMedia("(max-width: 48rem)");

/** Show the list. `isRunning(id)` marks what is being answered; `actions`: `open(id)`, `remove(id)`. */
export function showConversations(conversations, currentId, isRunning, actions) {
  const items = conversations.map((conversation) => {
    const { id } = conversation;
    const title = titleOf(conversation);
    const open = button(title, () => actions.open(id), {
      class: "open",
      title,
      dir: "auto",
      "aria-current": id === currentId && "true",
    });
    const remove = button("✕", () => actions.remove(id), { class: "quiet", "aria-label": `Delete ${title}` });
    return element("li", { class: isRunning(id) ? "running" : null }, open, remove);
  });
  byId("conversations").replaceChildren(...items);
}

/** Let the menu button open the list in a narrow window; gives the function that closes it. */
export function drawer() {
  const menu = byId("menu");
  const main = document.querySelector("main");
  const set = (open) => {
    document.body.classList.toggle("menu-open", open && narrow.matches);
    menu.setAttribute("aria-expanded", String(open && narrow.matches));
    main.inert = open && narrow.matches;
    byId("sidebar").inert = narrow.matches && !open;
  };
  const close = () => {
    const wasOpen = document.body.classList.contains("menu-open");
    set(false);
    if (wasOpen) menu.focus();
  };
  menu.addEventListener("click", () => {
    set(true);
    byId("close-menu").focus();
  });
  byId("close-menu").addEventListener("click", close);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !document.body.classList.contains("menu-open")) return;
    event.preventDefault(); // or it would stop an answer too
    close();
  });
  document.addEventListener("pointerdown", (event) => {
    if (document.body.classList.contains("menu-open") && !byId("sidebar").contains(event.target)) close();
  });
  narrow.addEventListener("change", () => set(false));
  set(false);
  return close;
}
