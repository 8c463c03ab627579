// How a measure is distributed over the heads: a strip for each measure, a dot for each head, its layer from top to
// bottom. The line is chance. The heads of the other model are below. A click opens the nearest head.

import { colour, cssColour, kindColour } from "./colour.js";
import { $, make, on, stopEvent } from "./dom.js";
import { chanceText, formatNumber } from "./format.js";
import { mainMeasures } from "./overview.js";
import { heads, measures, otherHeads, otherReport, rangeOf, sameHeads, scoreOf, valueOf } from "./report.js";
import { headName, openHead, passesFilter, state, update } from "./state.js";

const { round, max, min, hypot } = Math;

const strips = []; // { measure, canvas, dots: { head, x, y } }

export function makeDistributions() {
  for (const measure of measures) {
    const canvas = make("canvas", { tabIndex: 0 });
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", stripLabel(measure));
    const readout = make("small");
    const box = make("figure.strip", make("figcaption", make("b", measure.label), readout), canvas);
    const entry = { measure, canvas, readout, dots: [], at: null };
    on(canvas, "pointermove", (event) => selectDot(entry, nearestDot(entry, event)));
    on(canvas, "pointerleave", () => selectDot(entry, null));
    on(canvas, "click", (event) => openDotHead(nearestDot(entry, event)));
    on(canvas, "keydown", (event) => stepDots(entry, event));
    strips.push(entry);
    $("spread").append(box);
  }
  $("spread-more").onclick = () => ($("spread").classList.toggle("all"), drawDistributions());
  $("spread-more").hidden = measures.length <= 8;
  $("spread-of").textContent =
    "a dot is a head, its layer from top to bottom; the line is chance" +
    (otherReport ? `; grey, below: ${otherReport.run.model}` : "");
  new ResizeObserver(drawDistributions).observe($("spread"));
}

const headsWith = (list, key) => list.filter((head) => valueOf(head, key) !== null);

function stripLabel({ key, label }) {
  const order = headsWith(heads, key).sort((a, b) => valueOf(a, key) - valueOf(b, key));
  if (!order.length) return `${label}: no head has it`;
  const at = (part) => order[round(part * (order.length - 1))];
  const parts = [
    ["lowest", 0],
    ["median", 0.5],
    ["highest", 1],
  ].map(([name, part]) => `${name} ${formatNumber(valueOf(at(part), key))}`);
  const { chance } = scoreOf(at(1), key);
  const even = chance === null ? "" : `, chance ${formatNumber(chance)}`;
  return `${label} of ${order.length} heads: ${parts.join(", ")} (head ${at(1).name})${even}. Arrows move, Enter opens.`;
}

export function drawDistributions() {
  const all = $("spread").classList.contains("all");
  $("spread-more").textContent = all ? "fewer" : `all ${measures.length} measures`;
  const first = new Set([...mainMeasures(), ...measures].slice(0, 8));
  for (const entry of strips) {
    entry.canvas.parentNode.hidden = !all && !first.has(entry.measure);
    if (!entry.canvas.parentNode.hidden) drawStrip(entry);
  }
}

function drawStrip(entry) {
  const { canvas, measure } = entry,
    { key } = measure;
  const wide = canvas.parentNode.clientWidth,
    each = otherHeads.length && !measure.of ? 46 : 72,
    high = each * (otherHeads.length && !measure.of ? 2 : 1) + 16,
    ratio = devicePixelRatio || 1;
  if (!wide) return;
  canvas.width = round(wide * ratio);
  canvas.height = round(high * ratio);
  canvas.style.height = `${high}px`;
  const ink = canvas.getContext("2d");
  ink.setTransform(ratio, 0, 0, ratio, 0, 0);
  const [least, top] = rangeOf(key);
  const across = (value) => 6 + ((value - least) / (top - least || 1)) * (wide - 12);
  const groups = otherHeads.length && !measure.of ? [heads, otherHeads] : [heads];
  entry.dots = groups.flatMap((group, n) => dotsOf(group, key, across, n * each, each));
  const axis = { least, top, across, wide, base: high - 14 };
  drawAxis(ink, axis);
  drawChance(ink, key, axis);
  for (const dot of entry.dots) drawDot(ink, dot);
  for (const dot of entry.dots.filter(({ head }) => !head.foreign && head.name === state.head))
    ringDot(ink, dot, "incoming-line");
  if (entry.at) ringDot(ink, entry.at, "ink");
}

