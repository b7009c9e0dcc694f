// Workflows that the separate TPU packs saved are brought to today's nodes as they are opened: the server knows how.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { text } from "./monitor/format.mjs";
import { forget, notify } from "./monitor/notice.mjs";
import { say, understood } from "./monitor/words.mjs";

// Node ids that both have.
const SHARED = /^(Flux2|CogVideoX|Wan21|Wan22I2V)(TextEncoder|ImageEncoder|TPU\w+)$/;

function kinds(workflow) {
  const graphs = [workflow, ...(workflow?.definitions?.subgraphs ?? [])];
  const nodes = graphs.flatMap((graph) => (Array.isArray(graph?.nodes) ? graph.nodes : Object.values(graph ?? {})));
  return nodes.map((node) => node?.type ?? node?.class_type);
}

// What was changed, sentence by sentence, and the workflow as it is then; no changes for one that needs none.
async function upgraded(workflow) {
  if (!kinds(workflow).some((kind) => SHARED.test(kind))) return { changes: [] };
  try {
    const response = await api.fetchApi("/tpu/upgrade", { method: "POST", body: JSON.stringify(workflow) });
    const answer = await response.json();
    if (response.ok) return { ...answer, changes: answer.changes.map(understood) };
    console.warn("comfyui-tpu:", answer.error);
  } catch (error) {
    console.warn("comfyui-tpu: the workflow could not be looked at", error);
  }
  return { changes: [] };
}

// The workflow of the page with loaders of ComfyUI's swapped for ours, or back; its notice says what stays, and why.
async function convert(back) {
  forget();
  const workflow = (app.rootGraph ?? app.graph).serialize();
  const request = { method: "POST", body: JSON.stringify({ workflow, back }) };
  let answer;
  try {
    const response = await api.fetchApi("/tpu/convert", request);
    answer = await response.json();
    if (!response.ok) return notify([say`The loaders were not swapped: ${understood(text(answer.error))}`]);
  } catch (error) {
    return notify([say`The loaders were not swapped: the server is not reachable (${error}).`]);
  }
  if (!answer.changes.length) return notify([say`There is no loader to swap in this workflow.`]);
  await app.loadGraphData(answer.workflow, true, true, app.extensionManager?.workflow?.activeWorkflow ?? null);
  const headline = back ? say`Loaders of the TPU and ComfyUI's own:` : say`ComfyUI's own loaders and those of the TPU:`;
  show([headline, ...answer.changes.map(understood)]);
}

const CONVERT = "comfyui-tpu.convert";

// What was changed, and a button that saves the workflow as it is now.
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
    // A workflow in API form passes no hook of extensions on its way in.
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
