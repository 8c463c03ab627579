// Close-ups in tiles: squares of cells computed from queries and keys as they come into view, from the middle outwards,
// a few milliseconds at a time. The stored picture shows until a tile is computed.

import { make } from "./dom.js";
import { causal, tokens } from "./report.js";
import { state } from "./state.js";
import { matrix, panelWidth, pixelsPerToken, tokensPerCell, topEdge } from "./viewport.js";
import { cellWeights, runToEnd } from "./weights.js";

const { max, floor, min, hypot, log } = Math;

export const cellsAcross = 64;
const maxTiles = 500; // 16 KB of weights and 16 KB of pixels each
let missingTiles = []; // { panel, grain, row, column, name } that are in view and not computed
let currentTile = null; // the one being computed
let timer = 0;

// The computed tiles of a panel that are in view; the others are added to the missing ones.
export function tilesInView(panel, size, frame) {
  const span = cellsAcross * size,
    s = pixelsPerToken();
  const range = (from, to) => [max(0, floor(from / s / span)), min(tokens.length - 1, to / s) / span];
  const [left, right] = range(matrix.scrollLeft, matrix.scrollLeft + panelWidth());
  const [up, down] = range(matrix.scrollTop, matrix.scrollTop + frame.high - topEdge());
  const there = [];
  for (let row = up; row <= down; row++)
    for (let column = left; column <= right; column++) {
      if (causal && column > row) continue;
      const name = [size, row, column].join();
      const tile = panel.tiles.get(name);
      const far = hypot(row + 0.5 - (up + down) / 2, column + 0.5 - (left + right) / 2);
      if (tile) there.push(tile);
      else missingTiles.push({ panel, size, row, column, name, far });
    }
  return there;
}

export const forgetMissing = () => (missingTiles = []);

// Compute missing tiles, nearest to the middle first; `draw` is called after each few milliseconds.
export function computeMissing(draw) {
  missingTiles.sort((a, b) => a.far - b.far);
  matrix.ariaBusy = missingTiles.length > 0;
  if (missingTiles.length && !timer) timer = setTimeout(computeTiles, 0, draw);
}

function computeTiles(draw) {
  timer = 0;
  if (currentTile && !missingTiles.some((tile) => tile.name === currentTile.name && tile.panel === currentTile.panel))
    currentTile = null;
  const end = performance.now() + 14;
  while (performance.now() < end && (currentTile || missingTiles.length)) {
    currentTile ??= { ...missingTiles[0], steps: tileOf(missingTiles[0]) };
    const { done, value } = currentTile.steps.next();
    if (done) storeTile(currentTile, value);
  }
  draw();
}

function storeTile({ panel, size, row, column, name }, cells) {
  if (panel.tiles.size >= maxTiles) panel.tiles.delete(panel.tiles.keys().next().value);
  panel.tiles.set(name, { size, row, column, cells, canvas: make("canvas"), painted: "" });
  missingTiles = missingTiles.filter((tile) => tile.name !== name || tile.panel !== panel);
  currentTile = null;
}

function* tileOf({ panel, size, row, column }) {
  const [own, other] = panel.parts;
  const at = [size, row * cellsAcross, column * cellsAcross, cellsAcross, own.by, state.first];
  const cells = yield* cellWeights(own.head.close, ...at);
  if (!other) return cells;
  const less = yield* cellWeights(other.head.close, ...at);
  return cells.map((w, n) => w - less[n]);
}

// The value of the cell whose first tokens are q and k: computed, or read from the picture. NaN without a visible pair.
export function valueAt(part, q, k, size = tokensPerCell()) {
  if (part.head.close && (size < part.pooled || size === 1))
    return runToEnd(cellWeights(part.head.close, size, q / size, k / size, 1, part.by, state.first))[0];
  return part.shares[floor(q / part.pooled) * part.size + floor(k / part.pooled)];
}

// The value that takes the last colour: between that of single weights and that of the stored picture.
export function topAt({ pooled, top, single }, size) {
  return pooled === 1 ? top : single * (top / single) ** (log(size) / log(pooled));
}

// The share that takes the last colour: 1; in a pooled picture, where shares are small, what 3 of 200 cells exceed.
export function topOf({ pooled, size }, shares) {
  if (pooled === 1) return 1;
  const known = shares.filter((w) => w >= 0).sort();
  return min(1, max(known[floor(known.length * 0.985)] ?? 1, 1 / size));
}
