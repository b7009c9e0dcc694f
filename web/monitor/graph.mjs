// Finds the model that a node of the page's graph runs, and the server's entry for it.

// A node that generates, by its class.
export const RUNS = /TPU(Sampler|Pipeline)$/;
export const BYPASSED = 4; // a node's mode
const MODEL = "TPU_MODEL";
// Longest chain of LoRAs that is followed.
export const DEEPEST = 100;

// The server's table of models by id: name, title, family, download, unused.
let models = {};

export async function fetchModels(api) {
  try {
    const answer = await api.fetchApi("/tpu/models");
    if (answer.ok) models = await answer.json();
  } catch (error) {
    console.warn("comfyui-tpu: the models could not be fetched; every widget is shown", error);
  }
}

/** Return the table's entry of a model id; undefined for an unknown one. */
export const known = (id) => (Object.hasOwn(models, String(id)) ? models[id] : undefined);

export const modelSocket = (node) => node.inputs?.findIndex((input) => input.type === MODEL) ?? -1;
/** Return whether this input is linked; a slot of -1 is not an input. */
export const isLinked = (node, slot) => slot >= 0 && node.isInputConnected(slot);
export const widgetOf = (node, name) => node?.widgets?.find((widget) => widget.name === name);

/** Return the node that names this one's model: a loader, or itself; undefined if that is unknown. */
function sourceOf(node, depth = 0) {
  if (!node || depth > DEEPEST) return undefined;
  const socket = node.type === "Reroute" ? 0 : modelSocket(node);
  return isLinked(node, socket) ? sourceOf(node.getInputNode(socket), depth + 1) : node;
}

/** Return the id of the model that a node runs. */
export const modelOf = (node) => widgetOf(sourceOf(node), "model_id")?.value;
