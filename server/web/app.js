// The chat page: joins the store, the socket client, the answers in progress and the views.

import { Answers } from "/answers.js";
import { connect } from "/forespeak.js";
import { Box, Drawer, Follower } from "/frame.js";
import { Meter } from "/meter.js";
import { SettingsDialog, requestOptions } from "/settings.js";
import { Store } from "/store.js";
import { MessageView, Note, emptyNote, renderLegend, renderList } from "/view.js";

const $ = (id) => document.getElementById(id);
const TITLE_CHARACTERS = 60;

const store = new Store();
const answers = new Answers(store, { began, added, replaced, ended, full });
const meter = new Meter($("speed"), $("length"), $("strip"));
const note = new Note($("note"));
const drawer = new Drawer({ side: $("side"), shade: $("shade"), main: $("main"), opener: $("side-open"), closer: $("side-close") });
const box = new Box($("form"), $("prompt"), submit);
const end = new Follower($("log"));
const settings = new SettingsDialog($("settings"), store, (keyChanged) => keyChanged && openClient());
let client = null;
let current = null; // the open conversation
let editing = null; // index of the message being edited

// For screen readers. The note and the messages are what others see.
const say = (text) => ($("announce").textContent = text);
const warn = (text) => ($("alert").textContent = text);

// --- connection ---------------------------------------------------------------------------------------------------

function openClient() {
  client?.close();
  const mine = (client = connect({ key: store.key || undefined }));
  mine.addEventListener("state", ({ detail }) => mine === client && onState(detail));
  mine.addEventListener("notice", ({ detail }) => onNotice(detail));
  mine.addEventListener("error", ({ detail }) => warn(detail.message));
  mine.addEventListener("started", ({ detail }) => answers.started(detail));
}

function onState({ state, hello, code, reason, retryInMs }) {
  const refused = state === "closed" && retryInMs === undefined;
  $("link").className = `link ${state}`;
  $("link").textContent = { open: "connected", connecting: "connecting", closed: refused ? "refused" : "reconnecting" }[state];
  if (state === "open") {
    $("model").textContent = hello.model;
    note.clear("link");
    if (hello.limits.context === null) note.show("server", "The model is still loading.");
    answers.resume(client, false);
  } else if (state === "closed" && !refused) {
    const more = answers.count ? " Running answers will go on." : "";
    note.show("link", `The connection is lost, trying again.${more}`, ["Try now", () => client.reconnect()]);
  } else if (code === 4401 || code === 4408) {
    const text = store.key ? "This API key was refused." : "This server needs an API key.";
    note.show("link", text, ["Enter key", () => settings.open("key")]);
    settings.open("key");
  } else if (state === "closed") note.show("link", reason || "The server refused the connection.");
}

function onNotice({ code, message }) {
  if (code === "engine_ready") note.clear("server");
  else note.show("server", message);
  say(message);
}

// --- conversations ------------------------------------------------------------------------------------------------

function show(conversation) {
  current = conversation;
  stopEditing();
  $("log").replaceChildren(...(conversation.messages.length ? [] : [emptyNote()]));
  for (const index of conversation.messages.keys()) addView(index);
  if (answers.of(conversation)) lastView().running(true);
  meter.show(answers.tally(conversation));
  showLegend();
  refresh();
  end.toEnd();
}

function addView(index) {
  const message = current.messages[index];
  const actions = { Copy: (button) => copy(message, button) };
  if (message.role === "assistant") actions.Retry = () => retry(index);
  if (message.role === "user") actions.Edit = () => edit(index);
  $("log").querySelector(".empty")?.remove();
  const view = new MessageView(message, actions);
  view.node.view = view;
  $("log").append(view.node);
}

const lastView = () => $("log").lastElementChild.view;

function showLegend() {
  const drafters = new Set();
  for (const node of $("log").children) for (const name of node.view?.drafters ?? []) drafters.add(name);
  renderLegend($("legend"), drafters);
}

