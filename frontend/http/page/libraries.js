"use strict";
// Libraries that few messages need: asked for by the first of these, and by nothing else. Until one is there, and where
// it fails or costs too much, text stays as it is.

const LIBRARIES = ["highlight", "katex"], WORK_MS = 150, MAX_JOBS = 1000, MAX_PARTS = 40;  // levels of what a library has made
const addressOf = (name) => `${BASE}/vendor/${name}.min.js?${document.querySelector(`meta[name="${name}"]`).content.slice(7, 19).replace(/\W/g, "")}`;

// The only address that becomes a script is that of a library; its contents must have the hash that the policy names.
const policy = window.trustedTypes?.createPolicy("quire-library", {
  createScriptURL(name) {
    if (LIBRARIES.includes(name)) return addressOf(name);
    throw new TypeError(`${name} is no library`);
  },
});

const libraries = {};  // name -> {isReady, jobs: what waits for it}
let spentMs = 0;  // of what is drawn at once, in libraries

// Has `job` draw `node` once the library is there: now, if it is.
function withLibrary(name, node, job) {
  const library = libraries[name] ??= load(name);
  if (library.isReady) work(job);
  else if (library.jobs.length < MAX_JOBS) library.jobs.push([node, job]);
}

function load(name) {
  const library = { isReady: false, jobs: [] }, script = make("script", { integrity: document.querySelector(`meta[name="${name}"]`).content });
  script.addEventListener("load", () => {
    library.isReady = true;
    workOff(library.jobs);
  });
  script.src = policy ? policy.createScriptURL(name) : addressOf(name);
  document.head.append(script);
  return library;
}

// In turns, so that keys and clicks have theirs; nodes that were drawn anew meanwhile are left out.
function workOff(jobs) {
  spentMs = 0;
  while (jobs.length && spentMs <= WORK_MS) {
    const [node, job] = jobs.shift();
    if (node.isConnected) work(job);
  }
  if (jobs.length) setTimeout(() => workOff(jobs), WORK_MS);
}

// A job that would go beyond what may be spent at once is left out.
function work(job) {
  if (spentMs > WORK_MS) return;
  const began = performance.now();
  try { job(); } catch { /* what the library cannot read stays as it is */ }
  spentMs += performance.now() - began;
}

// -- code in colours

// A line's cost grows with the square of its length in some languages.
const MAX_CODE = 20_000, LONG_LINE = /[^\n]{600}/, slowLanguages = new Set();

function colour(node, text, language) {
  if (!language || text.length > MAX_CODE || LONG_LINE.test(text) || slowLanguages.has(language)) return;
  withLibrary("highlight", node, () => {
    if (!hljs.getLanguage(language)) return;
    const began = performance.now(), { _emitter: { rootNode } } = hljs.highlight(text, { language, ignoreIllegals: true });
    if (performance.now() - began > WORK_MS) slowLanguages.add(language);
    const parts = rootNode.children.map((part) => makePart(part, 0));
    if (parts.map((part) => part.textContent ?? part).join("") === text) node.replaceChildren(...parts);
  });
}

function makePart(part, level) {
  if (typeof part === "string") return part;
  if (level === MAX_PARTS) throw new RangeError("nested deeper than anybody writes");
  const [kind = "", ...kinds] = (part.scope ?? "").split(".");
  const names = kind ? [`hl-${kind}`, ...kinds.map((name) => `${name}_`)] : [];
  return make("span", names.length ? { class: names.join(" ") } : {}, ...part.children.map((child) => makePart(child, level + 1)));
}

// -- formulas, as MathML: browsers have the fonts

const MAX_FORMULA = 2000;
const BLOCK_FORMULA = /^ {0,3}(?:\$\$([^$]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n+|$)/;
const FORMULAS = [
  [/^\$\$([^$]+?)\$\$/, true], [/^\\\[([^]+?)\\\]/, true], [/^\\\(([^]+?)\\\)/, false],
  [/^\$(?![\s$]|[\d.,]+[^$\n]*\s[a-z]{2})((?:\\[^]|[^\\$\n])+?)(?<!\s)\$(?!\w)/, false],  // amounts of money are no formulas
];

// Where the lexer has to stop reading text or a paragraph; only what is near is looked at, so that much text costs no more.
function findFormula(text) {
  const head = text.slice(0, MAX_FORMULA), at = head.search(/(?<!\w)\$|\\[([]/);
  return at >= 0 ? at : text.length > head.length ? head.length : undefined;
}

function findBlock(text) {
  const at = text.slice(0, MAX_FORMULA).search(/(?<=\n) {0,3}(?:\$\$|\\\[)/);
  return at >= 0 && readFormula(text.slice(at), [[BLOCK_FORMULA, true]]) ? at : undefined;
}

function readFormula(text, patterns) {
  const head = text.slice(0, MAX_FORMULA);
  for (const [pattern, isDisplay] of patterns) {
    const match = pattern.exec(head), source = (match?.[1] ?? match?.[2])?.trim();
    if (source) return { raw: match[0], text: source, isDisplay };
  }
}

const tag = (type, token) => token && { type, ...token };

marked.use({ extensions: [
  { name: "formula_block", level: "block", start: findBlock, tokenizer: (text) => tag("formula_block", readFormula(text, [[BLOCK_FORMULA, true]])) },
  { name: "formula", level: "inline", start: findFormula, tokenizer: (text) => tag("formula", readFormula(text, FORMULAS)) },
] });

function makeFormula({ raw, text, isDisplay }) {
  const node = make("span", isDisplay ? { class: "formula display", tabindex: 0, role: "region", "aria-label": "Formula" } : { class: "formula" }, raw.trim());
  withLibrary("katex", node, () => {
    const made = make("span");
    katex.render(text, made, { output: "mathml", displayMode: isDisplay, throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 500 });
    if (!isDeep(made)) node.replaceChildren(...made.firstChild.childNodes);
  });
  return node;
}

// Browsers lay formulas out by recursion.
function isDeep(node) {
  let level = [node];
  for (let depth = 0; level.length; depth++) {
    if (depth > MAX_PARTS) return true;
    level = level.flatMap((each) => [...each.children]);
  }
  return false;
}
