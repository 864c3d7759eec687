// Markdown -> DOM nodes: paragraphs, headings, lists, quotes, code fences, tables, rules. No HTML passes through.

import { copyButton } from "./clipboard.js";
import { element } from "./dom.js";
import { inlineNodes } from "./inline.js";

const MAX_DEPTH = 8; // of lists and quotes in each other; what is deeper is a paragraph
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: {1,4}|\t|$)/;

const shown = new WeakMap(); // container -> the sources of its blocks

/** Show a text in a container. Blocks that did not change keep their nodes, so a growing text costs its last block. */
export function showMarkdown(container, text) {
  const blocks = split(text.replaceAll("\r\n", "\n").split("\n"), 0);
  const sources = blocks.map((block) => `${block.kind}\n${block.lines.join("\n")}`);
  const before = shown.get(container) ?? [];
  let same = 0;
  while (same < before.length && before[same] === sources[same]) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map(build));
  shown.set(container, sources);
}

// Lines -> blocks. A block is `{kind, lines, depth, ...}` with the lines as they stand in the source.

function split(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = special(lines, at, depth) ?? paragraph(lines, at, depth);
    block.lines = lines.slice(at, block.end);
    block.depth = depth;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

/** What begins at a line, other than a paragraph. */
function special(lines, at, depth) {
  const nested = depth < MAX_DEPTH;
  return fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? table(lines, at)
    ?? (nested ? (quote(lines, at) ?? list(lines, at)) : null);
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open || (open[1][0] === "`" && open[2].includes("`"))) return null;
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], open[1])) end++;
  const indent = indentOf(lines[at]);
  const code = lines.slice(at + 1, end).map((line) => dedent(line, indent));
  const language = open[2].trim().split(/\s/, 1)[0].slice(0, 40);
  return { kind: "fence", end: Math.min(end + 1, lines.length), code: code.join("\n"), language };
}

function closes(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && indentOf(line) < 4 && text === mark[0].repeat(text.length);
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  let text = found[2].trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  if (end === 0 || text[end - 1] === " ") text = text.slice(0, end).trim();
  return { kind: "heading", end: at + 1, level: found[1].length, text };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null;
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return end > at ? { kind: "quote", end, inside: lines.slice(at, end).map((line) => line.replace(QUOTE, "")) } : null;
}

function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first || first[1].length > 3) return null;
  const ordered = first[2].length > 1;
  const base = first[1].length;
  const items = [];
  let end = at;
  let blank = false;
  for (let i = at; i < lines.length; i++) {
    const line = lines[i];
    if (!line.trim()) {
      blank = true;
      continue;
    }
    const inside = i > at && indentOf(line) >= base + 2;
    const mark = inside || RULE.test(line) ? null : ITEM.exec(line);
    if (mark && mark[2].length > 1 === ordered) {
      items.push([line.slice(mark[0].length)]);
    } else if (inside) {
      if (blank) items.at(-1).push("");
      items.at(-1).push(dedent(line, base + first[2].length + 1));
    } else if (!blank && !mark && !special(lines, i, MAX_DEPTH)) {
      items.at(-1).push(line); // goes on with the paragraph of the item
    } else {
      break;
    }
    blank = false;
    end = i + 1;
  }
  if (!items.length) return null;
  return { kind: "list", end, ordered, start: ordered ? parseInt(first[2], 10) : 1, items };
}

function table(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return null;
  const head = cells(lines[at]);
  const marks = cells(lines[at + 1]);
  if (marks.length !== head.length || !marks.every((cell) => /^:?-+:?$/.test(cell))) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const align = marks.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  return { kind: "table", end, head, align, rows: lines.slice(at + 2, end).map(cells) };
}

/** The cells of a line of a table; `\|` is a bar inside one. */
function cells(line) {
  const text = line.trim();
  const found = [""];
  for (let i = text[0] === "|" ? 1 : 0; i < text.length; i++) {
    if (text[i] === "\\" && text[i + 1] === "|") found[found.length - 1] += text[++i];
    else if (text[i] === "|") found.push("");
    else found[found.length - 1] += text[i];
  }
  if (found.length > 1 && !found.at(-1).trim()) found.pop();
  return found.map((cell) => cell.trim());
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !special(lines, end, depth)) end++;
  return { kind: "paragraph", end };
}

const TAB = 4; // columns

/** Columns of white space at a line's beginning. */
function indentOf(line) {
  let columns = 0;
  for (let i = 0; line[i] === " " || line[i] === "\t"; i++) columns += line[i] === "\t" ? TAB : 1;
  return columns;
}

/** A line without up to so many columns of white space at its beginning. */
function dedent(line, columns) {
  let i = 0;
  for (let left = columns; left > 0 && (line[i] === " " || line[i] === "\t"); i++) left -= line[i] === "\t" ? TAB : 1;
  return line.slice(i);
}

// Blocks -> nodes.

const BUILDERS = {
  fence({ code, language }) {
    const bar = element("div", { class: "bar" }, element("span", {}, language || "text"), copyButton(() => code));
    const pre = element("pre", { tabindex: "0" }, element("code", {}, code));
    return element("div", { class: "code" }, bar, pre);
  },
  heading({ level, text }) {
    return element(`h${Math.min(level + 2, 6)}`, { dir: "auto" }, ...inlineNodes(text));
  },
  rule() {
    return element("hr");
  },
  quote({ inside, depth }) {
    return element("blockquote", {}, ...split(inside, depth + 1).map(build));
  },
  list({ ordered, start, items, depth }) {
    const children = items.map((lines) => element("li", { dir: "auto" }, ...split(lines, depth + 1).map(build)));
    return ordered ? element("ol", { start: String(start) }, ...children) : element("ul", {}, ...children);
  },
  table({ head, align, rows }) {
    const row = (tag, texts) =>
      element("tr", {}, ...head.map((_, i) => element(tag, { class: align[i] }, ...inlineNodes(texts[i] ?? ""))));
    const body = element("tbody", {}, ...rows.map((texts) => row("td", texts)));
    const whole = element("table", {}, element("thead", {}, row("th", head)), body);
    return element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, whole);
  },
  paragraph({ lines }) {
    return element("p", { dir: "auto" }, ...inlineNodes(lines.map((line) => line.trim()).join("\n")));
  },
};

function build(block) {
  return BUILDERS[block.kind](block);
}
