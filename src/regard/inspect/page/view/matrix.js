// The attention matrix of one head: which panels are drawn, and what drag, wheel and buttons do.

import { badge } from "./colour.js";
import { comparedHead, difference } from "./compare.js";
import { $, make, on } from "./dom.js";
import { tokenIndex } from "./format.js";
import { drawKey, font, labelText } from "./labels.js";
import { neighbour } from "./overview.js";
import { drawPair, drawWeightsNote, handleKey, setCross, togglePin } from "./pair.js";
import { sharesOf } from "./pictures.js";
import { drawPlot } from "./plot.js";
import { run, tokens } from "./report.js";
import { openHead, redraw, state, update } from "./state.js";
import { topOf } from "./tiles.js";
import {
  canvas,
  cellAt,
  centreOn,
  context,
  matrix,
  onZoom,
  readableZoom,
  saveViewport,
  viewport,
  zoomAt,
  zoomTo,
} from "./viewport.js";
import { loadWeights } from "./weights.js";

const { abs, min, floor, ceil, max } = Math;

let drag = null; // where a drag began

export function makeMatrix() {
  onZoom(drawPlot);
  onZoom(drawPair);
  on(canvas, "pointerdown", startDrag);
  on(canvas, "pointermove", (event) => continueDrag(event) || setCross(cellAt(event)));
  on(canvas, "pointerup", endDrag);
  on(canvas, "pointerleave", () => setCross(null));
  on(canvas, "click", (event) => drag?.moved || togglePin(cellAt(event)));
  on(canvas, "dblclick", (event) => zoomAt(event, viewport.zoom > readableZoom() * 0.9 ? 1 : readableZoom()));
  on(matrix, "wheel", wheel, { passive: false });
  on(matrix, "scroll", () => (drawPlot(), saveViewport()));
  on(matrix, "keydown", handleKey);
  $("zoom-in").onclick = () => zoomTo(viewport.zoom * 1.6);
  $("zoom-out").onclick = () => zoomTo(viewport.zoom / 1.6);
  $("zoom-fit").onclick = () => zoomTo(viewport.zoom > 1 ? 1 : readableZoom());
  $("first").onchange = (event) => update({ first: !event.target.checked });
  $("by").onclick = ({ target }) => target.value && update({ by: target.value });
  $("save").onclick = savePicture;
  $("previous").onclick = () => update({ head: neighbour(state.head, -1, 0) });
  $("next").onclick = () => update({ head: neighbour(state.head, 1, 0) });
  $("close").onclick = () => update({ head: null });
  new ResizeObserver(() => requestAnimationFrame(drawPlot)).observe(matrix);
}

