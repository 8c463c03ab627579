// Drawing of the large picture: cells, bars of what each key receives, tokens on both sides, the cross, the key.

import { colour, paint, ramp, signedRamp, theme } from "./colour.js";
import { drawColumnLabels, drawCross, drawPanelName, drawRowLabels, updateKey } from "./labels.js";
import { causal, report, tokens } from "./report.js";
import { state } from "./state.js";
import { cellsAcross, computeMissing, forgetMissing, tilesInView, topAt } from "./tiles.js";
import {
  barsHeight,
  canvas,
  clearRect,
  clipTo,
  context,
  gap,
  gutter,
  leftOf,
  matrix,
  panelWidth,
  pixelsPerToken,
  placeKey,
  resizeScroller,
  tokensPerCell,
  topEdge,
  viewport,
} from "./viewport.js";

const { min, sqrt, abs, round, sign, max, floor, ceil } = Math;

// The index of a value on the colour ramp: a square-root scale, so that 0.1 is a third of the way to 1. Index 0 is for
// masked pairs. For differences, 128 is no difference.
function codeOf(panel, w, size) {
  if (Number.isNaN(w)) return 0;
  const part = min(1, sqrt(abs(w) / topAt(panel, size)));
  return panel.signed ? 128 + round(127 * part * sign(w)) : max(1, round(255 * part));
}

const rampOf = (panel) => (panel.signed ? signedRamp : ramp)(theme());
export const colourOf = (panel, w, size) => rampOf(panel)[codeOf(panel, w, size)];

// The cells of a picture or a tile as a canvas of one pixel each, repainted when the theme changes.
function paintedCanvas(panel, sheet, values, across, size) {
  const canvas = sheet.canvas ?? sheet.sheet;
  if (sheet.painted !== theme()) {
    paint(
      canvas,
      Uint8Array.from(values, (w) => codeOf(panel, w, size)),
      rampOf(panel),
      across,
    );
    sheet.painted = theme();
  }
  return canvas;
}

export function drawPlot() {
  if (!viewport.look || !matrix.clientWidth) return;
  resizeScroller();
  const ratio = devicePixelRatio || 1,
    wide = matrix.clientWidth,
    high = matrix.clientHeight;
  canvas.width = round(wide * ratio);
  canvas.height = round(high * ratio);
  canvas.style.width = `${wide}px`;
  canvas.style.height = `${high}px`;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  clearRect(0, 0, wide, high);
  forgetMissing();
  const frames = viewport.panels.map((panel, n) => {
    const left = leftOf(n),
      place = {
        x: left - matrix.scrollLeft,
        y: topEdge() - matrix.scrollTop,
        s: pixelsPerToken(),
        size: tokensPerCell(),
      };
    return { panel, left, right: left + panelWidth(), high, ...place };
  });
  for (const frame of frames) {
    clipTo(frame, () => drawSheet(frame));
    drawBars(frame);
    drawColumnLabels(frame);
    if (viewport.panels.length > 1) drawPanelName(frame);
  }
  drawRowLabels(frames[0]);
  if (viewport.cross) drawCross(frames);
  computeMissing(drawPlot);
  updateKey(frames[0].size);
  placeKey(viewport.zoom);
}

function drawSheet(frame) {
  const { panel, x, y, s, size } = frame;
  drawStored(frame);
  if (size < panel.pooled) for (const tile of tilesInView(panel, size, frame)) drawTile(panel, tile, frame);
  context.lineWidth = 1;
  drawTurn(frame);
  const { pin } = state;
  if (!pin) return;
  const [q, k] = [pin.q, pin.k].map((n) => n !== null && floor(n / size) * size);
  context.strokeStyle = colour("ink");
  const along = min(tokens.length, causal ? q + size : tokens.length) * s;
  if (pin.k === null) context.strokeRect(x - 0.5, y + q * s - 0.5, along + 1, max(2, size * s) + 1);
  else ring(x + (k + size / 2) * s, y + (q + size / 2) * s, max(5, size * s * 0.75));
}

// The stored picture, as much of it as is in view.
function drawStored({ panel, left, right, high, x, y, s }) {
  const cell = panel.pooled * s;
  const [from, to] = [floor((left - x) / cell), min(panel.size, ceil((right - x) / cell))];
  const [up, down] = [floor((topEdge() - y) / cell), min(panel.size, ceil((high - y) / cell))];
  context.fillStyle = colour("panel");
  context.fillRect(left, topEdge(), right, high);
  context.imageSmoothingEnabled = cell < 1;
  const sheet = paintedCanvas(panel, panel, panel.shares, panel.size, panel.pooled);
  if (to > from && down > up)
    context.drawImage(
      ...[sheet, from, up, to - from, down - up],
      ...[x + from * cell, y + up * cell, (to - from) * cell, (down - up) * cell],
    );
}

function drawTile(panel, tile, { x, y, s }) {
  const span = cellsAcross * tile.size * s;
  const [left, right] = [0, 1].map((n) => round(x + (tile.column + n) * span));
  const [up, down] = [0, 1].map((n) => round(y + (tile.row + n) * span));
  context.fillRect(left, up, right - left, down - up);
  context.drawImage(paintedCanvas(panel, tile, tile.cells, cellsAcross, tile.size), left, up, right - left, down - up);
}

// The line before the first generated token.
function drawTurn({ x, y, s }) {
  if (report.prompt_tokens >= tokens.length) return;
  const at = report.prompt_tokens * s,
    extent = tokens.length * s;
  context.strokeStyle = colour("generated");
  context.setLineDash([2, 3]);
  line(x, y + at, x + (causal ? at : extent), y + at);
  line(x + at, y + (causal ? at : 0), x + at, y + extent);
  context.setLineDash([]);
}

function line(x, y, to, down) {
  context.beginPath();
  context.moveTo(round(x) + 0.5, round(y) + 0.5);
  context.lineTo(round(to) + 0.5, round(down) + 0.5);
  context.stroke();
}

function ring(x, y, radius) {
  for (const [width, name] of [
    [4, "paper"],
    [1.75, "ink"],
  ]) {
    context.beginPath();
    context.lineWidth = width;
    context.strokeStyle = colour(name);
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.stroke();
  }
  context.lineWidth = 1;
}

// Above the picture: the mean share that each key receives.
function drawBars({ panel, left, right, x, s }) {
  const { received, pooled, size } = panel,
    cell = pooled * s;
  clearRect(left - gap, gutter(), right - left + gap, barsHeight);
  context.fillStyle = colour("bars");
  const peak = max(...received) || 1,
    base = topEdge() - 3;
  for (let j = max(0, floor((left - x) / cell)); j < size && x + j * cell < right; j++) {
    const height = (barsHeight - 6) * sqrt(received[j] / peak),
      from = max(left, x + j * cell),
      to = min(right, x + (j + 1) * cell - (cell > 4 ? 1 : 0));
    context.fillRect(from, base - height, max(to - from, 0.75), height);
  }
}
