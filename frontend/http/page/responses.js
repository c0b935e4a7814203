"use strict";
// Answers over /v1/responses, which run on whoever leaves. What the server has of one is followed from the event behind
// the last that was taken: nothing is lost or doubled by a reload or a broken connection.

const MAX_TRIES = 15, CANCEL_MS = 5000, GATEWAY_STATUSES = [429, 502, 503, 504];
let keepsAnswers = true;  // the server does

// -- what is asked

// The turns as items. The last one, where the model goes on with it, is not finished.
function listItems(system, turns, goesOn) {
  const items = [...(system ? [{ role: "system", content: system }] : []), ...turns.flatMap(({ message }) => makeItems(message))];
  if (goesOn) Object.assign(items.at(-1), { type: "message", status: "incomplete" });
  return items;
}

function makeItems({ role, content, reasoning_content: thoughts, tool_calls: calls = [], tool_call_id }) {
  if (role === "tool") return [{ type: "function_call_output", call_id: tool_call_id, output: content }];
  return [
    ...(thoughts ? [{ type: "reasoning", content: [{ type: "reasoning_text", text: thoughts }] }] : []),
    ...(content || role === "user" ? [{ role, content }] : []),
    ...calls.map((call) => ({ type: "function_call", call_id: call.id, name: call.function.name, arguments: call.function.arguments })),
  ];
}

// As chats have them, or as responses do.
const makeTool = (tool) => tool.function ? { type: tool.type, ...tool.function } : tool;

// -- an answer's events

const isLast = ({ type }) => ["response.completed", "response.incomplete", "response.failed"].includes(type);
const pathOf = ({ id }) => `/v1/responses/${id}`;

// Those of a turn that is asked for with `body`, or that runs. Who takes them notes their numbers in `turn.response`.
async function* readAnswer(turn, body, signal) {
  let response = turn.response ? null : await begin(turn, body, signal), tries = 0;
  for (;;) {
    try {
      response ??= await call(`${pathOf(turn.response)}?stream=true&starting_after=${turn.response.after}`, { signal });
      for await (const event of readEvents(response)) {
        if (event.type === "error") throw new Error(event.message);
        tries = 0;
        yield event;
        if (isLast(event)) return;
      }
      throw new Error("The connection broke off.");
    } catch (error) {
      const canRetry = !error.status || GATEWAY_STATUSES.includes(error.status);
      if (signal.aborted || !turn.response || !canRetry || ++tries > MAX_TRIES) throw error;
      setText("rates", "Connecting again");
      await Promise.race([new Promise((resolve) => setTimeout(resolve, RETRY_MS / 2)), whenAborted(signal)]);
    }
    response = null;
  }
}

function whenAborted(signal) {
  return new Promise((_, reject) => signal.addEventListener("abort", () => reject(new Error("stopped")), { once: true }));
}

async function begin(turn, body, signal) {
  const post = (isKept) => call("/v1/responses", {
    method: "POST", ...(isKept ? {} : { signal }),
    headers: { "Content-Type": "application/json", "X-Request-Id": turn.asked },
    body: JSON.stringify({ ...body, stream: true, ...(isKept ? { background: true } : {}) }),
  });
  if (keepsAnswers) {
    try {
      return await postKept(post(true), signal);
    } catch (error) {
      if (error.param !== "background") throw error;
      keepsAnswers = false;
    }
  }
  return post(false);
}

// Leaving ends nothing once the server has it: who stops before it has begun has it cancelled when it begins.
async function postKept(posting, signal) {
  try {
    return await Promise.race([posting, whenAborted(signal)]);
  } catch (error) {
    if (signal.aborted) posting.then((late) => { late.body.cancel(); cancelAnswer({ id: late.headers.get("request-id") }); }, () => {});
    throw error;
  }
}

// Nothing is left to be done if the server does not have it, or it has ended.
async function cancelAnswer(response) {
  try {
    await call(`${pathOf(response)}/cancel`, { method: "POST", keepalive: true, signal: AbortSignal.timeout(CANCEL_MS) });
  } catch (error) {
    if (![400, 404].includes(error.status)) throw error;
  }
}

// What this browser has the server need not keep.
const forgetAnswer = (response) => call(pathOf(response), { method: "DELETE", keepalive: true }).catch(() => {});

// Of an answer whose beginning a reload has missed: it is going to be asked for again.
const abortAsked = (asked) => call("/abort_requests", {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ request_ids: [asked] }),
}).catch(() => {});

const makeName = () => `page-${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 12)}`;
