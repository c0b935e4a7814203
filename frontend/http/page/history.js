"use strict";
// Conversations, in this browser's storage alone: a key each, so that tabs do not overwrite each other's.

const CHAT = "quire_chat:", OPEN = "quire_open_chat", MAX_CHATS = 100, TITLE_LENGTH = 60;
let isGone = false;  // the page is

// turns: {message, end}; end says why an answer is no longer than it is. fields: what the form had.
function newChat(fields) {
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`, at: Date.now(), turns: [], fields };
}

function loadChat(id) {
  try {
    const chat = JSON.parse(localStorage.getItem(CHAT + id));
    return Array.isArray(chat?.turns) && chat.turns.every((turn) => typeof turn?.message?.role === "string") ? chat : null;
  } catch {
    return null;
  }
}

// Where there is no room for it, the oldest go.
function saveChat(chat, at = Date.now()) {
  if (!chat.turns.length || isGone) return;
  chat.at = at;
  const key = CHAT + chat.id, text = JSON.stringify(chat);
  if (localStorage.getItem(key) === null) listChats().slice(MAX_CHATS - 1).forEach(({ id }) => deleteChat(id));
  if (hasRoom(key, text)) return;
  const others = listChats().filter(({ id }) => id !== chat.id);
  while (others.length) {
    deleteChat(others.pop().id);
    if (hasRoom(key, text)) return;
  }
}

function hasRoom(key, text) {
  try { localStorage.setItem(key, text); return true; } catch { return false; }
}

const deleteChat = (id) => localStorage.removeItem(CHAT + id);

// The newest first.
function listChats() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(CHAT)).map((key) => key.slice(CHAT.length));
  return ids.map(loadChat).filter(Boolean).sort((one, other) => other.at - one.at);
}

function titleOf(chat) {
  if (chat.name) return chat.name;
  const text = `${chat.turns.find((turn) => turn.message.role === "user")?.message.content ?? "Chat"}`;
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH)}\u2026` : text;
}
