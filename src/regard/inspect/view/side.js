// One head in numbers: each score on its own bar with its chance value, and how far back the head reads.

function drawSide() {
  const head = chosen();
  if (!head) return;
  $("scores").replaceChildren(...shown.flatMap((measure) => score(head, measure)));
  const others = heads.filter(
    (other) => other.layer === head.layer && other.kv_head === head.kv_head && other !== head,
  );
  const names = others.map((other) => other.head).sort((a, b) => a - b);
  $("sharing").textContent = names.length
    ? `Shares key head ${head.kv_head} with head${names.length > 1 ? "s" : ""} ${names.join(", ")}.`
    : "";
  if (head.picture && view) drawDistance();
}

function score(head, { key, label, chance, unit }) {
  const top = Math.max(
    unit ? 0 : 1,
    ...heads.map((other) => other[key] ?? 0),
    ...(chance ? heads.map((other) => other[chance] ?? 0) : []),
  );
  const place = (value) => `${100 * Math.max(0, Math.min(1, (value ?? 0) / top))}%`;
  const bar = make("span.gauge", { ariaHidden: "true" }, make("i"));
  bar.firstChild.style.width = place(head[key]);
  const by = chance && head[chance] !== null ? head[chance] : null;
  if (by !== null) {
    const tick = make("u");
    tick.style.left = place(by);
    bar.append(tick);
  }
  const note = by === null ? "" : `chance ${figure(by)}`;
  return [
    make("dt", label, { title: definitions[key]?.formula ?? "" }),
    make("dd", bar, make("b", figure(head[key])), make("span.dim", note)),
  ];
}

// The mean entropy of even attention over all that the order of the tokens allows.
const evenEntropy = tokens.reduce((sum, _, i) => sum + Math.log(causal ? i + 1 : tokens.length) / tokens.length, 0);

// What each cell of row i would get if attention were even over all that the order of the tokens allows; null where the
// head's mask allows less (a window), which its chance entropy tells and the picture does not.
function evenShares({ head, size, pooled, shares }, i) {
  if (Math.abs(evenEntropy - head.entropy_chance) > 0.01) return null;
  const keys = Float32Array.from({ length: size }, (_, j) =>
    Number.isNaN(shares[i * size + j]) ? 0 : keysIn(j, pooled) * (causal && i === j ? (pooled + 1) / (2 * pooled) : 1),
  );
  const sum = keys.reduce((a, b) => a + b, 0);
  return keys.map((count) => count / sum);
}

// Attention by distance back, in bins 0, 1, 2-3, 4-7, ...; beside it what even attention would give.
function byDistance({ size, pooled, shares }) {
  const bins = [];
  const add = (distance, found, even) => {
    const bin = Math.sign(distance) * (distance === 0 ? 0 : 1 + Math.floor(Math.log2(Math.abs(distance))));
    const entry = (bins[bin + 40] ??= { bin, found: 0, even: 0 });
    entry.found += found / size;
    entry.even += even / size;
  };
  for (let i = 0; i < size; i++) {
    const even = evenShares(view, i);
    for (let j = 0; j < size; j++)
      if (!Number.isNaN(shares[i * size + j])) add((i - j) * pooled, shares[i * size + j], even?.[j] ?? 0);
  }
  return bins.filter(Boolean);
}

function drawDistance() {
  const bins = byDistance(view);
  const top = Math.max(...bins.flatMap(({ found, even }) => [found, even]));
  const name = (bin) =>
    bin === 0 ? (view.pooled > 1 ? `<${view.pooled}` : "0") : `${bin < 0 ? "+" : ""}${2 ** (Math.abs(bin) - 1)}`;
  const bars = bins.map(({ bin, found, even }) => {
    const bar = make(
      "span.column",
      make("i"),
      make("u", { hidden: even === 0 }),
      make("b", Math.round(100 * found) || ""),
      make("small", name(bin)),
    );
    bar.children[0].style.height = `${(100 * found) / top}%`;
    bar.children[2].style.bottom = `${(100 * Math.max(found, even)) / top}%`;
    bar.children[1].style.bottom = `${(100 * even) / top}%`;
    return bar;
  });
  const even = bins.some((bin) => bin.even) ? "; the line is even attention" : "";
  const note = make("figcaption", `% of attention, by tokens back (2 = 2 to 3, 4 = 4 to 7 …)${even}`);
  $("distance").replaceChildren(make("div.columns-chart", ...bars), note);
  $("distance").setAttribute(
    "aria-label",
    bins.map(({ bin, found }) => `${name(bin)} tokens back: ${Math.round(100 * found)} percent`).join("; "),
  );
}
