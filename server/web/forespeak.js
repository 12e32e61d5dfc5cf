// Forespeak's browser client: one socket, many answers, automatic resume. No dependencies, no build step.
//
//   import { connect } from "/forespeak.js";
//   const client = connect();                                   // same host, or connect({ url, key })
//   const answer = client.chat({ messages: [{ role: "user", content: "Hello" }], max_tokens: 200 });
//   for await (const delta of answer) document.body.append(delta.text);
//   console.log(await answer.done);                             // { finish_reason, usage, speculation, timings }
//   answer.cancel();                                            // any time
//
// An answer is an async iterable of deltas { text, tokens, drafted, accepted, drafter?, replace? }. A delta with `replace: true`
// carries the whole text so far (deltas were lost while the socket was down). Errors reject `answer.done` and end the loop.
// A lost socket is opened again with growing pauses, and every running answer goes on where it stopped.

const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 8000;
const FINAL_CLOSE_CODES = new Set([1008, 4401, 4408]); // refused: trying again cannot help

export class ForespeakError extends Error {
  constructor(code, message, param) {
    super(message);
    this.code = code;
    this.param = param ?? null;
  }
}

class Answer {
  constructor(client, id, request) {
    this.id = id;
    this.request = request;
    this.responseId = null;
    this.seq = -1; // last seq seen
    this.started = null;
    this.finished = false;
    this._client = client;
    this._queue = [];
    this._wake = null;
    this.done = new Promise((resolve, reject) => {
      this._resolve = resolve;
      this._reject = reject;
    });
    this.done.catch(() => {}); // a caller who only iterates gets the error from the loop
  }

  cancel() {
    if (!this.finished) this._client._send({ type: "cancel", id: this.id });
  }

  _push(item) {
    this._queue.push(item);
    this._wake?.();
  }

  _finish(result, error) {
    if (this.finished) return;
    this.finished = true;
    this._error = error;
    if (error) this._reject(error);
    else this._resolve(result);
    this._wake?.();
  }

  async *[Symbol.asyncIterator]() {
    for (;;) {
      while (this._queue.length) yield this._queue.shift();
      if (this.finished) {
        if (this._error) throw this._error;
        return;
      }
      await new Promise((resolve) => (this._wake = resolve));
      this._wake = null;
    }
  }
}

class Client extends EventTarget {
  constructor({ url, key, protocols }) {
    super();
    this.url = url;
    this.key = key ?? null;
    this.protocols = protocols;
    this.hello = null;
    this.state = "closed"; // closed, connecting, open
    this._answers = new Map();
    this._pending = [];
    this._pause = FIRST_PAUSE_MS;
    this._nextId = 1;
    this._stopped = false;
    this._open();
  }

  // Ask for an answer. `request` is a chat message of the protocol without type and id.
  chat(request) {
    const answer = new Answer(this, `r${this._nextId++}-${Math.random().toString(36).slice(2, 8)}`, { resumable: true, ...request });
    this._answers.set(answer.id, answer);
    this._send({ type: "chat", id: answer.id, ...answer.request });
    return answer;
  }

  // Go on with an answer of an earlier page or socket: its response_id and the last seq that arrived.
  resume(responseId, afterSeq) {
    const answer = new Answer(this, `r${this._nextId++}-${Math.random().toString(36).slice(2, 8)}`, null);
    answer.responseId = responseId;
    answer.seq = afterSeq;
    this._answers.set(answer.id, answer);
    this._send({ type: "resume", id: answer.id, response_id: responseId, after_seq: afterSeq });
    return answer;
  }

  close() {
    this._stopped = true;
    clearTimeout(this._timer);
    this._socket?.close(1000);
  }

  _set(state, detail) {
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: { state, ...detail } }));
  }

  _open() {
    this._set("connecting");
    const socket = new WebSocket(this.url, this.protocols);
    this._socket = socket;
    socket.addEventListener("open", () => {
      if (this.key) socket.send(JSON.stringify({ type: "auth", key: this.key }));
    });
    socket.addEventListener("message", (event) => this._receive(JSON.parse(event.data)));
    socket.addEventListener("close", (event) => this._closed(event));
  }

  _closed(event) {
    this.hello = null;
    this._set("closed", { code: event.code, reason: event.reason });
    if (FINAL_CLOSE_CODES.has(event.code)) this._stopped = true;
    for (const answer of [...this._answers.values()]) {
      // What was never started is sent again; what was started is resumed; the rest cannot go on.
      if (this._stopped || (answer.responseId === null && answer.request === null)) {
        this._answers.delete(answer.id);
        answer._finish(null, new ForespeakError("disconnected", event.reason || "the connection was closed"));
      }
    }
    if (this._stopped) return;
    this._pending = [];
    const pause = this._pause * (0.5 + Math.random());
    this._pause = Math.min(this._pause * 2, LONGEST_PAUSE_MS);
    this._timer = setTimeout(() => this._open(), pause);
  }

  _send(message) {
    if (this.hello && this._socket.readyState === WebSocket.OPEN) this._socket.send(JSON.stringify(message));
    else this._pending.push(message);
  }

  _ready(hello) {
    this.hello = hello;
    this._pause = FIRST_PAUSE_MS;
    this._set("open", { hello });
    const queued = new Set(this._pending.map((message) => message.id));
    for (const answer of this._answers.values()) {
      if (queued.has(answer.id)) continue;
      if (answer.responseId) this._send({ type: "resume", id: answer.id, response_id: answer.responseId, after_seq: answer.seq });
      else this._send({ type: "chat", id: answer.id, ...answer.request });
    }
    for (const message of this._pending.splice(0)) this._send(message);
  }

  _receive(message) {
    switch (message.type) {
      case "hello":
        return this._ready(message);
      case "notice":
        return this.dispatchEvent(new CustomEvent("notice", { detail: message }));
      case "pong":
        return this.dispatchEvent(new CustomEvent("pong", { detail: message }));
    }
    const answer = this._answers.get(message.id);
    if (!answer) {
      if (message.type === "error") this.dispatchEvent(new CustomEvent("error", { detail: message }));
      return undefined;
    }
    if (message.seq !== undefined) {
      if (message.seq <= answer.seq && message.type !== "snapshot") return undefined; // replayed twice
      answer.seq = message.seq;
    }
    switch (message.type) {
      case "started":
        answer.responseId = message.response_id;
        answer.started = message;
        return this.dispatchEvent(new CustomEvent("started", { detail: { answer, message } }));
      case "delta":
        return answer._push(message);
      case "snapshot":
        return answer._push({ ...message, replace: true });
      case "done":
        this._answers.delete(answer.id);
        return answer._finish(message);
      case "error":
        this._answers.delete(answer.id);
        return answer._finish(null, new ForespeakError(message.code, message.message, message.param));
    }
    return undefined;
  }
}

// Open a connection. `url` defaults to this page's server, `key` is an API key (sent as the first message, never in the URL).
export function connect({ url, key, protocols = ["forespeak.v1.json"] } = {}) {
  const here = new URL("/v1/ws", location.href);
  here.protocol = here.protocol.replace("http", "ws");
  return new Client({ url: url ?? here.href, key, protocols });
}
