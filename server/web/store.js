// Conversations and settings in the browser's storage. Knows no DOM and no sockets.
// A conversation: { id, title, updated, messages: [{ role, content, pieces?, figures?, problem?, pending? }] }.
// `pieces` are [text, drafter or ""] and join to `content`. `pending` of an unfinished answer is { response_id, seq }: enough to go
// on with it after a reload, `seq` being the last message whose text is in `content`.
// Every conversation has an entry of its own, so that two open pages do not overwrite each other's.

const CONVERSATION = "forespeak.conversation.";
const SETTINGS = "forespeak.settings";
const KEY = "forespeak.key";
const MOST_CONVERSATIONS = 200;

// The browser may forbid storage altogether: then everything lasts as long as the page.
function area(name) {
  try {
    return globalThis[name];
  } catch {
    return null;
  }
}

function read(storage, key) {
  try {
    return JSON.parse(storage?.getItem(key));
  } catch {
    return null;
  }
}

function usable(conversation) {
  return typeof conversation?.id === "string" && Array.isArray(conversation.messages);
}

export class Store {
  constructor() {
    this._kept = area("localStorage");
    this._tab = area("sessionStorage");
    const keys = this._kept ? Object.keys(this._kept).filter((key) => key.startsWith(CONVERSATION)) : [];
    this.conversations = keys.map((key) => read(this._kept, key)).filter(usable); // newest first
    this.conversations.sort((a, b) => b.updated - a.updated);
    for (const old of this.conversations.splice(MOST_CONVERSATIONS)) this._kept.removeItem(CONVERSATION + old.id);
    for (const { messages } of this.conversations) {
      const last = messages.at(-1);
      const never = last?.role === "assistant" && !last.content && !last.pending && !last.figures && !last.problem;
      if (never) last.problem = "The page was left before this answer began.";
    }
    this.settings = { mode: "auto", rule: "exact", tint: true, ...read(this._kept, SETTINGS) };
    this._key = this._tab?.getItem(KEY) ?? "";
  }

  // The API key lives as long as this tab.
  get key() {
    return this._key;
  }

  set key(value) {
    this._key = value;
    if (value) this._tab?.setItem(KEY, value);
    else this._tab?.removeItem(KEY);
  }

  // A new conversation, or the one that is still empty.
  create() {
    const empty = this.conversations.find((c) => !c.messages.length);
    if (empty) return empty;
    const id = crypto.getRandomValues(new Uint32Array(3)).join("-");
    const conversation = { id, title: "New conversation", updated: Date.now(), messages: [] };
    this.conversations.unshift(conversation);
    return conversation;
  }

  // Keep a conversation as it is now; one without messages is not kept. Returns whether there was room.
  save(conversation) {
    if (!this.conversations.includes(conversation)) return true; // deleted meanwhile
    if (conversation.messages.length) return this._write(CONVERSATION + conversation.id, JSON.stringify(conversation));
    this._kept?.removeItem(CONVERSATION + conversation.id);
    return true;
  }

  // It has a new message: first in the list from now on.
  touch(conversation) {
    conversation.updated = Date.now();
    this.conversations = [conversation, ...this.conversations.filter((c) => c !== conversation)];
  }

  remove(conversation) {
    this.conversations = this.conversations.filter((c) => c !== conversation);
    this._kept?.removeItem(CONVERSATION + conversation.id);
  }

  restore(conversation) {
    this.conversations.push(conversation);
    this.conversations.sort((a, b) => b.updated - a.updated);
    this.save(conversation);
  }

  saveSettings() {
    this._write(SETTINGS, JSON.stringify(this.settings));
  }

  // Another page of this browser has written `key`. Returns { before, after } of a conversation, null when it is something else
  // or a conversation that is `ours`.
  take(key, ours) {
    if (!key?.startsWith(CONVERSATION)) return null;
    const before = this.conversations.find((c) => CONVERSATION + c.id === key);
    if (before && ours(before)) return null;
    const after = read(this._kept, key);
    this.conversations = this.conversations.filter((c) => c !== before);
    if (!usable(after)) return { before };
    this.conversations.push(after);
    this.conversations.sort((a, b) => b.updated - a.updated);
    return { before, after };
  }

  // When storage is full the oldest conversations make room.
  _write(key, text) {
    for (;;) {
      try {
        this._kept?.setItem(key, text);
        return true;
      } catch {
        const oldest = this.conversations.at(-1);
        if (!oldest || CONVERSATION + oldest.id === key) return false;
        this.remove(oldest);
      }
    }
  }
}
