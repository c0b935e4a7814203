"use strict";
// Errors for a person: what happened and what to do. What the server said is there for who wants it.

const MAX_RAW = 4000;

// By status; what happened, and what to do.
const REASONS = {
  401: ["The server needs an API key.", "Give one by the button Key, at the top, and send again."],
  403: ["The server does not allow this.", "Ask who runs it."],
  404: ["The server does not have what was asked for.", "It may have been started anew: load this page again, or choose another model."],
  408: ["The message came to the server too slowly.", "Send it again."],
  413: ["The conversation is larger than the server takes.", "Start a new chat, or shorten the message."],
  429: ["The server is busy.", "Wait a moment, then send again."],
  500: ["The server failed at this.", "Send it again; if that fails as well, the server's log says why."],
  502: ["The server behind this address does not answer.", "It may be about to start: wait a moment, then send again."],
  503: ["The server is about to start or to end.", "Wait a moment, then send again."],
  504: ["The server behind this address does not answer in time.", "Wait a moment, then send again."],
};
const TOO_LONG = ["The conversation is longer than the model can hold.", "Start a new chat, or edit an earlier message and go on from there."];
const UNREACHABLE = ["The server cannot be reached.", "It may have ended, or the network is gone. Send again when it is back."];
const BROKEN = ["The answer broke off.", "What has come is kept: go on with Continue, or ask again with Retry."];
const REFUSED = ["The server does not take this.", "Change it and send again."];

// The fields of a request whose names in the form are others.
const FIELD_IDS = { max_output_tokens: "max_tokens", stop: "stop_texts", text: "schema", chat_template_kwargs: "think" };
const BOUNDS = { "<=": "at most", ">=": "at least", "<": "below", ">": "above" };

// Of a refused field: the form's, and what it has to be if the server says so shortly.
function explainField(field, message) {
  const label = field.labels[0].firstChild.textContent.trim(), [, wanted] = /: expected (?:`\w+` )?([^(`\n]{1,200})(?: \(|$)/.exec(message) ?? [];
  const words = wanted?.trim().replace(/^[<>]=?/, (sign) => BOUNDS[sign]);
  return [`The server does not take \u201c${label}\u201d${words ? `: it has to be ${words}.` : "."}`, "Change or empty it, and send again."];
}

function findField(param) {
  const name = /^\w+/.exec(param ?? "")?.[0], field = byId(FIELD_IDS[name] ?? name);
  return FIELDS.includes(field?.id) ? field : null;
}

// `hasCome`: some of an answer.
function explain(error, hasCome) {
  const field = error.field ? byId(error.field) : findField(error.param);
  const lines = error.lines ?? (error.code === "context_length_exceeded" ? TOO_LONG : field ? explainField(field, error.message) : REASONS[error.status] ?? (error.status ? REFUSED : hasCome ? BROKEN : REASONS[500]));
  return { lines, field, raw: `${error.raw ?? error.message}`.slice(0, MAX_RAW) };
}

function showError(error, hasCome) {
  const { lines: [what, advice], field, raw } = explain(error, hasCome);
  const buttons = field ? [makeButton(`Go to ${field.labels[0].firstChild.textContent.trim()}`, () => { openSettings(); field.focus(); })] : [];
  byId("log").append(make("div", { class: "message error", role: "alert" }, make("strong", {}, what), " ", advice,
    make("details", {}, make("summary", {}, error.lines && !error.status ? "Details" : "What the server said"), make("pre", { tabindex: 0, role: "region", "aria-label": "What the server said" }, raw)),
    ...(buttons.length ? [make("div", { class: "actions" }, ...buttons)] : [])));
  byId("log").scrollTop = byId("log").scrollHeight;
}

const openSettings = () => { byId("settings").open = true; };

// A field that is hidden cannot say what is wrong with it.
byId("compose").addEventListener("invalid", openSettings, true);
