// What the server says of a prompt: in the page's language before the page shows it, with room for it on a node. And what
// it does not say: that a real model runs on a machine without a TPU.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { text } from "./monitor/format.mjs";
import { known, RUNS } from "./monitor/graph.mjs";
import { useMiniatures } from "./monitor/miniature.mjs";
import { notify } from "./monitor/notice.mjs";
import { say, understood } from "./monitor/words.mjs";

const LINE = "$$node-text-preview"; // the page's own widget, below a node's others
const [LINE_PX, FRAME_PX, LETTER_PX, SIGN_PX] = [16, 42, 6.5, 12.5];

const nodeOf = (id) => app.canvas?.graph?.getNodeById(text(id).split(":").pop());
const definition = (type) => type?.nodeData?.python_module;
const isOurs = (node) => definition(node?.constructor) === definition(LiteGraph.registered_node_types.TPUModelLoader);

/** The classic renderer gives such a line room for two rows, whatever it says. */
function makeRoom(node) {
  const line = node?.widgets?.find((widget) => widget.name === LINE);
  if (!line || LiteGraph.vueNodesMode) return;
  const said = text(line.value).replace(/<[^>]*>/g, "");
  const width = [...said].reduce((sum, sign) => sum + (sign > "\u2e80" ? SIGN_PX : LETTER_PX), 0);
  const height = FRAME_PX + LINE_PX * Math.ceil(width / Math.max(80, node.size[0] - 60));
  line.options.getMinHeight = () => height;
  const missing = node.computeSize()[1] - node.size[1];
  if (missing > 0) node.setSize([node.size[0], node.size[1] + missing]);
}

/** Of nodes alone that are ours: the page leaves nothing but a link by which our style sheet could know a text. */
function lineOf(detail) {
  detail.text = understood(text(detail.text));
  const node = nodeOf(detail.nodeId);
  if (!isOurs(node)) return;
  if (!detail.text.includes("<")) detail.text = `<a rel="comfyui-tpu">${detail.text}</a>`;
  setTimeout(() => makeRoom(node));
}

function errorOf(detail) {
  detail.exception_message = understood(text(detail.exception_message));
}

const HEARD = { progress_text: lineOf, execution_error: errorOf };

/** The title of the first model that is no miniature, where a prompt generates. */
function realModel(prompt) {
  const nodes = Object.values(prompt?.output ?? {});
  if (!nodes.some((node) => RUNS.test(node.class_type))) return undefined;
  return nodes.map((node) => node.inputs?.model_id).map(known).find((found) => found && !found.is_miniature)?.title;
}

/** Whether it waits or runs: the other of the two finds no such prompt. */
async function cancel(id) {
  await api.deleteItem("queue", id);
  await api.interrupt(id);
}

async function warn(title, id) {
  const answer = await api.fetchApi("/tpu/stats");
  if (!/^no TPU/i.test(text((await answer.json()).message))) return;
  const lines = [
    say`No TPU in this machine: ${title} runs on its CPU, for hours, and is downloaded first.`,
    say`A built-in miniature of it needs neither.`,
  ];
  notify(lines, { [say`Cancel, and try the miniature`]: () => cancel(id).then(useMiniatures) });
}

app.registerExtension({
  name: "comfyui-tpu.said",
  setup() {
    // Before any listener, and the page's own came first.
    const tell = api.dispatchCustomEvent;
    api.dispatchCustomEvent = function (kind, detail) {
      try {
        if (detail && Object.hasOwn(HEARD, kind)) HEARD[kind](detail);
      } catch (error) {
        console.warn("comfyui-tpu: shown as it was said", error);
      }
      return tell.call(this, kind, detail);
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
        for (const error of nodes.flatMap((node) => node.errors ?? [])) error.details = understood(text(error.details));
        throw refusal;
      }
    };
  },
});
