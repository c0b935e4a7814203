"use strict";
// Charts of the last quarter of an hour. The engine keeps what they show, so a reload loses nothing and every tab shows the same.

const SPAN_S = 900, WIDTH = 900, HEIGHT = 100;
const latency = (value) => value < 1000 ? milliseconds(value) : `${(value / 1000).toFixed(1)} s`;
const byShare = (part, whole) => whole ? part / whole : null;

// `lines`: a value of a point, or null where there is none; `rest`: what a period without work has; `now`: of a snapshot.
const CHARTS = [
  { id: "generation", name: "Generated tokens/s", unit: "tokens/s", write: count, rest: 0, lines: [(point, { period }) => point.generation_tokens / period], now: (snapshot) => [snapshot.generation_tokens_per_s] },
  { id: "prompt", name: "Prompt tokens/s", unit: "tokens/s", write: count, rest: 0, lines: [(point, { period }) => point.prompt_tokens / period], now: (snapshot) => [snapshot.prompt_tokens_per_s] },
  { id: "first_token", name: "Time to first token, mean", unit: "", write: latency, rest: null, lines: [(point) => byShare(1000 * point.first_token_s, point.num_first_tokens)] },
  { id: "gap", name: "Time between tokens, mean", unit: "", write: latency, rest: null, lines: [(point) => byShare(1000 * point.gap_s, point.num_gaps)] },
  { id: "queue", name: "Queue", unit: "", write: count, rest: 0, lines: [(point) => point.num_running, (point) => point.num_waiting], keys: ["running", "waiting"], now: ({ stats }) => [stats.num_running, stats.num_waiting] },
  { id: "kv", name: "KV in use", unit: "", write: (value) => `${value && value < 10 ? Math.max(value, 0.1).toFixed(1) : value.toFixed(0)} %`, rest: 0, top: 100, lines: [(point, { blocks }) => byShare(100 * point.kv_blocks_used, blocks)], now: ({ stats }) => [100 * byShare(stats.kv_blocks_used, stats.kv_blocks_total)] },
];

const makeSvg = (tag, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

// The least of 1, 2, 5, 10, ... that is not below `value`: an axis ends at a number that people can halve.
function findTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((digit) => digit * power).find((top) => top >= value * 0.999);
}

// The periods of all engines together, from the first that can be shown on; the last is not over.
function sumHistory({ engines }, uptime) {
  const at = Math.max(...engines.map((engine) => engine.at)), period = engines[0].period_s, sums = new Map();
  const from = Math.max(at - SPAN_S, at - uptime);
  for (let begin = Math.ceil((from - period) / period) * period; begin <= at; begin += period) sums.set(begin, null);
  for (const point of engines.flatMap((engine) => engine.points)) {
    if (!sums.has(point.at)) continue;
    const sum = sums.get(point.at) ?? {};
    for (const [name, value] of Object.entries(point)) sum[name] = name === "at" ? value : (sum[name] ?? 0) + value;
    sums.set(point.at, sum);
  }
  return { at, period, blocks: engines.reduce((sum, engine) => sum + engine.kv_blocks_total, 0), points: [...sums] };
}

class Chart {
  constructor(facts) {
    Object.assign(this, facts, { lit: null, history: null });
    this.paths = this.lines.map((_, place) => makeSvg("path", { class: `line${place}` }));
    this.cursor = makeSvg("path", { class: "cursor" });
    this.svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": this.name });
    this.svg.append(makeSvg("path", { class: "grid", d: [0, HEIGHT / 2, HEIGHT].map((y) => `M0 ${y}H${WIDTH}`).join("") }), this.cursor, ...this.paths);
    this.axis = ["", "", ""].map((text) => make("span", {}, text));
    this.reading = make("p", { class: "reading" });
    const plot = make("div", { class: "plot" }, make("div", { class: "values", "aria-hidden": "true" }, ...this.axis), this.svg);
    byId(`chart_${this.id}`).append(plot, make("div", { class: "times", "aria-hidden": "true" }, ...["\u221215 min", "\u221210", "\u22125", "now"].map((text) => make("span", {}, text))), this.reading);
    this.svg.addEventListener("pointermove", ({ clientX }) => {
      const { left, width } = this.svg.getBoundingClientRect();
      this.lit = (clientX - left) / width;
      this.read();
    });
    this.svg.addEventListener("pointerleave", () => { this.lit = null; this.read(); });
  }

