// A pair of tokens: the cross under the pointer or the arrow keys, the weight of the pair, pinning.

import { pixelToCss } from "./colour.js";
import { comparedText, weightText } from "./compare.js";
import { $, make, makeButton, stopEvent } from "./dom.js";
import { formatNumber, tokenIndex, tokenLabel, tokenName } from "./format.js";
import { evenShares } from "./pictures.js";
import { colourOf, drawPlot } from "./plot.js";
import { heads, report, tokens } from "./report.js";
import { state, update } from "./state.js";
import { valueAt } from "./tiles.js";
import {
  leftOf,
  matrix,
  pixelsPerToken,
  scrollToPair,
  tokensPerCell,
  topEdge,
  viewport,
  zoomTo,
  zoomToPair,
} from "./viewport.js";

const { floor, min, max, ceil } = Math;

const followers = []; // called with the pair under the cross, { q, k, span }, or null
export const onCross = (follow) => followers.push(follow);

export function setCross(cell) {
  const next = cell && (cell.q !== null || cell.k !== null) ? cell : null;
  if (JSON.stringify(next) === JSON.stringify(viewport.cross)) return;
  viewport.cross = next;
  drawPlot();
  drawPair();
  const pair = viewport.cross && viewport.look && { ...viewport.cross, span: tokensPerCell() };
  followers.forEach((follow) => follow(pair));
}

export function togglePin(cell) {
  if (!cell) return;
  const pin = cell.q === null ? null : cell;
  const same = JSON.stringify(pin) === JSON.stringify(state.pin);
  update({ pin: same ? null : pin });
}

// The line above the picture: the pair under the cross, else the pinned one.
export function drawPair() {
  const line = $("pair");
  line.replaceChildren();
  if (!viewport.look) return;
  const pinned = state.pin?.k >= 0 && state.pin.k !== null ? state.pin : null;
  const at = viewport.cross && viewport.cross.q !== null && viewport.cross.k !== null ? viewport.cross : pinned;
  if (at) line.append(...pairText(at));
  if (at && tokensPerCell() > 1 && viewport.look.head.close)
    line.append(makeButton("zoom to it", () => zoomToPair(at), "Single weights around this pair"));
  if (at && at === pinned && state.colour !== "pair")
    line.append(
      makeButton(
        "in every head",
        () => update({ colour: "pair" }),
        "Colour all heads by the weight they give this pair",
      ),
    );
  if (!at) line.append(make("span.dim", pairHint()));
}

function pairHint() {
  const size = tokensPerCell();
  const cells = size > 1 ? `Each cell is ${size} × ${size} tokens.` : "Rows read columns.";
  return `${cells} A click pins a cell; wheel and double click zoom, dragging pans.`;
}

function pairText(at) {
  const size = tokensPerCell();
  const [i, j] = [floor(at.q / size), floor(at.k / size)];
  const token = (n) => tokenLabel(tokenName(n, size), tokenIndex(n, size), n * size);
  const weight = valueAt(viewport.look.parts[0], i * size, j * size);
  if (Number.isNaN(weight)) {
    const why = !state.first && j * size < viewport.look.pooled ? "hidden, rows rescaled" : "may not be seen";
    return [token(i), " → ", token(j), make("span.dim", why)];
  }
  const swatch = make("i.swatch");
  swatch.style.background = pixelToCss(
    viewport.panels[0].signed
      ? colourOf(viewport.panels[0], differenceAt(i * size, j * size), size)
      : colourOf(viewport.look, weight, size),
  );
  const note = viewport.look.by === "max" && size > 1 ? "at most" : evenRatioText(weight, i, j, size);
  const parts = [token(i), " → ", token(j), swatch, make("b", weightText(weight)), make("span.dim", note)];
  return [...parts, ...comparedText(i * size, j * size, weight)];
}

const differenceAt = (q, k) => viewport.panels[0].parts.map((part) => valueAt(part, q, k)).reduce((a, b) => a - b);

function evenRatioText(weight, i, j, size) {
  if (size === 1 && viewport.look.head.close) {
    const { first, last, prefix } = viewport.look.head.close;
    const keys = last[i] - first[i] + min(prefix, first[i]);
    return `${formatNumber(weight * keys, 1)} × uniform attention`;
  }
  if (size !== viewport.look.pooled) return "";
  const even = evenShares(viewport.look, i);
  return even ? `${formatNumber(weight / even[j], 1)} × uniform attention` : "";
}

// What the page has of this head: single weights, with their error, or the stored picture alone.
export function drawWeightsNote(head) {
  const pooled = head.picture?.pooled ?? 1;
  const size = `the mean and the greatest weight of ${pooled} × ${pooled} tokens`;
  $("close-note").textContent = !head.picture
    ? ""
    : head.caption
      ? `Zoom in to single weights: they are computed here from this head's queries and keys, ${errorText(head.caption)}.`
      : pooled === 1
        ? ""
        : `Single weights of this head are not in this page: it shows ${size}. ${missingText(head)}`;
}

// The error of the weights that the page computes, measured when the page was made.
export const errorText = ({ error }) =>
  `to within about ${max(0.01, ceil(1e4 * error) / 100)} % of any weight above 0.0001`;

// Why the head has no close-up, and how to get one, if that is possible.
function missingText(head) {
  const reason = report.missing_close_ups[head.name];
  if (reason) return `No close-up: ${reason}.`;
  const included = report.close_ups.length,
    dropped = report.left_out.close_ups;
  const there = included ? `It includes those of ${included} of ${heads.length} heads` : "It includes those of no head";
  const more = dropped.length ? `; ${dropped.length}${included ? " more" : ""} did not fit` : "";
  const ask = dropped.includes(head.name) ? "Ask for this head alone" : "Ask for this head";
  return `${there}${more}.${dropped.length && !included ? "" : ` ${ask} by --heads ${head.name}.`}`;
}

// ---- keys -----------------------------------------------------------------------------------------------------------

// While the picture has the focus, arrow keys move the cross, plus and minus zoom at it, 0 shows all.
export function handleKey(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const scale = { "+": 1.6, "=": 1.6, "-": 1 / 1.6, 0: 0 }[event.key];
  if (!viewport.look || event.ctrlKey || event.metaKey || !(step || scale !== undefined || event.key === "Enter"))
    return;
  stopEvent(event);
  if (event.key === "Enter") return viewport.cross && togglePin(viewport.cross);
  if (scale !== undefined) return zoomByKey(scale);
  const size = tokensPerCell(),
    by = (event.shiftKey ? 10 : 1) * size,
    last = floor((tokens.length - 1) / size) * size;
  const clamp = (n) => max(0, min(last, n - (n % size)));
  const [q, k] = [viewport.cross?.q ?? last, viewport.cross?.k ?? 0];
  const next = { q: clamp(q + by * step[0]), k: clamp(k + by * step[1]) };
  scrollToPair(next);
  setCross(next);
  $("spoken").textContent = $("pair").textContent;
}

function zoomByKey(scale) {
  const at = viewport.cross ?? state.pin,
    s = pixelsPerToken();
  if (at && at.q !== null && at.k !== null)
    zoomTo(
      viewport.zoom * scale,
      leftOf(0) + (at.k + 0.5) * s - matrix.scrollLeft,
      topEdge() + (at.q + 0.5) * s - matrix.scrollTop,
    );
  else zoomTo(viewport.zoom * scale);
  if (viewport.cross) scrollToPair(viewport.cross);
  $("spoken").textContent = tokensPerCell() === 1 ? "single weights" : `${tokensPerCell()} tokens a cell`;
}
