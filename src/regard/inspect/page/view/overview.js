// All heads at once: a thumbnail each, by layer and head or by rank; arrow keys move between them.

import { badge, kindColour, paint, ramp, theme, thumbnail } from "./colour.js";
import { $, make, on } from "./dom.js";
import { chanceText, formatNumber } from "./format.js";
import { progress } from "./pictures.js";
import { heads, measureNamed, measures, run, scoreOf, valueOf } from "./report.js";
import { passesFilter, state, update, valueFor } from "./state.js";

const { max, abs, min, floor, round, sqrt, sign } = Math;

export const cells = new Map(); // name -> { button, canvas, bar, codes }
const grid = $("grid");
let thumbnailSize = 0; // pixels of a small picture
let visibleCells = []; // { head, row, column } of every head that the filter lets through, in the order of reading

export function makeMap() {
  for (const head of heads) {
    const canvas = make("canvas", { ariaHidden: "true" });
    const bar = make("i");
    const label = make("span", head.name);
    const button = make("button.cell", { type: "button", tabIndex: -1 }, canvas, bar, label);
    button.style.setProperty("--kind", kindColour(head.kind));
    button.setAttribute("aria-label", headLabel(head));
    on(button, "click", (event) => openFromEvent(head.name, event));
    for (const event of ["mouseenter", "focus"]) on(button, event, () => showReadout(head));
    cells.set(head.name, { button, canvas, bar, codes: null });
  }
  on(grid, "mouseleave", () => showReadout(null));
  new ResizeObserver(() => requestAnimationFrame(drawMap)).observe($("map"));
  on(window, "resize", drawMap);
}

// With Shift, beside the head that is open.
export function openFromEvent(name, { shiftKey } = {}) {
  if (shiftKey && state.head !== null && name !== state.head) update({ vs: state.vs === name ? "" : name });
  else update({ head: name, vs: state.vs === name ? "" : state.vs });
}

const scoreMeasures = measures.filter(({ key }) => key !== "remarkable" && key !== "sure");

// The measures that fit into a line: those for colour, order and filter, and those that name heads.
export function mainMeasures() {
  const asked = [state.colour, state.order, state.where].map(measureNamed).filter(Boolean);
  const naming = ["induction", "previous", "duplicate", "sink", "delta_loss", "entropy", "effective_tokens"].map(
    measureNamed,
  );
  return [...new Set([...asked, ...naming.filter(Boolean), ...scoreMeasures])].slice(0, max(7, asked.length));
}

const layers = [...new Set(heads.map((head) => head.layer))].sort((a, b) => a - b); // some layers may have no attention
const layerAt = new Map(layers.map((layer, at) => [layer, at]));

function headLabel(head) {
  const scores = mainMeasures()
    .map(({ key, label }) => `${label} ${formatNumber(valueOf(head, key))}`)
    .join(", ");
  return `Layer ${head.layer} head ${head.head}, ${head.kind}: ${scores}`;
}

// The line under the map: the head under the pointer, else how to begin.
export function showReadout(head) {
  const line = $("readout");
  line.replaceChildren();
  if (!head) return line.append(make("span.dim", restingText()));
  line.append(make("b", head.name), badge(head.kind));
  const pair = valueFor(head, "pair");
  if (pair !== null) line.append(scoreText("pinned pair", { value: pair }));
  for (const { key, label } of mainMeasures()) line.append(scoreText(label, scoreOf(head, key)));
}

function scoreText(label, { value, chance = null, low = null, high = null }) {
  const note = chanceText({ chance, low, high });
  return make("span", `${label} `, make("b", formatNumber(value)), make("span.dim", note && ` (${note})`));
}

export const hasBounds = () => state.where && (state.least !== "" || state.most !== "");

function restingText() {
  const here = heads.filter(passesFilter).length;
  const which = state.kind || hasBounds() ? `${here} of ${heads.length} heads. ` : "";
  return `${which}In each picture a row is a query and a column a key it reads. Point at one, or click to open it.`;
}

// ---- layout of the thumbnails ---------------------------------------------------------------------------------------

let arrangedFor = "";

export function drawMap() {
  const ranked = state.order !== "layer";
  const across = !ranked && state.head === null && layersRunAcross();
  const cell = cellSize(across, ranked);
  const layout = [
    state.order,
    state.kind,
    hasBounds() && [state.where, state.least, state.most].join(),
    across,
    cell,
    availableWidth(),
    ranked && state.order === "pair" && JSON.stringify(state.pin),
  ].join();
  if (layout !== arrangedFor) {
    const focused = document.activeElement; // moving a button about would take the focus from it
    arrangeCells(ranked, across, cell);
    if (grid.contains(focused)) focused.focus({ preventScroll: true });
  }
  arrangedFor = layout;
  markCurrent();
  colourCells(cell);
}

function arrangeCells(ranked, across, cell) {
  const list = ranked ? [...heads].filter(passesFilter).sort((a, b) => rankBy(b) - rankBy(a)) : heads;
  grid.className = `${ranked ? "ranked" : "by-layer"} ${cell < 20 ? "tiny" : ""}`;
  grid.style.setProperty("--cell", `${cell}px`);
  grid.replaceChildren(...(ranked ? [] : axisLabels(across, cell)));
  visibleCells = [];
  for (const head of list) {
    const layer = layerAt.get(head.layer);
    const [row, column] = across ? [head.head, layer] : [layer, head.head];
    const { button } = cells.get(head.name);
    button.style.gridArea = ranked ? "auto" : `${row + 2} / ${column + 2}`;
    button.classList.toggle("faded", !passesFilter(head));
    grid.append(button);
    if (passesFilter(head)) visibleCells.push({ head, row, column });
  }
  if (ranked)
    for (const place of visibleCells) [place.row, place.column] = gridPosition(cells.get(place.head.name).button);
  visibleCells.sort((a, b) => a.row - b.row || a.column - b.column);
}

