"use strict";
// The dialog of chats: search, rename, delete, export, import. What a file holds is checked before any of it is kept.

const MAX_FILE = 4_000_000, MAX_NAME = 200, MAX_LEVELS = 100;  // of versions within versions

const hasWord = (one, word) => !word || [one.name, ...listTurns(one.turns).map((turn) => turn.message.content)].some((text) => `${text ?? ""}`.toLowerCase().includes(word));

function makeChatRow(one) {
  const title = titleOf(one), act = (label, run) => makeButton(label, run, { "aria-label": `${label} ${title}` });
  return make("li", {},
    makeButton(title, () => openKept(one.id), { class: "open" }),
    make("span", {}, new Date(one.at).toLocaleString()),
    act("Rename", (button) => rename(one.id, button.closest("li"))),
    act("JSON", () => download(`${fileNameOf(one)}.json`, JSON.stringify({ quire_chats: 1, chats: [one] }, null, 1))),
    act("Markdown", () => download(`${fileNameOf(one)}.md`, writeMarkdown(one))),
    act("Delete", () => forget(one.id)));
}

function showChats() {
  const word = byId("search").value.trim().toLowerCase(), rows = listChats().filter((one) => hasWord(one, word)).map(makeChatRow);
  byId("chat_list").replaceChildren(...rows);
  byId("no_chats").hidden = rows.length > 0;
  if (!byId("chats").open) byId("chats").showModal();
}

async function openKept(id) {
  byId("chats").close();
  if (id !== chat.id) await openChat(loadChat(id) ?? newChat(readFields()));
}

// An answer that is under way in it ends first: it would keep the chat.
async function forget(id) {
  const last = loadChat(id)?.turns.at(-1);
  if (id === chat.id) await openChat(newChat(readFields()), "deleted");
  else if (isRunning(last)) cancelAnswer(last.response).catch(() => {});
  deleteChat(id);
  showChats();
}

// The name is edited where it stands: Enter keeps it, Escape does not.
function rename(id, row) {
  const one = id === chat.id ? chat : loadChat(id);
  if (!one) return showChats();
  const field = make("input", { "aria-label": "Name of the chat", maxlength: MAX_NAME, class: "open" });
  field.value = titleOf(one);
  field.addEventListener("keydown", (event) => {
    if (!["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Enter") {
      one.name = field.value.trim();
      saveChat(one, one.at);
    }
    showChats();
  });
  row.querySelector(".open").replaceWith(field);
  field.select();
}

// -- files

const fileNameOf = (one) => titleOf(one).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50) || "chat";

function download(name, text) {
  const address = URL.createObjectURL(new Blob([text]));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function writeMarkdown(one) {
  const parts = one.turns.map(({ message }) => [
    `## ${NAMES[message.role]}`, message.content,
    ...(message.tool_calls ?? []).map((call) => `    ${call.function.name} ${call.function.arguments}`),
  ].filter(Boolean).join("\n\n"));
  return [`# ${titleOf(one)}`, ...parts, ""].join("\n\n");
}

// The chats of a file that was exported, rebuilt of what is known: nothing else of it is kept. Each gets a name of its own here.
function readChats(text) {
  const { quire_chats: version, chats } = JSON.parse(text);
  if (version !== 1 || !Array.isArray(chats) || !chats.length || chats.length > MAX_CHATS) throw new Error("no file of chats that this page has exported");
  return chats.map(({ name, turns, fields }) => {
    const texts = Object.entries(fields ?? {}).filter(([id, value]) => FIELDS.includes(id) && typeof value === "string");
    const copy = { ...newChat(Object.fromEntries(texts)), turns: turns.map((turn) => readTurn(turn)) };
    return typeof name === "string" ? { ...copy, name: name.slice(0, MAX_NAME) } : copy;
  });
}

function readTurn({ message, end, versions }, level = 0) {
  const { role, content, reasoning_content: thoughts, tool_calls: calls, tool_call_id: id } = message;
  if (!["user", "assistant", "tool"].includes(role) || typeof content !== "string") throw new Error("a message has no known role or no text");
  const kept = { role, content, ...(typeof thoughts === "string" ? { reasoning_content: thoughts } : {}), ...(typeof id === "string" ? { tool_call_id: id } : {}) };
  if (calls !== undefined) kept.tool_calls = calls.map((call) => ({ id: `${call.id}`, type: "function", function: { name: `${call.function.name}`, arguments: `${call.function.arguments}` } }));
  return { message: kept, ...(Object.hasOwn(ENDS, end) && end !== "running" ? { end } : {}), ...(versions === undefined ? {} : { versions: readVersions(versions, level) }) };
}

function readVersions({ at, tails }, level) {
  const isKnown = level < MAX_LEVELS && tails.length <= MAX_VERSIONS && tails[at] === null && tails.every((tail, place) => place === at || tail.length > 0);
  if (!isKnown) throw new Error("a message has versions that this page does not write");
  return { at, tails: tails.map((tail) => tail && tail.map((turn) => readTurn(turn, level + 1))) };
}

// All of them or none; what this browser has does not make room for them.
function keepAll(chats) {
  const keys = chats.map(({ id }) => CHAT + id);
  if (listChats().length + chats.length <= MAX_CHATS && chats.every((one, place) => hasRoom(keys[place], JSON.stringify(one)))) return;
  keys.forEach((key) => localStorage.removeItem(key));
  throw new Error("this browser has no room for it: delete chats first");
}

async function importFile(file) {
  try {
    if (file.size > MAX_FILE) throw new Error(`it is larger than ${MAX_FILE / 1e6} MB`);
    const chats = readChats(await file.text());
    keepAll(chats);
    setText("chats_note", `Imported: ${chats.length}.`);
  } catch (error) {
    setText("chats_note", `${file.name} was not imported: ${error.message}`);
  }
  showChats();
}

byId("chats_button").addEventListener("click", () => { byId("search").value = ""; setText("chats_note", ""); showChats(); });
byId("chats_close").addEventListener("click", () => byId("chats").close());
byId("search").addEventListener("input", showChats);
byId("export").addEventListener("click", () => download("chats.json", JSON.stringify({ quire_chats: 1, chats: listChats() }, null, 1)));
byId("import").addEventListener("click", () => byId("import_file").click());
byId("import_file").addEventListener("change", ({ target }) => {
  if (target.files[0]) importFile(target.files[0]);
  target.value = "";
});
