// A conversation as plain data: making one, changing it, and reading one that somebody else wrote.
//
// {id, title, created, updated, system, temperature, messages}; temperature null is the server's own. A message is
// {role, text} and, from the assistant, {reasoning, state, error, figures}; state: running, done, cut (at the end of
// the context), stopped or failed.

export const MAX_TITLE = 200;
const STATES = ["running", "done", "cut", "stopped", "failed"];
const FIGURES = [
  "promptTokens", "cachedTokens", "answerTokens", "firstSeconds", "rate", "kvTokens", "kvBytes", "exactBytes",
];

/** A new, empty conversation. */
export function newConversation(now = Date.now()) {
  return { id: newId(), title: "", created: now, updated: now, system: "", temperature: null, messages: [] };
}

function newId() {
  // Not randomUUID: over plain HTTP from another machine the browser does not offer it.
  return Array.from(crypto.getRandomValues(new Uint8Array(10)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The title to show. */
export function titleOf(conversation) {
  return conversation.title || "New conversation";
}

/** Add a user's message and the answer to come, which is returned. The first message gives the title. */
export function addTurn(conversation, text) {
  const first = text.trim().split("\n", 1)[0];
  if (!conversation.title) conversation.title = first.length > 60 ? `${first.slice(0, 59)}…` : first;
  conversation.messages.push({ role: "user", text });
  return addAnswer(conversation);
}

/** Drop the message at `index` and what follows it. */
export function cutAt(conversation, index) {
  conversation.messages.length = index;
}

/** Add an answer to come to the last message. */
export function addAnswer(conversation) {
  const message = { role: "assistant", text: "", reasoning: "", state: "running", error: "", figures: null };
  conversation.messages.push(message);
  conversation.updated = Date.now();
  return message;
}

/** The body of the request for the last answer. Thoughts, and answers without a text, are not sent. */
export function requestBody(conversation, model) {
  const said = conversation.messages.slice(0, -1).filter((message) => message.role === "user" || message.text);
  const messages = said.map(({ role, text }) => ({ role, content: text }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const body = { model, messages };
  if (conversation.temperature !== null) body.temperature = conversation.temperature;
  return body;
}

/** Conversations -> the text of a file. */
export function toFile(conversations) {
  return JSON.stringify({ format: "kvarn conversations", version: 1, conversations }, null, 1);
}

/** The text of a file -> conversations with fresh ids; an Error that says what is wrong with it. */
export function fromFile(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error(`the file is not JSON (${error.message})`);
  }
  if (data?.format !== "kvarn conversations" || data.version !== 1 || !Array.isArray(data.conversations)) {
    throw new Error("the file holds no conversations that this page exported");
  }
  return data.conversations.map((item, i) => {
    const conversation = readConversation(item);
    if (conversation === null) throw new Error(`conversation ${i + 1} of the file is damaged`);
    return { ...conversation, id: newId() };
  });
}

/** Data from storage or a file -> a conversation of known fields, each of its type; null where it is none. */
export function readConversation(data) {
  if (!isObject(data) || typeof data.id !== "string" || !Array.isArray(data.messages)) return null;
  const messages = data.messages.map(readMessage);
  if (messages.includes(null)) return null;
  return {
    id: data.id,
    title: string(data.title).slice(0, MAX_TITLE),
    created: number(data.created) ?? 0,
    updated: number(data.updated) ?? 0,
    system: string(data.system),
    temperature: number(data.temperature),
    messages,
  };
}

function readMessage(data) {
  if (!isObject(data) || typeof data.text !== "string") return null;
  if (data.role === "user") return { role: "user", text: data.text };
  if (data.role !== "assistant" || !STATES.includes(data.state)) return null;
  return {
    role: "assistant",
    text: data.text,
    reasoning: string(data.reasoning),
    state: data.state === "running" ? "stopped" : data.state, // nobody writes it any more
    error: string(data.error),
    figures: isObject(data.figures)
      ? Object.fromEntries(FIGURES.map((name) => [name, number(data.figures[name])]))
      : null,
  };
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const string = (value) => (typeof value === "string" ? value : "");
const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
