// Numbers and tokens as text.

import { make } from "./dom.js";
import { report, tokens } from "./report.js";

const { abs, round, min } = Math;

const visible = { "\n": "↵", "\t": "⇥", "\r": "␍", " ": "·" };
export const visibleText = (token) => (token === "" ? "∅" : token.replace(/[\n\t\r]|^ | $/g, (c) => visible[c]));

export function formatNumber(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  const size = abs(x);
  if (size > 0 && size < 0.001 && digits > 2) return x > 0 ? "<0.001" : ">−0.001";
  return (x < 0 ? "−" : "") + size.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : digits);
}

export const formatExact = (x) => (x === 0 || x >= 1e-4 ? x.toPrecision(4) : x.toExponential(3));
export const formatCount = (x) => round(x).toLocaleString("en-GB").replaceAll(",", "\u202f");
export const counted = (n, thing) => `${formatCount(n)} ${thing}${n === 1 ? "" : "s"}`;

// "chance 0.031 · 0.86 to 0.91": the chance value and the interval beside a value.
export function chanceText({ chance, low, high }) {
  const parts = [chance === null ? "" : `chance ${formatNumber(chance)}`];
  if (low !== null && high !== null) parts.push(`${formatNumber(low, 2)} to ${formatNumber(high, 2)}`);
  return parts.filter(Boolean).join(" · ");
}

// "Calloway", or the first and last token of a cell of several.
export function tokenName(cell, grain, of = tokens) {
  if (grain === 1) return visibleText(of[cell] ?? "");
  const last = min(of.length, (cell + 1) * grain) - 1;
  return `${visibleText(of[cell * grain] ?? "")} … ${visibleText(of[last] ?? "")}`;
}

export function tokenIndex(cell, grain) {
  return grain === 1 ? `${cell}` : `${cell * grain}–${min(tokens.length, (cell + 1) * grain) - 1}`;
}

// A token with its position beneath; generated tokens have a colour of their own.
export const tokenLabel = (name, number, n) =>
  make(n < report.prompt_tokens ? "span.token" : "span.token.generated", name, make("sub", number));
