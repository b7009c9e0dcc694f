// Replaces the models of the page's workflow by built-in tiny models, with the changes that the server returns.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { text } from "./format.mjs";
import { BYPASSED, isLinked, widgetOf } from "./graph.mjs";
import { notify } from "./notice.mjs";
import { remember, say, understood } from "./i18n.mjs";

/** The node that a prompt calls so, and of which graph; "7:2" is node 2 of the subgraph that node 7 is. */
function placeOf(id) {
  const [last, ...owners] = id.split(":").reverse();
  const root = app.rootGraph ?? app.graph;
  const graph = owners.reduceRight((outer, owner) => outer?.getNodeById(owner)?.subgraph, root);
  return { node: graph?.getNodeById(last), graph, owner: owners.reverse().join(":") };
}

function set(id, name, value) {
  const { node, graph, owner } = placeOf(id);
  // A link to the widget would replace the value.
  const slot = node?.inputs?.findIndex((input) => input.name === name) ?? -1;
  if (isLinked(node, slot)) {
    const link = node.getInputLink(slot);
    const outer = graph.inputNode?.id === link?.origin_id ? graph.inputs[link.origin_slot] : undefined;
    if (outer) return set(owner, outer.name, value); // the subgraph shows it outside
    node.disconnectInput(slot);
  }
  const widget = widgetOf(node, name);
  if (!widget) return;
  widget.value = value;
  widget.callback?.(value);
}

function apply({ values, without }) {
  for (const { node } of without.map(placeOf)) if (node) node.mode = BYPASSED;
  for (const [id, inputs] of Object.entries(values)) {
    for (const [name, value] of Object.entries(inputs)) set(id, name, value);
  }
  app.canvas.setDirty(true, true);
}

export async function useMiniatures() {
  let found;
  try {
    const { output } = await app.graphToPrompt();
    const response = await api.fetchApi("/tpu/miniature", { method: "POST", body: JSON.stringify(output) });
    found = await response.json();
    remember(found.messages);
    if (!response.ok) return notify([say`The workflow was not changed: ${understood(text(found.error))}`]);
  } catch (error) {
    return notify([say`The workflow was not changed: the server is not reachable (${error}).`]);
  }
  const all = Object.values(found.values);
  if (!all.length) return notify([say`This workflow has no model that a tiny model can replace.`]);
  apply(found);
  const prompts = new Set(all.map(({ prompt }) => prompt).filter(Boolean));
  return notify([
    say`This workflow now uses a built-in tiny model and matching sizes.`,
    ...[...prompts].map((prompt) => say`Its prompt is "${prompt}".`),
    ...(found.without.length ? [say`LoRAs are bypassed: they only fit the real model's sizes.`] : []),
    say`Open the template again for the real model, or undo.`,
  ]);
}
