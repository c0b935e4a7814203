"use strict";
// Everything that comes from the engine or a person enters the page through textContent.
const KEY = "quire_api_key", SPARK_POINTS = 120, RETRY_MS = 2000;
const byId = (id) => document.getElementById(id);
const setText = (id, text) => { const node = byId(id); if (node.textContent !== text) node.textContent = text; };

// -- the server

let asking = null;

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key_dialog");
    dialog.addEventListener("close", () => {
      const key = byId("key").value.trim();
      byId("key").value = "";
      if (key) sessionStorage.setItem(KEY, key);
      asking = null;
      resolve(Boolean(key));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

const BASE = location.pathname.replace(/\/+$/, "");  // behind a proxy, its part of the path

async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(BASE + path, { ...options, headers });
    if (response.ok) return response;
    if (response.status === 401 && (sessionStorage.getItem(KEY) !== key || await askForKey())) continue;
    throw new Error(await describeFailure(response));
  }
}

async function describeFailure(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return `${response.status} ${response.statusText}`; }
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
