// Sorts the pack's templates by title in the template browser, the one without TPU and weights first. The server lists them
// unsorted.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const FIRST = "TPU - try it now";
const rank = (title) => (title === FIRST ? "" : title);

app.registerExtension({
  name: "comfyui-tpu.templates",
  setup() {
    const list = api.getWorkflowTemplates;
    api.getWorkflowTemplates = async function (...given) {
      const found = await list.apply(this, given);
      for (const titles of Object.values(found)) {
        if (titles.includes(FIRST)) titles.sort((one, other) => rank(one).localeCompare(rank(other)));
      }
      return found;
    };
  },
});
