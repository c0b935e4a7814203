"use strict";
// Markdown as nodes. The library reads; the nodes are made here, of text, by kinds from a written list. Markup, pictures
// and addresses that are not of the web or mail stay text, whatever a model writes.

const MAX_MARKDOWN = 100_000, SLOW_MS = 200, MAX_DEPTH = 24;  // beyond these, text is shown as it is
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };
const decode = (text) => text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (_, name) => ENTITIES[name]);

const INLINES = {
  text: (token) => token.tokens ? makeInlines(token.tokens) : [decode(token.text)],
  escape: (token) => [token.text],
  strong: (token) => [make("strong", {}, ...makeInlines(token.tokens))],
  em: (token) => [make("em", {}, ...makeInlines(token.tokens))],
  del: (token) => [make("del", {}, ...makeInlines(token.tokens))],
  codespan: (token) => [make("code", {}, token.text)],
  br: () => [make("br")],
  link: (token) => [makeLink(token.href, makeInlines(token.tokens))],
  image: (token) => [makeLink(token.href, [token.text || token.href])],
  formula: (token) => [makeFormula(token)],
  checkbox: (token) => [token.checked ? "\u2611 " : "\u2610 "],
};

const BLOCKS = {
  space: () => [],
  def: () => [],
  hr: () => [make("hr")],
  paragraph: (token) => [make("p", {}, ...makeInlines(token.tokens))],
  heading: (token) => [make(`h${Math.min(6, token.depth + 2)}`, {}, ...makeInlines(token.tokens))],
  blockquote: (token) => [make("blockquote", {}, ...makeBlocks(token.tokens))],
  code: (token) => [makeCode(token.text, (token.lang ?? "").split(/\s/)[0])],
  list: (token) => [makeList(token)],
  table: (token) => [makeTable(token)],
  formula_block: (token) => [make("p", {}, makeFormula(token))],
};

let depth = 0;

// Nodes of each token; what is nested deeper than anybody writes stays text, for browsers draw by recursion.
function makeEach(tokens, makeOne) {
  if (depth === MAX_DEPTH) return [tokens.map((token) => token.raw).join("")];
  depth += 1;
  try { return tokens.flatMap(makeOne); } finally { depth -= 1; }
}

const makeInlines = (tokens) => makeEach(tokens, (token) => INLINES[token.type]?.(token) ?? [token.raw]);
const makeBlocks = (tokens) => makeEach(tokens, (token) => (BLOCKS[token.type] ?? INLINES[token.type])?.(token) ?? [make("p", {}, token.raw)]);

function makeLink(address, children) {
  const isKnown = /^(https?:\/\/|mailto:)/i.test(address);
  return isKnown ? make("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...children) : make("span", {}, ...children);
}

function makeCode(text, language) {
  const name = language ? `Code, ${language}` : "Code";
  const head = make("div", { class: "code-head" }, make("span", {}, language || "code"), makeButton("Copy", (button) => copyText(text, button), { "aria-label": "Copy code" }));
  const code = make("code", {}, text);
  colour(code, text, language);
  return make("div", { class: "code" }, head, make("pre", { tabindex: 0, role: "region", "aria-label": name }, code));
}

function makeList(token) {
  const start = token.ordered && token.start !== 1 ? { start: token.start } : {};
  return make(token.ordered ? "ol" : "ul", start, ...token.items.map((item) => make("li", {}, ...makeBlocks(item.tokens))));
}

function makeTable(token) {
  const makeRow = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, cell.align ? { class: `to-${cell.align}` } : {}, ...makeInlines(cell.tokens))));
  const table = make("table", {}, make("thead", {}, makeRow("th", token.header)), make("tbody", {}, ...token.rows.map((row) => makeRow("td", row))));
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" }, table);
}

// What `text` is drawn as in one node, which grows: blocks that are the same stay, with what is selected in them.
class MarkdownView {
  constructor(node) { this.node = node; this.drawn = []; this.isPlain = false; }

  show(text) {
    const blocks = this.read(text);
    spentMs = 0;
    let same = 0;
    while (same < this.drawn.length && this.drawn[same].raw === blocks[same]?.raw) same++;
    for (const { nodes } of this.drawn.splice(same)) nodes.forEach((node) => node.remove());
    for (const token of blocks.slice(same)) {
      const nodes = this.draw(token);
      this.node.append(...nodes);
      this.drawn.push({ raw: token.raw, nodes });
    }
  }

  read(text) {
    const began = performance.now(), plain = [{ type: "plain", raw: text }];
    if (this.isPlain || text.length > MAX_MARKDOWN) return plain;
    try {
      const tokens = marked.lexer(text);
      this.isPlain = performance.now() - began > SLOW_MS;
      return tokens;
    } catch {  // nested too deep
      this.isPlain = true;
      return plain;
    }
  }

  draw(token) {
    if (token.type === "plain") return [make("div", { class: "plain" }, token.raw)];
    return makeBlocks([token]).map((node) => typeof node === "string" ? make("p", {}, node) : node);
  }
}
