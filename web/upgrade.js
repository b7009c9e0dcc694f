// Workflows that the separate TPU packs saved are brought to today's nodes as they are opened: the server knows how.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { make } from "./monitor/dom.mjs";
import { say } from "./monitor/words.mjs";

const NOTICE = "comfyui-tpu-upgraded";
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
    if (response.ok) return answer;
    console.warn("comfyui-tpu:", answer.error);
  } catch (error) {
    console.warn("comfyui-tpu: the workflow could not be looked at", error);
  }
  return { changes: [] };
}

// The workflow of the page with loaders of ComfyUI's swapped for ours, or back; its notice says what stays, and why.
async function convert(back) {
  document.getElementById(NOTICE)?.remove();
  const workflow = (app.rootGraph ?? app.graph).serialize();
  const request = { method: "POST", body: JSON.stringify({ workflow, back }) };
  let answer;
  try {
    const response = await api.fetchApi("/tpu/convert", request);
    answer = await response.json();
    if (!response.ok) return show([say`The loaders were not swapped: ${answer.error}`]);
  } catch (error) {
    return show([say`The loaders were not swapped: the server is not reachable (${error}).`]);
  }
  if (!answer.changes.length) return show([say`There is no loader to swap in this workflow.`]);
  await app.loadGraphData(answer.workflow, true, true, app.extensionManager?.workflow?.activeWorkflow ?? null);
  const headline = back ? say`Loaders of the TPU and ComfyUI's own:` : say`ComfyUI's own loaders and those of the TPU:`;
  show([headline, ...answer.changes]);
}

const CONVERT = "comfyui-tpu.convert";

function button(text, onclick) {
  const made = make("button", "", { type: "button" }, text);
  made.onclick = onclick;
  return made;
}

// One notice: what was changed, and a button that saves the workflow as it is now.
function show([headline, ...changes]) {
  const list = make("ul", "", {}, ...changes.map((change) => make("li", "", {}, change)));
  const notice = make("section", "", { id: NOTICE, role: "status" }, make("strong", "", {}, headline), list);
  const close = () => notice.remove();
  const save = () => {
    close();
    app.extensionManager.command.execute("Comfy.SaveWorkflow");
  };
  notice.append(button(say`Save workflow`, save), button(say`Close`, close));
  document.body.append(notice);
}

app.registerExtension({
  name: "comfyui-tpu.upgrade",
  commands: [
    { id: CONVERT, label: "Use TPU loaders in this workflow", function: () => convert(false) },
    { id: `${CONVERT}-back`, label: "Use ComfyUI's own loaders again", function: () => convert(true) },
  ],
  menuCommands: [{ path: ["TPU"], commands: [CONVERT, `${CONVERT}-back`] }],
  async setup() {
    const rules = `#${NOTICE} {
      position: fixed; right: 1rem; bottom: 4rem; z-index: 1000; max-width: 32rem; max-height: 60vh; overflow: auto;
      padding: 1rem; border: 1px solid var(--border-color); border-radius: 0.5rem;
      background: var(--comfy-menu-bg); color: var(--input-text); font-size: 0.875rem;
    }
    #${NOTICE} ul { margin: 0.5rem 0; padding-left: 1.25rem; list-style: disc; }
    #${NOTICE} button {
      margin-right: 0.5rem; padding: 0.25rem 0.75rem; border: 1px solid var(--border-color); border-radius: 0.25rem;
      background: var(--comfy-input-bg); color: var(--input-text); cursor: pointer;
    }`;
    document.head.append(make("style", "", {}, rules));
    // A workflow in API form passes no hook of extensions on its way in.
    const load = app.loadApiJson;
    app.loadApiJson = async function (workflow, ...rest) {
      const { changes, workflow: newer } = await upgraded(workflow);
      document.getElementById(NOTICE)?.remove();
      const loaded = await load.call(this, changes.length ? newer : workflow, ...rest);
      if (changes.length) show(changes);
      return loaded;
    };
  },
  async beforeConfigureGraph(workflow) {
    document.getElementById(NOTICE)?.remove();
    const { changes, workflow: newer } = await upgraded(workflow);
    if (!changes.length) return;
    Object.assign(workflow, newer);
    show(changes);
  },
});
