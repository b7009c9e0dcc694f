// The page's names of a generation's stages.

import { text } from "./format.mjs";
import { say } from "./i18n.mjs";

const STAGES = {
  encode: () => say`Text encoder`, image: () => say`Image encoder`, denoise: () => say`Denoiser`,
  decode: () => say`VAE decoder`,
};

export const isStage = (name) => Object.hasOwn(STAGES, text(name));

/** Return a stage's name; unknown ones are unchanged. */
export const stageOf = (name) => (isStage(name) ? STAGES[name]() : text(name));
