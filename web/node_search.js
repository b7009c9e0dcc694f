// Puts the node that a graph starts with first in a search for "tpu". ComfyUI sorts equal matches by usage, from a list of
// its own, then by length of the name.

import { app } from "../../scripts/app.js";

const FIRST = "TPUModelLoader";

app.registerExtension({
  name: "comfyui-tpu.search",
  setup() {
    const definition = window.LiteGraph?.registered_node_types[FIRST]?.nodeData;
    const ranking = definition && Object.getPrototypeOf(definition);
    const rank = ranking?.postProcessSearchScores;
    if (typeof rank !== "function") return; // an older page, or a newer one: its own order
    ranking.postProcessSearchScores = function (scores) {
      const [match, ...rest] = rank.call(this, scores);
      return this.name === FIRST ? [match, -Infinity] : [match, ...rest];
    };
  },
});
