// One head, large: its picture with the tokens on both sides, and how one moves about in it.

let cross = null; // { q, k } under the pointer, first tokens of a cell
let dragged = null; // where a drag began
let placed = ""; // the place in the address that was last gone to

function makeMatrix() {
  on(plot, "pointerdown", startDrag);
  on(plot, "pointermove", (event) => drag(event) || point(cellAt(event)));
  on(plot, "pointerup", endDrag);
  on(plot, "pointerleave", () => point(null));
  on(plot, "click", (event) => dragged?.moved || pinPair(cellAt(event)));
  on(plot, "dblclick", (event) => zoomAt(event, zoom > readable() * 0.9 ? 1 : readable()));
  on(matrix, "wheel", wheel, { passive: false });
  on(matrix, "scroll", () => (drawPlot(), keepPlace()));
  on(matrix, "keydown", steer);
  $("zoom-in").onclick = () => zoomTo(zoom * 1.6);
  $("zoom-out").onclick = () => zoomTo(zoom / 1.6);
  $("zoom-fit").onclick = () => zoomTo(zoom > 1 ? 1 : readable());
  $("first").onchange = (event) => show({ first: !event.target.checked });
  $("by").onclick = ({ target }) => target.value && show({ by: target.value });
  $("save").onclick = savePicture;
  $("previous").onclick = () => show({ head: neighbour(state.head, -1, 0) });
  $("next").onclick = () => show({ head: neighbour(state.head, 1, 0) });
  $("close").onclick = () => show({ head: null });
  new ResizeObserver(() => requestAnimationFrame(drawPlot)).observe(matrix);
}

// The wheel zooms where the pointer is. At full view it scrolls the page as everywhere, unless it would zoom in from
// the page's top; with Shift it pans.
function wheel(event) {
  if (!view || event.shiftKey) return;
  const leaving = zoom <= 1 && (event.deltaY > 0 || scrollY > 0);
  if (leaving && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoomAt(event, zoom * Math.exp(-event.deltaY / (event.ctrlKey ? 200 : 400)));
}

// A click into the picture leaves the arrow keys with the heads. Fingers scroll by themselves.
function startDrag(event) {
  if (event.pointerType !== "mouse" || event.button) return (dragged = null);
  event.preventDefault();
  dragged = {
    x: event.clientX,
    y: event.clientY,
    left: matrix.scrollLeft,
    top: matrix.scrollTop,
    moved: false,
    on: true,
  };
}

function drag({ clientX, clientY, pointerId }) {
  if (!dragged?.on) return false;
  const [x, y] = [clientX - dragged.x, clientY - dragged.y];
  if (!dragged.moved && abs(x) + abs(y) < 5) return false;
  if (!dragged.moved) plot.setPointerCapture(pointerId);
  dragged.moved = true;
  matrix.scrollTo(dragged.left - x, dragged.top - y);
  return true;
}

const endDrag = () => dragged && (dragged.on = false);

function drawMatrix() {
  const head = chosen();
  $("focus").hidden = $("side").hidden = head === null;
  document.body.classList.toggle("open", head !== null);
  if (!head) return (view = null);
  $("focus-title").textContent = `Layer ${head.layer} · head ${head.head}`;
  $("focus-kind").replaceWith(Object.assign(badge(head.kind), { id: "focus-kind" }));
  $("first").checked = !state.first;
  $("by").hidden = !(head.picture?.pooled > 1);
  for (const button of $("by").children) {
    button.ariaPressed = button.value === state.by;
    button.disabled = button.value === "max" && !(head.picture?.max || head.close);
  }
  matrix.setAttribute(
    "aria-label",
    `Attention of layer ${head.layer} head ${head.head}: rows are queries, columns the keys they read. ` +
      "Arrow keys move the cross, plus and minus zoom, 0 shows all, Enter pins a pair.",
  );
  lookAll(head);
  document.body.classList.toggle("twin", panels.length > 1);
  document.body.classList.toggle("wordy", panels.length > 1 || view?.pooled > 1);
  $("first-of").textContent = view?.pooled > 1 ? `hide the first ${view.pooled} tokens` : "hide the first token";
  drawKey();
  drawPlot();
  tellPair();
  tellClose(head);
  if (!view) return;
  if (state.at && placed !== state.at) goTo(...state.at.split("-").map(Number));
  placed = state.at;
}

// ---- what is looked at ----------------------------------------------------------------------------------------------

function lookAll(head) {
  const [second, minus] = beside(head);
  const wanted = [head, ...(second ? [second] : [])].filter((one) => one.picture?.mean);
  const name = [
    ...wanted.map((one) => one.name + one.foreign + !!one.picture.max),
    state.by,
    state.first,
    minus,
  ].join();
  for (const one of [head, second]) if (one?.caption && !one.close) openClose(one).then(redraw);
  if (wanted[0] !== head) return (view = null);
  if (view?.name !== name) {
    const looks = wanted.map(look);
    view = Object.assign(looks[0], { name });
    panels = minus && looks[1] ? [difference(looks[0], looks[1])] : looks;
    measureLabels();
    cross = null;
  }
}

function look(head) {
  const { picture } = head,
    { size, pooled } = picture;
  const by = picture[state.by] ? state.by : "mean";
  const means = sharesOf(picture, state.first);
  const shares = by === "mean" ? means : sharesOf(picture, state.first, by);
  const top = topOf(picture, shares),
    single = picture.max ? topOf(picture, by === "max" ? shares : sharesOf(picture, state.first, "max")) : 1;
  const own = { head, by, size, pooled, shares, means, received: meanByKey(means, size), top, single };
  return Object.assign(own, { parts: [own], tiles: new Map(), sheet: make("canvas"), painted: "" });
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

function measureLabels() {
  pen.font = font(650);
  const few = Array.from({ length: min(tokens.length, 400) }, (_, n) => clipped(floor((n * tokens.length) / 400), 1));
  const numbers = view.pooled > 1 ? [numberOf(view.size - 1, view.pooled)] : [];
  view.margin = ceil(max(24, ...[...few, ...numbers].map((text) => pen.measureText(text).width))) + 12;
}

function savePicture() {
  plot.toBlob((blob) => {
    const link = make("a", {
      href: URL.createObjectURL(blob),
      download: `${run.model.replace(/[^\w.-]+/g, "-")}-${state.head}.png`,
    });
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
