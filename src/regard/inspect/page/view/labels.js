// Labels of the large picture: tokens on both sides, the tokens of the cross, and the colour key.

import { colour, ramp, signedRamp, theme } from "./colour.js";
import { $, make } from "./dom.js";
import { formatCount, formatNumber, tokenIndex, tokenName } from "./format.js";
import { report, tokens } from "./report.js";
import { headName } from "./state.js";
import { topAt } from "./tiles.js";
import {
  canvas,
  clearRect,
  clipTo,
  context,
  gap,
  gutter,
  maxGutter,
  tokensPerCell,
  topEdge,
  viewport,
} from "./viewport.js";

const { ceil, max, floor, log10, round, min, sign, sqrt, abs } = Math;

let keyTokensPerCell = 0; // tokens a cell that the key speaks of

const lineHeight = 11.5; // pixels that a label needs
const maxTokensPerLabel = 32; // tokens per label, 600 tokens on a phone: beyond, positions are clearer than tokens

// Tokens beside the rows and above the columns, as many as fit; a label for many tokens shows their positions.
function forEachLabel(start, from, to, s, draw) {
  const room = ceil(lineHeight / s),
    worded = room <= maxTokensPerLabel,
    every = worded ? room : roundUp(room);
  context.font = font();
  context.textBaseline = "middle";
  for (let n = max(0, floor((from - start) / s / every) * every); n < tokens.length; n += every) {
    const middle = start + (n + 0.5) * s;
    if (middle > to - lineHeight / 2) return;
    context.fillStyle = colour(n >= report.prompt_tokens ? "written" : "label");
    if (middle > from) draw(worded ? labelText(n, 1) : formatCount(n), middle);
  }
}

// The next of 1, 2, 5, 10, 20, 50, ...
function roundUp(n) {
  const ten = 10 ** floor(log10(n));
  return ten * [1, 2, 5, 10].find((step) => step * ten >= n);
}

// The corner above the rows belongs to the first columns, whose labels are wider than their cells.
export function drawRowLabels({ y, s, high }) {
  clearRect(0, gutter(), gutter(), high);
  forEachLabel(y, topEdge(), high, s, rowLabel);
}

export function drawColumnLabels({ left, right, x, s }) {
  clearRect(left - gap, 0, right - left + 2 * gap, gutter());
  forEachLabel(x, left, right, s, columnLabel);
}

export const font = (weight = 400) => `${weight} 10.5px ${getComputedStyle(canvas).fontFamily}`;

function rowLabel(text, y) {
  context.textAlign = "right";
  context.fillText(text, gutter() - 6, y);
}

function columnLabel(text, x) {
  context.save();
  context.translate(x, gutter() - 4);
  context.rotate(-Math.PI / 2);
  context.textAlign = "left";
  context.fillText(text, 0, 0);
  context.restore();
}

export function labelText(n, size) {
  const text = size > 1 ? tokenIndex(n, size) : tokenName(n, 1);
  const room = floor((maxGutter() - 12) / 6.4);
  return text.length > room ? `${text.slice(0, room - 1)}…` : text;
}

export function drawPanelName({ panel, right }) {
  const text = headName(panel.head);
  context.font = font(650);
  context.textAlign = "right";
  const wide = context.measureText(text).width + 12;
  context.fillStyle = colour("ink");
  context.fillRect(right - wide, topEdge() + 4, wide, 18);
  context.fillStyle = colour("paper");
  context.fillText(text, right - 6, topEdge() + 13.5);
}

// The cross: its row and column edged in every picture, their tokens drawn over the other labels.
export function drawCross(frames) {
  const { q, k } = viewport.cross,
    { s, size, y, high } = frames[0];
  const extent = tokens.length * s,
    band = max(2, round(size * s)) + 1;
  for (const frame of frames)
    clipTo(frame, () => {
      context.strokeStyle = colour("cross");
      if (q !== null) context.strokeRect(frame.x - 0.5, round(y + q * s) - 0.5, extent + 1, band);
      if (k !== null) context.strokeRect(round(frame.x + k * s) - 0.5, y - 0.5, band, extent + 1);
    });
  context.font = font(650);
  if (q !== null) {
    const text = labelText(floor(q / size), size),
      middle = min(high - 9, max(topEdge() + 8, y + (q + size / 2) * s)),
      length = context.measureText(text).width + 10;
    drawLabelBox([0, middle - 13, gutter() - 1, 26], [gutter() - 1 - length, middle - 9, length, 18]);
    rowLabel(text, middle);
  }
  if (k !== null)
    for (const { left, right, x } of frames) {
      const text = labelText(floor(k / size), size),
        middle = min(right - 9, max(left + 8, x + (k + size / 2) * s)),
        length = context.measureText(text).width + 9;
      drawLabelBox([middle - 13, 0, 26, gutter()], [middle - 9, gutter() - length, 18, length]);
      columnLabel(text, middle);
    }
}

function drawLabelBox(room, plate) {
  clearRect(...room);
  context.fillStyle = colour("ink");
  context.fillRect(...plate);
  context.fillStyle = colour("paper");
}

export const updateKey = (size) => keyTokensPerCell !== size && drawKey();

export function drawKey() {
  const [panel] = viewport.look ? viewport.panels : [];
  const bar = $("key").querySelector("canvas"),
    row = bar.getContext("2d"),
    image = row.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(panel?.signed ? signedRamp(theme()) : ramp(theme()));
  row.putImageData(image, 0, 0);
  const size = viewport.look ? tokensPerCell() : 1;
  keyTokensPerCell = size;
  const top = panel ? topAt(panel, size) : 1;
  const ticks = (panel?.signed ? [-1, 0, 1] : [0, 0.1, 0.4, 1]).map((value) => {
    const node = make("span", formatNumber(Number((value * top).toPrecision(2)), 3).replace(/\.?0+$/, "") || "0");
    const at = sign(value) * sqrt(abs(value));
    node.style.left = `${100 * (panel?.signed ? (1 + at) / 2 : at)}%`;
    return node;
  });
  $("key")
    .querySelector("p")
    .replaceChildren(...ticks);
  $("key").querySelector("small").textContent = keyText(panel, size);
}

function keyText(panel, size) {
  const which = panel?.signed ? `${headName(panel.parts[0].head)} less ${headName(panel.parts[1].head)}: ` : "";
  const more = panel && panel.pooled > 1 ? "; more is coloured alike" : "";
  if (size === 1) return `${which}weight of a query on a key${more}`;
  const square = `${size} × ${size} tokens a cell`;
  return `${which}${panel.by === "max" ? "greatest weight" : "share of a query's attention"}, ${square}${more}`;
}
