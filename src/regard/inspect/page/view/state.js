// What is shown. The address of the page carries it, so that a link or the back button restores it.

import { share } from "./pictures.js";
import { byName, kinds, measures, otherReport, run, tokens, valueOf } from "./report.js";
import { weightsOf } from "./weights.js";

const { floor } = Math;

const defaults = {
  ...{ head: null, colour: "", order: "layer", kind: "", where: "", least: "", most: "", pin: null, first: true },
  ...{ by: "mean", vs: "", how: "", at: "", theme: null },
};
export const state = { ...defaults };
export const listeners = [];
let address = "";

// Change what is shown, redraw, and write it into the address. Opening or closing a head is a step that "back" undoes.
export function update(changes) {
  const step = "head" in changes && (changes.head === null) !== (state.head === null);
  Object.assign(state, changes);
  saveAddress(step);
  redraw();
}

export function saveAddress(step = false) {
  address = addressText();
  try {
    history[step ? "pushState" : "replaceState"](null, "", address || location.pathname + location.search);
  } catch {
    // inside a sandboxed frame there is no history to write; everything else works
  }
}

export const redraw = () => listeners.forEach((draw) => draw());

function addressText() {
  const { pin, first, head } = state;
  const fields = {
    ...state,
    pin: pin && (pin.k === null ? `${pin.q}` : `${pin.q}-${pin.k}`),
    first: first ? "" : "hidden",
    at: head === null ? "" : state.at,
  };
  const parts = Object.entries(fields)
    .filter(([name, value]) => value && value !== defaults[name])
    .map(([name, value]) => `${name}=${encodeURIComponent(value)}`);
  return parts.length ? `#${parts.join("&")}` : "";
}

// Read the address; unknown keys, and values that this report does not have, are ignored.
export function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const known = (name, allowed) => (allowed.includes(fields.get(name)) ? fields.get(name) : defaults[name]);
  const number = (name) => (fields.get(name) && Number.isFinite(Number(fields.get(name))) ? fields.get(name) : "");
  const names = measures.map((measure) => measure.key);
  Object.assign(state, {
    head: byName.has(fields.get("head")) ? fields.get("head") : null,
    colour: known("colour", [...names, "pair"]),
    order: known("order", names),
    kind: known("kind", kinds),
    where: known("where", names),
    least: number("least"),
    most: number("most"),
    pin: parsePin(fields.get("pin")),
    first: fields.get("first") !== "hidden",
    by: known("by", ["max"]),
    vs: byName.has(fields.get("vs")) ? fields.get("vs") : known("vs", otherReport ? ["other"] : []),
    how: known("how", ["difference"]),
    at: /^\d+-\d+-\d+$/.test(fields.get("at") ?? "") ? fields.get("at") : "",
    theme: known("theme", ["light", "dark"]),
  });
}

function parsePin(text) {
  const [, q, k] = /^(\d+)(?:-(\d+))?$/.exec(text ?? "") ?? [];
  const inside = (i) => i === undefined || Number(i) < tokens.length;
  return q !== undefined && inside(q) && inside(k) ? { q: Number(q), k: k === undefined ? null : Number(k) } : null;
}

export const openHead = () => (state.head === null ? null : byName.get(state.head));

// Whether a head passes the filters: its kind, and a measure between two bounds, each of which is optional.
export function passesFilter(head) {
  const { kind, where, least, most } = state;
  if (kind && head.kind !== kind) return false;
  if (!where || (least === "" && most === "")) return true;
  const value = valueOf(head, where);
  return value !== null && (least === "" || value >= Number(least)) && (most === "" || value <= Number(most));
}

// The number that a head is coloured or ordered by; null for plain pictures.
export function valueFor(head, key) {
  if (key !== "pair") return key ? valueOf(head, key) : null;
  const { pin } = state;
  if (!pin || pin.k === null || !head.picture?.mean) return null;
  const { pooled } = head.picture;
  if (head.close) return weightsOf(head.close, pin.q, pin.k, pin.k + 1, new Float64Array(1))[0] || 0;
  return share(head.picture, floor(pin.q / pooled), floor(pin.k / pooled));
}

export const headName = (head) =>
  state.vs === "other" || head.foreign ? `${head.name} ${head.foreign ? otherReport.run.model : run.model}` : head.name;
