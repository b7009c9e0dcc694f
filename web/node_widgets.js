// Hides the widgets that have no effect for a node's model, with their values, in both of the page's renderers. While a
// model is connected, these include the node's own `model_id` and `precision`. Nodes of the classic renderer also hide
// advanced widgets, as Vue nodes do themselves, unless they are shown on purpose or do not have the default value.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { fetchModels, isLinked, known, modelOf, modelSocket, widgetOf } from "./monitor/graph.mjs";
import { say } from "./monitor/i18n.mjs";

const REPLACED = ["model_id", "precision"];

const [ALWAYS, VUE] = ["Comfy.Node.AlwaysShowAdvancedWidgets", "Comfy.VueNodes.Enabled"];

/** Return the server's declaration of a node's inputs: options by name. */
function declared(node) {
  const { required, optional } = node.constructor.nodeData?.input ?? {};
  return Object.fromEntries(Object.entries({ ...required, ...optional }).map(([name, [, options]]) => [name, options ?? {}]));
}

function unusedBy(node) {
  if (modelSocket(node) < 0) return new Set();
  const found = known(modelOf(node));
  const unused = found && node.comfyClass?.startsWith(found.family) ? found.unused : [];
  return new Set(isLinked(node, modelSocket(node)) ? [...unused, ...REPLACED] : unused);
}

const SOURCES = new Set(["TPUModelLoader", "TPURemote", "TPULoraLoader"]);
const isOurs = (node) => modelSocket(node) >= 0 || SOURCES.has(node.comfyClass);

function hideUnused(node, isVue = LiteGraph.vueNodesMode) {
  if (!isOurs(node) || !node.widgets) return;
  const [unused, options] = [unusedBy(node), declared(node)];
  const isShown = node.showAdvanced || app.extensionManager.setting.get(ALWAYS);
  // A linked widget stays visible: the user has linked it on purpose.
  const isGiven = (name) => isLinked(node, node.inputs.findIndex((input) => input.widget?.name === name));
  const marks = () => node.widgets.map(({ options: marked }) => `${marked.hidden ?? false} ${marked.advanced ?? false}`).join();
  const before = marks();
  for (const widget of node.widgets) {
    const { advanced, default: first } = options[widget.name] ?? {};
    const isUnused = unused.has(widget.name) && !isGiven(widget.name);
    const isAdvanced = Boolean(advanced) && !isUnused;
    const isFolded = isAdvanced && !isShown && widget.value === first && !isGiven(widget.name);
    // Read by Vue nodes and the side panel. Since frontend 1.58 the classic renderer also follows these marks; `widget`
    // takes precedence.
    widget.options.hidden = isUnused;
    if (advanced) widget.options.advanced = isAdvanced; // a node without such widgets has no button in Vue
    widget.hidden = isUnused || (isFolded && !isVue);
    widget.advanced = isFolded || (isAdvanced && Boolean(node.showAdvanced)); // by this mark its menu has "Show Advanced"
  }
  if (marks() !== before) {
    // Vue nodes of older frontends update only if the list of widgets changes, the button "Show advanced inputs" too.
    const all = [...node.widgets];
    node.widgets = [];
    node.widgets = all;
  }
  node.setDirtyCanvas?.(true, true);
}

/** Resize the node by the height of changed widgets when the user changes it; a workflow's own sizes stay. */
function fit(node, first = () => {}) {
  const before = node.computeSize()[1];
  first();
  hideUnused(node);
  const change = node.computeSize()[1] - before;
  if (change) node.setSize([node.size[0], node.size[1] + change]);
}

function everywhere(change) {
  if (app.configuringGraph) return;
  for (const node of app.canvas?.graph?.nodes ?? []) change(node);
}

app.registerExtension({
  name: "comfyui-tpu.models",
  init: () => fetchModels(api),
  nodeCreated(node) {
    if (!isOurs(node)) return;
    const { onConnectionsChange: connected, toggleAdvanced: toggled, onAfterGraphConfigured: configured } = node;
    // Before the page computes the sizes of an opened workflow's nodes.
    node.onAfterGraphConfigured = function () {
      configured?.call(this);
      hideUnused(node);
    };
    node.toggleAdvanced = () => fit(node, () => toggled?.call(node));
    node.onConnectionsChange = function (...change) {
      connected?.apply(this, change);
      everywhere(fit);
    };
    const widget = widgetOf(node, "model_id");
    if (widget) {
      const called = widget.callback;
      widget.callback = function (...change) {
        const result = called?.apply(this, change);
        everywhere(fit);
        return result;
      };
    }
    fit(node);
  },
  setup() {
    const hear = (id, heard) => app.ui.settings.addEventListener(`${id}.change`, heard);
    hear(ALWAYS, () => setTimeout(() => everywhere(fit))); // the event comes before the value
    // The classic renderer computes the height from visible widgets.
    hear(VUE, ({ detail }) => {
      const root = app.rootGraph ?? app.graph;
      for (const { nodes } of [root, ...(root.subgraphs?.values() ?? [])]) for (const node of nodes) hideUnused(node, detail.value);
    });
  },
});

