// A pair of tokens: pointing at it with the cross, saying its weight, pinning it.

function point(cell) {
  const next = cell && (cell.i !== null || cell.j !== null) ? cell : null;
  if (JSON.stringify(next) === JSON.stringify(cross)) return;
  cross = next;
  drawPlot();
  tellPair();
  outline(
    cross &&
      view && {
        q: cross.i === null ? null : cross.i * view.pooled,
        k: cross.j === null ? null : cross.j * view.pooled,
        pooled: view.pooled,
      },
  );
}

function pinPair(cell) {
  if (!cell) return;
  const { pooled } = view;
  const pin = cell.i === null ? null : { q: cell.i * pooled, k: cell.j === null ? null : cell.j * pooled };
  const same = JSON.stringify(pin) === JSON.stringify(state.pin);
  show({ pin: same ? null : pin });
}

// The line above the picture: the pair under the cross, else the pinned one.
function tellPair() {
  const line = $("pair");
  line.replaceChildren();
  if (!view) return;
  const pinned = state.pin &&
    state.pin.k !== null && { i: Math.floor(state.pin.q / view.pooled), j: Math.floor(state.pin.k / view.pooled) };
  const at = cross && cross.i !== null && cross.j !== null ? cross : pinned;
  if (at) line.append(...pairWords(at));
  if (at && at === pinned && state.colour !== "pair")
    line.append(
      press("in every head", () => show({ colour: "pair" }), "Colour all heads by the weight they give this pair"),
    );
  if (at) return;
  const cells = view.pooled > 1 ? `Each cell is ${view.pooled} × ${view.pooled} tokens.` : "Rows read columns.";
  line.append(make("span.dim", `${cells} A click pins a cell, a double click enlarges.`));
}

function pairWords({ i, j }) {
  const { size, pooled, shares } = view;
  const weight = shares[i * size + j];
  const token = (n) => tokenWords(nameOf(n, pooled), numberOf(n, pooled), n * pooled);
  if (Number.isNaN(weight)) {
    const why = !state.first && j === 0 ? "hidden, rows rescaled" : "may not be seen";
    return [token(i), " → ", token(j), make("span.dim", why)];
  }
  const even = evenShares(view, i);
  const swatch = make("i.swatch");
  swatch.style.background = css(ramp(theme())[shade(weight)]);
  const times = even ? `${figure(weight / even[j], 1)} × even attention` : "";
  return [token(i), " → ", token(j), swatch, make("b", figure(weight)), make("span.dim", times)];
}

// Arrow keys, while the picture has the focus, move the cross.
function steer(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!view || !(step || event.key === "Enter")) return;
  event.preventDefault();
  event.stopPropagation();
  if (event.key === "Enter") return cross && pinPair(cross);
  const [down, right] = step,
    last = view.size - 1,
    by = event.shiftKey ? 10 : 1;
  const clamp = (n) => Math.max(0, Math.min(last, n));
  point({ i: clamp((cross?.i ?? last) + by * down), j: clamp((cross?.j ?? 0) + by * right) });
  $("spoken").textContent = $("pair").textContent;
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
