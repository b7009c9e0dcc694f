// The notice over the graph, with the message of a command or an opened workflow.

import { make } from "./dom.mjs";
import { say } from "./i18n.mjs";

const NOTICE = "comfyui-tpu-notice";
const RULES = `#${NOTICE} {
  position: fixed; right: 1rem; bottom: 4rem; z-index: 1000; max-width: 32rem; max-height: 60vh; overflow: auto;
  padding: 1rem; border: 1px solid var(--border-color); border-radius: 0.5rem;
  background: var(--comfy-menu-bg); color: var(--input-text); font-size: 0.875rem;
}
#${NOTICE} ul { margin: 0.5rem 0; padding-left: 1.25rem; list-style: disc; white-space: pre-wrap; }
#${NOTICE} button {
  margin-right: 0.5rem; padding: 0.25rem 0.75rem; border: 1px solid var(--border-color); border-radius: 0.25rem;
  background: var(--comfy-input-bg); color: var(--input-text); cursor: pointer;
}`;

function button(text, onclick) {
  const made = make("button", "", { type: "button" }, text);
  made.onclick = onclick;
  return made;
}

export const isShown = () => document.getElementById(NOTICE) !== null;

export function forget() {
  document.getElementById(NOTICE)?.remove();
}

// The page's Tab order reaches it last.
const closes = ({ key }) => key === "Escape" && !document.querySelector("[role=dialog]") && forget();
document.addEventListener("keydown", closes, { capture: true });

/** Show a headline and lines instead of the previous notice. `actions`: functions of its buttons, by text. */
export function notify([headline, ...lines], actions = {}) {
  forget();
  const list = make("ul", "", {}, ...lines.map((line) => make("li", "", {}, line)));
  const notice = make("section", "", { id: NOTICE, role: "status" }, make("strong", "", {}, headline), list);
  for (const [text, action] of Object.entries(actions)) {
    notice.append(button(text, () => (forget(), action())));
  }
  notice.append(button(say`Close`, forget));
  notice.prepend(make("style", "", {}, RULES));
  document.body.append(notice);
}
