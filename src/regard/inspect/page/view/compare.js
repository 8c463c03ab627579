// Two heads: side by side, or one minus the other; of one model, or the same head of two.

import { $, make } from "./dom.js";
import { counted, formatExact, formatNumber, tokenName } from "./format.js";
import {
  byName,
  heads,
  otherByName,
  otherHeads,
  otherReport,
  otherTokens,
  report,
  run,
  sameHeads,
  sameLength,
  samePrompt,
  sharedTokens,
  tokens,
} from "./report.js";
import { openHead, state, update } from "./state.js";
import { topOf, valueAt } from "./tiles.js";
import { tokensPerCell, viewport } from "./viewport.js";

const { abs, max, min } = Math;

// The head beside the open one, and whether their difference is shown.
export function comparedHead(head) {
  const second = state.vs === "other" ? otherByName.get(head.name) : byName.get(state.vs);
  const fits = second && second !== head && second.picture?.size === head.picture?.size;
  return fits && (!second.foreign || (samePrompt && sameLength)) ? [second, state.how === "difference"] : [null, false];
}

// The open head's picture less the other's.
export function difference(own, other) {
  const shares = own.shares.map((w, n) => w - other.shares[n]);
  const size = shares.map(abs);
  const top = topOf(own.head.picture, size);
  return {
    ...own,
    parts: [own, other],
    signed: true,
    shares,
    top,
    tiles: new Map(),
    sheet: make("canvas"),
    painted: "",
  };
}

export function makeCompare() {
  const option = (value, text) => make("option", { value, textContent: text });
  $("vs").append(option("", "nothing"));
  if (otherReport && otherHeads.length) $("vs").append(option("other", `same head of ${otherReport.run.model}`));
  const list = make("optgroup", { label: "head of this model" });
  const order = [...heads].sort((a, b) => a.layer - b.layer || a.head - b.head);
  list.append(...order.map((head) => option(head.name, `${head.name} ${head.kind}`)));
  $("vs").append(list);
  $("vs").onchange = ({ target }) => update({ vs: target.value });
  $("how").onchange = ({ target }) => update({ how: target.value });
  $("compared").textContent = otherReport ? comparedSummary() : "";
}

export function drawCompare() {
  const head = openHead();
  $("vs").value = state.vs;
  $("how").value = state.how;
  $("how").hidden = !state.vs;
  $("vs-note").textContent = head && state.vs === "other" ? otherTokensText() : "";
}

// What of the other model's text differs from this one's.
function otherTokensText() {
  const { model } = otherReport.run;
  if (!samePrompt) return `${model} cut the text into other tokens: its pictures cannot be shown beside these.`;
  const [own, its] = [tokens, otherTokens].map(({ length }) => counted(length - report.prompt_tokens, "token"));
  if (!sameLength)
    return `${model} generated ${its}, and ${run.model} ${own}: pictures of other lengths cannot be shown beside these.`;
  if (sharedTokens === tokens.length) return "";
  return `${model} generated other tokens from ${sharedTokens} on: its rows and columns there are of its own tokens.`;
}

// How the two models differ as a whole.
function comparedSummary() {
  const how = sameHeads
    ? "Both have the same heads: colour, order and filter by the difference (Δ, this less the other) of any measure."
    : `It has ${otherHeads.length} heads in ${otherReport.run.layers} layers, which cannot be paired: compare distributions.`;
  return `Compared with ${otherReport.run.model}. ${how}`;
}

export const weightText = (weight) =>
  Number.isNaN(weight)
    ? "not seen"
    : viewport.look.head.close && (tokensPerCell() < viewport.look.pooled || tokensPerCell() === 1)
      ? formatExact(weight)
      : formatNumber(weight);

// The other model's own tokens of a pair, where they are not those of this one.
function otherPairText(q, k) {
  const size = tokensPerCell();
  const end = min(max(q, k) + size, tokens.length); // the last cell may have fewer tokens
  if (end <= sharedTokens) return "";
  const [query, key] = [q, k].map((n) => tokenName(n / size, size, otherTokens));
  return ` at its own tokens ${query} → ${key}`;
}

// The second weight of a pair, and the difference.
export function comparedText(q, k, first) {
  const [, second] = viewport.panels.length > 1 ? viewport.panels : viewport.panels[0].parts;
  if (!second) return [];
  const weight = valueAt(second.parts[0], q, k);
  const less = Number.isNaN(first - weight) ? "" : ` (Δ ${formatNumber(first - weight)})`;
  return [
    make(
      "span.dim",
      `${second.head.foreign ? otherReport.run.model : second.head.name} `,
      make("b", weightText(weight)),
      less,
      second.head.foreign ? otherPairText(q, k) : "",
    ),
  ];
}
