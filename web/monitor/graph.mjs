// Which model a node of the page's graph runs, and what the server knows of it.

// A node that generates, by its class.
export const RUNS = /TPU(Sampler|Pipeline)$/;
export const BYPASSED = 4; // a node's mode
const MODEL = "TPU_MODEL";
// A chain of LoRAs is followed so far.
export const DEEPEST = 100;

// By the ids that the server knows beforehand: name, title, family, download, unused.
let models = {};

export async function fetchModels(api) {
  try {
    const answer = await api.fetchApi("/tpu/models");
    if (answer.ok) models = await answer.json();
  } catch (error) {
    console.warn("comfyui-tpu: the models could not be fetched; every widget is shown", error);
  }
}

/** What is known of a model's id; undefined for another. */
export const known = (id) => (Object.hasOwn(models, String(id)) ? models[id] : undefined);

export const modelSocket = (node) => node.inputs?.findIndex((input) => input.type === MODEL) ?? -1;
/** Whether a link comes into this input; a slot of -1 is no input. */
export const isLinked = (node, slot) => slot >= 0 && node.isInputConnected(slot);
export const widgetOf = (node, name) => node?.widgets?.find((widget) => widget.name === name);

/** The node that names the model of this one: a loader, or itself; undefined where the page cannot know it. */
function sourceOf(node, depth = 0) {
  if (!node || depth > DEEPEST) return undefined;
  const socket = node.type === "Reroute" ? 0 : modelSocket(node);
  return isLinked(node, socket) ? sourceOf(node.getInputNode(socket), depth + 1) : node;
}

/** The id of the model that a node runs. */
export const modelOf = (node) => widgetOf(sourceOf(node), "model_id")?.value;
