"use strict";
// Conversations, in this browser's storage alone: a key each, so that tabs do not overwrite each other's.

const CHAT = "quire_chat:", OPEN = "quire_open_chat", MAX_CHATS = 100, TITLE_LENGTH = 60;
let isGone = false;  // the page is

// turns: {message, end, versions}; end says why an answer is no longer than it is. fields: what the form had.
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

// Where there is no room for it, its oldest versions go, then the oldest chats.
function saveChat(chat, at = Date.now()) {
  if (!chat.turns.length || isGone) return;
  chat.at = at;
  const key = CHAT + chat.id;
  if (localStorage.getItem(key) === null) listChats().slice(MAX_CHATS - 1).forEach(({ id }) => deleteChat(id));
  do {
    if (hasRoom(key, JSON.stringify(chat))) return;
  } while (dropVersion(chat.turns));
  const text = JSON.stringify(chat), others = listChats().filter(({ id }) => id !== chat.id);
  while (others.length) {
    deleteChat(others.pop().id);
    if (hasRoom(key, text)) return;
  }
}

function hasRoom(key, text) {
  try { localStorage.setItem(key, text); return true; } catch { return false; }
}

const deleteChat = (id) => localStorage.removeItem(CHAT + id);

// -- versions. Where a message was asked for again or written anew, its turn has {at, tails}: the turns from there on in
// each version, the first one's without its own versions; null in the place of the one that is shown.

const MAX_VERSIONS = 20;

const tailOf = (turns, place) => {
  const [{ versions: _, ...first }, ...rest] = turns.slice(place);
  return [first, ...rest];
};

// Cuts `turns` at `place`; what was there is kept in what this returns, for the turn that takes its place.
function cutTurns(turns, place) {
  if (place >= turns.length) return {};
  const { at, tails } = turns[place].versions ?? { at: 0, tails: [null] };
  const kept = tails.with(at, tailOf(turns, place)).slice(-(MAX_VERSIONS - 1));
  turns.splice(place);
  return { versions: { at: kept.length, tails: [...kept, null] } };
}

// Shows version `next` from `place` on.
function switchVersion(turns, place, next) {
  const { at, tails } = turns[place].versions, [first, ...rest] = tails[next];
  const kept = tails.with(at, tailOf(turns, place)).with(next, null);
  turns.splice(place, Infinity, { ...first, versions: { at: next, tails: kept } }, ...rest);
}

// Whether there was one to drop, the oldest of the first place that has any.
function dropVersion(turns) {
  const turn = turns.find(({ versions }) => versions);
  if (!turn) return false;
  const { at, tails } = turn.versions, kept = tails.toSpliced(at === 0 ? 1 : 0, 1);
  turn.versions = kept.length > 1 ? { at: kept.indexOf(null), tails: kept } : undefined;
  return true;
}

// Those of all versions.
const listTurns = (turns) => turns.flatMap((turn) => [turn, ...(turn.versions?.tails ?? []).flatMap((tail) => listTurns(tail ?? []))]);

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
