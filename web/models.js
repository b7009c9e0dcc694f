// While a model is connected to a node, its own `model_id` and `precision` do nothing: they are dimmed and not editable.

import { app } from "../../scripts/app.js";
import { say } from "./monitor/words.mjs";

const REPLACED = new Set(["model_id", "precision"]);

function dimReplaced(node) {
  const socket = node.inputs?.find((input) => input.type === "TPU_MODEL");
  if (!socket) return;
  for (const widget of node.widgets ?? []) {
    if (REPLACED.has(widget.name)) widget.disabled = socket.link != null;
  }
}

app.registerExtension({
  name: "comfyui-tpu.models",
  nodeCreated(node) {
    if (!node.inputs?.some((input) => input.type === "TPU_MODEL")) return;
    const changed = node.onConnectionsChange;
    node.onConnectionsChange = function (...change) {
      changed?.apply(this, change);
      dimReplaced(this);
    };
  },
});

// TPU Model Loader's list of models takes others too: an id of the Hub, a path, several files joined with " + ".
const OTHER = "another: type an id, a path or files…";

async function ask(node, widget, before) {
  const message = say`A Hugging Face repository, a folder, or files joined with " + "`;
  const dialog = app.extensionManager?.dialog;
  const typed = dialog
    ? await dialog.prompt({ title: say`Model`, message, defaultValue: before })
    : window.prompt(message, before);
  const chosen = typed?.trim() || before;
  if (!widget.options.values.includes(chosen)) widget.options.values.push(chosen);
  widget.value = chosen;
  node.setDirtyCanvas?.(true, true);
}

function letOthersBeTyped(node) {
  const widget = node.widgets?.find((each) => each.name === "model_id");
  if (!widget || !Array.isArray(widget.options?.values)) return;
  // ComfyUI shares the list with other nodes of the kind.
  widget.options.values = [...widget.options.values.filter((value) => value !== OTHER), OTHER];
  let before = widget.value;
  const called = widget.callback;
  widget.callback = function (value, ...rest) {
    if (value === OTHER) {
      widget.value = before;
      ask(node, widget, before).then(() => (before = widget.value));
      return undefined;
    }
    before = value;
    return called?.call(this, value, ...rest);
  };
}

app.registerExtension({
  name: "comfyui-tpu.model-ids",
  nodeCreated(node) {
    if (node.comfyClass === "TPUModelLoader") letOthersBeTyped(node);
  },
});
