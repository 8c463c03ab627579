// Zoom and scroll position of the large picture, in pixels and tokens, and the pair under the pointer. The picture
// scrolls in a box of its own. Two heads side by side scroll together.

import { colour } from "./colour.js";
import { $ } from "./dom.js";
import { causal, tokens } from "./report.js";
import { saveAddress, state } from "./state.js";

const { min, max, ceil, log2, floor, round } = Math;

export const viewport = {
  look: null, // the open head as it is drawn; null where none is
  panels: [], // what is drawn, from left to right: the open head, the compared head, or their difference
  zoom: 1,
  cross: null, // the pair { q, k } under the pointer, first tokens of a cell
  place: "", // the place in the address that was last shown
};

const drawings = []; // what is redrawn after each zoom
const moved = () => drawings.forEach((draw) => draw());
export const onZoom = (draw) => drawings.push(draw);

export const matrix = $("matrix");
const scroller = matrix.querySelector(".roll");
export const canvas = scroller.querySelector("canvas");
export const context = canvas.getContext("2d");
export const barsHeight = 26; // pixels for the bars of what each key receives
export const gap = 14; // pixels between two pictures

export const maxGutter = () => (matrix.clientWidth < 480 ? 62 : 92);
export const gutter = () => min(maxGutter(), viewport.look.margin);
export const topEdge = () => gutter() + barsHeight;
export const panelWidth = () =>
  (matrix.clientWidth - gutter() - gap * (viewport.panels.length - 1)) / viewport.panels.length;
export const leftOf = (panel) => gutter() + panel * (panelWidth() + gap);
const fitScale = () => max(1e-4, min(panelWidth(), matrix.clientHeight - topEdge()) / tokens.length);
export const pixelsPerToken = () => fitScale() * viewport.zoom; // pixels
const maxZoom = () => max(1, 48 / fitScale());
export const readableZoom = () => max(1.5, 13 / fitScale());

// Tokens per cell of what is drawn: of the stored picture, or fewer where single weights can be computed.
export function tokensPerCell() {
  const { pooled } = viewport.look;
  if (!viewport.panels.every(({ parts }) => parts.every((part) => part.head.close))) return pooled;
  const wanted = 2 ** max(0, ceil(log2(1 / pixelsPerToken()) - 0.01));
  return wanted <= 16 && (wanted < pooled || wanted === 1) ? wanted : pooled;
}

// The pair under the pointer, as the first tokens of its cell; one of them is null beside or above the picture.
export function cellAt(event) {
  if (!viewport.look) return null;
  const box = matrix.getBoundingClientRect(),
    size = tokensPerCell();
  const x = event.clientX - box.left,
    y = event.clientY - box.top;
  const panel = max(0, min(viewport.panels.length - 1, floor((x - gutter()) / (panelWidth() + gap))));
  const cell = (at) => floor(at / pixelsPerToken() / size) * size;
  const k = x < gutter() ? null : cell(x - leftOf(panel) + matrix.scrollLeft);
  const q = y < topEdge() ? null : cell(y - topEdge() + matrix.scrollTop);
  const inside = (n) => n === null || (n >= 0 && n < tokens.length);
  return (q === null && k === null) || !inside(q) || !inside(k) || x > leftOf(panel) + panelWidth() ? null : { q, k };
}

// ---- zooming --------------------------------------------------------------------------------------------------------

// Zoom to a level; the point at (x, y) of the box stays where it is.
export function zoomTo(level, x = leftOf(0) + panelWidth() / 2, y = (topEdge() + matrix.clientHeight) / 2) {
  if (!viewport.look) return;
  const before = pixelsPerToken(),
    wanted = level * fitScale();
  placeKey(level);
  viewport.zoom = max(1, min(level > 1 ? wanted / fitScale() : 1, maxZoom()));
  const scale = pixelsPerToken() / before;
  const left = leftOf(max(0, min(viewport.panels.length - 1, floor((x - gutter()) / (panelWidth() + gap)))));
  resizeScroller();
  matrix.scrollTo(
    (matrix.scrollLeft + x - left) * scale - x + left,
    (matrix.scrollTop + y - topEdge()) * scale - y + topEdge(),
  );
  moved();
  saveViewport();
}

export function zoomAt(event, level) {
  const box = matrix.getBoundingClientRect();
  zoomTo(level, event.clientX - box.left, event.clientY - box.top);
}

// Room to scroll in, as large as the picture is at this zoom. Two pictures need no more height than they have width.
export function resizeScroller() {
  matrix.style.maxHeight = viewport.panels.length > 1 ? `${ceil(topEdge() + panelWidth())}px` : "";
  const extent = tokens.length * pixelsPerToken();
  scroller.style.width = `${floor(matrix.clientWidth - panelWidth() + extent)}px`;
  scroller.style.height = `${floor(topEdge() + extent)}px`;
  $("key").style.right = `${max(0, panelWidth() - extent) + 10}px`; // in the picture's corner
}

// The key is in the empty half of a causal picture; otherwise it has a line of its own.
export const placeKey = (level) =>
  $("stage").classList.toggle("aside", !causal || level > 1.05 || viewport.panels.length > 1);

// Bring a pair into the middle, with `span` tokens across.
export function centreOn(q, k, span) {
  if (!viewport.look) return;
  placeKey(2);
  viewport.zoom = max(1, min(maxZoom(), panelWidth() / span / fitScale()));
  resizeScroller();
  const s = pixelsPerToken();
  matrix.scrollTo((k + 0.5) * s - panelWidth() / 2, (q + 0.5) * s - (matrix.clientHeight - topEdge()) / 2);
  moved();
  saveViewport();
}

// Single weights around a pair, with tokens on both sides.
export const zoomToPair = ({ q, k }) => centreOn(q, k, panelWidth() / 14);

// Bring a pair into view if it is not: the cross that keys have moved.
export function scrollToPair({ q, k }) {
  const s = pixelsPerToken(),
    size = tokensPerCell();
  const near = (at, from, room) => min(at * s, max(from, (at + size) * s - room));
  matrix.scrollTo(near(k, matrix.scrollLeft, panelWidth()), near(q, matrix.scrollTop, matrix.clientHeight - topEdge()));
}

let saveTimer = 0;

// The address stores the middle of the view, once scrolling has stopped.
export function saveViewport() {
  clearTimeout(saveTimer);
  saveTimer = setTimeout(() => {
    if (!viewport.look) return;
    const s = pixelsPerToken(),
      middle = (from, room) => max(0, min(tokens.length - 1, round((from + room / 2) / s - 0.5)));
    const [q, k] = [middle(matrix.scrollTop, matrix.clientHeight - topEdge()), middle(matrix.scrollLeft, panelWidth())];
    const at = viewport.zoom > 1.01 ? `${q}-${k}-${max(1, round(panelWidth() / s))}` : "";
    if (at === state.at) return;
    state.at = viewport.place = at;
    saveAddress();
  }, 300);
}

export function clearRect(...room) {
  context.fillStyle = colour("paper");
  context.fillRect(...room);
}

export function clipTo({ left, right, high, x, y, s }, draw) {
  const extent = tokens.length * s;
  context.save();
  context.beginPath();
  context.rect(left, topEdge(), min(right, x + extent) - left, min(high, y + extent) - topEdge());
  context.clip();
  draw();
  context.restore();
}
