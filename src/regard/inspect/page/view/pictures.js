// The stored pictures of heads: one byte a weight, 255 * sqrt(weight). Unpacked layer by layer.

import { $ } from "./dom.js";
import { byName, causal, otherByName, otherReport, report, scoreOf, tokens } from "./report.js";

const { min, log, abs } = Math;

const decoded = new Float32Array(256).map((_, code) => (code / 255) ** 2);

export async function inflate(base64) {
  const text = atob(base64),
    packed = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) packed[n] = text.charCodeAt(n);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Whether all pictures are unpacked.
export const progress = { complete: false };

// Unpack every layer, that of head `first` first, and call `ready` after each so that pictures appear as they arrive.
export async function unpack(first, ready) {
  const all = [report, ...(otherReport ? [otherReport] : [])].flatMap((source) =>
    source.pictures.map((block) => ({
      ...block,
      whole: !source.causal,
      named: source === otherReport ? otherByName : byName,
    })),
  );
  const late = (block) =>
    2 * (block.by === "max") + 4 * (block.named === otherByName) - !!block.pictures.find(({ head }) => head === first);
  for (const { id, by, pictures, whole, named } of all.sort((a, b) => late(a) - late(b))) {
    const bytes = await inflate($(id).textContent);
    let at = 0;
    for (const { head: name, size, pooled } of pictures) {
      const length = whole ? size * size : (size * (size + 1)) / 2;
      const picture = (named.get(name).picture ??= { size, pooled, whole });
      picture[by] = bytes.subarray(at, at + length);
      at += length;
    }
    ready(pictures.map((picture) => named.get(picture.head)));
  }
}

// Where row `i` of a picture starts, and how many cells it has: a causal picture stores its lower half only.
export const rowStart = ({ size, whole }, i) => (whole ? i * size : (i * (i + 1)) / 2);
export const rowLength = ({ size, whole }, i) => (whole ? size : i + 1);

// The share of its attention that a query of cell i gives to the keys of cell j. A pooled cell stores the mean weight
// of its pairs, so the share is that mean times the number of keys in the cell. By "max": the greatest weight.
export function share(picture, i, j, by = "mean") {
  if (j >= rowLength(picture, i)) return 0;
  const w = decoded[picture[by][rowStart(picture, i) + j]];
  return by === "max" ? w : w * keysIn(j, picture.pooled);
}

const keysIn = (cell, pooled) => min(pooled, tokens.length - cell * pooled);

// Every share of a picture, row by row; NaN where no pair is kept. Without the first cell, rows are scaled to sum to 1.
export function sharesOf(picture, withFirst = true, by = "mean") {
  const { size } = picture;
  const shares = new Float32Array(size * size).fill(NaN);
  for (let i = 0; i < size; i++) {
    let rest = 0;
    for (let j = withFirst ? 0 : 1; j < rowLength(picture, i); j++) {
      shares[i * size + j] = share(picture, i, j, by);
      if (!withFirst) rest += share(picture, i, j);
    }
    if (rest > 0) for (let j = 1; j < rowLength(picture, i); j++) shares[i * size + j] /= rest;
  }
  return shares;
}

// ---- distance -------------------------------------------------------------------------------------------------------

// The mean entropy of uniform attention over all keys that causality allows (over all keys, if not causal).
const evenEntropy = tokens.reduce((sum, _, i) => sum + log(causal ? i + 1 : tokens.length) / tokens.length, 0);

// Whether the head's mask is plainly causal (or absent): known from its chance entropy, not from the picture.
export const seesAll = (head) => abs(evenEntropy - (scoreOf(head, "entropy").chance ?? NaN)) < 0.01;

// The shares of the cells of row i under uniform attention over all keys that causality allows; null where the head's
// mask allows fewer (a window).
export function evenShares({ head, size, pooled, shares }, i) {
  if (!seesAll(head)) return null;
  const keys = Float32Array.from({ length: size }, (_, j) =>
    Number.isNaN(shares[i * size + j]) ? 0 : keysIn(j, pooled) * (causal && i === j ? (pooled + 1) / (2 * pooled) : 1),
  );
  const sum = keys.reduce((a, b) => a + b, 0);
  return keys.map((count) => count / sum);
}
