// Messages, the conversation list and the note as DOM. Text is only ever set as text, never as markup.

import { colour } from "/meter.js";

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function button(label, action, name) {
  const node = element("button", "", label);
  node.type = "button";
  if (name) node.setAttribute("aria-label", name);
  node.addEventListener("click", action);
  return node;
}

const NAMES = { user: "You", assistant: "Model", system: "System" };

// One message on the page. `actions` maps a button's label to its callback, which gets the button.
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.drafters = new Set();
    this.node = element("article", `message ${message.role}`);
    this.node.setAttribute("aria-label", NAMES[message.role] ?? message.role);
    this.body = element("div", "body");
    this.foot = element("div", "foot");
    this.node.append(element("div", "who", NAMES[message.role] ?? message.role), this.body, this.foot);
    this.render();
  }

  // Draw everything from the message.
  render() {
    const { pieces, content } = this.message;
    this.body.replaceChildren();
    this._waiting = [];
    for (const piece of pieces ?? [[content, ""]]) this._add(...piece);
    this.finish();
  }

  // Add streamed text with the next frame; `drafter` is "" when the model added it itself. `drawn` is called after that frame.
  append(pieces, drawn) {
    this._waiting.push(...pieces);
    this._frame ??= requestAnimationFrame(() => {
      this.flush();
      drawn();
    });
  }

  flush() {
    if (this._frame) cancelAnimationFrame(this._frame);
    this._frame = null;
    for (const piece of this._waiting.splice(0)) this._add(...piece);
  }

  _add(text, drafter) {
    if (!text) return;
    const last = this.body.lastChild;
    if (drafter) {
      const span = element("span", `draft ${colour(drafter)}`, text);
      span.title = `drafted by ${drafter}`;
      this.body.append(span);
      this.drafters.add(drafter);
    } else if (last?.nodeType === Node.TEXT_NODE) last.appendData(text);
    else this.body.append(text);
  }

  running(on) {
    this.node.classList.toggle("running", on);
    this.node.setAttribute("aria-busy", String(on));
    if (on) this.foot.replaceChildren();
    else this.finish();
  }

  // The line under a message.
  finish() {
    this.flush();
    this.foot.replaceChildren();
    const { figures, problem } = this.message;
    if (problem) this.foot.append(element("span", "problem", problem));
    if (figures) this.foot.append(element("span", "", figures));
    for (const [label, action] of Object.entries(this.actions)) {
      const node = button(label, () => action(node), `${label} this message`);
      node.className = label.toLowerCase();
      this.foot.append(node);
    }
  }
}

// The list at the side. `running` tells which conversations are being answered.
export function renderList(list, conversations, current, { running, open, remove }) {
  list.replaceChildren(
    ...conversations.map((conversation) => {
      const item = element("li", conversation === current ? "current" : "");
      const title = button(conversation.title, () => open(conversation));
      title.className = "open";
      if (conversation === current) title.setAttribute("aria-current", "true");
      if (running(conversation)) title.append(element("span", "busy", " …"));
      const cross = button("✕", () => remove(conversation), `Delete ${conversation.title}`);
      cross.className = "remove";
      item.append(title, cross);
      return item;
    }),
  );
}

// Which colour stands for which drafter.
export function renderLegend(legend, drafters) {
  legend.replaceChildren(...[...drafters].map((name) => element("span", colour(name), name)));
}

export function emptyNote() {
  return element("p", "empty", "Ask something. Every step drafts several tokens ahead and keeps only what the model itself would have said.");
}

// The line above the box: what is going on with the connection, an error, an offer. One text at a time, the newest.
export class Note {
  constructor(node) {
    this.node = node;
  }

  // `kind` names what it is about, so that only `clear(kind)` takes it away; `action` is [label, callback].
  show(kind, text, action) {
    this.kind = kind;
    this.node.replaceChildren(element("span", "", text));
    if (action) this.node.append(button(action[0], () => { this.clear(kind); action[1](); }));
    this.node.append(button("✕", () => this.clear(kind), "Dismiss"));
    this.node.hidden = false;
  }

  clear(kind) {
    if (kind !== this.kind) return;
    this.kind = null;
    this.node.hidden = true;
    this.node.replaceChildren();
  }
}
