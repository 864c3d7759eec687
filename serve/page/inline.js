// Markdown within a line: code, emphasis, links. Gives text nodes and a few elements; of their attributes the text
// chooses one, the address of a link.
//
// The time grows with the length of hostile text, not with its square: a mark whose partner is missing is looked for
// once (`hopeless`).

import { element } from "./dom.js";

const MAX_DEPTH = 6;
const SCHEME = /^(https?:\/\/|mailto:)/i;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const SPACE = /\s/;
const LABEL = /\[((?:[^[\]\\]|\\.){0,1000})\]/;
const ADDRESS = /<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200}){0,9})>?/;
const TITLE = /(?:\s{1,9}"[^"]{0,500}")?/;
const LINK = new RegExp(`${LABEL.source}\\(\\s{0,9}${ADDRESS.source}${TITLE.source}\\s{0,9}\\)`, "y");
const BARE_LINK = /https?:\/\/[^\s<>"'`|\\^{}]+/iy;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const BREAK = /<br ?\/?>/iy;

/** The address to link to; null unless it is a whole http, https or mailto address. */
export function safeUrl(text) {
  if (!SCHEME.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

/** The nodes of a text, which may hold line breaks. `links`: whether links are made; there are none within a link. */
export function inlineNodes(text, { depth = 0, links = true } = {}) {
  const nodes = [];
  const within = { depth, links, hopeless: new Set() };
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const found = special(text, at, within);
    if (found === null) {
      plain += text[at++];
      continue;
    }
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(...found.nodes);
    at = found.end;
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

/** What begins at a place, as `{nodes, end}`; null where it is plain text. */
function special(text, at, within) {
  switch (text[at]) {
    case "\n":
      return { nodes: [element("br")], end: at + 1 };
    case "\\":
      return at + 1 < text.length && PUNCTUATION.test(text[at + 1])
        ? { nodes: [document.createTextNode(text[at + 1])], end: at + 2 }
        : null;
    case "`":
      return code(text, at, within);
    case "*":
    case "_":
    case "~":
      return emphasis(text, at, within);
    case "[":
      return link(text, at, at, within);
    case "!":
      return text[at + 1] === "[" ? link(text, at, at + 1, within) : null;
    case "<":
      return angle(text, at, within);
    case "h":
    case "H":
      return bareLink(text, at, within);
    default:
      return null;
  }
}

function sticky(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return end - at;
}

function code(text, at, { hopeless }) {
  const length = runLength(text, at);
  const mark = text.slice(at, at + length);
  let close = hopeless.has(mark) ? -1 : text.indexOf(mark, at + length);
  while (close >= 0 && runLength(text, close) !== length) close = text.indexOf(mark, close + runLength(text, close));
  if (close < 0) {
    hopeless.add(mark);
    return { nodes: [document.createTextNode(mark)], end: at + length };
  }
  const inside = text.slice(at + length, close).replaceAll("\n", " ");
  const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
  return { nodes: [element("code", {}, padded ? inside.slice(1, -1) : inside)], end: close + length };
}

function emphasis(text, at, { depth, links, hopeless }) {
  const mark = text[at];
  const marks = text[at + 1] === mark ? mark + mark : mark;
  const start = at + marks.length;
  if (mark === "~" && marks.length === 1) return null;
  if (start >= text.length || SPACE.test(text[start]) || depth >= MAX_DEPTH || hopeless.has(marks)) return null;
  if (mark === "_" && at > 0 && WORD.test(text[at - 1])) return null;
  for (let close = text.indexOf(marks, start + 1); close >= 0; close = text.indexOf(marks, close + 1)) {
    if (SPACE.test(text[close - 1]) || text[close - 1] === "\\") continue;
    if (marks.length === 1 && text[close + 1] === mark) {
      close += 1; // a double mark, which opens or closes something inside
      continue;
    }
    if (marks.length === 2 && runLength(text, close) === 3) close += 1; // of three marks the last two are ours
    const end = close + marks.length;
    if (mark === "_" && end < text.length && WORD.test(text[end])) continue;
    const tag = mark === "~" ? "del" : marks.length === 2 ? "strong" : "em";
    const inside = inlineNodes(text.slice(start, close), { depth: depth + 1, links });
    return { nodes: [element(tag, {}, ...inside)], end };
  }
  hopeless.add(marks);
  return null;
}

function anchor(url, children) {
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** `[text](url)`; an image becomes a link too, for nothing is loaded from elsewhere. */
function link(text, at, bracket, { depth, links }) {
  const found = links ? sticky(LINK, text, bracket) : null;
  const url = found && safeUrl(found[2]);
  if (!url) return null;
  return { nodes: [anchor(url, inlineNodes(found[1] || found[2], { depth, links: false }))], end: LINK.lastIndex };
}

function angle(text, at, { links }) {
  const line = sticky(BREAK, text, at);
  if (line) return { nodes: [element("br")], end: BREAK.lastIndex };
  const found = links ? sticky(ANGLE_LINK, text, at) : null;
  const url = found && safeUrl(found[1]);
  return url ? { nodes: [anchor(url, [found[1]])], end: at + found[0].length } : null;
}

function bareLink(text, at, { links }) {
  if (!links || (at > 0 && WORD.test(text[at - 1]))) return null;
  const found = sticky(BARE_LINK, text, at);
  if (!found) return null;
  let end = found[0].length; // what ends a sentence does not belong to the address
  while (/[.,;:!?*_~)\]]/.test(found[0][end - 1])) end--;
  const shown = found[0].slice(0, end);
  const url = safeUrl(shown);
  return url ? { nodes: [anchor(url, [shown])], end: at + end } : null;
}
