// The report that this file carries: scores, tokens, and the pictures, one byte a weight, 255 * sqrt(weight).

const { min, max, floor, ceil, round, abs, sqrt, hypot, log, log2, log10, sign } = Math;
const report = JSON.parse(document.getElementById("report").textContent);
const { run, tokens, definitions, causal } = report; // causal: no query reads a later key
const rival = report.other ?? null; // the report of the model that this one is compared with

const measures = report.measures.map((key) => ({ key, label: labelOf(key), unit: definitions[key]?.unit ?? "" }));
const heads = headsOf(report);
const byName = new Map(heads.map((head) => [head.name, head]));
const rivals = rival ? headsOf(rival, true) : [];
const rivalNamed = new Map(rivals.map((head) => [head.name, head]));
const matched = rivals.length === heads.length && heads.every((head) => rivalNamed.has(head.name));
const theirs = rival?.tokens ?? tokens;
const alike = theirs.length === tokens.length && tokens.slice(0, report.prompt_tokens).every((t, n) => t === theirs[n]);
const kinds = [...new Set(heads.map((head) => head.kind))];
const square = new Float32Array(256).map((_, code) => (code / 255) ** 2);
if (matched) measures.push(...differences());

function labelOf(key) {
  return definitions[key]?.label || key.replaceAll("_", " ");
}

function headsOf(source, foreign = false) {
  const closes = new Map(source.closes.map((close) => [close.head, close]));
  return source.heads.map((head, rank) => {
    const name = `${head.layer}.${head.head}`;
    return { ...head, rank, name, foreign, picture: null, caption: closes.get(name), close: null };
  });
}

// Each measure less that of the same head of the other model: a measure of its own, to colour, sort and filter by.
function differences() {
  const shared = measures.filter(({ key }) => rival.measures.includes(key));
  for (const { key } of shared)
    for (const head of heads) {
      const [mine, other] = [valueOf(head, key), valueOf(rivalNamed.get(head.name), key)];
      if (mine !== null && other !== null) head.scores[`Δ${key}`] = [mine - other];
    }
  return shared.map(({ key, label, unit }) => ({ key: `Δ${key}`, label: `Δ ${label}`, unit, of: key }));
}

// A score is [value, chance, low, high]; what is missing is null.
function scoreOf(head, key) {
  const [value = null, chance = null, low = null, high = null] = head?.scores[key] ?? [];
  return { value, chance, low, high };
}

function valueOf(head, key) {
  return head?.scores[key]?.[0] ?? null;
}

const measureNamed = (key) => measures.find((measure) => measure.key === key);

// The least and greatest value of a measure, of both models, and of its chance unless that is far off; 0 is always
// within, and 1 for what is a share.
function rangeOf(key) {
  const values = [...heads, ...rivals].map((head) => valueOf(head, key)).filter((value) => value !== null);
  const furthest = max(...values.map(abs), 1e-9);
  if (measureNamed(key)?.of) return [-furthest, furthest];
  const chances = heads.map((head) => scoreOf(head, key).chance),
    highest = max(0, ...values),
    greatest = max(highest, ...chances.filter((chance) => chance < 3 * highest));
  const share = greatest > 0.25 && greatest <= 1 && key !== "remarkable";
  return [min(0, ...values), share ? 1 : greatest || 1];
}

// ---- words ----------------------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);
const halt = (event) => (event.preventDefault(), event.stopPropagation());
const on = (node, event, act, options) => node.addEventListener(event, act, options);

// An element: make("span.dim", "words", otherElement, { title: "a property" }).
function make(what, ...inside) {
  const [tag, ...names] = what.split(".");
  const node = document.createElement(tag);
  node.className = names.join(" ");
  for (const item of inside) item?.constructor === Object ? Object.assign(node, item) : node.append(item);
  return node;
}

const visible = { "\n": "↵", "\t": "⇥", "\r": "␍", " ": "·" };
const spell = (token) => (token === "" ? "∅" : token.replace(/[\n\t\r]|^ | $/g, (c) => visible[c]));

function figure(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  const size = abs(x);
  if (size > 0 && size < 0.001 && digits > 2) return x > 0 ? "<0.001" : ">−0.001";
  return (x < 0 ? "−" : "") + size.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : digits);
}

const exact = (x) => (x === 0 || x >= 1e-4 ? x.toPrecision(4) : x.toExponential(3));
const thousands = (x) => round(x).toLocaleString("en-GB").replaceAll(",", "\u202f");

// "chance 0.031 · 0.86 to 0.91": what one must know to read a value.
function besides({ chance, low, high }) {
  const parts = [chance === null ? "" : `chance ${figure(chance)}`];
  if (low !== null && high !== null) parts.push(`${figure(low, 2)} to ${figure(high, 2)}`);
  return parts.filter(Boolean).join(" · ");
}

// "Calloway", or the first and last token of a cell of several.
function nameOf(cell, grain) {
  if (grain === 1) return spell(tokens[cell] ?? "");
  const last = min(tokens.length, (cell + 1) * grain) - 1;
  return `${spell(tokens[cell * grain] ?? "")} … ${spell(tokens[last] ?? "")}`;
}

function numberOf(cell, grain) {
  return grain === 1 ? `${cell}` : `${cell * grain}–${min(tokens.length, (cell + 1) * grain) - 1}`;
}

// A token with its number beneath, in the colour of what the model wrote if it did.
const tokenWords = (name, number, n) =>
  make(n < report.prompt_tokens ? "span.token" : "span.token.written", name, make("sub", number));

const press = (text, onclick, title = "") => make("button", text, { type: "button", onclick, title });

// ---- pictures -------------------------------------------------------------------------------------------------------

async function inflate(base64) {
  const text = atob(base64),
    packed = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) packed[n] = text.charCodeAt(n);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Unpack every layer, the open head's first, and tell `ready` of each so that pictures appear as they arrive.
async function unpack(ready) {
  const all = [report, ...(rival ? [rival] : [])].flatMap((source) =>
    source.pictures.map((block) => ({
      ...block,
      whole: !source.causal,
      named: source === rival ? rivalNamed : byName,
    })),
  );
  const late = (block) =>
    2 * (block.by === "max") +
    4 * (block.named === rivalNamed) -
    !!block.pictures.find(({ head }) => head === state.head);
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
const rowStart = ({ size, whole }, i) => (whole ? i * size : (i * (i + 1)) / 2);
const rowLength = ({ size, whole }, i) => (whole ? size : i + 1);

// The share of its attention that a query of cell i gives to the keys of cell j. A pooled cell stores the mean weight
// of its pairs, so the share is that mean times the number of keys in the cell. By "max": the greatest weight.
function share(picture, i, j, by = "mean") {
  if (j >= rowLength(picture, i)) return 0;
  const w = square[picture[by][rowStart(picture, i) + j]];
  return by === "max" ? w : w * keysIn(j, picture.pooled);
}

const keysIn = (cell, pooled) => min(pooled, tokens.length - cell * pooled);

// Every share of a picture, row by row; NaN where no pair is kept. Without the first cell, rows are scaled to sum to 1.
function sharesOf(picture, withFirst = true, by = "mean") {
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
