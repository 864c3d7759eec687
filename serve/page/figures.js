// Figures in words: the line below an answer, and the line of the conversation.

/** Bytes for people. */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit++;
  }
  return `${unit === 0 ? count : count.toFixed(1)} ${units[unit]}`;
}

const many = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

/** How an answer went. */
export function answerLine({ state, figures }) {
  const parts = [];
  if (state === "stopped") parts.push("stopped");
  if (state === "cut") parts.push("cut at the end of the context");
  if (figures?.answerTokens) parts.push(many(figures.answerTokens, "token"));
  if (figures?.rate) parts.push(`${figures.rate.toFixed(1)} tokens/s`);
  if (figures?.firstSeconds) parts.push(`first after ${figures.firstSeconds.toFixed(1)} s`);
  if (figures?.promptTokens) {
    parts.push(`prompt ${many(figures.promptTokens, "token")}, ${figures.cachedTokens} cached`);
  }
  return parts.join(" · ");
}

/** All answers of a conversation together, and the KV bytes that it holds, against an exact cache's. */
export function conversationLine({ messages }) {
  const answers = messages.map((message) => message.figures).filter((figures) => figures?.answerTokens);
  if (!answers.length) return "";
  const sum = (name) => answers.reduce((total, figures) => total + (figures[name] ?? 0), 0);
  const seconds = answers.reduce((total, { rate, answerTokens }) => total + (rate ? (answerTokens - 1) / rate : 0), 0);
  const steps = answers.reduce((total, { rate, answerTokens }) => total + (rate ? answerTokens - 1 : 0), 0);
  const parts = [many(sum("answerTokens"), "token")];
  if (seconds > 0) parts.push(`${(steps / seconds).toFixed(1)} tokens/s`);
  const prompts = sum("promptTokens");
  if (prompts) parts.push(`${sum("cachedTokens")} of ${prompts} prompt tokens cached`);
  const last = answers.at(-1);
  if (last.kvBytes) {
    const share = Math.round((100 * last.kvBytes) / last.exactBytes);
    parts.push(`KV ${bytes(last.kvBytes)}, exact ${bytes(last.exactBytes)} (${share} %)`);
  }
  return parts.join(" · ");
}
