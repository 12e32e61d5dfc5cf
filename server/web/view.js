// Messages and the conversation list as DOM. Text is only ever set as text, never as markup.

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

// One message on the page. `actions` = { copy, retry, edit } callbacks, those that apply.
export class MessageView {
  constructor(message, meter, actions) {
    this.message = message;
    this.meter = meter;
    this.node = element("article", `message ${message.role}`);
    this.node.append(element("div", "who", NAMES[message.role] ?? message.role));
    this.body = element("div", "body");
    this.foot = element("div", "foot");
    this.node.append(this.body, this.foot);
    this.actions = actions;
    this.render();
  }

  // Draw everything from the message.
  render() {
    this.body.replaceChildren();
    const { pieces, content } = this.message;
    if (pieces) for (const [text, drafter] of pieces) this._piece(text, drafter);
    else this.body.append(content);
    this.finish();
  }

  _piece(text, drafter) {
    if (!text) return;
    const last = this.body.lastChild;
    if (drafter) {
      const span = element("span", `draft ${this.meter.colour(drafter)}`, text);
      span.title = `drafted by ${drafter}`;
      this.body.append(span);
    } else if (last?.nodeType === Node.TEXT_NODE) last.appendData(text);
    else this.body.append(text);
  }

  // Add streamed text; `drafter` is "" when the model added it itself.
  append(text, drafter) {
    this._piece(text, drafter);
  }

  running(on) {
    this.node.classList.toggle("running", on);
    this.node.setAttribute("aria-busy", String(on));
  }

  // The line under a finished message.
  finish() {
    this.foot.replaceChildren();
    const { figures, problem } = this.message;
    if (problem) this.foot.append(element("span", "problem", problem));
    if (figures) this.foot.append(element("span", "", figures));
    for (const [label, action] of Object.entries(this.actions)) {
      this.foot.append(button(label, () => action(this.foot), `${label} this message`));
    }
  }
}

// The list at the side.
export function renderList(list, conversations, current, open, remove) {
  list.replaceChildren(
    ...conversations.map((conversation) => {
      const item = element("li", conversation.id === current?.id ? "current" : "");
      const title = button(conversation.title, () => open(conversation));
      title.className = "open";
      if (conversation.id === current?.id) title.setAttribute("aria-current", "true");
      const cross = button("✕", () => remove(conversation), `Delete ${conversation.title}`);
      cross.className = "remove";
      item.append(title, cross);
      return item;
    }),
  );
}

export function emptyNote() {
  return element("p", "empty", "Ask something. Every step drafts several tokens ahead and keeps only what the model itself would have said.");
}