function refresh() {
  const busy = Boolean(answers.of(current));
  renderList($("list"), store.conversations, current, {
    running: (conversation) => Boolean(answers.of(conversation)),
    open: (conversation) => {
      drawer.close();
      show(conversation);
      box.focus();
    },
    remove,
  });
  $("log").classList.toggle("busy", busy);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

function remove(conversation) {
  answers.of(conversation)?.answer.cancel();
  store.remove(conversation);
  if (current === conversation) show(store.conversations[0] ?? store.create());
  else refresh();
  $("new").focus();
  say(`Deleted ${conversation.title}`);
  const undo = () => {
    store.restore(conversation);
    show(conversation);
    box.focus();
  };
  note.show("undo", `Deleted “${conversation.title}”.`, ["Undo", undo]);
}

// Another tab has changed a conversation; one that is being answered here is ours.
function onStorage({ key }) {
  const change = store.take(key, (conversation) => Boolean(answers.of(conversation)));
  if (change && change.before === current && change.before) show(change.after ?? store.conversations[0] ?? store.create());
  else if (change) refresh();
}

// --- what a message's buttons do ----------------------------------------------------------------------------------

async function copy(message, button) {
  try {
    await navigator.clipboard.writeText(message.content);
    button.textContent = "Copied";
    say("Copied");
  } catch {
    note.show("error", "The browser refused to copy.");
    warn("The browser refused to copy.");
  }
}

function retry(index) {
  if (answers.of(current)) return;
  current.messages.length = index;
  show(current);
  ask();
}

// The messages from here on are replaced when the edited one is sent, not before.
function edit(index) {
  if (answers.of(current)) return;
  editing = index;
  box.set(current.messages[index].content);
  box.focus(true);
  note.show("edit", "Editing an earlier message; sending it replaces what follows.", ["Cancel", stopEditing]);
}

function stopEditing() {
  if (editing === null) return;
  editing = null;
  note.clear("edit");
  box.set("");
}

// --- asking and streaming -------------------------------------------------------------------------------------------

function submit(text) {
  if (answers.of(current)) return;
  if (editing !== null) {
    current.messages.length = editing;
    show(current);
  }
  if (!current.messages.length) current.title = text.slice(0, TITLE_CHARACTERS);
  const index = current.messages.push({ role: "user", content: text }) - 1;
  addView(index);
  box.set("");
  ask();
}

function ask() {
  const system = store.settings.system?.trim();
  const said = current.messages.filter((m) => m.role === "user" || m.content).map(({ role, content }) => ({ role, content }));
  const messages = system ? [{ role: "system", content: system }, ...said] : said;
  answers.ask(client, current, { messages, ...requestOptions(store.settings) });
  end.toEnd();
}

function began({ conversation, tally }) {
  if (conversation === current) {
    const index = current.messages.length - 1;
    if ($("log").childElementCount <= index) addView(index);
    lastView().running(true);
    meter.show(tally);
  }
  refresh();
}

function added({ conversation }, pieces) {
  if (conversation !== current) return;
  meter.draw();
  lastView().append(pieces, () => {
    end.follow();
    showLegend();
  });
}

function replaced({ conversation }) {
  if (conversation === current) lastView().render();
}

function ended({ conversation, message }, error) {
  if (error) warn(error.message);
  if (error?.code === "resumed_elsewhere") note.show("server", "This answer goes on in another tab.");
  if (conversation === current) {
    const { activeElement } = document;
    const unfocused = !activeElement || activeElement === document.body || activeElement === $("stop");
    lastView().running(false);
    showLegend();
    meter.draw();
    if (!error) say(message.content); // screen readers hear the whole answer once
    end.follow();
    refresh();
    if (unfocused) box.focus();
  } else refresh();
}

function full() {
  note.show("error", "The browser's storage is full: this conversation will not be kept.");
}

// --- page ---------------------------------------------------------------------------------------------------------

const stop = () => answers.of(current)?.answer.cancel();

function tint(on) {
  store.settings.tint = on;
  document.body.classList.toggle("tint", on);
  $("tint").checked = on;
}

function escape() {
  if ($("settings").open) return; // the dialog closes itself
  if (drawer.open) drawer.close();
  else if (editing !== null) stopEditing();
  else stop();
}

function startNew() {
  drawer.close();
  show(store.create());
  box.focus(true);
}

$("stop").addEventListener("click", stop);
$("new").addEventListener("click", startNew);
$("settings-open").addEventListener("click", () => settings.open());
$("tint").addEventListener("change", (event) => {
  tint(event.target.checked);
  store.saveSettings();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && escape());
window.addEventListener("storage", onStorage);
window.addEventListener("pagehide", () => answers.saveAll());

tint(store.settings.tint);
openClient();
show(store.conversations[0] ?? store.create());
answers.resume(client, true);
