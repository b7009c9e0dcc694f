// What ran for a picture or video that is dropped on the page: model, quality, chips, seconds. ComfyUI's page reads the
// workflow out of the file; the server has noted there what ran. It is shown, and taken out: what the workflow runs next
// is something else.

import { app } from "../../scripts/app.js";
import { isShown, notify } from "./monitor/notice.mjs";
import { list, seconds, text } from "./monitor/format.mjs";
import { stageOf } from "./monitor/stages.mjs";
import { say } from "./monitor/words.mjs";

const KEY = "comfyui-tpu";
// Anyone may have written the file.
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
  if (!last.length) return notify([say`Drop a picture or video that a TPU made on the page: here stands what ran for it.`]);
  return notify([say`What ran for this file:`, ...last]);
}

/** The nodes' notes, in the order of the file; a notice of something else stays. */
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
