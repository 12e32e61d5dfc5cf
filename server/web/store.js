// Conversations and settings in the browser's storage. Knows no DOM and no sockets.
// A conversation: { id, title, system, messages: [{ role, content, pieces?, figures?, problem?, pending? }] }.
// `pending` of an unfinished answer is { response_id, seq }: enough to go on with it after a reload.

const CONVERSATIONS = "forespeak.conversations";
const SETTINGS = "forespeak.settings";
const KEY = "forespeak.key";
const MOST_CONVERSATIONS = 100;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // unreadable or forbidden storage: start empty
  }
}

export class Store {
  constructor() {
    const saved = read(CONVERSATIONS, []);
    this.conversations = Array.isArray(saved) ? saved.filter((c) => c && Array.isArray(c.messages)) : [];
    this.settings = { mode: "auto", tint: true, ...read(SETTINGS, {}) };
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  create() {
    const random = crypto.getRandomValues(new Uint32Array(2)).join("");
    const conversation = { id: random, title: "New conversation", messages: [] };
    this.conversations.unshift(conversation);
    return conversation;
  }

  remove(id) {
    this.conversations = this.conversations.filter((c) => c.id !== id);
    this.save();
  }

  save() {
    this.conversations = this.conversations.filter((c, i) => i < MOST_CONVERSATIONS);
    for (;;) {
      try {
        localStorage.setItem(CONVERSATIONS, JSON.stringify(this.conversations.filter((c) => c.messages.length)));
        localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
        return;
      } catch (error) {
        // Storage is full: the oldest conversation makes room. Forbidden storage: nothing to do.
        if (error.name !== "QuotaExceededError" || this.conversations.length <= 1) return;
        this.conversations.pop();
      }
    }
  }
}