function dotsOf(group, key, across, from, room) {
  const order = [...new Set(group.map((head) => head.layer))].sort((a, b) => a - b);
  const row = new Map(order.map((layer, n) => [layer, n]));
  const step = (room - 10) / max(1, order.length - 1);
  return headsWith(group, key).map((head) => ({
    head,
    x: across(valueOf(head, key)),
    y: from + 5 + (order.length > 1 ? row.get(head.layer) * step : (room - 10) / 2),
  }));
}

function drawAxis(ink, { least, top, across, wide, base }) {
  ink.fillStyle = colour("line");
  ink.fillRect(0, base, wide, 1);
  if (least < 0) ink.fillRect(across(0), 0, 1, base);
  ink.fillStyle = colour("dim");
  ink.font = `10px ${getComputedStyle(document.body).fontFamily}`;
  ink.textBaseline = "top";
  ink.textAlign = "left";
  ink.fillText(formatNumber(least, 2).replace(/\.?0+$/, ""), 0, base + 3);
  ink.textAlign = "right";
  ink.fillText(formatNumber(top, 2), wide, base + 3);
}

// Chance is a line where it is the same for all heads, as good as; a band where it is not.
function drawChance(ink, key, { across, wide, base }) {
  const chances = heads.map((head) => scoreOf(head, key).chance).filter((chance) => chance !== null);
  if (!chances.length) return;
  const [from, to] = [min(...chances), max(...chances)].map(across);
  ink.fillStyle = colour("ink");
  if (from > wide) return ink.fillText(`chance ${formatNumber(chances[0])} →`, wide - 4, 4);
  ink.globalAlpha = to - from > 2 ? 0.25 : 1;
  ink.fillRect(from - 0.75, 0, max(1.5, to - from), base);
  ink.globalAlpha = 1;
}

function drawDot(ink, { head, x, y }) {
  ink.globalAlpha = passesFilter(head) ? 0.85 : 0.12;
  ink.fillStyle = head.foreign ? colour("bars") : cssColour(kindColour(head.kind));
  ink.beginPath();
  ink.arc(x, y, 2.2, 0, 2 * Math.PI);
  ink.fill();
  ink.globalAlpha = 1;
}

function ringDot(ink, { x, y }, name) {
  ink.beginPath();
  ink.lineWidth = 2;
  ink.strokeStyle = colour(name);
  ink.arc(x, y, 5, 0, 2 * Math.PI);
  ink.stroke();
}

// ---- picking --------------------------------------------------------------------------------------------------------

function nearestDot({ canvas, dots }, { clientX, clientY }) {
  const box = canvas.getBoundingClientRect();
  const far = (dot) => hypot(dot.x - clientX + box.left, dot.y - clientY + box.top);
  const dot = dots.filter(({ head }) => passesFilter(head)).reduce((a, b) => (a && far(a) <= far(b) ? a : b), null);
  return dot && far(dot) < 24 ? dot : null;
}

function selectDot(entry, dot) {
  if (entry.at === dot) return;
  entry.at = dot;
  const { key } = entry.measure;
  entry.readout.textContent = dot
    ? `${headName(dot.head)} ${formatNumber(valueOf(dot.head, key))} ${chanceText(scoreOf(dot.head, key))}`
    : "";
  drawStrip(entry);
}

const openDotHead = (dot) =>
  dot && update(dot.head.foreign ? (sameHeads ? { head: dot.head.name, vs: "other" } : {}) : { head: dot.head.name });

function stepDots(entry, event) {
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (event.key === "Enter") openDotHead(entry.at);
  else if (step === undefined) return;
  else {
    const order = entry.dots.filter(({ head }) => !head.foreign && passesFilter(head)).sort((a, b) => a.x - b.x);
    const at = order.findIndex(({ head }) => head === (entry.at?.head ?? openHead()));
    selectDot(entry, order[max(0, min(order.length - 1, at + step))] ?? null);
    $("announcement").textContent = entry.readout.textContent;
  }
  stopEvent(event);
}
