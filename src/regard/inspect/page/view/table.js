// The table of heads: every measure of every head, with its chance value and interval.

import { badge } from "./colour.js";
import { $, make, makeButton, on } from "./dom.js";
import { chanceText, formatNumber } from "./format.js";
import { cells, openFromEvent } from "./overview.js";
import { byName, definitions, heads, measureNamed, measures, rangeOf, scoreOf, valueOf } from "./report.js";
import { passesFilter, state } from "./state.js";

const { min, abs } = Math;

let sorting = { key: "rank", down: false };

export function makeTable() {
  const columns = [{ key: "rank", label: "head" }, { key: "kind", label: "kind" }, ...measures];
  const header = make("tr");
  for (const { key, label, unit } of columns) {
    const button = makeButton(label, () => sortBy(key), definitions[key]?.formula);
    const cell = make("th", button, unit && !label.includes(unit) ? make("small", unit) : "", { scope: "col" });
    cell.dataset.key = key;
    header.append(cell);
  }
  $("table").tHead.append(header);
  const ranges = new Map(measures.map(({ key }) => [key, rangeOf(key)[1]]));
  $("table").tBodies[0].append(...heads.map((head) => tableRow(head, ranges)));
}

function tableRow(head, ranges) {
  const link = make("a", head.name, { href: `#head=${head.name}` });
  link.onclick = (event) => (event.preventDefault(), openFromEvent(head.name, event), scrollTo(0, 0));
  const row = make("tr", make("th", link, { scope: "row" }), make("td", badge(head.kind)));
  row.dataset.head = head.name;
  for (const [key, top] of ranges) {
    const score = scoreOf(head, key),
      note = chanceText(score);
    const cell = make("td", formatNumber(score.value), note ? make("small", note) : "");
    cell.style.setProperty("--share", min(1, abs(score.value ?? 0) / top));
    row.append(cell);
  }
  on(row, "mouseenter", () => cells.get(head.name).button.classList.add("lit"));
  on(row, "mouseleave", () => cells.get(head.name).button.classList.remove("lit"));
  return row;
}

function sortBy(key) {
  sorting = { key, down: sorting.key === key ? !sorting.down : key !== "rank" && key !== "kind" };
  const { down } = sorting;
  const of = (head) => (key === "rank" ? head.rank : (valueOf(head, key) ?? -Infinity));
  const compare = (a, b) =>
    (key === "kind" ? a.kind.localeCompare(b.kind) : of(a) === of(b) ? 0 : of(a) - of(b)) * (down ? -1 : 1) ||
    a.rank - b.rank;
  const rows = new Map([...$("table").tBodies[0].rows].map((row) => [row.dataset.head, row]));
  $("table").tBodies[0].append(...[...heads].sort(compare).map((head) => rows.get(head.name)));
  drawTable();
}

export function drawTable() {
  const { key, down } = sorting;
  for (const row of $("table").tBodies[0].rows) {
    row.hidden = !passesFilter(byName.get(row.dataset.head));
    row.classList.toggle("current", row.dataset.head === state.head);
  }
  for (const cell of $("table").tHead.rows[0].cells)
    cell.ariaSort = cell.dataset.key === key ? (down ? "descending" : "ascending") : "none";
  const order = key === "rank" ? "most remarkable first" : `by ${measureNamed(key)?.label ?? key}`;
  $("list-of").textContent =
    `${heads.filter(passesFilter).length} heads, ${order}; beside each value: chance, and the 95 % interval`;
}
