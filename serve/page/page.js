// The page: what is shown now, what the buttons do, and what the server is doing.

import { fillAnswer } from "./answer.js";
import { addAnswer, addTurn, cutAt, fromFile, newConversation, titleOf, toFile } from "./conversation.js";
import { openKey, openSettings } from "./dialogs.js";
import { byId, element } from "./dom.js";
import { bytes, conversationLine } from "./figures.js";
import { fileName, readFile, saveFile } from "./files.js";
import { MessageList } from "./messages.js";
import { apiKey, getKv, getModel } from "./server.js";
import { drawer, showConversations } from "./sidebar.js";
import { Store, StoreError } from "./store.js";

const RETRY_MS = 1000; // between two looks at a server that loads or does not answer

const store = new Store(onForeignChange);
const running = new Map(); // id of a conversation -> the AbortController of its answer
const list = new MessageList(byId("log"), { again, edit });
const closeDrawer = drawer();
const text = byId("text");
let current = store.list()[0] ?? newConversation();
let model = null; // {id, max_model_len}, once the server is ready
let kv = null; // what the cache takes
let waking = false; // whether the server is being asked for its model
let needsKey = false; // whether it refused for want of an API key

// What is shown.

function show() {
  list.show(current, intro());
  showHead();
  showState();
}

function showHead() {
  byId("title").textContent = titleOf(current);
  document.title = `${titleOf(current)} – KVarN`;
  const isRunning = (id) => running.has(id);
  showConversations(store.list(), current.id, isRunning, { open, remove });
}

function showState() {
  const answering = running.has(current.id);
  byId("send").hidden = answering;
  byId("stop").hidden = !answering;
  byId("send").disabled = (model === null && !needsKey) || !text.value.trim();
  byId("totals").textContent = conversationLine(current);
}

function intro() {
  const facts = [];
  if (model) facts.push(element("p", {}, `${model.id} answers, with up to ${model.max_model_len} tokens of context.`));
  if (kv) {
    const exact = `${bytes(kv.exact_bytes_per_token)} exact`;
    const held = kv.sealed_bytes_per_token === null
      ? `The cache is exact: ${bytes(kv.exact_bytes_per_token)} a token.`
      : `The cache ${kv.dtype} takes ${bytes(kv.sealed_bytes_per_token)} a token, ${exact}. The first `
        + `${kv.tile_tokens} tokens of a conversation and up to as many at its end stay exact.`;
    facts.push(element("p", {}, held));
  }
  return element("div", { class: "intro" }, element("h2", {}, "Ask something"), ...facts,
    element("p", {}, "Conversations are kept in this browser only."));
}

function notify(message) {
  const notice = byId("notice");
  notice.querySelector("p").textContent = message;
  notice.hidden = false;
}

function announce(message) {
  byId("announcement").textContent = message;
}

function save(conversation) {
  try {
    store.save(conversation);
  } catch (error) {
    if (!(error instanceof StoreError)) throw error;
    notify(error.message);
  }
}

// The server.

/** Ask for the model until the server has one. */
async function wake(error = null) {
  if (waking) return;
  waking = true;
  needsKey = false;
  model = null;
  showState();
  for (;;) {
    try {
      model = await getModel();
      kv = await getKv();
      break;
    } catch (failure) {
      if (failure.status === 401) {
        waking = false;
        askForKey(error ?? (apiKey.get() ? failure.message : null));
        return;
      }
      byId("model").textContent = failure.message;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
  waking = false;
  byId("model").textContent = `${model.id} · ${model.max_model_len} tokens of context · cache ${kv.dtype}`;
  if (!current.messages.length) list.show(current, intro());
  showState();
}

function askForKey(error) {
  needsKey = true;
  byId("model").textContent = "an API key is needed";
  showState();
  openKey(error, (key) => {
    apiKey.set(key);
    wake();
  });
}

/** Get the answer to the last message of the current conversation. */
async function answer() {
  const conversation = current;
  const controller = new AbortController();
  running.set(conversation.id, controller);
  save(conversation);
  show();
  announce("Answering");
  const failure = await fillAnswer(conversation, model.id, controller.signal, () => {
    if (conversation === current) list.updateLast();
  });
  if (running.get(conversation.id) === controller) running.delete(conversation.id);
  if (store.get(conversation.id) !== conversation) return; // deleted, edited, or changed in another tab
  conversation.updated = Date.now();
  save(conversation);
  showHead();
  if (conversation === current) {
    showState();
    announce(failure ? `The answer failed: ${failure.message}` : "The answer is complete");
  }
  if (failure?.status === 401) wake(failure.message);
  else if (failure?.status === 0 || failure?.code === "loading") wake();
}

// What the user does.

function send() {
  if (!text.value.trim() || running.has(current.id)) return;
  if (needsKey) askForKey(null);
  if (model === null) return;
  addTurn(current, text.value);
  text.value = "";
  fitText();
  answer();
}

function again() {
  if (running.has(current.id) || model === null) return;
  cutAt(current, current.messages.length - 1);
  addAnswer(current);
  answer();
  text.focus();
}

function edit(index, changed) {
  if (model === null) return;
  running.get(current.id)?.abort();
  // A copy: an answer that is still being stopped writes into the old one.
  current = { ...current, messages: current.messages.slice(0, index) };
  addTurn(current, changed);
  answer();
  text.focus();
}

function stop() {
  running.get(current.id)?.abort();
}

function open(id) {
  current = store.get(id);
  closeDrawer();
  show();
  text.focus();
}

function remove(id) {
  if (!window.confirm(`Delete “${titleOf(store.get(id))}”? It cannot be brought back.`)) return;
  running.get(id)?.abort();
  store.remove(id);
  if (id === current.id) current = store.list()[0] ?? newConversation();
  show();
}

function startNew() {
  current = newConversation();
  closeDrawer();
  show();
  text.focus();
}

function onForeignChange(id) {
  if (id === current.id && !running.has(id)) {
    current = store.get(id) ?? newConversation();
    show();
  } else {
    showHead();
  }
}

async function importFile(file) {
  try {
    const conversations = fromFile(await readFile(file));
    conversations.forEach(save);
    if (conversations.length) open(conversations[0].id);
  } catch (error) {
    notify(`Nothing was imported: ${error.message}.`);
  }
}

function fitText() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

// A keyboard on the screen covers part of the page without a change of its size in some browsers. A zoom changes the
// height by the scale, and must not change the page's.
function fitWindow() {
  const { visualViewport } = window;
  if (!visualViewport) return;
  document.documentElement.style.setProperty("--height", `${visualViewport.height * visualViewport.scale}px`);
}

text.addEventListener("input", () => {
  fitText();
  showState();
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("dialog[open]")) stop();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => {
  stop();
  text.focus();
});
byId("new").addEventListener("click", startNew);
byId("settings").addEventListener("click", () => {
  const conversation = current;
  const keep = (changes) => {
    Object.assign(conversation, changes);
    save(conversation);
    showHead();
  };
  openSettings(conversation, keep, () => saveFile(fileName(titleOf(conversation)), toFile([conversation])));
});
byId("export-all").addEventListener("click", () => saveFile("conversations.json", toFile(store.list())));
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (file) await importFile(file);
  event.target.value = "";
});
byId("notice").querySelector("button").addEventListener("click", () => (byId("notice").hidden = true));
window.visualViewport?.addEventListener("resize", fitWindow);
window.addEventListener("pagehide", () => {
  for (const id of running.keys()) {
    if (store.get(id)) save(store.get(id));
  }
});

fitWindow();
show();
text.focus();
wake();