  valuesOf(point) { return this.lines.map((line) => point ? line(point, this.history) : this.rest); }

  // `now`: what a snapshot says. The sum of a period that is not over says less than that.
  show(history, now) {
    this.history = history;
    const points = history.points.filter(([at]) => this.rest === null || at + history.period <= history.at);
    this.rows = points.map(([at, point]) => ({ x: WIDTH * (1 - (history.at - at - history.period / 2) / SPAN_S), at, values: this.valuesOf(point) }));
    if (this.now) this.rows.push({ x: WIDTH, at: history.at, values: this.now(now) });
    this.most = Math.max(0, ...this.rows.flatMap(({ values }) => values));
    const top = this.top ?? findTop(this.most || 1);
    [top, top / 2, 0].forEach((value, place) => { this.axis[place].textContent = this.writeAxis(value, top); });
    this.paths.forEach((path, line) => path.setAttribute("d", this.draw(line, top)));
    this.read();
    if (this.rest === null) byId(this.id).textContent = this.describeLast();
  }

  writeAxis(value, top) {
    if (this.write === latency) return top >= 1000 ? `${value / 1000} s` : `${value} ms`;
    return top < 2 && value % 1 ? "" : value.toLocaleString("en", { notation: value >= 10_000 ? "compact" : "standard" }) + (this.top ? " %" : "");
  }

  // A value that stands alone is a short line.
  draw(line, top) {
    const valueAt = (place) => this.rows[place]?.values[line] ?? null;
    return this.rows.map(({ x }, place) => {
      if (valueAt(place) === null) return "";
      const y = (HEIGHT * (1 - valueAt(place) / top)).toFixed(1), isAlone = valueAt(place - 1) === null && valueAt(place + 1) === null;
      return isAlone ? `M${(x - 4).toFixed(1)} ${y}h8` : `${valueAt(place - 1) === null ? "M" : "L"}${x.toFixed(1)} ${y}h0`;
    }).join("");
  }

  describe(values) { return values.map((value, place) => value === null ? "none" : `${this.write(value)}${this.keys ? ` ${this.keys[place]}` : this.unit ? ` ${this.unit}` : ""}`).join(", "); }

  describeLast() {
    const value = this.rows.findLast(({ values }) => values[0] !== null)?.values[0];
    return value === undefined ? "\u2013" : this.write(value);
  }

  // What was at the time under the pointer; else the most that there was.
  read() {
    if (!this.history) return;
    const row = this.lit === null ? null : this.rows.reduce((best, each) => Math.abs(each.x - this.lit * WIDTH) < Math.abs(best.x - this.lit * WIDTH) ? each : best, this.rows[0]);
    this.cursor.setAttribute("d", row ? `M${row.x} 0V${HEIGHT}` : "");
    const most = this.most ? `at most ${this.write(this.most)} in 15 minutes` : "nothing in 15 minutes";
    this.reading.textContent = row ? `${new Date(1000 * row.at).toLocaleTimeString()}: ${this.describe(row.values)}` : most;
    this.svg.setAttribute("aria-label", `${this.name}, ${most}`);
  }
}

const charts = CHARTS.map((facts) => new Chart(facts));

// `history`: as the server gave it last.
function showCharts(history, snapshot) {
  const sums = { ...sumHistory(history, snapshot.uptime_s), at: snapshot.at };
  charts.forEach((chart) => chart.show(sums, snapshot));
}
