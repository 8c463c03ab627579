// The words of the large picture: tokens on both sides, the cross with its two, and the key to the colours.

let keyed = 0; // tokens a cell that the key speaks of

const lineHeight = 11.5; // pixels that a label needs
const wordsUpTo = 32; // tokens a label, 600 tokens on a phone: of more, a number says more of the place than a word

// Tokens beside every row and above every column, as many as there is room for; where one label is for many tokens,
// their numbers.
function eachLabel(start, from, to, s, draw) {
  const room = ceil(lineHeight / s),
    worded = room <= wordsUpTo,
    every = worded ? room : roundAbove(room);
  pen.font = font();
  pen.textBaseline = "middle";
  for (let n = max(0, floor((from - start) / s / every) * every); n < tokens.length; n += every) {
    const middle = start + (n + 0.5) * s;
    if (middle > to - lineHeight / 2) return;
    pen.fillStyle = colour(n >= report.prompt_tokens ? "written" : "label");
    if (middle > from) draw(worded ? clipped(n, 1) : thousands(n), middle);
  }
}

// The next of 1, 2, 5, 10, 20, 50, ...
function roundAbove(n) {
  const ten = 10 ** floor(log10(n));
  return ten * [1, 2, 5, 10].find((step) => step * ten >= n);
}

// The corner above the rows belongs to the first columns, whose words are wider than their cells.
function drawRowLabels({ y, s, high }) {
  blank(0, gutter(), gutter(), high);
  eachLabel(y, top_(), high, s, rowLabel);
}

function drawColumnLabels({ left, right, x, s }) {
  blank(left - between, 0, right - left + 2 * between, gutter());
  eachLabel(x, left, right, s, columnLabel);
}

const font = (weight = 400) => `${weight} 10.5px ${getComputedStyle(plot).fontFamily}`;

function rowLabel(text, y) {
  pen.textAlign = "right";
  pen.fillText(text, gutter() - 6, y);
}

function columnLabel(text, x) {
  pen.save();
  pen.translate(x, gutter() - 4);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "left";
  pen.fillText(text, 0, 0);
  pen.restore();
}

function clipped(n, size) {
  const text = size > 1 ? numberOf(n, size) : nameOf(n, 1);
  const room = floor((widest() - 12) / 6.4);
  return text.length > room ? `${text.slice(0, room - 1)}…` : text;
}

function nameFrame({ panel, right }) {
  const text = nameIn(panel.head);
  pen.font = font(650);
  pen.textAlign = "right";
  const wide = pen.measureText(text).width + 12;
  pen.fillStyle = colour("ink");
  pen.fillRect(right - wide, top_() + 4, wide, 18);
  pen.fillStyle = colour("paper");
  pen.fillText(text, right - 6, top_() + 13.5);
}

// The cross: its row and column edged in every picture, their tokens written over the other labels.
function drawCross(frames) {
  const { q, k } = cross,
    { s, size, y, high } = frames[0];
  const extent = tokens.length * s,
    band = max(2, round(size * s)) + 1;
  for (const frame of frames)
    inside(frame, () => {
      pen.strokeStyle = colour("cross");
      if (q !== null) pen.strokeRect(frame.x - 0.5, round(y + q * s) - 0.5, extent + 1, band);
      if (k !== null) pen.strokeRect(round(frame.x + k * s) - 0.5, y - 0.5, band, extent + 1);
    });
  pen.font = font(650);
  if (q !== null) {
    const text = clipped(floor(q / size), size),
      middle = min(high - 9, max(top_() + 8, y + (q + size / 2) * s)),
      length = pen.measureText(text).width + 10;
    plate([0, middle - 13, gutter() - 1, 26], [gutter() - 1 - length, middle - 9, length, 18]);
    rowLabel(text, middle);
  }
  if (k !== null)
    for (const { left, right, x } of frames) {
      const text = clipped(floor(k / size), size),
        middle = min(right - 9, max(left + 8, x + (k + size / 2) * s)),
        length = pen.measureText(text).width + 9;
      plate([middle - 13, 0, 26, gutter()], [middle - 9, gutter() - length, 18, length]);
      columnLabel(text, middle);
    }
}

function plate(room, plate) {
  blank(...room);
  pen.fillStyle = colour("ink");
  pen.fillRect(...plate);
  pen.fillStyle = colour("paper");
}

function drawKey() {
  const [panel] = view ? panels : [];
  const bar = $("key").querySelector("canvas"),
    row = bar.getContext("2d"),
    image = row.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(panel?.signed ? ramps(theme()) : ramp(theme()));
  row.putImageData(image, 0, 0);
  const size = view ? grain() : 1;
  keyed = size;
  const top = panel ? topAt(panel, size) : 1;
  const ticks = (panel?.signed ? [-1, 0, 1] : [0, 0.1, 0.4, 1]).map((value) => {
    const node = make("span", figure(Number((value * top).toPrecision(2)), 3).replace(/\.?0+$/, "") || "0");
    const at = sign(value) * sqrt(abs(value));
    node.style.left = `${100 * (panel?.signed ? (1 + at) / 2 : at)}%`;
    return node;
  });
  $("key")
    .querySelector("p")
    .replaceChildren(...ticks);
  $("key").querySelector("small").textContent = keyWords(panel, size);
}

function keyWords(panel, size) {
  const which = panel?.signed ? `${nameIn(panel.parts[0].head)} less ${nameIn(panel.parts[1].head)}: ` : "";
  const more = panel && panel.pooled > 1 ? "; more is coloured alike" : "";
  if (size === 1) return `${which}weight of a query on a key${more}`;
  const square = `${size} × ${size} tokens a cell`;
  return `${which}${panel.by === "max" ? "greatest weight" : "share of a query's attention"}, ${square}${more}`;
}
