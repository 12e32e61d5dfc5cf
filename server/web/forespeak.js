// Forespeak's browser client: one socket, many answers, automatic resume. No dependencies, no build step.
//
//   import { connect } from "/forespeak.js";
//   const client = connect();                                   // the server this file came from, or connect({ url, key })
//   const answer = client.chat({ messages: [{ role: "user", content: "Hello" }], max_tokens: 200 });
//   for await (const delta of answer) document.body.append(delta.text);
//   console.log(await answer.done);                             // { finish_reason, usage, speculation, timings }
//   answer.cancel();                                            // any time
//
// An answer is an async iterable of deltas { seq, text, tokens, drafted, accepted, drafter?, pieces?, replace? }. A delta with
// `replace: true` carries the whole text so far (its deltas were lost while the socket was down). An error rejects `answer.done`
// and ends the loop. A lost socket is opened again with growing pauses, and every running answer goes on where it stopped.
// docs/clients.md has the rest.

const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 8000;
const HEARTBEAT_MS = 15000; // a socket that is silent for two of these is taken for dead
const REFUSED = new Set([1008, 4401, 4408]); // close codes after which trying again cannot help
const NO_KEY = 4401;
const TOO_BIG = 1009; // sending the same again would be closed again

export class ForespeakError extends Error {
  constructor(code, message, param = null) {
    super(message);
    this.name = "ForespeakError";
    this.code = code;
    this.param = param;
  }
}

class Answer {
  constructor(client, id, message) {
    this.id = id;
    this.text = ""; // what has arrived
    this.seq = -1; // number of the last message that arrived
    this.started = null; // the server's `started` message
    this.responseId = null; // with `seq` enough to go on from anywhere: client.resume(responseId, seq)
    this.finished = false;
    this.cancelled = false; // cancel() was called
    this._client = client;
    this._message = message; // asks for this answer, until it has a responseId
    this._queue = [];
    this._error = null;
    this._wake = () => {};
    this.done = new Promise((resolve, reject) => Object.assign(this, { _resolve: resolve, _reject: reject }));
    this.done.catch(() => {}); // a caller who only iterates gets the error from the loop
  }

  // Stop. What has come stays; the answer ends with finish_reason "cancelled".
  cancel() {
    if (this.finished || this.cancelled) return;
    this.cancelled = true;
    this._client._cancel(this);
  }

  async *[Symbol.asyncIterator]() {
    for (;;) {
      while (this._queue.length) yield this._queue.shift();
      if (this._error) throw this._error;
      if (this.finished) return;
      await new Promise((resolve) => (this._wake = resolve));
    }
  }

  // Take one of the server's messages for this answer.
  _take(message) {
    if (message.seq !== undefined) {
      if (message.seq <= this.seq && message.type !== "snapshot") return; // replayed twice
      this.seq = message.seq;
    }
    if (message.type === "started") {
      this.started = message;
      this.responseId = message.response_id;
      this._client._tell("started", this);
    } else if (message.type === "delta") {
      this.text += message.text;
      this._queue.push(message);
    } else if (message.type === "snapshot") {
      this.text = message.text;
      this._queue.push({ ...message, replace: true });
    } else if (message.type === "done") this._finish(message);
    else if (message.type === "error") this._finish(null, new ForespeakError(message.code, message.message, message.param));
    this._wake();
  }

  _finish(result, error = null) {
    if (this.finished) return;
    this.finished = true;
    this._error = error;
    this._client._answers.delete(this.id);
    if (error) this._reject(error);
    else this._resolve(result);
    this._wake();
  }
}

// Events: "state" { state: "connecting" | "open" | "closed", hello?, code?, reason?, retryInMs? }, "started" (an Answer),
// "notice" and "error" (the server's messages that belong to no answer), "pong". Each event's `detail` is what is named here.
class Client extends EventTarget {
  constructor({ url, key, heartbeatMs }) {
    super();
    this.url = url;
    this.hello = null; // the server's greeting while connected: { version, model, limits }
    this.state = "closed";
    this._key = key;
    this._answers = new Map();
    this._nextId = 1;
    this._pause = FIRST_PAUSE_MS;
    this._stopped = null; // the error that ended this client for good
    this._heartbeat = setInterval(() => this._beat(), heartbeatMs);
    this._online = () => this.reconnect();
    globalThis.addEventListener?.("online", this._online);
    this._open();
  }

  // Ask for an answer. `request` is the protocol's `chat` message without type and id; `signal` an AbortSignal that cancels it.
  chat(request, { signal } = {}) {
    const answer = this._add({ type: "chat", resumable: true, ...request });
    if (signal?.aborted) answer.cancel();
    else signal?.addEventListener("abort", () => answer.cancel(), { once: true });
    return answer;
  }

  // Go on with an answer of an earlier page or socket: its response_id and the number of the last message that arrived.
  resume(responseId, afterSeq) {
    return this._add({ type: "resume", response_id: responseId, after_seq: afterSeq }, responseId, afterSeq);
  }

