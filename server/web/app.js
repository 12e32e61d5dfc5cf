// The chat page: joins the store, the socket client and the views.

import { connect } from "/forespeak.js";
import { Meter } from "/meter.js";
import { Store } from "/store.js";
import { MessageView, emptyNote, renderList } from "/view.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const SAVE_EVERY_MS = 500;

const store = new Store();
const meter = new Meter($("speed"), $("length"), $("strip"), $("legend"));
let client = null;
let current = null; // the open conversation
let running = null; // { answer, conversation, message, view }

// --- connection ---------------------------------------------------------------------------------------------------

function openClient() {
  client?.close();
  client = connect({ key: store.key || undefined });
  client.addEventListener("state", ({ detail }) => {
    $("link").className = `link ${detail.state}`;
    $("link").textContent = detail.state === "open" ? "connected" : detail.state === "connecting" ? "connecting" : "reconnecting";
    if (detail.hello) $("model").textContent = detail.hello.model ?? "";
    if (detail.code === 4401 || detail.code === 4408) {
      $("link").textContent = "this server needs an API key";
      openSettings();
    }
  });
  client.addEventListener("notice", ({ detail }) => say(detail.message));
  client.addEventListener("error", ({ detail }) => say(detail.message));
}

function say(text) {
  $("announce").textContent = text;
  $("link").title = text;
}

// --- conversations ------------------------------------------------------------------------------------------------

function show(conversation) {
  current = conversation;
  $("log").replaceChildren();
  if (!conversation.messages.length) $("log").append(emptyNote());
  conversation.messages.forEach((message, index) => addView(message, index));
  if (running?.conversation === conversation) {
    running.view = $("log").lastChild.view;
    running.view.running(true);
  }
  refresh();
  $("log").scrollTop = $("log").scrollHeight;
}

function addView(message, index) {
  $("log").querySelector(".empty")?.remove();
  const actions = { Copy: (foot) => copy(message, foot) };
  if (message.role === "assistant") actions.Retry = () => retry(index);
  if (message.role === "user") actions.Edit = () => edit(index);
  const view = new MessageView(message, meter, actions);
  view.node.view = view;
  $("log").append(view.node);
  return view;
}

function refresh() {
  renderList($("list"), store.conversations, current, (c) => { closeSide(); show(c); }, removeConversation);
  const busy = running !== null;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

function removeConversation(conversation) {
  if (running?.conversation === conversation) running.answer.cancel();
  store.remove(conversation.id);
  if (current === conversation) show(store.conversations[0] ?? store.create());
  else refresh();
}

async function copy(message, foot) {
  try {
    await navigator.clipboard.writeText(message.content);
    say("Copied");
    foot.firstElementChild?.blur();
  } catch {
    say("The browser refused to copy");
  }
}

function retry(index) {
  if (running) return;
  current.messages.length = index;
  show(current);
  ask();
}

function edit(index) {
  if (running) return;
  $("prompt").value = current.messages[index].content;
  current.messages.length = index;
  store.save();
  show(current);
  $("prompt").focus();
  grow();
}

// --- asking and streaming -------------------------------------------------------------------------------------------

function requestOf(conversation) {
  const s = store.settings;
  const system = s.system?.trim();
  const messages = conversation.messages.map(({ role, content }) => ({ role, content }));
  const request = { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  for (const name of NUMBERS) if (typeof s[name] === "number") request[name] = s[name];
  request.speculation = { mode: s.mode };
  if (typeof s.max_nodes === "number") request.speculation.max_nodes = s.max_nodes;
  return request;
}

function ask() {
  const conversation = current;
  const answer = client.chat(requestOf(conversation));
  const message = { role: "assistant", content: "", pieces: [] };
  conversation.messages.push(message);
  follow(answer, conversation, message, addView(message, conversation.messages.length - 1));
}

async function follow(answer, conversation, message, view) {
  running = { answer, conversation, message, view };
  view.running(true);
  meter.reset();
  refresh();
  let saved = 0;
  try {
    for await (const delta of answer) {
      take(delta, message);
      message.pending = { response_id: answer.responseId, seq: answer.seq };
      if (performance.now() - saved > SAVE_EVERY_MS) {
        saved = performance.now();
        store.save();
      }
    }
    const done = await answer.done;
    meter.final(done.speculation, done.timings);
    message.figures = figures(done);
    $("announce").textContent = message.content; // screen readers hear the whole answer once
  } catch (error) {
    message.problem = error.message;
    say(error.message);
  } finally {
    delete message.pending;
    running.view.running(false);
    running.view.finish();
    running = null;
    store.save();
    refresh();
  }
}

function take(delta, message) {
  const log = $("log");
  const pinned = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  const view = running.view;
  if (delta.replace) {
    message.content = delta.text;
    message.pieces = [[delta.text, ""]];
    view.render();
  } else {
    const pieces = delta.pieces ?? [[delta.text, delta.accepted ? (delta.drafter ?? "") : ""]];
    for (const [text, drafter] of pieces) {
      message.content += text;
      const last = message.pieces.at(-1);
      if (last && !drafter && !last[1]) last[0] += text;
      else message.pieces.push([text, drafter]);
      view.append(text, drafter);
    }
    meter.add(delta.tokens ?? 0, delta.accepted ?? 0);
  }
  if (pinned) log.scrollTop = log.scrollHeight;
}

function figures({ finish_reason: reason, usage, speculation, timings }) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (timings?.tokens_per_second) parts.push(`${timings.tokens_per_second.toFixed(0)} tok/s`);
  if (speculation?.acceptance_length) parts.push(`${speculation.acceptance_length.toFixed(2)} tokens a pass`);
  if (reason === "length") parts.push("cut at the length limit");
  if (reason === "cancelled") parts.push("stopped");
  return parts.join(" · ");
}

function submit() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  if (!current.messages.length) current.title = text.slice(0, 60);
  const message = { role: "user", content: text };
  current.messages.push(message);
  if (!store.conversations.includes(current)) store.conversations.unshift(current);
  addView(message, current.messages.length - 1);
  $("prompt").value = "";
  grow();
  ask();
  store.save();
  $("log").scrollTop = $("log").scrollHeight;
}

