// Notices: no node of the pack can run; news after an update; the self-test's results for this machine, and its command.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { list, text } from "./monitor/format.mjs";
import { isShown, notify } from "./monitor/notice.mjs";
import { remember, say, understood } from "./monitor/i18n.mjs";

// Key of the browser's storage for the beginnings of the changes that it has shown.
const SEEN = "comfyui-tpu.changes";
const BEGIN = 48;
const MOST_SHOWN = 12;

let isOpened;
const opened = new Promise((resolve) => (isOpened = resolve));
const texts = (value) => (Array.isArray(value) ? value.map(text) : []);

async function fetchAbout() {
  const answer = await api.fetchApi("/tpu/about");
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  const about = await answer.json();
  remember(about.messages);
  return about;
}

/** Return the changes shown before; null in a new browser, or one without storage. */
function seen() {
  try {
    const kept = JSON.parse(localStorage.getItem(SEEN));
    return Array.isArray(kept) ? new Set(kept) : null;
  } catch {
    return null;
  }
}

/** Show why no node can run, at every opening of the page; return whether there was a reason. */
function tellRefusals(refusals) {
  if (refusals.length) notify([say`No TPU node can run here:`, ...refusals.map(understood)]);
  return refusals.length > 0;
}

/** Show the changes of an update. New users see none, because everything is new to them. */
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
  return [say`${title}: all checks passed.`];
}

async function showSelftest() {
  try {
    const [{ selftest }, queue] = await Promise.all([fetchAbout(), api.getQueue()]);
    const waiting = queue.Running.length + queue.Pending.length;
    const lines = list(selftest?.machines).flatMap(foundOn);
    const why = waiting
      ? say`Not now: the queue has ${waiting} prompts. The self-test needs the chips exclusively for about ten minutes.`
      : say`The self-test needs the chips exclusively for about ten minutes, and this server holds them. Stop ComfyUI and run in a terminal:`;
    const known = lines.length ? lines : [say`No self-test has run here yet.`];
    notify([say`Self-test`, why, ...(waiting ? [] : [text(selftest?.command)]), say`What is known so far:`, ...known]);
  } catch (error) {
    notify([say`Self-test`, say`The server did not answer: ${error.message ?? error}`]);
  }
}

app.registerExtension({
  name: "comfyui-tpu.about",
  commands: [{ id: "comfyui-tpu.selftest", label: "Self-test of this machine", function: showSelftest }],
  menuCommands: [{ path: ["TPU"], commands: ["comfyui-tpu.selftest"] }],
  setup() {
    // After the workflow that the page opens with, which would remove the notice.
    const told = Promise.all([fetchAbout(), opened]).then(([{ refusals, changes }]) => {
      if (!tellRefusals(texts(refusals))) tellChanges(texts(changes));
    });
    told.catch((error) => console.warn("comfyui-tpu: what has changed is not known", error));
  },
  afterConfigureGraph: () => isOpened(),
});
