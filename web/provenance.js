// Provenance of an image or video that is dropped on the page: model, quality, chips, seconds. ComfyUI's page reads the
// workflow from the file, in which the server has recorded them. They are shown and removed, because the workflow's next
// run is a different one.

import { app } from "../../scripts/app.js";
import { isShown, notify } from "./monitor/notice.mjs";
import { list, seconds, text } from "./monitor/format.mjs";
import { stageOf } from "./monitor/stages.mjs";
import { say } from "./monitor/i18n.mjs";

const KEY = "comfyui-tpu";
// Limits, because the file is untrusted.
const MOST_LINES = 32;
const LONGEST = 80;

let last = [];

function taken(holder) {
  const found = holder !== null && typeof holder === "object" ? holder[KEY] : undefined;
  if (found !== undefined) delete holder[KEY];
  return found;
}

function lines(notes) {
  const short = (value) => text(value).slice(0, LONGEST);
  return list(notes).slice(0, MOST_LINES).map((note) => {
    const facts = [note.model, note.quality, note.precision, note.chips].map(short).filter(Boolean);
    return `${stageOf(short(note.stage))}: ${[...facts, seconds(note.seconds)].join(", ")}`;
  });
}

function show() {
  if (!last.length) return notify([say`Drop an image or video generated on a TPU here to see how it was made.`]);
  return notify([say`How this file was made:`, ...last]);
}

/** Return the nodes' notes in the file's order; a notice about something else stays. */
function remember(perNode) {
  last = lines(list(perNode).flat());
  if (last.length && !isShown()) show();
}

let opened = null;

app.registerExtension({
  name: "comfyui-tpu.ran",
  commands: [{ id: "comfyui-tpu.ran", label: "Show what ran for this file", function: show }],
  menuCommands: [{ path: ["TPU"], commands: ["comfyui-tpu.ran"] }],
  beforeConfigureGraph(workflow) {
    const found = taken(workflow?.extra);
    opened = found !== null && typeof found === "object" ? Object.values(found) : [];
  },
  afterConfigureGraph() {
    remember(opened);
  },
  setup() {
    const load = app.loadApiJson;
    app.loadApiJson = async function (workflow, ...rest) {
      const found = Object.values(workflow).map((node) => taken(node?._meta));
      const loaded = await load.call(this, workflow, ...rest);
      remember(found);
      return loaded;
    };
  },
});
