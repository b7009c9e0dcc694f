// In the template browser the pack's own stand by their titles; first the one that needs neither a TPU nor weights. The
// server lists them in no order.

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
