// The text. Pin a token and the other tokens are coloured: those it attends to, and those that attend to it.

import { $, make, makeButton, on, stopEvent } from "./dom.js";
import { formatCount, formatNumber, tokenIndex, tokenLabel, tokenName, visibleText } from "./format.js";
import { onCross, setCross } from "./pair.js";
import { share } from "./pictures.js";
import { causal, heads, report, tokens } from "./report.js";
import { openHead, passesFilter, state, update } from "./state.js";
import { tokensPerCell, viewport } from "./viewport.js";
import { rowAndColumn } from "./weights.js";

const { floor, min, max, round, sqrt } = Math;

const pageLength = 3000; // tokens on a page of the text; a shorter text is on one
let pageSpans = []; // of the page
let pageStart = 0; // the first token of the page
const hasSpaces = tokens.some((token) => /^\s/.test(token)); // else the tokenizer keeps no spaces, and we set them

export function makeText() {
  onCross(markPair);
  const text = $("text");
  showPage(state.pin?.q ?? 0);
  on(text, "click", (event) => pinToken(event.target.dataset?.token, event.shiftKey));
  on(text, "mouseover", (event) => hoverToken(event.target.dataset?.token));
  on(text, "mouseleave", () => hoverToken(undefined));
  on(text, "keydown", handleTextKey);
}

const spanAt = (n) => pageSpans[n - pageStart];

// Lay out the page of the text that has token n.
function showPage(n) {
  const from = tokens.length > 1.5 * pageLength ? floor(n / pageLength) * pageLength : 0;
  const to = tokens.length > 1.5 * pageLength ? min(tokens.length, from + pageLength) : tokens.length;
  if (pageSpans.length && from === pageStart) return;
  pageStart = from;
  pageSpans = [];
  const pieces = tokens.slice(from, to).flatMap((token, at) => tokenNodes(token, from + at));
  $("text").replaceChildren(...pieces);
  $("text-pages").hidden = to - from === tokens.length;
  const pageButton = (start, label) =>
    Object.assign(
      makeButton(label, () => (showPage(start), colourText())),
      { disabled: start < 0 || start >= tokens.length },
    );
  $("text-pages").replaceChildren(
    pageButton(from - pageLength, "‹ earlier"),
    make("span.dim", `tokens ${formatCount(from)} to ${formatCount(to - 1)} of ${formatCount(tokens.length)}`),
    pageButton(from + pageLength, "later ›"),
  );
}

function tokenNodes(token, n) {
  const [, before, word] = /^(\s*)([^]*)$/.exec(token);
  const lines = before.split("\n").length - 1;
  const span = make("span.word", word || (lines ? "↵" : token || "∅"), {
    title: `token ${n}`,
    tabIndex: pageSpans.length ? -1 : 0,
  });
  span.classList.toggle("generated", n >= report.prompt_tokens);
  span.dataset.token = n;
  span.setAttribute("role", "button");
  pageSpans.push(span);
  const turn = n === report.prompt_tokens ? [make("span.turn", "continuation")] : [];
  return [...turn, word ? before || (hasSpaces || !n ? "" : " ") : "", span, word ? "" : "\n".repeat(lines)];
}

// A pair of tokens; in a causal picture the later one is the query.
const pairOf = (q, k) => (causal ? { q: max(q, k), k: min(q, k) } : { q, k });

// Click pins a token as the query; with Shift, as the key.
function pinToken(name, second) {
  if (name === undefined) return;
  const n = Number(name),
    { pin } = state;
  if (second && pin) return update({ pin: pairOf(pin.q, n) });
  update({ pin: pin && pin.q === n && pin.k === null ? null : { q: n, k: null } });
}

function hoverToken(name) {
  if (!viewport.look) return;
  const size = tokensPerCell(),
    n = name === undefined ? null : floor(Number(name) / size) * size;
  const row = state.pin && floor(state.pin.q / size) * size;
  setCross(n === null ? null : row === null ? { q: n, k: null } : pairOf(row, n));
}

function handleTextKey(event) {
  const n = Number(event.target.dataset?.token);
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -n, End: tokens.length - 1 - n }[event.key];
  if (event.key === "Enter" || event.key === " ") pinToken(event.target.dataset.token, event.shiftKey);
  else if (step === undefined || n + step < 0 || n + step >= tokens.length) return;
  else (showPage(n + step), colourText(), spanAt(n + step).focus());
  stopEvent(event);
}

