"use strict";
// The chat: turns are what is sent and kept, views show them. A turn is {message, end}; while its answer comes, also
// asked (its name), response ({id, after}: the number of the last event that is in the message) and calls.

const FRAME_MS = 33, SAVE_MS = 1000, MAX_SAID = 2000, NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const FIELDS = ["system", ...NUMBERS, "max_tokens", "think", "stop_texts", "schema", "tools"];
const NAMES = { user: "You", assistant: "Model", tool: "Result of a tool", error: "Error" };
const ENDS = {
  length: "Cut: the answer is as long as Max tokens or the context allows.", stopped: "Stopped.", running: "Interrupted.",
  failed: "This answer was not finished.", abort: "The server ended this answer.",
};

let chat = newChat(readFields()), views = [], stopper = null, running = Promise.resolve(), edited = null;

// -- the model and the options

// Of several models, one at a time is talked to and shown.
let cards = [];

async function findModel() {
  if (!cards.length) {
    cards = (await (await call("/v1/models")).json()).data;
    byId("models").replaceChildren(...cards.map((card) => new Option(card.id)));
    byId("models").hidden = cards.length < 2;
    byId("model").hidden = cards.length > 1;
    allowChat();
  }
  return byId("models").value;
}

const findCard = () => cards.find((each) => each.id === byId("models").value);

const listTasks = () => findCard()?.tasks ?? ["generate"];

const canChat = () => listTasks().includes("generate");

// What the model can be asked, where that is more or other than to generate.
function describeTasks() {
  const { formats } = findCard() ?? {}, tasks = listTasks();
  const words = [...(formats ? [formats] : []), ...(tasks.join() === "generate" ? [] : tasks)];
  return words.length ? ` (${words.join(", ")})` : "";
}

// A model that cannot generate says so in place of taking messages.
function allowChat() {
  for (const id of ["message", "send"]) byId(id).disabled = !canChat() || (id === "send" && stopper !== null);
  byId("no_chat").hidden = canChat();
  setText("no_chat_text", canChat() ? "" : `${byId("models").value} does not chat: it can ${listTasks().join(", ")}.`);
}

function readFields() { return Object.fromEntries(FIELDS.map((id) => [id, byId(id).value])); }

function writeFields(fields) { for (const id of FIELDS) byId(id).value = fields?.[id] ?? ""; }

// A field left empty is left to the model's defaults.
const numberOf = (id, name = id) => byId(id).value === "" ? {} : { [name]: Number(byId(id).value) };

// What `use` makes of a field's JSON, {} of an empty field.
function readJson(id, use) {
  const text = byId(id).value.trim();
  try {
    return text ? use(JSON.parse(text)) : {};
  } catch (error) {
    const label = byId(id).labels[0].firstChild.textContent;
    throw Object.assign(new Error(`${id}: ${error.message}`), { field: id, lines: [`\u201c${label}\u201d is not the JSON that it has to be.`, "Mend or empty it, and send again."] });
  }
}

const readTools = () => readJson("tools", (tools) => ({ tools: tools.map(makeTool) }));

const readSchema = () => readJson("schema", (schema) => ({ text: { format: { type: "json_schema", name: "answer", schema } } }));

function readStops() {
  const stop = byId("stop_texts").value.split("\n").filter(Boolean);
  return stop.length ? { stop } : {};
}

function readOptions() {
  const think = byId("think").value;
  return {
    ...Object.assign({}, ...NUMBERS.map((id) => numberOf(id))), ...numberOf("max_tokens", "max_output_tokens"),
    ...readStops(), ...readSchema(), ...readTools(),
    ...(think ? { chat_template_kwargs: { enable_thinking: think === "true" } } : {}),
  };
}

// -- what is shown of a turn: thoughts, folded, then text, then calls, why it ended, and what can be done

class TurnView {
  constructor(role) {
    this.role = role;
    this.node = make("article", { class: `message ${role}`, "aria-label": NAMES[role] });
    this.note = make("p", { class: "note", hidden: "" });
    this.facts = make("p", { class: "facts", hidden: "" });
    this.actions = make("div", { class: "actions" });
    this.node.append(this.note, this.facts, this.actions);
    this.parts = new Map();
  }

  show({ content, reasoning_content: thoughts, tool_calls: calls = [] }) {
    if (thoughts) this.part("thoughts", makeFold).lastChild.textContent = thoughts;
    if (content) this.showText(content);
    calls.forEach((call, place) => {
      const part = this.part(`call ${place}`, () => make("div", { class: "call" }));
      part.textContent = `${call.function.name} ${call.function.arguments}`;
    });
  }

  showText(text) {
    const body = this.part("body", () => make("div", { class: "body" }));
    if (this.role !== "assistant") body.textContent = text;
    else (this.markdown ??= new MarkdownView(body)).show(text);
  }

