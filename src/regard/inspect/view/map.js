// All heads at once: one small picture each, by layer and head or by rank. Beside an open head one steers by it.

const cells = new Map(); // name -> { button, canvas, bar, codes }
const grid = $("grid");
let side = 0; // pixels of a small picture
let places = []; // { head, row, column } of every head that the filter lets through, in the order of reading

function makeMap() {
  for (const head of heads) {
    const canvas = make("canvas", { ariaHidden: "true" });
    const bar = make("i");
    const label = make("span", head.name);
    const button = make("button.cell", { type: "button", tabIndex: -1 }, canvas, bar, label);
    button.style.setProperty("--kind", kindColour(head.kind));
    button.setAttribute("aria-label", describe(head));
    button.addEventListener("click", () => show({ head: head.name }));
    for (const event of ["mouseenter", "focus"]) button.addEventListener(event, () => tell(head));
    cells.set(head.name, { button, canvas, bar, codes: null });
  }
  grid.addEventListener("mouseleave", () => tell(null));
  new ResizeObserver(() => requestAnimationFrame(drawMap)).observe($("map"));
  addEventListener("resize", drawMap);
}

const shown = measures.filter((measure) => measure.key !== "remarkable");

const layers = [...new Set(heads.map((head) => head.layer))].sort((a, b) => a - b); // some layers may have no attention
const layerAt = new Map(layers.map((layer, at) => [layer, at]));

function describe(head) {
  const scores = shown.map(({ key, label }) => `${label} ${figure(head[key])}`).join(", ");
  return `Layer ${head.layer} head ${head.head}, ${head.kind}: ${scores}`;
}

// The line under the map: the head under the pointer, else how to begin.
function tell(head) {
  const line = $("readout");
  line.replaceChildren();
  if (!head) return line.append(make("span.dim", resting()));
  line.append(make("b", head.name), badge(head.kind));
  const pair = valueOf(head, "pair");
  if (pair !== null) line.append(reading("pinned pair", pair));
  for (const { key, label, chance } of shown) line.append(reading(label, head[key], chance && head[chance]));
}

const badge = (kind) => {
  const node = make("span.badge", kind);
  node.style.setProperty("--kind", kindColour(kind));
  return node;
};

function reading(label, value, chance) {
  const note = chance === undefined || chance === null ? "" : ` (chance ${figure(chance)})`;
  return make("span", `${label} `, make("b", figure(value)), make("span.dim", note));
}

function resting() {
  const here = heads.filter(passes).length;
  const which = state.kind ? `${here} of ${heads.length} heads: ${state.kind}. ` : "";
  return `${which}In each picture a row is a query and a column a key it reads. Point at one, or click to open it.`;
}

// ---- where each head stands -----------------------------------------------------------------------------------------

let arranged = "";

function drawMap() {
  const ranked = state.order !== "layer";
  const across = !ranked && state.head === null && layersRunAcross();
  const cell = cellSize(across, ranked);
  const layout = [
    state.order,
    state.kind,
    across,
    cell,
    roomAcross(),
    ranked && state.order === "pair" && JSON.stringify(state.pin),
  ].join();
  if (layout !== arranged) {
    const focused = document.activeElement; // moving a button about would take the focus from it
    arrange(ranked, across, cell);
    if (grid.contains(focused)) focused.focus({ preventScroll: true });
  }
  arranged = layout;
  mark();
  tint(cell);
}

function arrange(ranked, across, cell) {
  const list = ranked
    ? [...heads].filter(passes).sort((a, b) => valueOf(b, state.order) - valueOf(a, state.order))
    : heads;
  grid.className = `${ranked ? "ranked" : "by-layer"} ${cell < 20 ? "tiny" : ""}`;
  grid.style.setProperty("--cell", `${cell}px`);
  grid.replaceChildren(...(ranked ? [] : axes(across, cell)));
  places = [];
  for (const head of list) {
    const layer = layerAt.get(head.layer);
    const [row, column] = across ? [head.head, layer] : [layer, head.head];
    const { button } = cells.get(head.name);
    button.style.gridArea = ranked ? "auto" : `${row + 2} / ${column + 2}`;
    button.classList.toggle("faded", !passes(head));
    grid.append(button);
    if (passes(head)) places.push({ head, row, column });
  }
  if (ranked) for (const place of places) [place.row, place.column] = whereabouts(cells.get(place.head.name).button);
  places.sort((a, b) => a.row - b.row || a.column - b.column);
}

const whereabouts = ({ offsetTop, offsetLeft }) => [offsetTop, offsetLeft];

