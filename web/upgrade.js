// Upgrades workflows of the separate TPU packs when they are opened, and swaps ComfyUI's own loaders for those of the TPU, on
// command or when the user accepts an offer. The server makes the changes.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { text } from "./monitor/format.mjs";
import { forget, isShown, notify } from "./monitor/notice.mjs";
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
  if (back) ownLoaders.add(currentId());
  await app.loadGraphData(answer.workflow, true, true, app.extensionManager?.workflow?.activeWorkflow ?? null);
  const headline = back ? say`Loaders of the TPU and ComfyUI's own:` : say`ComfyUI's own loaders and those of the TPU:`;
  show([headline, ...answer.changes.map(understood)]);
}

const CONVERT = "comfyui-tpu.convert";
// The user's answer to the offer for workflows that are opened later.
const OFFER = "TPU.Loaders.Offer";
const OFFER_ASK = "ask once for each workflow";
const OFFER_ALWAYS = "always use TPU loaders";
const OFFER_NEVER = "never offer";
// Key of the browser's storage for the ids of workflows whose offer was answered, and their limit.
const ANSWERED = "comfyui-tpu.answered";
const MOST_ANSWERED = 500;
const CORE_LOADERS = new Set(["UNETLoader", "CheckpointLoaderSimple"]);

const settings = () => app.extensionManager?.setting;

// Ids of workflows whose own loaders were chosen again.
const ownLoaders = new Set();

const currentId = () => (app.rootGraph ?? app.graph).id;

function answeredIds() {
  try {
    const kept = JSON.parse(localStorage.getItem(ANSWERED));
    return Array.isArray(kept) ? kept : [];
  } catch {
    return [];
  }
}

function markAnswered(id) {
  const ids = [...answeredIds().filter((other) => other !== id), id];
  localStorage.setItem(ANSWERED, JSON.stringify(ids.slice(-MOST_ANSWERED)));
}

/** Return the sentences of the server's offer for the page's workflow; empty if nothing is to be offered. */
async function fetchOffer() {
  const { output } = await app.graphToPrompt();
  const stats = await (await api.fetchApi("/tpu/stats")).json();
  if (/^no TPU/i.test(text(stats.message))) return {};
  const response = await api.fetchApi("/tpu/offer", { method: "POST", body: JSON.stringify(output) });
  const answer = await response.json();
  remember(answer.messages);
  return response.ok ? answer : {};
}

/** Offer the TPU's loaders once for a workflow with ComfyUI's own, or swap them if the user always wants that. */
async function offer() {
  const [id, choice] = [currentId(), settings()?.get(OFFER) ?? OFFER_ASK];
  if (choice === OFFER_NEVER || (choice === OFFER_ASK && answeredIds().includes(id)) || ownLoaders.has(id) || isShown()) return;
  const { changes = [], programs = [] } = await fetchOffer();
  if (!changes.length || currentId() !== id || isShown()) return;
  markAnswered(id);
  if (choice === OFFER_ALWAYS) return void (await convert(false));
  const lines = [...changes, ...(programs.length ? [say`Programs that are compiled once for these sizes:`, ...programs] : [])];
  const choose = (value) => settings()?.set(OFFER, value);
  notify([say`This workflow can run on the TPU with other loaders:`, ...lines.map(understood)], {
    [say`Use TPU loaders`]: () => convert(false),
    [say`Always`]: () => Promise.all([choose(OFFER_ALWAYS), convert(false)]),
    [say`Never offer`]: () => choose(OFFER_NEVER),
  });
}

/** Return whether the page's workflow has one of ComfyUI's own loaders of a denoiser, also in subgraphs. */
function hasCoreLoader() {
  const serialized = (app.rootGraph ?? app.graph)?.serialize?.();
  return kinds(serialized).some((kind) => CORE_LOADERS.has(kind));
}

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
  settings: [
    {
      id: OFFER,
      category: ["TPU", "Workflows", "Offer"],
      name: "TPU loaders for workflows with ComfyUI's own",
      type: "combo",
      options: [OFFER_ASK, OFFER_ALWAYS, OFFER_NEVER],
      defaultValue: OFFER_ASK,
    },
  ],
  afterConfigureGraph() {
    if (!hasCoreLoader()) return;
    // The page finishes opening the workflow first.
    setTimeout(() => offer().catch((error) => console.warn("comfyui-tpu: no offer was made", error)));
  },
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