  part(name, makePart) {
    if (!this.parts.has(name)) {
      this.parts.set(name, makePart());
      this.note.before(this.parts.get(name));
    }
    return this.parts.get(name);
  }

  // `isLast`: of the conversation, where an answer can go on.
  finish(turn, isLast, place) {
    const { message, end } = turn, isEmpty = !message.content && !message.tool_calls?.length;
    const why = this.role !== "assistant" ? "" : ENDS[end] ?? (isEmpty ? "The answer is empty." : "");
    this.note.hidden = !why;
    this.note.textContent = why;
    this.facts.hidden = !turn.facts;
    this.facts.textContent = turn.facts ? describeFacts(turn.facts) : "";
    const buttons = message.content ? [makeButton("Copy", (button) => copyText(message.content, button))] : [];
    if (this.role === "user") buttons.push(makeButton("Edit", () => edit(place)));
    if (this.role === "assistant" || isLast) buttons.push(makeButton("Retry", () => retry(place)));
    if (isLast && canGoOn(turn)) buttons.push(makeButton("Continue", goOn, { class: "continue" }));
    this.actions.replaceChildren(...(turn.versions ? [makeVersions(turn.versions, place)] : []), ...buttons);
  }
}

// Before, which of how many, and after.
function makeVersions({ at, tails }, place) {
  const step = (sign, label, next) => {
    const button = makeButton(sign, () => showVersion(place, next, label), { "aria-label": label });
    button.disabled = next < 0 || next >= tails.length;
    return button;
  };
  return make("span", { class: "versions", role: "group", "aria-label": `Version ${at + 1} of ${tails.length}` },
    step("\u2039", "Version before", at - 1), make("span", {}, `${at + 1}/${tails.length}`), step("\u203a", "Version after", at + 1));
}

// What an answer took: its tokens, of what the model can hold, and how fast it came.
function describeFacts({ prompt, output, firstMs, rate }) {
  const context = prompt === null ? 0 : findCard()?.max_model_len, used = prompt + output;
  return [
    prompt === null ? `${output} answer tokens` : `${prompt} prompt + ${output} answer tokens`,
    ...(context ? [`${Math.round(100 * used / context) || "under 1"} % of the context of ${context.toLocaleString("en")}`] : []),
    ...(firstMs ? [`first token after ${firstMs.toFixed(0)} ms`] : []), ...(rate ? [`${rate.toFixed(1)} tokens/s`] : []),
  ].join(" \u00b7 ");
}

const makeFold = () => make("details", {}, make("summary", {}, "Thoughts"), make("div", { class: "plain" }));

const canGoOn = ({ message, end }) => message.role === "assistant" && end in ENDS && Boolean(message.content) && !message.tool_calls;

// Makes the views what the turns are from `place` on; those before are as they were.
function draw(place = 0) {
  views.splice(place).forEach((view) => view.node.remove());
  for (const turn of chat.turns.slice(place)) {
    const view = new TurnView(turn.message.role);
    view.show(turn.message);
    views.push(view);
    byId("log").append(view.node);
  }
  finishViews();
  byId("log").scrollTop = byId("log").scrollHeight;
}

// What can be done with a turn depends on those that follow.
function finishViews() {
  views.forEach((view, place) => view.finish(chat.turns[place], place === views.length - 1, place));
  askForResults();
}

const clearErrors = () => document.querySelectorAll(".message.error").forEach((node) => node.remove());

// -- an answer while it comes

class Timing {
  constructor(takesUp) { Object.assign(this, { takesUp, began: performance.now(), first: null, last: null, pieces: 0, tokens: null }); }
  take(hasText, usage) {
    if (usage) Object.assign(this, { tokens: usage.output_tokens, promptTokens: usage.input_tokens });
    if (!hasText) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
  }
  // Of an answer that the server has not counted, its pieces; no times of one that was taken up.
  sum() {
    const output = this.tokens ?? this.pieces, seconds = (this.last - this.first) / 1000, isTimed = !this.takesUp && this.first !== null;
    if (!output || (this.takesUp && this.tokens === null)) return {};
    const rate = isTimed && output > 1 && seconds > 0 ? (output - 1) / seconds : 0;
    return { facts: { prompt: this.promptTokens ?? null, output, firstMs: isTimed ? this.first - this.began : 0, rate } };
  }
  // While it comes.
  describe() {
    if (this.takesUp) return "taken up where it was";
    const { facts } = this.sum();
    return facts ? describeFacts(facts) : "no token yet";
  }
}

// Deltas change the message; a timer paints it, 30 times a second at most and for a quarter of the time at most.
class Answer {
  constructor(turn, view, takesUp) {
    Object.assign(this, { turn, view, timing: new Timing(takesUp), timer: null, pause: FRAME_MS, saved: performance.now() });
    turn.calls ??= [];
    view.node.classList.add("busy");
  }

