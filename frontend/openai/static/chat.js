"use strict";
// -- chat

let messages = [], stopper = null;

function addMessage(role, text) {
  const node = document.createElement("div");
  node.className = `message ${role}`;
  node.textContent = text;
  byId("log").append(node);
  byId("log").scrollTop = byId("log").scrollHeight;
  return node;
}

// Of several models, one at a time is talked to and shown.
let cards = [];

async function findModel() {
  if (!cards.length) {
    cards = (await (await call("/v1/models")).json()).data;
    byId("models").replaceChildren(...cards.map((card) => new Option(card.id)));
    byId("models").hidden = cards.length < 2;
    byId("model").hidden = cards.length > 1;
  }
  return byId("models").value;
}

// What the model can be asked, where that is more or other than to generate.
function describeTasks() {
  const tasks = cards.find((card) => card.id === byId("models").value)?.tasks ?? ["generate"];
  return tasks.join() === "generate" ? "" : ` (${tasks.join(", ")})`;
}

// A field left empty is left to the model's defaults.
const numberOf = (id) => byId(id).value === "" ? {} : { [id]: Number(byId(id).value) };

function readTools() {
  const text = byId("tools").value.trim();
  try { return text ? { tools: JSON.parse(text) } : {}; } catch (error) { throw new Error(`tools: ${error.message}`); }
}

function readOptions() {
  const think = byId("think").value;
  return {
    ...numberOf("temperature"), ...numberOf("max_tokens"), ...readTools(),
    ...(think ? { chat_template_kwargs: { enable_thinking: think === "true" } } : {}),
  };
}

// What is under way of an answer: thoughts, folded, then text and calls in the order in which they come.
class Answer {
  constructor() {
    this.node = addMessage("assistant", "");
    this.node.classList.add("busy");
    this.text = this.thoughts = "";
    this.calls = [];
    this.parts = new Map();
  }
  // Returns whether the delta brought something.
  take(delta) {
    if (!delta) return false;
    const log = byId("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const { content, reasoning_content: thoughts } = delta, calls = delta.tool_calls ?? [];
    if (thoughts) this.part("thoughts", makeFold).lastChild.textContent = this.thoughts += thoughts;
    if (content) this.part("text").textContent = this.text += content;
    for (const { index, id, function: { name, arguments: more = "" } } of calls) {
      const call = this.calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
      call.function.arguments += more;
      this.part(`call ${index}`).className = "call";
      this.part(`call ${index}`).textContent = `${call.function.name} ${call.function.arguments}`;
    }
    if (follows) log.scrollTop = log.scrollHeight;
    return Boolean(content || thoughts || calls.length);
  }
  part(name, make = () => document.createElement("div")) {
    if (!this.parts.has(name)) this.parts.set(name, this.node.appendChild(make()));
    return this.parts.get(name);
  }
  // The message for the next prompt, null for an empty one. Calls of an answer that was cut short are left out.
  end(reason) {
    this.node.classList.remove("busy");
    const calls = ["tool_calls", "stop"].includes(reason) ? this.calls : [];
    if (!this.parts.size) this.node.remove();
    if (!this.text && !calls.length) return null;
    return {
      role: "assistant", content: this.text, ...(this.thoughts ? { reasoning_content: this.thoughts } : {}),
      ...(calls.length ? { tool_calls: calls } : {}),
    };
  }
}

function makeFold() {
  const fold = document.createElement("details"), title = document.createElement("summary");
  title.textContent = "Thoughts";
  fold.append(title, document.createElement("div"));
  return fold;
}

async function answer() {
  const log = byId("log"), current = new Answer(), timing = new Timing();
  log.setAttribute("aria-busy", "true");
  let reason = null;
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST", signal: stopper.signal, headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: await findModel(), messages, stream: true, stream_options: { include_usage: true }, ...readOptions(),
      }),
    });
    for await (const chunk of readEvents(response)) {
      const choice = chunk.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      timing.take(current.take(choice?.delta), chunk.usage);
    }
    setText("rates", timing.describe(""));
  } catch (error) {
    if (stopper.signal.aborted) setText("rates", timing.describe("stopped, "));
    else addMessage("error", error.message);
  }
  const message = current.end(reason);
  if (message) messages.push(message);
  askForResults(message?.tool_calls ?? []);
  log.removeAttribute("aria-busy");
}

// Calls whose results are not there: what is typed next is the first one's.
let waiting = [];

function askForResults(calls) {
  waiting = calls;
  const name = calls[0]?.function.name, keys = "Enter sends, Shift+Enter breaks the line, Escape stops.";
  byId("message").placeholder = name ? `Result of ${name}, for the model. ${keys}` : `Message. ${keys}`;
}

class Timing {
  constructor() { this.began = performance.now(); this.first = this.last = null; this.pieces = 0; this.tokens = null; }
  take(hasText, usage) {
    if (usage) this.tokens = usage.completion_tokens;
    if (!hasText) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
    setText("rates", this.describe(""));
  }
  describe(prefix) {
    if (this.first === null) return prefix + "no token yet";
    const tokens = this.tokens ?? this.pieces, seconds = (this.last - this.first) / 1000;
    const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    return `${prefix}first token after ${(this.first - this.began).toFixed(0)} ms${rate}, ${tokens} tokens`;
  }
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
}

byId("compose").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = byId("message"), text = field.value.trim();
  if (!text || stopper || !byId("compose").reportValidity()) return;
  field.value = "";
  const [asking, ...others] = waiting;
  addMessage(asking ? "tool" : "user", text);
  messages.push(asking ? { role: "tool", tool_call_id: asking.id, content: text } : { role: "user", content: text });
  askForResults(others);
  if (others.length) return;
  stopper = new AbortController();
  setBusy(true);
  setText("rates", "");
  await answer();
  stopper = null;
  setBusy(false);
  field.focus();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("compose").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stopper?.abort(); });
byId("stop").addEventListener("click", () => stopper?.abort());
byId("clear").addEventListener("click", () => {
  stopper?.abort();
  messages = [];
  askForResults([]);
  byId("log").replaceChildren();
  setText("rates", "");
  byId("message").focus();
});
