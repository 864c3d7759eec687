// The conversations of this browser, one entry of localStorage each, so that two tabs do not overwrite each other.

import { readConversation } from "./conversation.js";

const PREFIX = "kvarn.conversation.";

/** What cannot be kept, and why; the conversation goes on in this tab. */
export class StoreError extends Error {}

export class Store {
  #known = new Map(); // id -> conversation; also what could not be kept
  #storage = null;

  /** Reads what is kept. `onForeignChange(id)` is called when another tab has changed a conversation. */
  constructor(onForeignChange) {
    try {
      this.#storage = window.localStorage;
      for (let i = 0; i < this.#storage.length; i++) this.#read(this.#storage.key(i));
    } catch {
      this.#storage = null; // the browser forbids it; `save` says so
    }
    window.addEventListener("storage", ({ key }) => {
      if (!key?.startsWith(PREFIX)) return;
      const id = key.slice(PREFIX.length);
      this.#known.delete(id);
      this.#read(key);
      onForeignChange(id);
    });
  }

  #read(key) {
    if (!key.startsWith(PREFIX)) return;
    let data = null;
    try {
      data = readConversation(JSON.parse(this.#storage.getItem(key)));
    } catch {
      return; // not ours, or cut short
    }
    if (data !== null && PREFIX + data.id === key) this.#known.set(data.id, data);
  }

  /** All conversations, the newest first. */
  list() {
    return [...this.#known.values()].sort((a, b) => b.updated - a.updated);
  }

  /** One conversation; undefined where there is none. */
  get(id) {
    return this.#known.get(id);
  }

  /** Keep a conversation; StoreError when the browser has no room for it or forbids it. */
  save(conversation) {
    this.#known.set(conversation.id, conversation);
    if (this.#storage === null) {
      throw new StoreError("This browser keeps nothing here; conversations end with this tab.");
    }
    const text = JSON.stringify(conversation);
    try {
      this.#storage.setItem(PREFIX + conversation.id, text);
    } catch (error) {
      const kib = Math.ceil(text.length / 1024);
      throw new StoreError(
        error.name === "QuotaExceededError"
          ? `The browser's storage is full: this conversation (${kib} KiB) is not kept. Export and delete some.`
          : `The browser could not keep this conversation: ${error.message}`,
      );
    }
  }

  /** Forget a conversation. */
  remove(id) {
    this.#known.delete(id);
    this.#storage?.removeItem(PREFIX + id);
  }
}
