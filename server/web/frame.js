// What surrounds the conversation: the drawer with the list, the growing box, where the focus goes. Knows no messages.

// The list at the side; on narrow screens a drawer over the page.
export class Drawer {
  constructor({ side, shade, main, opener, closer }) {
    Object.assign(this, { side, shade, main, opener });
    opener.addEventListener("click", () => this._set(true, closer));
    for (const node of [closer, shade]) node.addEventListener("click", () => this.close());
  }

  get open() {
    return this.side.classList.contains("open");
  }

  close() {
    if (this.open) this._set(false, this.opener);
  }

  _set(open, focus) {
    this.side.classList.toggle("open", open);
    this.shade.hidden = !open;
    this.main.inert = open;
    this.opener.setAttribute("aria-expanded", String(open));
    focus.focus();
  }
}

// The box messages are written in. `send` is called with its text, trimmed, when there is any.
export class Box {
  constructor(form, area, send) {
    this.area = area;
    this._send = send;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._submit();
    });
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this._submit();
    });
    area.addEventListener("input", () => this._grow());
  }

  set(text) {
    this.area.value = text;
    this._grow();
  }

  // Not on touch screens unless it was asked for: there a focused box opens the keyboard.
  focus(asked = false) {
    if (asked || matchMedia("(pointer: fine)").matches) this.area.focus();
  }

  _submit() {
    const text = this.area.value.trim();
    if (text) this._send(text);
  }

  _grow() {
    this.area.style.height = "auto";
    this.area.style.height = `${this.area.scrollHeight + 2}px`;
  }
}

// A scrolling node that stays at its end as it grows, unless the reader has scrolled up.
export class Follower {
  constructor(node) {
    this.node = node;
    this._pinned = true;
    node.addEventListener("scroll", () => (this._pinned = node.scrollHeight - node.scrollTop - node.clientHeight < 40));
  }

  toEnd() {
    this._pinned = true;
    this.follow();
  }

  follow() {
    if (this._pinned) this.node.scrollTop = this.node.scrollHeight;
  }
}