// Differences are ordered by their size, whichever way they go.
const rankBy = (head) => {
  const value = valueFor(head, state.order) ?? -Infinity;
  return measureNamed(state.order)?.of ? abs(value) : value;
};

const gridPosition = ({ offsetTop, offsetLeft }) => [offsetTop, offsetLeft];

// Layers across the page when that makes the pictures larger, as on a wide screen; down the page on a narrow one.
function layersRunAcross() {
  const fits = (columns, rows) => min(64, availableWidth() / columns - 2, (innerHeight * 0.66) / rows - 2);
  return fits(layers.length, run.heads) > fits(run.heads, layers.length) && availableWidth() / layers.length >= 24;
}

const availableWidth = () => $("map").clientWidth - 30;

function cellSize(across, ranked) {
  if (state.head !== null) return max(4, min(22, floor(min(192 / run.heads, (innerHeight - 192) / layers.length)) - 2));
  if (ranked) return availableWidth() < 500 ? 40 : 52;
  const [columns, rows] = across ? [layers.length, run.heads] : [run.heads, layers.length];
  const cell = availableWidth() / columns - 2;
  return floor(max(5, min(64, cell, cell * rows > innerHeight ? 44 : 64)));
}

function axisLabels(across, cell) {
  const [columns, rows] = across ? [layers.length, run.heads] : [run.heads, layers.length];
  const every = cell < 12 ? 5 : cell < 18 ? 2 : 1;
  const tick = (text, row, column) => {
    const node = make("span.tick-label", text, { ariaHidden: "true" });
    node.style.gridArea = `${row} / ${column}`;
    return node;
  };
  const name = (i, layer) => (i % every ? "" : layer ? layers[i] : i);
  const along = Array.from({ length: columns }, (_, i) => tick(name(i, across), 1, i + 2));
  const down = Array.from({ length: rows }, (_, i) => tick(name(i, !across), i + 2, 1));
  const corner = tick(across ? "layer →" : "head →", 1, 1);
  corner.classList.add("corner");
  return [corner, ...along, ...down];
}

// ---- how each head looks --------------------------------------------------------------------------------------------

let colouredFor = "";

// Colour the small pictures: all alike, or the more vivid the higher the chosen measure, with a bar to read it off.
function colourCells(cell) {
  const pixels = max(16, min(128, round(max(cell, 20) * (devicePixelRatio || 1))));
  const pair = state.colour === "pair" ? JSON.stringify(state.pin) : "";
  const look = [theme(), pixels, state.colour, pair, state.by].join();
  const entries = heads.map((head) => cells.get(head.name));
  if (look !== colouredFor) entries.forEach((entry) => (entry.tinted = false));
  if (pixels !== thumbnailSize || look.split(",").at(-1) !== colouredFor.split(",").at(-1))
    entries.forEach((entry) => (entry.codes = null));
  colouredFor = look;
  thumbnailSize = pixels;
  const values = heads.map((head) => valueFor(head, state.colour));
  const top = max(...values.map((value) => abs(value ?? 0))) || 1;
  heads.forEach((head, i) => entries[i].tinted || colourCell(head, values[i] === null ? null : values[i] / top));
}

function colourCell(head, strength) {
  const entry = cells.get(head.name);
  entry.bar.style.setProperty("--share", abs(strength ?? 0));
  entry.bar.className = strength < 0 ? "minus" : "";
  entry.bar.hidden = strength === null;
  const by = head.picture?.[state.by] ? state.by : "mean";
  if (!head.picture?.[by]) return;
  entry.codes ??= thumbnail(head.picture, thumbnailSize, by);
  paint(entry.canvas, entry.codes, ramp(theme(), sqrt(abs(strength ?? 1))), thumbnailSize);
  entry.tinted = by === state.by || progress.complete;
}

function markCurrent() {
  const first = visibleCells.some((place) => place.head.name === state.head) ? state.head : visibleCells[0]?.head.name;
  for (const [name, { button }] of cells) {
    button.tabIndex = name === first ? 0 : -1;
    if (name === state.head) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
    button.classList.toggle("beside", name === state.vs);
  }
}
// The next head in a direction: along the row and on to the next one, or up and down to the nearest column.
export function neighbour(name, right, down) {
  const at = visibleCells.findIndex((place) => place.head.name === name);
  if (at < 0) return visibleCells[0]?.head.name ?? name;
  if (right) return (visibleCells[at + right] ?? visibleCells[at]).head.name;
  const { row, column } = visibleCells[at];
  const ahead = visibleCells.filter((place) => sign(place.row - row) === down);
  const cost = (place) => 1000 * abs(place.row - row) + abs(place.column - column);
  return (ahead.sort((a, b) => cost(a) - cost(b))[0] ?? visibleCells[at]).head.name;
}

export function moveTo(right, down) {
  const focused = document.activeElement?.closest?.(".cell");
  const from = state.head ?? [...cells].find(([, entry]) => entry.button === focused)?.[0];
  const to = from === undefined ? visibleCells[0]?.head.name : neighbour(from, right, down);
  if (to === undefined) return;
  if (state.head !== null) update({ head: to });
  if (state.head === null || focused) cells.get(to).button.focus();
  if (state.head === null) for (const [name, { button }] of cells) button.tabIndex = name === to ? 0 : -1;
}
