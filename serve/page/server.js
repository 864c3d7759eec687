// What this page asks of its server, and the errors that it answers with.

import { events } from "./sse.js";

const KEY = "kvarn.key";

/** The server refused or failed. `status` is the HTTP code, 0 where there was no answer; `code` the server's word. */
export class ServerError extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The key of this tab; it is forgotten with the tab. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => sessionStorage.setItem(KEY, key),
};

function headers() {
  const key = apiKey.get();
  if (!key) return { "content-type": "application/json" };
  // Headers hold bytes, and the server reads the key's UTF-8.
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  return { "content-type": "application/json", authorization: `Bearer ${bytes}` };
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it still running?", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const { message = `The server answered with code ${response.status}.`, code } = body?.error ?? {};
  throw new ServerError(message, response.status, code);
}

/** The served model: `{id, max_model_len}`. */
export async function getModel() {
  return (await (await ask("/v1/models")).json()).data[0];
}

/** What the cache takes, in bytes; with `tokens` also what one conversation of so many holds. See docs/server.md. */
export async function getKv(tokens = null) {
  return (await (await ask(tokens === null ? "/v1/cache" : `/v1/cache?tokens=${tokens}`)).json()).kv;
}

/** The chunks of a streamed answer, until it is whole. Throws ServerError, and AbortError when `signal` says so. */
export async function* streamChat(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(asked), signal });
  let whole = false;
  try {
    for await (const data of events(response.body)) {
      whole = data === "[DONE]";
      if (whole) continue; // to the end of the body, so that the connection can be used again
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, response.status, chunk.error.code);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError(`The connection broke before the answer was whole (${error.message}).`, 0);
  }
  if (!whole) throw new ServerError("The connection ended before the answer was whole.", 0);
}
