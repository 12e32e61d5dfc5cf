// The settings dialog: system prompt, sampling, speculation, API key. Knows its fields; what they cause is the caller's.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

// The part of a chat request that the settings decide.
export function requestOptions(settings) {
  const request = {};
  for (const name of NUMBERS) if (typeof settings[name] === "number") request[name] = settings[name];
  if (settings.pace) request.pace = true;
  request.speculation = { mode: settings.mode, rule: settings.rule };
  if (typeof settings.max_nodes === "number") request.speculation.max_nodes = settings.max_nodes;
  return request;
}

export class SettingsDialog {
  // `saved` is called with whether the API key has changed.
  constructor(dialog, store, saved) {
    this.dialog = dialog;
    this.store = store;
    this._saved = saved;
    dialog.querySelector("#settings-cancel").addEventListener("click", () => dialog.close("cancel"));
    dialog.addEventListener("close", () => dialog.returnValue === "save" && this._take());
  }

  _field(name) {
    return this.dialog.querySelector(`[name="${name}"]`);
  }

  open(focus) {
    const { settings, key } = this.store;
    for (const name of [...NUMBERS, "max_nodes", "system"]) this._field(name).value = settings[name] ?? "";
    for (const name of ["mode", "rule"]) this._field(name).value = settings[name];
    this._field("pace").checked = settings.pace === true;
    this._field("key").value = key;
    this.dialog.returnValue = "";
    if (!this.dialog.open) this.dialog.showModal();
    if (focus) this._field(focus).focus();
  }

  _take() {
    const { settings } = this.store;
    for (const name of [...NUMBERS, "max_nodes"]) {
      const value = this._field(name).valueAsNumber;
      if (Number.isNaN(value)) delete settings[name];
      else settings[name] = value;
    }
    for (const name of ["system", "mode", "rule"]) settings[name] = this._field(name).value;
    settings.pace = this._field("pace").checked;
    const key = this._field("key").value.trim();
    const changed = key !== this.store.key;
    this.store.key = key;
    this.store.saveSettings();
    this._saved(changed);
  }
}
