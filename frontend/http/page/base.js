"use strict";
// What all parts of the page share: nodes, the key, requests. Text enters the page as text, never as markup.
const KEY = "quire_api_key", RETRY_MS = 2000;
const byId = (id) => document.getElementById(id);
const setText = (id, text) => { const node = byId(id); if (node.textContent !== text) node.textContent = text; };

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function makeButton(label, act, attributes = {}) {
  const button = make("button", { type: "button", ...attributes }, label);
  button.addEventListener("click", () => act(button));
  return button;
}

// Tells a screen reader, and shows nothing.
const say = (text) => setText("said", text);

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // without https a browser has only the old way
    const field = make("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  say("Copied");
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// -- the server

let asking = null, hasDeclined = false;

// Whether a person has given another key; who closes the dialog is not asked again until they want something.
function askForKey() {
  byId("key_button").hidden = false;
  asking ??= new Promise((resolve) => {
    const dialog = byId("key_dialog");
    setText("key_note", sessionStorage.getItem(KEY) ? "The server does not take the key that it was given." : "");
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      const key = byId("key").value.trim(), isGiven = dialog.returnValue === "use" && key !== "";
      byId("key").value = "";
      if (isGiven) sessionStorage.setItem(KEY, key);
      hasDeclined = !isGiven;
      asking = null;
      resolve(isGiven);
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

byId("key_cancel").addEventListener("click", () => byId("key_dialog").close(""));

const BASE = location.pathname.replace(/\/+$/, "");  // behind a proxy, its part of the path

async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(BASE + path, { ...options, headers }).catch((error) => {
      throw options.signal?.aborted ? error : Object.assign(error, { lines: UNREACHABLE });
    });
    if (response.ok) return response;
    if (response.status === 401) {
      if (sessionStorage.getItem(KEY) !== key) continue;
      if (!hasDeclined && await askForKey()) continue;
      byId("key_button").hidden = false;
    }
    throw await makeFailure(response);
  }
}

// What is thrown for a refusal; the name of the field that is refused is `param`, the whole body `raw`.
async function makeFailure(response) {
  const { status, statusText } = response, text = await response.text();
  let said = {};
  try { said = JSON.parse(text).error; } catch { /* a proxy's */ }
  return Object.assign(new Error(said?.message ?? `${status} ${statusText}`), { status, param: said?.param, code: said?.code, raw: said?.message ?? text });
}

// The data of each server-sent event of a response, parsed.
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const body = JSON.parse(data);
      if (body.error) throw new Error(body.error.message);
      yield body;
    }
  }
}

// -- how the page looks, kept in this browser

const THEME = "quire_theme", LIVE = "quire_live";

function showTheme() {
  const theme = localStorage.getItem(THEME) ?? "";
  byId("theme").value = theme;
  document.documentElement.dataset.theme = theme;
}

byId("theme").addEventListener("change", () => { localStorage.setItem(THEME, byId("theme").value); showTheme(); });
showTheme();
