// One head, large: the picture with its tokens on both sides, a cross under the pointer, a pair to pin.

const matrix = $("matrix");
const roll = matrix.querySelector(".roll");
const plot = roll.querySelector("canvas");
const pen = plot.getContext("2d");
const sheet = make("canvas"); // the picture, one pixel a cell
let view = null; // { head, first, size, pooled, shares, received }
let zoom = 1;
let cross = null; // { i, j } in cells

function makeMatrix() {
  plot.addEventListener("pointermove", (event) => point(cellAt(event)));
  plot.addEventListener("pointerleave", () => point(null));
  plot.addEventListener("pointerdown", keepFocus);
  plot.addEventListener("click", (event) => pinPair(cellAt(event)));
  plot.addEventListener("dblclick", (event) => zoomAt(event, zoom > 1 ? 1 : readable()));
  matrix.addEventListener(
    "wheel",
    (event) => event.ctrlKey && (event.preventDefault(), zoomAt(event, zoom * Math.exp(-event.deltaY / 200))),
    { passive: false },
  );
  matrix.addEventListener("scroll", drawPlot);
  matrix.addEventListener("keydown", steer);
  $("zoom-in").onclick = () => zoomTo(zoom * 1.6);
  $("zoom-out").onclick = () => zoomTo(zoom / 1.6);
  $("zoom-fit").onclick = () => zoomTo(zoom > 1 ? 1 : readable());
  $("first").onchange = (event) => show({ first: !event.target.checked });
  $("save").onclick = savePicture;
  $("previous").onclick = () => show({ head: neighbour(state.head, -1, 0) });
  $("next").onclick = () => show({ head: neighbour(state.head, 1, 0) });
  $("close").onclick = () => show({ head: null });
  new ResizeObserver(() => requestAnimationFrame(drawPlot)).observe(matrix);
}

// A click into the picture leaves the arrow keys with the heads.
const keepFocus = (event) => event.pointerType === "mouse" && event.preventDefault();

function drawMatrix() {
  const head = chosen();
  $("focus").hidden = $("side").hidden = head === null;
  document.body.classList.toggle("open", head !== null);
  if (!head) return (view = null);
  $("focus-title").textContent = `Layer ${head.layer} · head ${head.head}`;
  $("focus-kind").replaceWith(Object.assign(badge(head.kind), { id: "focus-kind" }));
  $("first").checked = !state.first;
  matrix.setAttribute(
    "aria-label",
    `Attention of layer ${head.layer} head ${head.head}: rows are queries, columns the keys they read. ` +
      "Arrow keys move the cross, Enter pins a pair.",
  );
  if (!head.picture)
    view = null; // not unpacked yet
  else if (view?.head !== head || view.first !== state.first) look(head);
  $("first-of").textContent = view?.pooled > 1 ? `hide the first ${view.pooled} tokens` : "hide the first token";
  drawKey();
  drawPlot();
  tellPair();
}

function look(head) {
  const { size, pooled } = head.picture;
  const shares = sharesOf(head.picture, state.first);
  view = {
    head,
    first: state.first,
    size,
    pooled,
    shares,
    received: meanByKey(shares, size),
    top: topOf(head.picture, shares),
    painted: "",
    margin: 0,
  };
  pen.font = font(650);
  const labels = Array.from({ length: size }, (_, n) => pen.measureText(clipped(n)).width);
  view.margin = Math.ceil(Math.max(24, ...labels)) + 12;
  if (cross && (cross.i >= size || cross.j >= size)) cross = null;
}

// How much of the queries' attention each key receives, the mean over the queries that may see it.
function meanByKey(shares, size) {
  return Float32Array.from({ length: size }, (_, j) => {
    let sum = 0,
      count = 0;
    for (let i = 0; i < size; i++) if (!Number.isNaN(shares[i * size + j])) ((sum += shares[i * size + j]), count++);
    return count ? sum / count : 0;
  });
}

// ---- geometry -------------------------------------------------------------------------------------------------------

const strip = 26; // pixels for the bars of what each key receives
const widest = () => (matrix.clientWidth < 480 ? 62 : 92);
const gutter = () => Math.min(widest(), view.margin);
const top_ = () => gutter() + strip;
const fitted = () => Math.max(1, Math.min(matrix.clientWidth - gutter(), matrix.clientHeight - top_()) / view.size);
const cellPixels = () => fitted() * zoom;
const readable = () => Math.max(1.5, 13 / fitted());

function cellAt(event) {
  if (!view) return null;
  const box = matrix.getBoundingClientRect(),
    s = cellPixels();
  const x = event.clientX - box.left,
    y = event.clientY - box.top;
  const j = x < gutter() ? null : Math.floor((x - gutter() + matrix.scrollLeft) / s);
  const i = y < top_() ? null : Math.floor((y - top_() + matrix.scrollTop) / s);
  const inside = (n) => n === null || (n >= 0 && n < view.size);
  return (i === null && j === null) || !inside(i) || !inside(j) ? null : { i, j };
}

function zoomTo(level, x = matrix.clientWidth / 2, y = matrix.clientHeight / 2) {
  if (!view) return;
  const before = cellPixels();
  zoom = Math.max(1, Math.min(level, 48 / fitted()));
  const scale = cellPixels() / before;
  drawPlot();
  matrix.scrollTo(
    (matrix.scrollLeft + x - gutter()) * scale - x + gutter(),
    (matrix.scrollTop + y - top_()) * scale - y + top_(),
  );
  drawPlot();
}

function zoomAt(event, level) {
  const box = matrix.getBoundingClientRect();
  zoomTo(level, event.clientX - box.left, event.clientY - box.top);
}
