// The panel: creates its elements once, then updates them with each answer of the server.

import {
  ago, amount, bytes, bytesOf, FILES, list, mean, percent, rate, seconds, text, totals, UNKNOWN,
} from "./format.mjs";
import { make, makeBar, Rows, section, setAttribute, setText } from "./dom.mjs";
import { Chips } from "./chips.mjs";
import { draw, History } from "./history.mjs";
import { isStage, stageOf } from "./stages.mjs";
import { remember, say, term, understood } from "./i18n.mjs";

const CACHES = {
  programs: () => say`Compiled programs`, xla: () => say`XLA cache`, prompts: () => say`Encoded prompts`,
  plans: () => say`Plans`, compile_seconds: () => say`Compile times`, curves: () => say`Step-cache curves`,
};

const COUNTS = [
  ["load", (count) => (count === 1 ? say`${count} load` : say`${count} loads`)],
  ["encode", (count) => (count === 1 ? say`${count} prompt` : say`${count} prompts`)],
  ["compile", (count) => (count === 1 ? say`${count} compilation` : say`${count} compilations`)],
];
// Interval for redrawing an unchanged curve and the host's load, the main cost of an idle tab.
const STILL_MS = 10_000;
const tick = () => Math.floor(Date.now() / STILL_MS);
// Time for which a button's answer is shown.
const SAID_MS = 10_000;
// A year; longer durations are not shown as a time of day.
const LONGEST_QUEUE_S = 31_536_000;
// Unit of loads and downloads.
const MIB = "MiB";
// Unit of a compilation with a known duration.
const SECOND = "second";

const heard = (said) => understood(text(said));
const own = (table, key) => (Object.hasOwn(table, text(key)) ? table[key]() : text(key));
/** Return a Hub id without its organisation, or the last part of a folder. */
const shortName = (model) => text(model).replace(/\/+$/, "").split("/").pop();

/** `free(ids)` asks the server to free residents, or everything if `ids` is undefined, and returns a sentence. */
export class Panel {
  #history = new History();
  #parts;
  #message = make("p", "tpu-dim tpu-message", {}, say`Asking the server…`);
  #alert = make("p", "tpu-alert", { role: "status" });
  #content = make("div", "tpu-content");
  #notes = make("ul", "tpu-notes", { "aria-label": say`Notes` });
  #noteRows = new Rows(this.#notes, (_, index) => index, () => noteRow());
  #curve;
  #shown = new Map();

