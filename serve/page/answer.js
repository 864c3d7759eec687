// One answer: asks for it, fills its message as it comes, and measures it.

import { requestBody } from "./conversation.js";
import { getKv, ServerError, streamChat } from "./server.js";

/**
 * Fill the last message of a conversation from the server. Never throws: the message says how it ended.
 * `onChange()` is called whenever the message has changed. Gives the ServerError that ended it, or null.
 */
export async function fillAnswer(conversation, model, signal, onChange) {
  const message = conversation.messages.at(-1);
  const measure = new Measure(message);
  let failure = null;
  let finish = null;
  try {
    for await (const chunk of streamChat(requestBody(conversation, model), signal)) {
      if (chunk.usage) measure.usage(chunk.usage);
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      if (choice.delta.role === undefined) measure.token(); // the first chunk comes before the prompt is read
      message.text += choice.delta.content ?? "";
      message.reasoning += choice.delta.reasoning_content ?? "";
      onChange();
    }
    message.state = finish === "length" ? "cut" : "done";
  } catch (error) {
    failure = error.name === "AbortError" ? null : error;
    message.state = failure ? "failed" : "stopped";
    message.error = failure ? failure.message : "";
    if (failure && !(failure instanceof ServerError)) console.error(failure);
  }
  onChange();
  await measure.kv();
  onChange();
  return failure;
}

class Measure {
  #figures = { promptTokens: null, cachedTokens: null, answerTokens: 0, firstSeconds: null, rate: null };
  #start = performance.now();
  #first = null;
  #last = null;

  constructor(message) {
    message.figures = this.#figures;
  }

  /** A token came. Counted here until the server's own count is known, which it is not for a stopped answer. */
  token() {
    const now = performance.now();
    this.#first ??= now;
    this.#last = now;
    this.#figures.firstSeconds ??= (now - this.#start) / 1000;
    this.#figures.answerTokens += 1;
    this.#setRate();
  }

  #setRate() {
    const seconds = (this.#last - this.#first) / 1000;
    const steps = this.#figures.answerTokens - 1; // the first token came with the prompt
    if (steps > 0 && seconds > 0) this.#figures.rate = steps / seconds;
  }

  /** The server's counts. */
  usage({ prompt_tokens, completion_tokens, prompt_tokens_details }) {
    this.#figures.promptTokens = prompt_tokens;
    this.#figures.cachedTokens = prompt_tokens_details?.cached_tokens ?? 0;
    this.#figures.answerTokens = completion_tokens;
    this.#setRate();
  }

  /** What the conversation now holds; unknown where the prompt's length is. */
  async kv() {
    const { promptTokens, answerTokens } = this.#figures;
    if (promptTokens === null) return;
    try {
      const { sequence } = await getKv(promptTokens + answerTokens);
      this.#figures.kvTokens = sequence.tokens;
      this.#figures.kvBytes = sequence.bytes;
      this.#figures.exactBytes = sequence.bytes_exact;
    } catch {
      // The answer is there; only its last figure is not.
    }
  }
}