  // Do not wait for the pause before the next attempt to end.
  reconnect() {
    if (this.state !== "closed" || this._stopped) return;
    clearTimeout(this._timer);
    this._open();
  }

  // End for good. Running answers fail with code "closed"; resumable ones can be fetched by a new client for a while.
  close() {
    this._end(new ForespeakError("closed", "this client was closed"));
    this._socket.close(1000);
  }

  _end(error) {
    this._stopped ??= error;
    clearTimeout(this._timer);
    clearInterval(this._heartbeat);
    globalThis.removeEventListener?.("online", this._online);
    for (const answer of [...this._answers.values()]) answer._finish(null, error);
  }

  _add(message, responseId = null, seq = -1) {
    const id = `r${this._nextId++}`;
    const answer = new Answer(this, id, { ...message, id });
    Object.assign(answer, { responseId, seq });
    if (this._stopped) answer._finish(null, this._stopped);
    else {
      this._answers.set(id, answer);
      if (this.hello) this._ask(answer);
    }
    return answer;
  }

  // Send what begins an answer, or what goes on with it on this socket.
  _ask(answer) {
    const { id, responseId, seq } = answer;
    const resume = responseId !== null;
    const text = JSON.stringify(resume ? { type: "resume", id, response_id: responseId, after_seq: seq } : answer._message);
    const limit = this.hello.limits?.message_bytes ?? Infinity;
    const size = new TextEncoder().encode(text).length;
    if (size > limit) {
      answer._finish(null, new ForespeakError("message_too_big", `the request has ${size} bytes; the server takes ${limit}`, "messages"));
      return;
    }
    this._socket.send(text);
    if (answer.cancelled) this._cancel(answer);
  }

  _cancel(answer) {
    if (this.hello) this._socket.send(JSON.stringify({ type: "cancel", id: answer.id }));
    else if (answer.responseId === null) answer._finish({ type: "done", id: answer.id, finish_reason: "cancelled" }); // never asked
    // else it is cancelled once there is a socket again
  }

  // --- the socket

  _tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }

  _set(state, detail) {
    this.state = state;
    this._tell("state", { state, ...detail });
  }

  _open() {
    this._set("connecting");
    const socket = new WebSocket(this.url, ["forespeak.v1.json"]);
    this._socket = socket;
    this._silent = false;
    // Without a key a ping is sent, so that a server that wants one says so now and not when its patience ends.
    const first = this._key ? { type: "auth", key: this._key } : { type: "ping" };
    socket.addEventListener("open", () => socket.send(JSON.stringify(first)));
    socket.addEventListener("message", (event) => socket === this._socket && this._receive(JSON.parse(event.data)));
    socket.addEventListener("close", (event) => socket === this._socket && this._closed(event.code, event.reason));
  }

  _beat() {
    if (!this.hello) return;
    if (this._silent) {
      this._socket.close();
      this._closed(1006, "the server does not answer");
      return;
    }
    this._silent = true; // until anything arrives
    this._socket.send('{"type":"ping"}');
  }

  _closed(code, reason) {
    if (this.state === "closed") return;
    this.hello = null;
    if (code === NO_KEY && !this._key) reason = "this server needs an API key";
    if (code === TOO_BIG) {
      for (const answer of [...this._answers.values()]) {
        if (!answer.responseId) answer._finish(null, new ForespeakError("message_too_big", reason || "the request is too big"));
      }
    }
    if (REFUSED.has(code)) this._end(new ForespeakError("refused", reason || "the server refused the connection"));
    if (this._stopped) {
      this._set("closed", { code, reason });
      return;
    }
    const retryInMs = this._pause * (0.5 + Math.random());
    this._pause = Math.min(this._pause * 2, LONGEST_PAUSE_MS);
    this._timer = setTimeout(() => this._open(), retryInMs);
    this._set("closed", { code, reason, retryInMs });
  }

  _receive(message) {
    this._silent = false;
    const answer = this._answers.get(message.id);
    if (message.type === "hello") this._ready(message);
    else if (answer) answer._take(message);
    else if (["notice", "pong", "error"].includes(message.type)) this._tell(message.type, message);
  }

  _ready(hello) {
    this.hello = hello;
    this._pause = FIRST_PAUSE_MS;
    for (const answer of [...this._answers.values()]) this._ask(answer);
    this._set("open", { hello });
  }
}

// Open a connection. `url` is a WebSocket's address, by default of the server this file came from; `key` is an API key (sent as
// the first message, never in the URL).
export function connect({ url, key, heartbeatMs = HEARTBEAT_MS } = {}) {
  const here = new URL("/v1/ws", import.meta.url);
  here.protocol = here.protocol.replace("http", "ws");
  return new Client({ url: url ?? here.href, key, heartbeatMs });
}
