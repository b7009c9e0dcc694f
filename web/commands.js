// Commands with shortcuts, also in the menu under TPU: free the memory, compile what the workflow needs, plan it for a TPU,
// try it without its models, show the tab. Long commands are queued as prompts, so that they show progress and can be cancelled.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { text } from "./monitor/format.mjs";
import { DEEPEST, known, RUNS } from "./monitor/graph.mjs";
import { useMiniatures } from "./monitor/miniature.mjs";
import { notify } from "./monitor/notice.mjs";
import { say, understood } from "./monitor/i18n.mjs";

const SIZES = ["height", "width", "num_frames", "num_inference_steps", "guidance_scale"];

/** Return model and sizes of each sampler and pipeline that Run would queue; a size of 0 is the encoded image's. */
async function generations() {
  const { output } = await app.graphToPrompt(); // subgraphs are resolved there, and what is muted or bypassed is left out
  const behind = (node, name) => output[node.inputs[name]?.[0]];
  return Object.values(output).filter((node) => RUNS.test(node.class_type)).map((node) => {
    let source = node;
    for (let depth = 0; depth < DEEPEST && behind(source, "model"); depth += 1) source = behind(source, "model");
    const picture = behind(node, "condition");
    const sizes = SIZES.map((name) => [name, node.inputs[name] || picture?.inputs[name]]);
    return { model_id: source.inputs.model_id, sizes: Object.fromEntries(sizes.filter(([, size]) => typeof size === "number")) };
  });
}

/** Queue a prompt, and show the text of its Preview as Text. */
async function report(headline, prompt) {
  if (!Object.keys(prompt).length) return notify([say`This workflow has no sampler of a known model.`]);
  const lines = [];
  let id;
  const take = ({ type, detail }) => {
    if (detail.prompt_id !== id) return;
    if (type !== "executed") {
      forgetAll();
      if (detail.exception_message) notify([headline, ...lines, detail.exception_message]);
    } else if (detail.output?.text) {
      lines.push(...detail.output.text.flatMap((said) => understood(text(said)).split("\n")));
      notify([headline, ...lines]);
    }
  };
  // A short prompt ends before the page has its id.
  const early = [];
  const hear = (event) => (id === undefined ? early.push(event) : take(event));
  const forgetAll = () => EVENTS.forEach((name) => api.removeEventListener(name, hear));
  for (const name of EVENTS) api.addEventListener(name, hear);
  try {
    id = (await api.queuePrompt(0, { output: prompt, workflow: (app.rootGraph ?? app.graph).serialize() })).prompt_id;
    notify([headline, say`Queued.`]);
    early.splice(0).forEach(take);
  } catch (error) {
    forgetAll();
    notify([headline, understood(text(error.response?.error?.message ?? error.message))]);
  }
}

const EVENTS = ["executed", "execution_success", "execution_error", "execution_interrupted"];

const isOutput = (type) => LiteGraph.registered_node_types[type]?.nodeData?.output_node;

async function warmUp() {
  const { output } = await app.graphToPrompt();
  const given = Object.entries(output).filter(([, { class_type }]) => !isOutput(class_type));
  if (!given.some(([, { class_type }]) => RUNS.test(class_type))) return report("", {});
  // Without a model it compiles for all samplers of its prompt. No output needs them, so nothing else runs.
  const warmup = { class_type: "TPUWarmup", inputs: {} };
  const shown = { class_type: "PreviewAny", inputs: { source: ["warmup", 0] } };
  return report(say`Programs of this workflow:`, { ...Object.fromEntries(given), warmup, shown });
}

async function plan() {
  const found = (await generations()).filter(({ model_id }) => known(model_id));
  if (!found.length) return report("", {});
  const message = say`For which TPU? Generation and chips, such as v6e:2x4 or v5e:1x1. A plan takes minutes.`;
  const topology = await app.extensionManager.dialog.prompt({ title: say`Plan`, message, defaultValue: "v6e:2x4" });
  if (!topology?.trim()) return undefined;
  const prompt = {};
  found.forEach(({ model_id, sizes }, index) => {
    const inputs = { model_name: known(model_id).name, topology: topology.trim(), ...sizes };
    prompt[`plan-${index}`] = { class_type: "TPUPlan", inputs };
    prompt[`report-${index}`] = { class_type: "PreviewAny", inputs: { source: [`plan-${index}`, 0] } };
  });
  return report(say`Predicted by the compiler, not measured:`, prompt);
}

async function free() {
  try {
    const answer = await api.fetchApi("/tpu/free", { method: "POST" });
    notify([answer.ok ? say`Memory will be freed when the current prompt finishes.` : say`Not freed: the server answered ${answer.status}.`]);
  } catch {
    notify([say`Not freed: the server is not reachable.`]);
  }
}

/** Show or hide the tab, and move the keyboard focus into it. */
async function showTab() {
  await app.extensionManager.command.execute("Workspace.ToggleSidebarTab.comfyui-tpu");
  requestAnimationFrame(() => document.querySelector(".comfyui-tpu-panel")?.focus());
}

const COMMANDS = [
  ["comfyui-tpu.free", "Free the TPU's memory", "f", free],
  ["comfyui-tpu.warmup", "Compile this workflow's programs ahead", "w", warmUp],
  ["comfyui-tpu.plan", "Plan this workflow for a TPU", "p", plan],
  ["comfyui-tpu.miniature", "Try this workflow on its tiny model", "y", useMiniatures],
  ["comfyui-tpu.tab", "Show or hide the TPU tab", "t", showTab],
];

app.registerExtension({
  name: "comfyui-tpu.commands",
  commands: COMMANDS.map(([id, label, , run]) => ({ id, label, function: run })),
  keybindings: COMMANDS.map(([commandId, , key]) => ({ commandId, combo: { key, alt: true, shift: true } })),
  menuCommands: [{ path: ["TPU"], commands: COMMANDS.map(([id]) => id) }],
});