// Labels in a node's prompt boxes: which prompt it is, and whether it has the authors' default negative prompt.
const LABEL_PX = 10;

function label(node) {
  const boxes = node.widgets?.filter((widget) => widget.element?.tagName === "TEXTAREA") ?? [];
  if (!boxes.length || modelSocket(node) < 0) return;
  const first = declared(node).negative_prompt?.default;
  for (const box of boxes) {
    box.options.margin = LABEL_PX + 4;
    if (box.name !== "negative_prompt" || !first) continue;
    const name = box.label ?? box.name;
    const called = box.callback;
    const relabel = () => (box.label = box.value === first ? say`${name}: the authors' default` : name);
    box.callback = function (...change) {
      relabel();
      return called?.apply(this, change);
    };
    relabel();
  }
  const drawn = node.onDrawForeground;
  node.onDrawForeground = function (context, ...rest) {
    drawn?.call(this, context, ...rest);
    if (this.flags.collapsed) return;
    context.save();
    context.font = `${LABEL_PX}px sans-serif`;
    context.textAlign = "left";
    context.fillStyle = LiteGraph.WIDGET_SECONDARY_TEXT_COLOR;
    for (const box of boxes) {
      if (!box.hidden) context.fillText(box.label ?? box.name, box.margin, box.y + LABEL_PX);
    }
    context.restore();
  };
}

app.registerExtension({ name: "comfyui-tpu.prompts", nodeCreated: label });

// Schedulers have diffusers' names in workflows; the list also shows the names of ComfyUI's samplers.
const CORE_NAMES = {
  FlowMatchEulerDiscreteScheduler: "euler",
  UniPCMultistepScheduler: "uni_pc_bh2",
  DPMSolverMultistepScheduler: "dpmpp_2m",
  FlowMatchLCMScheduler: "lcm",
};

app.registerExtension({
  name: "comfyui-tpu.schedulers",
  nodeCreated(node) {
    const widget = isOurs(node) && widgetOf(node, "scheduler");
    if (!widget) return;
    widget.options.getOptionLabel = (name) => (Object.hasOwn(CORE_NAMES, name) ? `${CORE_NAMES[name]} (${name})` : String(name ?? ""));
  },
});

// TPU Model Loader's list of models also accepts a Hub id, a path, or several files joined with " + ".
const OTHER = "another: type an id, a path or files…";

async function ask(node, widget, before) {
  const message = say`A Hugging Face repository, a folder, or files joined with " + "`;
  const dialog = app.extensionManager?.dialog;
  const typed = dialog
    ? await dialog.prompt({ title: say`Model`, message, defaultValue: before })
    : window.prompt(message, before);
  const chosen = typed?.trim() || before;
  if (!widget.options.values.includes(chosen)) widget.options.values.push(chosen);
  widget.value = chosen;
  everywhere(fit);
  node.setDirtyCanvas?.(true, true);
}

/** Return an id with its download size, as the list shows it. */
function sized(id) {
  const { download, is_miniature: isMiniature } = known(id) ?? {};
  if (isMiniature) return say`${id} (built-in tiny model)`;
  return download ? say`${id} (to download; as files ${download})` : String(id ?? "");
}

function letOthersBeTyped(node) {
  const widget = node.widgets?.find((each) => each.name === "model_id");
  if (!widget || !Array.isArray(widget.options?.values)) return;
  // ComfyUI shares the list with other nodes of the type.
  widget.options.values = [...widget.options.values.filter((value) => value !== OTHER), OTHER];
  widget.options.getOptionLabel = (id) => (id === OTHER ? say`another: type an id, a path or files…` : sized(id));
  let before = widget.value;
  const called = widget.callback;
  widget.callback = function (value, ...rest) {
    if (value === OTHER) {
      widget.value = before;
      ask(node, widget, before).then(() => (before = widget.value));
      return undefined;
    }
    before = value;
    return called?.call(this, value, ...rest);
  };
}

app.registerExtension({
  name: "comfyui-tpu.model-ids",
  nodeCreated(node) {
    if (node.comfyClass === "TPUModelLoader") letOthersBeTyped(node);
  },
});
