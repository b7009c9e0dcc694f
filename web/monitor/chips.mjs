// One bar per chip: rows if they fit the sidebar, a grid of small bars for a large slice.

import { amount, bytes, bytesOf, list, mean, most, percent, text, UNKNOWN } from "./format.mjs";
import { say } from "./i18n.mjs";
import { make, makeBar, Rows, section, setAttribute, setText } from "./dom.mjs";

// More chips than this become a grid.
const MOST_ROWS = 16;

const tiles = () => [
  // Numbers of one chip: programs must fit on the fullest one. The badge and the curve show all chips together.
  [
    say`In use per chip`,
    say`High-bandwidth memory in use on the fullest chip, and its capacity.`,
    (stats) => bytesOf(most(stats, "hbm_used"), most(stats, "hbm_limit")),
  ],
  [
    say`Peak per chip`,
    say`The most memory that any one chip has used since the server started.`,
    (stats) => bytes(most(stats, "hbm_peak")),
  ],
  // These two are hidden if no chip reports them, as with simulated chips.
  [
    say`Reserved per chip`,
    say`The most that programs reserve on one chip, in addition to the memory in use.`,
    (stats) => sized(most(stats, "hbm_reserved")),
  ],
  [
    say`Peak reserved per chip`,
    say`The most that programs have reserved on any one chip since the server started.`,
    (stats) => sized(most(stats, "hbm_reserved_peak")),
  ],
  [
    "TensorCore",
    say`TensorCore utilisation: the share of the cores' capacity in use, as libtpu measures it; the mean over all chips.`,
    (stats) => percent(mean(stats, "tensorcore_utilization")),
  ],
  [
    say`Duty cycle`,
    say`The share of the last sample period in which the chips executed anything at all; the mean over all chips.`,
    (stats) => percent(mean(stats, "duty_cycle")),
  ],
];

function sized(value) {
  return value === null ? null : bytes(value);
}

function name(chip, index) {
  return say`Chip ${text(chip.index ?? index)}`;
}

/** Everything known about a chip in one line, for tooltips and screen readers. */
function describe(chip, index) {
  const coords = Array.isArray(chip.coords) ? say` at (${chip.coords.map(text).join(", ")})` : "";
  const which = `${name(chip, index)}: ${text(chip.kind) || UNKNOWN}${coords}`;
  const facts = [which, bytesOf(chip.hbm_used, chip.hbm_limit)];
  if (amount(chip.hbm_peak) !== null) facts.push(say`peak ${bytes(chip.hbm_peak)}`);
  if (amount(chip.hbm_reserved) !== null) facts.push(say`reserved ${bytes(chip.hbm_reserved)}`);
  if (amount(chip.hbm_reserved_peak) !== null) facts.push(say`at most ${bytes(chip.hbm_reserved_peak)} reserved`);
  if (amount(chip.tensorcore_utilization) !== null) facts.push(`TensorCore ${percent(chip.tensorcore_utilization)}`);
  if (amount(chip.duty_cycle) !== null) facts.push(say`duty cycle ${percent(chip.duty_cycle)}`);
  return facts.join(", ");
}

/** Format a share of 0..1 for CSS; "" for null. */
function percentage(share) {
  return `${(Math.min(1, share ?? 0) * 100).toFixed(1)}%`;
}

export class Chips {
  #rows;
  #isGrid = null;
  #tiles;
  #values;
  #list = make("ul", "tpu-chips", { role: "list" });

  constructor() {
    const shown = tiles();
    this.#values = shown.map(([, , value]) => value);
    this.#tiles = shown.map(([label, title]) => {
      const value = make("span", "tpu-tile-value", {}, UNKNOWN);
      const tile = make("div", "tpu-tile", { title }, value, make("span", "tpu-dim", {}, label));
      return { tile, value };
    });
    const all = make("div", "tpu-tiles", {}, ...this.#tiles.map(({ tile }) => tile));
    this.element = section(say`Chips`, all, this.#list);
  }

  sees = ({ chips, platform }) => [chips, platform];

  show(stats) {
    const chips = list(stats.chips);
    // Without a TPU the host's processor, which has none of these numbers.
    this.element.hidden = chips.length === 0 || stats.platform === "cpu";
    this.#values.forEach((value, index) => {
      const found = value(stats);
      this.#tiles[index].tile.hidden = found === null;
      setText(this.#tiles[index].value, found ?? UNKNOWN);
    });
    this.#arrange(chips.length > MOST_ROWS);
    this.#list.classList.toggle("tpu-has-busy", mean(stats, "tensorcore_utilization") !== null);
    this.#rows.show(chips.map((chip, position) => ({ ...chip, position })));
  }

  #arrange(isGrid) {
    if (isGrid === this.#isGrid) return;
    this.#isGrid = isGrid;
    this.#list.replaceChildren();
    this.#list.classList.toggle("tpu-grid", isGrid);
    const create = isGrid ? () => this.#cell() : (chip) => this.#row(chip);
    this.#rows = new Rows(this.#list, (_, position) => position, create);
  }

  #row(chip) {
    const bar = makeBar(say`${name(chip, chip.position)}, memory`);
    const [reserved, peak] = [make("div", "tpu-reserved"), make("div", "tpu-peak")];
    bar.element.prepend(reserved);
    bar.element.append(peak);
    const memory = make("span", "tpu-number");
    const busy = make("span", "tpu-number tpu-busy", { title: say`TensorCore utilisation` });
    const label = make("span", "tpu-dim", { "aria-hidden": "true" });
    const element = make("li", "tpu-row", {}, label, bar.element, memory, busy);
    const update = (now) => {
      setText(label, text(now.index ?? now.position));
      setText(memory, bytesOf(now.hbm_used, now.hbm_limit));
      setText(busy, percent(now.tensorcore_utilization));
      setAttribute(element, "title", describe(now, now.position));
      const used = this.#share(now, now.hbm_used);
      bar.set(used, describe(now, now.position));
      // Drawn below the used memory, and longer: a moving start would count as a layout shift.
      reserved.style.width = percentage(used + this.#share(now, now.hbm_reserved));
      const mark = this.#share(now, now.hbm_peak);
      peak.hidden = mark === null;
      peak.style.width = percentage(mark);
    };
    return { element, update };
  }

  #cell() {
    const bar = makeBar(say`Memory`, "tpu-cell");
    const element = make("li", "", {}, bar.element);
    const update = (now) => {
      const description = describe(now, now.position);
      setAttribute(element, "title", description);
      setAttribute(bar.element, "aria-label", name(now, now.position));
      bar.set(this.#share(now, now.hbm_used), description);
    };
    return { element, update };
  }

  /** Return the share of the chip's limit; null without a limit, as with simulated chips. */
  #share(chip, value) {
    const [known, limit] = [amount(value), amount(chip.hbm_limit)];
    return known === null || !limit ? null : known / limit;
  }
}
