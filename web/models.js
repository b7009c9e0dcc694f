// While a model is connected to a node, its own `model_id` and `precision` do nothing: they are dimmed and not editable.

import { app } from "../../scripts/app.js";

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
