// The scores of one head, each on a bar with its chance value and interval; attention by distance.

import { comparedHead } from "./compare.js";
import { $, make } from "./dom.js";
import { chanceText, formatCount, formatNumber } from "./format.js";
import { mainMeasures } from "./overview.js";
import { seesAll } from "./pictures.js";
import {
  causal,
  definitions,
  heads,
  measures,
  otherByName,
  rangeOf,
  report,
  sameHeads,
  scoreOf,
  tokens,
  valueOf,
} from "./report.js";
import { openHead, state } from "./state.js";
import { viewport } from "./viewport.js";

const { max, min, floor, log2, abs, round } = Math;

export function drawScores() {
  const head = openHead();
  if (!head) return;
  const [second] = comparedHead(head);
  const against = second ?? (sameHeads && state.vs === "other" ? otherByName.get(head.name) : null);
  const all = measures.filter(({ key, of }) => !of && head.scores[key]),
    few = mainMeasures().filter((measure) => all.includes(measure));
  const rows = (some) => some.flatMap((measure) => scoreRow(head, measure, against));
  const heading = against
    ? [make("dt"), make("dd", ...columnNames(head, against).map((name) => make("b", name)), make("small"))]
    : [];
  $("scores").replaceChildren(...heading, ...rows(few));
  $("more-scores").replaceChildren(...rows(all.filter((measure) => !few.includes(measure))));
  $("more").hidden = all.length === few.length;
  const others = heads.filter(
    (other) => other.layer === head.layer && other.kv_head === head.kv_head && other !== head,
  );
  const names = others.map((other) => other.head).sort((a, b) => a - b);
  $("sharing").textContent = names.length
    ? `Shares key head ${head.kv_head} with head${names.length > 1 ? "s" : ""} ${names.join(", ")}.`
    : "";
  $("ablated").textContent = ablationText();
  if (head.picture?.mean && viewport.look) drawDistance();
}

const columnNames = (...two) => (two[1].foreign ? ["this", "other"] : two.map((head) => head.name));

function ablationText() {
  const { ablations } = report;
  if (!ablations) return "";
  const { how, loss, tokens: predicted, caveat } = ablations;
  const text = `Without the head (${how === "mean" ? "its mean" : how} in its place) the loss of ${formatNumber(loss)} nats`;
  return `${text} over ${formatCount(predicted)} tokens changes by delta loss. ${caveat}`;
}

function scoreRow(head, { key, label }, against) {
  const { value, chance, low, high } = scoreOf(head, key);
  const [least, top] = rangeOf(key);
  const place = (x) => `${100 * max(0, min(1, (x - least) / (top - least)))}%`;
  const bar = make("span.gauge", { ariaHidden: "true" }, make("i"));
  bar.firstChild.style.left = place(min(0, value));
  bar.firstChild.style.right = `calc(100% - ${place(max(0, value))})`;
  if (low !== null && high !== null) {
    const range = make("s");
    range.style.left = place(low);
    range.style.right = `calc(100% - ${place(high)})`;
    bar.append(range);
  }
  if (chance !== null) {
    const tick = make("u");
    tick.style.left = place(chance);
    bar.append(tick);
  }
  const name = make("dt", label, make("small", chanceText({ chance, low, high })), {
    title: definitions[key]?.formula ?? "",
  });
  if (!against) return [name, make("dd", bar, make("b", formatNumber(value)))];
  const other = valueOf(against, key);
  const less = value === null || other === null ? "" : `Δ ${formatNumber(value - other)}`;
  return [name, make("dd", bar, make("b", formatNumber(value)), make("b", formatNumber(other)), make("small", less))];
}

const distanceBin = (distance) => (distance === 0 ? 0 : 1 + floor(log2(distance)));

// Uniform attention by distance, in bins 0, 1, 2-3, 4-7, ...: the mean over rows of the share of keys in a bin.
function evenDistances() {
  const bins = [],
    n = tokens.length;
  for (let distance = 0; distance < n; distance++) {
    const bin = distanceBin(distance);
    let sum = causal ? 0 : (distance ? 2 : 1) * ((n - distance) / n);
    if (causal) sum = harmonic(n) - harmonic(distance); // rows i >= distance see i + 1 keys
    bins[bin] = (bins[bin] ?? 0) + sum / n;
  }
  return bins;
}

const harmonicSums = [0];
function harmonic(n) {
  for (let i = harmonicSums.length; i <= n; i++) harmonicSums.push(harmonicSums[i - 1] + 1 / i);
  return harmonicSums[n];
}

// Attention by distance: measured on the full weights, or else on the picture.
function distancesOf(head) {
  if (head.distances) return [...head.distances];
  const bins = [],
    { size, pooled, means } = viewport.look;
  for (let i = 0; i < size; i++)
    for (let j = 0; j < size; j++) {
      const bin = distanceBin(abs(i - j) * pooled);
      if (!Number.isNaN(means[i * size + j])) bins[bin] = (bins[bin] ?? 0) + means[i * size + j] / size;
    }
  return bins;
}

function drawDistance() {
  const head = openHead(),
    found = distancesOf(head),
    even = seesAll(head) ? evenDistances() : [];
  const bins = [...Array(max(found.length, even.length)).keys()].filter((bin) => bin in found || even[bin]);
  const top = max(...bins.flatMap((bin) => [found[bin] ?? 0, even[bin] ?? 0]));
  const from = (bin) => (bin === 0 ? 0 : 2 ** (bin - 1)),
    name = (bin) => (bin > 10 ? `${from(bin) / 1024}k` : from(bin));
  const percent = (bin) => round(100 * (found[bin] ?? 0));
  const high = (x) => `${(100 * (x ?? 0)) / top}%`;
  const bars = bins.map((bin) => {
    const label = make("b", percent(bin) || "");
    const column = make("span.column", make("i"), make("u", { hidden: !even[bin] }), label, make("small", name(bin)));
    column.children[0].style.height = high(found[bin]);
    column.children[1].style.bottom = high(even[bin]);
    label.style.bottom = high(max(found[bin] ?? 0, even[bin] ?? 0));
    return column;
  });
  const line = even.length ? "; the line is uniform attention" : "";
  const note = make(
    "figcaption",
    `% of attention, by tokens ${causal ? "back" : "away"} (2 = 2 to 3, 4 = 4 to 7 …)${line}`,
  );
  $("distance").replaceChildren(make("div.columns-chart", ...bars), note);
  const texts = bins.map((bin) => `${from(bin)} tokens ${causal ? "back" : "away"}: ${percent(bin)} percent`);
  $("distance").setAttribute("aria-label", texts.join("; "));
}
