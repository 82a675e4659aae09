// DOM helpers. They change a node only if its value has changed. Otherwise nodes would flicker or lose focus.
// Text is always set as text, never as markup, and with escapes for control characters.

import { printable } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map((child) => (typeof child === "string" ? printable(child) : child)));
  return made;
};

export const shape = (tag, attributes = {}, text = null) => {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = printable(text);
  return made;
};

export const setText = (node, text) => {
  const shown = printable(text);
  if (node.textContent !== shown) node.textContent = shown;
};

export const setAttribute = (node, name, value) => {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
};

export const show = (node, shown) => {
  if (node.hidden === shown) node.hidden = !shown;
};

// A bar with a label. Returns `update(part, text)`; `part` is the filled fraction, from 0 to 1.
export const bar = (cell, color = "") => {
  const text = element("span");
  const fill = element("span");
  if (color) fill.className = color;
  cell.append(text, element("span", { class: "bar", "aria-hidden": "true" }, fill));
  return (part, words) => {
    setText(text, words);
    const width = `${Math.max(0, Math.min(1, part)) * 100}%`;
    if (fill.style.width !== width) fill.style.width = width;
  };
};

// A table that keeps the rows with the same key. Columns: { name, label, num, wide, head, make(cell) -> update(row), text(row), raw(row) }.
export class KeyedTable {
  constructor(place, caption, columns) {
    this.columns = columns;
    this.rows = new Map();
    this.body = element("tbody", { role: "rowgroup" });
    const head = element("tr", { role: "row" });
    for (const column of columns) {
      head.append(element("th", { scope: "col", role: "columnheader", class: column.num ? "num" : "" }, column.label));
    }
    const table = element("table", { role: "table", class: "cardy", hidden: "" });
    table.append(element("caption", {}, caption), element("thead", { role: "rowgroup" }, head), this.body);
    place.append(table);
    this.table = table;
  }

  update(rows) {
    show(this.table, rows.length > 0);
    const gone = new Set(this.rows.keys());
    rows.forEach((row, position) => {
      gone.delete(row.key);
      let known = this.rows.get(row.key);
      if (!known) {
        known = this.#make(row);
        this.rows.set(row.key, known);
      }
      if (this.body.children[position] !== known.line) this.body.insertBefore(known.line, this.body.children[position] ?? null);
      known.updates.forEach((update) => update(row));
    });
    for (const key of gone) {
      this.rows.get(key).line.remove();
      this.rows.delete(key);
    }
  }

  #make(row) {
    const line = element("tr", { role: "row", "data-key": row.key });
    const updates = this.columns.map((column) => {
      const cell = column.head
        ? element("th", { scope: "row", role: "rowheader" })
        : element("td", { role: "cell", "data-label": column.label });
      cell.dataset.name = column.name;
      if (column.num) cell.classList.add("num");
      if (column.wide) cell.classList.add("wide");
      line.append(cell);
      const own = column.make ? column.make(cell, row) : (it) => setText(cell, column.text(it));
      return (it) => {
        own(it);
        if (column.raw) setAttribute(cell, "data-value", String(column.raw(it)));
      };
    });
    return { line, updates };
  }
}
