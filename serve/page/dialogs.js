// The two dialogs: a conversation's settings, and the API key.

import { titleOf } from "./conversation.js";
import { byId } from "./dom.js";

/** Ask for a conversation's title, system prompt and temperature: `save(changes)`; `exportIt()` writes a file. */
export function openSettings(conversation, save, exportIt) {
  const dialog = byId("settings-dialog");
  const temperature = byId("settings-temperature");
  byId("settings-title").value = conversation.title;
  byId("settings-title").placeholder = titleOf(conversation);
  byId("settings-system").value = conversation.system;
  temperature.value = conversation.temperature ?? "";
  dialog.querySelector("form").onsubmit = (event) => {
    event.preventDefault();
    save({
      title: byId("settings-title").value.trim(),
      system: byId("settings-system").value,
      temperature: temperature.value === "" ? null : temperature.valueAsNumber,
    });
    dialog.close();
  };
  byId("settings-cancel").onclick = () => dialog.close();
  byId("settings-export").onclick = exportIt;
  dialog.showModal();
}

/** Ask for the API key; `use(key)` gets it. `error`: why the last one did not do. */
export function openKey(error, use) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("key-error").textContent = error ?? "";
  byId("key-error").hidden = !error;
  dialog.querySelector("form").onsubmit = (event) => {
    event.preventDefault();
    const key = field.value.trim();
    field.value = "";
    dialog.close();
    use(key);
  };
  byId("key-cancel").onclick = () => dialog.close();
  if (!dialog.open) dialog.showModal();
}
