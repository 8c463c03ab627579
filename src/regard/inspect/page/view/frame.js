// Where things stand in the large picture, in pixels and tokens: zooming, panning, and what lies under the pointer.
// The picture scrolls in a box of its own. Two heads side by side scroll as one.

const matrix = $("matrix");
const roll = matrix.querySelector(".roll");
const plot = roll.querySelector("canvas");
const pen = plot.getContext("2d");
const strip = 26; // pixels for the bars of what each key receives
const between = 14; // pixels between two pictures
let panels = []; // what is drawn, from left to right: the open head, the one beside it, or their difference
let view = null; // the open head
let zoom = 1;

const widest = () => (matrix.clientWidth < 480 ? 62 : 92);
const gutter = () => min(widest(), view.margin);
const top_ = () => gutter() + strip;
const broad = () => (matrix.clientWidth - gutter() - between * (panels.length - 1)) / panels.length;
const leftOf = (panel) => gutter() + panel * (broad() + between);
const fitted = () => max(1e-4, min(broad(), matrix.clientHeight - top_()) / tokens.length);
const perToken = () => fitted() * zoom; // pixels
const deepest = () => max(1, 48 / fitted());
const readable = () => max(1.5, 13 / fitted());

// Tokens per cell of what is drawn: of the stored picture, or fewer where single weights can be computed.
function grain() {
  const { pooled } = view;
  if (!panels.every(({ parts }) => parts.every((part) => part.head.close))) return pooled;
  const wanted = 2 ** max(0, ceil(log2(1 / perToken()) - 0.01));
  return wanted <= 16 && (wanted < pooled || wanted === 1) ? wanted : pooled;
}

// The pair under the pointer, as the first tokens of its cell; one of them is null beside or above the picture.
function cellAt(event) {
  if (!view) return null;
  const box = matrix.getBoundingClientRect(),
    size = grain();
  const x = event.clientX - box.left,
    y = event.clientY - box.top;
  const panel = max(0, min(panels.length - 1, floor((x - gutter()) / (broad() + between))));
  const cell = (at) => floor(at / perToken() / size) * size;
  const k = x < gutter() ? null : cell(x - leftOf(panel) + matrix.scrollLeft);
  const q = y < top_() ? null : cell(y - top_() + matrix.scrollTop);
  const inside = (n) => n === null || (n >= 0 && n < tokens.length);
  return (q === null && k === null) || !inside(q) || !inside(k) || x > leftOf(panel) + broad() ? null : { q, k };
}

// ---- zooming --------------------------------------------------------------------------------------------------------

// Zoom to a level, so that what is at (x, y) of the box stays there.
function zoomTo(level, x = leftOf(0) + broad() / 2, y = (top_() + matrix.clientHeight) / 2) {
  if (!view) return;
  const before = perToken(),
    wanted = level * fitted();
  makeRoom(level);
  zoom = max(1, min(level > 1 ? wanted / fitted() : 1, deepest()));
  const scale = perToken() / before;
  const left = leftOf(max(0, min(panels.length - 1, floor((x - gutter()) / (broad() + between)))));
  stretch();
  matrix.scrollTo(
    (matrix.scrollLeft + x - left) * scale - x + left,
    (matrix.scrollTop + y - top_()) * scale - y + top_(),
  );
  drawPlot();
  tellPair();
  keepPlace();
}

function zoomAt(event, level) {
  const box = matrix.getBoundingClientRect();
  zoomTo(level, event.clientX - box.left, event.clientY - box.top);
}

// Room to scroll in, as large as the picture is at this zoom. Two pictures need no more height than they have width.
function stretch() {
  matrix.style.maxHeight = panels.length > 1 ? `${ceil(top_() + broad())}px` : "";
  const extent = tokens.length * perToken();
  roll.style.width = `${floor(matrix.clientWidth - broad() + extent)}px`;
  roll.style.height = `${floor(top_() + extent)}px`;
  $("key").style.right = `${max(0, broad() - extent) + 10}px`; // in the picture's corner
}

// The key stands in the empty half of a picture, unless there is none: then it has a line of its own.
const makeRoom = (level) => $("stage").classList.toggle("aside", !causal || level > 1.05 || panels.length > 1);

// Bring a pair into the middle, with `span` tokens across.
function goTo(q, k, span) {
  if (!view) return;
  makeRoom(2);
  zoom = max(1, min(deepest(), broad() / span / fitted()));
  stretch();
  const s = perToken();
  matrix.scrollTo((k + 0.5) * s - broad() / 2, (q + 0.5) * s - (matrix.clientHeight - top_()) / 2);
  drawPlot();
  tellPair();
  keepPlace();
}

// Single weights around a pair, with tokens on both sides.
const goClose = ({ q, k }) => goTo(q, k, broad() / 14);

// Bring a pair into view if it is not: the cross that keys have moved.
function follow({ q, k }) {
  const s = perToken(),
    size = grain();
  const near = (at, from, room) => min(at * s, max(from, (at + size) * s - room));
  matrix.scrollTo(near(k, matrix.scrollLeft, broad()), near(q, matrix.scrollTop, matrix.clientHeight - top_()));
}

let restTimer = 0;

// The address keeps what is in the middle, once it has come to rest.
function keepPlace() {
  clearTimeout(restTimer);
  restTimer = setTimeout(() => {
    if (!view) return;
    const s = perToken(),
      middle = (from, room) => max(0, min(tokens.length - 1, round((from + room / 2) / s - 0.5)));
    const [q, k] = [middle(matrix.scrollTop, matrix.clientHeight - top_()), middle(matrix.scrollLeft, broad())];
    const at = zoom > 1.01 ? `${q}-${k}-${max(1, round(broad() / s))}` : "";
    if (at === state.at) return;
    state.at = placed = at;
    note();
  }, 300);
}
