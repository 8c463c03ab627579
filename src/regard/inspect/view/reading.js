// The text as one reads it. Pin a token and the others take colour: whom it looks at, and who looks at it.

const spans = [];

function makeReading() {
  const text = $("text");
  const spaced = tokens.some((token) => /^\s/.test(token)); // else the tokenizer keeps no spaces, and we set them
  tokens.forEach((token, n) => {
    const [, before, word] = /^(\s*)([^]*)$/.exec(token);
    const lines = before.split("\n").length - 1;
    const label = word || (lines ? "↵" : token || "∅");
    const span = make("span.word", label, { title: `token ${n}`, tabIndex: n ? -1 : 0 });
    span.classList.toggle("written", n >= report.prompt_tokens);
    span.dataset.token = n;
    span.setAttribute("role", "button");
    if (n === report.prompt_tokens) text.append(make("span.turn", "continuation"));
    text.append(word ? before || (spaced || !n ? "" : " ") : "", span, word ? "" : "\n".repeat(lines));
    spans.push(span);
  });
  text.addEventListener("click", (event) => pinToken(event.target.dataset?.token, event.shiftKey));
  text.addEventListener("mouseover", (event) => hoverToken(event.target.dataset?.token));
  text.addEventListener("mouseleave", () => hoverToken(undefined));
  text.addEventListener("keydown", walk);
}

// Click pins the token that looks; with Shift, the token it looks at.
function pinToken(name, second) {
  if (name === undefined) return;
  const n = Number(name),
    { pin } = state;
  if (second && pin) return show({ pin: { q: Math.max(pin.q, n), k: Math.min(pin.q, n) } });
  show({ pin: pin && pin.q === n && pin.k === null ? null : { q: n, k: null } });
}

function hoverToken(name) {
  if (!view) return;
  const cell = name === undefined ? null : Math.floor(Number(name) / view.pooled);
  const row = state.pin && Math.floor(state.pin.q / view.pooled);
  point(
    cell === null
      ? null
      : row === null
        ? { i: cell, j: null }
        : cell <= row
          ? { i: row, j: cell }
          : { i: cell, j: row },
  );
}

function walk(event) {
  const n = Number(event.target.dataset?.token);
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -n, End: spans.length - 1 - n }[event.key];
  if (event.key === "Enter" || event.key === " ") pinToken(event.target.dataset.token, event.shiftKey);
  else if (step === undefined || !spans[n + step]) return;
  else spans[n + step].focus();
  event.preventDefault();
  event.stopPropagation();
}

// Mark the tokens of the pair under the cross.
function outline(pair) {
  for (const span of $("text").querySelectorAll(".asks, .read")) span.classList.remove("asks", "read");
  if (!pair) return;
  const tag = (from, name) =>
    from !== null && spans.slice(from, from + pair.pooled).forEach((span) => span.classList.add(name));
  tag(pair.k, "read");
  tag(pair.q, "asks");
}

// ---- colouring ------------------------------------------------------------------------------------------------------

// What token q gives to each token, and what it gets from each: of the open head, or the mean over the heads in view.
function ties(q) {
  const sources = view ? [view] : heads.filter((head) => passes(head) && head.picture).map((head) => head.picture);
  const gives = new Float32Array(tokens.length),
    gets = new Float32Array(tokens.length);
  for (const source of sources) {
    const { size, pooled } = source,
      row = Math.floor(q / pooled);
    const weight = (i, j) => (source.shares ? source.shares[i * size + j] || 0 : share(source, i, j)) / sources.length;
    for (let n = 0; n < tokens.length; n++) {
      gives[n] += weight(row, Math.floor(n / pooled));
      gets[n] += weight(Math.floor(n / pooled), row);
    }
  }
  return { gives, gets };
}

function drawReading() {
  const { pin } = state;
  const head = chosen();
  $("reading-of").textContent = head ? `head ${head.name}` : `mean of ${heads.filter(passes).length} heads`;
  hint(pin);
  const found = pin && ties(pin.q);
  spans.forEach((span, n) => {
    span.classList.toggle("pinned", n === pin?.q);
    span.ariaPressed = n === pin?.q;
    span.classList.toggle("target", n === pin?.k);
    const back = found && (causal ? n <= pin.q : found.gives[n] >= found.gets[n]);
    const weight = found ? (back ? found.gives[n] : found.gets[n]) : 0;
    span.style.setProperty("--weight", `${Math.round(100 * Math.sqrt(Math.min(1, weight)))}%`);
    span.classList.toggle("given", Boolean(found && back));
    span.classList.toggle("got", Boolean(found && !back));
  });
  const lists = found
    ? [
        strongest("looks at", "given", found.gives, (n) => ({ q: pin.q, k: n })),
        strongest("is looked at by", "got", found.gets, (n) => ({ q: n, k: pin.q })),
      ]
    : [];
  $("strongest").replaceChildren(...lists);
  if (pin) reveal(spans[pin.q]);
}

// Bring a token into view where the text scrolls in a box of its own; the page stays where it is.
function reveal(span) {
  const box = $("text"),
    top = span.offsetTop - box.offsetTop;
  if (top < box.scrollTop || top + 24 > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
}

function hint(pin) {
  const line = $("hint");
  if (!pin) return line.replaceChildren("Click a token to see whom it looks at and who looks at it.");
  const legend = [make("span.legend.given", "looks at"), make("span.legend.got", "is looked at by")];
  line.replaceChildren(tokenWords(spell(tokens[pin.q]), pin.q, pin.q), ...legend, press("let go", letGo));
}

const letGo = () => show({ pin: null, colour: state.colour === "pair" ? "" : state.colour });

function strongest(title, className, weights, pinOf) {
  const pooled = (view ?? heads.find((head) => head.picture)?.picture)?.pooled ?? 1;
  const order = [...weights.keys()]
    .filter((n) => n % pooled === 0 && weights[n] > 0 && (className === "given" || n !== state.pin.q))
    .sort((a, b) => weights[b] - weights[a]);
  const items = order.slice(0, 6).map((n) => {
    const bar = make("i", { ariaHidden: "true" });
    bar.style.width = `${100 * Math.min(1, weights[n])}%`;
    const button = press("", () => show({ pin: pinOf(n) }));
    const words = tokenWords(nameOf(n / pooled, pooled), numberOf(n / pooled, pooled), n);
    button.append(words, make("b", figure(weights[n])), bar);
    return make("li", button);
  });
  return make(`div.${className}`, make("h3", title), make("ol", ...items));
}
