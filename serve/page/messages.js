// The list of messages: one article each, and the text of a growing one.

import { copyButton } from "./clipboard.js";
import { button, element } from "./dom.js";
import { answerLine } from "./figures.js";
import { showMarkdown } from "./markdown.js";

const NEAR_END = 80; // pixels from the end within which the view follows a growing answer

export class MessageList {
  #log;
  #actions;
  #refresh = []; // per message: brings its article up to date
  #frame = null;

  /** `log` is the scrolling element. `actions`: `again()` answers the last message anew, `edit(index, text)`. */
  constructor(log, actions) {
    this.#log = log;
    this.#actions = actions;
  }

  /** Show a conversation; `empty` is what stands there without a message. */
  show(conversation, empty) {
    const { messages } = conversation;
    const articles = messages.map((message, index) =>
      message.role === "user"
        ? this.#userArticle(message, index)
        : this.#answerArticle(message, index === messages.length - 1));
    this.#refresh = articles.map(({ refresh }) => refresh);
    this.#log.replaceChildren(...(articles.length ? articles.map(({ node }) => node) : [empty]));
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  /** Bring the last message up to date, at the next frame. */
  updateLast() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      const { scrollTop, clientHeight, scrollHeight } = this.#log;
      const follows = scrollTop + clientHeight > scrollHeight - NEAR_END;
      this.#refresh.at(-1)?.();
      if (follows) this.#log.scrollTop = this.#log.scrollHeight;
    });
  }

  #userArticle(message, index) {
    const text = element("div", { class: "text", dir: "auto" }, message.text);
    const edit = button("Edit", () => this.#openEditor(node, message, index), { class: "quiet" });
    const tools = element("div", { class: "tools" }, edit, copyButton(() => message.text));
    const node = element("article", { class: "user", "aria-label": "You" }, text, tools);
    return { node, refresh() {} };
  }

  #openEditor(article, message, index) {
    const area = element("textarea", { rows: "3", "aria-label": "Edit the message" });
    area.value = message.text;
    const close = () => article.replaceWith(this.#userArticle(message, index).node);
    const form = element(
      "form",
      { class: "editor" },
      area,
      element("p", { class: "hint" }, "What follows this message is replaced."),
      element("div", { class: "row" }, element("span", { class: "gap" }), button("Cancel", close, { class: "quiet" }),
        element("button", { type: "submit", class: "strong" }, "Send again")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.#actions.edit(index, area.value);
    });
    article.replaceChildren(form);
    area.focus();
  }

  #answerArticle(message, isLast) {
    const thought = element("div", { class: "text", dir: "auto" });
    const thoughts = element("details", { class: "thoughts" }, element("summary", {}, "Thoughts"), thought);
    const text = element("div", { class: "markdown" });
    const waiting = element("p", { class: "waiting" }, "Reading the prompt …");
    const reason = element("span");
    const retry = button("Try again", () => this.#actions.again(), { class: "quiet" });
    const error = element("p", { class: "error" }, reason, isLast ? retry : "");
    const figures = element("span", { class: "figures" });
    const copy = copyButton(() => message.text);
    const again = button("Regenerate", () => this.#actions.again(), { class: "quiet" });
    const tools = element("div", { class: "tools" }, copy, isLast ? again : "", figures);
    const node = element("article", { class: "answer", "aria-label": "Answer" }, thoughts, text, waiting, error, tools);
    const refresh = () => {
      const running = message.state === "running";
      thoughts.hidden = !message.reasoning;
      if (thought.textContent !== message.reasoning) thought.textContent = message.reasoning;
      showMarkdown(text, message.text);
      waiting.hidden = !running || Boolean(message.text || message.reasoning);
      error.hidden = message.state !== "failed";
      reason.textContent = message.error;
      figures.textContent = answerLine(message);
      copy.hidden = !message.text;
      again.hidden = running || message.state === "failed";
      node.setAttribute("aria-busy", String(running));
    };
    refresh();
    return { node, refresh };
  }
}
