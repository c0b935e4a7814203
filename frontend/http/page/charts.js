"use strict";
// Charts of the last quarter of an hour. The engine keeps what they show, so a reload loses nothing and every tab shows the same.

const SPAN_S = 900, WIDTH = 900, HEIGHT = 100;
const latency = (value) => value < 1000 ? milliseconds(value) : `${(value / 1000).toFixed(1)} s`;
const byShare = (part, whole) => whole ? part / whole : null;

// `lines`: a value of a point, or null where there is none; `rest`: what a period without work has.
const CHARTS = [
  { id: "generation", name: "Generated tokens/s", unit: "tokens/s", write: count, rest: 0, lines: [(point, { period }) => point.generation_tokens / period] },
  { id: "prompt", name: "Prompt tokens/s", unit: "tokens/s", write: count, rest: 0, lines: [(point, { period }) => point.prompt_tokens / period] },
  { id: "first_token", name: "Time to first token, mean", unit: "", write: latency, rest: null, lines: [(point) => byShare(1000 * point.first_token_s, point.num_first_tokens)] },
  { id: "gap", name: "Time between tokens, mean", unit: "", write: latency, rest: null, lines: [(point) => byShare(1000 * point.gap_s, point.num_gaps)] },
  { id: "queue", name: "Queue", unit: "", write: count, rest: 0, lines: [(point) => point.num_running, (point) => point.num_waiting], keys: ["running", "waiting"] },
  { id: "kv", name: "KV in use", unit: "", write: (value) => `${value.toFixed(value && value < 10 ? 1 : 0)} %`, rest: 0, top: 100, lines: [(point, { blocks }) => byShare(100 * point.kv_blocks_used, blocks)] },
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

// The periods of all engines together, from the first that can be shown on; the one that is not over is left out.
function sumHistory({ engines }, uptime) {
  const at = Math.max(...engines.map((engine) => engine.at)), period = engines[0].period_s, sums = new Map();
  const from = Math.max(at - SPAN_S, at - uptime), ends = Math.floor(at / period) * period;
  for (let begin = Math.ceil((from - period) / period) * period; begin < ends; begin += period) sums.set(begin, null);
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

  show(history) {
    this.history = history;
    this.rows = history.points.map(([at, point]) => ({ x: WIDTH * (1 - (history.at - at - history.period / 2) / SPAN_S), at, values: this.valuesOf(point) }));
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

  // A value that stands alone is a dot.
  draw(line, top) {
    let isBehindValue = false;
    return this.rows.map(({ x, values }) => {
      const value = values[line], command = isBehindValue ? "L" : "M";
      isBehindValue = value !== null;
      return value === null ? "" : `${command}${x.toFixed(1)} ${(HEIGHT * (1 - value / top)).toFixed(1)}h0`;
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

function showCharts(history, uptime) {
  const sums = sumHistory(history, uptime);
  charts.forEach((chart) => chart.show(sums));
}
