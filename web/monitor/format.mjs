// Formats numbers. Missing values become a dash: the server may not have them, or may be older.

import { say } from "./i18n.mjs";

export const UNKNOWN = "–";

// Units of memory are powers of 1024; those of files, as for downloads and disks, powers of 1000.
const MEMORY = { base: 1024, units: ["B", "KiB", "MiB", "GiB", "TiB"] };
export const FILES = { base: 1000, units: ["B", "kB", "MB", "GB", "TB"] };

/** The value if it is a finite number of zero or more, else null. */
export function amount(value) {
  return typeof value === "number" && Number.isFinite(value) && value >= 0 ? value : null;
}

export function list(value) {
  return Array.isArray(value) ? value.filter((one) => one !== null && typeof one === "object") : [];
}

/** Return the server's value as text; "" for objects, which may refuse the conversion. */
export function text(value) {
  return value === null || value === undefined || typeof value === "object" ? "" : String(value);
}

/** The index into the units that suits `value`. */
function unitOf(value, { base, units }) {
  let unit = 0;
  while (unit < units.length - 1 && value >= base ** (unit + 1) * 0.9995) unit += 1;
  return unit;
}

function digits(value) {
  return value >= 99.95 || value === 0 ? value.toFixed(0) : value.toFixed(value >= 9.995 ? 1 : 2);
}

export function bytes(value, kind = MEMORY) {
  const known = amount(value);
  if (known === null) return UNKNOWN;
  const unit = unitOf(known, kind);
  return unit === 0 ? `${Math.round(known)} B` : `${digits(known / kind.base ** unit)} ${kind.units[unit]}`;
}

/** "3.10 of 31.2 GiB": both in the limit's unit unless that would show nothing; the first alone without a limit. */
export function bytesOf(used, limit, kind = MEMORY) {
  const all = amount(limit);
  if (all === null || all === 0) return bytes(used, kind);
  const known = amount(used);
  const whole = bytes(all, kind);
  if (known === null) return say`${UNKNOWN} of ${whole}`;
  const unit = unitOf(all, kind);
  const share = known / kind.base ** unit;
  if (unit === 0 || (known > 0 && share < 0.095)) return say`${bytes(known, kind)} of ${whole}`;
  return say`${digits(share)} of ${whole}`;
}

/** Return the rate in GB/s; null if bytes or seconds are unknown. */
export function rate(size, span) {
  const [all, time] = [amount(size), amount(span)];
  return all && time ? `${(all / 1e9 / time).toFixed(2)} GB/s` : null;
}

export function percent(value) {
  const known = amount(value);
  return known === null ? UNKNOWN : `${Math.round(known)} %`;
}

/** A span: "0.12 s", "8.4 s", "3:07", "1:02:30". */
export function seconds(value) {
  const known = amount(value);
  if (known === null) return UNKNOWN;
  if (known < 0.9995) return known < 0.0005 ? "0 s" : `${known.toFixed(known < 0.0995 ? 3 : 2)} s`;
  if (known < 59.95) return `${known.toFixed(1)} s`;
  const whole = Math.round(known);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const tail = String(rest).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${tail}` : `${minutes}:${tail}`;
}

/** How long ago a moment (Unix seconds) was. */
export function ago(moment) {
  const known = amount(moment);
  if (known === null) return UNKNOWN;
  const past = Math.max(0, Date.now() / 1000 - known);
  if (past < 5) return say`just now`;
  if (past < 90) return say`${Math.round(past)} s ago`;
  if (past < 5400) return say`${Math.round(past / 60)} min ago`;
  return past < 129600 ? say`${Math.round(past / 3600)} h ago` : say`${Math.round(past / 86400)} days ago`;
}

/** Return a field of the chips that report it. */
function known(stats, field) {
  return list(stats.chips).map((chip) => amount(chip[field])).filter((value) => value !== null);
}

/** The sum of a field over the chips that report it; null if none does. */
function sum(stats, field) {
  const values = known(stats, field);
  return values.length ? values.reduce((left, right) => left + right, 0) : null;
}

/** Memory of all chips together: used, reserved by programs, both, and the limit; null if no chip reports them. */
export function totals(stats) {
  const [used, reserved] = [sum(stats, "hbm_used"), sum(stats, "hbm_reserved")];
  return { used, reserved, taken: used === null ? null : used + (reserved ?? 0), limit: sum(stats, "hbm_limit") };
}

/** The mean of a field over the chips that report it; null if none does. */
export function mean(stats, field) {
  const all = sum(stats, field);
  return all === null ? null : all / known(stats, field).length;
}

/** The most of a field that one chip reports; null if none does. */
export function most(stats, field) {
  const values = known(stats, field);
  return values.length ? Math.max(...values) : null;
}
