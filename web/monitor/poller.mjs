// Polls the server's statistics, only while they are visible.

const TIMEOUT_MS = 5000;
const SLOWEST_RETRY_MS = 5000;

/**
 * `fetchStats(signal)` returns the parsed answer or throws; `onStats` and `onError` show it. `intervalMs()` is read
 * before each wait, so that a changed setting applies at once. Nothing is sent until `setVisible(true)`.
 */
export class Poller {
  #fetchStats;
  #intervalMs;
  #onStats;
  #onError;
  #visible = false;
  #timer = null;
  #request = null;
  #failures = 0;

  constructor({ fetchStats, intervalMs, onStats, onError }) {
    this.#fetchStats = fetchStats;
    this.#intervalMs = intervalMs;
    this.#onStats = onStats;
    this.#onError = onError;
  }

  setVisible(visible) {
    if (visible === this.#visible) return;
    this.#visible = visible;
    if (visible) {
      this.#poll();
    } else {
      this.#cancel();
    }
  }

  /** Asks now instead of at the next turn. */
  refresh() {
    if (!this.#visible) return;
    this.#cancel();
    this.#poll();
  }

  #cancel() {
    clearTimeout(this.#timer);
    this.#request?.abort();
    this.#timer = null;
    this.#request = null;
  }

  async #poll() {
    const request = new AbortController();
    this.#request = request;
    const deadline = setTimeout(() => request.abort(), TIMEOUT_MS);
    const answer = await this.#fetchStats(request.signal).then((stats) => ({ stats }), (error) => ({ error }));
    clearTimeout(deadline);
    if (this.#request !== request) return; // cancelled by us
    this.#failures = answer.error ? this.#failures + 1 : 0;
    try {
      if (answer.error) this.#onError(answer.error);
      else this.#onStats(answer.stats);
    } catch (error) {
      console.error("comfyui-tpu: the monitor cannot show an answer", error); // our bug; the next answer may do
    }
    if (this.#request !== request) return; // what was shown may have hidden us
    this.#request = null;
    const wait = this.#failures ? Math.min(SLOWEST_RETRY_MS, 1000 * 2 ** (this.#failures - 1)) : this.#intervalMs();
    this.#timer = setTimeout(() => this.#poll(), wait);
  }
}

/** Call `onChange(visible)` when `element` becomes visible or hidden, by scrolling, closing or switching windows. */
export function watchVisibility(element, onChange) {
  let isIntersecting = false;
  const report = () => onChange(isIntersecting && document.visibilityState === "visible");
  const observer = new IntersectionObserver((entries) => {
    isIntersecting = entries[entries.length - 1].isIntersecting;
    report();
  });
  observer.observe(element);
  document.addEventListener("visibilitychange", report);
  return () => {
    observer.disconnect();
    document.removeEventListener("visibilitychange", report);
    onChange(false);
  };
}
