// Builds the page: selects and filters, keys, light and dark, and the order in which everything is drawn.

import { kindColour, theme } from "./colour.js";
import { drawCompare, makeCompare } from "./compare.js";
import { drawDistributions, makeDistributions } from "./distributions.js";
import { $, make, makeButton, on } from "./dom.js";
import { drawMatrix, makeMatrix } from "./matrix.js";
import { drawNotes, drawRun } from "./notes.js";
import { cells, drawMap, hasBounds, makeMap, moveTo, showReadout } from "./overview.js";
import { setCross } from "./pair.js";
import { progress, unpack } from "./pictures.js";
import { heads, kinds, measures } from "./report.js";
import { drawScores } from "./scores.js";
import { listeners, passesFilter, readAddress, redraw, state, update } from "./state.js";
import { drawTable, makeTable } from "./table.js";
import { drawText, makeText, unpin } from "./text.js";
import { viewport } from "./viewport.js";

function makeControls() {
  const option = (value, text) => make("option", { value, textContent: text });
  const choices = measures.map(({ key, label }) => option(key, label));
  const copies = () => choices.map((node) => node.cloneNode(true));
  $("colour").append(option("", "patterns alone"), ...choices, option("pair", "pinned pair"));
  $("order").append(option("layer", "layer"), ...copies());
  $("where").append(option("", "any score"), ...copies());
  $("colour").onchange = (event) => update({ colour: event.target.value });
  $("order").onchange = (event) => update({ order: event.target.value });
  $("where").onchange = (event) => update({ where: event.target.value, least: "", most: "" });
  for (const bound of ["least", "most"]) $(bound).oninput = ({ target }) => update({ [bound]: target.value });
  const chip = (kind, text, count) => {
    const node = makeButton(text, () => update({ kind: state.kind === kind ? "" : kind }));
    node.className = "chip";
    node.append(make("small", count));
    node.dataset.kind = kind;
    if (kind) node.style.setProperty("--kind", kindColour(kind));
    return node;
  };
  $("kinds").append(
    chip("", "all", heads.length),
    ...kinds.map((kind) => chip(kind, kind, heads.filter((head) => head.kind === kind).length)),
  );
  $("theme").onclick = () => update({ theme: theme() === "dark" ? "light" : "dark" });
  // The address stores the view; in a frame of a notebook, "#notes" would load the notebook.
  $("to-notes").onclick = (event) => (event.preventDefault(), $("notes").scrollIntoView());
}

function drawControls() {
  $("colour").value = state.colour;
  $("colour").lastChild.disabled = state.pin === null || state.pin.k === null;
  $("order").value = state.order;
  $("where").value = state.where;
  $("bounds").hidden = !state.where;
  for (const bound of ["least", "most"]) if (document.activeElement !== $(bound)) $(bound).value = state[bound];
  $("let-through").textContent = hasBounds() ? `${heads.filter(passesFilter).length} of ${heads.length}` : "";
  for (const chip of $("kinds").children) chip.ariaPressed = chip.dataset.kind === state.kind;
}

const darkQuery = matchMedia("(prefers-color-scheme: dark)");

function drawTheme() {
  const now = state.theme ?? (darkQuery.matches ? "dark" : "light");
  document.documentElement.dataset.theme = now;
  $("theme").textContent = now === "dark" ? "Light" : "Dark";
}

// Arrow keys belong to the heads, except where something else that has the focus uses them.
function handlePageKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return cancelOne();
  if (event.target.closest?.("select, input, .scroll, #text, #matrix, #spread")) return;
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  moveTo(...step);
}

// Esc clears one thing at a time: the cross, the pinned token, the second head, the open head.
function cancelOne() {
  if (viewport.cross) return setCross(null);
  if (state.pin) return unpin();
  if (state.vs) return update({ vs: "" });
  if (state.head === null) return;
  const last = state.head;
  update({ head: null });
  cells.get(last).button.focus();
}

// Draw the pictures of heads first, as they are unpacked, then the parts that take longer to lay out.
async function start() {
  readAddress();
  makeControls();
  makeCompare();
  makeMap();
  makeMatrix();
  drawRun();
  listeners.push(drawTheme, drawControls, drawMap, drawMatrix, drawCompare, drawScores);
  redraw();
  showReadout(null);
  on(darkQuery, "change", redraw);
  on(window, "popstate", () => (readAddress(), redraw()));
  on(window, "keydown", handlePageKey);
  try {
    await unpack(state.head, pictureArrived);
  } catch (error) {
    $("alert").hidden = false;
    $("alert").textContent =
      `The pictures cannot be unpacked here (${error.message}); the table below is complete. ` +
      "A browser of 2023 or later shows them.";
  }
  progress.complete = true;
  performance.mark("all-pictures");
  if (pageFinished) redraw();
  else finishPage(); // what is a mean over heads needs all of them
  document.documentElement.dataset.ready = "true";
}

let pageFinished = false;

function finishPage() {
  if (pageFinished) return;
  pageFinished = true;
  makeText();
  makeDistributions();
  makeTable();
  listeners.push(drawText, drawDistributions, drawTable);
  redraw();
  drawNotes();
}

function pictureArrived(some) {
  drawMap();
  if (some.some((head) => head.name === state.head)) redraw();
  if (performance.getEntriesByName("first-picture").length) return;
  performance.mark("first-picture");
  setTimeout(finishPage, 30); // after the pictures are on the screen
}

start();
