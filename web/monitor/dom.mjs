// Helpers for elements. Text is inserted as text: the server's messages are never parsed as HTML.

/** An element with a class, attributes and children (elements or texts). */
export function make(tag, className = "", attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Sets the text if it differs: an unchanged node keeps a selection, and screen readers stay quiet. */
export function setText(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** A labelled section; `title` is its heading. */
export function section(title, ...children) {
  const heading = make("h3", "tpu-heading", {}, title);
  return make("section", "tpu-section", { "aria-label": title }, heading, ...children);
}

/** A bar for a share of 0..1; null shows an empty one. */
export function makeBar(label, className = "") {
  const fill = make("div", "tpu-fill");
  const attributes = { role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": label };
  const bar = make("div", `tpu-bar ${className}`.trim(), attributes, fill);
  return {
    element: bar,
    set(value, spoken) {
      const known = typeof value === "number" && Number.isFinite(value);
      const width = known ? Math.min(1, Math.max(0, value)) * 100 : 0;
      const share = `${width.toFixed(1)}%`;
      if (fill.style.getPropertyValue("--share") !== share) fill.style.setProperty("--share", share);
      if (known) setAttribute(bar, "aria-valuenow", String(Math.round(width)));
      else bar.removeAttribute("aria-valuenow");
      setAttribute(bar, "aria-valuetext", spoken);
    },
  };
}

/**
 * Makes the children of `parent` follow `items`: rows are kept by key, so that focus stays where it was.
 * `create(item)` gives `{ element, update(item) }`.
 */
export class Rows {
  #rows = new Map();

  constructor(parent, keyOf, create) {
    this.parent = parent;
    this.keyOf = keyOf;
    this.create = create;
  }

  show(items) {
    const wanted = new Map(items.map((item, index) => [this.keyOf(item, index), item]));
    for (const [key, row] of this.#rows) {
      if (wanted.has(key)) continue;
      row.element.remove();
      this.#rows.delete(key);
    }
    let position = 0;
    for (const [key, item] of wanted) {
      if (!this.#rows.has(key)) this.#rows.set(key, this.create(item));
      const row = this.#rows.get(key);
      row.update(item);
      if (this.parent.children[position] !== row.element) {
        this.parent.insertBefore(row.element, this.parent.children[position] ?? null);
      }
      position += 1;
    }
  }
}