// Layers across the page when that makes the pictures larger, as on a wide screen; down the page on a narrow one.
function layersRunAcross() {
  const fits = (columns, rows) => Math.min(64, roomAcross() / columns - 2, (innerHeight * 0.66) / rows - 2);
  return fits(layers.length, run.heads) > fits(run.heads, layers.length) && roomAcross() / layers.length >= 24;
}

const roomAcross = () => $("map").clientWidth - 30;

function cellSize(across, ranked) {
  if (state.head !== null)
    return Math.max(4, Math.min(22, Math.floor(Math.min(192 / run.heads, (innerHeight - 192) / layers.length)) - 2));
  if (ranked) return roomAcross() < 500 ? 40 : 52;
  const [columns, rows] = across ? [layers.length, run.heads] : [run.heads, layers.length];
  const cell = roomAcross() / columns - 2;
  return Math.floor(Math.max(5, Math.min(64, cell, cell * rows > innerHeight ? 44 : 64)));
}

function axes(across, cell) {
  const [columns, rows] = across ? [layers.length, run.heads] : [run.heads, layers.length];
  const every = cell < 12 ? 5 : cell < 18 ? 2 : 1;
  const tick = (text, row, column) => {
    const node = make("span.tick-label", text, { ariaHidden: "true" });
    node.style.gridArea = `${row} / ${column}`;
    return node;
  };
  const name = (i, layer) => (i % every ? "" : layer ? layers[i] : i);
  const along = Array.from({ length: columns }, (_, i) => tick(name(i, across), 1, i + 2));
  const down = Array.from({ length: rows }, (_, i) => tick(name(i, !across), i + 2, 1));
  const corner = tick(across ? "layer →" : "head →", 1, 1);
  corner.classList.add("corner");
  return [corner, ...along, ...down];
}

// ---- how each head looks --------------------------------------------------------------------------------------------

let tinted = "";

// Colour the small pictures: all alike, or the more vivid the higher the chosen measure, with a bar to read it off.
function tint(cell) {
  const pixels = Math.max(16, Math.min(128, Math.round(Math.max(cell, 20) * (devicePixelRatio || 1))));
  const pair = state.colour === "pair" ? JSON.stringify(state.pin) : "";
  const arrived = heads.filter((head) => head.picture).length;
  const look = [theme(), pixels, state.colour, pair, arrived].join();
  if (look === tinted) return;
  tinted = look;
  if (pixels !== side) cells.forEach((entry) => (entry.codes = null));
  side = pixels;
  const values = heads.map((head) => valueOf(head, state.colour));
  const top = Math.max(...values.map((value) => value ?? 0)) || 1;
  heads.forEach((head, i) => tintOne(head, values[i] === null ? null : Math.max(0, values[i]) / top));
}

function tintOne(head, strength) {
  const entry = cells.get(head.name);
  entry.bar.style.setProperty("--share", strength === null ? 0 : strength);
  entry.bar.hidden = strength === null;
  if (!head.picture) return;
  entry.codes ??= shrink(head.picture, side);
  paint(entry.canvas, entry.codes, ramp(theme(), Math.sqrt(strength ?? 1)), side);
}

function mark() {
  const first = places.some((place) => place.head.name === state.head) ? state.head : places[0]?.head.name;
  for (const [name, { button }] of cells) {
    button.tabIndex = name === first ? 0 : -1;
    if (name === state.head) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}

// ---- moving ---------------------------------------------------------------------------------------------------------

// The next head in a direction: along the row and on to the next one, or up and down to the nearest column.
function neighbour(name, right, down) {
  const at = places.findIndex((place) => place.head.name === name);
  if (at < 0) return places[0]?.head.name ?? name;
  if (right) return (places[at + right] ?? places[at]).head.name;
  const { row, column } = places[at];
  const ahead = places.filter((place) => Math.sign(place.row - row) === down);
  const cost = (place) => 1000 * Math.abs(place.row - row) + Math.abs(place.column - column);
  return (ahead.sort((a, b) => cost(a) - cost(b))[0] ?? places[at]).head.name;
}

function move(right, down) {
  const focused = document.activeElement?.closest?.(".cell");
  const from = state.head ?? [...cells].find(([, entry]) => entry.button === focused)?.[0];
  const to = from === undefined ? places[0]?.head.name : neighbour(from, right, down);
  if (to === undefined) return;
  if (state.head !== null) show({ head: to });
  if (state.head === null || focused) cells.get(to).button.focus();
  if (state.head === null) for (const [name, { button }] of cells) button.tabIndex = name === to ? 0 : -1;
}
