// A notice where no node of the pack can run; one once the pack was updated, with what is new; and what is known of this machine, with the command for more.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { list, text } from "./monitor/format.mjs";
import { isShown, notify } from "./monitor/notice.mjs";
import { say, understood } from "./monitor/words.mjs";

// Where this browser keeps which changes it has shown, by how they begin.
const SEEN = "comfyui-tpu.changes";
const BEGIN = 48;
const MOST_SHOWN = 12;

let isOpened;
const opened = new Promise((resolve) => (isOpened = resolve));
const texts = (value) => (Array.isArray(value) ? value.map(text) : []);

async function fetchAbout() {
  const answer = await api.fetchApi("/tpu/about");
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return await answer.json();
}

/** What was shown before; null in a browser that was never here, or that keeps nothing. */
function seen() {
  try {
    const kept = JSON.parse(localStorage.getItem(SEEN));
    return Array.isArray(kept) ? new Set(kept) : null;
  } catch {
    return null;
  }
}

/** Whether there was something to tell, at every opening of the page: nothing runs until it is done. */
function tellRefusals(refusals) {
  if (refusals.length) notify([say`No TPU node can run here:`, ...refusals.map(understood)]);
  return refusals.length > 0;
}

/** A new user is told nothing: to him all is new. */
function tellChanges(changes) {
  const before = seen();
  const begin = (change) => change.slice(0, BEGIN);
  const fresh = before ? changes.filter((change) => !before.has(begin(change))) : [];
  if (fresh.length && isShown()) return; // another time
  if (changes.length) localStorage.setItem(SEEN, JSON.stringify(changes.map(begin)));
  if (!fresh.length) return;
  const more = fresh.length - MOST_SHOWN;
  const rest = more > 0 ? [say`And ${more} more, in CHANGELOG.md.`] : [];
  notify([say`ComfyUI-TPU was updated. What is new:`, ...fresh.slice(0, MOST_SHOWN), ...rest]);
}

function foundOn(machine) {
  const title = text(machine.title);
  const sentences = texts(machine.sentences).map((sentence) => `${title}: ${understood(sentence)}`);
  if (sentences.length || machine.is_measured !== true) return sentences;
  return [say`${title}: it takes all that was tried.`];
}

async function showSelftest() {
  try {
    const [{ selftest }, queue] = await Promise.all([fetchAbout(), api.getQueue()]);
    const waiting = queue.Running.length + queue.Pending.length;
    const lines = list(selftest?.machines).flatMap(foundOn);
    const why = waiting
      ? say`Not now: the queue has ${waiting} prompts. The self-test needs the chips for itself, some ten minutes.`
      : say`It needs the chips for itself, some ten minutes, and this server holds them. End ComfyUI, and run in a terminal:`;
    const known = lines.length ? lines : [say`No self-test has run here yet.`];
    notify([say`Self-test`, why, ...(waiting ? [] : [text(selftest?.command)]), say`What is known so far:`, ...known]);
  } catch (error) {
    notify([say`Self-test`, say`The server does not say: ${error.message ?? error}`]);
  }
}

app.registerExtension({
  name: "comfyui-tpu.about",
  commands: [{ id: "comfyui-tpu.selftest", label: "Self-test of this machine", function: showSelftest }],
  menuCommands: [{ path: ["TPU"], commands: ["comfyui-tpu.selftest"] }],
  setup() {
    // Not before the workflow that the page opens with, which would take the notice away.
    const told = Promise.all([fetchAbout(), opened]).then(([{ refusals, changes }]) => {
      if (!tellRefusals(texts(refusals))) tellChanges(texts(changes));
    });
    told.catch((error) => console.warn("comfyui-tpu: what has changed is not known", error));
  },
  afterConfigureGraph: () => isOpened(),
});
