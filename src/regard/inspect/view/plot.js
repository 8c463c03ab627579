// Drawing the large picture: the cells, bars of what each key receives, tokens on both sides, the cross, the key.

// The colour of a share: on a scale of roots, so that a tenth is a third of the way to one.
const shade = (w) => Math.min(255, Math.round(255 * Math.sqrt(w / view.top)));

// The share that takes the last colour: 1, or in a pooled picture, where shares are small, what 3 cells in 200 exceed.
function topOf({ pooled, size }, shares) {
  if (pooled === 1) return 1;
  const known = shares.filter((w) => w >= 0).sort();
  return Math.min(1, Math.max(known[Math.floor(known.length * 0.985)] ?? 1, 1 / size));
}

function paintSheet() {
  const { shares, size } = view;
  const codes = Uint8Array.from(shares, (w) => (Number.isNaN(w) ? 0 : Math.max(1, shade(w))));
  paint(sheet, codes, ramp(theme()), size);
  view.painted = theme();
}

function drawPlot() {
  if (!view || !matrix.clientWidth) return;
  if (view.painted !== theme()) paintSheet();
  const ratio = devicePixelRatio || 1,
    wide = matrix.clientWidth,
    high = matrix.clientHeight;
  const extent = view.size * cellPixels();
  roll.style.width = `${Math.floor(gutter() + extent)}px`;
  roll.style.height = `${Math.floor(top_() + extent)}px`;
  plot.width = Math.round(wide * ratio);
  plot.height = Math.round(high * ratio);
  plot.style.width = `${wide}px`;
  plot.style.height = `${high}px`;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const frame = { x: gutter() - matrix.scrollLeft, y: top_() - matrix.scrollTop, s: cellPixels(), wide, high };
  blank(0, 0, wide, high);
  inside(() => drawSheet(frame));
  drawBars(frame);
  drawLabels(frame);
  if (cross) drawCross(frame, cross);
  $("stage").classList.toggle("aside", !causal || zoom > 1.05);
}

function blank(...room) {
  pen.fillStyle = colour("paper");
  pen.fillRect(...room);
}

function inside(draw) {
  pen.save();
  pen.beginPath();
  pen.rect(gutter(), top_(), matrix.clientWidth, matrix.clientHeight);
  pen.clip();
  draw();
  pen.restore();
}

function drawSheet({ x, y, s }) {
  const extent = view.size * s;
  pen.fillStyle = colour("panel");
  pen.fillRect(x, y, extent, extent);
  pen.imageSmoothingEnabled = s < 1;
  pen.drawImage(sheet, x, y, extent, extent);
  pen.lineWidth = 1;
  if (report.prompt_tokens < tokens.length) {
    const at = (report.prompt_tokens / view.pooled) * s;
    pen.strokeStyle = colour("written");
    pen.setLineDash([2, 3]);
    line(x, y + at, x + (causal ? at : extent), y + at);
    line(x + at, y + (causal ? at : 0), x + at, y + extent);
    pen.setLineDash([]);
  }
  const { pin } = state;
  if (!pin) return;
  const i = Math.floor(pin.q / view.pooled),
    j = pin.k === null ? null : Math.floor(pin.k / view.pooled);
  pen.strokeStyle = colour("ink");
  if (j === null) pen.strokeRect(x - 0.5, y + i * s - 0.5, Math.min(extent, causal ? (i + 1) * s : extent) + 1, s + 1);
  else ring(x + (j + 0.5) * s, y + (i + 0.5) * s, Math.max(5, s * 0.75));
}

function line(x, y, to, down) {
  pen.beginPath();
  pen.moveTo(Math.round(x) + 0.5, Math.round(y) + 0.5);
  pen.lineTo(Math.round(to) + 0.5, Math.round(down) + 0.5);
  pen.stroke();
}

function ring(x, y, radius) {
  for (const [width, name] of [
    [4, "paper"],
    [1.75, "ink"],
  ]) {
    pen.beginPath();
    pen.lineWidth = width;
    pen.strokeStyle = colour(name);
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.stroke();
  }
  pen.lineWidth = 1;
}

