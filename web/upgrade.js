// Upgrades workflows of the separate TPU packs when they are opened; the server does the upgrade.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { text } from "./monitor/format.mjs";
import { forget, notify } from "./monitor/notice.mjs";
import { remember, say, understood } from "./monitor/i18n.mjs";

// Node ids of both packs.
const SHARED = /^(Flux2|CogVideoX|Wan21|Wan22I2V)(TextEncoder|ImageEncoder|TPU\w+)$/;

function kinds(workflow) {
  const graphs = [workflow, ...(workflow?.definitions?.subgraphs ?? [])];
  const nodes = graphs.flatMap((graph) => (Array.isArray(graph?.nodes) ? graph.nodes : Object.values(graph ?? {})));
  return nodes.map((node) => node?.type ?? node?.class_type);
}

// Return the changes as sentences, and the upgraded workflow; no changes if it is up to date.
async function upgraded(workflow) {
  if (!kinds(workflow).some((kind) => SHARED.test(kind))) return { changes: [] };
  try {
    const response = await api.fetchApi("/tpu/upgrade", { method: "POST", body: JSON.stringify(workflow) });
    const answer = await response.json();
    remember(answer.messages);
    if (response.ok) return { ...answer, changes: answer.changes.map(understood) };
    console.warn("comfyui-tpu:", answer.error);
  } catch (error) {
    console.warn("comfyui-tpu: the workflow could not be looked at", error);
  }
  return { changes: [] };
}

// Swap ComfyUI's loaders in the page's workflow for ours, or back; the notice lists those that stay, with the reason.
async function convert(back) {
  forget();
  const workflow = (app.rootGraph ?? app.graph).serialize();
  const request = { method: "POST", body: JSON.stringify({ workflow, back }) };
  let answer;
  try {
    const response = await api.fetchApi("/tpu/convert", request);
    answer = await response.json();
    remember(answer.messages);
    if (!response.ok) return notify([say`The loaders were not swapped: ${understood(text(answer.error))}`]);
  } catch (error) {
    return notify([say`The loaders were not swapped: the server is not reachable (${error}).`]);
  }
  if (!answer.changes.length) return notify([say`This workflow has no loader to swap.`]);
  await app.loadGraphData(answer.workflow, true, true, app.extensionManager?.workflow?.activeWorkflow ?? null);
  const headline = back ? say`Loaders of the TPU and ComfyUI's own:` : say`ComfyUI's own loaders and those of the TPU:`;
  show([headline, ...answer.changes.map(understood)]);
}

const CONVERT = "comfyui-tpu.convert";

// Show the changes, and a button that saves the workflow.
function show(changes) {
  notify(changes, { [say`Save workflow`]: () => app.extensionManager.command.execute("Comfy.SaveWorkflow") });
}

app.registerExtension({
  name: "comfyui-tpu.upgrade",
  commands: [
    { id: CONVERT, label: "Use TPU loaders in this workflow", function: () => convert(false) },
    { id: `${CONVERT}-back`, label: "Use ComfyUI's own loaders again", function: () => convert(true) },
  ],
  menuCommands: [{ path: ["TPU"], commands: [CONVERT, `${CONVERT}-back`] }],
  async setup() {
    // A workflow in API format does not pass through any extension hook.
    const load = app.loadApiJson;
    app.loadApiJson = async function (workflow, ...rest) {
      const { changes, workflow: newer } = await upgraded(workflow);
      forget();
      const loaded = await load.call(this, changes.length ? newer : workflow, ...rest);
      if (changes.length) show(changes);
      return loaded;
    };
  },
  async beforeConfigureGraph(workflow) {
    forget();
    const { changes, workflow: newer } = await upgraded(workflow);
    if (!changes.length) return;
    Object.assign(workflow, newer);
    show(changes);
  },
});
