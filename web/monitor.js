// The TPU monitor in ComfyUI's page: a sidebar tab, a button in the action bar, two settings.
// Imported modules end in .mjs, because ComfyUI runs every .js itself.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { BADGE_CLASS, forgetBadge, hideBadge, showBadge } from "./monitor/badge.mjs";
import { Panel } from "./monitor/panel.mjs";
import { Poller, watchVisibility } from "./monitor/poller.mjs";
import { say, speak } from "./monitor/i18n.mjs";

const TAB = "comfyui-tpu";
const RATE = "TPU.Monitor.Rate";
const BADGE = "TPU.Monitor.Badge";
const DEFAULT_RATE_S = 1;
// Refresh interval while nothing runs; a new prompt triggers a refresh at once.
const IDLE_S = 2;
// The server samples no more often than this.
const FASTEST_S = 0.5;
const BADGE_HIDDEN = "hidden";
const BADGE_WITH_TAB = "while the tab is open";
const BADGE_ALWAYS = "always, every 15 seconds";
const BADGE_INTERVAL_MS = 15_000;

let panel = null;
let stopWatching = null;
let isTabVisible = false;
let isIdle = false;

function setting(id, fallback) {
  return app.extensionManager?.setting?.get(id) ?? fallback;
}

async function fetchStats(signal) {
  const answer = await api.fetchApi("/tpu/stats", { signal, cache: "no-store" });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return await answer.json();
}

/** Free residents by id, or everything; return the sentence to show. */
async function free(ids) {
  const request = { method: "POST", headers: { "Content-Type": "application/json" } };
  if (ids !== undefined) request.body = JSON.stringify({ ids });
  try {
    const answer = await api.fetchApi("/tpu/free", request);
    if (!answer.ok) return say`Not freed: the server answered ${answer.status}.`;
    const { freed } = await answer.json();
    panelPoller.refresh();
    return freed === "requested" ? say`Memory will be freed when the current prompt finishes.` : say`Freed.`;
  } catch {
    return say`Not freed: the server is not reachable.`;
  }
}

const panelPoller = new Poller({
  fetchStats,
  intervalMs: () => {
    const wanted = Math.max(FASTEST_S, Number(setting(RATE, DEFAULT_RATE_S)) || DEFAULT_RATE_S);
    return 1000 * (isIdle ? Math.max(IDLE_S, wanted) : wanted);
  },
  onStats: (stats) => {
    isIdle = !stats?.running && !stats?.queue;
    panel.show(stats);
    showBadge(stats);
  },
  onError: () => panel.showError(say`The server is not reachable, trying again.`),
});

const badgePoller = new Poller({
  fetchStats,
  intervalMs: () => BADGE_INTERVAL_MS,
  onStats: showBadge,
  onError: forgetBadge,
});

/** Poll for the badge if the setting asks for it and the tab does not poll already. */
function applyBadge(choice = setting(BADGE, BADGE_WITH_TAB)) {
  hideBadge(choice === BADGE_HIDDEN);
  badgePoller.setVisible(choice === BADGE_ALWAYS && !isTabVisible && document.visibilityState === "visible");
}

function render(container) {
  panel ??= new Panel({ free });
  // ComfyUI calls this again whenever it redraws the sidebar.
  if (panel.element.parentElement === container) return;
  destroy();
  container.append(panel.element);
  const resized = new ResizeObserver(() => panel.redraw());
  resized.observe(panel.element);
  const stop = watchVisibility(panel.element, (visible) => {
    isTabVisible = visible;
    panelPoller.setVisible(visible);
    applyBadge();
  });
  stopWatching = () => {
    resized.disconnect();
    stop();
  };
}

function destroy() {
  stopWatching?.();
  stopWatching = null;
  panel?.element.remove();
}

function addStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("./monitor.css", import.meta.url).href;
  document.head.append(link);
}

app.registerExtension({
  name: "comfyui-tpu.monitor",
  settings: [
    {
      id: RATE,
      category: ["TPU", "Monitor", "Rate"],
      name: "Refresh interval (seconds)",
      type: "slider",
      attrs: { min: FASTEST_S, max: 10, step: 0.5 },
      defaultValue: DEFAULT_RATE_S,
      onChange: () => panelPoller.refresh(),
    },
    {
      id: BADGE,
      category: ["TPU", "Monitor", "Badge"],
      name: "Memory in the action bar",
      type: "combo",
      options: [BADGE_WITH_TAB, BADGE_ALWAYS, BADGE_HIDDEN],
      defaultValue: BADGE_WITH_TAB,
      onChange: (choice) => applyBadge(choice),
    },
  ],
  actionBarButtons: [
    {
      icon: "pi pi-microchip",
      label: "TPU",
      // Read when it is shown, because the page's language is not known yet.
      get tooltip() {
        return say`TPU monitor`;
      },
      class: BADGE_CLASS,
      onClick: () => app.extensionManager.command.execute(`Workspace.ToggleSidebarTab.${TAB}`),
    },
  ],
  async setup() {
    await speak(setting("Comfy.Locale", "en"));
    addStyle();
    document.addEventListener("visibilitychange", () => applyBadge());
    api.addEventListener("status", () => isIdle && panelPoller.refresh());
    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-microchip",
      title: "TPU",
      tooltip: say`TPU monitor`,
      type: "custom",
      render,
      destroy,
    });
    applyBadge();
  },
});