// An answer that was streaming when the page was left goes on where it stopped.
function resumePending() {
  for (const conversation of store.conversations) {
    const message = conversation.messages.at(-1);
    if (!message?.pending?.response_id) continue;
    show(conversation);
    follow(client.resume(message.pending.response_id, message.pending.seq), conversation, message, $("log").lastChild.view);
    return;
  }
}

// --- page ---------------------------------------------------------------------------------------------------------

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function openSide() {
  $("side").classList.add("open");
  $("shade").hidden = false;
  $("side-open").setAttribute("aria-expanded", "true");
  $("side-close").focus();
}

function closeSide() {
  $("side").classList.remove("open");
  $("shade").hidden = true;
  $("side-open").setAttribute("aria-expanded", "false");
}

function openSettings() {
  const s = store.settings;
  for (const name of [...NUMBERS, "max_nodes"]) $(`s-${name}`).value = s[name] ?? "";
  $("s-system").value = s.system ?? "";
  $("s-mode").value = s.mode;
  $("s-key").value = store.key;
  if (!$("settings").open) $("settings").showModal();
}

function saveSettings() {
  if ($("settings").returnValue !== "save") return;
  const s = store.settings;
  for (const name of [...NUMBERS, "max_nodes"]) {
    const value = $(`s-${name}`).valueAsNumber;
    if (Number.isNaN(value)) delete s[name];
    else s[name] = value;
  }
  s.system = $("s-system").value;
  s.mode = $("s-mode").value;
  const changed = store.key !== $("s-key").value;
  store.key = $("s-key").value;
  store.save();
  if (changed) openClient();
}

function tint(on) {
  store.settings.tint = on;
  document.body.classList.toggle("tint", on);
  $("tint").checked = on;
  store.save();
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
});
$("prompt").addEventListener("input", grow);
$("stop").addEventListener("click", () => running?.answer.cancel());
$("new").addEventListener("click", () => { closeSide(); show(store.create()); $("prompt").focus(); });
$("side-open").addEventListener("click", openSide);
$("side-close").addEventListener("click", closeSide);
$("shade").addEventListener("click", closeSide);
$("settings-open").addEventListener("click", openSettings);
$("settings").addEventListener("close", saveSettings);
$("tint").addEventListener("change", (event) => tint(event.target.checked));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) { if ($("side").classList.contains("open")) closeSide(); else running?.answer.cancel(); }
});
window.addEventListener("pagehide", () => store.save());

tint(store.settings.tint);
openClient();
show(store.conversations[0] ?? store.create());
resumePending();
