// Translates the server's messages about a prompt before the page shows them, and makes space for them on a node. Also warns
// if a real model runs on a machine without a TPU.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { text } from "./monitor/format.mjs";
import { known, RUNS, widgetOf } from "./monitor/graph.mjs";
import { useMiniatures } from "./monitor/miniature.mjs";
import { notify } from "./monitor/notice.mjs";
import { remember, say, understood } from "./monitor/i18n.mjs";

const LINE = "$$node-text-preview"; // the page's own widget, below a node's others
const [LINE_PX, FRAME_PX, LETTER_PX, SIGN_PX] = [16, 42, 6.5, 12.5];

const nodeOf = (id) => app.canvas?.graph?.getNodeById(text(id).split(":").pop());
const definition = (type) => type?.nodeData?.python_module;
const isOurs = (node) => definition(node?.constructor) === definition(LiteGraph.registered_node_types.TPUModelLoader);

let tell; // the page's own way of an event to its listeners
const kept = new WeakSet();

/** Frontends since 1.58 remove a node's line when its job ends; keep the duration visible. */
function keep(node) {
  const line = widgetOf(node, LINE);
  if (!line || kept.has(line)) return;
  kept.add(line);
  const removed = line.onRemove;
  line.onRemove = function (...rest) {
    const said = text(line.value);
    removed?.apply(this, rest);
    queueMicrotask(() => {
      if (nodeOf(node.id) !== node || widgetOf(node, LINE)) return; // the node itself is gone, or says something new
      tell.call(api, "progress_text", { nodeId: node.id, text: said });
      settle(node);
    });
  };
}

/** Resize the line: the classic renderer always gives it two rows. */
function makeRoom(node) {
  const line = widgetOf(node, LINE);
  if (!line || LiteGraph.vueNodesMode) return;
  const width = [...text(line.value)].reduce((sum, sign) => sum + (sign > "\u2e80" ? SIGN_PX : LETTER_PX), 0);
  const height = FRAME_PX + LINE_PX * Math.ceil(width / Math.max(80, node.size[0] - 60));
  line.options.getMinHeight = () => height;
  const missing = node.computeSize()[1] - node.size[1];
  if (missing > 0) node.setSize([node.size[0], node.size[1] + missing]);
}

/** Add the class of our style sheet before the page draws the line. */
function settle(node) {
  const line = widgetOf(node, LINE);
  if (line) line.props = { ...line.props, class: "comfyui-tpu-line" };
  keep(node);
  makeRoom(node);
}

function lineOf(detail) {
  detail.text = understood(text(detail.text));
}

/** Translate messages of our nodes only. */
function settleLine({ nodeId }) {
  const node = nodeOf(nodeId);
  if (isOurs(node)) settle(node);
}

function errorOf(detail) {
  detail.exception_message = understood(text(detail.exception_message));
}

const HEARD = { progress_text: lineOf, execution_error: errorOf };
const SHOWN = { progress_text: settleLine };

function change(changes, kind, detail) {
  try {
    if (detail && Object.hasOwn(changes, kind)) changes[kind](detail);
  } catch (error) {
    console.warn("comfyui-tpu: shown as it was said", error);
  }
}

/** Return the title of the first model that is not a tiny one, if the prompt generates. */
function realModel(prompt) {
  const nodes = Object.values(prompt?.output ?? {});
  if (!nodes.some((node) => RUNS.test(node.class_type))) return undefined;
  return nodes.map((node) => node.inputs?.model_id).map(known).find((found) => found && !found.is_miniature)?.title;
}

/** Cancel a prompt, waiting or running: the call for the other state has no effect. */
async function cancel(id) {
  await api.deleteItem("queue", id);
  await api.interrupt(id);
}

async function warn(title, id) {
  const answer = await api.fetchApi("/tpu/stats");
  if (!/^no TPU/i.test(text((await answer.json()).message))) return;
  const lines = [
    say`This machine has no TPU: ${title} will be downloaded and then run on the CPU, for hours.`,
    say`A built-in tiny model needs neither.`,
  ];
  notify(lines, { [say`Cancel and try the tiny model`]: () => cancel(id).then(useMiniatures) });
}

app.registerExtension({
  name: "comfyui-tpu.said",
  setup() {
    api.addEventListener("comfyui-tpu.messages", ({ detail }) => remember(detail));
    // Before all listeners, the page's own included.
    tell = api.dispatchCustomEvent;
    api.dispatchCustomEvent = function (kind, detail) {
      change(HEARD, kind, detail);
      const told = tell.call(this, kind, detail);
      change(SHOWN, kind, detail);
      return told;
    };
    const queue = api.queuePrompt;
    api.queuePrompt = async function (number, prompt, ...rest) {
      try {
        const answer = await queue.call(this, number, prompt, ...rest);
        const title = realModel(prompt);
        if (title) warn(title, answer.prompt_id).catch((error) => console.warn("comfyui-tpu: the machine is not known", error));
        return answer;
      } catch (refusal) {
        const nodes = Object.values(refusal.response?.node_errors ?? {});
        for (const error of nodes.flatMap((node) => node.errors ?? [])) {
          remember(error.extra_info?.messages);
          error.details = understood(text(error.details));
        }
        throw refusal;
      }
    };
  },
});