// The wheel zooms at the pointer. At full view it scrolls the page, unless it would zoom in from
// the page's top; with Shift it pans.
function wheel(event) {
  if (!viewport.look || event.shiftKey) return;
  const leaving = viewport.zoom <= 1 && (event.deltaY > 0 || scrollY > 0);
  if (leaving && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoomAt(event, viewport.zoom * Math.exp(-event.deltaY / (event.ctrlKey ? 200 : 400)));
}

// A click into the picture leaves the arrow keys with the heads. Fingers scroll by themselves.
function startDrag(event) {
  if (event.pointerType !== "mouse" || event.button) return (drag = null);
  event.preventDefault();
  drag = {
    x: event.clientX,
    y: event.clientY,
    left: matrix.scrollLeft,
    top: matrix.scrollTop,
    moved: false,
    on: true,
  };
}

function continueDrag({ clientX, clientY, pointerId }) {
  if (!drag?.on) return false;
  const [x, y] = [clientX - drag.x, clientY - drag.y];
  if (!drag.moved && abs(x) + abs(y) < 5) return false;
  if (!drag.moved) canvas.setPointerCapture(pointerId);
  drag.moved = true;
  matrix.scrollTo(drag.left - x, drag.top - y);
  return true;
}

const endDrag = () => drag && (drag.on = false);

export function drawMatrix() {
  const head = openHead();
  $("focus").hidden = $("side").hidden = head === null;
  document.body.classList.toggle("open", head !== null);
  if (!head) return (viewport.look = null);
  $("focus-title").textContent = `Layer ${head.layer} · head ${head.head}`;
  $("focus-kind").replaceWith(Object.assign(badge(head.kind), { id: "focus-kind" }));
  $("first").checked = !state.first;
  $("by").hidden = !(head.picture?.pooled > 1);
  for (const button of $("by").children) {
    button.ariaPressed = button.value === state.by;
    button.disabled = button.value === "max" && !(head.picture?.max || head.close);
  }
  matrix.setAttribute(
    "aria-label",
    `Attention of layer ${head.layer} head ${head.head}: rows are queries, columns the keys they read. ` +
      "Arrow keys move the cross, plus and minus zoom, 0 shows all, Enter pins a pair.",
  );
  updatePanels(head);
  document.body.classList.toggle("twin", viewport.panels.length > 1);
  document.body.classList.toggle("wordy", viewport.panels.length > 1 || viewport.look?.pooled > 1);
  $("first-of").textContent =
    viewport.look?.pooled > 1 ? `hide the first ${viewport.look.pooled} tokens` : "hide the first token";
  drawKey();
  drawPlot();
  drawPair();
  drawWeightsNote(head);
  if (!viewport.look) return;
  if (state.at && viewport.place !== state.at) centreOn(...state.at.split("-").map(Number));
  viewport.place = state.at;
}

// ---- panels ---------------------------------------------------------------------------------------------------------

function updatePanels(head) {
  const [second, minus] = comparedHead(head);
  const wanted = [head, ...(second ? [second] : [])].filter((one) => one.picture?.mean);
  const name = [
    ...wanted.map((one) => one.name + one.foreign + !!one.picture.max),
    state.by,
    state.first,
    minus,
  ].join();
  for (const one of [head, second]) if (one?.caption && !one.close) loadWeights(one).then(redraw);
  if (wanted[0] !== head) return (viewport.look = null);
  if (viewport.look?.name !== name) {
    const looks = wanted.map(makePanel);
    viewport.look = Object.assign(looks[0], { name });
    viewport.panels = minus && looks[1] ? [difference(looks[0], looks[1])] : looks;
    measureLabels();
    viewport.cross = null;
  }
}

function makePanel(head) {
  const { picture } = head,
    { size, pooled } = picture;
  const by = picture[state.by] ? state.by : "mean";
  const means = sharesOf(picture, state.first);
  const shares = by === "mean" ? means : sharesOf(picture, state.first, by);
  const top = topOf(picture, shares),
    single = picture.max ? topOf(picture, by === "max" ? shares : sharesOf(picture, state.first, "max")) : 1;
  const own = { head, by, size, pooled, shares, means, received: meanByKey(means, size), top, single };
  return Object.assign(own, { parts: [own], tiles: new Map(), sheet: make("canvas"), painted: "" });
}

// How much of the queries' attention each key receives, the mean over the queries that may see it.
function meanByKey(shares, size) {
  return Float32Array.from({ length: size }, (_, j) => {
    let sum = 0,
      count = 0;
    for (let i = 0; i < size; i++) if (!Number.isNaN(shares[i * size + j])) ((sum += shares[i * size + j]), count++);
    return count ? sum / count : 0;
  });
}

function measureLabels() {
  context.font = font(650);
  const few = Array.from({ length: min(tokens.length, 400) }, (_, n) => labelText(floor((n * tokens.length) / 400), 1));
  const positions = viewport.look.pooled > 1 ? [tokenIndex(viewport.look.size - 1, viewport.look.pooled)] : [];
  viewport.look.margin = ceil(max(24, ...[...few, ...positions].map((text) => context.measureText(text).width))) + 12;
}

function savePicture() {
  canvas.toBlob((blob) => {
    const link = make("a", {
      href: URL.createObjectURL(blob),
      download: `${run.model.replace(/[^\w.-]+/g, "-")}-${state.head}.png`,
    });
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
