// The button in the action bar, with the memory in use. ComfyUI owns the element; we only set one attribute, which our style
// sheet shows, so that its redraws and ours do not conflict.

import { setAttribute } from "./dom.mjs";
import { bytesOf, totals } from "./format.mjs";

export const BADGE_CLASS = "comfyui-tpu-badge";
// A stale number would mislead.
const FORGET_MS = 20_000;

let timer = null;

export function showBadge(stats) {
  const { taken, limit } = totals(stats ?? {});
  write(taken === null ? "" : bytesOf(taken, limit));
  clearTimeout(timer);
  timer = setTimeout(() => write(""), FORGET_MS);
}

export function forgetBadge() {
  clearTimeout(timer);
  write("");
}

export function hideBadge(isHidden) {
  document.documentElement.classList.toggle("comfyui-tpu-no-badge", isHidden);
}

function write(value) {
  for (const button of document.querySelectorAll(`.${BADGE_CLASS}`)) setAttribute(button, "data-memory", value);
}