  constructor({ free }) {
    this.#alert.hidden = true;
    this.#content.hidden = true; // until there is something to show: what comes later would move what is there
    this.#curve = new Curve(this.#history);
    const [running, chips, residents] = [new Running(), new Chips(), new Residents(free)];
    this.#parts = [running, chips, this.#curve, residents, new LastRun(), new Host(), new Caches()];
    const [first, ...others] = this.#parts.map((part) => part.element);
    // Limitations of this machine, and unknown facts, before the numbers.
    this.#content.append(first, this.#notes, ...others);
    const title = make("h2", "tpu-title", {}, "TPU");
    this.element = make("div", "comfyui-tpu-panel", { role: "region", "aria-label": say`TPU monitor`, tabindex: "-1" });
    this.element.append(title, this.#message, this.#alert, this.#content);
  }

  show(answer) {
    const stats = answer !== null && typeof answer === "object" ? answer : {};
    remember(stats.messages);
    this.#history.add(stats);
    if (!this.#alert.hidden) {
      this.element.classList.remove("tpu-stale");
      this.#alert.hidden = true;
      setText(this.#alert, "");
    }
    setText(this.#message, heard(stats.message));
    this.#content.hidden = false; // a curve has no size before
    for (const part of this.#parts) this.#showIfNew(part, stats);
    this.#noteRows.show((Array.isArray(stats.notes) ? stats.notes : []).map(heard));
  }

  /** Update a section only if its content has changed; most do not change from second to second. */
  #showIfNew(part, stats) {
    const given = JSON.stringify(part.sees(stats) ?? null);
    if (this.#shown.get(part) === given) return;
    this.#shown.set(part, given);
    part.show(stats);
  }

  showError(sentence) {
    this.element.classList.add("tpu-stale");
    this.#alert.hidden = false;
    setText(this.#alert, sentence);
  }

  /** Redraw the curve with the theme's colours and the sidebar's size. */
  redraw() {
    this.#curve.redraw();
  }
}

function behindRow() {
  const [title, time] = [make("span", "tpu-dim tpu-clip"), make("span", "tpu-number tpu-dim")];
  const update = (program) => {
    const begun = amount(program.elapsed_s);
    const which = heard(program.title);
    setText(title, begun === null ? say`Will compile: ${which}` : say`Compiling in the background: ${which}`);
    setText(time, begun === null ? "" : seconds(begun));
  };
  return { element: make("li", "tpu-between", {}, title, time), update };
}

function noteRow() {
  const element = make("li");
  return { element, update: (note) => setText(element, note) };
}

/** Return a stage's progress: bytes of weights and downloads, else its units. */
function countOf(unit, done, total) {
  if (unit === MIB) return bytesOf(done * 2 ** 20, total * 2 ** 20, FILES);
  if (unit === "step") return say`Step ${done} of ${total}`;
  if (unit === SECOND) return say`${seconds(done)} of about ${seconds(total)}`;
  if (unit === "chunk") return say`Chunk ${done} of ${total}`;
  return say`Part ${done} of ${total}`;
}

/** Return the number of queued prompts, and the estimated end; "" for an empty queue. */
function queueOf(queue) {
  const known = queue !== null && typeof queue === "object" ? queue : {};
  const [prompts, left, unknown] = [amount(known.prompts), amount(known.seconds), amount(known.unknown) ?? 0];
  if (!prompts) return "";
  const facts = [prompts === 1 ? say`Queue: ${prompts} prompt` : say`Queue: ${prompts} prompts`];
  if (unknown) facts.push(say`${unknown} of a kind that has not run yet`);
  if (left !== null && left < LONGEST_QUEUE_S && unknown < prompts) {
    const clock = new Date(Date.now() + 1000 * left).toLocaleTimeString([], { timeStyle: "short" });
    facts.push(unknown ? say`the others take about ${seconds(left)}` : say`done at about ${clock}`);
  }
  return facts.join(" · ");
}

class Running {
  #stage = make("strong", "tpu-clip");
  #elapsed = make("span", "tpu-number tpu-elapsed");
  #model = make("p", "tpu-dim tpu-clip");
  #bar = makeBar(say`Progress of the running stage`, "tpu-wide");
  #pace = make("p", "tpu-dim");
  #busy = make("div", "tpu-stack tpu-away");
  #idle = make("p", "tpu-dim", {}, say`Nothing is running.`);
  #queue = make("p", "tpu-dim");
  #behind = make("ul", "tpu-list", { "aria-label": say`Compiling in the background` });
  #rows = new Rows(this.#behind, (_, index) => index, () => behindRow());

  constructor() {
    const head = make("div", "tpu-between", {}, this.#stage, this.#elapsed);
    this.#busy.append(head, this.#model, this.#bar.element, this.#pace);
    // Stacked, both always present, so that nothing below moves when a prompt starts or ends.
    const now = make("div", "tpu-now", {}, this.#idle, this.#busy);
    this.element = section(say`Running`, now, this.#queue, this.#behind);
  }

  sees = ({ running, behind, queue }) => [running, behind, queue];

  show({ running, behind, queue }) {
    const waits = queueOf(queue);
    setText(this.#queue, waits);
    const coming = list(behind);
    this.#behind.hidden = coming.length === 0;
    this.#rows.show(coming);
    const now = running !== null && typeof running === "object" ? running : null;
    this.#idle.classList.toggle("tpu-away", now !== null);
    this.#busy.classList.toggle("tpu-away", now === null);
    if (!now) return;
    const [done, total] = [amount(now.done) ?? 0, amount(now.total) ?? 0];
    const counted = total > 0 ? countOf(text(now.unit), done, total) : heard(now.text);
    setText(this.#stage, now.compiling === true ? say`${stageOf(now.stage)}, compiling` : stageOf(now.stage));
    setText(this.#elapsed, seconds(now.elapsed_s));
    setText(this.#model, text(now.model));
    setAttribute(this.#model, "title", text(now.model));
    const isOpen = total === 0 || (now.compiling === true && now.unit !== SECOND);
    this.#bar.element.classList.toggle("tpu-open", isOpen);
    this.#bar.set(isOpen ? null : done / total, isOpen ? heard(now.text) : counted);
    setText(this.#pace, isOpen || now.compiling === true ? heard(now.text) : this.#paceOf(now, counted, total - done));
  }

  #paceOf(now, counted, left) {
    const each = amount(now.seconds_per_unit);
    if (each === null) return counted;
    const unit = text(now.unit);
    const paces = { step: say`${seconds(each)} per step`, chunk: say`${seconds(each)} per chunk`, [MIB]: rate(2 ** 20, each) };
    const speed = (Object.hasOwn(paces, unit) && paces[unit]) || say`${seconds(each)} per part`;
    return say`${counted} · ${speed} · ${seconds(each * Math.max(0, left))} left`;
  }
}

class Curve {
  #canvas = make("canvas", "tpu-curve", { role: "img" });
  #memory = make("span");
  #busy = make("span");

  constructor(history) {
    this.history = history;
    const key = (className, value) =>
      make("span", "tpu-key", {}, make("i", className, { "aria-hidden": "true" }), value);
    const keys = [key("tpu-key-memory", this.#memory), key("tpu-key-busy", this.#busy)];
    const legend = make("div", "tpu-between tpu-legend", {}, ...keys);
    this.element = section(say`Last two minutes`, this.#canvas, legend);
  }

  sees = ({ chips, platform }) => [chips, platform, tick()];

  show(stats) {
    const { taken, limit } = totals(stats);
    const core = mean(stats, "tensorcore_utilization");
    const busy = core ?? mean(stats, "duty_cycle");
    // Idle chips report nothing, and without a TPU there are no chips.
    this.element.hidden = (taken === null && busy === null) || stats.platform === "cpu";
    setText(this.#memory, say`Memory ${limit ? percent((100 * (taken ?? 0)) / limit) : bytes(taken)}`);
    const measure = core === null ? say`Duty cycle` : "TensorCore";
    setText(this.#busy, busy === null ? say`Utilisation unknown` : `${measure} ${percent(busy)}`);
    setAttribute(this.#canvas, "aria-label", `${this.#memory.textContent}; ${this.#busy.textContent}`);
    this.redraw();
  }

  redraw() {
    draw(this.#canvas, this.history);
  }
}

class Residents {
  #list = make("ul", "tpu-list", { tabindex: "-1", "aria-label": say`Loaded components` });
  #empty = make("p", "tpu-dim", {}, say`Nothing is loaded.`);
  #said = make("p", "tpu-dim", { role: "status" });
  #all = make(
    "button", "tpu-button",
    { type: "button", title: say`Free all weights and programs when the current prompt finishes` }, say`Free all`,
  );
  #rows;

  constructor(free) {
    this.free = free;
    const key = (resident, index) => text(resident.id) || index;
    this.#rows = new Rows(this.#list, key, (resident) => this.#row(resident));
    this.#all.addEventListener("click", () => this.#ask(this.#all, undefined));
    this.element = section(say`Loaded`, this.#empty, this.#list, make("div", "tpu-between", {}, this.#said, this.#all));
  }

  // Interval for updating the times of last use.
  sees = ({ resident }) => [resident, list(resident).length && tick()];

  show(stats) {
    const residents = list(stats.resident);
    const hadFocus = this.#list.contains(document.activeElement);
    this.#empty.hidden = residents.length > 0;
    this.#list.hidden = residents.length === 0;
    this.#all.hidden = residents.length === 0;
    this.#rows.show(residents);
    // The focused button was removed with its row: continue keyboard navigation here, not at the top of the page.
    if (hadFocus && !this.#list.contains(document.activeElement)) this.#list.focus();
    if (!residents.length) setText(this.#said, "");
  }

  #row(resident) {
    const component = make("strong", "tpu-clip");
    const size = make("span", "tpu-number");
    const detail = make("span", "tpu-dim tpu-clip");
    const button = make("button", "tpu-button", { type: "button" }, say`Free`);
    button.addEventListener("click", () => this.#ask(button, [text(resident.id)]));
    const head = make("div", "tpu-between", {}, component, size);
    const element = make("li", "tpu-resident", {}, make("div", "tpu-stack", {}, head, detail), button);
    const update = (now) => {
      const name = term(`component.${text(now.component)}`, text(now.component).replaceAll("_", " "));
      setText(component, name);
      setText(size, say`${bytes(now.bytes_per_chip)} per chip`);
      setText(detail, `${ago(now.last_used)} · ${shortName(now.model)}`);
      setAttribute(element, "title", say`${name} of ${text(now.model)}`);
      setAttribute(button, "aria-label", say`Free ${name} of ${text(now.model)}`);
    };
    return { element, update };
  }

  async #ask(button, ids) {
    if (button.ariaDisabled === "true") return;
    button.ariaDisabled = "true"; // a disabled button would lose the keyboard's focus
    setText(this.#said, ids ? say`Memory will be freed when the running stage finishes.` : say`Freeing.`);
    try {
      const sentence = await this.free(ids);
      setText(this.#said, sentence);
      setTimeout(() => this.#said.textContent === sentence && setText(this.#said, ""), SAID_MS);
    } finally {
      button.ariaDisabled = "false";
    }
  }
}

class LastRun {
  #model = make("p", "tpu-dim tpu-clip");
  #bar = make("div", "tpu-bar tpu-wide tpu-parts", { "aria-hidden": "true" });
  #list = make("ul", "tpu-list");
  #facts = make("p", "tpu-dim");
  #segments = new Rows(this.#bar, (_, index) => index, () => this.#segment());
  #rows = new Rows(this.#list, (_, index) => index, () => this.#row());

  constructor() {
    this.element = section(say`Last run`, this.#model, this.#bar, this.#list, this.#facts);
  }

  sees = (stats) => stats.last_run;

  show(stats) {
    const run = stats.last_run !== null && typeof stats.last_run === "object" ? stats.last_run : null;
    this.element.hidden = run === null;
    if (!run) return;
    const stages = list(run.stages);
    const whole = stages.reduce((sum, stage) => sum + (amount(stage.seconds) ?? 0), 0);
    setText(this.#model, text(run.model));
    setAttribute(this.#model, "title", text(run.model));
    this.#segments.show(stages);
    const share = (stage) => (whole > 0 ? (100 * (amount(stage.seconds) ?? 0)) / whole : null);
    this.#rows.show(stages.map((stage) => ({ ...stage, share: share(stage) })));
    const facts = [say`${seconds(whole)} in total`];
    const speed = amount(run.steps_per_second);
    if (speed) facts.push(speed >= 1 ? say`${speed.toFixed(2)} steps per second` : say`${seconds(1 / speed)} per step`);
    if (amount(run.peak_hbm) !== null) facts.push(say`peak ${bytes(run.peak_hbm)} per chip`);
    const loading = rate(run.loaded_bytes, run.loading_s);
    if (amount(run.compiling_s) >= 1) facts.push(say`${seconds(run.compiling_s)} compiling`);
    if (loading && run.loading_s >= 1) facts.push(say`${bytes(run.loaded_bytes, FILES)} loaded at ${loading}`);
    setText(this.#facts, facts.join(" · "));
  }

  #segment() {
    const element = make("div", "tpu-part");
    const update = (stage) => {
      this.#mark(element, stage);
      element.style.flexGrow = String(amount(stage.seconds) ?? 0);
    };
    return { element, update };
  }

  #row() {
    const [swatch, name] = [make("i", "tpu-swatch"), make("span", "tpu-clip")];
    const [share, time] = [make("span", "tpu-number tpu-dim"), make("span", "tpu-number")];
    const element = make("li", "tpu-stage", {}, swatch, name, share, time);
    const update = (stage) => {
      this.#mark(swatch, stage);
      setText(name, stageOf(stage.stage));
      setText(share, percent(stage.share));
      setText(time, seconds(stage.seconds));
    };
    return { element, update };
  }

  #mark(element, stage) {
    setAttribute(element, "data-stage", isStage(stage.stage) ? stage.stage : "other");
  }
}

class Host {
  #cpu = makeBar(say`Host CPU`);
  #ram = makeBar(say`Host memory`);
  #cpuText = make("span", "tpu-number");
  #ramText = make("span", "tpu-number");
  #process = make("p", "tpu-dim");

  constructor() {
    const row = (label, bar, value) =>
      make("div", "tpu-row tpu-host", {}, make("span", "tpu-dim", {}, label), bar.element, value);
    const rows = [row("CPU", this.#cpu, this.#cpuText), row("RAM", this.#ram, this.#ramText)];
    this.element = section(say`Host`, ...rows, this.#process);
  }

  // It changes constantly, and is not urgent.
  sees = () => tick();

  show({ host }) {
    const now = host !== null && typeof host === "object" ? host : {};
    const [cpu, used, total] = [amount(now.cpu_percent), amount(now.ram_used), amount(now.ram_total)];
    setText(this.#cpuText, percent(cpu));
    setText(this.#ramText, bytesOf(used, total));
    this.#cpu.set(cpu === null ? null : cpu / 100, percent(cpu));
    this.#ram.set(used === null || !total ? null : used / total, bytesOf(used, total));
    setText(this.#process, say`ComfyUI uses ${bytes(now.process_ram)} of it`);
  }
}

class Caches {
  #list = make("ul", "tpu-list");
  #counts = make("p", "tpu-dim");
  #rows = new Rows(this.#list, (_, index) => index, () => this.#row());

  constructor() {
    this.element = section(say`Caches`, this.#list, this.#counts);
  }

  sees = ({ caches, counts }) => [caches, counts];

  show(stats) {
    const caches = list(stats.caches);
    this.element.hidden = caches.length === 0;
    this.#rows.show(caches);
    const counts = stats.counts !== null && typeof stats.counts === "object" ? stats.counts : {};
    const known = COUNTS.filter(([name]) => amount(counts[name]) !== null);
    const said = known.map(([name, counted]) => counted(counts[name])).join(", ");
    setText(this.#counts, said ? say`Since the start: ${said}` : "");
  }

  #row() {
    const [name, files] = [make("span", "tpu-clip"), make("span", "tpu-number tpu-dim")];
    const size = make("span", "tpu-number");
    const element = make("li", "tpu-stage tpu-cache", {}, name, files, size);
    const update = (cache) => {
      const count = amount(cache.files);
      setText(name, own(CACHES, cache.name));
      setText(files, count === null ? UNKNOWN : count === 1 ? say`${count} file` : say`${count} files`);
      setText(size, bytes(cache.bytes));
      setAttribute(element, "title", text(cache.path));
    };
    return { element, update };
  }
}
