// Answers of /v1/responses that are written here, in place of a server's.

// The events of a response: its deltas, as chats have them, and why it ended.
export function makeEvents({ deltas, reason = "stop" }, more = {}) {
  const status = reason === "stop" ? "completed" : "incomplete";
  const response = { id: "resp-1", status, error: null, incomplete_details: reason === "stop" ? null : { reason }, usage: null, ...more };
  const events = [{ type: "response.created", response: { ...response, status: "in_progress" } }];
  for (const { content, reasoning_content: thoughts, tool_calls: calls = [] } of deltas) {
    if (content) events.push({ type: "response.output_text.delta", delta: content });
    if (thoughts) events.push({ type: "response.reasoning_text.delta", delta: thoughts });
    for (const { id, function: { name, arguments: delta } } of calls) {
      if (id) events.push({ type: "response.output_item.added", item: { type: "function_call", call_id: id, name } });
      if (delta) events.push({ type: "response.function_call_arguments.delta", delta });
    }
  }
  events.push({ type: `response.${status}`, response });
  return events.map((event, number) => ({ sequence_number: number, ...event }));
}

const writeEvents = (events) => events.map((event) => `event: ${event.type}\ndata: ${JSON.stringify(event)}\n\n`).join("");
export const fulfil = (route, events) => route.fulfill({ contentType: "text/event-stream", body: writeEvents(events) });
export const refuse = (route, error, status = 400) => route.fulfill({ status, contentType: "application/json", body: JSON.stringify({ error }) });
