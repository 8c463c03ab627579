// The report that this file carries, and its pictures: one byte a weight, 255 * sqrt(weight), deflated layer by layer.

const report = JSON.parse(document.getElementById("report").textContent);
const { run, tokens, measures, definitions } = report;
const heads = report.heads.rows.map((row, rank) => {
  const head = Object.fromEntries(report.heads.columns.map((column, i) => [column, row[i]]));
  return Object.assign(head, { rank, name: `${head.layer}.${head.head}`, picture: null });
});
const { causal } = report.pictures; // no query reads a later key
const byName = new Map(heads.map((head) => [head.name, head]));
const kinds = [...new Set(heads.map((head) => head.kind))];
const square = new Float32Array(256).map((_, code) => (code / 255) ** 2);

// ---- words ----------------------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);

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
  return x > 0 && x < 0.001 ? "<0.001" : x.toFixed(x >= 100 ? 0 : x >= 10 ? 1 : digits);
}
const thousands = (x) => Math.round(x).toLocaleString("en-GB").replaceAll(",", "\u202f");

// "Calloway", or the first and last token of a pooled cell.
function nameOf(cell, pooled) {
  if (pooled === 1) return spell(tokens[cell] ?? "");
  const last = Math.min(tokens.length, (cell + 1) * pooled) - 1;
  return `${spell(tokens[cell * pooled] ?? "")} … ${spell(tokens[last] ?? "")}`;
}

function numberOf(cell, pooled) {
  return pooled === 1 ? `${cell}` : `${cell * pooled}–${Math.min(tokens.length, (cell + 1) * pooled) - 1}`;
}

// A token with its number beneath, in the colour of what the model wrote if it did.
const tokenWords = (name, number, n) =>
  make(n < report.prompt_tokens ? "span.token" : "span.token.written", name, make("sub", number));

const press = (text, onclick, title = "") => make("button", text, { type: "button", onclick, title });

// ---- pictures -------------------------------------------------------------------------------------------------------

async function inflate(base64) {
  const packed = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Unpack every layer, in order, and tell `ready` of each so that pictures appear as they arrive.
async function unpack(ready) {
  for (const { id, pictures } of report.pictures.blocks) {
    const bytes = await inflate($(id).textContent);
    let at = 0;
    for (const { head: name, size, pooled } of pictures) {
      const length = causal ? (size * (size + 1)) / 2 : size * size;
      byName.get(name).picture = { size, pooled, codes: bytes.subarray(at, at + length) };
      at += length;
    }
    ready(pictures.map((picture) => byName.get(picture.head)));
  }
}

// Where row `i` of a picture starts, and how many cells it has: a causal picture stores its lower half only.
const rowStart = (size, i) => (causal ? (i * (i + 1)) / 2 : i * size);
const rowLength = (size, i) => (causal ? i + 1 : size);

// The share of its attention that a query of cell i gives to the keys of cell j. A pooled cell stores the mean weight
// of its pairs, so the share is that mean times the number of keys in the cell.
function share({ size, pooled, codes }, i, j) {
  if (j >= rowLength(size, i)) return 0;
  return square[codes[rowStart(size, i) + j]] * keysIn(j, pooled);
}

const keysIn = (cell, pooled) => Math.min(pooled, tokens.length - cell * pooled);

// Every share of a picture, row by row; NaN where no pair is kept. Without the first cell, rows are scaled to sum to 1.
function sharesOf(picture, withFirst = true) {
  const { size } = picture;
  const shares = new Float32Array(size * size).fill(NaN);
  for (let i = 0; i < size; i++) {
    let sum = 0;
    for (let j = withFirst ? 0 : 1; j < rowLength(size, i); j++) sum += shares[i * size + j] = share(picture, i, j);
    if (!withFirst && sum > 0) for (let j = 1; j < rowLength(size, i); j++) shares[i * size + j] /= sum;
  }
  return shares;
}
