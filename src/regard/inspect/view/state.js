// What is shown. The address of the page carries it, so that a link or the back button brings it back.

const state = { head: null, colour: "", order: "layer", kind: "", pin: null, first: true, theme: null };
const listeners = [];
let address = "";

// Change what is shown, redraw, and write it into the address. Opening or closing a head is a step that "back" undoes.
function show(changes) {
  const step = "head" in changes && (changes.head === null) !== (state.head === null);
  Object.assign(state, changes);
  address = write();
  try {
    history[step ? "pushState" : "replaceState"](null, "", address || location.pathname + location.search);
  } catch {
    // inside a sandboxed frame there is no history to write; everything else works
  }
  redraw();
}

const redraw = () => listeners.forEach((draw) => draw());

function write() {
  const { head, colour, order, kind, pin, first, theme } = state;
  const words = {
    head,
    colour,
    order: order === "layer" ? "" : order,
    kind,
    theme,
    pin: pin && (pin.k === null ? `${pin.q}` : `${pin.q}-${pin.k}`),
    first: first ? "" : "hidden",
  };
  const parts = Object.entries(words)
    .filter(([, value]) => value)
    .map(([name, value]) => `${name}=${encodeURIComponent(value)}`);
  return parts.length ? `#${parts.join("&")}` : "";
}

// Read the address; what it does not know, or what this report does not have, is left out.
function read() {
  const words = new URLSearchParams(location.hash.slice(1));
  const known = (name, allowed, otherwise) => (allowed.includes(words.get(name)) ? words.get(name) : otherwise);
  const names = measures.map((measure) => measure.key);
  Object.assign(state, {
    head: byName.has(words.get("head")) ? words.get("head") : null,
    colour: known("colour", [...names, "pair"], ""),
    order: known("order", names, "layer"),
    kind: known("kind", kinds, ""),
    pin: pinned(words.get("pin")),
    first: words.get("first") !== "hidden",
    theme: known("theme", ["light", "dark"], null),
  });
}

function pinned(text) {
  const [, q, k] = /^(\d+)(?:-(\d+))?$/.exec(text ?? "") ?? [];
  const inside = (i) => i === undefined || Number(i) < tokens.length;
  return q !== undefined && inside(q) && inside(k) ? { q: Number(q), k: k === undefined ? null : Number(k) } : null;
}

const chosen = () => (state.head === null ? null : byName.get(state.head));
const passes = (head) => !state.kind || head.kind === state.kind;
const measureNamed = (key) => measures.find((measure) => measure.key === key);

// The number that a head is coloured or ordered by; null for plain pictures.
function valueOf(head, key) {
  if (key !== "pair") return key ? head[key] : null;
  const { pin } = state;
  if (!pin || pin.k === null || !head.picture) return null;
  return share(head.picture, Math.floor(pin.q / head.picture.pooled), Math.floor(pin.k / head.picture.pooled));
}