// Mark the tokens of the pair under the cross.
function markPair(pair) {
  for (const span of $("text").querySelectorAll(".as-query, .as-key")) span.classList.remove("as-query", "as-key");
  if (!pair) return;
  const tag = (from, name) => {
    for (let n = from; from !== null && n < from + pair.span; n++) spanAt(n)?.classList.add(name);
  };
  tag(pair.k, "as-key");
  tag(pair.q, "as-query");
}

// ---- colouring ------------------------------------------------------------------------------------------------------

// The weights from token q to each token, and from each token to q: of the open head, exact where they can be
// computed, or the mean over the heads in view.
function weightsOfToken(q) {
  if (viewport.look?.head.close && state.first) return { span: 1, ...rowAndColumn(viewport.look.head.close, q) };
  const sources = viewport.look
    ? [viewport.look]
    : heads.filter((head) => passesFilter(head) && head.picture?.mean).map((head) => head.picture);
  const outgoing = new Float32Array(tokens.length),
    incoming = new Float32Array(tokens.length);
  for (const source of sources) {
    const { size, pooled } = source,
      row = floor(q / pooled);
    const weight = (i, j) => (source.means ? source.means[i * size + j] || 0 : share(source, i, j)) / sources.length;
    for (let n = 0; n < tokens.length; n++) {
      outgoing[n] += weight(row, floor(n / pooled));
      incoming[n] += weight(floor(n / pooled), row);
    }
  }
  return { span: sources[0]?.pooled ?? 1, outgoing, incoming };
}

let tokenWeights = null; // weights from and to the pinned token

export function drawText() {
  const { pin } = state;
  const head = openHead();
  $("reading-of").textContent = head ? `head ${head.name}` : `mean of ${heads.filter(passesFilter).length} heads`;
  drawHint(pin);
  tokenWeights = pin && weightsOfToken(pin.q);
  if (pin) showPage(pin.q);
  colourText();
  const lists = tokenWeights
    ? [
        strongestList("looks at", "outgoing", tokenWeights.outgoing, (n) => ({ q: pin.q, k: n })),
        strongestList("is looked at by", "incoming", tokenWeights.incoming, (n) => ({ q: n, k: pin.q })),
      ]
    : [];
  $("strongest").replaceChildren(...lists);
  if (pin) scrollToSpan(spanAt(pin.q));
}

function colourText() {
  const { pin } = state;
  pageSpans.forEach((span, at) => {
    const n = pageStart + at;
    span.classList.toggle("pinned", n === pin?.q);
    span.ariaPressed = n === pin?.q;
    span.classList.toggle("target", n === pin?.k);
    const back = tokenWeights && (causal ? n <= pin.q : tokenWeights.outgoing[n] >= tokenWeights.incoming[n]);
    const weight = tokenWeights ? (back ? tokenWeights.outgoing[n] : tokenWeights.incoming[n]) : 0;
    span.style.setProperty("--weight", `${round(100 * sqrt(min(1, weight)))}%`);
    span.classList.toggle("outgoing", Boolean(tokenWeights && back));
    span.classList.toggle("incoming", Boolean(tokenWeights && !back));
  });
}

// Bring a token into view where the text scrolls in a box of its own; the page stays where it is.
function scrollToSpan(span) {
  const box = $("text"),
    top = span.offsetTop - box.offsetTop;
  if (top < box.scrollTop || top + 24 > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
}

function drawHint(pin) {
  const line = $("hint");
  if (!pin) return line.replaceChildren("Click a token to see which tokens it attends to, and which attend to it.");
  const legend = [make("span.legend.outgoing", "looks at"), make("span.legend.incoming", "is looked at by")];
  line.replaceChildren(tokenLabel(visibleText(tokens[pin.q]), pin.q, pin.q), ...legend, makeButton("unpin", unpin));
}

export const unpin = () => update({ pin: null, colour: state.colour === "pair" ? "" : state.colour });

function strongestList(title, className, weights, pinOf) {
  const { span } = tokenWeights;
  const order = [...weights.keys()]
    .filter((n) => n % span === 0 && weights[n] > 0 && (className === "outgoing" || n !== state.pin.q))
    .sort((a, b) => weights[b] - weights[a]);
  const items = order.slice(0, 6).map((n) => {
    const bar = make("i", { ariaHidden: "true" });
    bar.style.width = `${100 * min(1, weights[n])}%`;
    const button = makeButton("", () => update({ pin: pinOf(n) }));
    const label = tokenLabel(tokenName(n / span, span), tokenIndex(n / span, span), n);
    button.append(label, make("b", formatNumber(weights[n])), bar);
    return make("li", button);
  });
  return make(`div.${className}`, make("h3", title), make("ol", ...items));
}
