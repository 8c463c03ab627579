// What ran, and the definition of every score.

import { $, make } from "./dom.js";
import { counted, formatCount, formatNumber } from "./format.js";
import { errorText } from "./pair.js";
import { definitions, heads, labelOf, otherReport, report, run, tokens } from "./report.js";

const { round, max, sqrt } = Math;

const ROUNDING = 0.004; // the largest error of a weight stored as a byte

export function drawRun() {
  drawSinks();
  const generated = tokens.length - report.prompt_tokens;
  $("lead").textContent =
    `${counted(heads.length, "head")} in ${counted(run.layers, "layer")} read ${formatCount(tokens.length)} tokens: ` +
    `${formatCount(report.prompt_tokens)} of the prompt` +
    (generated ? ` and ${generated} that the model generated` : "");
  const backends = [...new Set(run.backends)].map((name) => [
    name,
    run.backends.filter((other) => other === name).length,
  ]);
  const sharing = run.kv_heads < run.heads ? `${run.heads} heads on ${run.kv_heads} key heads` : `${run.heads} heads`;
  const facts = [
    [
      "parameters",
      run.parameters >= 1e9 ? (run.parameters / 1e9).toPrecision(3) : (run.parameters / 1e6).toPrecision(4),
      run.parameters >= 1e9 ? "billion" : "million",
      `${sharing}, ${run.head_dim} wide`,
    ],
    ["prompt", formatNumber(run.tokens_per_second, 1), run.tokens_per_second === null ? "" : "tokens/s", run.machine],
    [
      "decoding",
      formatNumber(run.decode_tokens_per_second, 1),
      run.decode_tokens_per_second === null ? "" : "tokens/s",
      generated ? `${generated} tokens, one by one` : "nothing generated",
    ],
    ["attention", formatNumber(run.attention_gflop, 2), "GFLOP", `${formatCount(run.pairs)} query-key pairs`],
    [
      "backend",
      backends.map(([name]) => name).join(", "),
      "",
      `ran ${backends.length === 1 ? `all ${run.layers}` : backends.map(([, count]) => count).join(" and ")} layers`,
    ],
    [
      "differs from eager by",
      run.eager_difference === null ? "–" : run.eager_difference.toExponential(1),
      "",
      run.eager_difference === null ? "was not compared" : `largest difference of ${run.eager_output}`,
    ],
  ];
  $("run").replaceChildren(
    ...facts.map(([label, value, unit, note]) =>
      make("div", make("dt", label), make("dd", make("b", value), ` ${unit}`, make("small", note))),
    ),
  );
}

// How many heads have a sink at the first token, by both published thresholds; of two models each by name.
function drawSinks() {
  const sources = [report, ...(otherReport ? [otherReport] : [])].filter(({ sinks }) => sinks.length);
  $("sinks").title = definitions.sink_shares?.formula ?? "";
  $("sinks").replaceChildren(
    ...sources.map((source) =>
      make("span", `${sources.length > 1 ? `${source.run.model}: ` : ""}${sinkText(source)} `),
    ),
  );
}

function sinkText({ sinks }) {
  const parts = sinks.map(({ above, share, layers, value }, n) => {
    const where = [
      layers && `most of layer${/\D/.test(layers) ? "s" : ""} ${layers}`,
      value === null ? "" : `the first token's values at ${formatNumber(value, 2)} of the mean size`,
    ].filter(Boolean);
    return `${round(100 * share)} %${n ? "" : " of heads have alpha"} above ${above}${where.length ? ` (${where.join(", ")})` : ""}`;
  });
  return `Sinks: ${parts.join(", ")}.`;
}

export function drawNotes() {
  $("definitions").replaceChildren(
    ...Object.entries(definitions).flatMap(([key, { formula, unit, source, chance }]) => [
      make("dt", labelOf(key), unit ? make("small", unit) : ""),
      make("dd", formula, make("small", [chance && `Chance: ${chance}.`, source].filter(Boolean).join(" "))),
    ]),
  );
  const pooled = heads.find((head) => head.picture)?.picture.pooled ?? 1;
  $("precision").textContent =
    `The pictures store each weight w as one byte, 255·√w: no weight is off by more than ${ROUNDING}. The scores were ` +
    `measured on the full weights, not on the pictures.${pooled > 1 ? pooledText(pooled) : ""}`;
  $("close-up-summary").textContent = closeUpText();
  $("remarks").replaceChildren(...(run.notes ?? []).map((note) => make("p", note)));
  const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`);
  const times = Object.entries(run.seconds).map(([name, seconds]) => `${name} ${formatNumber(seconds, 1)} s`);
  $("made").textContent = [run.model, run.machine, ...versions, ...times].join(" · ");
}

// A share is the mean of a cell times its keys: its error is at most ROUNDING · √keys, for it is itself at most 1.
function pooledText(pooled) {
  return (
    ` The text is long: a cell holds the mean over ${pooled} × ${pooled} tokens, and what is shown is the share ` +
    `of a query's attention that goes to all the keys of the cell: no share is off by more than ` +
    `${formatNumber(ROUNDING * sqrt(pooled))}.`
  );
}

// Which heads have close-ups, and how many close-ups and pictures did not fit into the page.
function closeUpText() {
  const { close_ups: dropped, largest } = report.left_out;
  const names = report.close_ups.map(({ head }) => head);
  const those = names.length > 8 ? `${names.slice(0, 8).join(", ")} …` : names.join(", ");
  const worst = { error: max(...report.close_ups.map(({ error }) => error)) };
  const close = names.length
    ? `Single weights can be seen of ${names.length} of ${heads.length} heads (${those}), computed from their ` +
      `queries and keys in 16 bits, ${errorText(worst)}.`
    : "";
  const left = dropped.length ? `The close-ups of ${dropped.length} more heads did not fit into this page.` : "";
  const without = largest ? "Pictures of the greatest weights did not fit into this page." : "";
  return [close, left, without].filter(Boolean).join(" ");
}