// Above the picture: the mean share that each key receives.
function drawBars({ x, s }) {
  blank(0, gutter(), matrix.clientWidth, strip);
  pen.fillStyle = colour("bars");
  const peak = Math.max(...view.received) || 1;
  const base = top_() - 3;
  for (let j = 0; j < view.size; j++) {
    const left = x + j * s,
      height = (strip - 6) * Math.sqrt(view.received[j] / peak);
    if (left + s >= gutter() && left < matrix.clientWidth)
      pen.fillRect(Math.max(left, gutter()), base - height, Math.max(s - (s > 4 ? 1 : 0), 0.75), height);
  }
}

// Tokens beside every row and above every column, as many as there is room for.
function drawLabels({ x, y, s, wide, high }) {
  blank(0, 0, gutter(), high);
  blank(0, 0, wide, gutter());
  const every = Math.ceil(11.5 / s);
  pen.font = font();
  pen.textBaseline = "middle";
  for (let n = 0; n < view.size; n += every) {
    pen.fillStyle = colour(n * view.pooled >= report.prompt_tokens ? "written" : "label");
    const middle = (n + 0.5) * s;
    if (y + middle > top_() && y + middle < high) rowLabel(n, y + middle);
    if (x + middle > gutter() && x + middle < wide) columnLabel(n, x + middle);
  }
}

const font = (weight = 400) => `${weight} 10.5px ${getComputedStyle(plot).fontFamily}`;

function rowLabel(n, y) {
  pen.textAlign = "right";
  pen.fillText(clipped(n), gutter() - 6, y);
}

function columnLabel(n, x) {
  pen.save();
  pen.translate(x, gutter() - 4);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "left";
  pen.fillText(clipped(n), 0, 0);
  pen.restore();
}

function clipped(n) {
  const text = view.pooled > 1 ? numberOf(n, view.pooled) : nameOf(n, 1);
  const room = Math.floor((widest() - 12) / 6.4);
  return text.length > room ? `${text.slice(0, room - 1)}…` : text;
}

// The cross: its row and column edged, their tokens written over the other labels.
function drawCross({ x, y, s, wide, high }, { i, j }) {
  pen.strokeStyle = colour("cross");
  const extent = view.size * s,
    band = Math.max(2, Math.round(s)) + 1;
  inside(() => {
    if (i !== null) pen.strokeRect(x - 0.5, Math.round(y + i * s) - 0.5, extent + 1, band);
    if (j !== null) pen.strokeRect(Math.round(x + j * s) - 0.5, y - 0.5, band, extent + 1);
  });
  pen.font = font(650);
  if (i !== null) {
    const middle = Math.min(high - 9, Math.max(top_() + 8, y + (i + 0.5) * s)),
      length = pen.measureText(clipped(i)).width + 10;
    plate([0, middle - 13, gutter() - 1, 26], [gutter() - 1 - length, middle - 9, length, 18]);
    rowLabel(i, middle);
  }
  if (j !== null) {
    const middle = Math.min(wide - 9, Math.max(gutter() + 8, x + (j + 0.5) * s)),
      length = pen.measureText(clipped(j)).width + 9;
    plate([middle - 13, 0, 26, gutter()], [middle - 9, gutter() - length, 18, length]);
    columnLabel(j, middle);
  }
}

function plate(room, plate) {
  blank(...room);
  pen.fillStyle = colour("ink");
  pen.fillRect(...plate);
  pen.fillStyle = colour("paper");
}

function drawKey() {
  const bar = $("key").querySelector("canvas"),
    row = bar.getContext("2d"),
    image = row.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(ramp(theme()));
  row.putImageData(image, 0, 0);
  const ticks = [0, 0.1, 0.4, 1].map((value) => {
    const node = make("span", Number((value * (view?.top ?? 1)).toPrecision(2)));
    node.style.left = `${100 * Math.sqrt(value)}%`;
    return node;
  });
  $("key")
    .querySelector("p")
    .replaceChildren(...ticks);
  const pooled = view?.pooled ?? 1;
  $("key").querySelector("small").textContent =
    pooled === 1
      ? "weight of a query on a key"
      : `share of a query's attention, ${pooled} × ${pooled} tokens a cell; more is coloured alike`;
}