  take({ type, sequence_number: number, delta, item, response }) {
    const { turn } = this, { message, calls } = turn;
    if (number <= turn.response?.after) return;
    if (turn.response) turn.response.after = number;
    if (type === "response.output_text.delta") message.content += delta;
    else if (type === "response.reasoning_text.delta") message.reasoning_content = (message.reasoning_content ?? "") + delta;
    else if (type === "response.function_call_arguments.delta") calls.at(-1).function.arguments += delta;
    else if (type === "response.output_item.added" && item.type === "function_call") {
      calls.push({ id: item.call_id, type: "function", function: { name: item.name, arguments: "" } });
    } else if (type === "response.created" && response.background) {
      turn.response = { id: response.id, after: number };
      saveChat(chat);
    } else if (isLast({ type })) this.end(response);
    this.timing.take(delta !== undefined, response?.usage);
    this.timer ??= setTimeout(() => this.paint(), this.pause);
  }

  end({ status, error, incomplete_details: details }) {
    if (status === "failed") throw new Error(error.message);
    const reason = details?.reason ?? "stop";
    this.turn.end = status === "cancelled" ? "abort" : reason === "max_output_tokens" ? "length" : reason;
  }

  paint() {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now(), log = byId("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    this.view.show({ ...this.turn.message, tool_calls: this.turn.calls });
    setText("rates", this.timing.describe());
    if (follows) log.scrollTop = log.scrollHeight;
    if (began - this.saved > SAVE_MS) {
      this.saved = began;
      saveChat(chat);
    }
    this.pause = Math.max(FRAME_MS, 3 * (performance.now() - began));
  }

  // Calls of an answer that was cut short are left out: nobody should do half of what is asked.
  close() {
    const { turn } = this;
    this.paint();
    this.view.node.classList.remove("busy");
    if (turn.end === "running") return;  // somebody has left: it is going to be taken up
    Object.assign(turn, this.timing.sum());
    if (turn.calls.length && turn.end === "stop") turn.message.tool_calls = turn.calls;
    for (const name of ["calls", "asked", "response"]) delete turn[name];
  }
}

// Has the model answer, or go on with its last message, or takes up an answer that runs. Of what is refused, or stopped
// before anything came, nothing is kept: the turns are `before` again, and `text` is back where it was typed.
async function ask({ before = [...chat.turns], text = "", goesOn = false, takesUp = false, versions = {} } = {}) {
  const stop = stopper = new AbortController();
  hasDeclined = false;
  clearErrors();
  const input = listItems(byId("system").value.trim(), chat.turns, goesOn);
  if (!goesOn && !takesUp) chat.turns.push({ message: { role: "assistant", content: "" }, ...versions });
  const turn = chat.turns.at(-1), had = structuredClone(turn);
  if (!takesUp) {
    Object.assign(turn, { end: "running", asked: makeName() });
    chat.fields = readFields();
  }
  draw(chat.turns.length - 1);
  setBusy(true);
  saveChat(chat);
  const current = new Answer(turn, views.at(-1), takesUp);
  let failure = null;
  try {
    await stream(input, stop.signal, current);
  } catch (error) {
    failure = await judge(error, turn, stop.signal);
  }
  const { response } = turn;
  current.close();
  if (!takesUp && current.timing.first === null && ["stopped", "failed"].includes(turn.end)) takeBack(turn, had, before, text);
  saveChat(chat);
  if (response && !["running", "failed", "stopped"].includes(turn.end)) forgetAnswer(response);
  stopper = null;
  setBusy(false);
  finishViews();
  if (failure) showError(failure, current.timing.first !== null);
  else say(`${turn.message.content || "No text."} ${ENDS[turn.end] ?? ""}`.slice(0, MAX_SAID));
  setText("rates", "");
}

// Why an answer is no longer, as its `end`, and the error that people are told of. Who only leaves has the server go on.
async function judge(error, turn, signal) {
  if (!signal.aborted) {
    turn.end = "failed";
    return error;
  }
  if (signal.reason === "left" && turn.response) return null;
  turn.end = "stopped";
  try {
    if (turn.response) await cancelAnswer(turn.response);
    return null;
  } catch (failed) {
    return Object.assign(failed, { lines: ["The server could not be told to stop.", "It may go on with the answer for a while."] });
  }
}

function takeBack(turn, had, before, text) {
  if (["left", "deleted"].includes(stopper.signal.reason)) text = "";  // what is typed next belongs to another chat
  Object.assign(turn, had);
  chat.turns = before;
  if (!byId("message").value) byId("message").value = text;
  if (!before.length) deleteChat(chat.id);
  draw();
}

async function stream(input, signal, current) {
  const { turn } = current, body = turn.response ? null : { model: await findModel(), input, ...readOptions() };
  let rested = performance.now();
  for await (const event of readAnswer(turn, body, signal)) {
    signal.throwIfAborted();
    current.take(event);
    if (performance.now() - rested > FRAME_MS) {  // a burst never ends by itself: keys, clicks and painting have their turn
      await new Promise((resolve) => setTimeout(resolve));
      rested = performance.now();
    }
  }
}

function setBusy(isBusy) {
  allowChat();
  byId("stop").disabled = !isBusy;
  byId("log").setAttribute("aria-busy", `${isBusy}`);
  if (!isBusy) return;
  setText("rates", "");
  say("The model answers");
}

function start(options) { return running = ask(options); }

// -- what a person does

// Calls whose results are not there: what is typed next is the first one's.
function listOpenCalls() {
  const last = chat.turns.findLastIndex((turn) => turn.message.role !== "tool");
  return (chat.turns[last]?.message.tool_calls ?? []).slice(chat.turns.length - 1 - last);
}

function askForResults() {
  const name = listOpenCalls()[0]?.function.name, keys = "Enter sends, Shift+Enter breaks the line, Escape stops.";
  byId("message").placeholder = name ? `Result of ${name}, for the model. ${keys}` : `Message. ${keys}`;
}

async function submit() {
  const field = byId("message"), text = field.value.trim(), before = [...chat.turns];
  if (!text || stopper || !byId("compose").reportValidity()) return;
  const versions = edited === null ? {} : cutTurns(chat.turns, edited);
  const from = chat.turns.length, [asked, ...others] = listOpenCalls();
  const message = asked ? { role: "tool", tool_call_id: asked.id, content: text } : { role: "user", content: text };
  stopEditing();
  field.value = "";
  chat.turns.push({ message, ...versions });
  draw(from);
  if (!others.length) await start({ before, text });
  else saveChat(chat);
  field.focus();
}

async function retry(place) {
  if (stopper) return;
  const before = [...chat.turns];
  const versions = cutTurns(chat.turns, chat.turns[place].message.role === "assistant" ? place : place + 1);
  draw(chat.turns.length);
  await start({ before, versions });
}

function showVersion(place, next, label) {
  if (stopper) return;
  stopEditing();
  clearErrors();
  switchVersion(chat.turns, place, next);
  saveChat(chat);
  const { scrollTop } = byId("log");
  draw(place);
  byId("log").scrollTop = scrollTop;
  views[place].node.scrollIntoView({ block: "nearest" });
  const [button, other] = [label, label === "Version before" ? "Version after" : "Version before"].map((name) => views[place].actions.querySelector(`[aria-label="${name}"]`));
  (button.disabled ? other : button).focus();
}

async function goOn() {
  if (!stopper) await start({ goesOn: true });
}

function edit(place) {
  if (stopper) return;
  edited = place;
  byId("editing").hidden = false;
  byId("message").value = chat.turns[place].message.content;
  byId("message").focus();
}

function stopEditing() {
  edited = null;
  byId("editing").hidden = true;
}

// What runs in the chat that is left goes on, and is taken up where it is opened again.
async function openChat(next, reason = "left") {
  stopper?.abort(reason);
  await running;
  stopEditing();
  chat = next;
  showChat();
  sessionStorage.setItem(OPEN, chat.id);
  writeFields(chat.fields);
  clearErrors();
  draw();
  setText("rates", "");
  byId("message").focus();
  if (isRunning(chat.turns.at(-1))) start({ takesUp: true });
}

const isRunning = (turn) => turn?.end === "running" && Boolean(turn.response);

// After the page was loaded again. An answer that the server does not keep goes on from what has come of it.
async function takeUp() {
  const kept = loadChat(sessionStorage.getItem(OPEN));
  if (!kept) return openChat(chat);
  await openChat(kept);
  const last = chat.turns.at(-1), isReload = performance.getEntriesByType("navigation")[0]?.type === "reload";
  if (last?.end !== "running" || isRunning(last) || !isReload) return;
  if (last.asked) await abortAsked(last.asked);
  if (canGoOn(last)) return goOn();
  const { versions } = chat.turns.pop();
  draw();
  await start({ versions: versions && { versions } });
}

byId("compose").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("compose").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (edited !== null) byId("message").value = "";
  stopEditing();
  stopper?.abort();
});
byId("stop").addEventListener("click", () => stopper?.abort());
byId("edit_cancel").addEventListener("click", () => { byId("message").value = ""; stopEditing(); byId("message").focus(); });
byId("models").addEventListener("change", allowChat);
byId("new").addEventListener("click", () => openChat(newChat(readFields())));
// What ends because the page does was interrupted, not refused: it stays as it is kept here.
addEventListener("pagehide", () => { saveChat(chat); isGone = true; });
addEventListener("pageshow", () => { isGone = false; });
