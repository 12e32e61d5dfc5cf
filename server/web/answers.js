// Answers in progress: takes each from the socket client into its conversation and keeps the store up to date. Knows no DOM.

import { Tally } from "/meter.js";

const SAVE_EVERY_MS = 500;
// After these errors the server may still have the answer.
const CUT_SHORT = new Set(["closed", "refused", "resumed_elsewhere"]);

// The line under a finished answer.
function figures({ finish_reason: reason, usage, speculation, timings }) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (timings?.tokens_per_second) parts.push(`${timings.tokens_per_second.toFixed(0)} tok/s`);
  if (speculation?.drafted) parts.push(`${speculation.acceptance_length.toFixed(2)} tokens a pass`);
  if (reason === "length") parts.push("cut at the length limit");
  if (reason === "cancelled") parts.push("stopped");
  return parts.join(" · ");
}

// A run is { conversation, message, answer, tally }; its message is the last of its conversation. The listener has
// began(run), added(run, pieces), replaced(run), ended(run, error or null) and full(), the last when storage has no room.
export class Answers {
  constructor(store, listener) {
    this._store = store;
    this._listener = listener;
    this._runs = new Map(); // by conversation
    this._tallies = new WeakMap(); // of each conversation's newest answer
    this._cut = new Set(); // conversations whose answer this page lost
  }

  of(conversation) {
    return this._runs.get(conversation);
  }

  get count() {
    return this._runs.size;
  }

  tally(conversation) {
    return this._tallies.get(conversation) ?? new Tally();
  }

  // Ask for the next message of a conversation.
  ask(client, conversation, request) {
    const message = { role: "assistant", content: "", pieces: [] };
    conversation.messages.push(message);
    this._store.touch(conversation);
    this._follow(conversation, message, client.chat(request));
    this._save(conversation);
  }

  // Go on with the answers an earlier page left (`all`), or those this page lost.
  resume(client, all) {
    for (const conversation of all ? this._store.conversations : this._cut) {
      const message = conversation.messages.at(-1);
      this._cut.delete(conversation);
      if (!message?.pending || this.of(conversation)) continue;
      this._follow(conversation, message, client.resume(message.pending.response_id, message.pending.seq));
    }
  }

  // The server has begun an answer: from now on it can be fetched by its id.
  started(answer) {
    for (const run of this._runs.values()) {
      if (run.answer !== answer) continue;
      run.message.pending = { response_id: answer.responseId, seq: 0 };
      this._save(run.conversation);
    }
  }

  // The page is being left.
  saveAll() {
    for (const conversation of this._runs.keys()) this._store.save(conversation);
  }

  async _follow(conversation, message, answer) {
    const run = { conversation, message, answer, tally: new Tally(), saved: performance.now() };
    this._runs.set(conversation, run);
    this._tallies.set(conversation, run.tally);
    this._listener.began(run);
    try {
      for await (const delta of answer) this._take(run, delta);
      this._end(run, await answer.done, null);
    } catch (error) {
      this._end(run, null, error);
    }
  }

  _take(run, delta) {
    const { message } = run;
    if (delta.replace) {
      message.content = delta.text;
      message.pieces = [[delta.text, ""]];
      this._listener.replaced(run);
    } else {
      const pieces = delta.pieces ?? [[delta.text, delta.accepted ? (delta.drafter ?? "") : ""]];
      message.content += delta.text;
      for (const [text, drafter] of pieces) {
        const last = message.pieces.at(-1);
        if (last && !drafter && !last[1]) last[0] += text;
        else message.pieces.push([text, drafter]);
      }
      run.tally.add(delta);
      this._listener.added(run, pieces);
    }
    message.pending = { response_id: run.answer.responseId, seq: delta.seq };
    if (performance.now() - run.saved > SAVE_EVERY_MS) {
      run.saved = performance.now();
      this._save(run.conversation);
    }
  }

  _end(run, done, error) {
    const { conversation, message } = run;
    this._runs.delete(conversation);
    if (error && message.pending && CUT_SHORT.has(error.code)) {
      if (error.code !== "resumed_elsewhere") this._cut.add(conversation);
    } else {
      delete message.pending;
      if (error) message.problem = error.message;
      if (done) {
        run.tally.finish(done);
        message.figures = figures(done);
      }
      this._save(conversation);
    }
    this._listener.ended(run, error);
  }

  _save(conversation) {
    if (!this._store.save(conversation)) this._listener.full();
  }
}
