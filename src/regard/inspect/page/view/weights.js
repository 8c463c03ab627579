// Single weights of a head, from its queries and keys:
//
//     A[i, j] = exp(cap(scale * q[i] . k[j]) + bias[i - j] - total[i]),   cap(x) = softcap * tanh(x / softcap)
//
// for the keys j that row i sees: first[i] <= j < last[i], and the first `prefix` keys before last[i]. Nothing of size
// n x n is stored or computed: only the tile in view.

import { $, on } from "./dom.js";
import { inflate } from "./pictures.js";
import { otherTokens, tokens } from "./report.js";

const { min, max, floor } = Math;

const inflated = new Map(); // id of a block -> its bytes, inflated once: heads may share keys

function bytesOf(id) {
  if (!inflated.has(id))
    inflated.set(
      id,
      documentReady.then(() => inflate($(id).textContent)),
    );
  return inflated.get(id);
}

// Resolved when the browser has parsed the whole file: the close-ups are after the script.
const documentReady = new Promise((ready) =>
  document.readyState === "loading" ? on(document, "DOMContentLoaded", ready) : ready(),
);

// Unpack the close-up of a head and store it in `head.close`.
export async function loadWeights(head) {
  const { caption } = head;
  if (!caption || head.close) return;
  const [rows, keys] = await Promise.all([bytesOf(caption.rows), bytesOf(caption.keys)]);
  const n = head.foreign ? otherTokens.length : tokens.length,
    { dim } = caption;
  const take = reader(rows);
  const q = dequantize(take, n, dim),
    total = new Float32Array(take(n, 4)),
    [first, last] = [0, 1].map(() => cumulativeSum(new Int32Array(take(n, 4)))),
    bias = caption.biased ? new Float32Array(take(2 * n - 1, 4)) : null;
  const k = dequantize(reader(keys), n, dim);
  const rest = new Float32Array(n).fill(NaN);
  head.close = { ...caption, n, q, k, total, first, last, bias, rest, pooled: head.picture?.pooled ?? 1 };
}

// Elements of `size` bytes, stored as byte planes: all lowest bytes first.
function reader(bytes) {
  let at = 0;
  return (count, size) => {
    const out = new Uint8Array(count * size);
    for (let b = 0; b < size; b++) for (let n = 0; n < count; n++) out[n * size + b] = bytes[at++];
    return out.buffer;
  };
}

// Queries or keys: integers, each in steps of its dimension.
function dequantize(take, n, dim) {
  const step = new Float32Array(take(dim, 4));
  return Float32Array.from(new Int16Array(take(n * dim, 2)), (count, at) => count * step[at % dim]);
}

const cumulativeSum = (steps) => steps.forEach((_, n) => n && (steps[n] += steps[n - 1])) ?? steps;

// ---- weights --------------------------------------------------------------------------------------------------------

// The weights of row i on the keys from..to, into `out`; NaN on those that it does not see.
export function weightsOf(close, i, from, to, out) {
  const { first, last, prefix } = close;
  out.fill(NaN, 0, to - from);
  const runs = [
    [from, min(to, prefix, first[i], last[i])],
    [max(from, first[i]), min(to, last[i])],
  ];
  for (const [start, end] of runs) {
    dotProducts(close, i, start, end, out, from);
    for (let j = start; j < end; j++) out[j - from] = weightFrom(close, i, j, out[j - from]);
  }
  return out;
}

function weightFrom({ scale, softcap, bias, total, n }, i, j, product) {
  let score = scale * product;
  if (softcap) score = softcap * Math.tanh(score / softcap);
  return Math.exp(score + (bias ? bias[n - 1 + i - j] : 0) - total[i]);
}

// q[i] . k[j] for the keys from start to end, four keys at a time: twice as fast as one by one.
function dotProducts({ q, k, dim }, i, start, end, out, from) {
  let j = start;
  for (; j + 4 <= end; j += 4) {
    let [a, b, c, d] = [0, 0, 0, 0];
    let ka = j * dim,
      kb = ka + dim,
      kc = kb + dim,
      kd = kc + dim;
    for (let at = i * dim; at < (i + 1) * dim; at++) {
      const x = q[at];
      a += x * k[ka++];
      b += x * k[kb++];
      c += x * k[kc++];
      d += x * k[kd++];
    }
    out[j - from] = a;
    out[j - from + 1] = b;
    out[j - from + 2] = c;
    out[j - from + 3] = d;
  }
  for (; j < end; j++) {
    let sum = 0;
    for (let c = 0; c < dim; c++) sum += q[i * dim + c] * k[j * dim + c];
    out[j - from] = sum;
  }
}

// The divisor of row i when the tokens of the first cell are hidden: the sum of the other weights. (1 minus the hidden
// mass would be rounding error where the hidden mass is nearly 1.) Cached for each row.
function visibleMass(close, i) {
  const { rest, pooled, n } = close;
  if (Number.isNaN(rest[i])) {
    const line = weightsOf(close, i, pooled, n, new Float64Array(n));
    rest[i] = line.reduce((sum, w) => sum + (w || 0), 0) || 1;
  }
  return rest[i];
}

// A square of count x count cells of grain x grain weights, from cell (row, column) on, row by row; yields every few
// rows, so that it can be stopped. By "mean": the share of a query's attention on the keys of a cell; by "max": the
// greatest weight. NaN where no pair is visible.
export function* cellWeights(close, grain, row, column, count, by, withFirst) {
  const { n, pooled } = close;
  const cells = new Float32Array(count * count).fill(NaN);
  const from = column * grain,
    to = min(n, (column + count) * grain);
  const line = new Float64Array(max(0, to - from));
  for (let i = row * grain; i < min(n, (row + count) * grain); i++) {
    if (from < to && (from < close.prefix || (from < close.last[i] && to > close.first[i]))) {
      weightsOf(close, i, from, to, line);
      const base = (floor(i / grain) - row) * count,
        rows = min(grain, n - floor(i / grain) * grain),
        rest = withFirst ? 1 : visibleMass(close, i);
      for (let j = withFirst ? from : max(from, pooled); j < to; j++) {
        const w = line[j - from] / rest;
        if (Number.isNaN(w)) continue;
        const at = base + floor((j - from) / grain),
          before = cells[at] || 0;
        cells[at] = by === "max" ? max(before, w) : before + w / rows;
      }
    }
    yield;
  }
  return cells;
}

export function runToEnd(steps) {
  for (;;) {
    const { done, value } = steps.next();
    if (done) return value;
  }
}

// All weights of query q and all weights on key q: a row and a column.
export function rowAndColumn(close, q) {
  const outgoing = weightsOf(close, q, 0, close.n, new Float64Array(close.n)).map((w) => w || 0);
  const one = new Float64Array(1);
  const incoming = Float64Array.from({ length: close.n }, (_, i) => weightsOf(close, i, q, q + 1, one)[0] || 0);
  return { outgoing, incoming };
}
