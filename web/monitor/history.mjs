// The last two minutes of memory and utilisation, as two curves on a canvas.

import { mean, totals } from "./format.mjs";

const SPAN_MS = 120_000;
// A longer silence than this is a gap in the curve, not a straight line.
const GAP_MS = 15_000;
// Without a limit the curve is drawn against its own peak, with some air above.
const HEADROOM = 1.25;

/** Points in time. Kept while the tab is closed, so that the curve is there again when it opens. */
export class History {
  points = [];

  add(stats, now = Date.now()) {
    const { taken, limit } = totals(stats);
    const utilisation = mean(stats, "tensorcore_utilization") ?? mean(stats, "duty_cycle");
    this.points.push({ at: now, taken, limit, utilisation });
    while (this.points.length && this.points[0].at < now - SPAN_MS - GAP_MS) this.points.shift();
  }

  /** Curves as lists of [age in 0..1 from left to right, height in 0..1], cut at gaps. */
  curves(now = Date.now()) {
    const peak = Math.max(...this.points.map((point) => point.taken ?? 0), 1);
    const memory = (point) => (point.taken === null ? null : point.taken / (point.limit || peak * HEADROOM));
    const utilisation = (point) => (point.utilisation === null ? null : point.utilisation / 100);
    return { memory: this.#curve(memory, now), utilisation: this.#curve(utilisation, now) };
  }

  #curve(height, now) {
    const pieces = [];
    let last = null;
    for (const point of this.points) {
      const value = height(point);
      if (value === null) {
        last = null;
        continue;
      }
      if (last === null || point.at - last > GAP_MS) pieces.push([]);
      pieces[pieces.length - 1].push([1 - (now - point.at) / SPAN_MS, Math.min(1, value)]);
      last = point.at;
    }
    return pieces;
  }
}

/** Draws `history` to fill `canvas`, in the colours that its style has as `--tpu-memory` and so on. */
export function draw(canvas, history) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width || !height) return;
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  // A size that is set, also to the same, takes a new canvas, and a layout of the page.
  if (canvas.width !== across) canvas.width = across;
  if (canvas.height !== down) canvas.height = down;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(name).trim();
  context.strokeStyle = colour("--tpu-line");
  context.lineWidth = 1;
  for (const share of [0.25, 0.5, 0.75]) {
    line(context, [[0, Math.round(height * share) + 0.5], [width, Math.round(height * share) + 0.5]]);
  }
  const { memory, utilisation } = history.curves();
  const inside = height - 4;
  const place = ([x, y]) => [x * width, 2 + (1 - y) * inside];
  for (const piece of memory) fill(context, piece.map(place), height, colour("--tpu-memory"));
  stroke(context, memory, place, colour("--tpu-memory"), []);
  stroke(context, utilisation, place, colour("--tpu-busy"), [5, 3]); // dashed: told apart without colours as well
}

function stroke(context, pieces, place, colour, dashes) {
  context.strokeStyle = colour;
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  context.setLineDash(dashes);
  for (const piece of pieces) line(context, piece.map(place));
  context.setLineDash([]);
}

function line(context, points) {
  context.beginPath();
  points.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}

function fill(context, points, height, colour) {
  if (points.length < 2) return;
  context.save();
  context.globalAlpha = 0.15;
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(points[0][0], height);
  for (const [x, y] of points) context.lineTo(x, y);
  context.lineTo(points[points.length - 1][0], height);
  context.fill();
  context.restore();
}
