// The stages of a generation, as the page calls them.

import { text } from "./format.mjs";
import { say } from "./words.mjs";

const STAGES = {
  encode: () => say`Text encoder`, image: () => say`Image encoder`, denoise: () => say`Denoiser`,
  decode: () => say`VAE decoder`,
};

export const isStage = (name) => Object.hasOwn(STAGES, text(name));

/** A stage's name; another's as it is. */
export const stageOf = (name) => (isStage(name) ? STAGES[name]() : text(name));
