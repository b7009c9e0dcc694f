// Translates the notes of the pack's templates, line by line, into the language of ComfyUI's settings.

import { app } from "../../scripts/app.js";

// Languages with a file in `notes`, which `tools/workflows.py` writes.
const KNOWN = new Set(["zh"]);

async function words(language) {
  if (!KNOWN.has(language)) return {};
  try {
    const answer = await fetch(new URL(`./notes/${language}.json`, import.meta.url));
    return answer.ok ? await answer.json() : {};
  } catch (error) {
    console.warn("comfyui-tpu: the notes' words could not be fetched", error); // English will do
    return {};
  }
}

app.registerExtension({
  name: "comfyui-tpu.notes",
  async beforeConfigureGraph(workflow) {
    const nodes = Array.isArray(workflow?.nodes) ? workflow.nodes : [];
    const notes = nodes.filter((node) => node?.type === "MarkdownNote");
    if (!notes.length) return;
    const known = await words(app.extensionManager?.setting?.get("Comfy.Locale") ?? "en");
    const said = (text) => (Object.hasOwn(known, text) ? known[text] : text);
    for (const note of notes) {
      const text = note.widgets_values?.[0];
      if (typeof text !== "string") continue;
      const lines = text.split("\n");
      // A note of another workflow, or one that was rewritten, keeps its title too.
      if (!lines.some((line) => Object.hasOwn(known, line))) continue;
      note.widgets_values[0] = lines.map(said).join("\n");
      if (note.title) note.title = said(note.title);
    }
  },
});
